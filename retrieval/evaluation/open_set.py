"""Open-set identification: is a query anyone in the gallery, and who?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.evaluation.evaluation import relevant_items
from retrieval.evaluation.exclusion import Exclusion, Search
from retrieval.evaluation.neighbors import Codes, DistanceBlock

FARS = (0.01, 0.1)


def open_set(
    codes: Codes,
    query_class: NDArray[np.int64],
    gallery: Codes | None,
    item_class: NDArray[np.int64],
    *,
    fars: Sequence[float] = FARS,
    distance: DistanceBlock | None = None,
    exclude: Exclusion | None = None,
) -> dict[str, float]:
    """Return DIR@FAR at rank 1 for each rate: the share of known queries whose nearest item is
    theirs and near enough.

    A query that may see no gallery item of its class is unknown. A threshold t accepts a query
    whose nearest item is at t or nearer. FAR(t) is the share of unknown queries that are accepted;
    DIR(t) that of known ones that are accepted and whose nearest item has their class. DIR@FAR f is
    the largest DIR(t) of thresholds with FAR(t) ≤ f (Phillips, Grother & Micheals, "Evaluation
    Methods in Face Recognition", Handbook of Face Recognition, 2011). Distances that are equal
    share a threshold.

    Args:
        codes: (Q, C) the queries' codes.
        query_class: (Q,) class numbers.
        gallery: (N, C) codes; None: the queries are the gallery, each left out of its own answer.
        item_class: (N,) class numbers.
        fars: rates from 0 to 1.
        distance: see `exact_neighbors`.
        exclude: which items are hidden from which queries: they are no answers, and make no query
            known.

    Raises:
        DataError: no query is unknown, or none is known.
    """
    hidden = None if exclude is None else exclude.hidden(query_class, item_class)
    search = Search(codes, gallery, hidden, distance)
    rows, apart = search.nearest(1)
    known = relevant_items(search, query_class, item_class) > 0
    if known.all() or not known.any():
        what = (
            "unknown: each has its class in the gallery"
            if known.any()
            else "known: none has its class in the gallery"
        )
        raise DataError(f"[evaluate] open_set: no query is {what}. It takes queries of both kinds.")
    right = known & (rows[:, 0] >= 0) & (item_class[rows[:, 0]] == query_class)
    strangers, ours = np.sort(apart[~known, 0]), np.sort(apart[right, 0])
    thresholds = np.unique(apart[rows[:, 0] >= 0, 0])  # one that may see nothing is never accepted
    accepted = np.searchsorted(strangers, thresholds, side="right") / len(strangers)
    identified = np.searchsorted(ours, thresholds, side="right") / int(known.sum())
    return {
        f"dir_at_far_{far:g}": float(identified[accepted <= far].max(initial=0.0)) for far in fars
    }
