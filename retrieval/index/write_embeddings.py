"""Embed items into a folder of Parquet files, a part of the items at a time.

This process embeds the parts, or processes of a cluster do, which write the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from retrieval.base.files import hold, make_folder, whole_file, write_text
from retrieval.base.folder_kinds import StrPath
from retrieval.base.photo_files import path_text
from retrieval.base.progress import Meter, Progress, showing
from retrieval.base.runtime import Device, installed_version
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.identity import identity_metadata
from retrieval.errors import DataError, at_least_one, printable_json, valid_text
from retrieval.host.processes import cluster_at, refuse_node
from retrieval.images.decoding import Limits
from retrieval.index.adding import Options, embed_collected, refuse_twice
from retrieval.index.parquet import pyarrow
from retrieval.index.read_embeddings import BAD, SIZES, EmbeddingPlan, part_file, schema_of
from retrieval.index.sources import (
    PLAN,
    Batch,
    SourceColumns,
    Sources,
    collect,
    digests_of,
    paths_of,
)
from retrieval.store.items import FEATURES, ItemColumns, widths_of

_SMALLEST_PART, _LARGEST_PART = 256, 8192  # items of a part
_PARTS = 1000  # number of parts to aim for
_FAULTS_SHOWN = 10
_GROUP_ROWS = 1024
_FAULT_CHARACTERS = 500
_BETWEEN = ', "\\u0000", '
_NOTE_KEY = b"retrieval"  # entry of a Parquet file's metadata: its plan and unusable items


@dataclass(frozen=True)
class Embedding:
    """Result of `embed_sources`.

    Attributes:
        output: the folder of embeddings.
        items: number of items that were embedded.
        bad: number of items that could not be used; `bad.jsonl` in the folder has a line for each.
        resumed: number of items in parts that already existed.
        parts: number of Parquet files in the folder.
        batch_size: number of items per batch.
        repeated: number of repeated items in the sources: the same file, and no other id.
        left_out: one sentence per reason why files or columns were left out.
        seconds: duration in seconds.
    """

    output: Path
    items: int
    bad: int
    resumed: int
    parts: int
    batch_size: int
    repeated: int
    left_out: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class EmbeddingOptions:
    """Options of `embed_sources`.

    Attributes:
        features: also write the backbone's features. The bundle must be split into backbone and
            head, or take features.
        batch_size: number of items per batch. `None` is that of the folder to complete, or 32.
        ray: embed on a Ray cluster: HOST:PORT of its head, or "auto" on one of its nodes. All nodes
            must share the bundle, the sources and the output.
        variant, limits, device: see `Index.create`.
    """

    features: bool = False
    batch_size: int | None = None
    ray: str | None = None
    variant: str | None = None
    limits: Limits | None = None
    device: Device = "auto"


def embed_sources(
    bundle: StrPath | Bundle,
    sources: StrPath | Sequence[StrPath],
    output: StrPath,
    options: EmbeddingOptions = EmbeddingOptions(),
    *,
    progress: Progress = True,
) -> Embedding:
    """Embed items into a folder of Parquet files.

    An existing part is not embedded again, so repeating an interrupted call resumes it.

    Args:
        bundle: a bundle, or its folder.
        sources: see `retrieval.index.sources.collect`.
        output: the folder to write, or to complete if it holds parts of the same items.
        options: how to embed them.
        progress: see `Index.create`.

    Raises:
        DataError: there are no items, an id is used twice, no item can be used, the folder
            contains another embedding, or the cluster cannot be reached.
        BundleError: the bundle cannot be used or has no features.
        MissingDependency: pyarrow, or Ray for the cluster, is not installed.
    """
    began = time.monotonic()
    pyarrow()
    batch_size = options.batch_size
    if batch_size is not None:
        batch_size = at_least_one("batch_size", batch_size)
    if not isinstance(bundle, Bundle):
        bundle = Bundle.open(bundle, variant=options.variant, device=options.device)
    folder = Path(output).absolute()
    limits = options.limits or Limits()
    widths = widths_of(bundle, features=bundle.features_width if options.features else None)
    with showing(progress):
        collected = collect(paths_of(sources), bundle.manifest.input.kind)
        refuse_twice(collected.items.ids)
        count = len(collected.items)
        plan = EmbeddingPlan(
            bundle=bundle.sha256,
            variant=bundle.variant,
            sources=_hash_of(collected),
            items=count,
            part=max(_SMALLEST_PART, min(_LARGEST_PART, count // _PARTS)),
            batch_size=batch_size or 32,
            widths=dict(widths),
            limits=[limits.pixels, limits.bytes],
        )
        if valid_text(str(folder)) != str(folder):
            raise DataError(f"The path {str(folder)!a} is not valid UTF-8. Name another folder.")
        make_folder(folder)
        with hold(folder, "embedding into this folder", DataError):
            plan = _resumed(folder, plan, batch_size)
            if not (folder / PLAN).exists():
                write_text(folder / PLAN, plan.text(), DataError)
            embedder = _PartEmbedder(bundle, folder, plan, limits)
            embedded: _EmbedParts = partial(map, embedder)
            if options.ray is not None:
                embedded = partial(_embed_on_cluster, options.ray, embedder, options.device)
            bad, resumed = _embed_missing(folder, plan, collected, embedded)
    return Embedding(
        output=folder,
        items=plan.items - bad,
        bad=bad,
        resumed=resumed,
        parts=plan.parts,
        batch_size=plan.batch_size,
        repeated=collected.repeated,
        left_out=collected.left_out,
        seconds=time.monotonic() - began,
    )


_SETTINGS = {
    "bundle": "the bundle",
    "variant": "--variant",
    "sources": "the sources (their files, labels or metadata)",
    "batch_size": "--batch-size",
    "widths": "--features",
    "limits": "--max-pixels or --max-bytes",
}
"""What determines each field of a plan, for error messages."""


def _resumed(folder: Path, new: EmbeddingPlan, batch_size: int | None) -> EmbeddingPlan:
    """Return the plan to follow: `new`, or that of an earlier embedding of the same items.

    Raises:
        DataError: the folder holds anything else.
    """
    if not (folder / PLAN).exists():
        names = [path.name for path in folder.iterdir()]
        if any(not name.startswith(".") and not name.endswith(".tmp") for name in names):
            raise DataError(f"{folder} is not empty, and holds no embedding. Name another folder.")
        return new
    earlier = EmbeddingPlan.read(folder)
    new = replace(new, batch_size=batch_size or earlier.batch_size, part=earlier.part)
    differing = [name for name in _SETTINGS if getattr(earlier, name) != getattr(new, name)]
    if differing:
        texts = ", ".join(_SETTINGS[name] for name in differing)
        raise DataError(
            f"{folder} holds an embedding that differs in {texts}. Repeat the command that began"
            " it, name another folder, or delete this one."
        )
    return new


def _hash_of(sources: Sources) -> str:
    """Return a hash of the keys, labels, metadata, and features or states of files of all items."""
    total = hashlib.sha256()
    encode = json.JSONEncoder(sort_keys=True).encode
    for start in range(0, len(sources.items), _GROUP_ROWS):
        rows = range(start, min(start + _GROUP_ROWS, len(sources.items)))
        items = sources.items.take(rows)
        contents: list[str | None] = []
        if sources.features is not None:
            contents += digests_of(sources.features[rows.start : rows.stop])
        else:
            contents += [item.item().stamp for item in items]
        names = {path: path_text(str(path)) for path in set(items.paths)}
        metadata = json.loads(f"[{','.join(items.texts)}]")
        columns = (items.ids, items.labels, metadata, map(names.get, items.paths), contents)
        # Between two items the encoder, called once, writes a mark that is a line's end here.
        states = [part for state in zip(*columns, strict=True) for part in (state, "\0")]
        lines = encode(states)[1:-1].replace(_BETWEEN, "\n").removesuffix(_BETWEEN[:-2])
        total.update(lines.encode() + b"\n")
    return total.hexdigest()


BadItems = list[dict[str, str]]
"""For each item of a part that cannot be used, its "key", "source" and "fault"."""


@dataclass(frozen=True)
class _Part:
    """The items of a part, with their features for a bundle that takes these."""

    number: int
    sources: Sources

    @classmethod
    def of(cls, sources: Sources, plan: EmbeddingPlan, number: int) -> _Part:
        """Return a part of the sources."""
        rows = plan.rows(number)
        features = None
        if sources.features is not None:
            # A process of a cluster gets the features of its part alone.
            features = sources.features[rows.start : rows.stop]
        return cls(number, Sources(sources.items.take(rows), features))


_EmbedParts = Callable[[Sequence[_Part]], Iterator[tuple[int, BadItems]]]
"""Embeds and writes parts; yields each part's number and its items that cannot be used."""


class _PartEmbedder:
    """Embeds parts with one bundle and writes them into a folder."""

    def __init__(self, bundle: Bundle, folder: Path, plan: EmbeddingPlan, limits: Limits) -> None:
        self.bundle = bundle
        self.folder = folder
        self.plan = plan
        self.limits = limits
        self._options = Options(batch_size=plan.batch_size, limits=limits)

    def __call__(self, part: _Part) -> tuple[int, BadItems]:
        """Embed and write a part; return its number, and its items that cannot be used."""
        items = part.sources.items
        batches = self._embedded(part.sources, range(len(items)))
        identity = identity_metadata(self.bundle)
        bad = write_part(self.folder, self.plan, part.number, items, batches, identity)
        return part.number, bad

    def _embedded(self, sources: Sources, rows: Sequence[int]) -> list[Batch]:
        keep_features = FEATURES in self.plan.widths
        try:
            return list(
                embed_collected(
                    self.bundle, sources, rows, self._options, keep_features=keep_features
                )
            )
        except DataError as fault:  # NaN for some item: find it by embedding each item alone
            if len(rows) == 1:
                (source,) = sources.items.take(rows)
                nothing = sources.items.take([]).items("nothing", [], {})
                return [Batch(nothing, {source.id: f"{source.name}: {fault}"}, 1)]
            return [batch for row in rows for batch in self._embedded(sources, [row])]


def _embed_on_cluster(
    address: str, embedder: _PartEmbedder, device: Device, parts: Sequence[_Part]
) -> Iterator[tuple[int, BadItems]]:
    """Embed parts on a Ray cluster; yield what `_PartEmbedder` returns, in any order."""
    if not parts:
        return
    start = partial(
        _start_on_node,
        installed_version(),
        embedder.folder,
        embedder.plan,
        embedder.limits,
        embedder.bundle.path.absolute(),
        device,
    )
    with cluster_at("ray", address) as cluster:
        yield from cluster.map(start, parts, gpu=device != "cpu")


def _start_on_node(
    version: str, folder: Path, plan: EmbeddingPlan, limits: Limits, path: Path, device: Device
) -> _PartEmbedder:
    """Return the embedder of a process of a cluster, which opens the bundle from its folder."""
    refuse_node(version, folder / PLAN)
    bundle = Bundle.open(path, variant=plan.variant, device=device)
    if bundle.sha256 != plan.bundle:
        raise DataError(f"The bundle {path} was changed while it was in use. Start again.")
    return _PartEmbedder(bundle, folder, plan, limits)


def _embed_missing(
    folder: Path,
    plan: EmbeddingPlan,
    sources: Sources,
    embedded: _EmbedParts,
) -> tuple[int, int]:
    """Embed and write all missing parts by `embedded`.

    Returns:
        The number of items that cannot be used, and the number of items in parts that existed.
    """
    states = {number: finished_part(folder, plan, number) for number in range(plan.parts)}
    bad_of_part = {number: bad for number, bad in states.items() if bad is not None}
    resumed = sum(len(plan.rows(number)) for number in bad_of_part)
    shown_faults = 0
    try:
        with Meter("embedding", plan.items, "items", done=resumed) as meter:
            missing = sorted(states.keys() - bad_of_part.keys())
            parts = [_Part.of(sources, plan, number) for number in missing]
            for number, bad in embedded(parts):
                bad_of_part[number] = bad
                for entry in bad[: max(0, _FAULTS_SHOWN - shown_faults)]:
                    meter.say(f"bad: {entry['fault']}")
                shown_faults += len(bad)
                meter.update(len(plan.rows(number)))
    finally:
        # A killed process of a cluster leaves its file, whose name no other process uses.
        for unfinished in folder.glob("part-*.tmp"):
            unfinished.unlink(missing_ok=True)
        with whole_file(folder / BAD, DataError) as path, path.open("w", encoding="utf-8") as file:
            for _, bad in sorted(bad_of_part.items()):
                for entry in bad:
                    texts = {name: path_text(value) for name, value in entry.items()}
                    file.write(printable_json(texts) + "\n")
    total = sum(map(len, bad_of_part.values()))
    if total == plan.items:
        raise DataError(f"None of the {plan.items:,} items can be used. {folder / BAD} says why.")
    write_text(folder / PLAN, replace(plan, complete=True, bad=total).text(), DataError)
    return total, resumed


def _plan_hash(plan: EmbeddingPlan) -> str:
    """Return a hash of a plan that stays the same when the embedding is completed."""
    content = json.loads(replace(plan, complete=False, bad=None).text())
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_part(
    folder: Path,
    plan: EmbeddingPlan,
    number: int,
    part: SourceColumns,
    batches: Sequence[Batch],
    identity: Mapping[bytes, bytes] = {},
) -> BadItems:
    """Write a part atomically; return its items that cannot be used.

    `identity` is the bundle's entry of the file's metadata; see `identity_metadata`.
    """
    faults = {id: fault for batch in batches for id, fault in batch.faults.items()}
    bad = [
        {"key": id, "source": path_text(str(path))[:2000], "fault": faults[id][:_FAULT_CHARACTERS]}
        for id, path in zip(part.ids, part.paths, strict=True)
        if id in faults
    ]
    pa = pyarrow()
    table = _table(pa, plan, [batch.items for batch in batches if batch.items])
    note = {"plan": _plan_hash(plan), "part": number, "bad": bad}
    table = table.replace_schema_metadata({_NOTE_KEY: json.dumps(note).encode(), **identity})
    # Compress only text; vectors look random and would not shrink.
    texts = [name for name in table.schema.names if name not in plan.widths]
    # A cluster that takes a process for dead may have another one write the same part.
    with whole_file(part_file(folder, number), DataError, shared=True) as path:
        pa.parquet.write_table(
            table,
            path,
            row_group_size=_GROUP_ROWS,
            compression=dict.fromkeys(texts, "zstd"),
            use_dictionary=["label", "bundle"],
            write_page_checksum=True,
            write_statistics=["key", "label"],
        )
    return bad


def _table(pa: Any, plan: EmbeddingPlan, batches: Sequence[ItemColumns]) -> Any:
    """Return the usable items of a part as a pyarrow table."""
    if not batches:
        return schema_of(plan).empty_table()
    items = ItemColumns.joined(batches)
    columns: dict[str, Any] = {
        "key": items.ids,
        "label": items.labels,
        "metadata": items.texts,
        "stamp": items.stamps,
        "path": [path and os.fsencode(path) for path in items.paths],
        **dict(zip(SIZES, zip(*items.sizes, strict=True), strict=True)),
        "bundle": [plan.bundle] * len(items),
    }
    for name, width in plan.widths.items():
        flat = pa.array(items.arrays[name].ravel(), pa.float32())
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, width)
    return pa.table(columns, schema_of(plan))


def finished_part(folder: Path, plan: EmbeddingPlan, number: int) -> BadItems | None:
    """Return the unusable items of a part as `write_part` does.

    Returns `None` if the part is missing, damaged or of another plan.
    """
    pa = pyarrow()
    try:
        with pa.parquet.ParquetFile(part_file(folder, number)) as file:
            note = json.loads((file.schema_arrow.metadata or {})[_NOTE_KEY])
            bad: BadItems = note["bad"]
            whole = file.metadata.num_rows + len(bad) == len(plan.rows(number))
            same = (note["plan"], note["part"]) == (_plan_hash(plan), number)
            if whole and same:
                return bad
            return None
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return None
