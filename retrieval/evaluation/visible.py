"""The nearest items that a query may see."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieval.evaluation.exclusion import Hidden, Ints
from retrieval.evaluation.neighbors import Codes, DistanceBlock, Neighbors, rows_of


def visible_neighbors(
    queries: Codes,
    gallery: Codes | None,
    k: int,
    hidden: Hidden,
    *,
    asked: Ints | None = None,
    distance: DistanceBlock | None = None,
) -> tuple[Ints, NDArray[np.float32]]:
    """Return the k nearest gallery items that each query may see, nearest first; see `exact_neighbors`.

    Args:
        queries: (Q, C) codes.
        gallery: (N, C) codes; None: the queries, of which none sees itself.
        k: how many; where a query may see fewer, index −1 and distance infinity fill the row.
        hidden: which items are hidden from which queries, of all Q and N.
        asked: (A,) rows of the queries that are searched for; None is all.
        distance: see `exact_neighbors`.

    Returns:
        Indices (A, k) and distances (A, k).
    """
    search = Neighbors(queries if gallery is None else gallery, distance=distance)
    rows = np.arange(len(hidden.query)) if asked is None else asked
    found = np.full((len(rows), k), -1, np.int64)
    apart = np.full((len(rows), k), np.inf, np.float32)
    # hidden items take ranks of the search: so many more are asked for, of those with few hidden first
    reach = np.minimum(k + hidden.every()[rows], search.size)
    order, done = np.argsort(reach, kind="stable"), 0
    while done < len(order):
        size = search.block(int(reach[order[done : done + 1024]].max()))
        part = order[done : done + size]
        own = rows[part]
        near, far = search(rows_of(queries, own), int(reach[part].max()), own if gallery is None else None)
        shown = hidden.visible(own, near)
        first = np.argsort(~shown, axis=1, kind="stable")[:, :k]
        kept = np.take_along_axis(shown, first, 1)
        width = first.shape[1]
        found[part, :width] = np.where(kept, np.take_along_axis(near, first, 1), -1)
        apart[part, :width] = np.where(kept, np.take_along_axis(far, first, 1), np.inf)
        done += len(part)
    return found, apart
