"""What the paper's losses share: pytorch-metric-learning's call, checks of what it is given, and pairs measured by any distance."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from pytorch_metric_learning.losses.base_metric_loss_function import BaseMetricLossFunction
from pytorch_metric_learning.utils import loss_and_miner_utils as indices_utils
from retrieval.contracts import Combiner
from retrieval.errors import DataError
from retrieval.factory import Part
from torch import Tensor, nn

Distance = Annotated[nn.Module | None, Part("distances")]
Reducer = Annotated[nn.Module | None, Part("reducers")]
Positive = Annotated[float, Field(gt=0)]
Pairs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Anchors and their positives, anchors and their negatives, int64."""


class Measure:
    """Distances of listed pairs between two sets of embeddings, by any of pytorch-metric-learning's distances or a combiner.

    Few pairs are measured one by one, many by the whole matrix. The Euclidean distance is squared without its root.
    A similarity s becomes D² = 2 − 2s, and a distance D becomes s = 1 − D²/2: of unit vectors' Euclidean distance and
    cosine both are exact. `LpDistance` with power 2 is D² already.

    Args:
        distance: a `BaseDistance`.
        query: (B, C).
        reference: (R, C).
    """

    def __init__(self, distance: Any, query: Tensor, reference: Tensor) -> None:
        self.distance = distance
        self.query: Tensor = distance.maybe_normalize(query)
        self.reference: Tensor = self.query if reference is query else distance.maybe_normalize(reference)
        self.shape = (len(query), len(reference))
        self.euclidean = type(distance) is LpDistance and distance.p == 2 and distance.power in (1, 2)
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
            listed: Tensor = self.distance.pairwise_distance(self.query[rows], self.reference[columns])
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


class PaperLoss(BaseMetricLossFunction):
    """A loss of the paper, in float32 or float64 whatever autocast says.

    Args:
        distance: how two embeddings are compared.
        reducer: how the losses become one number; the mean by default.
    """

    def __init__(self, distance: nn.Module | None = None, reducer: nn.Module | None = None) -> None:
        super().__init__(distance=distance, reducer=reducer)

    def get_default_distance(self) -> nn.Module:
        """Return the Euclidean distance of the embeddings as they are."""
        return default_distance()

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a scalar; see `retrieval.Loss`.

        Raises:
            ValueError: shapes, labels or indices do not fit.
            DataError: an embedding is NaN or infinite.
        """
        query = full_precision(embeddings)
        reference = None if ref_emb is None or ref_emb is embeddings else full_precision(ref_emb)
        _check_embeddings(query, "embeddings")
        if reference is not None:
            _check_embeddings(reference, "ref_emb")
        else:
            ref_labels = None
        if labels is not None or indices_tuple is None:
            labels = _checked_labels(labels, query, "labels")
        if reference is not None and (ref_labels is not None or indices_tuple is None):
            ref_labels = _checked_labels(ref_labels, reference, "ref_labels")
        with torch.autocast(device_type=query.device.type, enabled=False):
            total: Tensor = super().forward(query, labels, indices_tuple, reference, ref_labels)
        return total

    def pairs(
        self, labels: Tensor | None, indices: Any, query: Tensor, reference: Tensor, ref_labels: Any
    ) -> Pairs:
        """Return the miner's pairs, each once however often it is listed, or every pair where there is no miner."""
        if indices is None:
            same = reference is query
            a, p, b, n = indices_utils.get_all_pairs_indices(labels, None if same else ref_labels)
            return a, p, b, n
        a, p, b, n = _listed(indices, (len(query), len(reference)), query.device)
        return *_once(a, p, len(reference)), *_once(b, n, len(reference))


def nothing(*embeddings: Tensor) -> dict[str, Any]:
    """Return a loss of 0 with a gradient of 0, as pytorch-metric-learning's reducers read it."""
    zero = sum((each.sum() * 0 for each in embeddings), embeddings[0].new_zeros(()))
    return {"losses": zero, "indices": None, "reduction_type": "already_reduced"}


def triplets(
    indices: Any, labels: Tensor | None, query: Tensor, reference: Tensor, ref_labels: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a miner's triplets, all that its pairs make, or every triplet where there is no miner."""
    if indices is None:
        same = reference is query
        a, p, n = indices_utils.get_all_triplets_indices(labels, labels if same else ref_labels)
        return a, p, n
    a, p, b, n = _listed(indices, (len(query), len(reference)), query.device)
    if len(indices) == 3:
        return a, p, n
    which, other = (a[:, None] == b).nonzero(as_tuple=True)
    return a[which], p[which], n[other]


def _once(anchors: Tensor, others: Tensor, size: int) -> tuple[Tensor, Tensor]:
    keys = torch.unique(anchors * size + others)
    return keys // max(size, 1), keys % max(size, 1)


def _listed(indices: Any, shape: tuple[int, int], device: torch.device) -> Pairs:
    if len(indices) not in (3, 4):
        raise ValueError(
            f"a miner gives (anchor, positive, negative) or (anchor, positive, anchor, negative), not {len(indices)} tensors"
        )
    found = [torch.as_tensor(each, device=device).long() for each in indices]
    pairs = (found[0], found[1], found[-2] if len(found) == 4 else found[0], found[-1])
    for anchors, others in (pairs[:2], pairs[2:]):
        if anchors.shape != others.shape or anchors.ndim != 1:
            raise ValueError(
                f"a miner's indices must be as many anchors as others, not {tuple(anchors.shape)} and {tuple(others.shape)}"
            )
        for each, size in zip((anchors, others), shape, strict=True):
            if each.numel() and not 0 <= int(each.min()) <= int(each.max()) < size:
                raise ValueError(
                    f"a miner's indices go from {int(each.min())} to {int(each.max())}, and there are {size} items: was it "
                    f"given the same batch and reference set?"
                )
    return pairs


def default_distance() -> nn.Module:
    """Return the Euclidean distance of the embeddings as they are."""
    return LpDistance(normalize_embeddings=False, p=2, power=1)  # type: ignore[no-any-return]


def full_precision(x: Tensor) -> Tensor:
    """Return half-precision numbers in float32; others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _check_embeddings(x: Tensor, name: str) -> None:
    if x.ndim != 2:
        raise ValueError(f"{name} must be a matrix, a row an item, and this has the shape {tuple(x.shape)}")
    if not bool(torch.isfinite(x).all()):
        raise DataError(
            f"{name} hold NaN or infinite numbers: {int((~torch.isfinite(x)).any(1).sum())} of {len(x)} items"
        )


def _checked_labels(labels: Any, items: Tensor, name: str) -> Tensor:
    if labels is None:
        raise ValueError(f"{name} are missing: without a miner's indices they say which pairs are positive")
    if not isinstance(labels, Tensor) or labels.shape != items.shape[:1]:
        raise ValueError(
            f"{name} must be a tensor of one whole number an item, and there are {len(items)} items"
        )
    return labels.to(items.device)
