"""The smallest of many numbers for each query, block by block, in FAISS's heaps: one pass, whatever comes first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.index.contract import Floats, Rows
from retrieval.serving.runtime import load_faiss

MARGIN = 8
"""Numbers kept beyond those that are asked for, and one more for each sixteenth: the last ones say how far what was dropped is at least."""
_ALONE = 100_000  # numbers at once up to which FAISS takes no threads of its own


def kept_for(count: int) -> int:
    """Return how many numbers to keep where `count` are asked for."""
    return count + MARGIN + count // 16


class Smallest:
    """The smallest numbers so far.

    Args:
        queries: Q, how many keep them.
        count: how many each keeps.

    Attributes:
        values: (Q, count) float32, in no order; the largest that float32 holds where there are fewer.
        rows: (Q, count) int64 where they stood; −1 where there are fewer.
    """

    def __init__(self, queries: int, count: int) -> None:
        faiss = load_faiss()
        self.values = np.empty((queries, count), np.float32)
        self.rows = np.empty((queries, count), np.int64)
        self._heaps = faiss.float_maxheap_array_t()
        self._heaps.nh, self._heaps.k = queries, count
        self._heaps.val, self._heaps.ids = faiss.swig_ptr(self.values), faiss.swig_ptr(self.rows)
        self._heaps.heapify()
        self._room = np.empty((queries, 0), np.float32)

    def room(self, count: int) -> Floats:
        """Return a table (Q, count) to be filled with a block's numbers; the same memory each time."""
        if self._room.shape[1] != count:
            self._room = np.empty((len(self.values), count), np.float32)
        return self._room

    def add(self, values: Floats, rows: slice | Rows) -> None:
        """Take in a block's numbers (Q, B), C-contiguous, and the rows that they are of; infinity is left out."""
        pointer, (queries, count) = load_faiss().swig_ptr, values.shape
        step = max(1, _ALONE // max(1, count))
        for start in range(0, queries, step):
            part = min(step, queries - start)
            if isinstance(rows, slice):
                self._heaps.addn(count, pointer(values[start:]), rows.start, start, part)
            else:
                self._heaps.addn_with_ids(count, pointer(values[start:]), pointer(rows), 0, start, part)

    def beyond(self, limits: Floats, seen: int) -> NDArray[np.bool_]:
        """Return for which queries (Q,) every number up to a limit is here.

        Args:
            limits: (Q,).
            seen: how many numbers there were for each query.
        """
        here = (self.rows >= 0).sum(1)
        whole: NDArray[np.bool_] = (here == seen) | (
            (here == self.rows.shape[1]) & (self.values.max(1) > limits)
        )
        return whole
