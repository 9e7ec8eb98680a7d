"""One part's work, wherever it is done: decode, encode, and say what could not be used."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.bundle import Bundle
from retrieval.serving.images import Limits
from retrieval.serving.index.encoding import Done, Encoding
from retrieval.serving.index.origins import Source, Sources
from retrieval.serving.progress import showing
from retrieval.serving.providers import Device

Floats = NDArray[np.float32]

_MEASURED = 0.3
"""Seconds of encoding that a batch size is measured by."""
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_GAIN = 1.05
"""A batch twice as large is taken for at least so much: the smaller one waits less, and takes less memory."""


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
        entries: one an item, in order: what is known of its original, or why it cannot be used.
        arrays: numbers of the usable ones, in order: "vectors", perhaps "codes" and "features".
        seen: what an unusable item's file looked like where it was read, by the item's place in the part.
        node: the machine that embedded it.
    """

    number: int
    entries: Sequence[Done]
    arrays: Mapping[str, Floats]
    seen: Mapping[int, str]
    node: str = ""


@dataclass(frozen=True)
class Settings:
    """How every part is embedded.

    Attributes:
        batch: items that go through the encoder at once.
        workers: threads that decode.
        limits: the largest images that are decoded.
        features: whether the backbone's features are wanted too.
    """

    batch: int
    workers: int
    limits: Limits
    features: bool


@dataclass
class _Kept:
    """Takes what was encoded, and keeps it."""

    entries: list[Done] = field(default_factory=list)
    arrays: dict[str, list[Floats]] = field(default_factory=dict)

    def append(self, entries: Sequence[Done], arrays: dict[str, Floats]) -> None:
        self.entries += entries
        for name, values in arrays.items():
            self.arrays.setdefault(name, []).append(values)

    def sync(self) -> None:
        pass


def embed(bundle: Bundle, settings: Settings, part: Part) -> Made:
    """Embed a part. An item that cannot be used, for what it is or for what the encoder gives of it, costs no other.

    Raises:
        BundleError: ONNX Runtime refuses.
    """
    try:
        made = _embedded(bundle, settings, part.items, part.features)
    except DataError:  # the encoder gives NaN for an item: which one is seen when each is encoded alone
        made = _apart(bundle, settings, part)
    seen = {at: look(part.items[at]) for at, entry in enumerate(made.entries) if entry.fault is not None}
    return Made(
        part.number,
        made.entries,
        {name: np.concatenate(each) for name, each in made.arrays.items()},
        seen,
        socket.gethostname(),
    )


def _embedded(bundle: Bundle, settings: Settings, items: Sequence[Source], features: Floats | None) -> _Kept:
    kept = _Kept()
    sources = Sources(list(items), features)
    encoding = Encoding(
        bundle,
        sources,
        settings.batch,
        settings.workers,
        settings.limits,
        skip_bad=True,
        features=settings.features,
        tell=False,
    )
    try:
        with showing(False):
            encoding.encode(kept)
    except DataError:
        if len(kept.entries) < len(items) or any(entry.fault is None for entry in kept.entries):
            raise
    return kept


def _apart(bundle: Bundle, settings: Settings, part: Part) -> _Kept:
    """Embed a part without those items for which the encoder gives no numbers."""
    faults: dict[int, Done] = {}
    for at, item in enumerate(part.items):
        try:
            _embedded(bundle, settings, [item], part.features)
        except DataError as fault:
            faults[at] = Done(item.stamp(), f"{item.name}: {fault}")
    made = _embedded(
        bundle, settings, [item for at, item in enumerate(part.items) if at not in faults], part.features
    )
    rest = iter(made.entries)
    made.entries = [faults[at] if at in faults else next(rest) for at in range(len(part.items))]
    return made


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
