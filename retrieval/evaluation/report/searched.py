"""Test items searched for as `[evaluate]` says: which are asked for, what was found, and the figures of each query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.evaluation.exclusion import Hidden
from retrieval.evaluation.neighbors import exact_neighbors
from retrieval.evaluation.protocol import Protocol
from retrieval.evaluation.relevance import Graded, Relevance
from retrieval.evaluation.visible import visible_neighbors
from retrieval.model.built_in import metric

Items = NDArray[np.int64]
Floats = NDArray[np.float64]

SHOWN = 8
"""Neighbours in a sheet, and of those that judge a label."""
DEPTH = 1000
"""MAP@R and R-precision are estimated where no query has more items to be found than this."""
RECALLS = (1, 2, 4, 8)
RECALL = tuple(f"recall_at_{k}" for k in RECALLS)
BLOCK = 256
"""Queries whose grades are looked up at a time."""


@dataclass(frozen=True)
class Searched:
    """Queries and what was found for them.

    Attributes:
        query: (Q,) the items that were searched for, with one to be found; a sample where there are many.
        asked: how many such queries there are in all.
        gallery: how many items were searched.
        neighbours: (Q, SHOWN) the items that were found, nearest first; −1 where there are no more.
        distances: (Q, SHOWN) how far each is.
        grades: (Q, SHOWN) how relevant each is.
        match: the grade from which an item is right.
        figures: each figure of each query, (Q,).
    """

    query: Items
    asked: int
    gallery: int
    neighbours: Items
    distances: Floats
    grades: Floats
    match: float
    figures: dict[str, Floats]


@dataclass(frozen=True)
class Sides:
    """Who is searched for among whom.

    Attributes:
        items: (A,) the queries, as items of the dataset.
        codes: (A, C) their codes.
        others: (N,) the gallery; None: the queries.
        theirs: (N, C) its codes.
        distance: of a combiner.
    """

    items: Items
    codes: Any
    others: Items | None
    theirs: Any
    distance: Any

    @property
    def searched(self) -> Items:
        """The items that are searched."""
        return self.items if self.others is None else self.others


def search(protocol: Protocol, sides: Sides, queries: int, random: np.random.Generator) -> Searched:
    """Search for some items, or for a sample of them.

    Raises:
        DataError: none has anything to be found, or the data lack a column.
    """
    run, searched = protocol.run, sides.searched
    labels = run.splits.labels
    given = protocol.arguments(sides.items, sides.others)
    hidden: Hidden | None = None
    if (exclude := given.get("exclude")) is not None:
        hidden = exclude.hidden(labels[sides.items], labels[searched])
    relevance: Relevance | None = given.get("relevance")
    graded = None
    if relevance is not None:
        gallery = None if sides.others is None else sides.theirs
        graded = Graded(sides.codes, gallery, relevance, hidden, sides.distance)
        relevant = graded.values({}, lambda count: None)[1]
    else:
        counts = np.bincount(labels[searched], minlength=len(run.splits.classes))[labels[sides.items]]
        relevant = counts - (int(sides.others is None) if hidden is None else hidden.matching())
    asked = np.flatnonzero(relevant > 0)
    if not len(asked):
        what = "another one of its class" if relevance is None else "a relevant one ([evaluate] levels, tags)"
        seen = "" if hidden is None else " of those that it may see ([evaluate] exclude)"
        raise DataError(f"{run.path}: no test item has {what} to be found{seen}.")
    chosen = np.sort(random.permutation(asked)[:queries])
    deepest = int(relevant[chosen].max())
    names = [*RECALL, *(["r_precision", "map_at_r"] if deepest <= DEPTH else [])]
    k = min(len(searched), max(*RECALLS, SHOWN, deepest if deepest <= DEPTH and graded is None else 1))
    rows, apart = _nearest(sides, chosen, k, hidden)
    if graded is not None and relevance is not None:
        metrics = {name: metric(name) for name in [*names, f"ndcg_at_{SHOWN}"]}
        values, _ = graded.values(metrics, lambda count: None, chosen)
        figures = {name: each[chosen] for name, each in values.items()}
        grades, match = _grades(relevance, chosen, rows), relevance.match
    else:
        matches = (labels[searched][rows] == labels[sides.items[chosen]][:, None]) & (rows >= 0)
        figures = {n: np.asarray(metric(n)(matches, relevant[chosen]), dtype=np.float64) for n in names}
        grades, match = matches.astype(np.float64), 1.0
    return Searched(
        query=sides.items[chosen],
        asked=len(asked),
        gallery=len(searched),
        neighbours=np.where(rows >= 0, searched[rows], -1)[:, :SHOWN],
        distances=apart[:, :SHOWN].astype(np.float64),
        grades=grades[:, :SHOWN],
        match=match,
        figures=figures,
    )


def _nearest(sides: Sides, chosen: Items, k: int, hidden: Hidden | None) -> tuple[Items, NDArray[np.float32]]:
    """Return rows of the gallery (Q, k) that are the nearest that some queries may see, and how far they are."""
    if hidden is not None:
        gallery = None if sides.others is None else sides.theirs
        return visible_neighbors(sides.codes, gallery, k, hidden, asked=chosen, distance=sides.distance)
    others, exclude = (sides.codes, chosen) if sides.others is None else (sides.theirs, None)
    return exact_neighbors(sides.codes[chosen], others, k, exclude=exclude, distance=sides.distance)


def _grades(relevance: Relevance, chosen: Items, rows: Items) -> Floats:
    """Return the grades of what was found (Q, k); 0 where nothing was."""
    found = np.zeros(rows.shape)
    for start in range(0, len(chosen), BLOCK):
        part = slice(start, start + BLOCK)
        grades = relevance(chosen[part])
        found[part] = np.take_along_axis(grades, np.maximum(rows[part], 0), 1)
    return np.where(rows >= 0, found, 0.0)
