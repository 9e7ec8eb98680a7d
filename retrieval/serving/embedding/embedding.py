"""Embed items into a folder of Parquet files: plan the parts, then write the missing parts."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError, at_least_one
from retrieval.host.cores import cores
from retrieval.host.files import whole_file, write_text
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.locks import hold
from retrieval.serving.files.places import StrPath
from retrieval.serving.filters import metadata_text
from retrieval.serving.images import Limits
from retrieval.serving.index.adding import Options, Result, embed, refuse_twice
from retrieval.serving.index.embedded import BAD, SIZES, Plan, part_file
from retrieval.serving.index.locations import PLAN, Source, Sources, paths_of, shown
from retrieval.serving.index.migrating import features_of
from retrieval.serving.index.parquet import pyarrow
from retrieval.serving.index.sources import collect, originals
from retrieval.serving.progress import Meter, Progress, showing
from retrieval.serving.runtime import Device
from retrieval.serving.sessions import ahead
from retrieval.serving.store.items import FEATURES, Floats, Item, widths_of

_SMALLEST_PART, _LARGEST_PART, _PARTS = 256, 8192, 1000  # items, items, number of parts to aim for
_PARTS_AT_A_TIME = 2
"""So that one part is decoded while the other is finished."""
_FAULTS_ON_STANDARD_ERROR = 10
_GROUP_ROWS = 1024
_FAULT_CHARACTERS = 500
_NOTE_KEY = b"retrieval"  # key of this module's note in the metadata of a Parquet file

Part = Sequence[Source]


@dataclass(frozen=True)
class Embedding:
    """Result of `embed_sources`.

    Attributes:
        output: the folder of embeddings.
        items: number of items that were embedded.
        bad: number of items that could not be used; `bad.jsonl` in the folder has a line for each.
        resumed: number of items in parts that already existed.
        parts: number of Parquet files in the folder.
        batch: number of items per batch.
        repeated: number of repeated files in the sources; a file is used once.
        left_out: one sentence per reason why files or columns were left out.
        seconds: duration in seconds.
    """

    output: Path
    items: int
    bad: int
    resumed: int
    parts: int
    batch: int
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
    batch: int | None = None,
    limits: Limits | None = None,
    device: Device = "auto",
    progress: Progress = True,
) -> Embedding:
    """Embed items into a folder of Parquet files.

    Finished parts are not embedded again, so repeating an interrupted call resumes it.

    Args:
        bundle: a bundle, or its folder.
        sources: see `retrieval.serving.index.sources.collect`.
        output: the folder to write; it may hold an interrupted embedding of the same items.
        variant: variant of the encoder to use.
        features: also write the backbone's features. The bundle must be split into backbone and
            head, or take features.
        batch: number of items per batch, 32 by default.
        limits: largest images to decode.
        device: where the encoder runs: "auto", "cpu" or "cuda".
        progress: True shows a progress bar. A function is called with (what, done, total) instead.

    Raises:
        DataError: there are no items, an id is used twice, no item can be used, or the folder
            contains another embedding.
        BundleError: the bundle cannot be used or has no features.
        MissingDependency: pyarrow is not installed.
    """
    began = time.monotonic()
    pyarrow()
    batch = None if batch is None else at_least_one("batch", batch)
    if not isinstance(bundle, Bundle):
        bundle = Bundle.open(bundle, variant=variant, device=device)
    folder, limits = Path(output).absolute(), limits or Limits()
    widths = widths_of(bundle, features=features_of(bundle) if features else None)
    with showing(progress):
        items = collect(paths_of(sources), bundle.manifest.input.kind)
        refuse_twice(item.key for item in items.items)
        count = len(items.items)
        new = Plan(
            bundle=bundle.sha256,
            variant=bundle.variant,
            sources=_digest_of(items),
            items=count,
            part=max(_SMALLEST_PART, min(_LARGEST_PART, count // _PARTS)),
            batch=batch or 32,
            widths=dict(widths),
            limits=[limits.pixels, limits.bytes],
        )
        _plan_of(folder, new, batch)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise DataError(f"{folder} cannot be created: {fault.strerror or fault}.") from None
        with hold(folder, "embedding into this folder", DataError):
            plan = _plan_of(folder, new, batch)
            if plan is None:
                plan = new
                write_text(folder / PLAN, plan.text(), DataError)
            embed_items = partial(_embed_part, bundle, items.features, limits)
            bad, resumed = _embed_missing(folder, plan, items, embed_items)
    return Embedding(
        output=folder,
        items=plan.items - bad,
        bad=bad,
        resumed=resumed,
        parts=plan.parts,
        batch=plan.batch,
        repeated=items.repeated,
        left_out=items.left_out,
        seconds=time.monotonic() - began,
    )


def _plan_of(folder: Path, new: Plan, batch: int | None) -> Plan | None:
    """Return the plan of an earlier embedding of the same items in this folder, or `None`.

    Raises:
        DataError: the folder holds anything else.
    """
    if not (folder / PLAN).exists():
        if folder.is_dir() and any(
            not path.name.startswith(".") and path.suffix != ".tmp" for path in folder.iterdir()
        ):
            raise DataError(f"{folder} is not empty, and holds no embedding. Name another folder.")
        return None
    earlier = Plan.read(folder)
    advice = "Name another folder, or delete this one."
    if (earlier.bundle, earlier.variant) != (new.bundle, new.variant):
        variant = f", variant {earlier.variant or 'none'}" if earlier.variant != new.variant else ""
        raise DataError(
            f"{folder} holds vectors of another bundle ({earlier.bundle[:12]}…{variant}). {advice}"
        )
    if (earlier.sources, earlier.items) != (new.sources, new.items):
        raise DataError(
            f"{folder} holds the embedding of other sources ({earlier.items:,} items; now there are"
            f" {new.items:,}), or the files, labels or metadata have changed since then. {advice}"
        )
    new = replace(new, batch=batch or earlier.batch)
    options = {"batch": "--batch", "widths": "--features", "limits": "--max-pixels or --max-bytes"}
    differing = [options[name] for name in options if getattr(earlier, name) != getattr(new, name)]
    if differing:
        raise DataError(
            f"{folder} was begun with other values of {', '.join(differing)}. Use the same values"
            f" again. {advice}"
        )
    return replace(earlier, complete=False, bad=None)


def _digest_of(sources: Sources) -> str:
    """Return a hash of the keys, labels, metadata and file stamps of all items."""
    total = hashlib.sha256()
    for item in sources.items:
        state = [item.key, item.label, dict(item.metadata), item.stamp()]
        total.update(json.dumps(state, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
    if sources.features is not None:
        for start in range(0, len(sources.features), 4096):
            total.update(sources.features[start : start + 4096].tobytes())
    return total.hexdigest()


def _embed_missing(
    folder: Path, plan: Plan, sources: Sources, embed_items: Callable[[Plan, Part], list[Result]]
) -> tuple[int, int]:
    """Embed and write all missing parts.

    Returns:
        The number of items that cannot be used, and the number of items in parts that existed.
    """
    states = {number: finished_part(folder, plan, number) for number in range(plan.parts)}
    bad = {number: faults for number, faults in states.items() if faults is not None}
    resumed = sum(len(plan.rows(number)) for number in bad)
    missing = [number for number in states if number not in bad]
    parts = [sources.items[rows.start : rows.stop] for rows in map(plan.rows, missing)]
    printed, at_a_time = 0, _PARTS_AT_A_TIME
    try:
        with Meter("embedding", plan.items, "items", done=resumed) as meter:
            embedded = ahead(partial(embed_items, plan), parts, workers=at_a_time, most=at_a_time)
            for number, part, results in zip(missing, parts, embedded, strict=True):
                bad[number] = write_part(folder, plan, number, part, results)
                for entry in bad[number][: max(0, _FAULTS_ON_STANDARD_ERROR - printed)]:
                    meter.say(f"bad: {entry['fault']}")
                printed += len(bad[number])
                meter.update(len(part))
    finally:
        with whole_file(folder / BAD, DataError) as path, path.open("w", encoding="utf-8") as file:
            for entry in (entry for number in sorted(bad) for entry in bad[number]):
                printable = {name: shown(value) for name, value in entry.items()}
                file.write(json.dumps(printable, ensure_ascii=False) + "\n")
    total = sum(map(len, bad.values()))
    if total == plan.items:
        raise DataError(f"None of the {plan.items:,} items can be used. {folder / BAD} says why.")
    write_text(folder / PLAN, replace(plan, complete=True, bad=total).text(), DataError)
    return total, resumed


def _embed_part(
    bundle: Bundle, features: Floats | None, limits: Limits, plan: Plan, part: Part
) -> list[Result]:
    """Embed the items of a part, so that an unusable item does not affect the others."""
    workers = max(1, cores() // _PARTS_AT_A_TIME)
    options = Options(batch=plan.batch, workers=workers, limits=limits)

    def results(part: Part) -> list[Result]:
        contents = originals(part, features, limits.bytes)
        batches = embed(bundle, contents, options, keep_features=FEATURES in plan.widths)
        return [result for batch in batches for result in batch]

    def single_result(source: Source) -> list[Result]:
        try:
            return results([source])
        except DataError as fault:
            return [(source.item(), f"{source.name}: {fault}")]

    try:
        return results(part)
    except DataError:
        # The encoder returned NaN for an item. To find out for which, encode them one by one.
        return [result for source in part for result in single_result(source)]


def _plan_hash(plan: Plan) -> str:
    """Return a hash of a plan that stays the same when the embedding is completed."""
    content = json.loads(replace(plan, complete=False, bad=None).text())
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_part(
    folder: Path, plan: Plan, number: int, part: Part, results: Sequence[Result]
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
    text, place, size = pa.string(), pa.binary(), pa.int64()

    def column(kind: Any, values: Iterable[object]) -> Any:
        return pa.array(list(values), kind)

    columns = {
        "key": column(text, (item.id for item in items)),
        "label": column(text, (item.label for item in items)),
        "metadata": column(text, (metadata_text(item.metadata) for item in items)),
        "path": column(place, (item.path and os.fsencode(item.path) for item in items)),
        "source": column(place, (item.source and os.fsencode(item.source) for item in items)),
        "stamp": column(text, (item.stamp for item in items)),
        **{name: column(size, (getattr(item, name) for item in items)) for name in SIZES},
    }
    for name, width in plan.widths.items():
        values = [item.arrays[name] for item in items]
        flat = pa.array(np.concatenate(values) if values else [], pa.float32())
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, width)
    columns["bundle"] = column(text, [plan.bundle] * len(items)).dictionary_encode()
    return pa.table(columns)


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
