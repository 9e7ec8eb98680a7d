"""Add items to an index: what is there already and has not changed is passed over, so that the same call goes on where one stopped."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from retrieval.errors import DataError, at_least_one, listed
from retrieval.host.cores import cores
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.places import StrPath
from retrieval.serving.images import Limits, thumbnail
from retrieval.serving.index.embedded import Vectors
from retrieval.serving.index.encoding import Done, Encoding
from retrieval.serving.index.locations import is_embedding
from retrieval.serving.index.origins import Origin, Source, Sources
from retrieval.serving.index.sources import collect, contents
from retrieval.serving.progress import Progress, showing
from retrieval.serving.store.contract import CODE, FEATURES, VECTOR, Floats, Item, Keep, Superseded

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index

_PAGE = 1000
_ROWS = 4096
_BYTES = 64_000_000
_SECONDS = 1.0
"""What was encoded is written after so many items, so many bytes of kept originals, or so long: a kill costs no more."""
_TRIES = 5


@dataclass(frozen=True)
class Added:
    """What adding did.

    Attributes:
        added: items that are new.
        changed: items that took another's place, or got another label or metadata.
        unchanged: items that were there already.
        removed: items that are in the index no more, with `sync`.
        skipped: why an item could not be used, a sentence each.
        repeated: files that were named more than once and taken once.
        left_out: a sentence on the files of folders that are not images, for each reason.
        seconds: how long it took.
    """

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    skipped: tuple[str, ...] = ()
    repeated: int = 0
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0


def add_sources(
    index: Index,
    sources: StrPath | Sequence[StrPath],
    *,
    keep: Keep = "reference",
    sync: bool = False,
    skip_bad: bool = False,
    batch: int = 32,
    workers: int | None = None,
    limits: Limits | None = None,
    progress: Progress = True,
    whole: bool = False,
) -> Added:
    """Embed what sources name and add it; see `Index.add`. With `whole`, an image that cannot be used ends it: nothing is kept then."""
    began = time.monotonic()
    batch = at_least_one("batch", batch)
    named = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    with showing(progress):
        found, vectors = _found(index, named, keep)
        total = Added(repeated=found.repeated, left_out=found.left_out)
        for attempt in range(_TRIES):
            work, there = _changes(index, found)
            sink = _Sink(index, index.bundle, keep, work.items, whole)
            encoding = vectors or Encoding(
                index.bundle,
                work,
                batch,
                workers or cores(),
                limits or Limits(),
                skip_bad or not whole,
                _KEPT.get(keep),
                FEATURES in index.generation.widths,
            )
            try:
                sink.fill(encoding)
                break
            except Superseded:  # another generation is served since: what is left is embedded for that
                if attempt == _TRIES - 1:
                    raise
                index.follow()
                vectors = vectors and Vectors.of(named, index, keep)
            finally:
                total = replace(total, added=total.added + sink.added, changed=total.changed + sink.changed)
        changed, unchanged = _relabel(index, there)
        removed = _remove_others(index, {item.key for item in found.items}) if sync and not sink.faults else 0
    if sink.faults and not skip_bad:
        raise DataError(
            listed(f"{len(sink.faults):,} of {len(found.items):,} items cannot be used", sink.faults)
            + "\nAll others are in the index. Mend or remove these, or leave them out with --skip-bad (in Python skip_bad=True)."
            + (" Nothing was removed." if sync else "")
        )
    return replace(
        total,
        changed=total.changed + changed,
        unchanged=unchanged,
        removed=removed,
        skipped=tuple(sink.faults),
        seconds=time.monotonic() - began,
    )


def _found(index: Index, named: Sequence[StrPath], keep: Keep) -> tuple[Sources, Vectors | None]:
    """Return what the sources name, and its vectors where they come with it."""
    vectors = Vectors.of(named, index, keep) if any(map(is_embedding, named)) else None
    found = vectors.sources if vectors else collect(named, index.bundle.manifest.input.kind)
    refuse_twice(found)
    return found, vectors


def refuse_twice(found: Sources) -> None:
    """Refuse two items of one id.

    Raises:
        DataError: naming every such id.
    """
    counts = Counter(item.key for item in found.items)
    if twice := [f"{key!r} is the id of {count} items." for key, count in counts.items() if count > 1]:
        raise DataError(
            listed("What is to be added", twice)
            + "\nGive each its own in a CSV manifest's column 'key', or add the folders one by one."
        )


def _changes(index: Index, found: Sources) -> tuple[Sources, list[Source]]:
    """Return what is to be embedded, and what is there already.

    What a migration left out of the served generation has no vector, and is embedded whether its file has changed or not. The first
    generation has left nothing out, so that there vectors need not be read to know.
    """
    arrays = index.generation.number > 1
    new: list[Source] = []
    same: list[Source] = []
    for start in range(0, len(found.items), _PAGE):
        page = found.items[start : start + _PAGE]
        there = index.store.get([item.key for item in page], arrays=arrays)
        for item in page:
            known = there.get(item.key)
            whole = known is not None and (not arrays or known.arrays)
            (same if whole and known and known.stamp == item.stamp() else new).append(item)
    return replace(found, items=new), same


def _relabel(index: Index, same: Sequence[Source]) -> tuple[int, int]:
    """Give items whose files have not changed their new labels, metadata and paths.

    Returns:
        How many items changed, and how many are as they were.
    """
    changed = 0
    for start in range(0, len(same), _PAGE):
        page = {item.key: item for item in same[start : start + _PAGE]}
        there = index.store.get(page)
        other = [
            key
            for key, known in there.items()
            if (known.label, dict(known.metadata)) != (page[key].label, page[key].metadata)
            or known.path != _path(page[key], known)
        ]
        if other:
            whole = index.store.get(other, arrays=True)
            items = [
                replace(
                    item,
                    label=page[key].label,
                    metadata=page[key].metadata,
                    path=_path(page[key], item),
                    original=index.store.original(key),
                )
                for key, item in whole.items()
            ]
            changed += len(items)
            index.store.upsert(items, index.bundle.sha256)
    return changed, len(same) - changed


def _path(source: Source, known: Item) -> Path | None:
    """Return the path of an item that the index has already: its file may have moved."""
    return None if known.path is None or source.row is not None else source.path


def _remove_others(index: Index, wanted: set[str]) -> int:
    """Delete items that are not wanted."""
    removed, after = 0, None
    while page := index.store.scan(after=after, limit=_PAGE):
        after = page[-1].id
        if other := [item.id for item in page if item.id not in wanted]:
            removed += index.store.delete(other)
    return removed


@dataclass
class _Sink:
    """Takes what was encoded, and writes it to the index every second or so."""

    index: Index
    bundle: Bundle
    keep: Keep
    items: Sequence[Source]
    whole: bool = False
    faults: list[str] = field(default_factory=list)
    added: int = 0
    changed: int = 0
    _at: int = 0
    _waiting: list[Item] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)

    def fill(self, encoding: Encoding | Vectors) -> None:
        """Encode all items; interrupted, what was encoded is written."""
        try:
            if self.items:
                encoding.encode(self)
        except KeyboardInterrupt:
            self.sync()
            raise
        except DataError:
            if self.whole or len(self.faults) < len(self.items):
                raise

    def append(self, entries: Sequence[Done], arrays: dict[str, NDArray[np.float32]]) -> None:
        """Take entries in the order of the items, and the arrays of those without a fault."""
        rows = iter(zip(*arrays.values(), strict=True))
        names = [{"vectors": VECTOR, "codes": CODE, "features": FEATURES}[name] for name in arrays]
        for entry in entries:
            source = self.items[self._at]
            self._at += 1
            if entry.fault is not None:
                self.faults.append(entry.fault)
                continue
            self._waiting.append(self._item(source, entry, dict(zip(names, next(rows), strict=True))))
        if len(self._waiting) >= _ROWS or self._heavy() or time.monotonic() - self._since > _SECONDS:
            self.sync()

    def sync(self) -> None:
        """Write what is waiting."""
        if self._waiting:
            changed = self.index.store.upsert(self._waiting, self.bundle.sha256)
            self.changed += changed
            self.added += len(self._waiting) - changed
            self._waiting = []
        self._since = time.monotonic()

    def _heavy(self) -> bool:
        return sum(len(item.original or b"") for item in self._waiting) > _BYTES

    def _item(self, source: Source, entry: Done, arrays: dict[str, Floats]) -> Item:
        place = self.keep != "nothing" and source.row is None
        path = source.path if place else None
        return Item(
            source.key,
            source.label,
            source.metadata,
            path,
            entry.stamp,
            self.keep,
            entry.original,
            entry.bytes,
            entry.width,
            entry.height,
            arrays,
            source.origin.address if place and source.origin else None,
        )


def _copy(content: bytes, _: Image.Image) -> bytes:
    return content


_KEPT: dict[str, Callable[[bytes, Image.Image], bytes]] = {
    "copy": _copy,
    "thumbnail": lambda _, image: thumbnail(image),
}


def originals(
    index: Index, items: Sequence[Item], most: int
) -> Iterator[tuple[Item, Path | bytes | Origin | DataError | None]]:
    """Give the original of each item, of `most` bytes: kept bytes, a file, an address, or why there is none.

    What is neither kept nor a file of its own is read where it was found, if that has not changed since.
    """

    def origin(item: Item) -> Origin | None:
        return (
            None if item.source is None or item.keep == "copy" else Origin.recorded(item.source, item.stamp)
        )

    for item, content in contents(((item, origin(item)) for item in items), most):
        if content is not None:
            yield item, content
        elif (whole := origin(item)) is not None:
            yield item, whole
        elif item.keep == "copy":
            yield item, index.store.original(item.id)
        else:
            yield item, item.path if item.path is not None and item.path.is_file() else None
