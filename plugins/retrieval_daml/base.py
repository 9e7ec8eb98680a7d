"""What the paper's losses share: pytorch-metric-learning's call, checks of what it is given, and
pairs measured by any distance.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from pytorch_metric_learning.utils import loss_and_miner_utils as indices_utils
from retrieval.model.loss import Pairs, listed_pairs
from retrieval.plugin import CheckedLoss, Combiner
from torch import Tensor, nn

Positive = Annotated[float, Field(gt=0)]


class Measure:
    """Distances of listed pairs between two sets of embeddings, by any of pytorch-metric-learning's
    distances or a combiner.

    Few pairs are measured one by one, many by the whole matrix. The Euclidean distance is squared
    without its root. A similarity s becomes D² = 2 − 2s, and a distance D becomes s = 1 − D²/2: of
    unit vectors' Euclidean distance and cosine both are exact. `LpDistance` with power 2 is D²
    already.

    Args:
        distance: a `BaseDistance`.
        query: (B, C).
        reference: (R, C).
    """

    def __init__(self, distance: Any, query: Tensor, reference: Tensor) -> None:
        self.distance = distance
        self.query: Tensor = distance.maybe_normalize(query)
        self.reference: Tensor = (
            self.query if reference is query else distance.maybe_normalize(reference)
        )
        self.shape = (len(query), len(reference))
        self.euclidean = (
            type(distance) is LpDistance and distance.p == 2 and distance.power in (1, 2)
        )
        self.matrix: Tensor | None = None

    def squared(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return D² (N,) of pairs."""
        if self.euclidean and not self._dense(rows):
            return (self.query[rows] - self.reference[columns]).square().sum(1)
        found = self._raw(rows, columns)
        if self.distance.is_inverted:
            return 2 - 2 * found
        return found if self.euclidean else found.square()

    def plain(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return D (N,) of pairs."""
        if self.euclidean or self.distance.is_inverted:
            # the root of zero has no gradient
            return self.squared(rows, columns).clamp_min(1e-12).sqrt()
        return self._raw(rows, columns)

    def similarity(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return s (N,) of pairs."""
        if self.distance.is_inverted:
            return self._raw(rows, columns)
        return 1 - self.squared(rows, columns) / 2

    def all_squared(self) -> Tensor:
        """Return D² (B, R) of every pair."""
        matrix = self._all()
        if self.distance.is_inverted:
            return 2 - 2 * matrix
        return matrix if self.euclidean else matrix.square()

    def _dense(self, rows: Tensor) -> bool:
        return 4 * len(rows) > self.shape[0] * self.shape[1]

    def _raw(self, rows: Tensor, columns: Tensor) -> Tensor:
        """What the distance itself says; squared for the Euclidean one."""
        known = isinstance(self.distance, Combiner | CosineSimilarity | DotProductSimilarity)
        if known and not self._dense(rows):
            listed: Tensor = self.distance.pairwise_distance(
                self.query[rows], self.reference[columns]
            )
            return listed if self.distance.power == 1 else listed.pow(self.distance.power)
        if self.matrix is None:
            self.matrix = self._all()
        return self.matrix[rows, columns]

    def _all(self) -> Tensor:
        x, y = self.query, self.reference
        if self.euclidean:
            products = x @ y.T
            return (x.square().sum(1)[:, None] + y.square().sum(1) - 2 * products).relu()
        matrix: Tensor = self.distance.compute_mat(x, y)
        return matrix if self.distance.power == 1 else matrix.pow(self.distance.power)


class PaperLoss(CheckedLoss):
    """A loss of the paper.

    Args:
        distance: how two embeddings are compared.
        reducer: how the losses become one number; the mean by default.
    """

    def get_default_distance(self) -> nn.Module:
        """Return the Euclidean distance of the embeddings as they are."""
        return default_distance()

    def pairs(
        self, labels: Tensor | None, indices: Any, query: Tensor, reference: Tensor, ref_labels: Any
    ) -> Pairs:
        """Return the miner's pairs, each once however often it is listed, or every pair where there
        is no miner.
        """
        if indices is None:
            same = reference is query
            a, p, b, n = indices_utils.get_all_pairs_indices(labels, None if same else ref_labels)
            return a, p, b, n
        a, p, b, n = listed_pairs(indices, (len(query), len(reference)), query.device)
        return *_once(a, p, len(reference)), *_once(b, n, len(reference))


def triplets(
    indices: Any, labels: Tensor | None, query: Tensor, reference: Tensor, ref_labels: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a miner's triplets, all that its pairs make, or every triplet where there is no miner."""
    if indices is None:
        same = reference is query
        a, p, n = indices_utils.get_all_triplets_indices(labels, labels if same else ref_labels)
        return a, p, n
    a, p, b, n = listed_pairs(indices, (len(query), len(reference)), query.device)
    if len(indices) == 3:
        return a, p, n
    which, other = (a[:, None] == b).nonzero(as_tuple=True)
    return a[which], p[which], n[other]


def _once(anchors: Tensor, others: Tensor, size: int) -> tuple[Tensor, Tensor]:
    keys = torch.unique(anchors * size + others)
    return keys // max(size, 1), keys % max(size, 1)


def default_distance() -> nn.Module:
    """Return the Euclidean distance of the embeddings as they are."""
    return LpDistance(normalize_embeddings=False, p=2, power=1)  # type: ignore[no-any-return]
