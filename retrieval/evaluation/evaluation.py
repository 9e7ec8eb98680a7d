"""Codes and labels to retrieval figures, in blocks of queries.

A query whose label no (other) gallery item has, such as the only item of its class, cannot be
answered rightly or wrongly. It is left out of every mean and counted in `Evaluation.singletons`; it
stays in the gallery as a distractor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.evaluation.clusters import cluster_figures
from retrieval.evaluation.exclusion import Exclusion, Search
from retrieval.evaluation.neighbors import Codes, DistanceBlock, as_tensor
from retrieval.evaluation.ranking import Ranking
from retrieval.evaluation.relevance import Relevance, depth_of, graded_values
from retrieval.model.labels import read_labels, read_values
from retrieval.model.metrics import metric
from retrieval.serving.progress import Meter, Progress, shown

if TYPE_CHECKING:
    from retrieval.model.contracts import Metric

Ints = NDArray[np.int64]

_TITLES = {"map_at_r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI", "f1": "F1"}
DEFAULT_METRICS = (
    "recall_at_1",
    "recall_at_2",
    "recall_at_4",
    "recall_at_8",
    "r_precision",
    "map_at_r",
)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        values: the mean of each metric over the queries that have a relevant item; then "nmi" and
            "f1", if asked for.
        queries: how many queries the means are taken over.
        gallery: how many items were searched.
        singletons: how many queries were left out because no (other) gallery item that they may see
            has their label.
        groups: where `by` was given, the means of each group's queries, and "queries", how many
            these are.
    """

    values: dict[str, float]
    queries: int
    gallery: int
    singletons: int
    groups: dict[str, dict[str, float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the figures as text, one a line, with the counts below."""
        width = max((len(name) for name in self.values), default=0)
        lines = [f"{name:<{width}}  {value:.4f}" for name, value in self.values.items()]
        counts = f"{self.queries:,} queries, gallery of {self.gallery:,}"
        if self.singletons:
            counts += f"; {self.singletons:,} left out: no other item of their class"
        return "\n".join([*lines, counts])


@shown
def evaluate(
    codes: Codes,
    labels: Sequence[Any] | NDArray[Any],
    *,
    gallery: Codes | None = None,
    gallery_labels: Sequence[Any] | NDArray[Any] | None = None,
    metrics: Sequence[str] | Mapping[str, Metric] = DEFAULT_METRICS,
    distance: DistanceBlock | None = None,
    exclude: Exclusion | None = None,
    relevance: Relevance | None = None,
    by: Sequence[Any] | None = None,
    clusters: bool = False,
    seed: int = 0,
    block: int | None = None,
    device: str = "auto",
    progress: Progress = False,
) -> Evaluation:
    """Return the retrieval figures of codes, by exact search.

    Args:
        codes: (Q, C) the queries' codes. Without `gallery` they are the gallery too, each query
            left out of its own answer.
        labels: (Q,) one label per query: whole numbers or text, compared exactly; none may be
            missing.
        gallery: (N, C) codes to search in.
        gallery_labels: (N,) their labels.
        metrics: names of built-in metrics (see `metric`), or metrics by the name that their value
            shall have.
        distance: codes (B, C) and (R, C) to distances (B, R), such as a combiner's `compute_mat`;
            None is Euclidean.
        exclude: which gallery items are left out for each query, such as those of its camera; None:
            the query itself only.
        relevance: grades of relevance, in the place of equal labels; see
            `retrieval.evaluation.relevance`.
        by: (Q,) a value for each query, such as its vendor: also give the figures of each value's
            queries.
        clusters: also give NMI and F1 of k-means clusters of the queries' codes (see
            `retrieval.evaluation.clusters`).
        seed: of k-means.
        block: queries at a time; it changes memory and speed, never a figure.
        device: see `exact_neighbors`.
        progress: True shows a bar, False nothing; a function is told (what, done, total).

    Returns:
        The means. They are NaN when no query has a relevant item.

    Raises:
        DataError: codes and labels that do not fit together, labels that are missing or of two
            kinds, or codes that are not finite.
        RetrievalError: a metric that does not exist.
    """
    chosen = (
        dict(metrics) if isinstance(metrics, Mapping) else {name: metric(name) for name in metrics}
    )
    if (gallery is None) != (gallery_labels is None):
        raise DataError("gallery and gallery_labels come together: one of them is missing.")
    searched = codes if gallery is None else gallery
    for what, rows in (("codes", codes), ("gallery codes", searched)):
        if (
            len(shape := tuple(getattr(rows, "shape", (0, 0)))) != 2
        ):  # the code of one item, most often
            raise DataError(
                f"The {what} have shape {shape}: codes must be a matrix, one row per item."
            )
    query_class, item_class = class_numbers(labels, len(codes), gallery_labels, len(searched))
    hidden = None if exclude is None else exclude.hidden(query_class, item_class)
    if by is not None:
        if len(by) != len(codes):
            raise DataError(f"There are {len(codes):,} queries and {len(by):,} values to group by.")
        by = read_values(
            by, "values to group by", "Leave those queries out, or give them a value."
        ).tolist()
    search = Search(codes, gallery, hidden, distance, block, device)
    if relevance is not None:
        with Meter("searching", len(codes), "queries") as meter:
            values, relevant = graded_values(search, relevance, chosen, meter.update)
        asked = np.flatnonzero(relevant > 0)
    else:
        values, asked = _matched(search, query_class, item_class, chosen)
    figures = means(values, asked)
    groups: dict[str, dict[str, float]] = {}
    if by is not None:
        texts = np.array([str(value) for value in by])
        for value in sorted(set(texts.tolist())):
            some = asked[texts[asked] == value]
            groups[value] = {**means(values, some), "queries": float(len(some))}
    if clusters:
        figures |= cluster_figures(codes, query_class, seed=seed)
    return Evaluation(figures, len(asked), len(searched), len(query_class) - len(asked), groups)


def _matched(
    search: Search,
    query_class: Ints,
    item_class: Ints,
    chosen: Mapping[str, Metric],
) -> tuple[dict[str, NDArray[np.float64]], Ints]:
    """Return each metric's values of the queries (Q,), and which queries have one, ascending."""
    relevant = relevant_items(search, query_class, item_class)
    asked = np.flatnonzero(relevant > 0)
    values = {name: np.full(len(query_class), np.nan) for name in chosen}
    if len(asked) and chosen:
        # Queries of similar R share a block, which is searched no deeper than its largest R.
        ordered = asked[np.argsort(relevant[asked], kind="stable")]
        distinct, place = np.unique(relevant[ordered], return_inverse=True)
        size = len(item_class)
        depths = np.array([depth_of(chosen, int(count), size) for count in distinct])[place]
        with Meter("searching", len(asked), "queries") as meter:
            for rows, matches in matching(search, query_class, item_class, ordered, depths):
                for name, measure in chosen.items():
                    values[name][rows] = measure(matches, relevant[rows])
                meter.update(len(rows))
    return values, asked


def matching(
    search: Search, query_class: Ints, item_class: Ints, asked: Ints, depths: Ints
) -> Iterator[tuple[Ints, NDArray[np.bool_]]]:
    """Yield queries (B,) and matches (B, k): whether the item at a rank has the query's label.

    k is at least the depth of each query of the block.

    Args:
        search: the queries and what is searched.
        query_class: (Q,) class numbers.
        item_class: (N,) class numbers.
        asked: (A,) rows of the queries, in order of depth.
        depths: (A,) how many ranks each wants, ascending.
    """
    ranked = Ranking.serves(len(item_class), depths) if _only_distance(search) else 0
    left = [np.arange(ranked, len(asked))]
    if ranked:
        codes = as_tensor(search.queries, "gallery").cpu()
        if codes.dtype != torch.float64:
            codes = codes.float()  # exactly, of half precision
        place = np.empty(len(query_class), np.int64)
        place[asked] = np.arange(len(asked))
        for rows, matches, failed in Ranking(
            codes.numpy(), item_class, asked[:ranked], depths[:ranked]
        ):
            yield rows[~failed], matches[~failed]
            left.append(place[rows[failed]])
    rest = np.sort(np.concatenate(left))
    if len(rest):
        for rows, items, _ in search.blocks(asked[rest], depths[rest]):
            yield rows, (item_class[items] == query_class[rows, None]) & (items >= 0)


def _only_distance(search: Search) -> bool:
    """Return whether items are searched for one another on a CPU, by Euclidean distance alone."""
    on_cpu = search.device == "cpu" or (search.device == "auto" and not torch.cuda.is_available())
    plain = search.gallery is None and search.distance is None and search.hidden is None
    return on_cpu and plain and search.block is None


def relevant_items(search: Search, query_class: Ints, item_class: Ints) -> Ints:
    """Return how many items of its class each query may see (Q,)."""
    counts = np.bincount(item_class, minlength=int(query_class.max(initial=-1)) + 1)[query_class]
    left_out = int(search.gallery is None) if search.hidden is None else search.hidden.matching()
    return np.asarray(counts - left_out)


def means(values: Mapping[str, NDArray[np.float64]], asked: Ints) -> dict[str, float]:
    """Return the means over some queries, ascending: a mean's rounding depends on the order."""
    return {
        name: float(each[asked].mean()) if len(asked) else float("nan")
        for name, each in values.items()
    }


def metric_title(metric: str) -> str:
    """Return a metric as a table's head has it: `recall_at_1` is Recall@1."""
    for prefix, title in (("recall_at_", "Recall@"), ("ndcg_at_", "nDCG@")):
        if metric.startswith(prefix) and metric.removeprefix(prefix).isdigit():
            return title + metric.removeprefix(prefix)
    return _TITLES.get(metric, metric)


def grid(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of a table: a row a metric, a column a contestant."""
    names = list(dict.fromkeys(name for column in figures.values() for name in column))
    width = max(map(len, names))
    columns = {title: max(len(title), 8) for title in figures}
    lines = [" ".join([" " * width, *(f"{title:>{w}}" for title, w in columns.items())])]
    for name in names:
        cells = [
            f"{figures[title][name]:>{w}.4f}" if name in figures[title] else " " * w
            for title, w in columns.items()
        ]
        lines.append(" ".join([f"{name:<{width}}", *cells]).rstrip())
    return lines


def class_numbers(
    labels: Sequence[Any] | NDArray[Any],
    queries: int,
    gallery_labels: Sequence[Any] | NDArray[Any] | None,
    items: int,
) -> tuple[Ints, Ints]:
    """Return class numbers from 0 of the queries and of the gallery, equal exactly where the labels
    are.

    Raises:
        DataError: there are no items, not one label for each, or labels that cannot be compared
            exactly.
    """
    if not queries or not items:
        raise DataError(
            f"There are no items: {queries:,} queries and a gallery of {items:,}. Each needs at"
            " least one."
        )
    ours = _one_each(labels, queries, "labels", "codes")
    if gallery_labels is None:
        number = np.unique(ours, return_inverse=True)[1].astype(np.int64)
        return number, number
    theirs = _one_each(gallery_labels, items, "gallery labels", "gallery codes")
    if (ours.dtype.kind == "U") != (theirs.dtype.kind == "U"):
        raise DataError(
            "Queries' and gallery's labels are of two kinds, text and numbers: none would ever"
            " match."
        )
    both = np.concatenate([ours, theirs])
    if both.dtype.kind == "f":  # int64 with uint64, which NumPy would merge into float64
        both = np.concatenate([ours.astype(object), theirs.astype(object)])
    number = np.unique(both, return_inverse=True)[1].astype(np.int64)
    return number[:queries], number[queries:]


def _one_each(labels: Sequence[Any] | NDArray[Any], count: int, what: str, of: str) -> NDArray[Any]:
    array = read_labels(labels, what)
    if len(array) != count:
        raise DataError(
            f"There are {count:,} {of} and {len(array):,} {what}: one label per item is needed."
        )
    return array
