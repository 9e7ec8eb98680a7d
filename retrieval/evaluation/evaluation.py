"""Retrieval metrics of embeddings and labels, graded relevance, and metrics of clusters.

*Codes* are the vectors that distances compare: embeddings or, with a combiner, its inputs.

A query without a relevant gallery item, such as the only item of its class, has no right answer.
The means leave out such queries, and `Evaluation.singletons` counts them. In the gallery they stay,
as distractors.

Clustering metrics follow Song et al., "Deep metric learning via lifted structured feature
embedding" (2016), section 6: Euclidean k-means on the embeddings, with as many clusters as there
are classes. NMI is 2 I(Ω; C) / (H(Ω) + H(C)), normalised by the arithmetic mean of the entropies.
F1 counts pairs of items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from retrieval.base.arrays import Array, Bools, Floats32, Floats64, Ints
from retrieval.base.display_tables import html_table
from retrieval.base.progress import Meter, Progress, shows_progress
from retrieval.base.runtime import load_faiss
from retrieval.errors import DataError, some
from retrieval.evaluation.block_ranking import Ranking
from retrieval.evaluation.neighbors import (
    Codes,
    Distance,
    Exclusion,
    Hidden,
    Ignored,
    NeighborSearch,
    as_tensor,
    group_numbers,
    measuring,
)
from retrieval.host.plugins import Plugins, load_plugins
from retrieval.host.values import toml_value
from retrieval.metrics.recall_map_ndcg import metric
from retrieval.model.checked_parts import CheckedMetric
from retrieval.model.contracts import PooledHits
from retrieval.model.labels import ADVICE, LabelsError, read_labels, read_values

if TYPE_CHECKING:
    from retrieval.model.contracts import Metric

Values = Floats64

_TITLES = {"map_at_r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI", "f1": "F1"}
DEFAULT_METRICS = (*(f"recall_at_{k}" for k in (1, 2, 4, 8)), "r_precision", "map_at_r")

Metrics: TypeAlias = "str | Metric | Sequence[str | Metric | Mapping[str, Any]] | Mapping[str, Any]"
"""One or several metrics; see `resolve_metrics`."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The result of `evaluate`.

    Attributes:
        values: the mean of each metric over the queries with a relevant item; with `clusters`, also
            "nmi" and "f1".
        queries: number of queries in the means.
        gallery: number of items in the gallery.
        singletons: number of queries left out because no visible gallery item has their label.
        groups: with `by`, by group the mean of each metric and the number of "queries". A group
            without a query that has a relevant item has no means.
        spread: with several random galleries, each metric's standard deviation over them.
        per_query: for each metric, the value of each query (Q,), NaN for those left out.
    """

    values: dict[str, float]
    queries: int
    gallery: int
    singletons: int
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    per_query: dict[str, Values] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return html_table(cells({"mean": self.values}), [self._counts()])

    def table(self) -> str:
        """Return the metrics as text, one per line, followed by the counts."""
        width = max((len(name) for name in self.values), default=0)
        lines = [f"{name:<{width}}  {value:.4f}" for name, value in self.values.items()]
        return "\n".join([*lines, self._counts()])

    def _counts(self) -> str:
        return f"{self.queries:,} queries, gallery of {self.gallery:,}{left_out(self)}"


def left_out(evaluation: Any) -> str:
    """Return the end of a sentence about the queries without a right answer, or ""."""
    if not evaluation.singletons:
        return ""
    text = f"; {evaluation.singletons:,} left out: no other item of their class"
    if evaluation.queries:
        return text
    return f"{text}. Without a query there is no score."


@shows_progress
def evaluate(
    codes: Codes,
    labels: Sequence[Any] | Array,
    *,
    gallery: Codes | None = None,
    gallery_labels: Sequence[Any] | Array | None = None,
    metrics: Metrics = DEFAULT_METRICS,
    distance: Distance | None = None,
    exclude: Exclusion | None = None,
    relevance: Relevance | None = None,
    by: Sequence[Any] | None = None,
    clusters: bool = False,
    device: str = "auto",
    progress: Progress = False,
) -> Evaluation:
    """Return the retrieval metrics of codes, by exact search.

    Args:
        codes: (Q, C), the queries' codes. Without `gallery` they are the gallery too, and each
            query is left out of its own results.
        labels: (Q,), one label per query, whole numbers or text; compared exactly.
        gallery: (N, C), the codes to search in.
        gallery_labels: (N,), the labels of the gallery.
        metrics: one or more metrics: names such as "recall_at_5" or "map_at_r", tables as in
            `[evaluate] metrics`, or objects (see `retrieval.plugin.Metric`), also as a dictionary
            of objects by their name in the result.
        distance: "euclidean" (the default); "cosine"; a function from codes (B, C) and (R, C) to
            distances (B, R), such as scikit-learn's `manhattan_distances` or a combiner's
            `compute_mat`; or a distance of pytorch-metric-learning. Of its similarities, larger is
            closer, as their attribute `is_inverted` says. Any other similarity is refused.
        exclude: gallery items to hide from each query, such as those of its camera. `None` hides
            only the query itself.
        relevance: grades that decide which items are relevant; `None` means equal labels.
        by: (Q,), the group of each query, such as its vendor; each group gets metrics of its own.
        clusters: also return NMI and F1 of k-means clusters of the queries' codes (see
            `retrieval.evaluation.evaluation`).
        device: see `exact_neighbors`.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Returns:
        The means, which are NaN if no query has a relevant item.

    Raises:
        DataError: codes and labels do not fit together, labels are missing or of two kinds, codes
            are not finite, or the distance is a similarity.
        RetrievalError: a metric does not exist.
        PluginError: a metric or distance fails, or gives NaN.
    """
    if (gallery is None) != (gallery_labels is None):
        raise DataError("gallery and gallery_labels come together, but one of them is missing.")
    codes = as_tensor(codes, "codes")
    size = len(codes)
    if gallery is not None:
        gallery = as_tensor(gallery, "gallery codes")
        size = len(gallery)
    query_class, item_class = class_numbers(labels, len(codes), gallery_labels, size)
    hidden = hidden_items(exclude, relevance, query_class, item_class)
    codes, gallery, measure = measuring(codes, gallery, distance)
    return evaluate_search(
        NeighborSearch(codes, gallery, hidden, measure, device),
        query_class,
        item_class,
        metrics=resolve_metrics(metrics),
        relevance=relevance,
        by=by,
        clusters=clusters,
    )


def resolve_metrics(
    metrics: Metrics,
    plugins: Plugins | None = None,
    always: Sequence[str | Mapping[str, Any]] = (),
) -> dict[str, Metric]:
    """Return metrics, and the names in `always`, by the names under which results list them.

    A metric is the short name of a built-in metric, `PLUGIN.NAME`, a table of a name and
    parameters, or an object. Results list a table as `NAME(parameter=value, …)`, and an object by
    its key in a dictionary, or else by its own `__name__` or its class.
    """
    resolved: dict[str, Metric] = {}
    # a table of one metric has a text under "name"; a dictionary of metrics has objects
    if isinstance(metrics, Mapping) and not isinstance(metrics.get("name"), str):
        for key, value in metrics.items():
            name = str(key)
            if isinstance(value, CheckedMetric):
                checked = value
            else:
                checked = CheckedMetric(value, name)
            resolved[name] = checked
        return resolved
    if isinstance(metrics, str | Mapping) or not isinstance(metrics, Iterable):
        metrics = [metrics]
    for item in [*metrics, *always]:
        if isinstance(item, str) and "." not in item:
            resolved[item] = metric(item)
        elif isinstance(item, str | Mapping):
            table: Mapping[str, Any] = {"name": item} if isinstance(item, str) else item
            name = str(table.get("name"))
            parameters = [f"{k}={toml_value(v)}" for k, v in table.items() if k != "name"]
            if parameters:
                name += f"({', '.join(parameters)})"
            plugins = plugins or load_plugins()
            resolved[name] = CheckedMetric(plugins.build("metrics", table), name)
        else:
            name = getattr(item, "__name__", type(item).__name__)
            if name in resolved:
                raise DataError(
                    f"Two metrics have the name {name}. Pass a dictionary of metrics by name."
                )
            resolved[name] = CheckedMetric(item, name)
    return resolved


def evaluate_search(
    search: NeighborSearch,
    query_class: Ints,
    item_class: Ints,
    *,
    metrics: Mapping[str, Metric],
    relevance: Relevance | None = None,
    by: Sequence[Any] | None = None,
    clusters: bool = False,
) -> Evaluation:
    """Return the result of `evaluate` for a search, with class numbers (Q,) and (N,)."""
    if by is not None:
        if len(by) != len(query_class):
            raise DataError(
                f"There are {len(query_class):,} queries and {len(by):,} values to group by."
            )
        by = read_values(
            by, "values to group by", "Leave those queries out, or give them a value."
        ).tolist()
    pooled: dict[str, Any] = {name: m for name, m in metrics.items() if is_pooled(m)}
    single = {name: m for name, m in metrics.items() if name not in pooled}
    values, relevant = query_values(search, query_class, item_class, relevance, single)
    answerable = np.flatnonzero(relevant > 0)
    values_by_name = means(values, answerable)
    if pooled:
        hits = pooled_hits(search, query_class, item_class, relevance, relevant, pooled)
        values_by_name |= {name: measure.pooled(hits) for name, measure in pooled.items()}
        values_by_name = {name: values_by_name[name] for name in metrics}
    groups: dict[str, dict[str, float]] = {}
    if by is not None:
        texts = np.array([str(value) for value in by])
        for value in sorted(set(texts.tolist())):
            members = answerable[texts[answerable] == value]
            groups[value] = means(values, members) if len(members) else {}
            groups[value]["queries"] = float(len(members))
    if clusters:
        values_by_name |= cluster_metrics(search.queries, query_class)
    return Evaluation(
        values_by_name,
        queries=len(answerable),
        gallery=len(item_class),
        singletons=len(query_class) - len(answerable),
        groups=groups,
        per_query=values,
    )


def query_values(
    search: NeighborSearch,
    query_class: Ints,
    item_class: Ints,
    relevance: Relevance | None,
    metrics: Mapping[str, Metric],
) -> tuple[dict[str, Values], Ints]:
    """Return each metric's values (Q,), and the number of relevant items of each query (Q,).

    Without `relevance`, items of the query's class are relevant. The values of queries without a
    relevant item are NaN.
    """
    if relevance is not None:
        return _graded_values(search, relevance, metrics)
    relevant = relevant_items(search, query_class, item_class)
    answerable = np.flatnonzero(relevant > 0)
    values = {name: np.full(len(query_class), np.nan) for name in metrics}
    if len(answerable):
        # Queries with a similar R share a block, which is searched to the depth of its largest R.
        ordered = answerable[np.argsort(relevant[answerable], kind="stable")]
        distinct, inverse = np.unique(relevant[ordered], return_inverse=True)
        size = len(item_class)
        depths = np.array([depth_of(metrics, int(count), size) for count in distinct])[inverse]
        with Meter("searching", len(answerable), "queries") as meter:
            for rows, matches in matching(search, query_class, item_class, ordered, depths):
                for name, measure in metrics.items():
                    values[name][rows] = measure(matches, relevant[rows])
                meter.update(len(rows))
    return values, relevant


def is_pooled(measure: Metric) -> bool:
    """Return whether a metric needs the hits of all queries at once."""
    return getattr(measure, "pooled", None) is not None


def pooled_hits(
    search: NeighborSearch,
    query_class: Ints,
    item_class: Ints,
    relevance: Relevance | None,
    relevant: Ints,
    metrics: Mapping[str, Metric],
) -> PooledHits:
    """Return the nearest items of all queries, as deep as pooled metrics need."""
    size = len(item_class)
    items, distances = search.nearest(min(depth_of(metrics, 1, size), size))
    nearest_class = np.where(items >= 0, item_class[items], -1)
    matches = nearest_class == query_class[:, None]
    if relevance is not None:
        matches = hit_grades(relevance, np.arange(len(items)), items) >= relevance.match
    matches &= items >= 0
    classes = len(np.unique(item_class))
    return PooledHits(matches, distances, relevant, query_class, nearest_class, classes)


def hit_grades(relevance: Relevance, queries: Ints, hits: Ints) -> Grades:
    """Return the grades (Q, k) of the hits of some queries (Q,); 0 for row −1, which is no hit."""
    grades = np.zeros(hits.shape, np.float32)
    step = max(1, _GRADES // relevance.sizes[1])
    for start in range(0, len(hits), step):
        part = slice(start, start + step)
        grades[part] = np.take_along_axis(relevance(queries[part]), hits[part], 1)
    grades[hits < 0] = 0
    return grades


def matching(
    search: NeighborSearch, query_class: Ints, item_class: Ints, answerable: Ints, depths: Ints
) -> Iterator[tuple[Ints, Bools]]:
    """Yield blocks of queries (B,) and matches (B, k): whether each rank has the query's label.

    `answerable` (A,) are the queries in ascending order of `depths` (A,), the number of ranks that
    each query needs. k is at least the depth of each query in the block.
    """
    # `Ranking` serves the first `ranked` queries. Those for which it fails are searched in full.
    among = search.gallery is None
    if search.ranks_all:
        ranked = Ranking.serves(len(item_class), depths, among=among)
    else:
        ranked = 0
    rest = [np.arange(ranked, len(answerable))]
    if ranked:
        codes = _ranked_codes(search.queries, "queries")
        gallery = None
        if search.gallery is not None:
            gallery = _ranked_codes(search.gallery, "gallery")
            both = np.promote_types(codes.dtype, gallery.dtype)
            codes = codes.astype(both, copy=False)
            gallery = gallery.astype(both, copy=False)
        first = answerable[:ranked], depths[:ranked]
        ranking = Ranking(codes, query_class, *first, gallery, item_class)
        position = np.empty(len(query_class), np.int64)
        position[answerable] = np.arange(len(answerable))
        for rows, matches, failed in ranking:
            # metrics take at least one query
            if not failed.all():
                yield rows[~failed], matches[~failed]
            rest.append(position[rows[failed]])
    positions = np.sort(np.concatenate(rest))
    if len(positions):
        for rows, items, _ in search.blocks(answerable[positions], depths[positions]):
            same_class = item_class[items] == query_class[rows, None]
            yield rows, same_class & (items >= 0)


def _ranked_codes(codes: Codes, what: str) -> Array:
    """Return finite codes in float32, which is exact for half precision, or in float64."""
    tensor = as_tensor(codes, what).cpu()
    if tensor.dtype != torch.float64:
        tensor = tensor.float()
    array: Array = tensor.numpy()
    return array


def is_answerable(
    search: NeighborSearch, query_class: Ints, item_class: Ints, relevance: Relevance | None = None
) -> bool:
    """Return whether any query has a relevant item that is visible to it; nothing is searched."""
    if relevance is None:
        return bool((relevant_items(search, query_class, item_class) > 0).any())
    # the first few queries nearly always have an answer, so the blocks are small
    for start in range(0, len(query_class), 64):
        rows = np.arange(start, min(start + 64, len(query_class)))
        if (visible_grades(search, relevance, rows) >= relevance.match).any():
            return True
    return False


def relevant_items(search: NeighborSearch, query_class: Ints, item_class: Ints) -> Ints:
    """Return for each query (Q,) the number of visible items of its class."""
    sizes = class_sizes(query_class, item_class)
    if search.hidden is None:
        # A gallery of the queries themselves holds each query once, and hides it from itself.
        return sizes - int(search.gallery is None)
    # lists of items come with lists of relevant items, which replace classes
    assert isinstance(search.hidden, Hidden)
    return sizes - search.hidden.matching()


def class_sizes(query_class: Ints, item_class: Ints) -> Ints:
    """Return for each query (Q,) the number of items of its class."""
    return np.bincount(item_class, minlength=int(query_class.max(initial=-1)) + 1)[query_class]


def means(values: Mapping[str, Values], answerable: Ints) -> dict[str, float]:
    """Return each metric's mean over queries, which must ascend: their order affects rounding."""
    if not len(answerable):  # NumPy would warn of a mean of nothing
        return dict.fromkeys(values, float("nan"))
    return {name: float(column[answerable].mean()) for name, column in values.items()}


def metric_title(metric: str) -> str:
    """Return a metric's title in tables, such as Recall@1 for `recall_at_1`."""
    for prefix, title in (("recall_at_", "Recall@"), ("ndcg_at_", "nDCG@")):
        number = metric.removeprefix(prefix)
        if number.isdigit() and number != metric:
            return title + number
    return _TITLES.get(metric, metric)


def cells(columns_by_title: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return a table with one row per metric and one column per contestant, with titles."""
    columns = columns_by_title.values()
    rows = [["", *columns_by_title]]
    # a dictionary, because a set would lose the order
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [f"{column[name]:.4f}" if name in column else "" for column in columns]
        rows.append([name, *values])
    return rows


def grid(columns_by_title: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the table of `cells` as lines of text."""
    rows = cells(columns_by_title)
    width = max(len(name) for name, *_ in rows)
    widths = [max(len(title), 8) for title in columns_by_title]
    lines = []
    for name, *values in rows:
        padded = map(str.rjust, values, widths)
        lines.append(" ".join([name.ljust(width), *padded]).rstrip())
    return lines


class ByContestant:
    """A result that shows its metrics as a table, in a terminal and in a notebook."""

    metrics: dict[str, dict[str, float]]

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return html_table(cells(self.metrics), self._notes())

    def table(self) -> str:
        """Return a table: one row per metric, one column per contestant."""
        return "\n".join([*grid(self.metrics), *self._notes()])

    def _notes(self) -> list[str]:
        raise NotImplementedError


def class_numbers(
    labels: Sequence[Any] | Array,
    queries: int,
    gallery_labels: Sequence[Any] | Array | None,
    items: int,
) -> tuple[Ints, Ints]:
    """Return class numbers of queries and gallery; equal labels, and only these, share a number."""
    if not queries or not items:
        raise DataError(
            f"There are {queries:,} queries and {items:,} gallery items: at least one of each is"
            " needed."
        )
    query_labels = _checked_labels(labels, queries, "labels", "codes")
    if gallery_labels is None:
        number = np.unique(query_labels, return_inverse=True)[1].astype(np.int64)
        return number, number
    item_labels = _checked_labels(gallery_labels, items, "gallery labels", "gallery codes")
    if (query_labels.dtype.kind == "U") != (item_labels.dtype.kind == "U"):
        raise DataError(
            "The labels of queries and gallery are of two kinds, text and numbers, which never"
            " match."
        )
    both = np.concatenate([query_labels, item_labels])
    # NumPy converts int64 with uint64 to float64, in which large numbers become equal
    if both.dtype.kind == "f":
        both = np.concatenate([query_labels.astype(object), item_labels.astype(object)])
    number = np.unique(both, return_inverse=True)[1].astype(np.int64)
    return number[:queries], number[queries:]


def _checked_labels(labels: Sequence[Any] | Array, count: int, what: str, of: str) -> Array:
    array = read_labels(labels, what)
    if len(array) != count:
        raise DataError(
            f"There are {count:,} {of} and {len(array):,} {what}: one label per item is needed."
        )
    # With other negative labels, -1 is a number like them.
    if array.dtype.kind != "U" and array.min() == -1:
        raise LabelsError(
            f"The {what} are -1 in {np.sum(array == -1):,} of {count:,} rows, which data sets write"
            f" for items without a label. {ADVICE}"
        )
    return array


Grades = Floats32
_GRADES = 2**24
"""Most grades in memory, 64 MB."""


class Relevance(ABC):
    """Grades of relevance of gallery items for queries.

    Attributes:
        match: the smallest grade that counts as a match.
        sizes: the numbers of queries and gallery items.
    """

    match: float
    sizes: tuple[int, int]

    @abstractmethod
    def __call__(self, rows: Ints) -> Grades:
        """Return grades (B, N) of queries (B,) and all gallery items, 0 for irrelevant ones."""


class Levels(Relevance):
    """Classes of several levels, such as species, genus and family, finest first.

    The finest level that two items share decides their grade. The finest of L levels gives grade L,
    which is a match, and the coarsest gives grade 1. `query` and `gallery` hold one sequence per
    level, with one value per item; `gallery=None` means the queries.
    """

    def __init__(
        self, query: Sequence[Sequence[Any]], gallery: Sequence[Sequence[Any]] | None = None
    ) -> None:
        if gallery is None:
            items = query
        else:
            items = gallery
        if len(query) != len(items) or not query:
            raise DataError(
                f"The queries have {len(query)} levels and the gallery {len(items)}: both need the"
                " same number of levels, at least one."
            )
        self._levels = [group_numbers(a, b) for a, b in zip(query, items, strict=True)]
        self.match = float(len(query))
        self.sizes = len(query[0]), len(items[0])

    def __call__(self, rows: Ints) -> Grades:
        """Return grades (B, N); see `Relevance`."""
        grades = np.zeros((len(rows), self.sizes[1]), np.float32)
        # coarse levels first, because finer levels overwrite their grades
        for grade, (queries, items) in enumerate(reversed(self._levels), 1):
            grades[queries[rows, None] == items] = grade
        return grades


class Tags(Relevance):
    """Items with several labels: the grade is the number of shared labels, and 1 is a match.

    Raises:
        DataError: an item's labels are not a list of strings.
    """

    match = 1.0

    def __init__(
        self, query: Sequence[Sequence[str]], gallery: Sequence[Sequence[str]] | None = None
    ) -> None:
        from sklearn.preprocessing import MultiLabelBinarizer

        query = _checked_tags(query, "query")
        if gallery is None:
            items = query
        else:
            items = _checked_tags(gallery, "gallery")
        binarizer = MultiLabelBinarizer(sparse_output=True).fit([*query, *items])
        self._query = binarizer.transform(query)
        self._gallery = binarizer.transform(items).T.tocsr()
        self.sizes = len(query), len(items)

    def __call__(self, rows: Ints) -> Grades:
        """Return grades (B, N); see `Relevance`."""
        return np.asarray((self._query[rows] @ self._gallery).toarray(), dtype=np.float32)


class Judged(Relevance):
    """Gallery items that are listed as relevant for each query, and items that it ignores.

    An item is relevant (grade 1) if the query's list names it, whatever the labels. Ignored items
    leave the query's ranking before a metric reads it, as junk images do in the protocol of Oxford
    and Paris (Philbin et al., "Object retrieval with large vocabularies and fast spatial matching",
    CVPR 2007; Radenović et al., "Revisiting Oxford and Paris", CVPR 2018).

    Args:
        relevant: (Q,), the keys of each query's relevant items; a list may be empty.
        gallery: (N,), the keys of the gallery; without a gallery, those of the queries.
        ignored: (Q,), the keys of the items that each query ignores.

    Raises:
        DataError: a list names an item that is not in the gallery, or a query's lists both name
            one.
    """

    match = 1.0

    def __init__(
        self,
        relevant: Sequence[Sequence[str]],
        gallery: Sequence[str],
        ignored: Sequence[Sequence[str]] | None = None,
    ) -> None:
        row_of = {key: row for row, key in enumerate(gallery)}
        self.sizes = len(relevant), len(gallery)
        self._relevant = _listed_rows(relevant, row_of)
        hidden = _listed_rows(ignored or [[]] * len(relevant), row_of)
        for query, (right, left_out) in enumerate(zip(self._relevant, hidden, strict=True)):
            if len(both := np.intersect1d(right, left_out)):
                raise DataError(
                    f"Query {query}: {gallery[both[0]]} is listed as relevant and as ignored."
                )
        self.hidden = Ignored(hidden, len(gallery))

    def __call__(self, rows: Ints) -> Grades:
        """Return grades (B, N); see `Relevance`."""
        grades = np.zeros((len(rows), self.sizes[1]), np.float32)
        for line, row in zip(grades, rows.tolist(), strict=True):
            line[self._relevant[row]] = 1
        return grades


def _listed_rows(lists: Sequence[Sequence[str]], row_of: Mapping[str, int]) -> list[Ints]:
    """Return the sorted numbers of the items that each list names."""
    if absent := sorted({key for keys in lists for key in keys if key not in row_of}):
        raise DataError(
            f"The queries' lists name {len(absent):,} items that are not in the gallery:"
            f" {some(absent)}."
        )
    return [np.unique(np.array([row_of[key] for key in keys], np.int64)) for keys in lists]


def hidden_items(
    exclude: Exclusion | None, relevance: Relevance | None, query_class: Ints, item_class: Ints
) -> Hidden | Ignored | None:
    """Return the items that are hidden from each query, by `exclude` or by lists.

    Raises:
        DataError: both hide items.
    """
    if isinstance(relevance, Judged):
        if exclude is not None:
            raise DataError("Lists of relevant items cannot be combined with an exclusion.")
        return relevance.hidden
    if exclude is None:
        return None
    return exclude.hidden(query_class, item_class)


def _checked_tags(items: Sequence[Sequence[str]], side: str) -> Sequence[Sequence[str]]:
    """Return the labels of all items; refuse a plain text or NaN in place of a list."""
    for row, tags in enumerate(items):
        is_list = isinstance(tags, Iterable) and not isinstance(tags, str)
        if not is_list or not all(isinstance(tag, str) for tag in tags):
            raise DataError(
                f"The {side} labels in row {row} are {tags!r}: give each item a list of strings,"
                " which may be empty."
            )
    return items


def _graded_values(
    search: NeighborSearch, relevance: Relevance, metrics: Mapping[str, Metric]
) -> tuple[dict[str, Values], Ints]:
    """Return the result of `query_values`."""
    total = len(search.queries)
    size = len(search.searched)
    if relevance.sizes != (total, size):
        raise DataError(
            f"There are {total:,} queries and {size:,} gallery items, but relevance has grades for"
            f" {relevance.sizes[0]:,} and {relevance.sizes[1]:,}."
        )
    values = {name: np.full(total, np.nan) for name in metrics}
    relevant = np.zeros(total, np.int64)
    step = max(1, min(1024, _GRADES // size))
    with Meter("searching", total, "queries") as meter:
        for start in range(0, total, step):
            rows = np.arange(start, min(start + step, total))
            grades = visible_grades(search, relevance, rows)
            relevant[rows] = np.count_nonzero(grades >= relevance.match, axis=1)
            meter.update(len(rows))
            answerable = relevant[rows] > 0
            if not answerable.any():
                continue
            rows = rows[answerable]
            grades = grades[answerable]
            depth = min(size, depth_of(metrics, int(relevant[rows].max()), size))
            blocks = search.blocks(rows, np.full(len(rows), depth))
            items = np.concatenate([block_items for _, block_items, _ in blocks])
            # row −1 stands for no item; its grade is that of a hidden item
            gains = np.take_along_axis(grades, np.maximum(items, 0), 1)
            gains = np.where(items >= 0, gains, -1)
            matches = gains >= relevance.match
            gains = np.maximum(gains, 0).astype(np.float64)
            descending = -np.sort(-np.maximum(grades, 0), axis=1)
            ideal = descending[:, :depth].astype(np.float64)
            for name, measure in metrics.items():
                # an nDCG needs the grades themselves, other metrics only whether they match
                graded = getattr(measure, "graded", None)
                if graded:
                    values[name][rows] = graded(gains, ideal)
                else:
                    values[name][rows] = measure(matches, relevant[rows])
    return values, relevant


def visible_grades(search: NeighborSearch, relevance: Relevance, rows: Ints) -> Grades:
    """Return grades (B, N), with −1 for items that are hidden from a query."""
    grades = relevance(rows)
    if search.gallery is None:
        grades[np.arange(len(rows)), rows] = -1
    if search.hidden is not None:
        all_items = np.broadcast_to(np.arange(grades.shape[1]), grades.shape)
        grades[~search.hidden.visible(rows, all_items)] = -1
    return grades


def depth_of(chosen: Mapping[str, Metric], relevant: int, size: int) -> int:
    """Return how many ranks the metrics need if `relevant` of `size` items are relevant."""
    depths: dict[Any, int] = {"relevant": relevant, "all": size}
    needed = [int(depths.get(metric.depth, metric.depth)) for metric in chosen.values()]
    return max(needed, default=1)


ROUNDS = 100
"""Iterations of Lloyd's algorithm in k-means."""


def cluster_metrics(codes: Array | Tensor, labels: Array) -> dict[str, float]:
    """Return {"nmi": …, "f1": …} of k-means clusters of codes (N, C) against labels (N,)."""
    classes = np.unique(read_labels(labels), return_inverse=True)[1]
    clusters = kmeans(codes, int(classes.max()) + 1)
    return {"nmi": nmi(clusters, classes), "f1": pair_f1(clusters, classes)}


def kmeans(codes: Array | Tensor, count: int) -> Ints:
    """Return each code's cluster number (N,), by k-means of codes (N, C) into `count` clusters."""
    faiss = load_faiss()
    if isinstance(codes, Tensor):
        array = codes.detach().cpu().numpy()
    else:
        array = np.asarray(codes)
    table = array - array.mean(0, dtype=np.float64)  # a large offset would lose precision
    # scaling by a power of two is exact, and keeps squares within float32
    table *= 2.0 ** -np.frexp(np.abs(table).max(initial=0))[1]
    table = np.ascontiguousarray(table, np.float32)
    count = min(count, len(table))
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # with several threads, their number would affect rounding
    try:
        clusters = faiss.Kmeans(
            table.shape[1],
            count,
            niter=ROUNDS,
            seed=0,
            init_method=faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS,
            # FAISS would warn of small classes, and cluster only a sample of large ones
            min_points_per_centroid=1,
            max_points_per_centroid=len(table),
        )
        clusters.train(table)
        return np.asarray(clusters.assign(table)[1], np.int64)
    finally:
        faiss.omp_set_num_threads(threads)


def nmi(clusters: Array, classes: Array) -> float:
    """Return 2 I(Ω; C) / (H(Ω) + H(C)), or 1 if there is a single cluster and a single class."""
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(classes, clusters, average_method="arithmetic"))


def pair_f1(clusters: Array, classes: Array) -> float:
    """Return the F1 of pairs, or 1 if no two items share a cluster or a class."""
    from sklearn.metrics import pair_confusion_matrix

    (_, only_clusters), (only_classes, both) = pair_confusion_matrix(classes, clusters).tolist()
    # 2 P R / (P + R) with P = both / (both + only_clusters) and R = both / (both + only_classes)
    pairs = 2 * both + only_clusters + only_classes
    if pairs:
        return float(2 * both / pairs)
    return 1.0
