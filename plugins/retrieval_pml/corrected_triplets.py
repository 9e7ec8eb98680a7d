"""Losses of triplets where upstream departs from the paper, fails on some batch, or needs memory of
all triplets.

Each class says what differs from pytorch-metric-learning; all else is inherited.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.blocks import blocks, by_rows
from retrieval_pml.common import PreciseLoss, reduced
from retrieval_pml.matrices import products, similarities
from retrieval_pml.pairs import Pairs


class TripletMarginLoss(PreciseLoss, losses.TripletMarginLoss):
    """Upstream's, except that `swap` compares positive and negative within the reference set that
    holds both.

    Upstream reads their distance from the matrix of *batch* × reference with an index into the
    reference.
    """

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, as upstream's reducers read them."""
        common_functions.labels_or_indices_tuple_required(labels, indices_tuple)
        triplets = loss_and_miner_utils.convert_to_triplets(
            indices_tuple, labels, ref_labels, t_per_anchor=self.triplets_per_anchor
        )
        anchor, positive, negative = triplets
        if len(anchor) == 0:
            return self.zero_losses()
        mat = similarities(self.distance, embeddings, ref_emb)
        nearest = mat[anchor, negative]
        if self.swap:
            among = mat if ref_emb is embeddings else self.distance(ref_emb)
            nearest = self.distance.smallest_dist(nearest, among[positive, negative])
        violation = self.distance.margin(mat[anchor, positive], nearest) + self.margin
        loss = F.softplus(violation) if self.smooth_loss else F.relu(violation)
        return {"loss": {"losses": loss, "indices": triplets, "reduction_type": "triplet"}}


class AngularLoss(PreciseLoss, losses.AngularLoss):
    """Upstream's, except that negatives are normalised as anchors and positives are, in a few N ×
    N.

    Equation 8 of the paper assumes unit vectors throughout; upstream leaves `ref_emb`, which holds
    the negatives, at its own length.
    """

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, as upstream's reducers read them."""
        common_functions.labels_required(labels)
        assert labels is not None and ref_labels is not None
        if indices_tuple is None:
            anchor, positive = Pairs(labels, ref_labels).positives()
        else:
            anchor, positive, other, _ = loss_and_miner_utils.convert_to_pairs(
                indices_tuple, labels
            )
            anchor = anchor[: 0 if len(other) == 0 else None]
        if len(anchor) == 0:
            return self.zero_losses()
        unit = self.distance.normalize(embeddings)
        if ref_emb is embeddings:
            near = among = products(unit)
        else:
            reference = self.distance.normalize(ref_emb)
            near, among = unit @ reference.T, products(reference)
        square = float(torch.tan(self.alpha) ** 2)
        loss = _Angles.apply(near, among, anchor, positive, (labels, ref_labels), square)
        return {
            "loss": {"losses": loss, "indices": (anchor, positive), "reduction_type": "pos_pair"}
        }


class _Angles(torch.autograd.Function):
    """The angular loss of pairs, log(1 + Σ exp(4 t (xₐ + xₚ)ᵀxₙ − 2 (1 + t) xₐᵀxₚ)): each once more
    when its gradient is due.
    """

    @staticmethod
    def forward(
        ctx: Any,
        near: Tensor,
        among: Tensor,
        anchor: Tensor,
        positive: Tensor,
        labels: tuple[Tensor, Tensor],
        square: float,
    ) -> Tensor:
        """Return the losses (P,).

        Args:
            ctx: keeps what is given.
            near: (N, M) cosines of items and others.
            among: (M, M) cosines of others.
            anchor: (P,) items.
            positive: (P,) others.
            labels: (N,) and (M,).
            square: t, the squared tangent of the angle.
        """
        ctx.save_for_backward(near, among, anchor, positive)
        ctx.given = labels, square
        parts = [
            _Angles.part(near, among, anchor[k], positive[k], labels, square)[0]
            for k in blocks(len(anchor), len(among))
        ]
        return torch.cat(parts)

    @staticmethod
    def part(
        near: Tensor,
        among: Tensor,
        anchor: Tensor,
        positive: Tensor,
        labels: tuple[Tensor, Tensor],
        square: float,
    ) -> tuple[Tensor, Tensor]:
        """Return some pairs' losses (K,) and their exponents (K, M), −∞ where an item is no
        negative.
        """
        own = 2 * (1 + square) * near[anchor, positive]
        exponents = (near[anchor] + among[positive]) * (4 * square) - own.unsqueeze(1)
        same = labels[0][anchor].unsqueeze(1) == labels[1].unsqueeze(0)
        exponents = exponents.masked_fill(same, -torch.inf)
        some = torch.cat([exponents, torch.zeros_like(own).unsqueeze(1)], 1)
        return torch.logsumexp(some, 1), exponents

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        near, among, anchor, positive = ctx.saved_tensors
        labels, square = ctx.given
        if torch.is_grad_enabled():  # the gradient will be differentiated
            loss, _ = _Angles.part(near, among, anchor, positive, labels, square)
            found = torch.autograd.grad(
                loss, (near, among), gradient, create_graph=True, materialize_grads=True
            )
            return *found, None, None, None, None
        slopes, others = torch.zeros_like(near), torch.zeros_like(among)
        for k in blocks(len(anchor), len(among)):
            loss, weights = _Angles.part(near, among, anchor[k], positive[k], labels, square)
            weights = weights.sub_(loss.unsqueeze(1)).exp_().mul_(gradient[k].unsqueeze(1))
            own = weights.sum(1) * (-2 * (1 + square))
            weights *= 4 * square
            slopes.index_add_(0, anchor[k], weights)
            others.index_add_(0, positive[k], weights)
            slopes.index_put_((anchor[k], positive[k]), own, accumulate=True)
        return slopes, others, None, None, None, None


class DynamicSoftMarginLoss(PreciseLoss, losses.DynamicSoftMarginLoss):
    """Upstream's, except for the histogram of differences.

    It is a buffer, so that a resumed run goes on with it. It is a constant of the loss, as in the
    paper; upstream differentiates through it into the batch before, which fails on the second step.
    Differences in the last bin are counted there instead of failing. All triplets are gone through
    in blocks, none of which is kept.
    """

    hist_: Tensor

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        histogram = self.hist_
        del self.hist_
        self.register_buffer("hist_", histogram)

    def _bins(self, data: Tensor) -> tuple[Tensor, Tensor]:
        place = ((data.detach() - self.min_val) / self.delta).clamp(0, self.num_bins - 1)
        return place.floor().long(), place.frac()

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, as upstream's reducers read them."""
        if labels is None or ref_labels is None or indices_tuple is not None:
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.hist_ = self.hist_.to(embeddings)
        pairs = Pairs(labels, ref_labels)
        positives, negatives = pairs.counts()
        triplets = int((positives * negatives).sum())
        if triplets == 0:
            return self.zero_losses()
        mat = similarities(self.distance, embeddings, ref_emb)
        parts = blocks(len(mat), mat.shape[1], each=positives)
        batch = torch.zeros_like(self.hist_, dtype=torch.float64)
        for part in parts:
            positive, negative = pairs.of(part)
            row, column = torch.where(positive)
            near = mat.detach()[part]
            batch += self._counted((near[row, column].unsqueeze(1) - near[row])[negative[row]])
        self._mix(batch.to(self.hist_))
        return reduced(by_rows(mat, pairs, self._plain, parts=parts)[0].sum() / triplets)

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        row, column = torch.where(positive)
        each = self.weigh_loss(mat[row, column].unsqueeze(1) - mat[row]) * negative[row]
        return mat.new_zeros(len(mat)).index_add(0, row, each.sum(1))

    def _counted(self, data: Tensor) -> Tensor:
        """Return the histogram of differences (T,)."""
        low, upper_share = self._bins(data)
        high = (low + 1).clamp(max=self.num_bins - 1)
        found = torch.zeros_like(self.hist_).index_add(0, low, 1 - upper_share)
        return found.index_add(0, high, upper_share)

    def update_histogram(self, data: Tensor) -> None:
        """Mix the histogram of this batch's differences d(a, p) − d(a, n), (T,), into the running
        one.
        """
        self._mix(self._counted(data))

    def _mix(self, batch: Tensor) -> None:
        momentum = self.momentum if bool(self.hist_.any()) else 1.0
        mixed = (1 - momentum) * self.hist_ + momentum * batch
        self.hist_ = mixed / mixed.sum()

    def weigh_loss(self, data: Tensor) -> Tensor:
        """Return each difference times the share of differences up to it, (T,)."""
        return torch.cumsum(self.hist_, 0)[self._bins(data)[0]] * data
