"""One part: its items decoded and encoded, wherever that is done, and the Parquet file that it becomes."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError
from retrieval.host.files import whole_file
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import metadata_text
from retrieval.serving.index.embedded import Plan, part_file
from retrieval.serving.index.encoding import Embedded, Settings
from retrieval.serving.index.encoding import embed as embed_items
from retrieval.serving.index.locations import Source, shown
from retrieval.serving.index.sources import originals
from retrieval.serving.index.tables import pyarrow
from retrieval.serving.providers import Device
from retrieval.serving.store.contract import Floats

_MEASURED = 0.3
"""Seconds of encoding that a batch size is measured by."""
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_GAIN = 1.05
"""A batch twice as large is taken for at least so much: the smaller one waits less, and takes less memory."""
_GROUP_ROWS = 1024
_FAULT = 500
"""Characters of a sentence on a bad item."""
_NOTE = b"retrieval"


@dataclass(frozen=True)
class Part:
    """Items that are embedded together, and are finished together.

    Attributes:
        number: from 0.
        items: in order.
        features: (n, F) of a bundle that takes features, else None; `Source.row` counts in it.
    """

    number: int
    items: Sequence[Source]
    features: Floats | None = None


@dataclass(frozen=True)
class Made:
    """A part that is embedded.

    Attributes:
        number: of the part.
        entries: one an item, in order, without its arrays: what is known of its original, or why it cannot be used.
        arrays: of the usable items, in order (n, width): "vector", perhaps "code" and "features".
        seen: what an unusable item's file looked like where it was read, by the item's place in the part.
        node: the machine that embedded it.
    """

    number: int
    entries: Sequence[Embedded]
    arrays: Mapping[str, Floats]
    seen: Mapping[int, str]
    node: str = ""


def embed(bundle: Bundle, settings: Settings, part: Part) -> Made:
    """Embed a part. An item that cannot be used, for what it is or for what the encoder gives of it, costs no other.

    Raises:
        BundleError: ONNX Runtime refuses.
    """

    def results(items: Sequence[Source]) -> list[Embedded]:
        named = originals(items, part.features, settings.limits.bytes)
        batches = embed_items(bundle, named, settings, stamp=Source.stamp)
        return [result for batch in batches for _, result in batch]

    def alone(item: Source) -> Embedded:
        try:
            return results([item])[0]
        except DataError as fault:
            return Embedded(f"{item.name}: {fault}", item.stamp())

    try:
        entries = results(part.items)
    except DataError:  # the encoder gives NaN for an item: which one is seen when each is encoded alone
        entries = [alone(item) for item in part.items]
    usable = [entry.arrays for entry in entries if entry.fault is None]
    return Made(
        part.number,
        [replace(entry, arrays={}) for entry in entries],
        {name: np.stack([arrays[name] for arrays in usable]) for name in (usable[0] if usable else ())},
        {row: look(part.items[row]) for row, entry in enumerate(entries) if entry.fault is not None},
        socket.gethostname(),
    )


def look(item: Source) -> str:
    """Return what changes when the item's file does, as this machine sees it now; nothing for what is at an address."""
    if item.path is not None:
        return item.stamp()
    return "" if item.origin is None or item.origin.location.remote else item.origin.location.stamp()


def measured_batch(bundle: Bundle) -> int:
    """Return the batch size from which a larger one gains little, by encoding zeros for a moment."""
    taken = bundle.manifest.input
    best, chosen = 0.0, 1
    began = time.monotonic()
    for size in _SIZES:
        given = np.zeros((size, *taken.shape), taken.dtype)
        bundle.encode(given, batch=size)  # memory is found, and kernels are chosen, the first time
        times: list[float] = []
        while len(times) < 3 or (sum(times) < _MEASURED / len(_SIZES) and len(times) < 50):
            start = time.perf_counter()
            bundle.encode(given, batch=size)
            times.append(time.perf_counter() - start)
        rate = size / min(times)
        if rate > best * _GAIN:
            best, chosen = rate, size
        elif size > 2 * chosen:
            break
        if time.monotonic() - began > 10 * _MEASURED:
            break
    return chosen


@dataclass(frozen=True)
class Shipped:
    """A bundle on its way to another machine.

    Attributes:
        files: their content, by name.
        sha256: the bundle's.
        variant: of its encoder.
        device: see `Bundle.open`.
        threads: of one call of the encoder; None leaves it to ONNX Runtime.
    """

    files: Mapping[str, bytes]
    sha256: str
    variant: str | None
    device: Device
    threads: int | None = None

    @classmethod
    def of(cls, bundle: Bundle, device: Device, threads: int | None = None) -> Shipped:
        """Return an opened bundle, as it was opened."""
        with tempfile.TemporaryDirectory() as folder:
            bundle.copy(whole := Path(folder) / "bundle")
            files = {path.name: path.read_bytes() for path in whole.iterdir()}
        return cls(files, bundle.sha256, bundle.variant, device, threads)

    def open(self) -> Bundle:
        """Open it here."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(content)
            return Bundle.open(folder, variant=self.variant, device=self.device, threads=self.threads)


def embedder(bundle: Bundle | Shipped, settings: Settings) -> Callable[[Part], Made]:
    """Return what embeds parts."""
    opened = bundle.open() if isinstance(bundle, Shipped) else bundle
    return lambda part: embed(opened, settings, part)


def measurer(bundle: Bundle | Shipped) -> Callable[[None], int]:
    """Return what measures the batch size."""
    opened = bundle.open() if isinstance(bundle, Shipped) else bundle
    return lambda _: measured_batch(opened)


def _identity(plan: Plan) -> str:
    """Return what names a plan, whether it is complete or not."""
    said = json.loads(plan.text())
    said |= {"complete": False, "bad": None}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_part(folder: Path, plan: Plan, items: Sequence[Source], made: Made) -> int:
    """Write a part, whole or not at all; return how many of its items are bad.

    Raises:
        DataError: the disk refuses.
    """
    bad = [
        {"key": item.key, "source": item.name[:2000], "fault": entry.fault[:_FAULT]}
        for item, entry in zip(items, made.entries, strict=True)
        if entry.fault is not None
    ]
    pa = pyarrow()
    table = _table(pa, plan, items, made)
    note = {"plan": _identity(plan), "part": made.number, "bad": bad}
    table = table.replace_schema_metadata({_NOTE: json.dumps(note).encode()})
    with whole_file(part_file(folder, made.number), DataError) as path:
        # numbers that look random do not compress; texts do
        columns = [name for name in table.schema.names if name not in plan.widths]
        pa.parquet.write_table(
            table, path, row_group_size=_GROUP_ROWS, compression=dict.fromkeys(columns, "zstd"),
            use_dictionary=["label", "bundle"], write_page_checksum=True, write_statistics=["key", "label"],
        )  # fmt: skip
    return len(bad)


def _table(pa: Any, plan: Plan, items: Sequence[Source], made: Made) -> Any:
    good = [(item, entry) for item, entry in zip(items, made.entries, strict=True) if entry.fault is None]
    files = [item.row is None for item, _ in good]
    columns: dict[str, Any] = {
        "key": pa.array([item.key for item, _ in good], pa.string()),
        "label": pa.array([item.label for item, _ in good], pa.string()),
        "metadata": pa.array([metadata_text(item.metadata) for item, _ in good], pa.string()),
        "path": pa.array(
            [
                os.fsencode(item.path) if item.path and file else None
                for (item, _), file in zip(good, files, strict=True)
            ],
            pa.binary(),
        ),
        "source": pa.array(
            [
                os.fsencode(item.origin.address) if item.origin and file else None
                for (item, _), file in zip(good, files, strict=True)
            ],
            pa.binary(),
        ),
        "stamp": pa.array(
            [entry.stamp if item.row is None else item.stamp() for item, entry in good], pa.string()
        ),
    }
    for name in ("bytes", "width", "height"):
        columns[name] = pa.array([getattr(entry, name) for _, entry in good], pa.int64())
    for name, width in plan.widths.items():
        values = made.arrays.get(name)
        flat = pa.array([] if values is None else values.reshape(-1), pa.float32())
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, width)
    columns["bundle"] = pa.array([plan.bundle] * len(good), pa.string()).dictionary_encode()
    return pa.table(columns)


def finished_part(folder: Path, plan: Plan, number: int) -> list[dict[str, str]] | None:
    """Return the bad items of a part that is there; None where it is not, or is of another plan, or is damaged."""
    pa = pyarrow()
    try:
        with pa.parquet.ParquetFile(part_file(folder, number)) as file:
            note = json.loads((file.schema_arrow.metadata or {})[_NOTE])
            bad: list[dict[str, str]] = note["bad"]
            whole = file.metadata.num_rows + len(bad) == len(plan.rows(number))
            return bad if whole and (note["plan"], note["part"]) == (_identity(plan), number) else None
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
        return None


def bad_line(bad: dict[str, str]) -> str:
    """Return a bad item as a line of the file of bad items."""
    return json.dumps({name: shown(value) for name, value in bad.items()}, ensure_ascii=False)
