"""Exact nearest neighbours in a matrix of float32 rows, read where it lies: in memory or mapped from a file.

Rows pass once, in blocks that fit a core's cache. Of each block a fast product in float32 gives every row's distance
with a bound of its error; only rows that can still be among the nearest are measured again, in double precision from
the row itself. So the answer is that of a search in double precision, whatever the vectors' offset or scale, at the
cost of a search in float32.

**The bound.** Let u = 2⁻²⁴ and γ = nu / (1 − nu) for n a little above P (N. Higham, Accuracy and Stability of Numerical
Algorithms, 2002, §3.1: an inner product of P terms, summed in any order, is off by at most γ |q| |x|).
With 2 |q| |x| ≤ |q|² + |x|², what float32 makes of |x|² (1 − 2γ) − 2 q·x is never above |q − x|² − (1 − γ) |q|². A row
for which it is above τ − (1 − γ) |q|² is therefore farther than τ, the distance of the k-th nearest so far.
Few queries are compared one by one as Σ (q − x)², which is off by a part γ of itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.local.compact import Compact
from retrieval.serving.local.few import are_few, nearest_of_few
from retrieval.serving.local.frame import Frame, frame_of
from retrieval.serving.runtime import load_faiss

Doubles = NDArray[np.float64]

_UNIT = 2.0**-24
_WIDEST = 1 << 20
_FEW_QUERIES = 4  # up to here a loop over queries is faster than a matrix product and the rows' norms
_MOST_QUERIES = 256  # at a time
_BLOCK_NUMBERS = 1 << 20  # 4 MB of vectors a block
_ONE = 4  # times as many for one query, which reads them once: no cache is of use
_BLOCK_PAIRS = 1 << 20
_PAIR_NUMBERS = 1 << 18  # measured again at a time
_WINDOW = 1 << 18
# The part of a window's rows from which it is cheaper to compare all of them than to gather those that are kept.
# One query reads each row once, and gathering costs about as much: it is the more worth the more queries share it.
_DENSE_ONE, _DENSE_FEW, _DENSE = 0.12, 0.35, 0.75
_MANY = 4  # times k: if more rows of a block are near, their k nearest are measured first
_BOUNDED = 32  # queries at a time
# If more than this part of the pairs remains after the companion, to measure those costs more than reading the vectors.
_WORTH_FEW, _WORTH = 1 / 16, 1 / 64
_LARGEST = 2.0**120
_TINY = 2.0**-100  # above what underflow loses of a coordinate's product


def squared_norms(vectors: Floats) -> Floats:
    """Return each row's |x|² (N,) as `nearest` takes it: the same for every search, 4 bytes a row to keep."""
    norms = np.empty(len(vectors), np.float32)
    step = max(1, _BLOCK_NUMBERS // max(1, vectors.shape[1]))
    for start in range(0, len(vectors), step):
        norms[start : start + step] = _norms(np.ascontiguousarray(vectors[start : start + step]))
    return norms


def nearest(
    queries: Floats,
    vectors: Floats,
    k: int,
    *,
    keep: NDArray[np.bool_] | None = None,
    span: tuple[int, int] | None = None,
    norms: Floats | None = None,
    compact: Compact | None = None,
    threads: int = 1,
) -> tuple[Doubles, Rows]:
    """Return the k nearest rows of each query by Euclidean distance, exactly; equal distances by row.

    Thread-safe. Memory is bounded: some MB a thread and query group, and (Q, k), never (Q, N) nor a copy of the matrix.

    Args:
        queries: (Q, P), finite.
        vectors: (N, P), finite, C-contiguous; may be mapped from a file, read-only.
        k: how many, at least 1.
        keep: (N,), which rows may be found; None is all.
        span: first column and the one past the last to compare; None is all.
        norms: (N,) what `squared_norms` gave for these rows, within the span if there is one; saves a tenth of the time of many queries.
        compact: the companion of these vectors, which is read in their place; not with a span.
        threads: how many threads read ranges of the rows.

    Returns:
        Squared distances (Q, k) and rows (Q, k), nearest first; infinity and −1 where there are fewer.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    _check(queries, vectors, k, keep, span, norms, compact, threads)
    columns = slice(None) if span is None else slice(*span)
    squared = np.full((len(queries), k), np.inf)
    rows = np.full((len(queries), k), -1, np.int64)
    if not len(queries) or not len(vectors):
        return squared, rows
    given = np.ascontiguousarray(queries[:, columns], np.float32)
    few = compact is None and are_few(given, vectors)
    frame = None if few else frame_of(vectors, columns)
    vectors = np.asarray(vectors)  # no np.memmap, whose slices cost more
    if few:
        return nearest_of_few(given, vectors[:, columns], k, keep)
    task = _Task(vectors, columns, k, keep, norms, frame, compact)
    count = -(-len(vectors) // threads)
    ranges = [(start, min(start + count, len(vectors))) for start in range(0, len(vectors), count)]
    for first in range(0, len(given), _MOST_QUERIES):
        group = slice(first, first + _MOST_QUERIES)
        searches = [_Search(task, given[group], start, stop) for start, stop in ranges]
        if len(searches) > 1:
            with ThreadPoolExecutor(len(searches), thread_name_prefix="exact") as pool:
                list(pool.map(_Search.run, searches))
        else:
            searches[0].run()
        for other in searches[1:]:
            searches[0].join(other)
        squared[group], rows[group] = searches[0].squared, searches[0].rows
    return squared, rows


def _check(
    queries: Floats,
    vectors: Floats,
    k: int,
    keep: NDArray[np.bool_] | None,
    span: tuple[int, int] | None,
    norms: Floats | None,
    compact: Compact | None,
    threads: int,
) -> None:
    """Refuse arguments that do not fit each other."""
    if vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.flags.c_contiguous:
        raise ValueError(f"Vectors must be C-contiguous float32 (N, P), not {vectors.dtype} {vectors.shape}.")
    count, width = vectors.shape
    if queries.ndim != 2 or queries.shape[1] != width:
        raise ValueError(f"Queries {queries.shape} do not fit vectors {vectors.shape}.")
    if width > _WIDEST:
        raise ValueError(f"Vectors of {width:,} numbers are too wide: {_WIDEST:,} at most.")
    if k < 1 or threads < 1:
        raise ValueError(f"k and threads must be at least 1, not {k} and {threads}.")
    if keep is not None and (keep.shape != (count,) or keep.dtype != np.bool_):
        raise ValueError(f"keep must be bool ({count},), not {keep.dtype} {keep.shape}.")
    if norms is not None and (norms.shape != (count,) or norms.dtype != np.float32):
        raise ValueError(f"norms must be float32 ({count},), not {norms.dtype} {norms.shape}.")
    if compact is not None and (len(compact.table), len(compact.mean)) != (count, width):
        raise ValueError(
            f"The companion of {len(compact.table)} × {len(compact.mean)} is not of vectors {vectors.shape}."
        )
    if compact is not None and span is not None:
        raise ValueError("A companion is of whole vectors: it cannot be read within a span.")
    if span is not None and not 0 <= span[0] < span[1] <= width:
        raise ValueError(f"span {span} is not within {width} columns.")


@dataclass(frozen=True)
class _Task:
    """What all ranges and groups of queries of a search share: `nearest`'s arguments."""

    vectors: Floats
    columns: slice
    k: int
    keep: NDArray[np.bool_] | None
    norms: Floats | None
    frame: Frame | None
    compact: Compact | None


class _Search:
    """The nearest of a group of queries among a range of rows.

    Reads the compact companion if there is one, and goes over to the vectors where it tells too little apart.
    """

    def __init__(self, task: _Task, queries: Floats, start: int, stop: int) -> None:
        self.task, self.queries, self.start, self.stop = task, queries, start, stop
        self.exact = queries.astype(np.float64)
        self.squared = np.full((len(queries), task.k), np.inf)
        self.rows = np.full((len(queries), task.k), -1, np.int64)
        self.compared = self.remained = 0
        self._scan(task.compact)

    def _scan(self, compact: Compact | None) -> None:
        """Read the companion from here on, or with None the vectors."""
        self.compact, task = compact, self.task
        if compact is None:
            self.table, self.columns, self.frame = task.vectors, task.columns, task.frame
            self.near, self.slack = self.queries, np.zeros(len(self.queries))
            self.norms = task.norms if task.frame is None else None
        else:
            self.table, self.columns, self.frame, self.norms = compact.table, slice(None), None, None
            self.near, lost = compact.project(self.queries)
            self.slack = lost + compact.error
        if self.frame is not None:
            with np.errstate(over="ignore", under="ignore"):
                self.near = self.frame.moved(self.near)
        count, width = self.near.shape
        terms = width + 16
        self.gamma = terms * _UNIT / (1 - terms * _UNIT)
        self.tiny = width * _TINY
        self.own = np.square(self.near.astype(np.float64)).sum(1)
        self.beyond = np.flatnonzero(~(self.own < _LARGEST))
        self.one_by_one = count <= _FEW_QUERIES and self.frame is None and not len(self.beyond)
        with np.errstate(over="ignore"):
            self.twice = np.ascontiguousarray(self.near.T) * np.float32(-2)

    def run(self) -> None:
        """Read the rows."""
        start: int | None = self.start
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            while start is not None:
                blocks = self._blocks(start)
                start = next(
                    (int(_first(rows)) for rows, masked in blocks if not self._read(rows, masked)), None
                )

    def join(self, other: _Search) -> None:
        """Take over what was found in another range."""
        query, place = np.nonzero(other.rows >= 0)
        self._enter(query, other.rows[query, place], other.squared[query, place])

    def _blocks(self, first: int) -> Iterator[tuple[slice | Rows, bool]]:
        """Yield rows to compare: a slice, or those kept; and whether some of them are not to be found."""
        (count, width), keep = self.near.shape, self.task.keep
        numbers = _BLOCK_NUMBERS * (_ONE if count == 1 else 1)
        size = max(1, min(numbers // width, _BLOCK_PAIRS // count))
        if keep is None:
            for start in range(first, self.stop, size):
                yield slice(start, min(start + size, self.stop)), False
            return
        dense = min(_DENSE_FEW, count * _DENSE_ONE) if self.one_by_one else _DENSE
        for begin in range(first, self.stop, _WINDOW):
            end = min(begin + _WINDOW, self.stop)
            kept = int(np.count_nonzero(keep[begin:end]))
            if kept > dense * (end - begin):
                for start in range(begin, end, size):
                    yield slice(start, min(start + size, end)), kept < end - begin
            elif kept:
                rows = np.flatnonzero(keep[begin:end]) + begin
                for start in range(0, kept, size):
                    yield rows[start : start + size], False

    def _read(self, rows: slice | Rows, masked: bool) -> bool:
        """Compare a block of rows with all queries, and enter those that are among the nearest so far.

        Returns:
            False if the companion told too little apart: the vectors are to be read from this block on.
        """
        block = np.ascontiguousarray(self.table[rows, self.columns])
        values = self._loop(block) if self.one_by_one else self._product(block, rows)
        dropped = ~self.task.keep[rows] if masked and self.task.keep is not None else None
        near = self._within(values, self._limits(self.squared[:, -1]), dropped)
        if np.count_nonzero(near) > _MANY * self.task.k * len(self.exact):
            bounds = self._bounds(values, rows, near.sum(0), dropped)
            near = self._within(values, self._limits(bounds), dropped)
        places = np.flatnonzero(near)
        if self.compact is not None:
            self.compared, self.remained = self.compared + near.size, self.remained + len(places)
            if self.remained > (_WORTH_FEW if self.one_by_one else _WORTH) * self.compared:
                self._scan(None)
                return False
        if len(places):
            row, query = np.divmod(places, len(self.exact))
            number = _numbers(rows, row)
            self._enter(query, number, self._measure(query, number))
        return True

    @staticmethod
    def _within(values: Floats, limits: Floats, dropped: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """Return which values (B, Q) are not above their query's limit, of rows that may be found."""
        near: NDArray[np.bool_] = values <= limits
        if dropped is not None:
            near &= ~dropped[:, None]
        return near

    def _loop(self, block: Floats) -> Floats:
        """Return Σ (q − x)² (B, Q) in float32."""
        faiss = load_faiss()
        values = np.empty((len(self.near), len(block)), np.float32)
        for query, out in zip(self.near, values, strict=True):
            faiss.fvec_L2sqr_ny(*map(faiss.swig_ptr, (out, query, block)), block.shape[1], len(block))
        return values.T

    def _product(self, block: Floats, rows: slice | Rows) -> Floats:
        """Return |x|² (1 − 2γ) − 2 q·x (B, Q) in float32."""
        if self.frame is not None:
            block = self.frame.moved(block)
        values: Floats = np.asarray(block @ self.twice)
        norms = _norms(block) if self.norms is None else self.norms[rows]
        values += (norms * np.float32(1 - 2 * self.gamma))[:, None]
        if not norms.max() < _LARGEST:
            values[~(norms < _LARGEST)] = -np.inf  # the bound says nothing of them: they are measured again
        values[:, self.beyond] = -np.inf
        return values

    def _limits(self, squared: Doubles) -> Floats:
        """Return what a row's value must not be above (Q,), for its squared distance to be at most the given one."""
        if self.compact is not None:
            squared = np.square(np.sqrt(squared) + self.slack) * (1 + 2.0**-40)
        if self.one_by_one:
            limits = squared * (1 + 2 * self.gamma) + self.tiny
        else:
            scale = 1.0 if self.frame is None else float(self.frame.scale)
            limits = squared * (scale * scale * (1 + 2.0**-40)) - self.own * (1 - self.gamma) + self.tiny
            limits[self.beyond] = np.inf
        rounded: Floats = np.nextafter(limits.astype(np.float32), np.float32(np.inf))
        return rounded

    def _bounds(
        self, values: Floats, rows: slice | Rows, counts: Rows, dropped: NDArray[np.bool_] | None
    ) -> Doubles:
        """Return for each query a squared distance (Q,) within which k rows lie, of this block where it has many near."""
        bounds: Doubles = self.squared[:, -1].copy()
        many = np.flatnonzero(counts > _MANY * self.task.k)
        for start in range(0, len(many), _BOUNDED):
            part = many[start : start + _BOUNDED]
            some = values[:, part]
            if dropped is not None:
                some[dropped] = np.inf
            row = np.argpartition(some, self.task.k - 1, axis=0)[: self.task.k]
            squared = self._measure(np.broadcast_to(part, row.shape).ravel(), _numbers(rows, row.ravel()))
            squared = squared.reshape(row.shape)
            if dropped is not None:
                squared[dropped[row]] = np.inf
            bounds[part] = np.minimum(bounds[part], squared.max(0))
        return bounds

    def _measure(self, query: Rows, number: Rows) -> Doubles:
        """Return |q − x|² of pairs of a query and a row of the vectors, in double precision."""
        squared = np.empty(len(number))
        step = max(1, _PAIR_NUMBERS // self.task.vectors.shape[1])
        for start in range(0, len(number), step):
            pairs = slice(start, start + step)
            apart = self.task.vectors[number[pairs]][:, self.task.columns] - self.exact[query[pairs]]
            squared[pairs] = np.einsum("ij,ij->i", apart, apart)
        return squared

    def _enter(self, query: Rows, row: Rows, squared: Doubles) -> None:
        """Put measured rows among the nearest, each once."""
        query, row, squared = _chosen(squared <= self.squared[query, -1], query, row, squared)
        touched = np.unique(query)
        query = np.concatenate([query, np.repeat(touched, self.task.k)])
        row = np.concatenate([row, self.rows[touched].ravel()])
        squared = np.concatenate([squared, self.squared[touched].ravel()])
        order = np.lexsort((row, squared, query))
        starts = np.searchsorted(query[order], touched)
        best = order[starts[:, None] + np.arange(self.task.k)]
        self.rows[touched], self.squared[touched] = row[best], squared[best]


def _norms(block: Floats) -> Floats:
    """Return |x|² (B,) in float32."""
    faiss = load_faiss()
    norms = np.empty(len(block), np.float32)
    faiss.fvec_norms_L2sqr(faiss.swig_ptr(norms), faiss.swig_ptr(block), block.shape[1], len(block))
    return norms


def _first(rows: slice | Rows) -> Any:
    """Return a block's first row."""
    return rows.start if isinstance(rows, slice) else rows[0]


def _numbers(rows: slice | Rows, row: Rows) -> Rows:
    """Return rows of the table by their places in a block of it."""
    return row + rows.start if isinstance(rows, slice) else rows[row]


def _chosen(mask: NDArray[np.bool_], *arrays: Any) -> tuple[Any, ...]:
    """Return the entries of each array that the mask marks."""
    return tuple(array[mask] for array in arrays)
