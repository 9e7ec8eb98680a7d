"""What a recipe's `[evaluate]` says of who is searched for among whom, by which relevance, and what
is measured beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.data.error_lists import refuse
from retrieval.errors import DataError, did_you_mean
from retrieval.evaluation.evaluation import (
    Evaluation,
    Levels,
    Tags,
    class_numbers,
    evaluate,
    relevant_items,
)
from retrieval.evaluation.neighbors import Codes, DistanceBlock, Exclusion, Hidden, Search
from retrieval.evaluation.reordered import Reordered, expanded, reranked

if TYPE_CHECKING:
    from retrieval.run.open import Run

Items = NDArray[np.int64]

KEYS = (
    "exclude",
    "levels",
    "tags",
    "by",
    "gallery_items",
    "open_set",
    "rerank",
    "expand",
    "augment",
    "latency",
)
"""Keys of `[evaluate]` that need the exhaustive search of one machine."""


@dataclass(frozen=True)
class Measured:
    """Figures of one row, beside those that `evaluate` gives.

    Attributes:
        values: each figure; the mean over random galleries, where there are any.
        first: what `evaluate` gave, of the first gallery.
        spread: standard deviation of each figure over random galleries; empty without them.
        groups: figures by group.
        milliseconds: of a query's search.
    """

    values: dict[str, float]
    first: Evaluation
    spread: dict[str, float] = field(default_factory=dict)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    milliseconds: float = 0.0


@dataclass(frozen=True)
class Protocol:
    """Who is searched for among whom.

    Attributes:
        run: the run.
        query: (Q,) items that are searched for.
        gallery: (N,) items that are searched; None: the queries, or a random part of them.
    """

    run: Run
    query: Items
    gallery: Items | None

    @property
    def set_keys(self) -> list[str]:
        """The keys of `[evaluate]` that are set."""
        return [
            key for key in KEYS if getattr(self.run.recipe.evaluate, key) not in (None, [], False)
        ]

    def refuse_bundle(self) -> None:
        """Refuse to measure a bundle where a key is set that its search does not know.

        Raises:
            DataError: a key is set.
        """
        if self.set_keys:
            raise DataError(
                f"[evaluate] {', '.join(self.set_keys)}: a bundle measures no such figures. "
                "Leave out --bundle, or --set the key to its default."
            )

    def measure(
        self, query: Any, gallery: Any, distance: Any = None, **arguments: Any
    ) -> Iterator[tuple[str, Measured]]:
        """Yield the rows: what is added to each one's name ("", " re-ranked", …), and its metrics.

        Raises:
            DataError: the data lack a column, a combiner is to be re-ranked, or a random gallery
                cannot be drawn.
        """
        table = self.run.recipe.evaluate
        further: dict[str, Callable[[Any, Any, Hidden | None], Reordered]] = {}
        if (rerank := table.rerank) is not None:
            further[" re-ranked"] = lambda a, b, hidden: reranked(a, b, **rerank.model_dump())
        if (expand := table.expand) is not None:
            further[" expanded"] = lambda a, b, hidden: expanded(
                a, b, hidden=hidden, **expand.model_dump()
            )
        if (augment := table.augment) is not None:
            further[" augmented"] = lambda a, b, hidden: expanded(
                a, b, queries=False, **augment.model_dump()
            )
        if distance is not None and further:
            raise DataError(
                "[evaluate] rerank, expand and augment go by Euclidean distance, and the [combiner]"
                " has its own. Leave them out."
            )
        yield "", self._row(query, gallery, distance, None, arguments)
        for name, change in further.items():
            yield name, self._row(query, gallery, None, change, arguments)

    def _row(
        self, query: Any, gallery: Any, distance: Any, change: Any, further: dict[str, Any]
    ) -> Measured:
        labels, rates = self.run.splits.labels, self.run.recipe.evaluate.open_set
        evaluations, rows, began = [], [], time.perf_counter()
        for ours, theirs in self.rounds():
            left = query if ours is None else query[ours]
            right = gallery if ours is None else query[theirs]
            items = self.query if ours is None else self.query[ours]
            gallery_items = self.gallery if ours is None else self.query[theirs]
            arguments = self.arguments(items, gallery_items)
            exclude: Exclusion | None = arguments.get("exclude")
            named = None if gallery_items is None else labels[gallery_items]
            numbers = class_numbers(
                labels[items], len(left), named, len(left if right is None else right)
            )
            if change is not None:
                # a search knows its query's camera, and not its label: who is hidden by both is
                # dropped from the answers alone
                known = None if exclude is None or exclude.same_label else exclude.hidden(*numbers)
                left, right, distance = change(left, right, known)
            evaluations.append(
                evaluate(
                    left,
                    labels[items],
                    gallery=right,
                    gallery_labels=named,
                    distance=distance,
                    **arguments,
                    **further,
                )
            )
            rows.append(dict(evaluations[-1].values))
            if rates:
                both = left, numbers[0], right, numbers[1]
                rows[-1] |= open_set(*both, fars=rates, distance=distance, exclude=exclude)
        milliseconds = 1000 * (time.perf_counter() - began)
        values, spread = rows[0], {}
        if len(rows) > 1:
            columns = {name: [row[name] for row in rows] for name in values}
            values = {name: float(np.mean(column)) for name, column in columns.items()}
            spread = {name: float(np.std(column, ddof=1)) for name, column in columns.items()}
        queries = max(1, sum(evaluation.queries for evaluation in evaluations))
        first = evaluations[0]
        return Measured(values, first, spread, first.groups, milliseconds / queries)

    def rounds(self) -> Iterator[tuple[Items | None, Items | None]]:
        """Yield places of queries and gallery within the test items (None: no random galleries)."""
        table = self.run.recipe.evaluate
        if table.gallery_items is None:
            yield None, None
            return
        if self.gallery is not None:
            raise DataError(
                "[evaluate] gallery_items: the data have a gallery of their own. Leave it out."
            )
        labels = self.run.splits.labels[self.query]
        if np.bincount(labels).max() <= table.gallery_items:
            raise DataError(
                f"[evaluate] gallery_items = {table.gallery_items}: no class has so many test items"
                " and one more."
            )
        for number in range(table.repetitions):
            order = np.random.default_rng([self.run.recipe.split.seed % 2**64, number]).permutation(
                len(labels)
            )
            by_class = order[np.argsort(labels[order], kind="stable")]
            ordered = labels[by_class]
            place = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
            chosen = np.sort(by_class[place < table.gallery_items])
            yield np.setdiff1d(np.arange(len(labels)), chosen), chosen

    def arguments(self, query: Items, gallery: Items | None) -> dict[str, Any]:
        """Return the arguments of `evaluate` that `[evaluate]` sets, for some items."""
        table = self.run.recipe.evaluate
        table_arguments: dict[str, Any] = {}

        def both(values: Sequence[Any]) -> tuple[list[Any], list[Any] | None]:
            return _sides(values, query, gallery)

        if (exclude := self.exclusion(query, gallery)) is not None:
            table_arguments["exclude"] = exclude
        if table.by is not None:
            table_arguments["by"] = both(self.column(table.by, "by"))[0]
        if table.levels:
            columns = [
                self.run.splits.labels.tolist(),
                *(self.column(name, "levels") for name in table.levels),
            ]
            levels = [both(column) for column in columns]
            table_arguments["relevance"] = Levels(
                [ours for ours, _ in levels],
                None if gallery is None else [theirs for _, theirs in levels if theirs is not None],
            )
        elif table.tags is not None:
            texts = [_tags(value) for value in self.column(table.tags, "tags")]
            table_arguments["relevance"] = Tags(*both(texts))
        return table_arguments

    def exclusion(self, query: Items, gallery: Items | None) -> Exclusion | None:
        """Return what `[evaluate] exclude` hides of some items; None without it.

        Raises:
            DataError: the data lack the column.
        """
        table = self.run.recipe.evaluate
        if table.exclude is None:
            return None
        sides = _sides(self.column(table.exclude, "exclude"), query, gallery)
        return Exclusion(*sides, table.exclude_label == "same")

    def column(self, name: str, key: str) -> Sequence[Any]:
        """Return a column of the metadata of all of the run's items, None where an item has none.

        Raises:
            DataError: no item has it; the sentence names the key of `[evaluate]` that asks for it.
        """
        rows = self.run.dataset.metadata or []
        known = sorted({str(name) for row in rows for name in row})
        if name not in known:
            known_names = f"they have: {', '.join(known)}" if known else "they have none"
            refuse(
                f"[evaluate] {key}",
                [
                    f"the data have no column '{name}' of metadata"
                    f" ({known_names}).{did_you_mean(name, known)}"
                ],
            )
        return [row.get(name) for row in rows]


def _sides(
    values: Sequence[Any], query: Items, gallery: Items | None
) -> tuple[list[Any], list[Any] | None]:
    """Return a column's values of the queries, and of the gallery where there is one."""
    return [values[i] for i in query], None if gallery is None else [values[i] for i in gallery]


def _tags(value: Any) -> list[str]:
    """Return the labels of a value: a list, or text with ";" between them."""
    parts = (
        value if isinstance(value, list | tuple) else [] if value is None else str(value).split(";")
    )
    return [text for part in parts if (text := str(part).strip())]


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
    """Return DIR@FAR at rank 1 for each rate.

    Source: Phillips, Grother & Micheals, "Evaluation Methods in Face Recognition", Handbook of Face
    Recognition, 2011. A query that may see no gallery item of its class is unknown. A threshold t
    accepts a query whose nearest item is at t or nearer. FAR(t) is the share of unknown queries
    that are accepted; DIR(t) that of known ones that are accepted and whose nearest item has their
    class. DIR@FAR f is the largest DIR(t) of thresholds with FAR(t) ≤ f. Distances that are equal
    share a threshold. Hidden items are no answers, and make no query known.

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
