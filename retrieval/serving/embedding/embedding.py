"""Embed sources into a folder of Parquet files: plan parts, embed missing ones, write them."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError, at_least_one
from retrieval.host.cores import cores
from retrieval.host.files import whole_file, write_text
from retrieval.serving.bundle import Bundle
from retrieval.serving.embedding.runners import Cluster, Runner, in_threads
from retrieval.serving.files.locks import hold
from retrieval.serving.files.places import StrPath
from retrieval.serving.filters import metadata_text
from retrieval.serving.images import Limits
from retrieval.serving.index.adding import embed, refuse_twice
from retrieval.serving.index.embedded import BAD, Embedded, Plan, part_file
from retrieval.serving.index.locations import PLAN, Source, Sources, shown
from retrieval.serving.index.migrating import features_of
from retrieval.serving.index.parquet import pyarrow
from retrieval.serving.index.sources import collect, originals
from retrieval.serving.progress import Meter, Progress, showing
from retrieval.serving.runtime import Device
from retrieval.serving.store.contract import Floats, widths_of

_SMALLEST_PART, _LARGEST_PART, _PARTS = 256, 8192, 1000
_FAULTS_ON_STANDARD_ERROR = 10
_GROUP_ROWS = 1024
_FAULT_CHARACTERS = 500
_NOTE = b"retrieval"


@dataclass(frozen=True)
class Embedding:
    """Result of `embed_sources`.

    Attributes:
        output: the folder.
        items: number of items with a vector.
        bad: number of items that could not be used; `bad.jsonl` in the folder has a line for each.
        resumed: number of items in parts that already existed.
        parts: number of Parquet files in the folder.
        batch: number of items per batch.
        repeated: number of files named more than once; each is used once.
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
    ray: str | None = None,
    variant: str | None = None,
    features: bool = False,
    batch: int | None = None,
    part: int | None = None,
    most_bad: int = 10_000,
    retry_bad: bool = False,
    limits: Limits | None = None,
    device: Device = "auto",
    cpus: int | None = None,
    progress: Progress = True,
) -> Embedding:
    """Embed items into a folder of Parquet files.

    Finished parts are not embedded again, so repeating an interrupted call resumes it.

    Args:
        bundle: a bundle, or its folder.
        sources: see `retrieval.serving.index.sources.collect`. Every node of a cluster must be able
            to open them by the same path or address.
        output: the folder. Only this machine writes to it.
        ray: address of a Ray cluster. `None` uses this machine's cores without Ray.
        variant: encode with this variant of the encoder.
        features: also keep the backbone's features. The bundle must be split or take features.
        batch: number of items per batch, 32 by default.
        part: number of items per file. By default a thousandth of all items, but 256 to 8,192.
        most_bad: stop after this many unusable items.
        retry_bad: embed parts with bad items again.
        limits: largest images to decode.
        device: where the encoder runs: "auto", "cpu" or "cuda".
        cpus: cores per worker of a cluster. By default 4, or all cores of its smallest node if
            fewer.
        progress: show a progress bar; a function is called with (what, done, total) instead.

    Raises:
        DataError: there are no items, an id is used twice, too many items are bad, or the folder
            contains another embedding.
        BundleError: the bundle cannot be used or has no features.
        MissingDependency: pyarrow is not installed, or Ray if `ray` is given.
    """
    began = time.monotonic()
    pyarrow()
    for name, value in (("batch", batch), ("part", part), ("cpus", cpus)):
        if value is not None:
            at_least_one(name, value)
    opened = (
        bundle
        if isinstance(bundle, Bundle)
        else Bundle.open(bundle, variant=variant, device=device)
    )
    folder = Path(output).absolute()
    limits = limits or Limits()
    widths = widths_of(opened, features=features_of(opened) if features else None)
    names = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    with showing(progress), ExitStack() as stack:
        items = collect(names, opened.manifest.input.kind)
        refuse_twice(items)
        count = len(items.items)
        new = Plan(
            bundle=opened.sha256,
            variant=opened.variant,
            sources=_digest(items),
            items=count,
            part=part or max(_SMALLEST_PART, min(_LARGEST_PART, count // _PARTS)),
            batch=batch or 32,
            widths=dict(widths),
            limits=[limits.pixels, limits.bytes],
        )
        _plan_of(folder, new, part, batch)
        runner: Runner = in_threads
        carried: Bundle | ShippedBundle = opened
        threads = max(1, cores() // 2)  # two parts run at a time
        if ray is not None:
            runner = cluster = stack.enter_context(Cluster.joined(ray, device, cpus))
            threads = cluster.cpus
            carried = ShippedBundle.of(opened, device, threads)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise DataError(f"{folder} cannot be made: {fault.strerror or fault}.") from None
        stack.enter_context(hold(folder, "embedding into this folder", DataError))
        plan = _plan_of(folder, new, part, batch)
        if plan is None:
            plan = new
            write_text(folder / PLAN, plan.text(), DataError)
        arguments = (carried, plan.batch, threads, limits, features)
        bad, resumed = _fill(folder, plan, items, runner, arguments, most_bad, retry_bad)
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


def _plan_of(folder: Path, new: Plan, part: int | None, batch: int | None) -> Plan | None:
    """Return the plan of an earlier run of the same work in this folder, or `None`.

    Raises:
        DataError: the folder has a plan that differs (the message says how), or other content.
    """
    if not (folder / PLAN).exists():
        if folder.is_dir() and any(
            not path.name.startswith(".") and path.suffix != ".tmp" for path in folder.iterdir()
        ):
            raise DataError(f"{folder} is not empty, and holds no embedding. Name another folder.")
        return None
    begun = Plan.read(folder)
    advice = "Name another folder, or delete this one."
    if (begun.bundle, begun.variant) != (new.bundle, new.variant):
        variant = f", variant {begun.variant or 'none'}" if begun.variant != new.variant else ""
        raise DataError(
            f"{folder} holds vectors of another bundle ({begun.bundle[:12]}…{variant}). {advice}"
        )
    if (begun.sources, begun.items) != (new.sources, new.items):
        raise DataError(
            f"{folder} holds the embedding of other sources ({begun.items:,} items; now there are"
            f" {new.items:,}), or their files, labels or metadata have changed since it was"
            f" begun. {advice}"
        )
    new = replace(new, part=part or begun.part, batch=batch or begun.batch)
    options = {
        "part": "--part",
        "batch": "--batch",
        "widths": "--features",
        "limits": "--max-pixels or --max-bytes",
    }
    differing = [
        option for name, option in options.items() if getattr(begun, name) != getattr(new, name)
    ]
    if differing:
        raise DataError(
            f"{folder} was begun with other values of {', '.join(differing)}: leave them as they"
            f" were. {advice}"
        )
    return replace(begun, complete=False, bad=None)


def _digest(sources: Sources) -> str:
    """Return a hash of the keys, labels, metadata and file stamps of all items."""
    total = hashlib.sha256()
    for item in sources.items:
        state = [item.key, item.label, dict(item.metadata), item.stamp()]
        total.update(json.dumps(state, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
    if sources.features is not None:
        for start in range(0, len(sources.features), 4096):
            total.update(sources.features[start : start + 4096].tobytes())
    return total.hexdigest()


def _items(sources: Sources, plan: Plan, number: int) -> Sequence[Source]:
    rows = plan.rows(number)
    return sources.items[rows.start : rows.stop]


def _part(sources: Sources, plan: Plan, number: int) -> Part:
    items = _items(sources, plan, number)
    if sources.features is None:
        return Part(number, items)
    rows = np.array([item.row for item in items], np.int64)
    return Part(
        number, [replace(item, row=row) for row, item in enumerate(items)], sources.features[rows]
    )


def _fill(
    folder: Path,
    plan: Plan,
    sources: Sources,
    runner: Runner,
    arguments: tuple[Bundle | ShippedBundle, int, int, Limits, bool],
    most_bad: int,
    retry_bad: bool,
) -> tuple[int, int]:
    """Embed all missing parts; return the number of bad items and of items done before."""
    counts: dict[int, int] = {}
    for number in range(plan.parts):
        bad = finished_part(folder, plan, number)
        if bad is not None and not (bad and retry_bad):
            counts[number] = len(bad)
    resumed = sum(len(plan.rows(number)) for number in counts)
    missing = [number for number in range(plan.parts) if number not in counts]
    parts = (_part(sources, plan, number) for number in missing)
    printed = 0
    try:
        with Meter("embedding", plan.items, "items", done=resumed) as meter:
            for embedded in runner(embedder, arguments, parts) if missing else ():
                items = _items(sources, plan, embedded.number)
                if isinstance(arguments[0], ShippedBundle):
                    _refuse_unseen(items, embedded)
                faults = [entry.fault for entry in embedded.entries if entry.fault is not None]
                if faults and sum(counts.values()) + len(faults) > most_bad:
                    raise DataError(
                        f"More than {most_bad:,} items cannot be used, the last of them because:"
                        f" {faults[0]} Fix the cause, or allow more with --max-bad (in Python"
                        " most_bad). The same command resumes; with --retry-bad (retry_bad=True) it"
                        f" also tries bad items again. {folder / BAD} lists them."
                    )
                counts[embedded.number] = write_part(folder, plan, items, embedded)
                for fault in faults[: max(0, _FAULTS_ON_STANDARD_ERROR - printed)]:
                    meter.say(f"bad: {fault}")
                printed += len(faults)
                meter.update(len(items))
    finally:
        _write_bad(folder, plan, sorted(number for number, count in counts.items() if count))
    total = sum(counts.values())
    if total == plan.items:
        raise DataError(f"None of the {plan.items:,} items can be used. {folder / BAD} says why.")
    write_text(folder / PLAN, replace(plan, complete=True, bad=total).text(), DataError)
    return total, resumed


def _refuse_unseen(items: Sequence[Source], embedded: EmbeddedPart) -> None:
    """Refuse a part whose files exist on this machine, but not on the node that embedded it.

    Raises:
        DataError: a file was not visible on the node; the message names the first.
    """
    for row, seen in embedded.seen.items():
        if seen.endswith("missing") and not look(items[row]).endswith("missing"):
            raise DataError(
                f"{items[row].name} is on this machine, but not on node {embedded.node} of the"
                " cluster: every node must have the sources at the same path, on a shared file"
                " system for example, or they must be at an address (s3://…)."
            )


def _write_bad(folder: Path, plan: Plan, numbers: Sequence[int]) -> None:
    """Write `bad.jsonl` from the bad items recorded in the parts."""
    with whole_file(folder / BAD, DataError) as path, path.open("w", encoding="utf-8") as file:
        for number in numbers:
            for bad in finished_part(folder, plan, number) or ():
                printable = {name: shown(value) for name, value in bad.items()}
                file.write(json.dumps(printable, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Part:
    """Items that are embedded and written together.

    Attributes:
        number: number of the part, from 0.
        items: items in order.
        features: features (n, F), indexed by `Source.row`, if the bundle takes features. Otherwise
            `None`.
    """

    number: int
    items: Sequence[Source]
    features: Floats | None = None


@dataclass(frozen=True)
class EmbeddedPart:
    """An encoded part.

    Attributes:
        number: number of the part.
        entries: one entry per item, in order and without arrays: facts about its original, or why
            it cannot be used.
        arrays: arrays (n, width) of the usable items, in order: "vector" and, if present, "code"
            and "features".
        seen: file stamps of unusable items on the node that read them, by position in the part.
        node: name of the machine that embedded the part.
    """

    number: int
    entries: Sequence[Embedded]
    arrays: Mapping[str, Floats]
    seen: Mapping[int, str] = field(default_factory=dict)
    node: str = ""


@dataclass(frozen=True)
class ShippedBundle:
    """A bundle's files and options, to be sent to another machine.

    Attributes:
        files: content of each file, by name.
        variant: variant of its encoder.
        device: see `Bundle.open`.
        threads: see `Bundle.open`.
    """

    files: Mapping[str, bytes]
    variant: str | None
    device: Device
    threads: int | None = None

    @classmethod
    def of(cls, bundle: Bundle, device: Device, threads: int | None = None) -> ShippedBundle:
        """Return the files of an opened bundle, unchanged since it was opened."""
        with tempfile.TemporaryDirectory() as folder:
            bundle.copy(copy := Path(folder) / "bundle")
            files = {path.name: path.read_bytes() for path in copy.iterdir()}
        return cls(files, bundle.variant, device, threads)

    def open(self) -> Bundle:
        """Open the bundle on this machine."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(content)
            return Bundle.open(
                folder, variant=self.variant, device=self.device, threads=self.threads
            )


def embedder(
    bundle: Bundle | ShippedBundle, batch: int, workers: int, limits: Limits, features: bool
) -> Callable[[Part], EmbeddedPart]:
    """Return a function that embeds parts; an unusable item affects no other item."""
    encoder = bundle.open() if isinstance(bundle, ShippedBundle) else bundle

    def results(part: Part, items: Sequence[Source]) -> list[Embedded]:
        named = originals(items, part.features, limits.bytes)
        batches = embed(
            encoder,
            named,
            batch=batch,
            workers=workers,
            limits=limits,
            keep_features=features,
            stamp=Source.stamp,
        )
        return [result for batch in batches for _, result in batch]

    def alone(part: Part, item: Source) -> Embedded:
        try:
            return results(part, [item])[0]
        except DataError as fault:
            return Embedded(f"{item.name}: {fault}", item.stamp())

    def embed_part(part: Part) -> EmbeddedPart:
        try:
            entries = results(part, part.items)
        except DataError:
            # The encoder returns NaN for some item. Encoding items one by one shows for which.
            entries = [alone(part, item) for item in part.items]
        usable = [entry.arrays for entry in entries if entry.fault is None]
        return EmbeddedPart(
            part.number,
            [replace(entry, arrays={}) for entry in entries],
            {
                name: np.stack([arrays[name] for arrays in usable])
                for name in (usable[0] if usable else ())
            },
            {
                row: look(part.items[row])
                for row, entry in enumerate(entries)
                if entry.fault is not None
            },
            socket.gethostname(),
        )

    return embed_part


def look(item: Source) -> str:
    """Return the stamp of the item's file on this machine, or "" for an address."""
    if item.path is not None:
        return item.stamp()
    return (
        "" if item.origin is None or item.origin.location.remote else item.origin.location.stamp()
    )


def _identity(plan: Plan) -> str:
    """Return a hash of a plan that does not depend on its completion."""
    content = json.loads(replace(plan, complete=False, bad=None).text())
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_part(folder: Path, plan: Plan, items: Sequence[Source], embedded: EmbeddedPart) -> int:
    """Write a part atomically; return how many of its items are bad.

    Raises:
        DataError: the disk fails.
    """
    pairs = list(zip(items, embedded.entries, strict=True))
    bad = [
        {"key": item.key, "source": item.name[:2000], "fault": entry.fault[:_FAULT_CHARACTERS]}
        for item, entry in pairs
        if entry.fault is not None
    ]
    pa = pyarrow()
    table = _table(pa, plan, [pair for pair in pairs if pair[1].fault is None], embedded.arrays)
    note = {"plan": _identity(plan), "part": embedded.number, "bad": bad}
    table = table.replace_schema_metadata({_NOTE: json.dumps(note).encode()})
    # Only texts are compressed; vectors look random and would not shrink.
    texts = [name for name in table.schema.names if name not in plan.widths]
    with whole_file(part_file(folder, embedded.number), DataError) as path:
        pa.parquet.write_table(
            table,
            path,
            row_group_size=_GROUP_ROWS,
            compression=dict.fromkeys(texts, "zstd"),
            use_dictionary=["label", "bundle"],
            write_page_checksum=True,
            write_statistics=["key", "label"],
        )
    return len(bad)


def _table(
    pa: Any, plan: Plan, usable: Sequence[tuple[Source, Embedded]], arrays: Mapping[str, Floats]
) -> Any:
    """Return the usable items of a part as a pyarrow table."""

    def column(kind: Any, value: Callable[[Source, Embedded], Any]) -> Any:
        return pa.array([value(item, entry) for item, entry in usable], kind)

    def address(text: str | Path | None, item: Source) -> bytes | None:
        return os.fsencode(text) if text and item.row is None else None

    columns: dict[str, Any] = {
        "key": column(pa.string(), lambda item, _: item.key),
        "label": column(pa.string(), lambda item, _: item.label),
        "metadata": column(pa.string(), lambda item, _: metadata_text(item.metadata)),
        "path": column(pa.binary(), lambda item, _: address(item.path, item)),
        "source": column(
            pa.binary(), lambda item, _: address(item.origin.address if item.origin else None, item)
        ),
        "stamp": column(
            pa.string(), lambda item, entry: entry.stamp if item.row is None else item.stamp()
        ),
        "bytes": column(pa.int64(), lambda _, entry: entry.bytes),
        "width": column(pa.int64(), lambda _, entry: entry.width),
        "height": column(pa.int64(), lambda _, entry: entry.height),
    }
    for name, width in plan.widths.items():
        values = arrays.get(name)
        flat = pa.array([] if values is None else values.reshape(-1), pa.float32())
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, width)
    columns["bundle"] = pa.array([plan.bundle] * len(usable), pa.string()).dictionary_encode()
    return pa.table(columns)


def finished_part(folder: Path, plan: Plan, number: int) -> list[dict[str, str]] | None:
    """Return the bad items of a part, or `None` if it is missing, damaged or of another plan."""
    pa = pyarrow()
    try:
        with pa.parquet.ParquetFile(part_file(folder, number)) as file:
            note = json.loads((file.schema_arrow.metadata or {})[_NOTE])
            bad: list[dict[str, str]] = note["bad"]
            whole = file.metadata.num_rows + len(bad) == len(plan.rows(number))
            return (
                bad if whole and (note["plan"], note["part"]) == (_identity(plan), number) else None
            )
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return None
