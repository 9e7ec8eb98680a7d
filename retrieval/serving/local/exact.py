"""Exact nearest neighbours in a matrix of float32 rows, read where it lies: in memory or mapped from a file.

Rows pass once, in parts that fit a core's cache. A fast product in float32 gives every row's distance to every query,
with a bound of its error; of each block only rows that can still be among the nearest are measured again, in double
precision from the row itself. Which those are, the k-th smallest bound says first, and then the k-th distance that was
measured (`lows`). So the answer is that of a search in double precision, whatever the vectors' offset or scale, at the
cost of a search in float32.

**The bound.** Let u = 2⁻²⁴ and γ = nu / (1 − nu) for n a little above P (N. Higham, Accuracy and Stability of Numerical
Algorithms, 2002, §3.1: an inner product of P terms, summed in any order, is off by at most γ |q| |x|).
With 2 |q| |x| ≤ |q|² + |x|², what float32 makes of |x|² (1 − 2γ) − 2 q·x is never above |q − x|² − (1 − γ) |q|². A row
for which it is above τ − (1 − γ) |q|² is therefore farther than τ, the distance of the k-th nearest so far.
One query is compared as Σ (q − x)², which is off by a part γ of itself; of all rows in a single pass (`few`).
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
from retrieval.serving.local.distances import TINY, measured, norms_of, relative_error, squared_distances
from retrieval.serving.local.few import are_few, nearest_of_few
from retrieval.serving.local.frame import Frame, frame_of
from retrieval.serving.local.lows import Lows

Doubles = NDArray[np.float64]

_WIDEST = 1 << 20
_MOST_QUERIES = 256  # at a time
_PART_NUMBERS = 1 << 17  # 512 KB of vectors are in a core's own cache when they are multiplied
_BLOCK_PAIRS = 1 << 21  # 8 MB of values
_PAIRS = 1 << 17  # measured before they are entered
_WINDOW = 1 << 18
_CACHED = 1 << 23  # bytes of vectors that stay in the caches from one search to the next
# OpenBLAS multiplies small matrices as they lie: up to so many products at once. It repacks larger ones, which for few
# queries takes longer than to multiply them; below so many rows the calls do.
_SMALL_PRODUCT, _FEWEST_ROWS = 1_000_000, 64
# The part of a window's rows from which it is cheaper to compare all of them than to gather those that are kept.
# One query reads each row once, and gathering costs about as much: it is the more worth the more queries share it.
_DENSE_ONE, _DENSE = 0.12, 0.75
_MANY = 2  # times k: if more groups of rows are near, a bound of the k-th comes first
# If more than this part of the pairs remains after the companion, to measure those costs more than reading the vectors.
_WORTH_ONE, _WORTH = 1 / 16, 1 / 64
_COMPACT_LEAST = 2_000_000  # numbers of vectors; fewer are read as fast as their companion
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

    Thread-safe. Memory is bounded: some 10 MB a thread, some 100 MB where most rows are equal, and (Q, k); never (Q, N) nor a copy of the matrix.

    Args:
        queries: (Q, P), finite.
        vectors: (N, P), finite, C-contiguous; may be mapped from a file, read-only.
        k: how many, at least 1.
        keep: (N,), which rows may be found; None is all.
        span: first column and the one past the last to compare; None is all.
        norms: (N,) what `distances.squared_norms` gave for these rows, within the span if there is one; saves time where caches hold the vectors.
        compact: the companion of these vectors, which is read in their place where that is faster; not with a span.
        threads: how many threads read ranges of the rows.

    Returns:
        Squared distances (Q, k) and rows (Q, k), nearest first; infinity and −1 where there are fewer.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    _check(queries, vectors, k, keep, span, norms, compact, threads)
    if vectors.size < _COMPACT_LEAST:
        compact = None
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
        self.some = False  # whether rows were found
        self.compared = self.remained = 0
        self._scan(task.compact)

    def _scan(self, compact: Compact | None) -> None:
        """Read the companion from here on, or with None the vectors."""
        with np.errstate(over="ignore", under="ignore"):
            self._begin(compact)

    def _begin(self, compact: Compact | None) -> None:
        """Make ready what is compared."""
        self.compact, task = compact, self.task
        if compact is None:
            self.table, self.columns, self.frame = task.vectors, task.columns, task.frame
            self.near, self.slack = self.queries, None
        else:
            self.table, self.columns, self.frame = np.asarray(compact.table), slice(None), None
            self.near, lost = compact.project(self.queries)
            self.slack = lost + compact.error
        if self.frame is not None:
            self.near = self.frame.moved(self.near)
        # of a table beyond the caches the norms are computed again: that brings its rows into the core's own, for the product
        kept = compact is None and self.frame is None and self.table.nbytes <= _CACHED
        self.norms = task.norms if kept else None
        count, width = self.near.shape
        self.gamma = relative_error(width)
        self.tiny = width * TINY
        self.own = np.square(self.near.astype(np.float64)).sum(1)
        self.beyond = np.flatnonzero(~(self.own < _LARGEST))
        self.one = count == 1 and self.frame is None and not len(self.beyond)
        self.twice = np.ascontiguousarray((self.near * np.float32(-2)).T)
        self.less = np.float32(1 - 2 * self.gamma)
        # of vectors of one length, as most embeddings are, the least norm is a bound of every row's: it goes into the limits
        low, high = (
            (0.0, np.inf) if self.norms is None else (float(self.norms.min()), float(self.norms.max()))
        )
        self.flat = high - low <= self.gamma * low and high < _LARGEST and not len(self.beyond)
        self.shift = low * float(self.less) if self.flat else 0.0
        self.spare = 4 * self.gamma * self.own
        self.part = max(1, _PART_NUMBERS // width)
        self.product = min(self.part, _SMALL_PRODUCT // (width * count))
        if self.product < _FEWEST_ROWS:  # many queries: the large products' way is the faster
            self.product = self.part
        self.part -= self.part % self.product  # whole products

    def run(self) -> None:
        """Read the rows."""
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            start: int | None = self.start
            while start is not None:
                start = self._pass(start)

    def _pass(self, start: int) -> int | None:
        """Read rows from one on; return the row from which on the vectors are to be read in the companion's place, or None."""
        for rows, masked in self._blocks(start):
            before = self.squared.copy(), self.rows.copy()
            if not self._read(rows, masked):
                self.squared, self.rows = before  # the block is read again, and a row is entered once
                self._scan(None)
                return int(rows.start if isinstance(rows, slice) else rows[0])
        return None

    def join(self, other: _Search) -> None:
        """Take over what was found in another range."""
        query, place = np.nonzero(other.rows >= 0)
        self._enter(query, other.rows[query, place], other.squared[query, place])

    def _blocks(self, first: int) -> Iterator[tuple[slice | Rows, bool]]:
        """Yield rows to compare: a slice, or those kept; and whether some of them are not to be found."""
        count, keep = len(self.near), self.task.keep
        size = max(1, _BLOCK_PAIRS // count)
        if keep is None:
            for start in range(first, self.stop, size):
                yield slice(start, min(start + size, self.stop)), False
            return
        dense = min(_DENSE, count * _DENSE_ONE)
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
        values, norm = self._values(rows)
        dropped = ~self.task.keep[rows] if masked and self.task.keep is not None else None
        if dropped is not None:
            values[dropped] = np.inf
        lows, (count, k) = Lows(values, self.task.k), self.squared.shape
        limits = known = (
            self._limits(self.squared[:, -1]) if self.some else np.full(count, np.inf, np.float32)
        )
        near = lows.near(known) if self.some else None
        if near is None or np.count_nonzero(near) > _MANY * k * count:
            # k rows are not above this, and what float32 may have made of the k-th: most often all that is to be measured
            limits = lows.kth()
            if self.one:
                limits += limits * np.float32(4 * self.gamma)
            elif self.compact is None:
                limits += np.minimum(self.spare + 4 * self.gamma * norm, _LARGEST).astype(np.float32)
            limits = np.minimum(known, limits)
            near = lows.near(limits)
        found = lows.within(near, limits)
        if self._refused(values.size, len(found[0])):
            return False
        self._measure(rows, *found, dropped)
        del found  # of equal vectors it is large
        if limits is known:
            return True
        reach = np.minimum(known, self._limits(self.squared[:, -1]))
        more = limits < reach
        if more.any():
            reach[~more] = -np.inf
            row, query = lows.within(lows.near(reach), reach)
            fresh = values[row, query] > limits[query]
            row, query = row[fresh], query[fresh]
            if self._refused(0, len(row)):
                return False
            self._measure(rows, row, query, dropped)
        return True

    def _refused(self, compared: int, remained: int) -> bool:
        """Note how many pairs of the companion's were compared, and how many remain; return whether those are too many."""
        if self.compact is None:
            return False
        self.compared, self.remained = self.compared + compared, self.remained + remained
        return self.remained > (_WORTH_ONE if self.one else _WORTH) * self.compared

    def _measure(self, rows: slice | Rows, row: Rows, query: Rows, dropped: NDArray[np.bool_] | None) -> None:
        """Measure pairs of a block's row and a query, but for rows that are not to be found, and enter them."""
        if dropped is not None:
            there = ~dropped[row]
            row, query = row[there], query[there]
        number = _numbers(rows, row)
        for start in range(0, len(row), _PAIRS):  # of many equal vectors all are as near as the k-th
            pairs = query[start : start + _PAIRS], number[start : start + _PAIRS]
            self._enter(*pairs, measured(self.exact, self.task.vectors, *pairs, self.task.columns))

    def _values(self, rows: slice | Rows) -> tuple[Floats, float]:
        """Return in float32 (B, Q) |x|² (1 − 2γ) − 2 q·x, or of one query Σ (q − x)²; and the mean of |x|²."""
        number = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        values = np.empty((number, len(self.near)), np.float32)
        norms = np.empty(number, np.float32) if self.norms is None else self.norms[rows]
        lowered = None if self.norms is None or self.flat else norms * self.less
        for start in range(0, number, self.part):
            stop = min(start + self.part, number)
            some = (
                slice(rows.start + start, rows.start + stop) if isinstance(rows, slice) else rows[start:stop]
            )
            block = np.ascontiguousarray(self.table[some, self.columns])
            if self.one:
                squared_distances(self.near[0], block, values[start:stop, 0])
                continue
            if self.frame is not None:
                block = self.frame.moved(block)
            if self.norms is None:
                norms[start:stop] = norms_of(block)
            own = values[start:stop]
            for first in range(0, stop - start, self.product):
                last = first + self.product
                np.matmul(block[first:last], self.twice, out=own[first:last])
            if not self.flat:
                own += (norms[start:stop] * self.less if lowered is None else lowered[start:stop])[:, None]
        if self.one or self.flat:
            return values, self.shift
        if not norms.max() < _LARGEST:
            values[~(norms < _LARGEST)] = -np.inf  # the bound says nothing of them: they are measured again
        if len(self.beyond):
            values[:, self.beyond] = -np.inf
        return values, float(norms.mean())

    def _limits(self, squared: Doubles) -> Floats:
        """Return what a row's value must not be above (Q,), for its squared distance to be at most the given one."""
        if self.slack is not None:
            squared = np.square(np.sqrt(squared) + self.slack) * (1 + 2.0**-40)
        if self.one:
            limits = squared * (1 + 2 * self.gamma) + self.tiny
        else:
            scale = 1.0 if self.frame is None else float(self.frame.scale)
            limits = (
                squared * (scale * scale * (1 + 2.0**-40))
                - self.own * (1 - self.gamma)
                + (self.tiny - self.shift)
            )
            limits[self.beyond] = np.inf
        rounded: Floats = np.nextafter(limits.astype(np.float32), np.float32(np.inf))
        return rounded

    def _enter(self, query: Rows, row: Rows, squared: Doubles) -> None:
        """Put measured rows among the nearest, each once."""
        k = self.task.k
        if self.some:
            query, row, squared = _chosen(squared <= self.squared[query, -1], query, row, squared)
            touched = np.flatnonzero(np.bincount(query, minlength=len(self.rows)))
            query = np.concatenate([query, np.repeat(touched, k)])
            row = np.concatenate([row, self.rows[touched].ravel()])
            squared = np.concatenate([squared, self.squared[touched].ravel()])
        self.some = True
        order = np.lexsort((row, squared, query))
        counts = np.bincount(query, minlength=len(self.rows))
        place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        order, place = order[place < k], place[place < k]
        query = query[order]
        self.rows[query, place], self.squared[query, place] = row[order], squared[order]


def _numbers(rows: slice | Rows, row: Rows) -> Rows:
    """Return rows of the table by their places in a block of it."""
    return row + rows.start if isinstance(rows, slice) else rows[row]


def _chosen(mask: NDArray[np.bool_], *arrays: Any) -> tuple[Any, ...]:
    """Return the entries of each array that the mask marks."""
    return tuple(array[mask] for array in arrays)
