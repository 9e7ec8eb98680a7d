"""Losses of all pairs or triplets on masked matrices: the same numbers as upstream's lists of
indices, in a few N × N.

Where a miner picks, where triplets are drawn, or where a reducer looks at single triplets,
upstream's own way is taken.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import losses, reducers
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.model.rows import Rows, Sums, first_row, summed
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml import corrected_triplets
from retrieval_pml.blocks import by_rows, lse, lse_of_few
from retrieval_pml.common import PreciseLoss, element, reduced
from retrieval_pml.fused import circle, multi_similarity
from retrieval_pml.matrices import similarities
from retrieval_pml.pairs import Pairs

_ENTRIES = 2**18
"""Triplets that are in memory at a time."""


class MaskedPairs:
    """Gives a loss of the matrix of all pairs its pairs as masks, without lists of indices where no
    miner gave any.

    A batch with a single pair counts; upstream returns 0 when no list of pairs is longer than one.
    """

    rows, rows_by_labels = "anchors", True

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
            pairs = Pairs(labels, ref_labels)
        else:
            pairs = Pairs.mined(indices_tuple, (len(embeddings), len(ref_emb)), labels, ref_labels)
        losses = this.of_rows(similarities(this.distance, embeddings, ref_emb), pairs)
        return element(losses)


class MultiSimilarityLoss(PreciseLoss, MaskedPairs, losses.MultiSimilarityLoss):
    """Upstream's, by `MaskedPairs`."""

    def of_rows(self, mat: Tensor, pairs: Pairs) -> Tensor:
        """Return the anchors' losses (N,)."""
        sign = 1 if self.distance.is_inverted else -1
        fused = multi_similarity(self.alpha, self.beta, self.base, sign)
        return by_rows(mat, pairs, self._plain, fused=fused)[0]

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        total: Any = 0
        for rate, exponent, mask in (
            (self.alpha, self.distance.margin(mat, self.base), positive),
            (self.beta, self.distance.margin(self.base, mat), negative),
        ):
            none = ~mask.any(1)
            sums = lse(rate * exponent, mask).masked_fill(none, 0)
            some = torch.logaddexp(sums, torch.zeros_like(sums)) / rate  # log(1 + Σ exp)
            total = total + some.masked_fill(none, 0)
        loss: Tensor = total
        return loss


class CircleLoss(PreciseLoss, MaskedPairs, losses.CircleLoss):
    """Upstream's, by `MaskedPairs`."""

    def of_rows(self, mat: Tensor, pairs: Pairs) -> Tensor:
        """Return the anchors' losses (N,)."""
        fused = circle(self.op, self.on, self.delta_p, self.delta_n, self.gamma)
        return by_rows(mat, pairs, self._plain, fused=fused)[0]

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        still = mat.detach()
        pull = -self.gamma * torch.relu(self.op - still) * (mat - self.delta_p)
        push = self.gamma * torch.relu(still - self.on) * (mat - self.delta_n)
        none = ~(positive.any(1) & negative.any(1))
        loss = F.softplus((lse(pull, positive) + lse(push, negative)).masked_fill(none, 0))
        return loss.masked_fill(none, 0)


class SupConLoss(PreciseLoss, MaskedPairs, losses.SupConLoss):
    """Upstream's, by `MaskedPairs`."""

    rows_mined = False

    def of_rows(self, mat: Tensor, pairs: Pairs) -> Tensor:
        """Return the anchors' losses (N,); all are 0 where a batch lacks pairs of one kind."""
        found, kinds = by_rows(mat, pairs, self._plain)
        if first_row() is None and not (bool((kinds & 1).any()) and bool((kinds & 2).any())):
            return found * 0
        return found

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        sign = 1 if self.distance.is_inverted else -1
        whole = lse(mat * (sign / self.temperature), positive | negative)
        row, column = torch.where(positive)
        apart = whole[row] - mat[row, column] * (sign / self.temperature)
        some = positive.any(1)
        loss = torch.zeros_like(whole).index_add(0, row, apart) / positive.sum(1).clamp(min=1)
        return loss, some + 2 * negative.any(1)


class GeneralizedLiftedStructureLoss(
    PreciseLoss, MaskedPairs, losses.GeneralizedLiftedStructureLoss
):
    """Upstream's, by `MaskedPairs`, except that an anchor without positives or without negatives
    costs 0.

    The sum of none is 0 and its logarithm −∞; upstream puts 0 in its place.
    """

    def of_rows(self, mat: Tensor, pairs: Pairs) -> Tensor:
        """Return the anchors' losses (N,)."""
        return by_rows(mat, pairs, self._plain)[0]

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        pull = lse_of_few(self.distance.margin(mat, self.pos_margin), positive)
        push = lse(self.distance.margin(self.neg_margin, mat), negative)
        return F.relu(pull + push).masked_fill(~(positive.any(1) & negative.any(1)), 0)


class Whole:
    """Lets a loss of all pairs or triplets be measured and reduced as a whole; `compute_loss` still
    gives each one's.
    """

    def measured(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the loss, a scalar: upstream's steps, with `whole` in the place of `compute_loss`
        where it can.
        """
        this: Any = self
        common_functions.check_shapes(embeddings, labels)
        parts, classes = None, labels
        if labels is not None:
            classes = common_functions.to_device(labels, embeddings)
            reference, theirs = common_functions.set_ref_emb(
                embeddings, classes, ref_emb, ref_labels
            )
            if indices_tuple is not None:
                parts = this.whole_of(indices_tuple, embeddings, classes, reference, theirs)
            elif getattr(this, "triplets_per_anchor", "all") == "all":
                parts = this.whole(embeddings, classes, reference, theirs)
        if parts is None:
            return super().measured(embeddings, labels, indices_tuple, ref_emb, ref_labels)  # type: ignore[misc]
        this.reset_stats()
        this.add_embedding_regularization_to_loss_dict(parts, embeddings)
        return this.reducer(parts, embeddings, classes)

    def whole_of(
        self,
        indices_tuple: Any,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor,
        ref_labels: Tensor,
    ) -> Any:
        """Return the loss of a miner's pairs or triplets by name, reduced; None where it has to be
        made of single ones.
        """
        return None

    def reducer_of(self, name: str) -> Any:
        """Return the reducer of one part of the loss."""
        chosen: Any = self.reducer  # type: ignore[attr-defined]
        chosen = chosen.inner if isinstance(chosen, Sums) else chosen
        if type(chosen) is not reducers.MultipleReducers:
            return chosen
        reducer: Any = dict(chosen.reducers).get(name, chosen.default_reducer)
        return reducer


def bounds(reducer: Any) -> tuple[float | None, float | None, bool] | None:
    """Return between which two losses a reducer counts, and whether it takes their mean (or sum);
    None if it does something else.
    """
    if reducer.collect_stats:
        return None
    if type(reducer) in (reducers.AvgNonZeroReducer, reducers.ThresholdReducer):
        return reducer.low, reducer.high, True
    if type(reducer) in (reducers.MeanReducer, reducers.SumReducer):
        return None, None, type(reducer) is reducers.MeanReducer
    return None


class TripletMarginLoss(Whole, corrected_triplets.TripletMarginLoss):
    """The corrected one, which measures all triplets in blocks of masked rows and keeps none of
    them.
    """

    @property
    def rows_by_labels(self) -> bool:
        """Whether `whole` measures them, which needs no indices."""
        return not (self.swap or self.smooth_loss)

    @property
    def rows(self) -> Rows | None:
        """Anchors' own parts, unless triplets are drawn."""
        return "anchors" if self.triplets_per_anchor == "all" else None

    def whole(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return the loss of all triplets by name, reduced; None where it has to be made of single
        triplets.
        """
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
        """Return the loss of a miner's triplets by name, reduced; None where it has to be made of
        single ones.
        """
        limits = bounds(self.reducer_of("loss"))
        if self.swap or self.smooth_loss or limits is None:
            return None
        triplets = loss_and_miner_utils.convert_to_triplets(indices_tuple, labels, ref_labels)
        if len(triplets[0]) == 0:
            return self.zero_losses()
        mat = similarities(self.distance, embeddings, ref_emb)
        near = -mat if self.distance.is_inverted else mat
        return self._reduced(_ListedTriplets.apply(near, triplets, self.margin, *limits[:2]), mat)

    def _reduced(self, found: tuple[Tensor, Tensor], mat: Tensor) -> Any:
        total, counted = found
        if isinstance(self.reducer, Sums):
            return {"loss": summed(total.to(mat.dtype), counted)}
        limits = bounds(self.reducer_of("loss"))
        assert limits is not None
        return reduced((total / counted.clamp(min=1) if limits[2] else total).to(mat.dtype))


class _ListedTriplets(torch.autograd.Function):
    """The sum of max(0, d(a, p) − d(a, n) + margin) of some triplets, and how many are counted:
    some triplets at a time.
    """

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
        for start in range(0, len(triplets[0]), _ENTRIES):
            a, p, n = (each[start : start + _ENTRIES] for each in triplets)
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
        """Return the gradient of the distances; it is constant wherever the loss is differentiable."""
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
    """Upstream's, which adds up all triplets by their pairs: a pair's loss counts once for each
    triplet that it is in.
    """

    def whole(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return the loss of all triplets by name, reduced; None where it has to be made of single
        triplets.
        """
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
        each = beta.expand(len(embeddings)) if len(beta) == 1 else beta[labels]
        mat = similarities(self.distance, embeddings, ref_emb)
        found, counts = by_rows(mat, pairs, self._plain, each)
        divisor, total = counts.sum(), found.sum()
        if self.learn_beta and len(beta) > 1:
            penalty = _over((each * triplets).sum() * self.nu, divisor)
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
    return {"losses": value, "indices": None, "reduction_type": "already_reduced"}
