"""The nearest rows to one query, or to few in a small matrix: sums in float32, and what may be nearest again in double precision."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.local.compact import Compact
from retrieval.serving.local.distances import TINY, relative_error, squared_distances
from retrieval.serving.runtime import load_faiss

Doubles = NDArray[np.float64]

_QUERIES, _NUMBERS = 4, 1 << 15
_ROWS = 1 << 21  # of one query: 8 MB of sums
_MARGIN = 8  # sums kept beyond those that are asked for, and one more for each sixteenth: the last ones say how far all others are at least
_SAMPLE = 4096  # rows that bound the k-th sum of all
_WORTH = (
    1 / 16
)  # part of the rows: if more remain after the companion, to measure those costs more than reading the vectors
_LARGEST = 2.0**127
_TOGETHER = 1 << 18  # numbers that are measured at a time


def are_few(queries: Floats, vectors: Floats, *, whole: bool) -> bool:
    """Whether a search is one for `nearest_of_few`; `whole` says that it is of all rows and columns."""
    if vectors.size <= _NUMBERS:
        return len(queries) <= _QUERIES
    return whole and len(queries) == 1 and len(vectors) <= _ROWS


def nearest_of_few(
    queries: Floats, vectors: Floats, k: int, keep: NDArray[np.bool_] | None, compact: Compact | None = None
) -> tuple[Doubles, Rows]:
    """Return what `exact.nearest` does, which see, of a matrix (N, P) or some columns of it."""
    there = None if keep is None else np.flatnonzero(keep)
    held = np.ascontiguousarray(vectors if there is None else vectors[there])
    count = min(k, len(held))
    squared, rows = np.empty((len(queries), k)), np.empty((len(queries), k), np.int64)
    if count < k:
        squared[:, count:], rows[:, count:] = np.inf, -1
    for at, query in enumerate(queries if count else ()):
        near = None if compact is None or there is not None else _near_by(compact, query, held, count)
        if near is None:
            near = _near(query, held, count)
        far = _measured(query, held, near)
        order = far.argsort(kind="stable")[:count]
        near = near[order]
        squared[at, :count], rows[at, :count] = far[order], near if there is None else there[near]
    return squared, rows


def _near(query: Floats, vectors: Floats, count: int) -> Rows:
    """Return the rows, ascending, that may be among the `count` nearest.

    Where v is the largest of k sums in float32, the k-th distance is at most v (1 + 2γ), and a row at that distance has a sum of at most v (1 + 2γ)².
    """
    wider, tiny = _bound(len(query))
    if (near := _kept(query, vectors, count)) is not None:
        return near
    sums = _sums(query, vectors)
    return _within(sums, (float(sums[_smallest(sums, count)].max()) * wider + tiny) * wider + tiny)


def _kept(query: Floats, vectors: Floats, count: int) -> Rows | None:
    """Return what `_near` does, keeping few of the sums, in FAISS's heap; None where more rows are as near as those."""
    faiss, kept = load_faiss(), min(count + _MARGIN + count // 16, len(vectors))
    if faiss.cvar.distance_compute_blas_threshold < 2:  # somebody has it take products for one query, too
        return None
    wider, tiny = _bound(len(query))
    sums, rows = np.empty(kept, np.float32), np.empty(kept, np.int64)
    given = map(faiss.swig_ptr, (query, vectors))
    faiss.knn_L2sqr(
        *given, vectors.shape[1], 1, len(vectors), kept, faiss.swig_ptr(sums), faiss.swig_ptr(rows)
    )
    limit = (float(sums[count - 1]) * wider + tiny) * wider + tiny  # they come in order
    if limit >= _LARGEST or (kept < len(vectors) and not sums[-1] > limit):
        return None
    found = rows[: int(sums.searchsorted(limit, "right"))]
    found.sort()
    return found


def _near_by(compact: Compact, query: Floats, vectors: Floats, count: int) -> Rows | None:
    """Return what `_near` does, by the companion of the vectors; None where it tells too little apart."""
    projected, lost = compact.project(query[None])
    if not np.isfinite(projected).all():
        return None
    sums, (wider, tiny) = _sums(projected[0], np.asarray(compact.table)), _bound(compact.table.shape[1])
    farthest = _measured(query, vectors, _smallest(sums, count)).max()
    reach = (np.sqrt(farthest) + float(lost[0]) + compact.error) ** 2 * (1 + 2.0**-40)
    near = _within(sums, float(reach) * wider + tiny)
    return near if len(near) <= max(count, _WORTH * len(sums)) else None


def _sums(query: Floats, vectors: Floats) -> Floats:
    """Return Σ (q − x)² (N,) in float32."""
    sums = np.empty(len(vectors), np.float32)
    squared_distances(query, vectors, sums)
    return sums


def _bound(width: int) -> tuple[float, float]:
    """Return the factor and the term that bound such a sum by the true one, and the true one by it."""
    return 1 + 2 * relative_error(width), 2 * width * TINY


def _smallest(sums: Floats, count: int) -> Rows:
    """Return where the `count` smallest sums are: of many, among those that are not above what a sample bounds them by."""
    step = len(sums) // max(_SAMPLE, 4 * count)
    if step < 2:
        return np.argpartition(sums, count - 1)[:count]
    some = _within(sums, float(np.partition(sums[::step], count - 1)[count - 1]))
    return some[np.argpartition(sums[some], count - 1)[:count]]


def _within(sums: Floats, limit: float) -> Rows:
    """Return the rows whose sum is not above a limit (rounded to float32: a bound by (1 + 2γ) has room for that); beyond what float32 holds, all."""
    near: Rows = (sums <= (limit if limit < _LARGEST else np.inf)).nonzero()[0]
    return near


def _measured(query: Floats, vectors: Floats, rows: Rows) -> Doubles:
    """Return |q − x|² of rows in double precision."""
    exact, far = query.astype(np.float64), np.empty(len(rows))
    step = max(1, _TOGETHER // len(query))
    for start in range(0, len(rows), step):
        apart = vectors[rows[start : start + step]] - exact
        far[start : start + step] = np.einsum("ij,ij->i", apart, apart)
    return far
