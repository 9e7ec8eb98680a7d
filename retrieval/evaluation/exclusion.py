"""Gallery items that a query does not see: those of its own camera, vendor or session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.model.labels import is_missing

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Exclusion:
    """Leaves out the gallery items that share a value with the query, such as its camera: they neither match nor distract.

    Items whose value is missing (None, NaN, NA or "") share it with none.

    Attributes:
        query: (Q,) the queries' values.
        gallery: (N,) the gallery's; None where the queries are the gallery.
        same_label: whether only items that also have the query's label are left out: the protocol of Market-1501 (Zheng et al.,
            "Scalable Person Re-identification: A Benchmark", ICCV 2015), where other persons of the camera stay as distractors.
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
                raise DataError(f"There are {count:,} {what} and {len(values):,} values to exclude by.")
        numbers: dict[Any, int] = {}
        groups = [
            np.array(
                [none if is_missing(v) or v == "" else numbers.setdefault(v, len(numbers)) for v in values], np.int64
            )
            for values, none in ((ours, -1), (theirs, -2))
        ]  # fmt: skip
        return Hidden(groups[0], groups[1], query_class, item_class, self.same_label, itself)


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
        counts = np.bincount(self.gallery[self.gallery >= 0], minlength=int(self.query.max(initial=0)) + 1)
        return np.where(self.query < 0, int(self.itself), counts[np.maximum(self.query, 0)]).astype(np.int64)

    def visible(self, rows: Ints, found: Ints) -> Bools:
        """Return which of the items (B, k) that were found for some queries (B,) they may see; −1 is none."""
        shown = self.gallery[found] != self.query[rows, None]
        if self.same_label:
            shown |= self.item_class[found] != self.query_class[rows, None]
        return np.asarray(shown & (found >= 0))
