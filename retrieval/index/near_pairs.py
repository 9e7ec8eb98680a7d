"""All pairs of vectors within a distance of each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from retrieval.base.arrays import Floats32, Floats64, Ints
from retrieval.base.progress import Meter

MAX_PAIRS = 1_000_000
"""The search stops when it has more pairs than this."""
_ENTRIES = 1 << 18
"""Number of squared distances that are computed at a time."""
_AXES = 8
"""Number of principal components by which blocks of far rows are left out."""
_COMPONENTS = 32
"""Number of principal components by which far pairs are left out."""
_MANY = 1 / 16
"""If a larger share of pairs may be near by their components, all numbers are compared."""
_SAMPLE = 1000
"""Number of rows from which the principal components are computed."""
_ROWS = 512
"""Largest number of rows in a block."""
_PART = 10_000
"""Number of rows whose components are computed at a time."""


@dataclass(frozen=True)
class Near:
    """Pairs of rows that are near each other.

    Attributes:
        first: the lower row (n,) of each pair.
        second: the higher row (n,) of each pair.
        distance: the distance (n,) of each pair.
        complete: False if there are too many pairs, so that some may be missing.
    """

    first: Ints
    second: Ints
    distance: Floats64
    complete: bool


def near_pairs(
    vectors: Floats32,
    within: float,
    *,
    same: Ints | None = None,
    what: str = "comparing",
) -> Near:
    """Return pairs of rows within a Euclidean distance of each other, the nearest first.

    Along some principal components no two rows are farther apart than they are in full: a few
    components leave out blocks of far rows, some more leave out far pairs. Both are computed in
    float32, with a margin for the rounding error; float64 measures the pairs that are left.

    Args:
        vectors: N finite vectors of P numbers (N, P).
        within: largest distance of a pair.
        same: group numbers (N,); rows of the same group are not a pair.
        what: title of the progress display.
    """
    size, width = vectors.shape
    mean = vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    axes = np.linalg.svd(vectors[:: -(-size // _SAMPLE)] - mean, full_matrices=False)[2]
    axes = axes[:_COMPONENTS]
    components = np.empty((size, len(axes)), np.float32)
    lengths = np.empty(size, np.float32)
    for start in range(0, size, _PART):
        centred = vectors[start : start + _PART] - mean
        components[start : start + _PART] = centred @ axes.T
        lengths[start : start + _PART] = np.linalg.norm(centred, axis=1)
    # Each row has its own margin, so that one long vector does not make all pairs candidates.
    error = 8 * float(np.finfo(np.float32).eps) * (width + 8)
    margins = error * lengths
    squares = (1 - error) * np.square(lengths)
    # (w + a + b)² ≤ w² + 2wa + 2wb + 2a² + 2b², where a and b are the errors of two rows.
    errors = len(axes) ** 0.5 * margins
    shortened = (1 - error) * np.square(components).sum(axis=1) - 2 * errors * (within + errors)
    left, right = _factors(components, shortened)
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    total = 0
    with Meter(what, size, "items") as meter:
        for rows, neighbours in _blocks(components[:, :_AXES], within, margins):
            step = max(1, _ENTRIES // len(rows))
            for start in range(0, len(neighbours), step):
                if total > MAX_PAIRS:
                    break
                columns = neighbours[start : start + step]
                near = left[rows] @ right[columns].T <= within**2 / 2
                if np.count_nonzero(near) > _MANY * near.size:
                    wide_left = _factors(vectors[rows] - mean, squares[rows])[0]
                    wide_right = _factors(vectors[columns] - mean, squares[columns])[1]
                    near = wide_left @ wide_right.T <= within**2 / 2
                row, column = np.nonzero(near)
                # The block's own rows come first, so this keeps each of their pairs once.
                once = row < start + column
                first = np.minimum(rows[row[once]], columns[column[once]])
                second = np.maximum(rows[row[once]], columns[column[once]])
                if same is not None:
                    differ = same[first] != same[second]
                    first = first[differ]
                    second = second[differ]
                for begin in range(0, len(first), 4096):
                    pair = first[begin : begin + 4096], second[begin : begin + 4096]
                    differences = vectors[pair[0]].astype(np.float64) - vectors[pair[1]]
                    # As in `bundle.distances`, so that a pair has the same distance in a search.
                    distance = np.sqrt(np.einsum("ij,ij->i", differences, differences))
                    inside = distance <= within
                    parts.append((pair[0][inside], pair[1][inside], distance[inside]))
                    total += int(inside.sum())
                    if total > MAX_PAIRS:
                        break
            meter.update(len(rows))
    first, second, distance = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((second, first, distance))
    return Near(first[order], second[order], distance[order], total <= MAX_PAIRS)


def _factors(vectors: Floats32, squares: Floats32) -> tuple[Floats32, Floats32]:
    """Return A and B (N, P + 2), where A Bᵀ has half the squared distances of N vectors (N, P)."""
    ones = np.ones_like(squares)
    left = np.column_stack([vectors, squares / 2, ones])
    right = np.column_stack([-vectors, ones, squares / 2])
    return left, right


def _blocks(components: Floats32, within: float, margins: Floats32) -> Iterator[tuple[Ints, Ints]]:
    """Yield blocks of rows, and for each block these and all rows that may be near one of them.

    A pair of rows in different blocks is yielded once. Blocks are the leaves of a k-d tree.

    Args:
        components: principal components (N, A) of the rows.
        within: largest distance of near rows.
        margins: largest rounding error (N,) of each row's components.
    """
    size = len(components)
    components = np.ascontiguousarray(components.T)
    lower = components - margins
    upper = components + margins
    done = np.zeros(size, bool)
    unfinished = [(np.arange(size), np.arange(size))]
    while unfinished:
        rows, neighbours = unfinished.pop()
        neighbours = neighbours[~done[neighbours]]
        for low, high in zip(lower, upper, strict=True):
            least = low[rows].min() - within
            most = high[rows].max() + within
            neighbours = neighbours[(high[neighbours] >= least) & (low[neighbours] <= most)]
        if len(rows) > _ROWS:
            widest = components[:, rows].var(axis=1).argmax()
            half = len(rows) // 2
            ordered = rows[np.argpartition(components[widest, rows], half)]
            unfinished += [(ordered[half:], neighbours), (ordered[:half], neighbours)]
        else:
            done[rows] = True
            yield rows, np.concatenate([rows, neighbours[~done[neighbours]]])
