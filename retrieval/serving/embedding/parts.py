"""One part: its items decoded and encoded, wherever that is done, and the Parquet file that it
becomes.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError
from retrieval.host.files import whole_file
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import metadata_text
from retrieval.serving.images import Limits
from retrieval.serving.index.adding import Settings, embed
from retrieval.serving.index.embedded import Embedded, Plan, part_file
from retrieval.serving.index.locations import Source
from retrieval.serving.index.parquet import pyarrow
from retrieval.serving.index.sources import originals
from retrieval.serving.runtime import Device
from retrieval.serving.store.contract import Floats

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS_PER_SIZE = 0.03
_MEASURING_SECONDS = 3.0
_GAIN = 1.05
"""A larger batch is taken for at least so much: the smaller one waits less, and takes less memory.
"""
_GROUP_ROWS = 1024
_FAULT_CHARACTERS = 500
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
class EmbeddedPart:
    """What an encoder makes of a part.

    Attributes:
        number: of the part.
        entries: one an item, in order, without its arrays: what is known of its original, or why it
            cannot be used.
        arrays: of the usable items, in order (n, width): "vector", perhaps "code" and "features".
        seen: what an unusable item's file looked like where it was read, by the item's place in the
            part.
        node: the machine that embedded it.
    """

    number: int
    entries: Sequence[Embedded]
    arrays: Mapping[str, Floats]
    seen: Mapping[int, str] = field(default_factory=dict)
    node: str = ""


@dataclass(frozen=True)
class ShippedBundle:
    """A bundle on its way to another machine.

    Attributes:
        files: their content, by name.
        variant: of its encoder.
        device: see `Bundle.open`.
        threads: of one call of the encoder; None leaves it to ONNX Runtime.
    """

    files: Mapping[str, bytes]
    variant: str | None
    device: Device
    threads: int | None = None

    @classmethod
    def of(cls, bundle: Bundle, device: Device, threads: int | None = None) -> ShippedBundle:
        """Return an opened bundle, as it was opened."""
        with tempfile.TemporaryDirectory() as folder:
            bundle.copy(copy := Path(folder) / "bundle")
            files = {path.name: path.read_bytes() for path in copy.iterdir()}
        return cls(files, bundle.variant, device, threads)

    def open(self) -> Bundle:
        """Open it here."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.files.items():
                (Path(folder) / name).write_bytes(content)
            return Bundle.open(
                folder, variant=self.variant, device=self.device, threads=self.threads
            )


def opened(bundle: Bundle | ShippedBundle) -> Bundle:
    """Return a bundle, opened on this machine."""
    return bundle.open() if isinstance(bundle, ShippedBundle) else bundle


def embedder(
    bundle: Bundle | ShippedBundle, batch: int, workers: int, limits: Limits, features: bool
) -> Callable[[Part], EmbeddedPart]:
    """Return what embeds parts. An item that cannot be used costs no other item.

    Args:
        bundle: encodes.
        batch: items that go through the encoder at once.
        workers: threads that decode.
        limits: the largest images that are decoded.
        features: whether the backbone's features are wanted too.
    """
    encoder, settings = opened(bundle), Settings(batch, workers, limits, features)

    def results(part: Part, items: Sequence[Source]) -> list[Embedded]:
        named = originals(items, part.features, limits.bytes)
        batches = embed(encoder, named, settings, stamp=Source.stamp)
        return [result for batch in batches for _, result in batch]

    def alone(part: Part, item: Source) -> Embedded:
        try:
            return results(part, [item])[0]
        except DataError as fault:
            return Embedded(f"{item.name}: {fault}", item.stamp())

    def embed_part(part: Part) -> EmbeddedPart:
        try:
            entries = results(part, part.items)
        except DataError:  # the encoder gives NaN for an item: encoding each alone shows for which
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
    """Return what changes when the item's file does, as this machine sees it now; "" of an address."""
    if item.path is not None:
        return item.stamp()
    return (
        "" if item.origin is None or item.origin.location.remote else item.origin.location.stamp()
    )


def measurer(bundle: Bundle | ShippedBundle) -> Callable[[None], int]:
    """Return what measures the batch size from which a larger one gains little."""
    encoder = opened(bundle)
    return lambda _: _measured_batch(encoder)


def _measured_batch(bundle: Bundle) -> int:
    input_ = bundle.manifest.input
    best_rate, chosen = 0.0, 1
    end = time.monotonic() + _MEASURING_SECONDS
    for size in _SIZES:
        zeros = np.zeros((size, *input_.shape), input_.dtype)
        bundle.encode(zeros, batch=size)  # memory is found, and kernels are chosen, the first time
        times: list[float] = []
        while len(times) < 3 or (sum(times) < _SECONDS_PER_SIZE and len(times) < 50):
            start = time.perf_counter()
            bundle.encode(zeros, batch=size)
            times.append(time.perf_counter() - start)
        if (rate := size / min(times)) > best_rate * _GAIN:
            best_rate, chosen = rate, size
        elif size > 2 * chosen:
            break
        if time.monotonic() > end:
            break
    return chosen


def _identity(plan: Plan) -> str:
    """Return what names a plan, whether it is complete or not."""
    content = json.loads(replace(plan, complete=False, bad=None).text())
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_part(folder: Path, plan: Plan, items: Sequence[Source], embedded: EmbeddedPart) -> int:
    """Write a part, whole or not at all; return how many of its items are bad.

    Raises:
        DataError: the disk refuses.
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
    # numbers that look random do not compress; texts do
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
    """Return the usable items of a part; those of a table of features have no file of their own."""

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
    """Return the bad items of a part; None where it is missing, damaged, or of another plan."""
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
