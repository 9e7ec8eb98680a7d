"""Gallery items that a query may not see, such as those of its own camera, and the nearest of the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.evaluation.neighbors import Codes, DistanceBlock, Neighbors, rows_of
from retrieval.model.labels import is_missing

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Exclusion:
    """Leaves out the gallery items that share a value with the query, such as its camera: they
    neither match nor distract.

    Items whose value is missing (None, NaN, NA or "") share it with none.

    Attributes:
        query: (Q,) the queries' values.
        gallery: (N,) the gallery's; None where the queries are the gallery.
        same_label: whether only items that also have the query's label are left out: the protocol
            of Market-1501 (Zheng et al., "Scalable Person Re-identification: A Benchmark", ICCV
            2015), where other persons of the camera stay as distractors.
    """

    query: Sequence[Any] | NDArray[Any]
    gallery: Sequence[Any] | NDArray[Any] | None = None
    same_label: bool = False

    def hidden(self, query_class: Ints, item_class: Ints) -> Hidden:
        """Return which items are hidden from whom.

        Raises:
            DataError: there is not one value for each query and each item.
        """
        itself = self.gallery is None
        ours, theirs = list(self.query), list(self.query if self.gallery is None else self.gallery)
        for values, count, what in (
            (ours, len(query_class), "queries"),
            (theirs, len(item_class), "gallery items"),
        ):
            if len(values) != count:
                raise DataError(
                    f"There are {count:,} {what} and {len(values):,} values to exclude by."
                )
        groups = group_numbers(ours, theirs)
        return Hidden(groups[0], groups[1], query_class, item_class, self.same_label, itself)


def group_numbers(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[Ints, Ints]:
    """Return numbers that are equal where values are; a missing value and "" equal nothing."""
    known: dict[Any, int] = {}

    def numbered(values: Sequence[Any], missing: int) -> Ints:
        return np.array(
            [
                missing if is_missing(v) or v == "" else known.setdefault(v, len(known))
                for v in values
            ],
            np.int64,
        )

    return numbered(ours, -1), numbered(theirs, -2)


@dataclass(frozen=True)
class Hidden:
    """Which items are hidden from which queries, by number.

    Attributes:
        query: (Q,) group numbers; −1 for none.
        gallery: (N,) group numbers; −2 for none.
        query_class: (Q,) class numbers.
        item_class: (N,) class numbers.
        same_label: see `Exclusion`.
        itself: whether the queries are the gallery; each is hidden from itself.
    """

    query: Ints
    gallery: Ints
    query_class: Ints
    item_class: Ints
    same_label: bool
    itself: bool

    def matching(self) -> Ints:
        """Return how many items of its class are hidden from each query (Q,), itself included."""
        width = int(max(self.query_class.max(initial=-1), self.item_class.max(initial=-1))) + 1
        pairs, counts = np.unique(self.gallery * width + self.item_class, return_counts=True)
        wanted = self.query * width + self.query_class
        place = np.minimum(np.searchsorted(pairs, wanted), max(len(pairs) - 1, 0))
        found = np.where(pairs[place] == wanted, counts[place], 0)
        found[self.query < 0] = int(self.itself)
        return found.astype(np.int64)

    def every(self) -> Ints:
        """Return how many items are hidden from each query (Q,), itself included."""
        if self.same_label:
            return self.matching()
        # one count at least: where no query has a value, the first one is looked up and not used
        counts = np.bincount(
            self.gallery[self.gallery >= 0], minlength=int(self.query.max(initial=0)) + 1
        )
        return np.where(self.query < 0, int(self.itself), counts[np.maximum(self.query, 0)]).astype(
            np.int64
        )

    def visible(self, rows: Ints, found: Ints) -> Bools:
        """Return which of the items (B, k) that were found for some queries (B,) they may see; −1
        is none.
        """
        shown = self.gallery[found] != self.query[rows, None]
        if self.same_label:
            shown |= self.item_class[found] != self.query_class[rows, None]
        return np.asarray(shown & (found >= 0))


@dataclass(frozen=True)
class Search:
    """Exact search for the nearest gallery items that a query may see.

    Attributes:
        queries: (Q, C) codes.
        gallery: (N, C) codes; None: the queries are the gallery, each left out of its own answer.
        hidden: which items are hidden from which queries; None: each query from itself only, where
            it is in the gallery.
        distance: see `exact_neighbors`, as for the rest.
        block: queries at a time.
        device: see `exact_neighbors`.
    """

    queries: Codes
    gallery: Codes | None
    hidden: Hidden | None = None
    distance: DistanceBlock | None = None
    block: int | None = None
    device: str = "auto"

    @cached_property
    def _neighbors(self) -> Neighbors:
        searched = self.queries if self.gallery is None else self.gallery
        return Neighbors(searched, distance=self.distance, block=self.block, device=self.device)

    def blocks(self, asked: Ints, depths: Ints) -> Iterator[tuple[Ints, Ints, NDArray[np.float32]]]:
        """Yield queries (B,), the rows of their nearest items (B, k), and distances (B, k).

        Args:
            asked: (A,) rows of the queries.
            depths: (A,) how many items each wants; k is the largest of a block. Where a query may
                see fewer, row −1 and distance infinity fill the answer.
        """
        search, hidden = self._neighbors, self.hidden
        # Hidden items take ranks of the search: so many more are asked for.
        reach = (
            depths if hidden is None else np.minimum(depths + hidden.every()[asked], search.size)
        )
        done = 0
        while done < len(asked):
            part = slice(done, done + search.block(int(reach[done : done + 1024].max())))
            rows = asked[part]
            own = rows if self.gallery is None else None
            items, distances = search(rows_of(self.queries, rows), int(reach[part].max()), own)
            if hidden is not None:
                seen = hidden.visible(rows, items)
                first = np.argsort(~seen, axis=1, kind="stable")[:, : int(depths[part].max())]
                seen = np.take_along_axis(seen, first, 1)
                items = np.take_along_axis(items, first, 1)
                distances = np.take_along_axis(distances, first, 1)
                items[~seen], distances[~seen] = -1, np.inf
            yield rows, items, distances
            done += len(rows)

    def nearest(self, k: int, asked: Ints | None = None) -> tuple[Ints, NDArray[np.float32]]:
        """Return the k nearest items of some queries (A,), by default of all: rows and distances
        (A, k).
        """
        asked = np.arange(len(self.queries)) if asked is None else asked
        items = np.full((len(asked), k), -1, np.int64)
        distances = np.full((len(asked), k), np.inf, np.float32)
        # queries with few hidden items first: a block is searched as deep as its deepest query
        hidden = (
            np.zeros(len(asked), np.int64) if self.hidden is None else self.hidden.every()[asked]
        )
        order, done = np.argsort(hidden, kind="stable"), 0
        for rows, near, far in self.blocks(asked[order], np.full(len(asked), k)):
            part = order[done : done + len(rows)]
            items[part, : near.shape[1]], distances[part, : near.shape[1]] = near, far
            done += len(rows)
        return items, distances
