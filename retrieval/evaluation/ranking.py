"""Which ranks of a search match: all that metrics need of it, mostly in single precision.

Half squared distances h = |q − g|² / 2 are computed as a product ĥ in float32. The standard bound
on a sum of n products (N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, §3.1) holds
for any order of summation:

    |h − ĥ| ≤ n u (|q||g| + |q|²/2 + |g|²/2) + the rounding of codes and result =: E.

Items whose ĥ differ by more than 2 E are therefore in their true order. Items that are closer form
a run. The order within a run matters only if it holds both matches and others among the needed
ranks. Its items are then measured in float64 and ordered as by `exact_neighbors`. A query with too
many pairs in doubt is left to full search.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.evaluation.neighbors import rounded_keys
from retrieval.serving.store.search import measured

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

MOST_ITEMS = 2**17
"""Largest gallery, of which a block of queries still makes an efficient product."""
_PAIRS = 2**23
_ROWS = 1024
_GROUP = 64
"""Most items whose nearest one stands for them when the reach of a query is chosen."""
_DOUBT = 16
"""Full search is cheaper for a query with more than one pair in doubt per this many items."""
_UNIT = 2.0**-24


class Ranking:
    """Ranks the items of a gallery.

    Args:
        queries: (Q, C), finite, float32 or float64.
        gallery: (N, C), of the same type; `None` ranks each query among the others.
        query_class: (Q,), class numbers.
        item_class: (N,), class numbers.
    """

    def __init__(
        self,
        queries: NDArray[Any],
        gallery: NDArray[Any] | None,
        query_class: Ints,
        item_class: Ints,
    ) -> None:
        items, self._itself = queries if gallery is None else gallery, gallery is None
        exponent = math.frexp(float(np.abs(items).max(initial=0)))[1]
        if items.dtype == np.float64:  # scale by a power of two, so that no square overflows
            items, exponent, shift = np.ldexp(items, -exponent), 0, -exponent
            queries = items if gallery is None else np.ldexp(queries, shift)
        self._queries, self._items = queries, items
        self._query_class, self._item_class = query_class, item_class
        self._scale = np.float64(2.0 ** -max(-1000, min(1000, exponent)))
        sums = ((items[i : i + _ROWS] * self._scale).sum(0) for i in range(0, len(items), _ROWS))
        self._centre = sum(sums, np.zeros(items.shape[1])) / len(items)
        factors, norms = self._factored(items)
        self._factors, self._longest = np.ascontiguousarray(factors.T), norms.max()
        self.block = max(16, min(512, _PAIRS // len(items)))
        """Number of queries per call."""

    def __call__(self, rows: Ints, depth: int) -> tuple[Bools, Bools]:
        """Return matches (B, depth) of queries (B,), and whether to search a query in full (B,)."""
        size, (halves, error) = len(self._items), self._products(rows)
        near, item, failed = _nearest(halves, depth, size - self._itself)
        with np.errstate(invalid="ignore"):
            joined = np.diff(near) <= error[:, None]
        match = self._item_class.take(item, mode="clip") == self._query_class[rows, None]
        failed |= joined[:, depth - 1 :].all(axis=1)
        joined[failed], joined[:, -1] = False, False
        row, rank, run = _in_doubt(joined, match, depth)
        costly = np.bincount(row, minlength=len(rows)) * _DOUBT > size
        failed |= costly
        kept = ~costly[row]
        row, rank, run = row[kept], rank[kept], run[kept]
        column, exact = item[row, rank], self._queries[rows].astype(np.float64)
        squared = measured(exact, self._items, row, column)
        order = np.lexsort((rounded_keys(squared, column), run))
        match[row, rank] = match[row[order], rank[order]]
        return match[:, :depth], failed

    def _products(self, rows: Ints) -> tuple[Floats, Floats]:
        """Return ĥ of queries and all items (B, N), and 2 E (B,)."""
        own, norms = self._factored(self._queries[rows])
        # in units of (|q| + |g|)²: half a rounding per term, and those of codes, half norms and
        # result
        roundings = (own.shape[1] + 1) / 2 + 2
        error = 2.02 * _UNIT * roundings * (norms + self._longest) ** 2 + 1e-30
        turned = -own
        turned[:, -2], turned[:, -1] = 1, own[:, -2]
        with np.errstate(over="ignore", invalid="ignore"):
            halves = turned @ self._factors
            if self._itself:
                halves[np.arange(len(rows)), rows] = np.inf
            return halves, error.astype(np.float32)

    def _factored(self, codes: NDArray[Any]) -> tuple[Floats, NDArray[np.float64]]:
        """Return centred codes x with |x|²/2 and 1 appended (B, C + 2), and the lengths |x| (B,).

        The product with −x, 1 and |x|²/2 is half the squared distance.
        """
        out, norms = np.ones((len(codes), codes.shape[1] + 2), np.float32), np.empty(len(codes))
        with np.errstate(over="ignore"):
            for start in range(0, len(codes), _ROWS):
                part = slice(start, start + _ROWS)
                out[part, :-2] = codes[part] * self._scale - self._centre
                squares = np.square(out[part, :-2], dtype=np.float64).sum(1)
                out[part, -2], norms[part] = squares / 2, np.sqrt(squares)
        return out, norms


def _nearest(halves: Floats, depth: int, visible: int) -> tuple[Floats, Ints, Bools]:
    """Return the nearest items of each query by ĥ (B, N), a little more than `depth`.

    Returns:
        Their ĥ in order (B, W + 1), of which the last bounds all other items, the items (B, W), and
        whether a query is left to full search, as in a crowd of items at one distance (B,).
    """
    (count, size), width = halves.shape, min(depth + depth // 16 + 9, visible)
    # the nearest of each group are nearly as good to choose a reach from, and faster
    members = max(1, min(_GROUP, size // (4 * width)))
    groups = size // members
    least = halves[:, : members * groups].reshape(count, members, groups).min(axis=1)
    least.partition(width - 1, axis=1)
    reach = least[:, width - 1]
    within = halves <= reach[:, None]
    counts = np.count_nonzero(within, axis=1)
    failed = (counts < width) | (counts > 4 * width + _GROUP)  # too few if a product overflowed
    within[failed], counts[failed] = False, 0
    place = np.flatnonzero(within)
    bound = np.full(count, np.inf, np.float32) if width == visible else reach
    columns = np.arange(max(width, int(counts.max())) + 1)
    ranked = np.repeat(_keys(bound, np.int64(size))[:, None], len(columns), axis=1)
    ranked[columns < counts[:, None]] = _keys(halves.ravel()[place], place % size)
    ranked.sort(axis=1)
    near = (ranked[:, : width + 1] >> 32).astype(np.int32).view(np.float32)
    return near, ranked[:, :width] & 0xFFFFFFFF, failed


def _keys(halves: Floats, item: Any) -> Ints:
    """Return ĥ (at least 0) and the item in 32 bits each, which compare by ĥ, then by item."""
    near = np.maximum(halves, 0) + np.float32(0)  # −0 becomes 0, because its bits are negative
    return np.asarray(near.view(np.int32).astype(np.int64) << 32 | item)


def _in_doubt(joined: Bools, match: Bools, depth: int) -> tuple[Ints, Ints, Ints]:
    """Return query, rank and run (M,) of each item whose run holds matches and others.

    Args:
        joined: (B, W), whether an item and the next one share a run; false in the last column.
        match: (B, W), whether the items match.
        depth: number of ranks in which a run must begin.
    """
    width = joined.shape[1]
    place = np.flatnonzero(joined)
    first = np.diff(place, prepend=-2) != 1
    run, begins = np.cumsum(first) - 1, place[first]
    mixed = np.zeros(len(begins), np.bool_)
    mixed[run[match.ravel()[place] != match.ravel()[place + 1]]] = True
    mixed &= begins % width < depth
    sizes = np.bincount(run, minlength=len(begins))[mixed] + 1
    run = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(run)) + (begins[mixed] - (np.cumsum(sizes) - sizes))[run]
    return place // width, place % width, run
