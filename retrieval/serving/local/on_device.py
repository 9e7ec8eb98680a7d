"""Exact nearest neighbours on a GPU, by ONNX Runtime alone: it screens vectors of 16 bits, and the CPU measures what may be nearest.

The vectors lie on the device moved and scaled by a power of two, y = s (x − c), with no coordinate above 1, each rounded to 16 bits: ŷ.
A block of them passes at a time: of v = |ŷ|² (1 − 2γ) − 2 r̂·ŷ, r̂ the query's own, the graph gives the smallest (the largest −v, for which
ONNX Runtime has the faster kernels). Whatever can still be among the k nearest by v is measured in double precision from the vectors themselves, so that the answer
is that of `exact.nearest`, to the last tie.

**The bound.** Moving and scaling are of double precision and a power of two, so that |r − y| = s |q − x|, and |r̂ − ŷ| is at most
s |q − x| + |r − r̂| + E, where E is the largest |y − ŷ| of all rows, measured when they are put there. Products of two such numbers are
exact in float32, also after TF32, which keeps ten bits: those of float16, more than bfloat16's seven. Sums are of float32, in any order; a tensor
core aligns the terms of a block and cuts them off instead of rounding (Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of
NVIDIA tensor cores, 2021), which four times the unit roundoff of each term covers. With that γ, v is off by γ (2 |r̂| |ŷ| + |ŷ|²) at most, so it is
never above |r̂ − ŷ|² − (1 − γ) |r̂|² (compare `exact`). A row whose v is above (s √τ + |r − r̂| + E)² − (1 − γ) |r̂|² is therefore
farther than √τ. Whether a device computes so is looked at when vectors are put there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import BundleError, StoreError
from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.local.distances import TINY, UNIT, measured
from retrieval.serving.local.exact import nearest
from retrieval.serving.providers import start
from retrieval.serving.runtime import load_onnxruntime
from retrieval.serving.sessions import Graph, session_options
from retrieval.serving.small_graphs import BFLOAT16, FLOAT, FLOAT16, INT64, Node, Value, small_graph

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]
Kind = Literal["float16", "bfloat16"]

WIDEST = 1 << 16
_BLOCK_NUMBERS = 1 << 25  # of a block: 134 MB in float32, as which it is multiplied
_SCORES = 1 << 26  # of a block and some queries: 268 MB
_STEP = 1 << 20  # numbers that are prepared at a time
_MOST_QUERIES = 256
_WIDER = 16  # times as many rows of a block are asked for where the first are not enough
_LARGEST = 2.0**100
_CLOSE = 1 + 2.0**-40  # more than what double precision rounds
_TRIED = 8  # rows that are compared with a block when it is put there


def bytes_on_device(count: int, width: int) -> int:
    """Return what so many vectors take on a device, with what a search takes beside them."""
    block = min(count, max(1, _BLOCK_NUMBERS // width))
    return count * (2 * width + 4) + 4 * block * width + 3 * 4 * min(_SCORES, block * _MOST_QUERIES)


@dataclass(frozen=True)
class _Block:
    """Consecutive rows, on the device.

    Attributes:
        start: the first of them.
        count: how many.
        stored: ŷ, ONNX Runtime's value.
        bias: |ŷ|² (1 − 2γ) (n,), rounded down.
    """

    start: int
    count: int
    stored: Any
    bias: Floats


class OnDevice:
    """Vectors on a device, searched exactly, by one thread at a time: whoever searches holds `graphs.lock`.

    Args:
        vectors: (N, P), finite, C-contiguous; may be mapped from a file. They are read again for what is measured.
        device: "cuda", or "cpu": the same graph, for tests.
        kind: of the numbers there; float16 has an eighth of bfloat16's error, so that fewer rows are measured.

    Raises:
        StoreError: the device has too little memory, or computes less exactly than the bound says: the end of a sentence.
    """

    def __init__(self, vectors: Floats, device: str = "cuda", kind: Kind = "float16") -> None:
        self.vectors, self.kind = np.asarray(vectors), kind
        count, width = vectors.shape
        self.graphs = graphs(device, kind)
        terms = 4 * (width + 16) * UNIT
        self.gamma, self.tiny = terms / (1 - terms), width * TINY
        self.centre = self.vectors[:: -(-count // 4096)].astype(np.float64).mean(0).astype(np.float32)
        self.scale = self._scale()
        self.error = 0.0
        rows = max(1, _BLOCK_NUMBERS // width)
        try:
            self.blocks = [self._block(at, min(at + rows, count)) for at in range(0, count, rows)]
            self._try()
        except BundleError as fault:
            raise StoreError(refused(count, width, fault)) from fault

    def _scale(self) -> float:
        """Return the power of two that brings every coordinate to 1 at most."""
        largest = 0.0
        for rows in self._steps(0, len(self.vectors)):
            largest = max(largest, float(np.abs(self.vectors[rows].astype(np.float64) - self.centre).max()))
        return float(2.0 ** -np.frexp(largest)[1]) if largest else 1.0

    def _steps(self, start: int, stop: int) -> Iterator[slice]:
        step = max(1, _STEP // self.vectors.shape[1])
        return (slice(at, min(at + step, stop)) for at in range(start, stop, step))

    def moved(self, vectors: Floats) -> tuple[Floats, Doubles]:
        """Return s (x − c) rounded to 16 bits (N, P), as float32, and how far rounding moved each row (N,)."""
        exact = (vectors.astype(np.float64) - self.centre) * self.scale
        near = rounded(exact, self.kind)
        with np.errstate(invalid="ignore", over="ignore"):
            lost = np.sqrt(np.square(exact - near).sum(1)) * _CLOSE
        return near, lost

    def _block(self, start: int, stop: int) -> _Block:
        near = np.empty((stop - start, self.vectors.shape[1]), np.float32)
        bias = np.empty(stop - start, np.float32)
        for rows in self._steps(start, stop):
            own = slice(rows.start - start, rows.stop - start)
            near[own], lost = self.moved(self.vectors[rows])
            self.error = max(self.error, float(lost.max()))
            bias[own] = _down(np.square(near[own].astype(np.float64)).sum(1) * (1 - 2 * self.gamma))
        (stored,) = self.graphs.put.bound(["stored"], {"given": near})
        return _Block(start, stop - start, stored, bias)

    def _try(self) -> None:
        """Compare what the device makes of some rows and its first block with double precision.

        Raises:
            StoreError: the end of a sentence.
        """
        block = self.blocks[0]
        near, _ = self.moved(self.vectors[:: -(-len(self.vectors) // _TRIED)])
        values, found = self._smallest(block, near, min(block.count, 512), block.bias)
        there = self.moved(self.vectors[found.ravel()])[0].astype(np.float64).reshape(*found.shape, -1)
        own = near.astype(np.float64)
        products = np.einsum("qp,qkp->qk", own, there)
        size = np.sqrt(np.square(own).sum(1)[:, None] * np.square(there).sum(2))
        bias = block.bias[found].astype(np.float64)
        off = np.abs(values - (bias - 2 * products))
        if not (off <= self.gamma * (2 * size + np.abs(bias)) + self.tiny).all():
            raise StoreError("it computes less exactly than float32 does")

    def nearest(self, queries: Floats, k: int, keep: Mask | None = None) -> tuple[Doubles, Rows]:
        """Return what `exact.nearest` does, which see.

        Args:
            queries: (Q, P), finite.
            k: how many, at least 1.
            keep: (N,), which rows may be found; None is all.

        Raises:
            StoreError: the device has too little memory for it: the end of a sentence.
        """
        squared = np.full((len(queries), k), np.inf)
        rows = np.full((len(queries), k), -1, np.int64)
        size = max(1, min(_MOST_QUERIES, _SCORES // self.blocks[0].count))
        try:
            for at in range(0, len(queries), size):
                group = slice(at, at + size)
                squared[group], rows[group] = _Search(self, queries[group], k, keep).found()
        except BundleError as fault:
            raise StoreError(refused(len(self.vectors), self.vectors.shape[1], fault)) from fault
        return squared, rows

    def _smallest(self, block: _Block, near: Floats, count: int, bias: Floats) -> tuple[Floats, Rows]:
        """Return the smallest v (Q, count) of a block, ascending, and their places in it."""
        feeds = {"query": near, "stored": block.stored, "bias": bias, "count": np.array([count], np.int64)}
        values, places = self.graphs.search.bound(["values", "rows"], feeds)
        return -values.numpy(), places.numpy()


class _Search:
    """The nearest of a group of queries."""

    def __init__(self, on: OnDevice, queries: Floats, k: int, keep: Mask | None) -> None:
        self.on, self.queries, self.k, self.keep = on, np.ascontiguousarray(queries, np.float32), k, keep
        self.exact = self.queries.astype(np.float64)
        self.near, self.lost = on.moved(self.queries)
        self.own = np.square(self.near.astype(np.float64)).sum(1)
        self.beyond = ~(self.own < _LARGEST)  # nothing is known of these: the CPU searches for them
        self.near[self.beyond] = 0
        self.query, self.row = np.empty(0, np.int64), np.empty(0, np.int64)
        self.squared = np.empty(0)

    def found(self) -> tuple[Doubles, Rows]:
        """Return squared distances (Q, k) and rows (Q, k)."""
        asked = np.flatnonzero(~self.beyond)
        seen = [self._ask(block, asked, self._first(block)) for block in self.on.blocks]
        self._enter_smallest(asked, seen)
        limits = self._limits()
        for block, (values, places) in zip(self.on.blocks, seen, strict=True):
            self._enter_within(block, asked, values, places, limits)
        limits = self._limits()
        for block, (values, _) in zip(self.on.blocks, seen, strict=True):
            unsure = asked[~self._whole(block, values, limits[asked])]
            if len(unsure):
                self._again(block, unsure, limits)
        if self.beyond.any():
            self._by_cpu(slice(0, len(self.on.vectors)), np.flatnonzero(self.beyond))
        return self._nearest()

    def _first(self, block: _Block) -> int:
        return min(block.count, 2 * self.k + 30)

    def _ask(self, block: _Block, asked: Rows, count: int) -> tuple[Floats, Rows]:
        bias = block.bias
        if self.keep is not None:
            bias = np.where(self.keep[block.start : block.start + block.count], bias, np.float32(np.inf))
        if not len(asked):
            return np.empty((0, count), np.float32), np.empty((0, count), np.int64)
        return self.on._smallest(block, self.near[asked], count, bias)

    def _enter_smallest(self, asked: Rows, seen: list[tuple[Floats, Rows]]) -> None:
        """Measure for each query k of the rows that look nearest: the farthest of them is no nearer than the k-th of all."""
        values = np.hstack([one for one, _ in seen])
        rows = np.hstack(
            [places + block.start for block, (_, places) in zip(self.on.blocks, seen, strict=True)]
        )
        if values.shape[1] > self.k:
            best = np.argpartition(values, self.k - 1, axis=1)[:, : self.k]
            values, rows = np.take_along_axis(values, best, 1), np.take_along_axis(rows, best, 1)
        query, place = np.nonzero(values < np.inf)
        self._measure(asked[query], rows[query, place])

    def _enter_within(
        self, block: _Block, asked: Rows, values: Floats, places: Rows, limits: Doubles
    ) -> None:
        query, place = np.nonzero((values <= limits[asked][:, None]) & (values < np.inf))
        self._measure(asked[query], places[query, place] + block.start)

    @staticmethod
    def _whole(block: _Block, values: Floats, limits: Doubles) -> Mask:
        """Return for which queries every row of a block up to its limit is among these: what was left out is not below the last."""
        if values.shape[1] == block.count:
            return np.ones(len(values), bool)
        last = values[:, -1]
        whole: Mask = (last > limits) | (last == np.inf)
        return whole

    def _again(self, block: _Block, unsure: Rows, limits: Doubles) -> None:
        """Ask for more rows of a block; where that is not enough either, as among many equal vectors, the CPU searches it."""
        count = min(block.count, _WIDER * self._first(block))
        values, places = self._ask(block, unsure, count)
        whole = self._whole(block, values, limits[unsure])
        self._enter_within(block, unsure[whole], values[whole], places[whole], limits)
        if not whole.all():
            self._by_cpu(slice(block.start, block.start + block.count), unsure[~whole])

    def _by_cpu(self, rows: slice, asked: Rows) -> None:
        keep = None if self.keep is None else self.keep[rows]
        squared, found = nearest(self.queries[asked], self.on.vectors[rows], self.k, keep=keep)
        query, place = np.nonzero(found >= 0)
        self._enter(asked[query], found[query, place] + rows.start, squared[query, place])

    def _measure(self, query: Rows, row: Rows) -> None:
        self._enter(query, row, measured(self.exact, self.on.vectors, query, row))

    def _enter(self, query: Rows, row: Rows, squared: Doubles) -> None:
        """Keep measured rows, each once, and of each query the k nearest."""
        query, row = np.concatenate([self.query, query]), np.concatenate([self.row, row])
        squared = np.concatenate([self.squared, squared])
        _, once = np.unique(query * len(self.on.vectors) + row, return_index=True)
        query, row, squared = query[once], row[once], squared[once]
        order = np.lexsort((row, squared, query))
        query, row, squared = query[order], row[order], squared[order]
        kept = np.arange(len(query)) - np.searchsorted(query, query) < self.k
        self.query, self.row, self.squared = query[kept], row[kept], squared[kept]

    def _limits(self) -> Doubles:
        """Return what a row's v must not be above (Q,), for it to be as near as the k-th that was measured."""
        squared, _ = self._nearest()
        with np.errstate(over="ignore", invalid="ignore"):  # of those that the CPU searches for
            reach = self.on.scale * np.sqrt(squared[:, -1]) + self.lost + self.on.error
            limits: Doubles = np.square(reach) * _CLOSE - self.own * (1 - self.on.gamma) + self.on.tiny
        return limits

    def _nearest(self) -> tuple[Doubles, Rows]:
        squared = np.full((len(self.queries), self.k), np.inf)
        rows = np.full((len(self.queries), self.k), -1, np.int64)
        place = np.arange(len(self.query)) - np.searchsorted(self.query, self.query)
        squared[self.query, place], rows[self.query, place] = self.squared, self.row
        return squared, rows


@dataclass(frozen=True)
class Graphs:
    """What runs on a device, and who uses it.

    Attributes:
        put: "given" (N, P) → "stored", in 16 bits, which stays there.
        search: "query" (Q, P), "stored", "bias" (N,), "count" → "values" (Q, count), the largest −v, and their "rows".
        lock: whoever searches holds it.
    """

    put: Graph
    search: Graph
    lock: Lock


@cache
def graphs(device: str, kind: Kind) -> Graphs:
    """Start both graphs on a device; once in a process.

    Raises:
        StoreError: ONNX Runtime does not start there: the end of a sentence.
    """
    runtime, type_ = load_onnxruntime(), {"float16": FLOAT16, "bfloat16": BFLOAT16}[kind]
    table = [Value("given", FLOAT, ("N", "P"))], [Value("stored", type_, ("N", "P"))]
    put = small_graph([Node("Cast", ["given"], ["stored"], {"to": type_})], *table)
    nodes = [
        Node("Cast", ["stored"], ["near"], {"to": FLOAT}),
        Node("Gemm", ["query", "near", "bias"], ["all"], {"alpha": 2.0, "beta": -1.0, "transB": 1}),
        Node("TopK", ["all", "count"], ["values", "rows"], {"axis": 1, "largest": 1, "sorted": 1}),
    ]
    given = [Value("query", FLOAT, ("Q", "P")), *table[1], Value("bias", FLOAT, ("N",)), Value("count", INT64, ("one",))]  # fmt: skip
    search = small_graph(nodes, given, [Value("values", FLOAT, ("Q", "K")), Value("rows", INT64, ("Q", "K"))])
    options = session_options(runtime, 1)
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        started = [start(runtime, content, options, [device], {}) for content in (put, search)]
    except Exception as fault:  # ONNX Runtime's errors share no public base class
        raise StoreError(f"ONNX Runtime does not start there: {str(fault).strip()[-200:]}") from fault
    found = [Graph(Path(f"exact search on {device}"), one.session, one.device) for one in started]
    return Graphs(found[0], found[1], Lock())


def rounded(exact: Doubles, kind: Kind) -> Floats:
    """Return numbers as 16 bits hold them, in float32; infinite where they are too large."""
    with np.errstate(over="ignore"):
        if kind == "float16":
            return exact.astype(np.float16).astype(np.float32)
        bits = exact.astype(np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)


def _down(values: Doubles) -> Floats:
    """Return float32 numbers that are not above these."""
    found: Floats = np.nextafter(values.astype(np.float32), np.float32(-np.inf))
    return found


def refused(count: int, width: int, fault: Exception) -> str:
    """Return what is said of vectors that a device cannot take or search, as the end of a sentence."""
    text = str(fault)
    if any(word in text.lower() for word in ("memory", "alloc")):
        return f"it has too little memory for {count:,} vectors of {width:,} numbers in 16 bits ({bytes_on_device(count, width) / 1e9:.1f} GB)"
    return text.rstrip(".")
