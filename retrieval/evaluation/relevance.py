"""How relevant an item is to a query where labels alone do not say: classes of several levels, and items of several labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.evaluation.exclusion import Hidden
from retrieval.evaluation.neighbors import Codes, DistanceBlock, Neighbors, rows_of
from retrieval.model.labels import is_missing

if TYPE_CHECKING:
    from retrieval.model.contracts import Metric

Ints = NDArray[np.int64]
Grades = NDArray[np.float32]
_GRADES = 2**24
"""At most so many grades at a time: 64 MB."""


class Relevance(Protocol):
    """Grades of gallery items for queries.

    Attributes:
        match: the smallest grade that counts as a match for figures that know matches only.
        sizes: how many queries and gallery items there are.
    """

    match: float
    sizes: tuple[int, int]

    def __call__(self, rows: Ints) -> Grades:
        """Return grades (B, N), 0 for what is not relevant, of queries (B,) and every gallery item."""


class Levels:
    """Classes of several levels, such as species, genus and family: the finer the level that two items share, the higher the grade.

    The finest of L levels gives L, and is the match; the coarsest gives 1.

    Args:
        query: for each level, finest first, one value per query (Q,).
        gallery: likewise of the gallery (N,); None: the queries are the gallery.
    """

    def __init__(
        self, query: Sequence[Sequence[Any]], gallery: Sequence[Sequence[Any]] | None = None
    ) -> None:
        theirs = query if gallery is None else gallery
        if len(query) != len(theirs) or not query:
            raise DataError(f"The queries have {len(query)} levels, and the gallery {len(theirs)}: they must have the same, one at least.")  # fmt: skip
        self._levels = [_numbers(a, b) for a, b in zip(query, theirs, strict=True)]
        self.match = float(len(query))
        self.sizes = len(query[0]), len(theirs[0])

    def __call__(self, rows: Ints) -> Grades:
        """Return grades (B, N); see `Relevance`."""
        grades = np.zeros((len(rows), self.sizes[1]), np.float32)
        for place in reversed(range(len(self._levels))):  # coarse first: a finer level overwrites it
            ours, theirs = self._levels[place]
            grades[ours[rows, None] == theirs] = len(self._levels) - place
        return grades


class Tags:
    """Items of several labels: the grade is how many of them two items share, and one is a match.

    Args:
        query: the labels of each query.
        gallery: those of each gallery item; None: the queries are the gallery.

    Raises:
        DataError: an item's labels are no list of text.
    """

    match = 1.0

    def __init__(self, query: Sequence[Sequence[str]], gallery: Sequence[Sequence[str]] | None = None) -> None:  # fmt: skip
        from scipy.sparse import csr_array

        known: dict[str, int] = {}
        sides = [_checked_tags(query, "query")]
        sides.append(sides[0] if gallery is None else _checked_tags(gallery, "gallery"))
        ours, theirs = (
            [[known.setdefault(tag, len(known)) for tag in dict.fromkeys(tags)] for tags in side]
            for side in sides
        )

        def matrix(side: list[list[int]]) -> Any:
            columns = np.array([tag for tags in side for tag in tags], np.int64)
            ends = np.cumsum([0, *map(len, side)])
            ones = np.ones(len(columns), np.float32)
            return csr_array((ones, columns, ends), shape=(len(side), max(len(known), 1)))

        self._query, self._gallery = matrix(ours), matrix(theirs).T.tocsr()
        self.sizes = len(ours), len(theirs)

    def __call__(self, rows: Ints) -> Grades:
        """Return grades (B, N); see `Relevance`."""
        return np.asarray((self._query[rows] @ self._gallery).toarray(), dtype=np.float32)


def _checked_tags(items: Sequence[Sequence[str]], what: str) -> Sequence[Sequence[str]]:
    """Return each item's labels. A text is a sequence too, whose characters would be the labels, and NaN is no text."""
    for row, tags in enumerate(items):
        if (
            isinstance(tags, str)
            or not isinstance(tags, Iterable)
            or not all(isinstance(tag, str) for tag in tags)
        ):
            raise DataError(
                f"The {what} labels in row {row} are {tags!r}: give each item a list of text, empty where it has none."
            )
    return items


def _numbers(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[Ints, Ints]:
    """Return numbers that are equal where values are; a missing value and "" equal nothing."""
    known: dict[Any, int] = {}

    def numbered(values: Sequence[Any], none: int) -> Ints:
        return np.array([none if is_missing(v) or v == "" else known.setdefault(v, len(known)) for v in values], np.int64)  # fmt: skip

    return numbered(ours, -1), numbered(theirs, -2)


@dataclass(frozen=True)
class Graded:
    """Queries and a gallery whose figures go by grades; the attributes are those of `evaluate`.

    Attributes:
        queries: (Q, C) codes.
        gallery: (N, C) codes; None: the queries are the gallery, each left out of its own answer.
        relevance: grades.
        hidden: which items are hidden from which queries.
        distance: see `exact_neighbors`, as for the rest.
        block: queries at a time.
        device: see `exact_neighbors`.
    """

    queries: Codes
    gallery: Codes | None
    relevance: Relevance
    hidden: Hidden | None = None
    distance: DistanceBlock | None = None
    block: int | None = None
    device: str = "auto"

    def values(
        self, metrics: Mapping[str, Metric], told: Callable[[int], None], asked: Ints | None = None
    ) -> tuple[dict[str, NDArray[np.float64]], Ints]:
        """Return each metric's value of each query (Q,), NaN where nothing is relevant, and how many items are (Q,).

        Args:
            metrics: by name; with none, nothing is searched.
            told: is told how many queries were done.
            asked: (A,) the queries to look at, the others having NaN and 0; None is all.
        """
        searched = self.queries if self.gallery is None else self.gallery
        total = len(self.queries)
        if self.relevance.sizes != (total, len(searched)):
            raise DataError(f"There are {total:,} queries and {len(searched):,} gallery items, and grades of {self.relevance.sizes[0]:,} and {self.relevance.sizes[1]:,}.")  # fmt: skip
        search = Neighbors(searched, distance=self.distance, block=self.block, device=self.device)
        values = {name: np.full(total, np.nan) for name in metrics}
        relevant = np.zeros(total, np.int64)
        step = self.block or max(1, min(1024, _GRADES // search.size))
        every = np.arange(total) if asked is None else asked
        for start in range(0, len(every), step):
            rows = every[start : start + step]
            grades = self._seen(rows)
            relevant[rows] = np.count_nonzero(grades >= self.relevance.match, axis=1)
            kept = np.flatnonzero(relevant[rows] > 0)
            if len(kept) and metrics:
                self._measure(search, rows[kept], grades[kept], relevant[rows[kept]], metrics, values)
            told(len(rows))
        return values, relevant

    def _seen(self, rows: Ints) -> Grades:
        """Return grades (B, N); −1 for what a query may not see."""
        grades = self.relevance(rows)
        if self.gallery is None:
            grades[np.arange(len(rows)), rows] = -1
        if self.hidden is not None:
            every = np.broadcast_to(np.arange(grades.shape[1]), grades.shape)
            grades[~self.hidden.visible(rows, every)] = -1
        return grades

    def _measure(
        self,
        search: Neighbors,
        rows: Ints,
        grades: Grades,
        relevant: Ints,
        metrics: Mapping[str, Metric],
        values: dict[str, NDArray[np.float64]],
    ) -> None:
        """Put the metrics' values of some queries in their places."""
        wanted = {"relevant": int(relevant.max()), "all": search.size}
        depth = max(m.depth if isinstance(m.depth, int) else wanted[m.depth] for m in metrics.values())
        k = min(search.size, depth + int(np.count_nonzero(grades < 0, axis=1).max()))
        found, _ = search(rows_of(self.queries, rows), k, rows if self.gallery is None else None)
        gains = np.take_along_axis(grades, np.maximum(found, 0), 1)
        gains[found < 0] = -1
        gains = np.take_along_axis(gains, np.argsort(gains < 0, axis=1, kind="stable")[:, :depth], 1)
        matches = gains >= self.relevance.match
        gains = np.maximum(gains, 0).astype(np.float64)
        ideal: NDArray[np.float64] | None = None
        for name, metric in metrics.items():
            graded = getattr(metric, "graded", None)
            if graded is None:
                values[name][rows] = metric(matches, relevant)
            else:
                if ideal is None:
                    ideal = -np.sort(-np.maximum(grades, 0), axis=1)[:, :depth].astype(np.float64)
                values[name][rows] = graded(gains, ideal)
