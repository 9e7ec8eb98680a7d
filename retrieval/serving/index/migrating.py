"""Move an index to another bundle while it is searched.

A new generation is filled beside the old one, by embedding all items again or by applying another
head to the stored features. Then one switch serves the new generation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrieval.errors import BundleError, DataError, StoreError, listed
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.places import StrPath
from retrieval.serving.images import Limits
from retrieval.serving.index.adding import Options, by_name, embed, row_of
from retrieval.serving.index.locations import Origin, Original
from retrieval.serving.index.sources import contents
from retrieval.serving.manifest import SplitEntry, write_manifest
from retrieval.serving.progress import Meter, Progress, showing
from retrieval.serving.store.items import (
    FEATURES,
    Floats,
    Generation,
    Item,
    served_of,
    widths_of,
)

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index

_BACKBONE, _HEAD, _RESCORER = "backbone.onnx", "head.onnx", "rescorer.onnx"
_ITEMS = 512  # items written at a time; a killed process loses no more
_ROWS = 4096  # the same if only a head runs
_BATCH = 1024  # features per batch of a head


@dataclass(frozen=True)
class Migrated:
    """Result of a migration.

    Attributes:
        generation: the generation that is served now.
        embedded: number of items that this call embedded for it.
        skipped: one sentence per item that could not be embedded and has no vector in it.
        from_features: number of items embedded from stored features instead of their originals.
    """

    generation: Generation
    embedded: int
    skipped: tuple[str, ...] = ()
    from_features: int = 0


def migrate(
    index: Index, bundle: StrPath | Bundle, *, skip_bad: bool = False, progress: Progress = True
) -> Migrated:
    """Embed all items with another bundle and serve it; see `Index.migrate`."""
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    index.follow()
    with tempfile.TemporaryDirectory() as folder:
        if opened.manifest.input.kind == "features":
            opened = _head_of(index, opened, Path(folder))
        keeps = FEATURES in index.generation.widths and gives_features(opened)
        widths = widths_of(opened, features=features_of(opened) if keeps else None)
        generation = index.store.begin(opened, widths)
    with showing(progress):
        return _fill(index, opened, generation, skip_bad)


def rollback(index: Index, *, progress: Progress = True) -> Migrated:
    """Serve the newest kept generation again; see `Index.rollback`."""
    kept = [generation for generation in index.store.generations() if generation.state == "kept"]
    if not kept:
        raise StoreError(f"The index {index.path} keeps no older generation to go back to.")
    newest = max(kept, key=lambda generation: generation.number)
    index.follow()
    opened = Bundle.open(index.store.bundle(newest), variant=newest.variant)
    with showing(progress):
        return _fill(index, opened, newest, skip_bad=False)


def _head_of(index: Index, head: Bundle, folder: Path) -> Bundle:
    """Return the bundle to serve when migrating to a bundle of features.

    For an index of images, `head` is combined with the index's backbone.
    """
    width = index.generation.widths.get(FEATURES)
    if width is None:
        raise BundleError(
            f"The bundle {head.path} takes features, and the index {index.path} keeps none: migrate"
            " to a bundle of images, or create the index again with --keep-features (in Python"
            " keep_features=True)."
        )
    if head.manifest.input.shape != (width,):
        raise BundleError(
            f"The bundle {head.path} takes {head.manifest.input.shape[0]:,} features, and the index"
            f" {index.path} keeps {width:,} of an item."
        )
    if index.bundle.manifest.input.kind == "features":
        return head
    return Bundle.open(behind(index.bundle, head, folder))


def _fill(index: Index, bundle: Bundle, generation: Generation, skip_bad: bool) -> Migrated:
    """Embed the items that a generation lacks, then serve it."""
    if generation.state == "served":
        return Migrated(generation, 0)
    store, source = index.store, index.generation
    by_head = FEATURES in source.widths and applies(bundle, index.bundle)
    embed_items = _by_head if by_head else _by_originals
    count = 0
    faults: list[str] = []
    with Meter("embedding", len(index), "items") as meter:
        while True:
            items = store.pending(generation, _ROWS if by_head else _ITEMS)
            if not items:
                if store.switch(generation):
                    break
                continue
            embedded, wrong = embed_items(index, bundle, items, FEATURES in generation.widths)
            served = served_of(store.generations())
            if by_head and served.number != source.number:  # features may be of another backbone
                raise StoreError("Another generation is served by now. Run the command again.")
            if wrong and not skip_bad:
                raise DataError(
                    listed("Some items cannot be embedded again", list(wrong.values()))
                    + "\nThe index is served as before. Mend them and repeat the command, which"
                    " goes on where it stopped; or leave them out of the new generation with"
                    " --skip-bad (in Python skip_bad=True)."
                )
            kept = {item.id for item in embedded}
            store.embed(generation, embedded, [item.id for item in items if item.id not in kept])
            faults += wrong.values()
            count += len(embedded)
            meter.update(len(items))
    index.follow()
    return Migrated(index.generation, count, tuple(faults), count if by_head else 0)


def _apply_head(bundle: Bundle, features: Floats) -> dict[str, Floats]:
    return by_name(bundle.encode_features(features, batch=_BATCH))


def _by_head(
    index: Index, bundle: Bundle, items: Sequence[Item], keep_features: bool
) -> tuple[list[Item], dict[str, str]]:
    """Return items with the arrays of a new head; items without features are left out."""
    usable = [item for item in items if FEATURES in item.arrays]
    if not usable:
        return [], {}
    features = np.stack([item.arrays[FEATURES] for item in usable])
    arrays = _apply_head(bundle, features) | ({FEATURES: features} if keep_features else {})
    return [replace(item, arrays=row_of(arrays, row)) for row, item in enumerate(usable)], {}


def _by_originals(
    index: Index, bundle: Bundle, items: Sequence[Item], keep_features: bool
) -> tuple[list[Item], dict[str, str]]:
    """Return items with the arrays of a new encoder, and the faults of the others by id."""
    if bundle.manifest.input.kind == "features":
        return [], {
            item.id: f"{item.id}: the index keeps no features of it for this bundle."
            for item in items
        }
    originals = _originals(index, items, Limits().bytes)
    batches = embed(bundle, originals, Options(), keep_features=keep_features)
    results = [result for batch in batches for result in batch]
    arrays = {item.id: item.arrays for item, fault in results if fault is None}
    return (
        [replace(item, arrays=arrays[item.id]) for item in items if item.id in arrays],
        {item.id: fault for item, fault in results if fault is not None},
    )


def _originals(
    index: Index, items: Sequence[Item], most: int
) -> Iterator[tuple[Item, str, Original]]:
    """Yield items with their ids and originals: kept bytes, a file, a table's row, or a fault."""

    def origin(item: Item) -> Origin | None:
        if item.source is None or item.keep == "copy":
            return None
        return Origin.recorded(item.source, item.stamp)

    for item, content in contents(((item, origin(item)) for item in items), most):
        original: Original | None = content
        if isinstance(content, DataError):
            original = DataError(f"{item.id}: {content}")
        elif content is None and item.keep == "copy":
            original = index.store.original(item.id)
        elif content is None:
            original = item.path if item.path and item.path.is_file() else None
        if original is None:
            where = (
                f"its file {item.path} is gone"
                if item.path
                else "the index keeps no original of it"
            )
            original = DataError(f"{item.id}: {where}.")
        yield item, item.id, original


def features_of(bundle: Bundle) -> int:
    """Return F, the number of features per item that an index can store with a bundle.

    Raises:
        BundleError: the bundle has no features to store.
    """
    manifest = bundle.manifest
    if manifest.input.kind == "features":
        return manifest.input.shape[0]
    if bundle.backbone_sha256 is None or manifest.split is None:
        why, advice = (
            ("has an encoder of one graph", "Export it with --split (in Python split=True).")
            if manifest.split is None
            else (f"runs its variant '{bundle.variant}'", "Leave the variant out.")
        )
        raise BundleError(
            f"The bundle {bundle.path} {why}, so there are no features to keep. {advice}"
        )
    return manifest.split.features


def gives_features(bundle: Bundle) -> bool:
    """Return whether an index can store features with a bundle."""
    return bundle.manifest.input.kind == "features" or bundle.backbone_sha256 is not None


def applies(head: Bundle, kept: Bundle) -> bool:
    """Return whether a head may be applied to features stored with the bundle `kept`.

    Both bundles must have the same backbone or take the same features.
    """
    if kept.manifest.input.kind == "features":
        return head.manifest.input == kept.manifest.input
    return head.backbone_sha256 is not None and head.backbone_sha256 == kept.backbone_sha256


def behind(backbone: Bundle, head: Bundle, folder: Path) -> Path:
    """Write a bundle that runs a bundle of features behind another bundle's backbone.

    The same two bundles always give the same result. Its manifest is the head's except for input
    and split, and without variants and probe; `verified` is the head's comparison with torch.

    Returns:
        The folder of the new bundle.

    Raises:
        BundleError: the widths differ, or a bundle has changed since it was opened.
    """
    split, manifest = backbone.manifest.split, head.manifest
    width = features_of(backbone)
    assert split is not None
    backbone.copy(folder / "backbone")
    head.copy(folder / "head")
    target = folder / "bundle"
    target.mkdir()
    (folder / "backbone" / split.backbone).rename(target / _BACKBONE)
    encoder = manifest.variants[head.variant].file if head.variant else manifest.encoder
    assert encoder is not None  # a bundle of features is never split
    (folder / "head" / encoder).rename(target / _HEAD)
    rescorer = manifest.rescorer
    if rescorer is not None:
        (folder / "head" / rescorer.file).rename(target / _RESCORER)
        rescorer = rescorer.model_copy(update={"file": _RESCORER})
    write_manifest(
        target,
        manifest.model_copy(
            update={
                "input": backbone.manifest.input,
                "encoder": None,
                "split": SplitEntry(backbone=_BACKBONE, head=_HEAD, features=width),
                "rescorer": rescorer,
                "opset": max(manifest.opset, backbone.manifest.opset),
                "variants": {},
                "probe": None,
            }
        ),
    )
    return target
