"""Exact nearest neighbours in a matrix of float32 rows, read where it lies: in memory or mapped from a file.

Rows pass once, in blocks that fit a core's cache. Of each block a fast product in float32 gives every row's distance
with a bound of its error; only rows that can still be among the nearest are measured again, in double precision from
the row itself. So the answer is that of a search in double precision, whatever the vectors' offset or scale, at the
cost of a search in float32. A few more than k rows are kept by their float32 distance; where the last of them cannot be
told from the k-th nearest, as among many equal vectors, that query's rows pass once more.

**The bound.** Let u = 2⁻²⁴ and γ = nu / (1 − nu) for n a little above P (N. Higham, Accuracy and Stability of Numerical
Algorithms, 2002, §3.1: an inner product of P terms, summed in any order, is off by at most γ |q| |x|).
With 2 |q| |x| ≤ |q|² + |x|², what float32 makes of |x|² (1 − 2γ) − 2 q·x is never above |q − x|² − (1 − γ) |q|². A row
for which it is above τ − (1 − γ) |q|² is therefore farther than τ, the distance of the k-th nearest so far.
Few queries are compared one by one as Σ (q − x)², which is off by a part γ of itself; one alone in a single pass (`few`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.local.compact import Compact
from retrieval.serving.local.distances import TINY, measured, norms_of, relative_error, squared_distances
from retrieval.serving.local.few import are_few, nearest_of_few
from retrieval.serving.local.frame import Frame, frame_of
from retrieval.serving.local.smallest import Smallest, kept_for

Doubles = NDArray[np.float64]

_WIDEST = 1 << 20
_FEW_QUERIES = 4  # up to here a loop over queries is faster than a matrix product and the rows' norms
_MOST_QUERIES = 256  # at a time
_BLOCK_NUMBERS = 1 << 20  # 4 MB of vectors a block
_ONE = 4  # times as many for one query, which reads them once: no cache is of use
_BLOCK_PAIRS = 1 << 20
_WINDOW = 1 << 18
# The part of a window's rows from which it is cheaper to compare all of them than to gather those that are kept.
# One query reads each row once, and gathering costs about as much: it is the more worth the more queries share it.
_DENSE_ONE, _DENSE_FEW, _DENSE = 0.12, 0.35, 0.75
_MANY = 4  # times k: if more rows of a block are near, their k nearest are measured first
_BOUNDED = 32  # queries at a time
# If more than this part of the pairs remains after the companion, to measure those costs more than reading the vectors.
_WORTH_FEW, _WORTH = 1 / 16, 1 / 64
_LARGEST = 2.0**120


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
        norms: (N,) what `distances.squared_norms` gave for these rows, within the span if there is one; saves a tenth of the time of many queries.
        compact: the companion of these vectors, which is read in their place; not with a span.
        threads: how many threads read ranges of the rows.

    Returns:
        Squared distances (Q, k) and rows (Q, k), nearest first; infinity and −1 where there are fewer.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    _check(queries, vectors, k, keep, span, norms, compact, threads)
    columns = slice(None) if span is None else slice(*span)
    given = np.ascontiguousarray(queries[:, columns], np.float32)
    if are_few(given, vectors, whole=keep is None and span is None and threads == 1):
        return nearest_of_few(given, np.asarray(vectors)[:, columns], k, keep, compact)
    squared = np.full((len(queries), k), np.inf)
    rows = np.full((len(queries), k), -1, np.int64)
    if not len(queries) or not len(vectors):
        return squared, rows
    frame = frame_of(vectors, columns)
    vectors = np.asarray(vectors)  # no np.memmap, whose slices cost more
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
        self.cap = np.full(len(queries), np.inf)  # squared distances within which k rows are known to lie
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
        self.gamma = relative_error(width)
        self.tiny = width * TINY
        self.own = np.square(self.near.astype(np.float64)).sum(1)
        self.beyond = np.flatnonzero(~(self.own < _LARGEST))
        self.one_by_one = count <= _FEW_QUERIES and self.frame is None and not len(self.beyond)
        with np.errstate(over="ignore"):
            self.twice = self.near * np.float32(-2)

    def run(self) -> None:
        """Read the rows."""
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            start = self.start if self.compact is None else self._filter(self.start)
            if start is not None:
                self._select(start)

    def _filter(self, start: int) -> int | None:
        """Read rows from one on, and measure at once whatever may be near; return the row from which on the vectors are to be read, or None."""
        for rows, masked in self._blocks(start):
            if not self._read(rows, masked):
                return int(_first(rows))
        return None

    def _select(self, start: int) -> None:
        """Read the vectors from a row on, keep what is smallest in float32, and measure that."""
        smallest, seen = Smallest(len(self.exact), kept_for(self.task.k)), 0
        for rows, masked in self._blocks(start):
            block = np.ascontiguousarray(self.table[rows, self.columns])
            values = smallest.room(len(block))
            self._compare(block, rows, values)
            seen += len(block)
            if masked and self.task.keep is not None:
                dropped = ~self.task.keep[rows]
                values[:, dropped] = np.inf
                seen -= int(np.count_nonzero(dropped))
            smallest.add(values, rows)
        before = self.squared, self.rows
        query, place = np.nonzero(smallest.rows >= 0)
        squared = np.full(smallest.rows.shape, np.inf)
        squared[query, place] = self._measure(query, smallest.rows[query, place])
        squared, rows = np.hstack([self.squared, squared]), np.hstack([self.rows, smallest.rows])
        order = np.lexsort((rows, squared))[:, : self.task.k]
        self.squared, self.rows = (np.take_along_axis(one, order, 1) for one in (squared, rows))
        unsure = np.flatnonzero(~smallest.beyond(self._limits(self.squared[:, -1]), seen))
        if len(unsure):
            self._again(start, unsure, *before)

    def _again(self, start: int, unsure: Rows, squared: Doubles, rows: Rows) -> None:
        """Read the vectors from a row on once more, for queries that had squared distances and rows before."""
        again = _Search(replace(self.task, compact=None), self.queries[unsure], start, self.stop)
        again.cap = self.squared[unsure, -1]
        again._filter(start)
        self.squared[unsure], self.rows[unsure] = squared[unsure], rows[unsure]
        query, place = np.nonzero(again.rows >= 0)
        self._enter(unsure[query], again.rows[query, place], again.squared[query, place])

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
        values = np.empty((len(self.exact), len(block)), np.float32)
        self._compare(block, rows, values)
        dropped = ~self.task.keep[rows] if masked and self.task.keep is not None else None
        near = self._within(values, self._limits(np.minimum(self.squared[:, -1], self.cap)), dropped)
        if np.count_nonzero(near) > _MANY * self.task.k * len(self.exact):
            bounds = self._bounds(values, rows, near.sum(1), dropped)
            near = self._within(values, self._limits(bounds), dropped)
        places = np.flatnonzero(near)
        if self.compact is not None:
            self.compared, self.remained = self.compared + near.size, self.remained + len(places)
            if self.remained > (_WORTH_FEW if self.one_by_one else _WORTH) * self.compared:
                self._scan(None)
                return False
        if len(places):
            query, row = np.divmod(places, len(block))
            number = _numbers(rows, row)
            self._enter(query, number, self._measure(query, number))
        return True

    @staticmethod
    def _within(values: Floats, limits: Floats, dropped: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """Return which values (Q, B) are not above their query's limit, of rows that may be found."""
        near: NDArray[np.bool_] = values <= limits[:, None]
        if dropped is not None:
            near &= ~dropped
        return near

    def _compare(self, block: Floats, rows: slice | Rows, values: Floats) -> None:
        """Write to `values` (Q, B) in float32 Σ (q − x)², where queries are compared one by one, or |x|² (1 − 2γ) − 2 q·x."""
        if self.one_by_one:
            for query, own in zip(self.near, values, strict=True):
                squared_distances(query, block, own)
            return
        if self.frame is not None:
            block = self.frame.moved(block)
        np.matmul(self.twice, block.T, out=values)
        norms = norms_of(block) if self.norms is None else self.norms[rows]
        values += norms * np.float32(1 - 2 * self.gamma)
        if not norms.max() < _LARGEST:
            values[
                :, ~(norms < _LARGEST)
            ] = -np.inf  # the bound says nothing of them: they are measured again
        values[self.beyond] = -np.inf

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
        bounds: Doubles = np.minimum(self.squared[:, -1], self.cap)
        many = np.flatnonzero(counts > _MANY * self.task.k)
        for start in range(0, len(many), _BOUNDED):
            part = many[start : start + _BOUNDED]
            some = values[part]
            if dropped is not None:
                some[:, dropped] = np.inf
            row = np.argpartition(some, self.task.k - 1, axis=1)[:, : self.task.k]
            squared = self._measure(np.repeat(part, self.task.k), _numbers(rows, row.ravel()))
            squared = squared.reshape(row.shape)
            if dropped is not None:
                squared[dropped[row]] = np.inf
            bounds[part] = np.minimum(bounds[part], squared.max(1))
        return bounds

    def _measure(self, query: Rows, number: Rows) -> Doubles:
        """Return |q − x|² of pairs of a query and a row of the vectors, in double precision."""
        return measured(self.exact, self.task.vectors, query, number, self.task.columns)

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


def _first(rows: slice | Rows) -> Any:
    """Return a block's first row."""
    return rows.start if isinstance(rows, slice) else rows[0]


def _numbers(rows: slice | Rows, row: Rows) -> Rows:
    """Return rows of the table by their places in a block of it."""
    return row + rows.start if isinstance(rows, slice) else rows[row]


def _chosen(mask: NDArray[np.bool_], *arrays: Any) -> tuple[Any, ...]:
    """Return the entries of each array that the mask marks."""
    return tuple(array[mask] for array in arrays)
