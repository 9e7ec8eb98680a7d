"""Measure a run as its recipe's `[evaluate]` says: gallery, relevance, groups, unknown queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from retrieval.base.arrays import Bools, Ints
from retrieval.errors import DataError
from retrieval.evaluation.evaluation import (
    Evaluation,
    Levels,
    Tags,
    evaluate_search,
    is_answerable,
    relevant_items,
)
from retrieval.evaluation.neighbors import Exclusion, NeighborSearch
from retrieval.run.build import check_columns

if TYPE_CHECKING:
    from retrieval.data.datasets import Dataset
    from retrieval.data.splits import Splits
    from retrieval.recipe.read import Recipe
    from retrieval.run.open import Run

Items = Ints

KEYS = ("exclude", "levels", "tags", "by", "gallery_items", "open_set")
"""Keys of `[evaluate]` for which no bundle is measured: a server's search cannot follow them."""


def refuse_side(side: str) -> None:
    """Refuse a side that is neither "test" nor "validation"."""
    if side not in ("test", "validation"):
        raise DataError(f'A run is measured on its "test" or "validation" side, not on {side!r}.')


def items_of(run: Run, side: str) -> tuple[Items, Items | None]:
    """Return the queries of a run's side, and its gallery or, if that is the queries, `None`."""
    run.require_data()
    splits = run.splits
    query, gallery = (splits.query, splits.gallery) if side == "test" else (splits.validation, None)
    if not len(query):
        raise DataError(f"{run.path} has no {side} items, because its [split] leaves none.")
    return query, gallery


def device_of(run: Run) -> torch.device:
    """Return where to encode a run's items: a CUDA device, unless its recipe asks for the CPU."""
    cuda = torch.cuda.is_available() and run.recipe.train.device != "cpu"
    return torch.device("cuda" if cuda else "cpu")


@dataclass(frozen=True)
class DividedItems:
    """A recipe's data before there is a model: all items, and which of them are on which side."""

    recipe: Recipe
    dataset: Dataset
    splits: Splits


def refuse_unanswerable(run: Run | DividedItems) -> None:
    """Refuse a run before training if no query of a side has a right answer.

    The means over the queries of such a side would be NaN.

    Raises:
        DataError: the validation side or the test side cannot be measured.
    """
    splits = run.splits
    test = Protocol(run, splits.query, splits.gallery)
    sides = [("test", *sizes[:2]) for sizes in test.rounds(splits.query, splits.gallery)]
    if len(splits.validation):
        sides.append(("validation", splits.validation, None))
    for side, query, gallery in sides:
        search, query_class, item_class, arguments = test.search(query, gallery, query, gallery)
        if not is_answerable(search, query_class, item_class, arguments.get("relevance")):
            raise DataError(unanswerable(run, side))
        if side == "test" and run.recipe.evaluate.open_set:
            refuse_one_kind(relevant_items(search, query_class, item_class) > 0)


def unanswerable(run: Run | DividedItems, side: str) -> str:
    """Return why no metric of a side can be measured, and what to do."""
    column = run.recipe.evaluate.exclude
    if column:
        excluded = f", as [evaluate] exclude = {column!r} hides the others"
    else:
        excluded = ""
    if side == "validation":
        advice = ", or train without a validation side"
    else:
        advice = ""
    return (
        f"No item of the {side} side has another of its class to find{excluded}, so nothing can be"
        f" measured there. Choose a [split] that gives this side two items of a class{advice}."
    )


@dataclass(frozen=True)
class Protocol:
    """The queries and the gallery of an evaluation, measured as a run's `[evaluate]` says.

    Attributes:
        run: the run, or its data.
        query: (Q,), the items that are queries.
        gallery: (N,), the items to search; `None` means the queries or, with `gallery_items`,
            random queries.
    """

    run: Run | DividedItems
    query: Items
    gallery: Items | None

    def refuse_bundle(self) -> None:
        """Refuse to measure a bundle if a key of `KEYS` is set."""
        table = self.run.recipe.evaluate
        if keys := [key for key in KEYS if getattr(table, key) not in (None, [])]:
            raise DataError(
                f"[evaluate] {', '.join(keys)}: a bundle cannot be measured under this protocol."
                " Leave out the bundle, or remove this from the recipe."
            )

    def measure(self, query: Any, gallery: Any, distance: Any = None, **further: Any) -> Evaluation:
        """Return the metrics of the queries' and the gallery's codes.

        With random galleries, each metric is its mean over these, and the rest is of the first.
        `further` are arguments of `evaluate_search`.

        Raises:
            RecipeError: the data lack a column that `[evaluate]` names.
            DataError: a random gallery cannot be drawn.
        """
        rates = self.run.recipe.evaluate.open_set
        evaluations = []
        rows = []
        for items, gallery_items, left, right in self.rounds(query, gallery):
            search, query_class, item_class, arguments = self.search(
                items, gallery_items, left, right, distance
            )
            evaluation = evaluate_search(search, query_class, item_class, **arguments, **further)
            evaluations.append(evaluation)
            rows.append(dict(evaluation.values))
            if rates:
                rows[-1] |= open_set(search, query_class, item_class, rates)
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        values = {name: float(np.mean(column)) for name, column in columns.items()}
        spread = {}
        if len(rows) > 1:
            spread = {name: float(np.std(column, ddof=1)) for name, column in columns.items()}
        return replace(evaluations[0], values=values, spread=spread)

    def rounds(self, query: Any, gallery: Any) -> Iterator[tuple[Items, Items | None, Any, Any]]:
        """Yield queries, gallery, and the codes of both: once, or for each random gallery."""
        table = self.run.recipe.evaluate
        if table.gallery_items is None:
            yield self.query, self.gallery, query, gallery
            return
        if self.gallery is not None:
            raise DataError(
                "[evaluate] gallery_items: the data have their own gallery. Leave the key out."
            )
        labels = self.run.splits.labels[self.query]
        if np.bincount(labels).max() <= table.gallery_items:
            raise DataError(
                f"[evaluate] gallery_items = {table.gallery_items}: no class has more test items"
                " than that, so none would be a query."
            )
        for number in range(table.repetitions):
            random = np.random.default_rng([self.run.recipe.split.seed % 2**64, number])
            order = random.permutation(len(labels))
            by_class = order[np.argsort(labels[order], kind="stable")]
            ordered = labels[by_class]
            place_in_class = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
            chosen = np.sort(by_class[place_in_class < table.gallery_items])
            rest = np.setdiff1d(np.arange(len(labels)), chosen)
            yield self.query[rest], self.query[chosen], query[rest], query[chosen]

    def search(
        self, query: Items, gallery: Items | None, left: Any, right: Any, *further: Any
    ) -> tuple[NeighborSearch, Items, Items, dict[str, Any]]:
        """Return the search for items, the class numbers of both sides, and arguments.

        The arguments are those of `evaluate_search` that `[evaluate]` sets. `left` and `right` are
        the codes of the queries and of the gallery, `further` are arguments of `NeighborSearch`.
        """
        labels = self.run.splits.labels
        query_class = labels[query]
        if gallery is None:
            item_class = query_class
        else:
            item_class = labels[gallery]
        arguments = self.arguments(query, gallery)
        exclude = arguments.pop("exclude", None)
        if exclude is None:
            hidden = None
        else:
            hidden = exclude.hidden(query_class, item_class)
        search = NeighborSearch(left, right, hidden, *further)
        return search, query_class, item_class, arguments

    def arguments(self, query: Items, gallery: Items | None) -> dict[str, Any]:
        """Return the arguments of `evaluate` that `[evaluate]` sets for these items."""
        table = self.run.recipe.evaluate
        check_columns(table, self.run.dataset)
        metadata = self.run.dataset.metadata or []
        sides = [items for items in (query, gallery) if items is not None]
        table_arguments: dict[str, Any] = {}

        def columns(name: str) -> Any:
            return [[metadata[i].get(name) for i in items] for items in sides]

        if table.exclude is not None:
            same = table.exclude_label == "same"
            exclude = Exclusion(*columns(table.exclude))
            table_arguments["exclude"] = replace(exclude, same_label=same)
        if table.by is not None:
            table_arguments["by"] = columns(table.by)[0]
        if table.levels:
            labels = [self.run.splits.labels[items].tolist() for items in sides]
            levels = zip(labels, *map(columns, table.levels), strict=True)
            table_arguments["relevance"] = Levels(*levels)
        elif table.tags is not None:
            tags = [[_tags(value) for value in column] for column in columns(table.tags)]
            table_arguments["relevance"] = Tags(*tags)
        return table_arguments


def _tags(value: Any) -> list[str]:
    """Return the labels in a value: a list, text separated by ";", or `None`."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        parts = value
    else:
        parts = str(value).split(";")
    return [text for part in parts if (text := str(part).strip())]


def open_set(
    search: NeighborSearch,
    query_class: Ints,
    item_class: Ints,
    fars: Sequence[float],
) -> dict[str, float]:
    """Return the detection and identification rate (DIR) at rank 1 for each false alarm rate.

    A query is unknown if no visible gallery item has its class. A threshold t accepts a query whose
    nearest item is at distance t or nearer. FAR(t) is the share of unknown queries that are
    accepted. DIR(t) is the share of known queries that are accepted and whose nearest item has
    their class. DIR@FAR f is the largest DIR(t) over thresholds with FAR(t) ≤ f. Source: Phillips,
    Grother & Micheals, "Evaluation Methods in Face Recognition", Handbook of Face Recognition,
    2011.

    Raises:
        DataError: no query is unknown, or none is known.
    """
    rows, apart = search.first(np.arange(len(query_class)))
    known = relevant_items(search, query_class, item_class) > 0
    refuse_one_kind(known)
    right = known & (rows[:, 0] >= 0) & (item_class[rows[:, 0]] == query_class)
    unknown = np.sort(apart[~known, 0])
    identified = np.sort(apart[right, 0])
    # a query without visible items is never accepted
    thresholds = np.unique(apart[rows[:, 0] >= 0, 0])
    false_alarms = np.searchsorted(unknown, thresholds, side="right") / len(unknown)
    rates = np.searchsorted(identified, thresholds, side="right") / int(known.sum())
    return {
        f"dir_at_far_{far:g}": float(rates[false_alarms <= far].max(initial=0.0)) for far in fars
    }


def refuse_one_kind(known: Bools) -> None:
    """Refuse queries that are all known or all unknown, for which open-set rates mean nothing."""
    if known.all() or not known.any():
        kind, share = ("unknown", "each") if known.all() else ("known", "none")
        raise DataError(
            f"[evaluate] open_set: no query is {kind}, because the class of {share} is in the"
            " gallery. Both kinds are needed."
        )
