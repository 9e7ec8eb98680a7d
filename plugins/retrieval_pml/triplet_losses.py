"""Losses of triplets, without lists of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from pytorch_metric_learning import losses, reducers
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.plugin import Rows, Sums, summed
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.adapters import (
    REGULARIZED,
    Count,
    Distance,
    NonNegative,
    PerAnchor,
    PreciseLoss,
    Reducer,
    Regularizer,
    Share,
    Whole,
    bounds,
    forwards,
    numbers,
    reduced,
)
from retrieval_pml.pair_matrix import Pairs, blocks, by_rows, products, similarities

TRIPLETS = 2**18
"""Triplets that are in memory at a time."""
Angle = Annotated[float, Field(gt=0, lt=90)]


class TripletMarginLoss(Whole, PreciseLoss, losses.TripletMarginLoss):
    """Upstream's, in blocks of masked rows; triplets are listed where something needs single ones.

    `swap` compares positive and negative within the reference set that holds both. Upstream reads
    their distance from the matrix of *batch* × reference with an index into the reference.
    """

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
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
        return numbers(loss, triplets, "triplet")

    @property
    def rows_by_labels(self) -> bool:
        """Whether `whole` measures them, which needs no indices."""
        return not (self.swap or self.smooth_loss)

    @property
    def rows(self) -> Rows | None:
        """Anchors' own parts, unless triplets are drawn."""
        return "anchors" if self.triplets_per_anchor == "all" else None

    def whole(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return the loss of all triplets by name, reduced; None if it needs single triplets."""
        limits = bounds(self.reducer_of("loss"))
        if self.swap or self.smooth_loss or limits is None:
            return None
        low, high, _ = limits
        positive, negative = Pairs(labels, ref_labels).of(slice(None))
        if not bool((positive.any(1) & negative.any(1)).any()):
            return self.zero_losses()
        mat = similarities(self.distance, embeddings, ref_emb)
        near = -mat if self.distance.is_inverted else mat  # smaller is closer
        return self._reduced(
            _AllTriplets.apply(near, positive, negative, self.margin, low, high), mat
        )

    def whole_of(
        self,
        indices_tuple: Any,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> Any:
        """Return the loss of a miner's triplets by name, reduced; None if it needs single ones."""
        limits = bounds(self.reducer_of("loss"))
        if self.swap or self.smooth_loss or limits is None:
            return None
        triplets = loss_and_miner_utils.convert_to_triplets(indices_tuple, labels, ref_labels)
        if len(triplets[0]) == 0:
            return self.zero_losses()
        mat = similarities(self.distance, embeddings, ref_emb)
        near = -mat if self.distance.is_inverted else mat
        return self._reduced(_ListedTriplets.apply(near, triplets, self.margin, *limits[:2]), mat)

    def _reduced(self, total_and_count: tuple[Tensor, Tensor], mat: Tensor) -> Any:
        total, counted = total_and_count
        if isinstance(self.reducer, Sums):
            return {"loss": summed(total.to(mat.dtype), counted)}
        limits = bounds(self.reducer_of("loss"))
        assert limits is not None
        return reduced((total / counted.clamp(min=1) if limits[2] else total).to(mat.dtype))


class _ListedTriplets(torch.autograd.Function):
    """The sum of listed triplets' max(0, d(a, p) − d(a, n) + margin), and their count."""

    @staticmethod
    def forward(
        ctx: Any,
        near: Tensor,
        triplets: tuple[Tensor, Tensor, Tensor],
        margin: float,
        low: float | None,
        high: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum (float64) of the losses above `low` and below `high`, and their number;
        see `_AllTriplets`.
        """
        every = near.reshape(-1)
        slope = torch.zeros_like(every)
        total = near.new_zeros((), dtype=torch.float64)
        counted = torch.zeros((), dtype=torch.int64, device=near.device)
        for start in range(0, len(triplets[0]), TRIPLETS):
            a, p, n = (column[start : start + TRIPLETS] for column in triplets)
            row = a * near.shape[1]
            p, n = row + p, row + n
            loss = every.index_select(0, p).sub_(every.index_select(0, n)).add_(margin).relu_()
            kept = torch.ones_like(loss, dtype=torch.bool) if low is None else loss > low
            if high is not None:
                kept &= loss < high
            counted += kept.sum()
            loss *= kept
            total += loss.sum(dtype=torch.float64)
            share = (loss > 0).to(near.dtype)
            slope.index_add_(0, p, share).index_add_(0, n, share, alpha=-1)
        ctx.save_for_backward(slope.view(near.shape))
        ctx.mark_non_differentiable(counted)
        return total, counted

    @staticmethod
    def backward(ctx: Any, total: Tensor, counted: Tensor) -> tuple[Tensor | None, ...]:
        """Return the distances' gradient, constant wherever the loss is differentiable."""
        (slope,) = ctx.saved_tensors
        return total.to(slope.dtype) * slope, None, None, None, None


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

        `near` (N, M) are distances, smaller is closer; None as a bound leaves out none.
        """
        far = near.masked_fill(~negative, torch.inf)
        anchor, other = torch.where(positive)
        limit = near[anchor, other] + margin
        slope = torch.zeros_like(near)
        total, counted = (
            near.new_zeros((), dtype=torch.float64),
            torch.zeros((), dtype=torch.int64, device=near.device),
        )
        step = max(1, TRIPLETS // near.shape[1])
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
        """Return the distances' gradient, constant wherever the loss is differentiable."""
        (slope,) = ctx.saved_tensors
        return total.to(slope.dtype) * slope, None, None, None, None, None


@forwards(TripletMarginLoss, REGULARIZED)
def triplet_margin(
    margin: float = 0.05,
    swap: bool = False,
    smooth_loss: bool = False,
    triplets_per_anchor: PerAnchor = "all",
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.TripletMarginLoss:
    """Triplet loss: an anchor's positive nearer than its negative, by a margin.

    Schroff, Kalenichenko & Philbin, FaceNet, CVPR 2015; Weinberger & Saul, JMLR 2009. `swap`
    follows Balntas et al., BMVC 2016, and works with a reference set, where upstream mixes up
    indices.

    Args:
        margin: by how much, in the distance's unit.
        swap: compare the positive with the negative instead of the anchor where that violates the
            margin more.
        smooth_loss: log(1 + exp(violation)) instead of max(0, violation).
        triplets_per_anchor: how many random triplets an anchor gets, or all; a miner's take
            precedence.
        reducer: reduces the triplets' losses to one number; by default the mean of those above 0.
    """


class MarginLoss(Whole, PreciseLoss, losses.MarginLoss):
    """Upstream's over all triplets, by their pairs: each counts once for each of its triplets."""

    def whole(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return the loss of all triplets by name, reduced; None if it needs single triplets."""
        if not isinstance(self.reducer_of("margin_loss"), reducers.DivisorReducer):
            return None
        pairs = Pairs(labels, ref_labels)
        positives, negatives = pairs.counts()
        triplets = positives * negatives
        if not bool(triplets.any()):
            return self.zero_losses()
        beta = common_functions.to_device(
            self.beta, device=embeddings.device, dtype=embeddings.dtype
        )
        bounds_of_rows = beta.expand(len(embeddings)) if len(beta) == 1 else beta[labels]
        mat = similarities(self.distance, embeddings, ref_emb)
        row_losses, counts = by_rows(mat, pairs, self._plain, bounds_of_rows)
        divisor, total = counts.sum(), row_losses.sum()
        if self.learn_beta and len(beta) > 1:
            penalty = _over((bounds_of_rows * triplets).sum() * self.nu, divisor)
        else:
            penalty = self.compute_reg_loss(beta, None, divisor)
        return {"margin_loss": _over(total, divisor), "beta_reg_loss": penalty}

    def _plain(
        self, mat: Tensor, positive: Tensor, negative: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        positives, negatives = positive.sum(1), negative.sum(1)
        row, column = torch.where(positive)
        pull = F.relu(self.distance.margin(mat[row, column], beta[row]) + self.margin)
        push = F.relu(self.distance.margin(beta.unsqueeze(1), mat) + self.margin) * negative
        pulled = torch.zeros_like(beta).index_add(0, row, pull)
        counted = torch.zeros_like(positives).index_add(0, row, (pull > 0).long())
        loss = pulled * negatives + push.sum(1) * positives
        return loss, counted * negatives + (push > 0).sum(1) * positives


def _over(total: Tensor, divisor: Tensor) -> dict[str, Any]:
    """Return a quotient, 0 where the divisor is 0, as upstream's reducers read it."""
    value = torch.where(divisor > 0, total / divisor.clamp(min=1), total * 0)
    return reduced(value)["loss"]


def margin(
    margin: float = 0.2,
    nu: NonNegative = 0.0,
    beta: float = 1.2,
    triplets_per_anchor: PerAnchor = "all",
    learn_beta: bool = False,
    per_class: bool = False,
    classes: int | None = None,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.MarginLoss:
    """Margin loss: positives below, negatives above a boundary distance that may be learned.

    Wu, Manmatha, Smola & Krähenbühl, Sampling Matters in Deep Embedding Learning, ICCV 2017; made
    for the miner `pml.distance_weighted`.

    Args:
        margin: how far from the boundary pairs should be, in the distance's unit.
        nu: the weight of the penalty on a learned boundary.
        beta: the boundary, or where it begins.
        triplets_per_anchor: how many random triplets an anchor gets, or all; a miner's take
            precedence.
        learn_beta: whether the boundary is learned.
        per_class: one boundary for each training class instead of one for all.
        distance: how two embeddings are compared; Euclidean on unit vectors by default.
        reducer: reduces the triplets' losses to one number; by default their sum over the number of
            pairs above 0.
        embedding_regularizer: a penalty on the embeddings, added to the loss.
        embedding_reg_weight: the factor of that penalty.
    """
    if per_class and not classes:
        raise ValueError("per_class needs the number of training classes, which is not known here")
    loss = MarginLoss(
        margin=margin,
        nu=nu,
        beta=beta,
        triplets_per_anchor=triplets_per_anchor,
        learn_beta=learn_beta,
        num_classes=classes if per_class else None,
        distance=distance,
        reducer=reducer,
        embedding_regularizer=embedding_regularizer,
        embedding_reg_weight=embedding_reg_weight,
    )
    if per_class:
        loss.known_classes = classes
    return loss


class AngularLoss(PreciseLoss, losses.AngularLoss):
    """Upstream's in a few N × N, with negatives normalised as anchors and positives are.

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
        """Return the losses by name, in the format of upstream's reducers."""
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
        return numbers(loss, (anchor, positive), "pos_pair")


class _Angles(torch.autograd.Function):
    """The angular loss of pairs: log(1 + Σ exp(4 t (xₐ + xₚ)ᵀxₙ − 2 (1 + t) xₐᵀxₚ))."""

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

        `near` (N, M) are cosines of items and others, `among` (M, M) of others; `square` is t.
        """
        ctx.save_for_backward(near, among, anchor, positive)
        ctx.constants = labels, square
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
        """Return some pairs' losses (K,) and exponents (K, M), −∞ for no negative."""
        own = 2 * (1 + square) * near[anchor, positive]
        exponents = (near[anchor] + among[positive]) * (4 * square) - own.unsqueeze(1)
        same = labels[0][anchor].unsqueeze(1) == labels[1].unsqueeze(0)
        exponents = exponents.masked_fill(same, -torch.inf)
        some = torch.cat([exponents, torch.zeros_like(own).unsqueeze(1)], 1)
        return torch.logsumexp(some, 1), exponents

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        near, among, anchor, positive = ctx.saved_tensors
        labels, square = ctx.constants
        if torch.is_grad_enabled():  # the gradient will be differentiated
            loss, _ = _Angles.part(near, among, anchor, positive, labels, square)
            gradients = torch.autograd.grad(
                loss, (near, among), gradient, create_graph=True, materialize_grads=True
            )
            return *gradients, None, None, None, None
        slopes, slopes_among = torch.zeros_like(near), torch.zeros_like(among)
        for k in blocks(len(anchor), len(among)):
            loss, weights = _Angles.part(near, among, anchor[k], positive[k], labels, square)
            weights = weights.sub_(loss.unsqueeze(1)).exp_().mul_(gradient[k].unsqueeze(1))
            own = weights.sum(1) * (-2 * (1 + square))
            weights *= 4 * square
            slopes.index_add_(0, anchor[k], weights)
            slopes_among.index_add_(0, positive[k], weights)
            slopes.index_put_((anchor[k], positive[k]), own, accumulate=True)
        return slopes, slopes_among, None, None, None, None


@forwards(AngularLoss, REGULARIZED)
def angular(
    alpha: Angle = 40.0,
    reducer: Reducer = None,
) -> losses.AngularLoss:
    """Angular loss: bounds the angle at the negative in the triangle of a triplet.

    Wang, Zhou, Wen, Liu & Lin, Deep Metric Learning with Angular Loss, ICCV 2017, equation 8. All
    three are normalised, as the equation assumes; upstream leaves the negatives at their own
    length.

    Args:
        alpha: the bound, in degrees.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """


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
        """Return the losses by name, in the format of upstream's reducers."""
        if labels is None or ref_labels is None or indices_tuple is not None:
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.hist_ = self.hist_.to(embeddings)
        pairs = Pairs(labels, ref_labels)
        positives, negatives = pairs.counts()
        triplets = int((positives * negatives).sum())
        if triplets == 0:
            return self.zero_losses()
        mat = similarities(self.distance, embeddings, ref_emb)
        parts = blocks(len(mat), mat.shape[1], repeats=positives)
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
        weighed = self.weigh_loss(mat[row, column].unsqueeze(1) - mat[row]) * negative[row]
        return mat.new_zeros(len(mat)).index_add(0, row, weighed.sum(1))

    def _counted(self, data: Tensor) -> Tensor:
        """Return the histogram of differences (T,)."""
        low, upper_share = self._bins(data)
        high = (low + 1).clamp(max=self.num_bins - 1)
        histogram = torch.zeros_like(self.hist_).index_add(0, low, 1 - upper_share)
        return histogram.index_add(0, high, upper_share)

    def update_histogram(self, data: Tensor) -> None:
        """Mix the histogram of this batch's differences (T,) into the running one."""
        self._mix(self._counted(data))

    def _mix(self, batch: Tensor) -> None:
        momentum = self.momentum if bool(self.hist_.any()) else 1.0
        mixed = (1 - momentum) * self.hist_ + momentum * batch
        self.hist_ = mixed / mixed.sum()

    def weigh_loss(self, data: Tensor) -> Tensor:
        """Return each difference times the share of differences up to it, (T,)."""
        return torch.cumsum(self.hist_, 0)[self._bins(data)[0]] * data


@forwards(DynamicSoftMarginLoss, REGULARIZED)
def dynamic_soft_margin(
    min_val: Annotated[float, Field(lt=0)] = -2.0,
    num_bins: Count = 10,
    momentum: Share = 0.01,
) -> losses.DynamicSoftMarginLoss:
    """Triplet loss without a margin: each triplet weighs as the share of easier triplets.

    Zhang & Rusinkiewicz, Learning Local Descriptors with a CDF-Based Dynamic Soft Margin, ICCV
    2019. The histogram of d(a, p) − d(a, n) is state: it is saved with the run. Upstream keeps it
    out of the checkpoint, and differentiates through it, which fails on the second batch.

    Args:
        min_val: the smallest difference that counts; on unit vectors −2.
        num_bins: number of bins that divide the range from min_val to −min_val.
        momentum: the weight of the batch's histogram against the running one.
    """


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make for make in (triplet_margin, margin, angular, dynamic_soft_margin)
}
