"""The low values of a table whose columns are queries: found by the lowest of each group of rows, so that most are read once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.index.contract import Floats, Rows

_GROUP = 32  # rows at most
_SPARE = 4  # groups for each value that is asked for, so that few of those share one
_CROWDED = 1 / 8  # part of the groups from which to compare every value is the faster


class Lows:
    """The values of a block, which is not changed meanwhile.

    A group has every m-th row: the lowest of all groups come of whole parts of the table, one compared with the other.

    Args:
        values: (B, Q) float32, C-contiguous, without NaN.
        count: k, how many of each query are asked for.
    """

    def __init__(self, values: Floats, count: int) -> None:
        self.values, self.count = values, count
        rows, queries = values.shape
        size = max(1, min(_GROUP, rows // (_SPARE * count)))
        self._groups = groups = -(-rows // size)
        whole = rows // groups * groups  # what is left is fewer than groups
        self._lowest: Floats = values[:whole].reshape(-1, groups, queries).min(0) if size > 1 else values
        if whole < rows:
            np.minimum(self._lowest[: rows - whole], values[whole:], out=self._lowest[: rows - whole])

    def near(self, limits: Floats) -> NDArray[np.bool_]:
        """Return in which groups (m, Q) a value is not above its query's limit (Q,)."""
        near: NDArray[np.bool_] = self._lowest <= limits
        return near

    def kth(self) -> Floats:
        """Return for each query a number (Q,) that k values are not above, if it has so many; infinity if not."""
        if len(self._lowest) < self.count:
            return np.full(self.values.shape[1], np.inf, np.float32)
        by_query = self._lowest.T.copy("C")  # of one query, the transposed is the same memory
        by_query.partition(self.count - 1, axis=1)
        return by_query[:, self.count - 1].copy()

    def within(self, near: NDArray[np.bool_], limits: Floats) -> tuple[Rows, Rows]:
        """Return rows and queries (n,) of all values that are not above their query's limit (Q,).

        Args:
            near: what `near` gave for these limits.
            limits: see above.
        """
        (rows, queries), step = self.values.shape, self._groups
        places = near.ravel().nonzero()[0]
        if step == rows:
            return _divided(places, queries)
        if len(places) > _CROWDED * near.size:
            return _divided((self.values <= limits).ravel().nonzero()[0], queries)
        group, query = _divided(places, queries)
        ends = -(-rows // step)
        every = places + (step * queries) * np.arange(ends)[:, None]
        if every.size and rows < ends * step:
            every[-1, group >= rows - (ends - 1) * step] = places[0]  # no such row: refused below
        good = self.values.ravel()[every] <= limits[query]
        if rows < ends * step:
            good[-1] &= group < rows - (ends - 1) * step
        return _divided(every[good], queries)


def _divided(places: Rows, queries: int) -> tuple[Rows, Rows]:
    """Return rows and queries of places in a table of so many queries."""
    row = places // queries
    return row, places - row * queries
