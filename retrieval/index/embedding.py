"""Embed items into a folder of Parquet files, a part of the items at a time."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.base.files import make_folder, whole_file, write_text
from retrieval.base.locks import hold
from retrieval.base.places import StrPath
from retrieval.base.progress import Meter, Progress, showing
from retrieval.base.runtime import Device
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, at_least_one, printable_json, valid_text
from retrieval.images.images import Limits
from retrieval.index.adding import Options, Result, embed, refuse_twice
from retrieval.index.embedded import BAD, SIZES, Plan, part_file, schema_of
from retrieval.index.locations import PLAN, Source, Sources, digest_of, paths_of, shown
from retrieval.index.parquet import pyarrow
from retrieval.index.sources import collect, originals
from retrieval.store.filters import metadata_text
from retrieval.store.items import FEATURES, Item, widths_of

_SMALLEST_PART, _LARGEST_PART = 256, 8192  # items of a part
_PARTS = 1000  # number of parts to aim for
_FAULTS_SHOWN = 10
_GROUP_ROWS = 1024
_FAULT_CHARACTERS = 500
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


def embed_sources(
    bundle: StrPath | Bundle,
    sources: StrPath | Sequence[StrPath],
    output: StrPath,
    *,
    variant: str | None = None,
    features: bool = False,
    batch_size: int | None = None,
    limits: Limits | None = None,
    device: Device = "auto",
    progress: Progress = True,
) -> Embedding:
    """Embed items into a folder of Parquet files.

    An existing part is not embedded again, so repeating an interrupted call resumes it.

    Args:
        bundle: a bundle, or its folder.
        sources: see `retrieval.index.sources.collect`.
        output: the folder to write, or to complete if it holds parts of the same items.
        features: also write the backbone's features. The bundle must be split into backbone and
            head, or take features.
        batch_size: number of items per batch. `None` is that of the folder to complete, or 32.
        variant, limits, device, progress: see `Index.create`.

    Raises:
        DataError: there are no items, an id is used twice, no item can be used, or the folder
            contains another embedding.
        BundleError: the bundle cannot be used or has no features.
        MissingDependency: pyarrow is not installed.
    """
    began = time.monotonic()
    pyarrow()
    batch_size = None if batch_size is None else at_least_one("batch_size", batch_size)
    if not isinstance(bundle, Bundle):
        bundle = Bundle.open(bundle, variant=variant, device=device)
    folder, limits = Path(output).absolute(), limits or Limits()
    widths = widths_of(bundle, features=bundle.features_width if features else None)
    with showing(progress):
        collected = collect(paths_of(sources), bundle.manifest.input.kind)
        refuse_twice(item.key for item in collected.items)
        count = len(collected.items)
        plan = Plan(
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
            bad, resumed = _embed_missing(folder, plan, collected, bundle, limits)
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


def _resumed(folder: Path, new: Plan, batch_size: int | None) -> Plan:
    """Return the plan to follow: `new`, or that of an earlier embedding of the same items.

    Raises:
        DataError: the folder holds anything else.
    """
    if not (folder / PLAN).exists():
        names = [path.name for path in folder.iterdir()]
        if any(not name.startswith(".") and not name.endswith(".tmp") for name in names):
            raise DataError(f"{folder} is not empty, and holds no embedding. Name another folder.")
        return new
    earlier = Plan.read(folder)
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
    for item in sources.items:
        content = item.item().stamp
        if sources.features is not None:
            content = digest_of(sources.features[item.row].tobytes())
        state = [item.key, item.label, dict(item.metadata), item.name, content]
        total.update(json.dumps(state, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
    return total.hexdigest()


def _embed_missing(
    folder: Path, plan: Plan, sources: Sources, bundle: Bundle, limits: Limits
) -> tuple[int, int]:
    """Embed and write all missing parts.

    Returns:
        The number of items that cannot be used, and the number of items in parts that existed.
    """
    options = Options(batch_size=plan.batch_size, limits=limits)

    def embedded(part: Sequence[Source]) -> list[Result]:
        contents = originals(part, sources.features)
        batches = embed(bundle, contents, options, keep_features=FEATURES in plan.widths)
        try:
            return [result for batch in batches for result in batch]
        except DataError as fault:  # NaN for some item: find it by embedding each item alone
            if len(part) == 1:
                return [(part[0].item(), f"{part[0].name}: {fault}")]
            return [result for source in part for result in embedded([source])]

    states = {number: finished_part(folder, plan, number) for number in range(plan.parts)}
    bad_of_part = {number: bad for number, bad in states.items() if bad is not None}
    resumed = sum(len(plan.rows(number)) for number in bad_of_part)
    shown_faults = 0
    try:
        with Meter("embedding", plan.items, "items", done=resumed) as meter:
            for number in sorted(states.keys() - bad_of_part.keys()):
                rows = plan.rows(number)
                part = sources.items[rows.start : rows.stop]
                bad_of_part[number] = write_part(folder, plan, number, part, embedded(part))
                for entry in bad_of_part[number][: max(0, _FAULTS_SHOWN - shown_faults)]:
                    meter.say(f"bad: {entry['fault']}")
                shown_faults += len(bad_of_part[number])
                meter.update(len(part))
    finally:
        with whole_file(folder / BAD, DataError) as path, path.open("w", encoding="utf-8") as file:
            for _, bad in sorted(bad_of_part.items()):
                for entry in bad:
                    texts = {name: shown(value) for name, value in entry.items()}
                    file.write(printable_json(texts) + "\n")
    total = sum(map(len, bad_of_part.values()))
    if total == plan.items:
        raise DataError(f"None of the {plan.items:,} items can be used. {folder / BAD} says why.")
    write_text(folder / PLAN, replace(plan, complete=True, bad=total).text(), DataError)
    return total, resumed


def _plan_hash(plan: Plan) -> str:
    """Return a hash of a plan that stays the same when the embedding is completed."""
    content = json.loads(replace(plan, complete=False, bad=None).text())
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_part(
    folder: Path, plan: Plan, number: int, part: Sequence[Source], results: Sequence[Result]
) -> list[dict[str, str]]:
    """Write a part atomically.

    Returns:
        For each item that cannot be used, its "key", "source" and "fault".
    """
    bad = [
        {"key": source.key, "source": source.name[:2000], "fault": fault[:_FAULT_CHARACTERS]}
        for source, (_, fault) in zip(part, results, strict=True)
        if fault is not None
    ]
    pa = pyarrow()
    table = _table(pa, plan, [item for item, fault in results if fault is None])
    note = {"plan": _plan_hash(plan), "part": number, "bad": bad}
    table = table.replace_schema_metadata({_NOTE_KEY: json.dumps(note).encode()})
    # Compress only text; vectors look random and would not shrink.
    texts = [name for name in table.schema.names if name not in plan.widths]
    with whole_file(part_file(folder, number), DataError) as path:
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


def _table(pa: Any, plan: Plan, items: Sequence[Item]) -> Any:
    """Return the usable items of a part as a pyarrow table."""
    columns: dict[str, Any] = {
        "key": [item.id for item in items],
        "label": [item.label for item in items],
        "metadata": [metadata_text(item.metadata) for item in items],
        "stamp": [item.stamp for item in items],
        "path": [item.path and os.fsencode(item.path) for item in items],
        **{name: [getattr(item, name) for item in items] for name in SIZES},
        "bundle": [plan.bundle] * len(items),
    }
    for name, width in plan.widths.items():
        values = [item.arrays[name] for item in items]
        flat = pa.array(np.concatenate(values) if values else [], pa.float32())
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, width)
    return pa.table(columns, schema_of(plan))


def finished_part(folder: Path, plan: Plan, number: int) -> list[dict[str, str]] | None:
    """Return the unusable items of a part as `write_part` does.

    Returns `None` if the part is missing, damaged or of another plan.
    """
    pa = pyarrow()
    try:
        with pa.parquet.ParquetFile(part_file(folder, number)) as file:
            note = json.loads((file.schema_arrow.metadata or {})[_NOTE_KEY])
            bad: list[dict[str, str]] = note["bad"]
            whole = file.metadata.num_rows + len(bad) == len(plan.rows(number))
            same = (note["plan"], note["part"]) == (_plan_hash(plan), number)
            return bad if whole and same else None
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return None
