"""Embed what sources name into a folder: plan, hand out what is not there yet, write what comes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from retrieval.errors import DataError, at_least_one
from retrieval.host.cores import cores
from retrieval.host.files import whole_file, write_text
from retrieval.serving.bundle import Bundle
from retrieval.serving.embedding.parts import (
    EmbeddedPart,
    Part,
    ShippedBundle,
    embedder,
    finished_part,
    look,
    measurer,
    write_part,
)
from retrieval.serving.embedding.runners import Cluster, Runner, here
from retrieval.serving.files.locks import hold
from retrieval.serving.files.places import StrPath
from retrieval.serving.images import Limits
from retrieval.serving.index.adding import refuse_twice
from retrieval.serving.index.embedded import BAD, Plan
from retrieval.serving.index.locations import PLAN, Source, Sources, shown
from retrieval.serving.index.migrating import features_of
from retrieval.serving.index.parquet import pyarrow
from retrieval.serving.index.sources import collect
from retrieval.serving.progress import Meter, Progress, showing
from retrieval.serving.runtime import Device
from retrieval.serving.store.contract import widths_of

_SMALLEST_PART, _LARGEST_PART, _PARTS = 256, 8192, 1000
_FAULTS_ON_STANDARD_ERROR = 10


@dataclass(frozen=True)
class Embedding:
    """What `embed_sources` did.

    Attributes:
        output: the folder.
        items: that have a vector.
        bad: that could not be used; `bad.jsonl` in the folder says why, a line each.
        resumed: items of parts that were there already.
        parts: files of the folder.
        batch: items that went through the encoder at once.
        repeated: files that were named more than once and taken once.
        left_out: a sentence on what is left out of folders, tables and archives, for each reason.
        seconds: how long it took.
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

    A finished part is never done again: the same call goes on where an earlier one was stopped.

    Args:
        bundle: a bundle, or its folder.
        sources: see `retrieval.serving.index.sources.collect`. Every node of a cluster opens them
            by the same path or address.
        output: the folder, which only this machine writes.
        ray: the address of a Ray cluster; None works on this machine's own cores, without Ray.
        variant: encode with this variant of the encoder.
        features: keep the backbone's features too, of a bundle that is split or takes features.
        batch: items that go through the encoder at once; measured by default.
        part: items of a file; by default so that there are some thousand files, of 256 to 8,192
            items.
        most_bad: so many items may be unusable before the work stops.
        retry_bad: do the parts again that have bad items.
        limits: the largest images that are decoded.
        device: of the encoder: "auto", "cpu" or "cuda".
        cpus: cores of each worker of a cluster; by default 4, or as many as its smallest node has.
        progress: True shows a bar, False nothing; a function is told (what, done, total).

    Raises:
        DataError: no items, an id twice, too many bad items, or the folder holds another embedding.
        BundleError: the bundle cannot be used, or gives no features.
        MissingDependency: pyarrow, or Ray with `ray`, is not installed.
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
        wanted = _wanted(opened, items, part, batch, widths, limits)
        _plan_of(folder, wanted, part, batch)
        runner: Runner = here
        carried: Bundle | ShippedBundle = opened
        threads = max(1, cores() // 2)  # two parts are under way at a time
        if ray is not None:
            runner = cluster = stack.enter_context(Cluster.joined(ray, device, cpus))
            threads = cluster.cpus
            carried = ShippedBundle.of(opened, device, threads)
        _make(folder)
        stack.enter_context(hold(folder, "embedding into this folder", DataError))
        plan = _plan_of(folder, wanted, part, batch)
        if plan is None:
            plan = replace(wanted, batch=batch or next(iter(runner(measurer, (carried,), [None]))))
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


def _wanted(
    bundle: Bundle,
    sources: Sources,
    part: int | None,
    batch: int | None,
    widths: Mapping[str, int],
    limits: Limits,
) -> Plan:
    count = len(sources.items)
    size = part or max(_SMALLEST_PART, min(_LARGEST_PART, count // _PARTS))
    return Plan(
        bundle=bundle.sha256,
        variant=bundle.variant,
        sources=_digest(sources),
        items=count,
        part=size,
        batch=batch or 1,
        widths=dict(widths),
        limits=[limits.pixels, limits.bytes],
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise DataError(f"{folder} cannot be made: {fault.strerror or fault}.") from None


def _plan_of(folder: Path, wanted: Plan, part: int | None, batch: int | None) -> Plan | None:
    """Return the plan of a folder in which the same work was begun; None where none was.

    Raises:
        DataError: it is of another work, saying what differs; or the folder holds something else.
    """
    if not (folder / PLAN).exists():
        if folder.is_dir() and any(
            not path.name.startswith(".") and path.suffix != ".tmp" for path in folder.iterdir()
        ):
            raise DataError(f"{folder} is not empty, and holds no embedding. Name another folder.")
        return None
    before = Plan.read(folder)
    other = "Name another folder, or delete this one."
    if (before.bundle, before.variant) != (wanted.bundle, wanted.variant):
        variant = (
            f", variant {before.variant or 'none'}" if before.variant != wanted.variant else ""
        )
        raise DataError(
            f"{folder} holds vectors of another bundle ({before.bundle[:12]}…{variant}). {other}"
        )
    if (before.sources, before.items) != (wanted.sources, wanted.items):
        raise DataError(
            f"{folder} holds the embedding of other sources ({before.items:,} items; now there are"
            f" {wanted.items:,}), or their files, labels or metadata have changed since it was"
            f" begun. {other}"
        )
    wanted = replace(wanted, part=part or before.part, batch=batch or before.batch)
    options = {
        "part": "--part",
        "batch": "--batch",
        "widths": "--features",
        "limits": "--max-pixels or --max-bytes",
    }
    differing = [
        option for name, option in options.items() if getattr(before, name) != getattr(wanted, name)
    ]
    if differing:
        raise DataError(
            f"{folder} was begun with other values of {', '.join(differing)}: leave them as they"
            f" were. {other}"
        )
    return replace(before, complete=False, bad=None)


def _digest(sources: Sources) -> str:
    """Return what names the items, in order: keys, labels, metadata, and what changes when their
    files do.
    """
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
        number, [replace(item, row=at) for at, item in enumerate(items)], sources.features[rows]
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
    """Have all parts; return how many items are bad, and how many were done before.

    Args:
        folder: where the parts are.
        plan: which there are.
        sources: the items.
        runner: embeds those that are missing.
        arguments: of `embedder`.
        most_bad: see `embed_sources`.
        retry_bad: see `embed_sources`.
    """
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
                        f" {faults[0]} Mend what is wrong, or let more be bad with --max-bad (in"
                        " Python most_bad). The same command goes on; with --retry-bad"
                        f" (retry_bad=True) it does again what was bad. {folder / BAD} names them."
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
    """Refuse a part whose files this machine has, and the node that read them has not: its items
    are not bad.

    Raises:
        DataError: naming the first.
    """
    for at, seen in embedded.seen.items():
        if seen.endswith("missing") and not look(items[at]).endswith("missing"):
            raise DataError(
                f"{items[at].name} is on this machine, but not on node {embedded.node} of the"
                " cluster: every node must have the sources at the same path, on a shared file"
                " system for example, or they must be at an address (s3://…)."
            )


def _write_bad(folder: Path, plan: Plan, numbers: Sequence[int]) -> None:
    """Write the file of bad items, from what their parts say."""
    with whole_file(folder / BAD, DataError) as path, path.open("w", encoding="utf-8") as file:
        for number in numbers:
            for bad in finished_part(folder, plan, number) or ():
                printable = {name: shown(value) for name, value in bad.items()}
                file.write(json.dumps(printable, ensure_ascii=False) + "\n")
