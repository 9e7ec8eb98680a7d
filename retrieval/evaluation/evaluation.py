"""Codes and labels to retrieval figures, in blocks of queries.

A query whose label no (other) gallery item has, such as the only item of its class, cannot be answered rightly or wrongly.
It is left out of every mean and counted in `Evaluation.singletons`; it stays in the gallery as a distractor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.evaluation.clusters import cluster_figures
from retrieval.evaluation.neighbors import Candidates, Codes, DistanceBlock, Neighbors
from retrieval.model.built_in import metric
from retrieval.serving.progress import Meter, Progress, shown

if TYPE_CHECKING:
    from retrieval.model.contracts import Metric

DEFAULT_METRICS = ("recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "r_precision", "map_at_r")


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
        values: the mean of each metric over the queries that have a relevant item; then "nmi" and "f1", if asked for.
        queries: how many queries the means are taken over.
        gallery: how many items were searched.
        singletons: how many queries were left out because no (other) gallery item has their label.
    """

    values: dict[str, float]
    queries: int
    gallery: int
    singletons: int

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
    clusters: bool = False,
    seed: int = 0,
    block: int | None = None,
    device: str = "auto",
    candidates: Candidates = "auto",
    progress: Progress = False,
) -> Evaluation:
    """Return the retrieval figures of codes, by exact search.

    Args:
        codes: (Q, C) the queries' codes. Without `gallery` they are the gallery too, each query left out of its own answer.
        labels: (Q,) one label per query: whole numbers or text, compared exactly.
        gallery: (N, C) codes to search in.
        gallery_labels: (N,) their labels.
        metrics: names of built-in metrics (see `metric`), or metrics by the name that their value shall have.
        distance: codes (B, C) and (R, C) to distances (B, R), such as a combiner's `compute_mat`; None is Euclidean.
        clusters: also give NMI and F1 of k-means clusters of the queries' codes (see `retrieval.evaluation.clusters`).
        seed: of k-means.
        block: queries at a time; it changes memory and speed, never a figure.
        device: see `exact_neighbors`.
        candidates: see `exact_neighbors`.
        progress: True shows a bar, False nothing; a function is told (what, done, total).

    Returns:
        The means. They are NaN when no query has a relevant item.

    Raises:
        DataError: codes and labels that do not fit together, or codes that are not finite.
        RetrievalError: a metric that does not exist.
    """
    chosen = dict(metrics) if isinstance(metrics, Mapping) else {name: metric(name) for name in metrics}
    if (gallery is None) != (gallery_labels is None):
        raise DataError("gallery and gallery_labels come together: one of them is missing.")
    itself = gallery is None
    searched = codes if gallery is None else gallery
    query_class, item_class = _classes(labels, len(codes), gallery_labels, len(searched))
    counts = np.bincount(item_class, minlength=int(query_class.max(initial=-1)) + 1)
    relevant = counts[query_class] - int(itself)
    asked = np.flatnonzero(relevant > 0)
    values = {name: np.full(len(query_class), np.nan) for name in chosen}
    if len(asked) and chosen:
        # Queries of similar R share a block, which is searched no deeper than its largest R.
        asked = asked[np.argsort(relevant[asked], kind="stable")]
        search = Neighbors(searched, distance=distance, block=block, device=device, candidates=candidates)
        done = 0
        with Meter("searching", len(asked), "queries") as meter:
            while done < len(asked):
                size = search.block(
                    _depth(chosen, int(relevant[asked[min(done + 1023, len(asked) - 1)]]), search.size)
                )
                rows = asked[done : done + size]
                k = _depth(chosen, int(relevant[rows].max()), search.size)
                found, _ = search(_rows(codes, rows), k, rows if itself else None)
                matches = item_class[found] == query_class[rows, None]
                if k >= search.size:  # fewer than k are there: index −1, which matches nothing
                    matches &= found >= 0
                for name, measure in chosen.items():
                    values[name][rows] = measure(matches, relevant[rows])
                done += len(rows)
                meter.update(len(rows))
    means = {
        name: float(each[asked].mean()) if len(asked) else float("nan")
        for name, each in _sorted(values, asked)
    }
    if clusters:
        means |= cluster_figures(codes, query_class, seed=seed)
    return Evaluation(means, len(asked), len(searched), len(query_class) - len(asked))


def _sorted(values: dict[str, NDArray[np.float64]], asked: NDArray[np.int64]) -> Any:
    asked.sort()  # the mean's rounding depends on the order: always that of the queries
    return values.items()


def _depth(chosen: Mapping[str, Metric], relevant: int, size: int) -> int:
    """Return how many neighbours the metrics look at, of queries with up to `relevant` relevant items."""
    depths = {"relevant": relevant, "all": size}
    return max(one.depth if isinstance(one.depth, int) else depths[one.depth] for one in chosen.values())


def _rows(codes: Codes, rows: NDArray[np.int64]) -> Codes:
    if isinstance(codes, torch.Tensor):
        return codes[torch.from_numpy(rows).to(codes.device)]
    return np.asarray(codes)[rows]


def _classes(
    labels: Sequence[Any] | NDArray[Any],
    queries: int,
    gallery_labels: Sequence[Any] | NDArray[Any] | None,
    items: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return class numbers from 0 of the queries and of the gallery, equal exactly where the labels are."""
    ours = _labels(labels, queries, "labels", "codes")
    if gallery_labels is None:
        number = np.unique(ours, return_inverse=True)[1].astype(np.int64)
        return number, number
    theirs = _labels(gallery_labels, items, "gallery labels", "gallery codes")
    if (ours.dtype.kind == "U") != (theirs.dtype.kind == "U"):
        raise DataError(
            "Queries' and gallery's labels are of two kinds, text and numbers: none would ever match."
        )
    both = np.concatenate([ours, theirs])
    if both.dtype.kind == "f":  # int64 with uint64, which NumPy would merge into float64
        both = np.concatenate([ours.astype(object), theirs.astype(object)])
    number = np.unique(both, return_inverse=True)[1].astype(np.int64)
    return number[:queries], number[queries:]


def _labels(labels: Sequence[Any] | NDArray[Any], count: int, what: str, of: str) -> NDArray[Any]:
    if isinstance(labels, torch.Tensor):
        labels = labels.detach().cpu().numpy()
    array = np.asarray(labels)
    if array.shape != (count,):
        raise DataError(
            f"There are {count:,} {of} and {what} of shape {array.shape}: one label per item is needed."
        )
    if array.dtype.kind == "O" and all(isinstance(label, str) for label in array):
        array = array.astype(str)
    if array.dtype.kind == "b":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iuU":
        raise DataError(
            f"The {what} are of type {array.dtype}: labels must be whole numbers or text, so that they compare exactly."
        )
    return array
