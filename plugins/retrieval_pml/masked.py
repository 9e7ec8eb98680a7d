"""Losses and a miner of all pairs or triplets on masked matrices: the same numbers as upstream's lists of indices, in a few N × N.

Where a miner picks, where triplets are drawn, or where a reducer looks at single triplets, upstream's own way is taken.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import losses, miners, reducers
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml import corrected_pairs
from retrieval_pml.common import PreciseLoss, PreciseMiner, reduced

_ENTRIES = 2**20
"""Triplets that are in memory at a time."""


def pair_masks(labels: Tensor, ref_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pairs (N, M) are positive and which negative, as bool; an item and itself are neither."""
    same = labels.unsqueeze(1) == ref_labels.unsqueeze(0)
    other = ~same
    if ref_labels is labels:
        same.fill_diagonal_(False)
    return same, other


class MaskedPairs:
    """Gives a loss on the matrix of all pairs its masks as bool, without lists of indices where no miner gave any.

    A batch with a single pair counts; upstream returns 0 when no list of pairs is longer than one.
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
        this: Any = self
        common_functions.labels_or_indices_tuple_required(labels, indices_tuple)
        if indices_tuple is None:
            assert labels is not None and ref_labels is not None
            positive, negative = pair_masks(labels, ref_labels)
            pairs = bool(positive.any()) or bool(negative.any())
        else:
            a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
            positive = torch.zeros(len(embeddings), len(ref_emb), dtype=torch.bool, device=embeddings.device)
            negative = torch.zeros_like(positive)
            positive[a1, p] = True
            negative[a2, n] = True
            pairs = bool(len(a1)) or bool(len(a2))
            this._assert_either_pos_or_neg(positive, negative)
        if not pairs:
            return this.zero_losses()
        return this._compute_loss(this.distance(embeddings, ref_emb), positive, negative)


def _lse(values: Tensor, mask: Tensor) -> Tensor:
    """Return log Σ exp of each row's values in the mask (N,); the lowest finite number where there are none."""
    lowest = torch.finfo(values.dtype).min
    return torch.logsumexp(values.masked_fill(~mask, lowest), dim=1)


class MultiSimilarityLoss(PreciseLoss, MaskedPairs, losses.MultiSimilarityLoss):
    """Upstream's, by `MaskedPairs`."""

    def _compute_loss(self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor) -> Any:
        total: Any = 0
        for rate, exponent, mask in (
            (self.alpha, self.distance.margin(mat, self.base), pos_mask),
            (self.beta, self.distance.margin(self.base, mat), neg_mask),
        ):
            sums = _lse(rate * exponent, mask)
            some = torch.logaddexp(sums, torch.zeros_like(sums)) / rate  # log(1 + Σ exp)
            total = total + some.masked_fill(~mask.any(1), 0)
        indices = common_functions.torch_arange_from_size(mat)
        return {"loss": {"losses": total.unsqueeze(1), "indices": indices, "reduction_type": "element"}}


class CircleLoss(PreciseLoss, MaskedPairs, losses.CircleLoss):
    """Upstream's, by `MaskedPairs`."""

    def _compute_loss(self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor) -> Any:
        still = mat.detach()
        pull = -self.gamma * torch.relu(self.op - still) * (mat - self.delta_p)
        push = self.gamma * torch.relu(still - self.on) * (mat - self.delta_n)
        loss = F.softplus(_lse(pull, pos_mask) + _lse(push, neg_mask))
        loss = loss.masked_fill(~(pos_mask.any(1) & neg_mask.any(1)), 0)
        indices = common_functions.torch_arange_from_size(mat)
        return {"loss": {"losses": loss.unsqueeze(1), "indices": indices, "reduction_type": "element"}}


class MultiSimilarityMiner(PreciseMiner, miners.MultiSimilarityMiner):
    """Upstream's pairs by each row's extremes, where upstream sorts all rows; they come in the order of their columns."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.Miner`."""
        mat = self.distance(embeddings, ref_emb)
        positive, negative = pair_masks(labels, ref_labels)
        if embeddings is ref_emb:
            positive.fill_diagonal_(False)
            negative.fill_diagonal_(False)
        near = -mat if self.distance.is_inverted else mat  # smaller is closer
        highest = torch.finfo(mat.dtype).max
        farthest = near.masked_fill(~positive, -highest).amax(1, keepdim=True)
        nearest = near.masked_fill(~negative, highest).amin(1, keepdim=True)
        a1, p = torch.where(positive & (near + self.epsilon > nearest))
        a2, n = torch.where(negative & (near - self.epsilon < farthest))
        return a1, p, a2, n


class Whole:
    """Lets a loss of all triplets be measured and reduced as a whole; `compute_loss` still gives each triplet's."""

    def measured(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the loss, a scalar: upstream's steps, with `whole` in the place of `compute_loss` where it can."""
        this: Any = self
        common_functions.check_shapes(embeddings, labels)
        parts = None
        if labels is not None and indices_tuple is None and this.triplets_per_anchor == "all":
            classes = common_functions.to_device(labels, embeddings)
            reference, theirs = common_functions.set_ref_emb(embeddings, classes, ref_emb, ref_labels)
            parts = this.whole(embeddings, classes, reference, theirs)
        if parts is None:
            return super().measured(embeddings, labels, indices_tuple, ref_emb, ref_labels)  # type: ignore[misc]
        this.reset_stats()
        this.add_embedding_regularization_to_loss_dict(parts, embeddings)
        return this.reducer(parts, embeddings, classes)

    def reducer_of(self, name: str) -> Any:
        """Return the reducer of one part of the loss."""
        chosen: Any = self.reducer  # type: ignore[attr-defined]
        if type(chosen) is not reducers.MultipleReducers:
            return chosen
        reducer: Any = dict(chosen.reducers).get(name, chosen.default_reducer)
        return reducer


def _bounds(reducer: Any) -> tuple[float | None, float | None, bool] | None:
    """Return between which two losses a reducer counts, and whether it takes their mean (or sum); None if it does something else."""
    if reducer.collect_stats:
        return None
    if type(reducer) in (reducers.AvgNonZeroReducer, reducers.ThresholdReducer):
        return reducer.low, reducer.high, True
    if type(reducer) in (reducers.MeanReducer, reducers.SumReducer):
        return None, None, type(reducer) is reducers.MeanReducer
    return None


class TripletMarginLoss(Whole, corrected_pairs.TripletMarginLoss):
    """The corrected one, which measures all triplets in blocks of masked rows and keeps none of them."""

    def whole(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return the loss of all triplets by name, reduced; None where it has to be made of single triplets."""
        bounds = _bounds(self.reducer_of("loss"))
        if self.swap or self.smooth_loss or bounds is None:
            return None
        low, high, mean = bounds
        positive, negative = pair_masks(labels, ref_labels)
        if not bool((positive.any(1) & negative.any(1)).any()):
            return self.zero_losses()
        mat = self.distance(embeddings, ref_emb)
        near = -mat if self.distance.is_inverted else mat  # smaller is closer
        total, counted = _AllTriplets.apply(near, positive, negative, self.margin, low, high)
        return reduced((total / counted.clamp(min=1) if mean else total).to(mat.dtype))


class _AllTriplets(torch.autograd.Function):
    """The sum of max(0, d(a, p) − d(a, n) + margin) of all triplets, and how many are counted."""

    @staticmethod
    def forward(
        ctx: Any,
        near: Tensor,
        positive: Tensor,
        negative: Tensor,
        margin: float,
        low: float | None,
        high: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum (float64) of the losses above `low` and below `high`, and their number.

        Args:
            ctx: keeps the sum's gradient, a matrix.
            near: (N, M) distances, smaller is closer.
            positive: (N, M) which pairs are positive.
            negative: (N, M) which pairs are negative.
            margin: added to each difference.
            low: losses up to this are left out; None leaves out none.
            high: losses from this are left out; None leaves out none.
        """
        far = near.masked_fill(~negative, torch.inf)
        anchor, other = torch.where(positive)
        limit = near[anchor, other] + margin
        slope = torch.zeros_like(near)
        total, counted = (
            near.new_zeros((), dtype=torch.float64),
            torch.zeros((), dtype=torch.int64, device=near.device),
        )
        step = max(1, _ENTRIES // near.shape[1])
        for start in range(0, len(anchor), step):
            part = slice(start, start + step)
            rows = anchor[part]
            loss = (limit[part, None] - far[rows]).relu_()
            kept = negative[rows] if low is None or low < 0 else loss > low
            if low is not None and low < 0:
                kept = kept & (loss > low)
            if high is not None:
                kept = kept & (loss < high)
            counted += kept.sum()
            if low is not None or high is not None:
                loss *= kept
            total += loss.sum(dtype=torch.float64)
            share = (loss > 0).to(near.dtype)
            slope[rows, other[part]] += share.sum(1)
            slope.index_add_(0, rows, share, alpha=-1)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(counted)
        return total, counted

    @staticmethod
    def backward(ctx: Any, total: Tensor, counted: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the distances; it is constant wherever the loss is differentiable."""
        (slope,) = ctx.saved_tensors
        return total.to(slope.dtype) * slope, None, None, None, None, None


class MarginLoss(Whole, PreciseLoss, losses.MarginLoss):
    """Upstream's, which adds up all triplets by their pairs: a pair's loss counts once for each triplet that it is in."""

    def whole(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return the loss of all triplets by name, reduced; None where it has to be made of single triplets."""
        if not isinstance(self.reducer_of("margin_loss"), reducers.DivisorReducer):
            return None
        positive, negative = pair_masks(labels, ref_labels)
        positives, negatives = positive.sum(1), negative.sum(1)
        triplets = positives * negatives
        if not bool(triplets.any()):
            return self.zero_losses()
        beta = common_functions.to_device(self.beta, device=embeddings.device, dtype=embeddings.dtype)
        each = beta if len(beta) == 1 else beta[labels].unsqueeze(1)
        mat = self.distance(embeddings, ref_emb)
        pull = F.relu(self.distance.margin(mat, each) + self.margin).masked_fill(~positive, 0)
        push = F.relu(self.distance.margin(each, mat) + self.margin).masked_fill(~negative, 0)
        divisor = ((pull > 0).sum(1) * negatives + (push > 0).sum(1) * positives).sum()
        total = (pull.sum(1) * negatives + push.sum(1) * positives).sum()
        if self.learn_beta and len(beta) > 1:
            penalty = _over((each.squeeze(1) * triplets).sum() * self.nu, divisor)
        else:
            penalty = self.compute_reg_loss(beta, None, divisor)
        return {"margin_loss": _over(total, divisor), "beta_reg_loss": penalty}


def _over(total: Tensor, divisor: Tensor) -> dict[str, Any]:
    """Return a quotient, 0 where the divisor is 0, as upstream's reducers read it."""
    value = torch.where(divisor > 0, total / divisor.clamp(min=1), total * 0)
    return {"losses": value, "indices": None, "reduction_type": "already_reduced"}
