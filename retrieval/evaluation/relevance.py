"""How relevant an item is to a query where labels alone do not say: classes of several levels, and
items of several labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.evaluation.exclusion import Search, group_numbers

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
    """Classes of several levels, such as species, genus and family: the finer the level that two
    items share, the higher the grade.

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
            raise DataError(
                f"The queries have {len(query)} levels, and the gallery {len(theirs)}: "
                "they must have the same, one at least."
            )
        self._levels = [group_numbers(a, b) for a, b in zip(query, theirs, strict=True)]
        self.match = float(len(query))
        self.sizes = len(query[0]), len(theirs[0])

    def __call__(self, rows: Ints) -> Grades:
        """Return grades (B, N); see `Relevance`."""
        grades = np.zeros((len(rows), self.sizes[1]), np.float32)
        for place in reversed(
            range(len(self._levels))
        ):  # coarse first: a finer level overwrites it
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

    def __init__(
        self, query: Sequence[Sequence[str]], gallery: Sequence[Sequence[str]] | None = None
    ) -> None:
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
    """Return each item's labels.

    A text is a sequence too, whose characters would be the labels, and NaN is no text.
    """
    for row, tags in enumerate(items):
        if (
            isinstance(tags, str)
            or not isinstance(tags, Iterable)
            or not all(isinstance(tag, str) for tag in tags)
        ):
            raise DataError(
                f"The {what} labels in row {row} are {tags!r}: give each item a list of text, empty"
                " where it has none."
            )
    return items


def graded_values(
    search: Search,
    relevance: Relevance,
    metrics: Mapping[str, Metric],
    progress: Callable[[int], object],
    asked: Ints | None = None,
) -> tuple[dict[str, NDArray[np.float64]], Ints]:
    """Return each metric's values (Q,), NaN where nothing is relevant, and how many items are
    relevant (Q,).

    Args:
        search: the queries and what is searched.
        relevance: grades.
        metrics: by name; with none, nothing is searched.
        progress: receives how many queries were done.
        asked: (A,) the queries to look at, the others having NaN and 0; None is all.
    """
    total = len(search.queries)
    size = total if search.gallery is None else len(search.gallery)
    if relevance.sizes != (total, size):
        raise DataError(
            f"There are {total:,} queries and {size:,} gallery items, and grades of "
            f"{relevance.sizes[0]:,} and {relevance.sizes[1]:,}."
        )
    values = {name: np.full(total, np.nan) for name in metrics}
    relevant = np.zeros(total, np.int64)
    step = search.block or max(1, min(1024, _GRADES // size))
    every = np.arange(total) if asked is None else asked
    for start in range(0, len(every), step):
        rows = every[start : start + step]
        grades, count = _visible_grades(search, relevance, rows), len(rows)
        relevant[rows] = np.count_nonzero(grades >= relevance.match, axis=1)
        kept = np.flatnonzero(relevant[rows] > 0)
        if len(kept) and metrics:
            rows, grades = rows[kept], grades[kept]
            for name, of_rows in _graded(
                search, relevance, metrics, rows, grades, relevant[rows]
            ).items():
                values[name][rows] = of_rows
        progress(count)
    return values, relevant


def _visible_grades(search: Search, relevance: Relevance, rows: Ints) -> Grades:
    """Return grades (B, N); −1 for what a query may not see."""
    grades = relevance(rows)
    if search.gallery is None:
        grades[np.arange(len(rows)), rows] = -1
    if search.hidden is not None:
        every = np.broadcast_to(np.arange(grades.shape[1]), grades.shape)
        grades[~search.hidden.visible(rows, every)] = -1
    return grades


def _graded(
    search: Search,
    relevance: Relevance,
    metrics: Mapping[str, Metric],
    rows: Ints,
    grades: Grades,
    relevant: Ints,
) -> dict[str, NDArray[np.float64]]:
    """Return the metrics' values of some queries (B,), of their grades (B, N)."""
    depth = min(grades.shape[1], depth_of(metrics, int(relevant.max()), grades.shape[1]))
    items = np.concatenate([near for _, near, _ in search.blocks(rows, np.full(len(rows), depth))])
    gains = np.where(items >= 0, np.take_along_axis(grades, np.maximum(items, 0), 1), -1)
    matches = gains >= relevance.match
    gains = np.maximum(gains, 0).astype(np.float64)
    ideal = -np.sort(-np.maximum(grades, 0), axis=1)[:, :depth].astype(np.float64)
    values = {}
    for name, metric in metrics.items():
        graded = getattr(metric, "graded", None)
        values[name] = metric(matches, relevant) if graded is None else graded(gains, ideal)
    return values


def depth_of(chosen: Mapping[str, Metric], relevant: int, size: int) -> int:
    """Return how many neighbours the metrics look at, of so many relevant ones and so many items."""
    depths = {"relevant": relevant, "all": size}
    wanted = (
        one.depth if isinstance(one.depth, int) else depths[one.depth] for one in chosen.values()
    )
    return max(wanted, default=1)
