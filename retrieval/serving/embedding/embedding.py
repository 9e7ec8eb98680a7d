"""Embed what sources name into a folder: plan, hand out what is not there yet, write what comes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from retrieval.errors import DataError, at_least_one
from retrieval.host.cores import cores
from retrieval.host.files import whole_file, write_text
from retrieval.serving.bundle import Bundle
from retrieval.serving.embedding.parts import (
    Made,
    Part,
    Shipped,
    bad_line,
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
from retrieval.serving.index.encoding import Settings
from retrieval.serving.index.locations import PLAN, Source, Sources
from retrieval.serving.index.migrating import features_of
from retrieval.serving.index.sources import collect
from retrieval.serving.index.tables import pyarrow
from retrieval.serving.progress import Meter, Progress, showing
from retrieval.serving.providers import Device
from retrieval.serving.store.contract import widths_of

_LEAST, _MOST, _PARTS = 256, 8192, 1000
"""Items of a part: as many as make a thousand parts, within bounds."""
_TOLD = 10  # bad items that are told on standard error


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
    """Embed items into a folder of Parquet files. A finished part is never done again: the same call goes on where one was stopped.

    Args:
        bundle: a bundle, or its folder.
        sources: see `retrieval.serving.index.sources.collect`. Every node of a cluster opens them by the same path or address.
        output: the folder, which only this machine writes.
        ray: the address of a Ray cluster; None works on this machine's own cores, without Ray.
        variant: encode with this variant of the encoder.
        features: keep the backbone's features too, of a bundle that is split or takes features.
        batch: items that go through the encoder at once; measured by default.
        part: items of a file; by default so that there are some thousand files, of 256 to 8,192 items.
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
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle, variant=variant, device=device)
    folder = Path(output).absolute()
    limits = limits or Limits()
    widths = widths_of(opened, features=features_of(opened) if features else None)
    named = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    with showing(progress), ExitStack() as stack:
        found = collect(named, opened.manifest.input.kind)
        refuse_twice(found)
        asked = Plan(
            opened.sha256, opened.variant, _digest(found), len(found.items), part or _part_size(len(found.items)), batch or 1, widths,
            [limits.pixels, limits.bytes],
        )  # fmt: skip
        _begun(folder, asked, part, batch)
        runner: Runner = here
        carried: Bundle | Shipped = opened
        free = cores()
        if ray is not None:
            runner = cluster = stack.enter_context(Cluster.joined(ray, device, cpus))
            free = cluster.cpus
            carried = Shipped.of(opened, device, free)
        _make(folder)
        stack.enter_context(hold(folder, "embedding into this folder", DataError))
        plan = _begun(folder, asked, part, batch)
        if plan is None:
            plan = replace(asked, batch=batch or _measured(runner, carried))
            write_text(folder / PLAN, plan.text(), DataError)
        # here two parts are under way at a time, a worker of a cluster has one
        threads = free if ray is not None else max(1, free // 2)
        settings = Settings(plan.batch, threads, limits, features)
        bad, resumed = _fill(folder, plan, found, runner, (carried, settings), most_bad, retry_bad)
    return Embedding(
        folder, plan.items - bad, bad, resumed, plan.parts, plan.batch, found.repeated, found.left_out, time.monotonic() - began
    )  # fmt: skip


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise DataError(f"{folder} cannot be made: {fault.strerror or fault}.") from None


def _begun(folder: Path, asked: Plan, part: int | None, batch: int | None) -> Plan | None:
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
    if (before.bundle, before.variant) != (asked.bundle, asked.variant):
        ran = "" if before.variant == asked.variant else f", variant {before.variant or 'none'}"
        raise DataError(f"{folder} holds vectors of another bundle ({before.bundle[:12]}…{ran}). {other}")
    if (before.sources, before.items) != (asked.sources, asked.items):
        raise DataError(
            f"{folder} holds the embedding of other sources ({before.items:,} items; now there are {asked.items:,}), or their files, labels "
            f"or metadata have changed since it was begun. {other}"
        )
    asked = replace(asked, part=part or before.part, batch=batch or before.batch)
    options = {
        "part": "--part",
        "batch": "--batch",
        "widths": "--features",
        "limits": "--max-pixels or --max-bytes",
    }
    if differing := [
        option for name, option in options.items() if getattr(before, name) != getattr(asked, name)
    ]:
        raise DataError(
            f"{folder} was begun with other values of {', '.join(differing)}: leave them as they were. {other}"
        )
    return replace(before, complete=False, bad=None)


def _part_size(items: int) -> int:
    return max(_LEAST, min(_MOST, items // _PARTS))


def _measured(runner: Runner, bundle: Bundle | Shipped) -> int:
    return int(next(iter(runner(measurer, (bundle,), [None]))))


def _digest(found: Sources) -> str:
    """Return what names the items, in order: keys, labels, metadata, and what changes when their files do."""
    total = hashlib.sha256()
    for item in found.items:
        said = [item.key, item.label, dict(item.metadata), item.stamp()]
        total.update(json.dumps(said, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
    if found.features is not None:
        for start in range(0, len(found.features), 4096):
            total.update(found.features[start : start + 4096].tobytes())
    return total.hexdigest()


def _part(found: Sources, plan: Plan, number: int) -> Part:
    rows = plan.rows(number)
    items = found.items[rows.start : rows.stop]
    if found.features is None:
        return Part(number, items)
    numbers = np.array([item.row for item in items], np.int64)
    return Part(number, [replace(item, row=at) for at, item in enumerate(items)], found.features[numbers])


def _fill(
    folder: Path,
    plan: Plan,
    found: Sources,
    runner: Runner,
    given: tuple[Bundle | Shipped, Settings],
    most_bad: int,
    retry_bad: bool,
) -> tuple[int, int]:
    """Have all parts; return how many items are bad, and how many were done before."""
    counts: dict[int, int] = {}
    for number in range(plan.parts):
        bad = finished_part(folder, plan, number)
        if bad is not None and not (bad and retry_bad):
            counts[number] = len(bad)
    resumed = sum(len(plan.rows(number)) for number in counts)
    missing = [number for number in range(plan.parts) if number not in counts]
    told = 0
    try:
        with Meter("embedding", plan.items, "items", done=resumed) as meter:
            if missing:
                for made in runner(embedder, given, (_part(found, plan, number) for number in missing)):
                    rows = plan.rows(made.number)
                    items = found.items[rows.start : rows.stop]
                    if made.number in counts:
                        continue
                    _refuse_unseen(items, made, given[0])
                    faults = [entry.fault for entry in made.entries if entry.fault is not None]
                    if sum(counts.values()) + len(faults) > most_bad:
                        raise DataError(_too_many(most_bad, faults[0], folder))
                    counts[made.number] = write_part(folder, plan, items, made)
                    for fault in faults[: max(0, _TOLD - told)]:
                        meter.say(f"bad: {fault}")
                    told += len(faults)
                    meter.update(len(items))
    finally:
        _write_bad(folder, plan, sorted(number for number, bad in counts.items() if bad))
    bad_items = sum(counts.values())
    if bad_items == plan.items:
        raise DataError(f"None of the {plan.items:,} items can be used. {folder / BAD} says why.")
    write_text(folder / PLAN, replace(plan, complete=True, bad=bad_items).text(), DataError)
    return bad_items, resumed


def _too_many(most: int, fault: str, folder: Path) -> str:
    return (
        f"More than {most:,} items cannot be used, the last of them because: {fault} Mend what is wrong, or let more be bad with --max-bad "
        f"(in Python most_bad). The same command goes on; with --retry-bad (retry_bad=True) it does again what was bad. {folder / BAD} names them."
    )


def _refuse_unseen(items: Sequence[Source], made: Made, bundle: Bundle | Shipped) -> None:
    """Refuse a part whose files this machine has, and the node that read them has not: its items are not bad.

    Raises:
        DataError: naming the first.
    """
    if isinstance(bundle, Bundle):
        return
    for at, seen in made.seen.items():
        if seen.endswith("missing") and not look(items[at]).endswith("missing"):
            raise DataError(
                f"{items[at].name} is on this machine, but not on node {made.node} of the cluster: every node must have the sources at the same path, "
                "on a shared file system for example, or they must be at an address (s3://…)."
            )


def _write_bad(folder: Path, plan: Plan, numbers: Sequence[int]) -> None:
    """Write the file of bad items, from what their parts say."""

    def lines() -> Iterator[str]:
        for number in numbers:
            for bad in finished_part(folder, plan, number) or ():
                yield bad_line(bad)

    with whole_file(folder / BAD, DataError) as path, path.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines())
