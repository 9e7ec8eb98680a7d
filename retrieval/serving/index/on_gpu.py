"""FAISS's indexes on one GPU or several: put there, within its memory, and searched by one thread
at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from retrieval.errors import StoreError
from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.runtime import load_faiss

Gpus = Literal["one", "replicas", "shards"]
"""Of several GPUs: the first, a copy on each, or a part on each."""
MOST = 2048
"""Candidates that a GPU selects at most; a search for more is the CPU's."""
REFUSALS = (RuntimeError, MemoryError)
"""What FAISS raises; of cuVS's own memory the latter."""
_SHORT_OF_MEMORY = (
    "out of memory",
    "out_of_memory",
    "alloc fail",
    "cudaMalloc",
    "memory allocation error",
    "bad_alloc",
)


@dataclass(frozen=True)
class _Device:
    """One GPU of this process: FAISS's memory on it, which all its indexes share, and who uses it."""

    number: int
    resources: Any
    lock: threading.Lock = field(default_factory=threading.Lock)


@cache
def device(number: int) -> _Device:
    """Return a GPU; FAISS reserves some of its memory once, not for each index."""
    return _Device(number, load_faiss().StandardGpuResources())


def gpus_found() -> int:
    """Return how many GPUs FAISS can use; 0 where it was built without, or there is none."""
    faiss = load_faiss()
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


class OnGpu:
    """An index on a GPU, or copied to or divided over all of them.

    Args:
        index: FAISS's, on the CPU.
        spread: "one", "replicas" or "shards".
        float16: whether vectors are kept in 16 bits.
        parameters: of the index, by FAISS's names, such as `nprobe`.
        search: of the index that lies there, in place of FAISS's own call; `parameters` are then
            not set on it.

    Raises:
        StoreError: a GPU has too little memory, or FAISS refuses: the end of a sentence.
    """

    def __init__(
        self,
        index: Any,
        spread: Gpus,
        float16: bool,
        parameters: dict[str, float],
        search: Callable[[Any, Floats, int], tuple[Floats, Rows]] | None = None,
    ) -> None:
        faiss = load_faiss()
        devices = [device(number) for number in range(1 if spread == "one" else gpus_found())]
        try:
            self.index = _cloned(faiss, index, devices, spread, float16)
            if search is None:
                for name, value in parameters.items():
                    faiss.GpuParameterSpace().set_index_parameter(self.index, name, value)
        except REFUSALS as fault:
            raise StoreError(refused(index.ntotal, index.d, fault)) from fault
        self._search = search or (lambda index, queries, k: index.search(queries, k))
        self._lock = devices[0].lock  # stands for all devices: nothing else takes the others'

    def search(self, queries: Floats, k: int) -> tuple[Floats, Rows]:
        """Return squared distances and rows (Q, k), k at most `MOST`.

        Threads take turns: a GPU serves one at a time.

        Raises:
            StoreError: the GPU has too little memory for it.
        """
        try:
            with self._lock:
                return self._search(self.index, queries, k)
        except REFUSALS as fault:
            raise StoreError(refused(self.index.ntotal, self.index.d, fault)) from fault


def _cloned(faiss: Any, index: Any, devices: list[_Device], spread: Gpus, float16: bool) -> Any:
    options = faiss.GpuClonerOptions() if spread == "one" else faiss.GpuMultipleClonerOptions()
    options.useFloat16 = float16
    if spread == "one":
        return faiss.index_cpu_to_gpu(devices[0].resources, devices[0].number, index, options)
    options.shard = spread == "shards"
    resources, numbers = [gpu.resources for gpu in devices], [gpu.number for gpu in devices]
    return faiss.index_cpu_to_gpu_multiple_py(resources, index, options, numbers)


def refused(count: int, width: int, fault: RuntimeError | MemoryError) -> str:
    """Return why a GPU refuses an index of `count` vectors, as the end of a sentence: FAISS's text
    names its source files.
    """
    text = str(fault)
    if isinstance(fault, MemoryError) or any(words in text for words in _SHORT_OF_MEMORY):
        return (
            f"the GPU has too little memory for {count:,} vectors of {width} numbers. Use the back"
            " end's option float16, or gpus = shards with several; CUDA_VISIBLE_DEVICES= (empty)"
            " searches on the CPU"
        )
    return (
        "FAISS cannot use the GPU:"
        f" {text.strip().splitlines()[-1].strip().rpartition('Error: ')[2][:300]}"
    )
