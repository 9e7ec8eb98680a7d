"""The protocol in a recipe's `[evaluate]`: gallery, relevance, open sets, expansion, re-ranking.

Query expansion, database augmentation and re-ranking are written as distances between *positions*
of queries and gallery items, so that the same code computes their metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.errors import DataError
from retrieval.evaluation.evaluation import (
    Evaluation,
    Levels,
    Tags,
    class_numbers,
    evaluate,
    relevant_items,
)
from retrieval.evaluation.neighbors import Codes, DistanceBlock, Exclusion, Hidden, Search
from retrieval.run.build import check_columns

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
"""Keys of `[evaluate]` that need an exhaustive search on one machine."""


@dataclass(frozen=True)
class Measured:
    """The metrics of one row of the result.

    Attributes:
        values: each metric; with random galleries, its mean over them.
        first: the result of `evaluate` on the first gallery.
        spread: standard deviation of each metric over random galleries; empty without them.
        groups: metrics by group.
        milliseconds: time of a query's search.
    """

    values: dict[str, float]
    first: Evaluation
    spread: dict[str, float] = field(default_factory=dict)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    milliseconds: float = 0.0


@dataclass(frozen=True)
class Protocol:
    """The queries and the gallery of an evaluation.

    Attributes:
        run: the run.
        query: (Q,), the items that are queries.
        gallery: (N,), the items to search; `None` means the queries or a random part of them.
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
        """Refuse to measure a bundle if a key is set that its search does not support.

        Raises:
            DataError: such a key is set.
        """
        if self.set_keys:
            raise DataError(
                f"[evaluate] {', '.join(self.set_keys)}: a bundle measures no such metrics. "
                "Leave out the bundle, or set the key to its default."
            )

    def measure(
        self, query: Any, gallery: Any, distance: Any = None, **arguments: Any
    ) -> Iterator[tuple[str, Measured]]:
        """Yield the suffix of each row's name ("", " re-ranked", …), and its metrics.

        Raises:
            RecipeError: the data lack a column.
            DataError: `rerank` is set for a model with a combiner, or a
                random gallery cannot be drawn.
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
        for items, gallery_items, left, right in self.rounds(query, gallery):
            arguments = self.arguments(items, gallery_items)
            exclude: Exclusion | None = arguments.get("exclude")
            named = None if gallery_items is None else labels[gallery_items]
            numbers = class_numbers(
                labels[items], len(left), named, len(left if right is None else right)
            )
            if change is not None:
                # A search knows the camera of a query, but not its label. Items that are hidden by
                # both are only removed from the results.
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

    def rounds(self, query: Any, gallery: Any) -> Iterator[tuple[Items, Items | None, Any, Any]]:
        """Yield queries, gallery, and the codes of both, once or for each random gallery.

        Raises:
            DataError: a random gallery cannot be drawn.
        """
        table = self.run.recipe.evaluate
        if table.gallery_items is None:
            yield self.query, self.gallery, query, gallery
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
            rest = np.setdiff1d(np.arange(len(labels)), chosen)
            yield self.query[rest], self.query[chosen], query[rest], query[chosen]

    def arguments(self, query: Items, gallery: Items | None) -> dict[str, Any]:
        """Return the arguments of `evaluate` that `[evaluate]` sets for these items.

        Raises:
            RecipeError: the data lack a column.
        """
        table = self.run.recipe.evaluate
        check_columns(table, self.run.dataset)
        table_arguments: dict[str, Any] = {}

        def both(values: Sequence[Any]) -> tuple[list[Any], list[Any] | None]:
            theirs = None if gallery is None else [values[i] for i in gallery]
            return [values[i] for i in query], theirs

        if table.exclude is not None:
            cameras = both(self.column(table.exclude))
            table_arguments["exclude"] = Exclusion(*cameras, table.exclude_label == "same")
        if table.by is not None:
            table_arguments["by"] = both(self.column(table.by))[0]
        if table.levels:
            columns = [
                self.run.splits.labels.tolist(),
                *(self.column(name) for name in table.levels),
            ]
            levels = [both(column) for column in columns]
            table_arguments["relevance"] = Levels(
                [ours for ours, _ in levels],
                None if gallery is None else [theirs for _, theirs in levels if theirs is not None],
            )
        elif table.tags is not None:
            texts = [_tags(value) for value in self.column(table.tags)]
            table_arguments["relevance"] = Tags(*both(texts))
        return table_arguments

    def column(self, name: str) -> Sequence[Any]:
        """Return a column of the metadata of all items, with `None` for missing values."""
        return [row.get(name) for row in self.run.dataset.metadata or []]


def _tags(value: Any) -> list[str]:
    """Return the labels in a value, which is a list, or text separated by ";"."""
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
    Recognition, 2011. A query is unknown if no visible gallery item has its class. A threshold t
    accepts a query whose nearest item is at distance t or nearer. FAR(t) is the share of unknown
    queries that are accepted. DIR(t) is the share of known queries that are accepted and whose
    nearest item has their class. DIR@FAR f is the largest DIR(t) over thresholds with FAR(t) ≤ f.
    Equal distances share a threshold.

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
    # a query without visible items is never accepted
    thresholds = np.unique(apart[rows[:, 0] >= 0, 0])
    accepted = np.searchsorted(strangers, thresholds, side="right") / len(strangers)
    identified = np.searchsorted(ours, thresholds, side="right") / int(known.sum())
    return {
        f"dir_at_far_{far:g}": float(identified[accepted <= far].max(initial=0.0)) for far in fars
    }


Floats = NDArray[np.float64]
MOST = 50_000
"""Most queries and gallery items for re-ranking, which holds the neighbours of each in memory."""


class Reordered(NamedTuple):
    """Positions (Q, 1) and (N, 1) instead of codes, and a distance between positions."""

    query: Floats
    gallery: Floats | None
    distance: DistanceBlock


def expanded(
    query: Codes,
    gallery: Codes | None,
    *,
    k: int = 5,
    alpha: float = 0.0,
    queries: bool = True,
    hidden: Hidden | None = None,
) -> Reordered:
    """Return queries, or gallery items, as weighted means of themselves and k neighbours.

    The weight is 1 for the item itself and max(cos, 0)^α for a neighbour. α = 0 is average query
    expansion (Chum et al., "Total Recall", ICCV 2007); larger values prefer nearer neighbours
    (Radenović, Tolias & Chum, "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI
    2019). With `queries=False` it is database augmentation (Turcot & Lowe 2009; Arandjelović &
    Zisserman 2012), which uses the whole gallery. Items that are hidden from a query do not expand
    it. A mean is scaled to the length of its item.
    """
    ours = _array(query)
    theirs = ours if gallery is None else _array(gallery)
    if queries:
        left, right = _mean(ours, theirs, k, alpha, gallery is None, hidden), theirs
    else:
        left, right = ours, _mean(theirs, theirs, k, alpha, True)

    def distance(a: Tensor, b: Tensor) -> Tensor:
        changed_queries, changed_items = (
            torch.from_numpy(left)[_places(a)],
            torch.from_numpy(right)[_places(b)],
        )
        return torch.cdist(
            changed_queries, changed_items, compute_mode="donot_use_mm_for_euclid_dist"
        )

    return _reordered(len(ours), None if gallery is None else len(theirs), distance)


def _mean(
    codes: Floats, gallery: Floats, k: int, alpha: float, itself: bool, hidden: Hidden | None = None
) -> Floats:
    rows, _ = Search(codes, None if itself else gallery, hidden).nearest(k)
    length = np.linalg.norm(codes, axis=1, keepdims=True)
    unit = codes / np.where(length == 0, 1, length)
    total = unit.copy()
    for place in range(k):
        exists = rows[:, place] >= 0
        near = gallery[np.maximum(rows[:, place], 0)]
        size = np.linalg.norm(near, axis=1, keepdims=True)
        near = near / np.where(size == 0, 1, size)
        weight = np.maximum((unit * near).sum(1), 0) ** alpha * exists
        total += weight[:, None] * near
    size = np.linalg.norm(total, axis=1, keepdims=True)
    return np.asarray(total / np.where(size == 0, 1, size) * length)


def reranked(
    query: Codes, gallery: Codes | None, *, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> Reordered:
    """Return k-reciprocal re-ranking: items are near if they share reciprocal neighbours.

    Zhong, Zheng, Cao & Li, "Re-ranking Person Re-identification with k-reciprocal Encoding", CVPR
    2017, equations 3 to 12, on squared Euclidean distances divided by the largest of each row. k1
    is the number of reciprocal neighbours, k2 the number of neighbours for averaging an encoding,
    and `weight` is λ, the weight of the original distance against the Jaccard distance. Neighbours
    come from all queries and the whole gallery. Items that are hidden from a query are only then
    removed from its results, as in the authors' code.

    Raises:
        DataError: there are more than `MOST` items.
    """
    ours = _array(query)
    every = ours if gallery is None else np.concatenate([ours, _array(gallery)])
    if len(every) > MOST:
        raise DataError(
            f"[evaluate] rerank: there are {len(every):,} queries and gallery items; {MOST:,} can"
            " be re-ranked."
        )
    k1, k2 = min(k1, len(every) - 1), min(k2, len(every))
    neighbours, _ = Search(every, None).nearest(k1)
    # each item is its own first neighbour
    near = np.concatenate([np.arange(len(every))[:, None], neighbours], axis=1)
    codes = torch.from_numpy(every)
    largest = np.array([float(_squared(part, codes).max()) for part in codes[:, None]])
    encoded = _encoded(every, near, largest, k1)
    if k2 > 1:
        rows = np.repeat(np.arange(len(every)), k2)
        from scipy.sparse import csr_array

        mean = csr_array(
            (np.full(len(rows), 1 / k2), (rows, near[:, :k2].ravel())), shape=(len(every),) * 2
        )
        encoded = (mean @ encoded).tocsr()
    start = 0 if gallery is None else len(ours)

    def distance(a: Tensor, b: Tensor) -> Tensor:
        left, right = _places(a).numpy(), _places(b).numpy() + start
        shared = _shared(encoded[left], encoded[right])
        jaccard = 1 - shared / (2 - shared)
        own = (
            _squared(codes[left], codes[right]).numpy()
            / np.where(largest[left] == 0, 1, largest[left])[:, None]
        )
        return torch.from_numpy(jaccard * (1 - weight) + own * weight)

    return _reordered(len(ours), None if gallery is None else len(every) - start, distance)


def _encoded(every: Floats, near: NDArray[np.int64], largest: Floats, k1: int) -> Any:
    """Return sparse weights (N, N) of items' expanded reciprocal neighbours; each row sums to 1."""
    from scipy.sparse import csr_array

    def reciprocal(item: int, k: int) -> NDArray[np.int64]:
        forward = near[item, : k + 1]
        return np.asarray(forward[(near[forward, : k + 1] == item).any(axis=1)])

    half = round(k1 / 2)
    narrow = [reciprocal(item, half) for item in range(len(every))]
    columns, weights, ends = [], [], [0]
    codes = torch.from_numpy(every)
    for item in range(len(every)):
        wide = reciprocal(item, k1)
        grown = wide
        for other in wide:
            if len(np.intersect1d(narrow[other], wide)) > 2 / 3 * len(narrow[other]):
                grown = np.append(grown, narrow[other])
        grown = np.unique(grown)
        apart = _squared(codes[item : item + 1], codes[grown]).numpy()[0] / (largest[item] or 1)
        weight = np.exp(-apart)
        columns.append(grown)
        weights.append(weight / weight.sum())
        ends.append(ends[-1] + len(grown))
    return csr_array(
        (np.concatenate(weights), np.concatenate(columns), ends), shape=(len(every),) * 2
    )


def _shared(left: Any, right: Any) -> Floats:
    """Return Σ_g min(left_g, right_g) of sparse rows, (B, R)."""
    out = np.zeros((left.shape[0], right.shape[0]))
    by_column = right.tocsc()
    for row in range(left.shape[0]):
        for place in range(left.indptr[row], left.indptr[row + 1]):
            column = left.indices[place]
            some = slice(by_column.indptr[column], by_column.indptr[column + 1])
            out[row, by_column.indices[some]] += np.minimum(by_column.data[some], left.data[place])
    return out


def _squared(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()


def _reordered(queries: int, items: int | None, distance: DistanceBlock) -> Reordered:
    gallery = None if items is None else np.arange(items, dtype=np.float64)[:, None]
    return Reordered(np.arange(queries, dtype=np.float64)[:, None], gallery, distance)


def _places(codes: Tensor) -> Tensor:
    return codes[:, 0].long()


def _array(codes: Codes) -> Floats:
    array = codes.detach().cpu().numpy() if isinstance(codes, torch.Tensor) else np.asarray(codes)
    return np.ascontiguousarray(array, dtype=np.float64)
