"""Add items to an index: decode, encode, write.

Items that are unchanged since an earlier call are skipped, so repeating an interrupted call resumes
it. Migrations and the command `retrieval embed` also use the function `embed`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from retrieval.base.arrays import Array, Floats32
from retrieval.base.folder_kinds import StrPath
from retrieval.base.machine import ahead, cores
from retrieval.base.photo_files import address_of, path_text
from retrieval.base.progress import Meter
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import DataError, listed
from retrieval.images.decoding import Limits, decode, full_size, read_image
from retrieval.images.preprocessing import as_list, from_pixels, thumbnail, to_png
from retrieval.index.read_embeddings import Vectors
from retrieval.index.sources import (
    Batch,
    Original,
    Source,
    SourceColumns,
    Sources,
    collect,
    digest_of,
    digests_of,
    is_embedding,
    label_text,
    originals,
    paths_of,
    rows_at,
    state_of,
)
from retrieval.store.address import IndexPlace
from retrieval.store.contract import BASE, CODE, FEATURES, VECTOR, Item, Keep, Superseded
from retrieval.store.filters import metadata_texts
from retrieval.store.items import ItemColumns, checked

if TYPE_CHECKING:
    from retrieval.index.index import Index

_ITEMS_PER_READ = 1000
_ROWS_PER_READ = 512
_REQUESTS = 16  # photos to fetch at once from a storage, which takes about 30 ms for each
# Encoded items are written when there are this many, when their arrays and originals have this many
# bytes, or when this many seconds have passed. So a killed process loses little work.
_ROWS = 16_384
_BYTES = 64_000_000
_SECONDS = 1.0
_MAX_ATTEMPTS = 5
_MAX_LISTED = 10  # faults listed in an error message


def short_repr(result: Any) -> str:
    """Return a `repr` of a dataclass without its empty fields, and with floats in four digits."""
    texts = [
        f"{name}={f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in vars(result).items()
        if value not in (None, ())
    ]
    return f"{type(result).__name__}({', '.join(texts)})"


@dataclass(frozen=True)
class Added:
    """Result of adding items.

    Attributes:
        added: number of new items.
        changed: number of items whose content, label or metadata was replaced.
        unchanged: number of items that were already in the index.
        removed: number of items that `sync` deleted.
        skipped: one sentence per item that could not be used.
        repeated: number of repeated items in the sources: the same file, and no other id.
        left_out: one sentence per reason why files or columns were left out.
        seconds: duration in seconds.
    """

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    skipped: tuple[str, ...] = ()
    repeated: int = 0
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0

    __repr__ = short_repr


@dataclass(frozen=True)
class Summary:
    """Result of creating an index.

    Attributes:
        path: folder or address of the index.
        count: number of items in the index.
        skipped: one sentence per image that could not be used.
        repeated: number of repeated items in the sources: the same file, and no other id.
        resumed: number of items added by an earlier, interrupted run.
        backend: name of the back end; at an address, name of the store.
        recall_at_10: measured recall of the back end. `None` if its search is exact.
        seconds: duration in seconds.
        left_out: one sentence per reason why files or columns were left out.
    """

    path: IndexPlace
    count: int
    skipped: tuple[str, ...]
    repeated: int
    resumed: int
    backend: str
    recall_at_10: float | None
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()

    __repr__ = short_repr


@dataclass(frozen=True)
class Options:
    """How items are decoded, encoded and kept; see `Index.add`."""

    keep: Keep = "reference"
    skip_bad: bool = False
    batch_size: int = 32
    limits: Limits = field(default_factory=Limits)


_OTHERS_ADDED = (
    "All others are in the index. Repair or remove these, or skip them with --skip-bad"
    " (in Python skip_bad=True)."
)


def add_sources(
    index: Index,
    sources: StrPath | Sequence[StrPath],
    options: Options,
    *,
    sync: bool = False,
    whole: bool = False,
) -> Added:
    """Embed the items of `sources` and add them; see `Index.add`.

    `whole` is True while an index is created. Then an unusable image makes the whole call fail,
    unless `skip_bad` is set.
    """
    began = time.monotonic()
    named = paths_of(sources)
    vectors: Vectors | None = None
    if any(map(is_embedding, named)):
        vectors = Vectors(named, index, options.keep)
        collected = vectors.sources
    else:
        collected = collect(named, index.bundle.manifest.input.kind)
    refuse_twice(collected.items.ids)
    writer = _Writer(index, strict=whole and not options.skip_bad)
    changed = 0
    for attempt in range(_MAX_ATTEMPTS):
        # Another thread may serve another bundle at any moment. The store then refuses what this
        # one has embedded, by its SHA-256.
        bundle = index.bundle
        try:
            new, rewritten = _changes(index, bundle, collected, options.limits)
            changed += rewritten
            if vectors:
                results = vectors.embedded(new)
            else:
                keep_features = FEATURES in index.generation.widths
                results = embed_collected(
                    bundle,
                    collected,
                    new,
                    options,
                    keep_features=keep_features,
                    strict=writer.strict,
                )
            writer.take(results, bundle, len(new))
            break
        except Superseded:
            # A migration ended meanwhile, so embed the remaining items with the new bundle.
            if attempt == _MAX_ATTEMPTS - 1:
                raise
            index.follow()
    faults = writer.faults
    count = len(collected.items)
    # An empty index would look like a success.
    if whole and faults and len(faults) == count:
        raise DataError(f"None of the {count:,} items can be used. The first: {faults[0]}")
    removed = 0
    # With faults, the sources are not known in full: an item may seem gone that is only damaged.
    # Without, the index has every item of the sources.
    if sync and not faults and len(index) > count:
        ids = set(collected.items.ids)
        surplus = [id for id in index if id not in ids]
        for start in range(0, len(surplus), _ITEMS_PER_READ):
            removed += index.store.delete(surplus[start : start + _ITEMS_PER_READ])
    if faults and not options.skip_bad:
        advice = _OTHERS_ADDED + (" Nothing was removed." if sync else "")
        raise _unusable(faults, count, advice)
    return Added(
        added=writer.added,
        changed=writer.changed + changed,
        unchanged=count - writer.added - writer.changed - len(faults) - changed,
        removed=removed,
        skipped=tuple(faults),
        repeated=collected.repeated,
        left_out=collected.left_out,
        seconds=time.monotonic() - began,
    )


def add_images(
    index: Index,
    images: Any,
    ids: Sequence[str] | None,
    labels: Sequence[str | None] | None,
    metadata: Sequence[Mapping[str, Any]] | None,
    options: Options,
) -> Added:
    """Embed images from memory, or rows of features, and add them; see `Index.add`."""
    began = time.monotonic()
    features: Array | None = None
    contents: Any
    if index.bundle.manifest.input.kind == "features":
        features = contents = np.atleast_2d(images)
    else:
        contents = as_list(images)
    count = len(contents)
    if ids is None:
        ids = ()
    if labels is None:
        labels = [None] * count
    if metadata is None:
        metadata = [{}] * count
    for name, values in {"ids": ids, "labels": labels, "metadata": metadata}.items():
        if len(values) != count:
            raise DataError(
                f"{count:,} {'image needs' if count == 1 else 'images need'} as many {name}, not"
                f" {len(values):,}: index.add(images=…, {name}=…)."
            )
    # An image in memory has no file to which the item could refer.
    keep: Keep = "nothing" if options.keep == "reference" else options.keep
    ids = list(map(str, ids))
    refuse_twice(ids)
    described = [
        Item(id, label_text(label), facts)
        for id, label, facts in zip(ids, labels, metadata, strict=True)
    ]
    sources = SourceColumns(
        ids,
        [item.label for item in described],
        checked(described, {}),
        [Path(f"images[{row}]") for row in range(count)],
        range(count),
        [None] * count,
        [False] * count,
        frozenset(chain.from_iterable(metadata)),
    )
    options = replace(options, keep=keep)
    keep_features = FEATURES in index.generation.widths
    bundle = index.bundle
    writer = _Writer(index)
    if features is not None:
        collected = Sources(sources, features)
        results = embed_collected(
            bundle, collected, range(count), options, keep_features=keep_features
        )
    else:
        originals = (
            (source.item(keep), source.name, _original(source.name, content))
            for source, content in zip(sources, contents, strict=True)
        )
        results = embed(bundle, originals, options, keep_features=keep_features)
    writer.take(results, bundle, count)
    if writer.faults and not options.skip_bad:
        raise _unusable(writer.faults, count, _OTHERS_ADDED)
    return Added(
        added=writer.added,
        changed=writer.changed,
        skipped=tuple(writer.faults),
        seconds=time.monotonic() - began,
    )


def _original(name: str, content: Any) -> Original:
    """Convert an image in memory to what `embed` takes."""
    if isinstance(content, str | os.PathLike):
        return Path(content)
    try:
        if isinstance(content, np.ndarray):
            picture = from_pixels(content)
        else:
            picture = content
        if isinstance(picture, bytes):
            return picture
        if isinstance(picture, Image.Image):
            return to_png(picture)
    except DataError as fault:
        return DataError(f"{name}: {fault}")
    return DataError(
        f"{name}: an image is a path, bytes, a Pillow image, pixels or a tensor, not an object of"
        f" type {type(content).__name__}."
    )


def _unusable(faults: Sequence[str], count: int, advice: str) -> DataError:
    """Return the error that lists the first of `faults` among `count` items."""
    lines = [
        f"{len(faults):,} of {count:,} items cannot be used:",
        *(f"  - {fault}" for fault in faults[:_MAX_LISTED]),
    ]
    if len(faults) > _MAX_LISTED:
        lines.append(f"  … and {len(faults) - _MAX_LISTED:,} more")
    return DataError("\n".join([*lines, advice]))


def refuse_twice(ids: Sequence[str]) -> None:
    """Raise a `DataError` if several items have the same id."""
    # Of two items with one id, the later would silently replace the earlier.
    if len(set(ids)) == len(ids):
        return
    counts = Counter(ids)
    twice = [f"{id!r} is the id of {count} items." for id, count in counts.items() if count > 1]
    raise DataError(
        listed("The list of items", twice)
        + "\nGive every item an id of its own in the column 'key' or 'id' of a CSV manifest, or add"
        " the folders one by one."
    )


def _changes(
    index: Index, bundle: Bundle, sources: Sources, limits: Limits
) -> tuple[Sequence[int], int]:
    """Compare items with those in the index; write items of the same content again if need be.

    Returns:
        The rows of the items to embed; and the number of others whose label, metadata or path
        changed.
    """
    items = sources.items
    if not len(index):
        return range(len(items)), 0
    # A migration may have skipped an item. Such an item has no arrays, and must be embedded even if
    # its file is unchanged. Generation 1 comes from no migration, so all its items have arrays.
    arrays = index.generation.number > 1
    new: list[int] = []
    changed = 0
    for start in range(0, len(items), _ITEMS_PER_READ):
        ids = items.ids[start : start + _ITEMS_PER_READ]
        stored = index.store.get(ids, arrays=arrays)
        rewritten: dict[str, tuple[Source, str]] = {}
        for row, id in enumerate(ids, start):
            previous = stored.get(id)
            if previous is None or (arrays and not previous.arrays):
                new.append(row)
                continue
            item = items[row]
            stamp = _stamp(item, previous, sources.features, limits)
            if _digest(stamp) != _digest(previous.stamp):
                new.append(row)
                continue
            details = (item.label, item.metadata, _path(item, previous))
            other = details != (previous.label, dict(previous.metadata), previous.path)
            changed += other
            if other or stamp != previous.stamp:
                rewritten[item.id] = item, stamp
        if rewritten:
            _rewrite(index, bundle, rewritten)
    return new, changed


def _stamp(source: Source, previous: Item, features: Floats32 | None, limits: Limits) -> str:
    """Return the stamp of an item's content, or "unreadable"; `previous` is the item as stored."""
    if features is not None:
        return digest_of(features[source.row].data)
    if source.recorded is not None:
        if previous.stamp and _digest(previous.stamp) == _digest(source.recorded):
            return previous.stamp  # it may have a later state of the file
        return source.recorded
    assert source.path is not None
    now = state_of(source.path)
    if previous.stamp and previous.stamp.endswith(f" {now}"):
        return previous.stamp
    try:  # a copy of the same content has another state
        content = read_image(source.path, limits, source.name)
    except DataError:
        return "unreadable"
    return f"{digest_of(content)} {now}"


def _digest(stamp: str | None) -> str:
    """Return the hash in an item's stamp."""
    return (stamp or "").partition(" ")[0]


def _path(source: Source, previous: Item) -> Path | None:
    """Return the path of an item whose file may have moved; `previous` is the item as stored."""
    if previous.path is None or source.row is not None:
        return None
    return source.path


def _rewrite(index: Index, bundle: Bundle, rewritten: Mapping[str, tuple[Source, str]]) -> None:
    """Update labels, metadata, paths and stamps of items, by id, whose content is unchanged."""
    items = []
    for id, item in index.store.get(rewritten, arrays=True).items():
        source, stamp = rewritten[id]
        if _digest(item.stamp) == _digest(stamp):  # else another process has just replaced it
            items.append(
                replace(
                    item,
                    label=source.label,
                    metadata=source.metadata,
                    path=_path(source, item),
                    stamp=stamp,
                    original=index.store.original(id),
                )
            )
    index.store.upsert(items, bundle.sha256)


class _Writer:
    """Writes encoded items to the index about once a second; `strict` fails for unusable items."""

    def __init__(self, index: Index, strict: bool = False) -> None:
        self.strict = strict
        self._index = index
        self.added = self.changed = 0
        self.faults: list[str] = []

    def take(self, results: Iterable[Batch], bundle: Bundle, count: int) -> None:
        """Write the `count` items that `bundle` embeds; collect the faults of unusable items."""
        # After `Superseded`, unusable items are decoded again, so their faults come again too.
        self.faults = []
        self._clear()
        with Meter("encoding", count, "items") as meter:
            for batch in results:
                for fault in batch.faults.values():
                    self.faults.append(fault)
                    if not self.strict:
                        meter.say(f"skipped: {fault}")
                if batch.items:
                    self._waiting.append(batch.items)
                    self._count += len(batch.items)
                    self._bytes += batch.items.bytes
                meter.update(len(batch))
                late = time.monotonic() - self._since > _SECONDS
                if late or self._count >= _ROWS or self._bytes > _BYTES:
                    self._write(bundle.sha256)
        if self.strict and self.faults:
            raise _unusable(
                self.faults,
                count,
                "Repair or remove them, or skip them with --skip-bad (in Python skip_bad=True)."
                " No index was created.",
            )
        self._write(bundle.sha256)

    def _write(self, sha256: str) -> None:
        if self._waiting:
            changed = self._index.store.upsert(ItemColumns.joined(self._waiting), sha256)
            self.changed += changed
            self.added += self._count - changed
        self._clear()

    def _clear(self) -> None:
        self._waiting: list[ItemColumns] = []
        self._count = self._bytes = 0
        self._since = time.monotonic()


_Decoded = tuple[Item, str | None, Any]
"""An item, why it cannot be used (or None), and the encoder's input."""


def embed_collected(
    bundle: Bundle,
    sources: Sources,
    rows: Sequence[int],
    options: Options,
    *,
    keep_features: bool = False,
    strict: bool = False,
) -> Iterator[Batch]:
    """Embed some rows of sources; yield their items in batches, as `embed` does."""
    if sources.features is None:
        images = originals(sources.items.take(rows), options.keep)
        yield from embed(bundle, images, options, keep_features=keep_features, strict=strict)
        return
    failed = False
    for start in range(0, len(rows), _ROWS_PER_READ):
        block = rows[start : start + _ROWS_PER_READ]
        items = sources.items.take(block)
        # A number beyond float32 becomes infinite.
        with np.errstate(over="ignore"):
            features = np.asarray(rows_at(sources.features, block), np.float32)
        finite = np.atleast_1d(np.isfinite(features.reshape(len(block), -1)).all(axis=1))
        faults = {
            id: f"{path_text(str(path))}: the vector of {id} holds NaN, infinity or a number beyond"
            " float32."
            for id, path, is_finite in zip(items.ids, items.paths, finite.tolist(), strict=True)
            if not is_finite
        }
        failed = failed or (strict and bool(faults))
        if failed:
            finite[:] = False
        if not finite.all():
            usable = np.flatnonzero(finite)
            items = items.take(usable.tolist())
            features = features[usable]
        arrays = {}
        if len(items):
            arrays = arrays_of(bundle, features, options.batch_size, keep_features)
        yield Batch(items.items(options.keep, digests_of(features), arrays), faults, len(block))


def embed(
    bundle: Bundle,
    items: Iterable[tuple[Item, str, Original]],
    options: Options,
    *,
    keep_features: bool = False,
    strict: bool = False,
) -> Iterator[Batch]:
    """Decode and encode images; yield their items in order, in batches.

    The items have their arrays, and the size in bytes and pixels of their originals. Threads decode
    about two batches ahead of the encoder.

    Args:
        bundle: the bundle that encodes the items.
        items: triples of an item, its name for error messages, and its original.
        options: if `keep` is "copy" or "thumbnail", `Item.original` is set.
        keep_features: also return the backbone's features.
        strict: after the first item that cannot be used, only decode the remaining items, which
            finds every fault; these items have no arrays.

    Raises:
        DataError: the encoder returns NaN or infinity.
    """

    def decoded(entry: tuple[Item, str, Original]) -> _Decoded:
        item, name, original = entry
        try:
            item, inputs = _decode_item(bundle, item, name, original, options)
        except DataError as fault:
            return item, str(fault), None
        return item, None, inputs

    # The first item stands for all: a storage is waited for, a file is decoded by a core.
    items = iter(items)
    first = list(islice(items, 1))
    workers = cores()
    if any(isinstance(original, Path) and address_of(original) for *_, original in first):
        workers = max(workers, _REQUESTS)
    every = chain(first, items)
    entries = ahead(decoded, every, workers=workers, most=2 * options.batch_size)
    failed = False
    while batch := list(islice(entries, options.batch_size)):
        inputs = [inputs for _, fault, inputs in batch if fault is None]
        failed = failed or (strict and len(inputs) < len(batch))
        arrays: dict[str, Floats32] = {}
        if inputs and not failed:
            arrays = arrays_of(bundle, np.stack(inputs), options.batch_size, keep_features)
        usable = [item for item, fault, _ in batch if fault is None and arrays]
        faults = {item.id: fault for item, fault, _ in batch if fault is not None}
        texts = metadata_texts([item.metadata for item in usable])
        columns = replace(ItemColumns.of(usable, texts, ()), arrays=arrays)
        yield Batch(columns, faults, len(batch))
        del batch, inputs, usable, columns  # the next batch is read without this one in memory


def _decode_item(
    bundle: Bundle, item: Item, name: str, original: Original, options: Options
) -> tuple[Item, Array]:
    """Decode an original; return the item with the original's sizes, and the encoder's input."""
    if isinstance(original, DataError):
        raise original
    if isinstance(original, bytes):
        content = original
    else:
        content = read_image(original, options.limits, name)
    image = decode(content, options.limits, name)
    preprocessing = bundle.manifest.input.preprocessing
    assert preprocessing is not None
    stored_original = None
    try:
        inputs = preprocessing(image)
        if options.keep == "copy":
            stored_original = content
        elif options.keep == "thumbnail":
            stored_original = thumbnail(image)
    except DataError as fault:
        raise DataError(f"{name}: {fault}") from fault
    width, height = full_size(image)
    stamp = digest_of(content)
    # The state of a file spares the next call reading a file that has not changed.
    if isinstance(original, Path) and item.stamp:
        stamp += f" {item.stamp}"
    item = replace(
        item,
        original=stored_original,
        bytes=len(content),
        width=width,
        height=height,
        stamp=stamp,
    )
    return item, inputs


def arrays_of(
    bundle: Bundle, inputs: Array, batch_size: int, keep_features: bool
) -> dict[str, Floats32]:
    """Encode inputs (n, …); return the arrays (n, width) that a store keeps, by name."""
    if not keep_features:
        return by_name(bundle.encode(inputs, batch_size=batch_size))
    features = bundle.features(inputs, batch_size=batch_size)
    return by_name(bundle.encode_features(features, batch_size=batch_size), features)


def by_name(encoded: Encoded, features: Floats32 | None = None) -> dict[str, Floats32]:
    """Return encoded arrays (n, width) and optional features (n, F) by name."""
    arrays = {
        VECTOR: encoded.vector,
        CODE: encoded.code,
        BASE: encoded.base,
        FEATURES: features,
    }
    return {name: array for name, array in arrays.items() if array is not None}
