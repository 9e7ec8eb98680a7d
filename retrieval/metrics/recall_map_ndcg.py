"""Retrieval metrics, as `retrieval.plugin.Metric` defines them; each value is from 0 to 1.

R is the number of gallery items with the query's label, not counting the query itself. rel(i) is 1
if the neighbour at rank i = 1, 2, … has that label, else 0. Evaluation skips queries with R = 0.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from pydantic import PositiveInt

from retrieval.base.arrays import Array, Bools, Floats, Floats64, Ints
from retrieval.errors import RetrievalError, did_you_mean
from retrieval.host.hookspecs import Factories, hookimpl

if TYPE_CHECKING:
    from retrieval.host.factory import Factory
    from retrieval.model.contracts import Metric

Matches = Bools
Relevant = Ints
Values = Floats64
Depth = int | Literal["relevant", "all"]


class RecallAt:
    """Recall@K of metric learning: 1 if a query's K nearest neighbours contain a match, else 0.

    Jégou et al., "Product quantization for nearest neighbor search" (2011); Song et al., "Deep
    metric learning via lifted structured feature embedding" (2016), section 6.

    Args:
        k: how many neighbours to look at.
    """

    depth: Depth

    def __init__(self, k: PositiveInt = 1) -> None:
        self.depth = self.k = _at_least_one(k, "recall_at")

    def __call__(self, matches: Matches, relevant: Relevant) -> Values:
        """Return the recall, 1 or 0, for each query (Q,)."""
        has_match = matches[:, : self.k].any(axis=1)
        return np.asarray(has_match, dtype=np.float64)


class PrecisionAt:
    """Precision@K: the share of a query's K nearest neighbours that match.

    Precision@1 equals Recall@1. If the gallery has fewer than K items, the missing neighbours count
    as non-matches.

    Args:
        k: how many neighbours to look at.
    """

    depth: Depth

    def __init__(self, k: PositiveInt = 1) -> None:
        self.depth = self.k = _at_least_one(k, "precision_at")

    def __call__(self, matches: Matches, relevant: Relevant) -> Values:
        """Return the precision for each query (Q,)."""
        counts = np.count_nonzero(matches[:, : self.k], axis=1)
        return np.asarray(counts / self.k)


class RPrecision:
    """R-precision: the share of a query's R nearest neighbours that match.

    Musgrave, Belongie, Lim, "A Metric Learning Reality Check" (2020), section 3.2.
    """

    depth: Depth = "relevant"

    def __call__(self, matches: Matches, relevant: Relevant) -> Values:
        """Return the R-precision for each query (Q,)."""
        counts = np.count_nonzero(_within_r(matches, relevant), axis=1)
        return np.asarray(counts / relevant)


class MAPAtR:
    """MAP@R: (1/R) Σ_{i=1}^{R} rel(i) · Precision@i.

    Musgrave, Belongie, Lim, "A Metric Learning Reality Check" (2020), sec. 3.2, equations 5 and 6.
    """

    depth: Depth = "relevant"

    def __call__(self, matches: Matches, relevant: Relevant) -> Values:
        """Return the MAP@R for each query (Q,)."""
        return _summed_precision(_within_r(matches, relevant)) / relevant


class MeanAveragePrecision:
    """Average precision over the whole gallery: (1/R) Σ_{i=1}^{N} rel(i) · Precision@i."""

    depth: Depth = "all"

    def __call__(self, matches: Matches, relevant: Relevant) -> Values:
        """Return the average precision for each query (Q,)."""
        return _summed_precision(matches) / relevant


class MAPAt:
    """MAP@K of instance-level search: (1/min(R, K)) Σ_{i=1}^{K} rel(i) · Precision@i.

    mAP@100 of Google Landmarks v2 (Weyand et al., CVPR 2020) and mAP@1k of ILIAS (Kordopatis-Zilos
    et al., CVPR 2025).

    Args:
        k: how many neighbours to look at.
    """

    depth: Depth

    def __init__(self, k: PositiveInt = 1) -> None:
        self.depth = self.k = _at_least_one(k, "map_at")

    def __call__(self, matches: Matches, relevant: Relevant) -> Values:
        """Return the average precision of the first K for each query (Q,)."""
        return _summed_precision(matches[:, : self.k]) / np.minimum(relevant, self.k)


class NDCGAt:
    """nDCG@K: Σ_i g(i) / log2(i + 1) over the K nearest, divided by the largest possible sum.

    Järvelin & Kekäläinen, "Cumulated gain-based evaluation of IR techniques", 2002. The gain g(i)
    is 1 for a match and 0 otherwise. With `[evaluate] levels` or `tags`, the gain follows from the
    neighbour's grade of relevance.

    Args:
        k: how many neighbours to look at.
        gain: gain of a grade r: r for "linear", 2^r − 1 for "exponential" (Burges et al., "Learning
            to Rank Using Gradient Descent", 2005).
    """

    depth: Depth

    def __init__(
        self, k: PositiveInt = 1, gain: Literal["linear", "exponential"] = "linear"
    ) -> None:
        self.depth = self.k = _at_least_one(k, "ndcg_at")
        self.gain = gain

    def __call__(self, matches: Matches, relevant: Relevant) -> Values:
        """Return the nDCG@K for each query (Q,)."""
        gains = matches[:, : self.k].astype(np.float64)
        # Without grades, the best order has all relevant items first.
        ideal = np.arange(gains.shape[1]) < relevant[:, None]
        return self.graded(gains, ideal)

    def graded(self, gains: Floats, ideal: Array) -> Values:
        """Return a number from 0 to 1 for each query (Q,).

        Args:
            gains: (Q, k), grade of the item at each rank, nearest first; 0 if it is not relevant.
            ideal: (Q, k), the largest grades in the gallery, largest first; the first is above 0.
        """
        return np.asarray(self._discounted(gains) / self._discounted(ideal))

    def _discounted(self, grades: Array) -> Values:
        gains = grades[:, : self.k].astype(np.float64)
        if self.gain == "exponential":
            gains = np.exp2(gains) - 1
        # Ranks count from 1, and the discount of rank i is log2(i + 1).
        discounts = np.log2(np.arange(2, gains.shape[1] + 2))
        return np.asarray((gains / discounts).sum(axis=1))


def _within_r(matches: Matches, relevant: Relevant) -> Matches:
    """Return `matches` up to each query's rank R; all later ranks are False."""
    matches = matches[:, : int(relevant.max(initial=0))]
    is_within = np.arange(matches.shape[1]) < relevant[:, None]
    return matches & is_within


def _summed_precision(matches: Matches) -> Values:
    """Return Σ_i rel(i) · Precision@i (Q,)."""
    # In place: three arrays of this size would exist otherwise.
    terms = np.cumsum(matches, axis=1, dtype=np.float64)
    terms *= matches
    terms *= 1 / np.arange(1, matches.shape[1] + 1)
    # cumsum adds in order; sum() would group the terms by the number of ranks.
    return np.cumsum(terms, axis=1, out=terms)[:, -1]


def _at_least_one(k: int, name: str) -> int:
    if k < 1:
        raise RetrievalError(f"{name}_{k} looks at no neighbour; the smallest is {name}_1.")
    return k


@hookimpl
def retrieval_metrics() -> Factories:
    """Return the factories of the built-in retrieval metrics by short name."""
    return {
        "map": MeanAveragePrecision,
        "map_at": MAPAt,
        "map_at_r": MAPAtR,
        "ndcg_at": NDCGAt,
        "precision_at": PrecisionAt,
        "r_precision": RPrecision,
        "recall_at": RecallAt,
    }


def metric(name: str) -> Metric:
    """Return the built-in metric called `name`, such as "recall_at_5" or "map_at_r".

    Raises:
        RetrievalError: no metric has that name; the message suggests the closest.
    """
    stem = name
    values = {}
    if match := re.fullmatch(r"(.+)_(\d{1,9})", name):
        stem = match[1]
        values = {"k": int(match[2])}
    factory = _built_in().get(stem)
    if factory is not None and bool(values) == bool(factory.parameters):
        return cast("Metric", factory.build(values))
    suggestions: list[str] = []
    for short, factory in _built_in().items():
        if factory.parameters:
            # The usual numbers, and the one that the user wrote.
            suggestions += [f"{short}_{k}" for k in (1, 2, 4, 8, 10, values.get("k", 1))]
        else:
            suggestions.append(short)
    closest = did_you_mean(name.lower().replace("@", "_at_"), suggestions)
    raise RetrievalError(
        f"There is no metric '{name}'.{closest}"
        " Built in are recall_at_K, precision_at_K, map_at_K, ndcg_at_K (K a number),"
        " r_precision, map_at_r and map."
    )


@cache
def _built_in() -> dict[str, Factory]:
    """Return the built-in metrics by short name."""
    from retrieval.host.factory import own_factories

    return own_factories("metrics", sys.modules[__name__])
