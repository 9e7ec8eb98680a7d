"""When vectors go to a GPU for exact search: once they have been searched some times, where it has room for them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import StoreError
from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.index.on_gpu import Together
from retrieval.serving.local.on_device import WIDEST, OnDevice, bytes_on_device
from retrieval.serving.runtime import (
    ONNXRUNTIME,
    installed_packages,
    load_libraries,
    load_onnxruntime,
    nvidia_smi,
)

log = logging.getLogger("retrieval.serving.local")

LEAST = 1 << 22
"""Numbers of vectors from which they go to a GPU: a CPU reads fewer in about a millisecond."""
_QUERIES = 32
"""Queries after which they go there: a question or two are answered sooner than gigabytes are put there."""
_PART = 0.5
"""Part of the device's free memory that they may take: the encoder needs some, too."""


@cache
def offered() -> bool:
    """Whether this ONNX Runtime was built for CUDA; where it was not, it is not even imported."""
    if not any("gpu" in name for name in installed_packages(ONNXRUNTIME)):
        return False
    return "CUDAExecutionProvider" in load_onnxruntime().get_available_providers()


def free_memory() -> int | None:
    """Return how many bytes are free on the first GPU that this process may use; None where the driver does not say."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    said = nvidia_smi("--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", first).strip()
    return int(said) << 20 if said.isdecimal() else None


def placed(vectors: Floats) -> OnDevice | None:
    """Return vectors (N, P), put on a GPU; None where there is none, or it has no room for them, which the log says."""
    count, width = vectors.shape
    needed, free = bytes_on_device(count, width), free_memory()
    if free is None:
        return None  # no driver: what the encoder says of it is enough
    try:
        if needed > _PART * free:
            raise StoreError(
                f"{count:,} vectors of {width:,} numbers need {needed / 1e9:.1f} GB there, and of {free / 1e9:.1f} GB that are free no "
                f"more than {_PART:.0%} are taken"
            )
        load_libraries(load_onnxruntime())
        return OnDevice(vectors)
    except StoreError as fault:
        log.warning("Exact search stays on the CPU and leaves the GPU alone: %s.", fault)
        return None


class Placing:
    """Vectors that may be searched on a GPU: nothing happens until they have been searched some times, and searches never wait for it.

    Args:
        vectors: (N, P).
        place: puts them there; None where that is not to be.
    """

    def __init__(self, vectors: Floats, place: Callable[[Floats], OnDevice | None] = placed) -> None:
        self._vectors, self._place = vectors, place
        self._wanted = vectors.size >= LEAST and vectors.shape[1] <= WIDEST
        self._seen, self._lock = 0, threading.Lock()
        self._on: tuple[OnDevice, Together[np.float64]] | None = None
        self._said = False
        self.thread: threading.Thread | None = None

    def nearest(
        self, queries: Floats, k: int, keep: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.float64], Rows] | None:
        """Return what `exact.nearest` does, which see; None where the CPU is to do it."""
        if self._on is None:
            if self._wanted and self._seen < _QUERIES:
                self._count(len(queries))
            return None
        on, together = self._on
        try:
            if keep is None:
                return together(queries, k)
            with on.graphs.lock:
                return on.nearest(queries, k, keep)
        except StoreError as fault:
            if not self._said:
                log.warning("The GPU does not search, and the CPU does: %s.", fault)
            self._said = True
            return None

    def _count(self, queries: int) -> None:
        with self._lock:
            self._seen += queries
            if self._seen < _QUERIES or self.thread is not None:
                return
            if self._place is placed and not offered():
                self._wanted = False
                return
            self.thread = threading.Thread(target=self._run, name="to the GPU")
            self.thread.start()

    def _run(self) -> None:
        on = self._place(self._vectors)
        if on is not None:
            self._on = on, Together(on.nearest, on.graphs.lock)
