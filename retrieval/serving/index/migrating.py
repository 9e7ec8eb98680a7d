"""Another bundle for an index, while it is searched: all items are embedded again, or another head is applied to the features that
are kept of them, beside the old generation; then one switch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import BundleError, DataError, StoreError, listed
from retrieval.host.cores import cores
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.places import StrPath
from retrieval.serving.images import Limits, decode
from retrieval.serving.index.adding import originals
from retrieval.serving.index.heads import applies, behind, features_of, gives_features
from retrieval.serving.index.origins import Origin
from retrieval.serving.progress import Meter, Progress, showing
from retrieval.serving.store.contract import CODE, FEATURES, VECTOR, Floats, Generation, Item, widths_of
from retrieval.serving.threads import ahead

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index

_ITEMS = 512  # at a time: a kill costs no more
_ROWS = 4096  # the same, where only a head runs; so many become a segment at once
_BATCH = 1024  # of features through a head


@dataclass(frozen=True)
class Migrated:
    """What a migration did.

    Attributes:
        generation: which is served now.
        embedded: items that were embedded for it by this call.
        skipped: why an item could not be embedded, a sentence each; the generation does without it.
        from_features: how many of the embedded ones took the features that the index keeps, instead of their originals.
    """

    generation: Generation
    embedded: int
    skipped: tuple[str, ...] = ()
    from_features: int = 0


def migrate(
    index: Index,
    bundle: StrPath | Bundle,
    *,
    skip_bad: bool = False,
    batch: int = 32,
    limits: Limits | None = None,
    progress: Progress = True,
) -> Migrated:
    """Embed all items with another bundle and serve that; see `Index.migrate`."""
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    index.follow()
    with tempfile.TemporaryDirectory() as folder:
        if opened.manifest.input.kind == "features":
            opened = _head_of(index, opened, Path(folder))
        keeps = FEATURES in index.generation.widths and gives_features(opened)
        widths = widths_of(opened, features=features_of(opened) if keeps else None)
        generation = index.store.begin(opened, widths)
    work = _Work(index, opened, generation, batch, limits or Limits())
    return work.done(skip_bad, progress)


def rollback(index: Index, *, progress: Progress = True) -> Migrated:
    """Serve the newest kept generation again; see `Index.rollback`."""
    kept = [one for one in index.store.generations() if one.state == "kept"]
    if not kept:
        raise StoreError(f"The index {index.path} keeps no older generation to go back to.")
    chosen = max(kept, key=lambda one: one.number)
    index.follow()
    opened = Bundle.open(index.store.bundle(chosen), variant=chosen.variant)
    return _Work(index, opened, chosen, 32, Limits()).done(False, progress)


def _head_of(index: Index, head: Bundle, folder: Path) -> Bundle:
    """Return the bundle that serves an index with a bundle of features: where the index is of images, behind the backbone of its own.

    Raises:
        BundleError: the index keeps no features, or of another width.
    """
    width = index.generation.widths.get(FEATURES)
    if width is None:
        raise BundleError(
            f"The bundle {head.path} takes features, and the index {index.path} keeps none: migrate to a bundle of images, or create "
            "the index again with --keep-features (in Python keep_features=True)."
        )
    if head.manifest.input.shape != (width,):
        raise BundleError(
            f"The bundle {head.path} takes {head.manifest.input.shape[0]:,} features, and the index {index.path} keeps {width:,} of an item."
        )
    if index.bundle.manifest.input.kind == "features":
        return head
    return Bundle.open(behind(index.bundle, head, folder))


@dataclass(frozen=True)
class _Work:
    """All items of an index for another generation.

    Args:
        index: whose items.
        bundle: of the generation.
        generation: which gets them.
        batch: images that go through the encoder at once.
        limits: the largest images that are decoded.
    """

    index: Index
    bundle: Bundle
    generation: Generation
    batch: int
    limits: Limits

    def done(self, skip_bad: bool, progress: Progress) -> Migrated:
        """Embed what the generation lacks, and serve it."""
        index, store, generation = self.index, self.index.store, self.generation
        if generation.state == "served":
            return Migrated(generation, 0)
        source = index.generation
        by_head = FEATURES in source.widths and applies(self.bundle, index.bundle)
        count = taken = 0
        faults: list[str] = []
        with showing(progress), Meter("embedding", len(index), "items") as meter:
            if by_head:
                count = taken = store.derive(source, generation, self._applied, meter.update)
            while True:
                items = store.pending(generation, _ROWS if by_head else _ITEMS)
                if not items:
                    if store.switch(generation):
                        break
                    continue
                embedded, wrong = self._by_features(items) if by_head else self._by_originals(items)
                if wrong and not skip_bad:
                    raise DataError(
                        listed("Some items cannot be embedded again", list(wrong.values()))
                        + "\nThe index is served as before. Mend them and repeat the command, which goes on where it stopped; or leave "
                        "them out of the new generation with --skip-bad (in Python skip_bad=True)."
                    )
                faults += wrong.values()
                store.embed(generation, embedded, list(wrong))
                count += len(embedded)
                taken += len(embedded) if by_head else 0
                meter.update(len(items))
        index.follow()
        return Migrated(index.generation, count, tuple(faults), taken)

    def _applied(self, features: Floats) -> dict[str, Floats]:
        encoded = self.bundle.encode_features(features, batch=_BATCH)
        return {VECTOR: encoded.vector, **({} if encoded.code is None else {CODE: encoded.code})}

    def _by_features(self, items: Sequence[Item]) -> tuple[list[Item], dict[str, str]]:
        """Return items with the generation's arrays, and why others have none, by id."""
        good = [item for item in items if FEATURES in item.arrays]
        wrong = {
            item.id: f"{item.id}: the generation that is served has no features of it."
            for item in items
            if FEATURES not in item.arrays
        }
        if not good:
            return [], wrong
        features = np.stack([item.arrays[FEATURES] for item in good])
        return self._with(good, {**self._applied(features), FEATURES: features}), wrong

    def _by_originals(self, items: Sequence[Item]) -> tuple[list[Item], dict[str, str]]:
        """Return items with the generation's arrays, and why others have none, by id."""
        if self.bundle.manifest.input.kind == "features":
            return [], {
                item.id: f"{item.id}: the index keeps no features of it for this bundle." for item in items
            }
        wrong: dict[str, str] = {}
        inputs: list[NDArray[Any]] = []
        good: list[Item] = []
        for item, pixels in _pixels(self.index, self.bundle, items, self.limits):
            if isinstance(pixels, str):
                wrong[item.id] = pixels
            else:
                inputs.append(pixels)
                good.append(item)
        if not good:
            return [], wrong
        if FEATURES in self.generation.widths:
            features = self.bundle.features(np.stack(inputs), batch=self.batch)
            return self._with(good, {**self._applied(features), FEATURES: features}), wrong
        encoded = self.bundle.encode(np.stack(inputs), batch=self.batch)
        codes = {} if encoded.code is None else {CODE: encoded.code}
        return self._with(good, {VECTOR: encoded.vector, **codes}), wrong

    def _with(self, items: Sequence[Item], arrays: Mapping[str, Floats]) -> list[Item]:
        """Return items with their rows of the arrays that the generation keeps."""
        kept = {name: array for name, array in arrays.items() if name in self.generation.widths}
        return [
            replace(item, arrays={name: array[at] for name, array in kept.items()})
            for at, item in enumerate(items)
        ]


def _pixels(
    index: Index, bundle: Bundle, items: Sequence[Item], limits: Limits
) -> Iterator[tuple[Item, NDArray[np.uint8] | str]]:
    """Give the encoder's input of each item's original, or why there is none."""
    preprocessing = bundle.manifest.input.preprocessing
    assert preprocessing is not None

    def one(
        pair: tuple[Item, Path | bytes | Origin | DataError | None],
    ) -> tuple[Item, NDArray[np.uint8] | str]:
        item, original = pair
        if isinstance(original, DataError):
            return item, f"{item.id}: {original}"
        if original is None:
            where = f"its file {item.path} is gone" if item.path else "the index keeps no original of it"
            return item, f"{item.id}: {where}."
        try:
            content = original.read(limits.bytes) if isinstance(original, Origin) else original
            return item, preprocessing(decode(content, limits, item.id))
        except DataError as fault:
            return item, str(fault)
        except OSError as fault:
            return item, f"{item.id} cannot be read: {fault.strerror or fault}."

    workers = cores()
    yield from ahead(one, originals(index, items, limits.bytes), workers=workers, most=4 * workers)
