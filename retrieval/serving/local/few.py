"""The nearest rows of a small matrix: all distances in double precision, where preparing a faster pass would cost more than they do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.index.contract import Floats, Rows

_QUERIES, _NUMBERS = 4, 1 << 15


def are_few(queries: Floats, vectors: Floats) -> bool:
    """Whether a search is that small."""
    return len(queries) <= _QUERIES and vectors.size <= _NUMBERS


def nearest_of_few(
    queries: Floats, vectors: Floats, k: int, keep: NDArray[np.bool_] | None
) -> tuple[NDArray[np.float64], Rows]:
    """Return what `exact.nearest` does, which see, of a small matrix (N, P) or some columns of it."""
    squared = np.full((len(queries), k), np.inf)
    rows = np.full((len(queries), k), -1, np.int64)
    there = None if keep is None else np.flatnonzero(keep)
    held = vectors if there is None else vectors[there]
    count = min(k, len(held))
    if not count:
        return squared, rows
    for at, query in enumerate(queries.astype(np.float64)):
        apart = held - query
        far = np.einsum("ij,ij->i", apart, apart)
        near = np.flatnonzero(
            far <= np.partition(far, count - 1)[count - 1]
        )  # more than `count` where some are equal
        order = near[np.argsort(far[near], kind="stable")[:count]]
        squared[at, :count] = far[order]
        rows[at, :count] = order if there is None else there[order]
    return squared, rows
