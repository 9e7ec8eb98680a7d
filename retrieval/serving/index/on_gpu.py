"""FAISS's indexes on one GPU or several: put there, within its memory, and searched by many threads as by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import StoreError
from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.runtime import load_faiss

Gpus = Literal["one", "replicas", "shards"]
"""Of several GPUs: the first, a copy on each, or a part on each."""

MOST = 2048
"""Candidates that a GPU selects at most; a search for more is the CPU's."""
_ROWS = 4096
"""Queries that are done at once at most."""

_SHORT = (
    "out of memory",
    "out_of_memory",
    "alloc fail",
    "cudaMalloc",
    "memory allocation error",
    "bad_alloc",
)
REFUSALS = (RuntimeError, MemoryError)
"""What FAISS raises; of cuVS's own memory the latter."""

Number = TypeVar("Number", np.float32, np.float64)


@dataclass
class _Asked(Generic[Number]):
    """What one thread searches for, and what came of it."""

    queries: Floats
    k: int
    found: tuple[NDArray[Number], Rows] | None = None
    error: Exception | None = None


class Together(Generic[Number]):
    """Searches of many threads on what serves one at a time: those that come meanwhile are done as one.

    Args:
        search: takes queries (Q, P) and k.
        lock: that whoever uses the device holds.
    """

    def __init__(
        self, search: Callable[[Floats, int], tuple[NDArray[Number], Rows]], lock: threading.Lock
    ) -> None:
        self._search: Callable[[Floats, int], tuple[NDArray[Number], Rows]] = search
        self._lock = lock
        self._guard = threading.Lock()
        self._waiting: list[_Asked[Number]] = []

    def __call__(self, queries: Floats, k: int) -> tuple[NDArray[Number], Rows]:
        """Search, perhaps with others; each gets its own answer, or its own error."""
        mine: _Asked[Number] = _Asked(queries, k)
        with self._guard:
            self._waiting.append(mine)
        while mine.found is None and mine.error is None:
            with self._lock:
                if mine.found is None and mine.error is None:
                    self._answer(self._taken())
        if mine.error is not None:
            raise mine.error
        assert mine.found is not None
        return mine.found

    def _taken(self) -> list[_Asked[Number]]:
        """Return those that waited longest, as many as are done at once."""
        taken: list[_Asked[Number]] = []
        rows = 0
        with self._guard:
            while self._waiting and (not taken or rows + len(self._waiting[0].queries) <= _ROWS):
                taken.append(self._waiting.pop(0))
                rows += len(taken[-1].queries)
        return taken

    def _answer(self, asked: list[_Asked[Number]]) -> None:
        most = max(one.k for one in asked)
        try:
            far, rows = self._search(np.concatenate([one.queries for one in asked]), most)
        except Exception as fault:
            for one in asked:
                one.error = fault
            return
        start = 0
        for one in asked:
            stop = start + len(one.queries)
            one.found = far[start:stop, : one.k], rows[start:stop, : one.k]
            start = stop


@dataclass(frozen=True)
class _Device:
    """One GPU of this process: FAISS's memory on it, which all its indexes share, and who uses it."""

    number: int
    resources: Any
    lock: threading.Lock = field(default_factory=threading.Lock)


@cache
def device(number: int) -> _Device:
    """Return a GPU; FAISS reserves some of its memory once, not for each segment."""
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
        search: of the index that lies there, in place of FAISS's own call; `parameters` are then not set on it.
        parameters: of the index, by FAISS's names, such as `nprobe`.

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
        self.devices = [device(number) for number in range(1 if spread == "one" else gpus_found())]
        try:
            self.index = _cloned(faiss, index, self.devices, spread, float16)
            if search is None:
                for name, value in parameters.items():
                    faiss.GpuParameterSpace().set_index_parameter(self.index, name, value)
        except REFUSALS as fault:
            raise StoreError(refused(index, fault)) from fault
        call = search or (lambda index, queries, k: index.search(queries, k))
        # the first device's lock stands for all: nothing else takes the others'. What searches has no part in this object, so
        # that the device's memory is free as soon as nobody holds it
        self._together = Together(partial(_run, self.index, call), self.devices[0].lock)

    def search(self, queries: Floats, k: int) -> tuple[Floats, Rows]:
        """Return squared distances and rows (Q, k), k at most `MOST`.

        Raises:
            StoreError: the GPU has too little memory for it.
        """
        return self._together(queries, k)


def _run(
    index: Any, call: Callable[[Any, Floats, int], tuple[Floats, Rows]], queries: Floats, k: int
) -> tuple[Floats, Rows]:
    try:
        return call(index, queries, k)
    except REFUSALS as fault:
        raise StoreError(refused(index, fault)) from fault


def _cloned(faiss: Any, index: Any, devices: list[_Device], spread: Gpus, float16: bool) -> Any:
    options = faiss.GpuClonerOptions() if spread == "one" else faiss.GpuMultipleClonerOptions()
    options.useFloat16 = float16  # of flat vectors and product codes; inverted lists take no notice
    if float16 and isinstance(index, faiss.IndexIVFFlat):
        index, options.use_cuvs = halved(index), False  # cuVS has no such lists, FAISS's own kernels do
    if spread == "one":
        return faiss.index_cpu_to_gpu(devices[0].resources, devices[0].number, index, options)
    options.shard = spread == "shards"
    resources, numbers = [each.resources for each in devices], [each.number for each in devices]
    return faiss.index_cpu_to_gpu_multiple_py(resources, index, options, numbers)


def halved(index: Any) -> Any:
    """Return FAISS's inverted lists with the vectors in 16 bits; good as long as the lists that they are made of."""
    faiss = load_faiss()
    half = faiss.ScalarQuantizer.QT_fp16
    made = faiss.IndexIVFScalarQuantizer(index.quantizer, index.d, index.nlist, half, faiss.METRIC_L2, False)
    made.own_fields, made.is_trained, made.nprobe = False, True, index.nprobe
    given, taken = (faiss.downcast_InvertedLists(each.invlists) for each in (index, made))
    for number in range(index.nlist):
        if count := given.list_size(number):
            whole = faiss.rev_swig_ptr(given.get_codes(number), count * given.code_size).view("<f4")
            with np.errstate(over="ignore"):
                codes = np.ascontiguousarray(whole.astype("<f2")).view(np.uint8)
            taken.add_entries(number, count, given.get_ids(number), faiss.swig_ptr(codes))
    made.ntotal = index.ntotal
    return made


def refused(index: Any, fault: RuntimeError | MemoryError) -> str:
    """Return what is said of an index that a GPU refuses, as the end of a sentence: FAISS's text names its source files."""
    text = str(fault)
    if isinstance(fault, MemoryError) or any(words in text for words in _SHORT):
        return (
            f"the GPU has too little memory for {index.ntotal:,} vectors of {index.d} numbers. Use the back end's option float16, "
            "or gpus = shards with several; CUDA_VISIBLE_DEVICES= (empty) searches on the CPU"
        )
    return f"FAISS cannot use the GPU: {text.strip().splitlines()[-1].strip().rpartition('Error: ')[2][:300]}"
