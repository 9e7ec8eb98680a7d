"""Metrics of published protocols, each computed as its authors' code does."""

from __future__ import annotations

import numpy as np
from pydantic import PositiveFloat, PositiveInt
from retrieval.base.arrays import Array, Bools, Floats64, Ints
from retrieval.helpers import PooledHits


class OxfordAP:
    """Average precision of Oxford and Paris: (1/R) Σ_j (P(r_j − 1) + P(r_j)) / 2.

    r_j is the rank of the j-th relevant item, and P(0) = 1. The area under the curve of precision
    over recall is added up by trapezoids, as in `compute_ap` of the Oxford buildings (Philbin et
    al., "Object retrieval with large vocabularies and fast spatial matching", CVPR 2007) and of
    `revisitop` (Radenović et al., "Revisiting Oxford and Paris", CVPR 2018).
    """

    depth = "all"

    def __call__(self, matches: Bools, relevant: Ints) -> Floats64:
        """Return the average precision for each query (Q,)."""
        ranks = np.arange(1, matches.shape[1] + 1)
        hits_so_far = np.cumsum(matches, axis=1)
        before = np.ones(matches.shape)
        before[:, 1:] = hits_so_far[:, :-1] / ranks[:-1]
        areas = (before + hits_so_far / ranks) / 2
        return np.asarray((areas * matches).sum(axis=1) / relevant)


class OxfordPrecisionAt:
    """mP@K of ROxford and RParis: the precision at rank min(K, rank of the last relevant item).

    Radenović et al., CVPR 2018; `compute_map` of `revisitop`. A query with fewer than K relevant
    items can therefore reach 1.

    Args:
        k: the rank.
    """

    depth = "all"

    def __init__(self, k: PositiveInt = 10) -> None:
        self.k = k

    def __call__(self, matches: Bools, relevant: Ints) -> Floats64:
        """Return the precision for each query (Q,)."""
        last = matches.shape[1] - np.argmax(matches[:, ::-1], axis=1)
        rank = np.minimum(last, self.k)
        hits_so_far = np.cumsum(matches, axis=1)
        return np.asarray(hits_so_far[np.arange(len(rank)), rank - 1] / rank)


class GPR1200AP:
    """Average precision of GPR1200, whose code leaves each query in its own ranking.

    Schall et al., "GPR1200: A Benchmark for General-Purpose Content-Based Image Retrieval", MMM
    2022. The query is at rank 1 and counts as relevant, so values are higher than those of `map`:
    (1/(R + 1)) (1 + Σ_j (j + 1)/(r_j + 1)), where r_j is the rank of the j-th other image of the
    category.
    """

    depth = "all"

    def __call__(self, matches: Bools, relevant: Ints) -> Floats64:
        """Return the average precision for each query (Q,)."""
        ranks = np.arange(2, matches.shape[1] + 2)
        precision = (np.cumsum(matches, axis=1) + 1) / ranks
        return np.asarray((1 + (precision * matches).sum(axis=1)) / (relevant + 1))


class MicroAP:
    """Micro average precision (µAP): one ranking of the K nearest pairs of all queries.

    The pairs of a query and an item are ordered by distance, and of equally near pairs the wrong
    ones come first. µAP = (1/R) Σ_i rel(i) · Precision@i, where R is the number of relevant pairs.
    Queries without a relevant item only add wrong pairs. Douze et al., "The 2021 Image Similarity
    Dataset and Challenge", 2021, and `precision_recall` of its code. The challenge ranks the
    500,000 nearest pairs of all queries; here, a pair must be among the `k` nearest of its query.

    Args:
        k: how many neighbours of each query to rank; 20 for 25,000 queries gives 500,000 pairs.
    """

    def __init__(self, k: PositiveInt = 20) -> None:
        self.depth = k

    def pooled(self, hits: PooledHits) -> float:
        """Return the micro average precision."""
        present = np.isfinite(hits.distances)
        scores = -hits.distances[present].astype(np.float64)
        return _micro_ap(scores, hits.matches[present], int(hits.relevant.sum()))


class MetGAP:
    """Global average precision of the Met dataset's nearest-neighbour classifier.

    Each query gets one class, with a confidence. Of a class among the K nearest items, s is the
    largest cosine, at least 0. The confidence is the softmax of s · `temperature` over all classes
    of the gallery, with s = 0 for classes that are not among the nearest. The predictions of all
    queries are ordered by confidence, of equal ones the wrong first; GAP is their average precision
    over the queries with an answer. Ypsilantis et al., "The Met Dataset: Instance-level Recognition
    for Artworks", NeurIPS Datasets 2021; `gap` and `KNN_Classifier` of its code. Embeddings must
    have unit length. The authors choose `k` and `temperature` on their validation queries; their
    code also whitens the embeddings, which a metric does not.

    Args:
        k: how many neighbours vote.
        temperature: factor of the cosines.
        distractors: whether queries without an answer take part (GAP); false gives GAP−.
    """

    def __init__(
        self, k: PositiveInt = 1, temperature: PositiveFloat = 1.0, distractors: bool = True
    ) -> None:
        self.depth = k
        self.temperature = temperature
        self.distractors = distractors

    def pooled(self, hits: PooledHits) -> float:
        """Return the global average precision."""
        predicted, confidence = nearest_class(hits, self.temperature)
        known = hits.relevant > 0
        chosen = known | self.distractors
        right = (predicted == hits.query_class) & known
        return _micro_ap(confidence[chosen], right[chosen], int(known.sum()))


class MetAccuracy:
    """Accuracy of the Met dataset's nearest-neighbour classifier, over queries with an answer.

    See `MetGAP`, also for the arguments.

    Args:
        k: how many neighbours vote.
    """

    def __init__(self, k: PositiveInt = 1) -> None:
        self.depth = k

    def pooled(self, hits: PooledHits) -> float:
        """Return the share of known queries whose predicted class is right."""
        predicted, _ = nearest_class(hits, 1.0)
        known = hits.relevant > 0
        return float((predicted == hits.query_class)[known].mean())


class _Threshold:
    """A metric that names the nearest item's individual, or says "new" if it is too far."""

    depth = 1

    def __init__(self, threshold: PositiveFloat) -> None:
        self.threshold = threshold


class BAKS(_Threshold):
    """Balanced accuracy on known samples: the mean over known individuals of their accuracy.

    A query is answered with the nearest item's individual, or with "new" if that item is farther
    than `threshold`. Known are the individuals that the gallery shows. Adam et al.,
    "WildlifeReID-10k", arXiv:2406.09211; `BAKS` of the package `wildlife-datasets`. The score of
    AnimalCLEF 2025 is the geometric mean of BAKS and BAUS. Choose the threshold on other data.

    Args:
        threshold: the largest distance at which an individual is named.
    """

    def pooled(self, hits: PooledHits) -> float:
        """Return the balanced accuracy, NaN without a known individual."""
        named = hits.distances[:, 0] <= self.threshold
        right = named & (hits.item_class[:, 0] == hits.query_class)
        return _balanced(right, hits.query_class, hits.relevant > 0)


class BAUS(_Threshold):
    """Balanced accuracy on unknown samples: the mean over new individuals of the share called new.

    See `BAKS`. New are the individuals that the gallery does not show.

    Args:
        threshold: the largest distance at which an individual is named.
    """

    def pooled(self, hits: PooledHits) -> float:
        """Return the balanced accuracy, NaN without a new individual."""
        new = hits.distances[:, 0] > self.threshold
        return _balanced(new, hits.query_class, hits.relevant == 0)


def nearest_class(hits: PooledHits, temperature: float) -> tuple[Ints, Floats64]:
    """Return each query's class (Q,) and confidence (Q,) by the classifier of `MetGAP`."""
    cosines = np.maximum(1 - hits.distances.astype(np.float64) ** 2 / 2, 0)
    # a class of several neighbours counts once, by its nearest, which comes first
    order = np.lexsort(
        (np.broadcast_to(np.arange(cosines.shape[1]), cosines.shape), hits.item_class)
    )
    first: Bools = np.ones(cosines.shape, np.bool_)
    sorted_class = np.take_along_axis(hits.item_class, order, 1)
    first[:, 1:] = sorted_class[:, 1:] != sorted_class[:, :-1]
    first &= sorted_class >= 0
    votes = np.where(first, np.take_along_axis(cosines, order, 1), -np.inf)
    # as the authors' argmax, the first class in order wins a tie
    winner = votes.argmax(axis=1)[:, None]
    # relative to the largest, so that no exponential overflows
    best = np.take_along_axis(votes, winner, 1)
    absent_classes = (hits.classes - first.sum(axis=1)) * np.exp(-temperature * best[:, 0])
    total = np.exp(temperature * (votes - best)).sum(axis=1) + absent_classes
    return np.take_along_axis(sorted_class, winner, 1)[:, 0], 1 / total


def _micro_ap(scores: Floats64, right: Bools, relevant: int) -> float:
    """Return the average precision of one ranking; of equal scores, the wrong come first."""
    if not relevant:
        return float("nan")
    right = right[np.lexsort((right, -scores))]
    precision = np.cumsum(right) / np.arange(1, len(right) + 1)
    return float((precision * right).sum() / relevant)


def _balanced(right: Bools, classes: Ints, chosen: Bools) -> float:
    """Return the mean over classes of the share of right answers, of the chosen queries."""
    if not chosen.any():
        return float("nan")
    _, number = np.unique(classes[chosen], return_inverse=True)
    shares: Array = np.bincount(number, right[chosen]) / np.bincount(number)
    return float(shares.mean())
