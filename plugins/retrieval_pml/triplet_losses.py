"""Losses of triplets, two of which can add up all triplets without listing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat
from pytorch_metric_learning import losses, reducers
from pytorch_metric_learning.utils import loss_and_miner_utils
from retrieval.helpers import Rows, losses_of, reduced_loss
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.pair_sums import (
    Pairs,
    column_of_anchors,
    compared,
    excesses_over_others,
    labelled_pairs,
    loss_of_sum,
    matrix_of,
    nearness,
    reducer_of,
)
from retrieval_pml.upstream_factories import FIXED, Share, offer

TRIPLETS = 2**18
"""Number of triplets that are in memory at a time."""


class TripletMarginLoss(losses.TripletMarginLoss):
    """Triplet loss: an anchor's positive should be nearer than its negative by a margin.

    Schroff, Kalenichenko & Philbin, FaceNet, CVPR 2015; Weinberger & Saul, JMLR 2009. `swap` is
    from Balntas et al., BMVC 2016. With a reference set, pytorch-metric-learning's `swap` reads
    distances of the wrong items; this one reads the right ones.

    Args:
        margin: distance by which the negative should be farther than the positive.
        swap: whether to measure the negative's distance from the positive instead of the anchor,
            if the positive is nearer.
        smooth_loss: whether the loss is log(1 + exp(violation)) instead of max(0, violation).
        triplets_per_anchor: number of random triplets per anchor, or "all". If there is a miner,
            its triplets are used instead.
        reducer: reduces the triplets' losses to one number; by default the mean of those above 0.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name; where possible, add up all triplets without listing them."""
        mat = matrix_of(self.distance, embeddings, ref_emb)
        reducer = reducer_of(self, "loss")
        # Only these types, no subclasses: others may need the loss of each triplet.
        if indices_tuple is None and self.rows_by_labels and type(reducer) in _SUMMABLE:
            return self._all_triplets(mat, labels, ref_labels, reducer)
        triplets = loss_and_miner_utils.convert_to_triplets(
            indices_tuple, labels, ref_labels, t_per_anchor=self.triplets_per_anchor
        )
        anchor, positive, negative = triplets
        if len(anchor) == 0:
            return self.zero_losses()
        to_negative = mat[anchor, negative]
        if self.swap:
            if ref_emb is embeddings:
                among = mat
            else:
                among = self.distance(ref_emb)
            to_negative = self.distance.smallest_dist(to_negative, among[positive, negative])
        violation = self.distance.margin(mat[anchor, positive], to_negative) + self.margin
        if self.smooth_loss:
            loss = F.softplus(violation)
        else:
            loss = F.relu(violation)
        return losses_of(loss, triplets, "triplet")

    @property
    def rows_by_labels(self) -> bool:
        """Whether the loss adds up all triplets from the labels alone, without their indices."""
        return not (self.swap or self.smooth_loss) and self.triplets_per_anchor == "all"

    @property
    def rows(self) -> Rows | None:
        """How the loss can be divided among processes: by anchors, unless triplets are drawn."""
        if self.triplets_per_anchor == "all":
            return "anchors"
        return None

    def _all_triplets(self, mat: Tensor, labels: Tensor, ref_labels: Tensor, reducer: Any) -> Any:
        pairs = labelled_pairs(labels, ref_labels, column_of_anchors(labels, ref_labels))
        negative = labels.unsqueeze(1) != ref_labels.unsqueeze(0)
        if not bool(negative.any(1)[pairs.anchors].any()):
            return self.zero_losses()
        if self.distance.is_inverted:
            distances = -mat
        else:
            distances = mat
        low = getattr(reducer, "low", None)
        high = getattr(reducer, "high", None)
        total, count = _AllTriplets.apply(distances, pairs, negative, self.margin, low, high)
        return loss_of_sum(self, "loss", total.to(mat.dtype), count)


_SUMMABLE = (
    reducers.AvgNonZeroReducer,
    reducers.ThresholdReducer,
    reducers.MeanReducer,
    reducers.SumReducer,
)
"""Reducers that need only the sum and the number of the losses between their bounds, if any."""


class _AllTriplets(torch.autograd.Function):
    """Sum and number of the triplets' losses max(0, d(a, p) − d(a, n) + margin) between bounds."""

    @staticmethod
    def forward(
        ctx: Any,
        distances: Tensor,
        pairs: Pairs,
        negative: Tensor,
        margin: float,
        low: float | None,
        high: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum (float64) of the losses above `low` and below `high`, and their number.

        `distances` (N, M) may be negated similarities. A bound of None excludes no triplet.
        """
        # An infinite distance makes the loss of what is no negative 0.
        to_negative = distances.masked_fill(~negative, torch.inf)
        anchor = pairs.anchors
        other = pairs.positives
        limit = distances[anchor, other] + margin
        # The gradient is the number of triplets with a loss in which a distance occurs, so one
        # matrix (N, M) replaces the triplets in the backward pass.
        slope = torch.zeros_like(distances)
        # A batch may have millions of triplets: a float32 sum would lose digits.
        total = distances.new_zeros((), dtype=torch.float64)
        counted = torch.zeros((), dtype=torch.int64, device=distances.device)
        step = max(1, TRIPLETS // distances.shape[1])
        for start in range(0, len(anchor), step):
            part = slice(start, start + step)
            rows = anchor[part]
            loss = (limit[part, None] - to_negative[rows]).relu_()
            kept = negative[rows]
            if low is not None:
                kept = kept & (loss > low)
            if high is not None:
                kept = kept & (loss < high)
            counted += kept.sum()
            # Without bounds, what is not counted is 0 already.
            if low is not None or high is not None:
                loss *= kept
            total += loss.sum(dtype=torch.float64)
            active = (loss > 0).to(distances.dtype)
            slope[rows, other[part]] += active.sum(1)
            slope.index_add_(0, rows, active, alpha=-1)
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(counted)
        return total, counted

    @staticmethod
    def backward(ctx: Any, of_total: Tensor, of_counted: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to `distances`, from the slopes that `forward` saved."""
        (slope,) = ctx.saved_tensors
        return of_total.to(slope.dtype) * slope, None, None, None, None, None


class MarginLoss(losses.MarginLoss):
    """Margin loss: positives below and negatives above a boundary distance that may be learned.

    Wu, Manmatha, Smola & Krähenbühl, Sampling Matters in Deep Embedding Learning, ICCV 2017; for
    use with the miner `pml.distance_weighted`. With all triplets and the default reducer,
    `pml.divisor`, memory grows with the number of pairs, not of triplets.

    Args:
        margin: distance that pairs should have from the boundary.
        nu: weight of the penalty on a learned boundary.
        beta: the boundary, or its initial value if it is learned.
        triplets_per_anchor: number of random triplets per anchor, or "all". If there is a miner,
            its triplets are used instead.
        learn_beta: whether the boundary is learned.
        per_class: whether each training class has its own boundary.
        reducer: reduces the losses of the triplets to one number; by default their sum divided by
            the number of pairs with a loss above 0. A pair counts once for each of its triplets.
    """

    def __init__(
        self, per_class: bool = False, num_classes: int | None = None, **parameters: Any
    ) -> None:
        if per_class and not num_classes:
            raise ValueError(
                "per_class needs the number of training classes, which is not known here"
            )
        super().__init__(num_classes=num_classes if per_class else None, **parameters)

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name; where possible, add up all triplets without listing them."""
        by_name = dict(self.reducer.reducers)
        divided = all(
            isinstance(by_name.get(name, self.reducer.default_reducer), reducers.DivisorReducer)
            for name in self._sub_loss_names()
        )
        if indices_tuple is not None or self.triplets_per_anchor != "all" or not divided:
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        pairs = labelled_pairs(labels, ref_labels, column_of_anchors(labels, ref_labels))
        positives = torch.bincount(pairs.anchors, minlength=len(labels))
        equal = torch.bincount(pairs.not_negative[0], minlength=len(labels))
        negatives = len(ref_labels) - equal
        triplets = positives * negatives
        if not bool(triplets.any()):
            return self.zero_losses()
        mat = compared(self.distance, embeddings, ref_emb)
        beta = self.beta.to(embeddings)
        # Without boundaries per class, each item reads the single one in row 0.
        edge = beta[labels if len(beta) > 1 else labels * 0]
        slope = nearness(self.distance, 1)
        push, values, pushed = excesses_over_others(
            mat,
            lambda mat, rows: (
                self.distance.margin(edge.detach()[rows, None], mat) + self.margin,
                slope,
            ),
            pairs,
        )
        # The sums take the boundaries for constants.
        push = push - slope * (edge - edge.detach()) * pushed
        pull = F.relu(self.distance.margin(values, edge[pairs.anchors]) + self.margin)
        # A pair counts once for each of its triplets.
        repeats = negatives[pairs.anchors]
        divisor = ((pull > 0) * repeats).sum() + (pushed * positives).sum()
        # If no pair has a loss, the result is 0 and not 0 / 0.
        scale = (divisor > 0) / divisor.clamp(min=1)
        penalty = self.compute_reg_loss(beta, None, divisor)
        if self.learn_beta and len(beta) > 1:
            penalty = reduced_loss((edge * triplets).sum() * self.nu * scale)["loss"]
        total = ((pull * repeats).sum() + (push * positives).sum()) * scale
        return {**reduced_loss(total, "margin_loss"), "beta_reg_loss": penalty}


class AngularLoss(losses.AngularLoss):
    """Angular loss: bounds the angle at the negative in the triangle of a triplet.

    Wang, Zhou, Wen, Liu & Lin, Deep Metric Learning with Angular Loss, ICCV 2017, equation 8. All
    embeddings are scaled to unit length, as the equation assumes; pytorch-metric-learning does not
    scale the negatives.

    Args:
        alpha: the bound, in degrees.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name, in the format of pytorch-metric-learning's reducers."""
        reference = self.distance.normalize(ref_emb)
        return super().compute_loss(embeddings, labels, indices_tuple, reference, ref_labels)


class DynamicSoftMarginLoss(losses.DynamicSoftMarginLoss):
    """Triplet loss without a margin: the weight of a triplet is the share of easier triplets.

    Zhang & Rusinkiewicz, Learning Local Descriptors with a CDF-Based Dynamic Soft Margin, ICCV
    2019. The histogram of d(a, p) − d(a, n) is saved with the run. pytorch-metric-learning does not
    save it, and differentiates through it, which fails on the second batch. Without a miner, all
    triplets are listed (1 GB for 1,024 items with 8 per class).

    Args:
        min_val: smallest difference of the histogram; −2 for unit vectors.
        num_bins: number of bins that divide the range from min_val to −min_val.
        momentum: weight of the batch's histogram against the running histogram.
    """

    hist_: Tensor

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        histogram = self.hist_
        # A buffer is saved with the run; upstream's attribute of this name is in its way.
        del self.hist_
        self.register_buffer("hist_", histogram)

    def _bins(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Return each difference's bin (T,), and the share (T,) of it that the next bin gets."""
        place = ((data.detach() - self.min_val) / self.delta).clamp(0, self.num_bins - 1)
        return place.floor().long(), place.frac()

    def update_histogram(self, data: Tensor) -> None:
        """Mix the histogram of this batch's differences (T,) into the running one."""
        low, upper_share = self._bins(data)
        # Differences in the last bin stay there.
        high = (low + 1).clamp(max=self.num_bins - 1)
        batch = torch.zeros_like(self.hist_).index_add(0, low, 1 - upper_share)
        batch = batch.index_add(0, high, upper_share)
        # The first batch replaces the initial zeros.
        if bool(self.hist_.any()):
            momentum = self.momentum
        else:
            momentum = 1.0
        mixed = (1 - momentum) * self.hist_ + momentum * batch
        self.hist_ = mixed / mixed.sum()

    def weigh_loss(self, data: Tensor) -> Tensor:
        """Multiply each difference (T,) by the histogram's share of differences up to its bin."""
        return torch.cumsum(self.hist_, 0)[self._bins(data)[0]] * data


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "triplet_margin": offer(TripletMarginLoss),
    "margin": offer(MarginLoss, nu=NonNegativeFloat, beta=float),
    "angular": offer(AngularLoss, without=FIXED, alpha=Annotated[float, Field(gt=0, lt=90)]),
    "dynamic_soft_margin": offer(
        DynamicSoftMarginLoss,
        without=("distance", "reducer"),
        min_val=Annotated[float, Field(lt=0)],
        momentum=Share,
    ),
}
