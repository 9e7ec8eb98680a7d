"""Move an index to another bundle (an exported model) while it is searched.

A generation holds the arrays of all items from one bundle. A new generation is filled while the old
one is searched: all items are embedded again, another head is applied to their stored features, or
an adapter to their stored vectors. Then the new generation is served.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from retrieval.base.folder_kinds import StrPath
from retrieval.base.photo_files import address_of
from retrieval.base.progress import Meter, Progress, showing
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.bundle.manifest import SplitEntry, write_manifest
from retrieval.errors import BelowTarget, BundleError, DataError, StoreError, listed
from retrieval.index.adding import Options, by_name, embed
from retrieval.index.answering import nearest_hits
from retrieval.index.calibration import calibrate_again
from retrieval.index.golden import (
    DEFAULT_METRICS,
    Golden,
    GoldenQuery,
    GoldenReport,
    check_metrics,
    encode_golden,
    known_queries,
    queried_items,
    read_golden,
    report_of,
    scores_of,
)
from retrieval.index.queries_and_hits import Hit
from retrieval.index.query import plain_query
from retrieval.index.sources import Original
from retrieval.store.contract import superseded_source
from retrieval.store.items import (
    BASE,
    FEATURES,
    VECTOR,
    Candidates,
    Floats,
    Generation,
    Item,
    rows_of,
    served_of,
    widths_of,
)

if TYPE_CHECKING:
    from retrieval.index.index import Index

_BACKBONE = "backbone.onnx"
_HEAD = "head.onnx"
_RESCORER = "rescorer.onnx"
_ITEMS = 512  # items embedded and written at a time, so a killed process loses at most these
_ROWS = 4096  # items at a time if only a head runs
_BATCH = 1024  # batch size of a head
_EmbedItems = Callable[..., tuple[list[Item], dict[str, str]]]
"""Function that embeds items for a new generation, such as `_by_originals`."""


@dataclass(frozen=True)
class Migrated:
    """Result of a migration.

    Attributes:
        generation: the generation that is served now.
        embedded: number of items that this call embedded.
        skipped: one sentence per item that could not be embedded and so cannot be searched.
        from_features: number of items embedded from stored features instead of their originals.
        golden: how well the generation answers the golden queries, measured before it was served.
        from_vectors: number of items whose vectors were computed from stored ones, by an adapter.
    """

    generation: Generation
    embedded: int
    skipped: tuple[str, ...] = ()
    from_features: int = 0
    golden: GoldenReport | None = None
    from_vectors: int = 0


@dataclass(frozen=True)
class _Derivation:
    """How the arrays of a generation follow from those of the served one.

    Attributes:
        names: names of the stored arrays that `compute` takes, the base's vectors first.
        compute: see `Store.derive`.
    """

    names: Sequence[str]
    compute: Callable[[Mapping[str, Floats]], Mapping[str, Floats]]


@dataclass(frozen=True)
class _Target:
    """What a new generation must reach before it is served.

    Attributes:
        queries: golden queries.
        missing: number of their ids that the index lacks.
        at_least: smallest accepted value by metric.
    """

    queries: list[GoldenQuery]
    missing: int
    at_least: Mapping[str, float]


def migrate(
    index: Index,
    bundle: StrPath | Bundle,
    *,
    skip_bad: bool = False,
    golden: Golden | None = None,
    at_least: Mapping[str, float] = MappingProxyType({}),
    skip_missing: bool = False,
    progress: Progress = True,
) -> Migrated:
    """Embed all items with another bundle, then serve it.

    Searches and writes continue meanwhile, and every answer comes from a single bundle. The old
    generation stays for `rollback` until `drop_old`. Repeating an interrupted call resumes it.

    If the index stores features of the same backbone (`Bundle.backbone_sha256`), only the new
    head is applied to them, and no original is opened. A bundle that takes features of the same
    width is such a head too: the new generation joins it to the index's backbone, so queries
    are still images. Nothing checks that this head was trained on features of this backbone.

    From a bundle to an adapter over it, from one adapter to another over the same base, or back to
    the base, the new vectors are computed from the stored ones, in the variant that is served. In
    all other cases the originals are read and embedded again.

    Args:
        bundle: a bundle, or its folder.
        skip_bad: leave out items whose original is missing or cannot be used. If False, an
            error lists them, and the old generation stays served. If only stored features are
            needed, items without any are always left out.
        golden: golden queries that the new generation answers before it is served; see `evaluate`.
        at_least: smallest accepted mean by metric, such as `{"recall@10": 0.95}`. Below it, the old
            generation stays served.
        skip_missing: see `evaluate`.
        progress: see `add`.

    Raises:
        BelowTarget: the golden queries are answered worse than `at_least`.
        DataError: an item's original is missing or cannot be used, or golden queries are invalid.
        BundleError: the bundle takes features, but the index stores none of that width.
        StoreError: the index is read-only or has another writer, or the disk fails.
    """
    if isinstance(bundle, Bundle):
        opened = bundle
    else:
        opened = Bundle.open(bundle)
    index.follow()
    derives = base_array(opened, index.bundle) is not None
    if derives and opened.variant != index.bundle.variant and not isinstance(bundle, Bundle):
        opened = Bundle.open(bundle, variant=index.bundle.variant)
    target = None
    # Before the work of hours.
    if golden is not None:
        check_metrics(at_least)
        queries = read_golden(golden)
        target = _Target(*known_queries(index, queries, skip_missing=skip_missing), at_least)
    with tempfile.TemporaryDirectory() as folder:
        if opened.manifest.input.kind == "features" and not derives:
            opened = _bundle_to_serve(index, opened, Path(folder))
        has_features = opened.manifest.input.kind == "features" or opened.backbone_sha256
        keep = has_features and FEATURES in index.generation.widths
        widths = widths_of(opened, features=opened.features_width if keep else None)
        generation = index.store.begin(opened, widths)
    with showing(progress):
        return _complete(index, opened, generation, skip_bad, target)


def rollback(index: Index, *, progress: Progress = True) -> Migrated:
    """Serve the previous generation again.

    Items that were added meanwhile are embedded with the previous bundle first.
    """
    older = [generation for generation in index.store.generations() if generation.state == "kept"]
    if not older:
        raise StoreError(f"The index {index.path} keeps no older generation to go back to.")
    newest = max(older, key=lambda generation: generation.number)
    index.follow()
    opened = Bundle.open(index.store.bundle(newest), variant=newest.variant)
    with showing(progress):
        return _complete(index, opened, newest, skip_bad=False)


def _bundle_to_serve(index: Index, head: Bundle, folder: Path) -> Bundle:
    """Return the bundle to serve after a migration to `head`, a bundle that takes features.

    If the index's bundle takes images, its backbone is joined to `head`, and the new bundle is
    written to `folder`. Otherwise this is `head` itself.
    """
    width = index.generation.widths.get(FEATURES)
    if width is None:
        raise BundleError(
            f"The bundle {head.path} takes features, and the index {index.path} keeps none. Migrate"
            " to a bundle that takes images, or create the index again with --keep-features (in"
            " Python keep_features=True)."
        )
    if head.manifest.input.shape != (width,):
        raise BundleError(
            f"The bundle {head.path} takes {head.manifest.input.shape[0]:,} features, and the index"
            f" {index.path} keeps {width:,} features per item."
        )
    if index.bundle.manifest.input.kind == "features":
        return head
    if head.manifest.adapter is not None:
        raise BundleError(
            f"The bundle {head.path} is an adapter over a bundle that takes features, but the index"
            f" {index.path} takes images. Make the adapter over the bundle of the index."
        )
    return Bundle.open(join_backbone(index.bundle, head, folder))


def _complete(
    index: Index,
    bundle: Bundle,
    generation: Generation,
    skip_bad: bool,
    target: _Target | None = None,
) -> Migrated:
    """Embed the items that a generation lacks, then serve it if it reaches the target."""
    if generation.state == "served":
        return Migrated(generation, 0)
    store = index.store
    source = index.generation
    derivation = _derivation(index, bundle, generation)
    by_head = FEATURES in source.widths and applies(bundle, index.bundle) and not derivation
    embed_items: _EmbedItems
    if derivation is not None:
        embed_items = partial(_by_arrays, derivation)
    elif by_head:
        embed_items = _by_head
    else:
        embed_items = _by_originals
    count = 0
    faults: list[str] = []
    report = None
    encoded = None
    if target is not None:
        # A fault of a query is told before the work of hours.
        encoded = _encoded_golden(index, bundle, embed_items, target.queries)
    with Meter("embedding", len(index), "items") as meter:
        while True:
            if derivation is not None:
                names, compute = derivation.names, derivation.compute
                count += store.derive(generation, source, names, compute, meter.update)
                items = []
            else:
                items = store.pending(generation, _ROWS if by_head else _ITEMS)
            if not items:
                # Once: few items can have been written since.
                if target is not None and encoded is not None and report is None:
                    report = _measured(index, bundle, generation, target, encoded)
                if store.switch(generation):
                    break
                continue  # an item was written since `pending`
            embedded, wrong = embed_items(index, bundle, items, FEATURES in generation.widths)
            if wrong:
                # An original is missing if its item was deleted or written meanwhile. Such an item
                # is not, or once more, pending.
                stored = store.get(wrong)
                before = {item.id: replace(item, arrays={}) for item in items}
                wrong = {id: why for id, why in wrong.items() if stored.get(id) == before[id]}
            served = served_of(store.generations())
            if by_head and served.number != source.number:
                # The features that `pending` returned may come from another backbone.
                raise superseded_source()
            # An item without features was left out of an earlier generation already.
            if wrong and not skip_bad and not by_head:
                raise DataError(
                    listed("Some items cannot be embedded again", list(wrong.values()))
                    + "\nThe index is served as before. Repair their originals and repeat the"
                    " command, which resumes; or leave the items out with --skip-bad (in Python"
                    " skip_bad=True)."
                )
            embedded_ids = {item.id for item in embedded}
            left_out = [item.id for item in items if item.id not in embedded_ids]
            store.embed(generation, embedded, left_out)
            faults += wrong.values()
            count += len(embedded)
            meter.update(len(items))
    index.follow()
    calibrate_again(index, source)
    return Migrated(
        index.generation,
        count,
        tuple(faults),
        from_features=count if by_head else 0,
        golden=report,
        from_vectors=count if derivation else 0,
    )


def _encoded_golden(
    index: Index,
    bundle: Bundle,
    embed_items: _EmbedItems,
    queries: Sequence[GoldenQuery],
) -> Encoded:
    """Return golden queries as a bundle encodes them; items that are queries are embedded again."""
    items = list(queried_items(index, queries).values())
    embedded, faults = embed_items(index, bundle, items, False)
    if faults:
        raise DataError(listed("The list of golden queries", list(faults.values())))
    return encode_golden(bundle, queries, {item.id: item for item in embedded})


def _measured(
    index: Index, bundle: Bundle, generation: Generation, target: _Target, encoded: Encoded
) -> GoldenReport:
    """Return how well a generation that is not served yet answers golden queries.

    Raises:
        BelowTarget: worse than the target.
    """

    def propose(queries: Floats, count: int, *_: object, **__: object) -> list[Candidates]:
        return index.store.propose_staged(generation, queries, count)

    def search(queries: Encoded, k: int) -> list[list[Hit]]:
        query = plain_query(k)
        return nearest_hits(propose, bundle, queries.query, queries.code, query, None, k)

    metrics = list(dict.fromkeys((*DEFAULT_METRICS, *target.at_least)))
    report = report_of(scores_of(target.queries, encoded, search, metrics), metrics, target.missing)
    try:
        report.require(target.at_least)
    except BelowTarget as below:
        raise BelowTarget(
            f"The new generation is not served: {below}\nThe index is served as before. To serve"
            " the new generation, repeat the command with a smaller --at-least (in Python"
            " at_least), which embeds nothing again. To delete it, run: retrieval index migrate"
            f" {index.path} --drop-old"
        ) from None
    return report


def _apply_head(bundle: Bundle, features: Floats) -> dict[str, Floats]:
    return by_name(bundle.encode_features(features, batch_size=_BATCH))


def _by_head(
    index: Index, bundle: Bundle, items: Sequence[Item], keep_features: bool
) -> tuple[list[Item], dict[str, str]]:
    """Apply the head `bundle` to the features of items; return the same as `_by_originals`."""
    usable = [item for item in items if FEATURES in item.arrays]
    faults = _no_features(item for item in items if FEATURES not in item.arrays)
    if not usable:
        return [], faults
    features = np.stack([item.arrays[FEATURES] for item in usable])
    arrays = _apply_head(bundle, features)
    if keep_features:
        arrays[FEATURES] = features
    return _with_arrays(usable, arrays), faults


def base_array(bundle: Bundle, served: Bundle) -> str | None:
    """Return the name of the stored array that a bundle's vectors can be computed from, if any.

    Args:
        bundle: an adapter over `served`, an adapter over the same base, or that base.
        served: the bundle that an index serves.
    """
    adapter = bundle.manifest.adapter
    if adapter is not None and adapter.base == served.sha256:
        return VECTOR
    earlier = served.manifest.adapter
    bases = {bundle.sha256}
    if adapter is not None:
        bases = {adapter.base}
    if earlier is not None and earlier.base in bases:
        return BASE
    return None


def _derivation(index: Index, bundle: Bundle, generation: Generation) -> _Derivation | None:
    """Return how a generation of `bundle` follows from the served one, or None if it does not."""
    base = base_array(bundle, index.bundle)
    if base is None or bundle.variant != index.bundle.variant:
        return None
    names = [base]
    if FEATURES in generation.widths:
        names.append(FEATURES)
    if not set(names) <= index.generation.widths.keys():
        return None

    def compute(arrays: Mapping[str, Floats]) -> Mapping[str, Floats]:
        computed = {VECTOR: arrays[base]}
        if bundle.manifest.adapter is not None:
            computed = by_name(bundle.adapt(arrays[base]))
        if FEATURES in names:
            computed[FEATURES] = arrays[FEATURES]
        return computed

    return _Derivation(names, compute)


def _by_arrays(
    derivation: _Derivation, index: Index, bundle: Bundle, items: Sequence[Item], _: bool
) -> tuple[list[Item], dict[str, str]]:
    """Compute the arrays of items from stored ones; return the same as `_by_originals`."""
    usable = [item for item in items if item.arrays]
    faults = {item.id: f"{item.id}: this item has no vector." for item in items if not item.arrays}
    if not usable:
        return [], faults
    stored = {name: np.stack([item.arrays[name] for item in usable]) for name in derivation.names}
    arrays = derivation.compute(stored)
    return _with_arrays(usable, arrays), faults


def _with_arrays(items: Sequence[Item], arrays: Mapping[str, Floats]) -> list[Item]:
    """Return items with other arrays, of which `arrays` (n, width) have a row for each."""
    rows = zip(items, rows_of(arrays), strict=True)
    return [replace(item, arrays=row) for item, row in rows]


def _no_features(items: Iterable[Item]) -> dict[str, str]:
    sentence = "the index keeps no features of this item for the new bundle."
    return {item.id: f"{item.id}: {sentence}" for item in items}


def _by_originals(
    index: Index, bundle: Bundle, items: Sequence[Item], keep_features: bool
) -> tuple[list[Item], dict[str, str]]:
    """Embed items from their originals.

    Returns:
        The embedded items with their new arrays; and, by id, why other items cannot be embedded.
    """
    if bundle.manifest.input.kind == "features":
        return [], _no_features(items)
    batches = embed(bundle, _originals(index, items), Options(), keep_features=keep_features)
    arrays: dict[str, Mapping[str, Floats]] = {}
    faults: dict[str, str] = {}
    for batch in batches:
        arrays |= zip(batch.items.ids, rows_of(batch.items.arrays), strict=True)
        faults |= batch.faults
    return [replace(item, arrays=arrays[item.id]) for item in items if item.id in arrays], faults


def _originals(index: Index, items: Sequence[Item]) -> Iterator[tuple[Item, str, Original]]:
    """Yield each item with its id and its original, or an error if that is missing."""
    for item in items:
        original: Original | None = item.path
        if item.keep == "copy":
            original = index.store.original(item.id)
        # At an address, only the request that reads a photo tells whether it is gone.
        elif item.path is not None and not address_of(item.path) and not item.path.is_file():
            original = DataError(f"{item.id}: its file {item.path} is gone.")
        if original is None:
            original = DataError(f"{item.id}: the index keeps no original of this item.")
        yield item, item.id, original


def applies(head: Bundle, base: Bundle) -> bool:
    """Return whether a head may be applied to the features that the bundle `base` computed.

    The two bundles must have the same backbone or take the same features.
    """
    if base.manifest.input.kind == "features":
        return head.manifest.input == base.manifest.input
    return head.backbone_sha256 is not None and head.backbone_sha256 == base.backbone_sha256


def join_backbone(backbone: Bundle, head: Bundle, folder: Path) -> Path:
    """Write a bundle that applies the backbone of one bundle, then the bundle `head`.

    The same two bundles always give the same result. The new manifest is that of `head`, but with
    the input of `backbone`, a new split, and no variants or probe. Its `verified` still describes
    the comparison of `head` with torch.

    `backbone` is split into backbone and head, and `head` takes features. The new bundle and a copy
    of each old one are written to the empty `folder`. Returns the folder of the new bundle.

    Raises:
        BundleError: the widths differ, or a bundle has changed since it was opened.
    """
    split = backbone.manifest.split
    manifest = head.manifest
    width = backbone.features_width
    assert split is not None
    backbone.copy(folder / "backbone")
    head.copy(folder / "head")
    target = folder / "bundle"
    target.mkdir()
    (folder / "backbone" / split.backbone).rename(target / _BACKBONE)
    if head.variant:
        encoder: str | None = manifest.variants[head.variant].file
    else:
        encoder = manifest.encoder
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
