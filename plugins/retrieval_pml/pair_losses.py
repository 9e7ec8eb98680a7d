"""Losses of pairs: sums over pairs, and lifted structures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.plugin import Sums, summed, traits
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.adapters import (
    REGULARIZED,
    Distance,
    EveryPair,
    MaskedPairs,
    NonNegative,
    Positive,
    PreciseLoss,
    Reducer,
    Regularizer,
    Whole,
    bounds,
    forwards,
    numbers,
    reduced,
)
from retrieval_pml.pair_matrix import (
    Pairs,
    blocks,
    by_rows,
    lse,
    lse_of_few,
    rows_and_pairs,
    segment_logsumexp,
    similarities,
)
from retrieval_pml.parts import SNRDistance


class SumsOfPairs(Whole):
    """Base of losses that sum over positive and negative pairs; negative pairs are not listed.

    A subclass defines three functions:

    - `pulled(near)` returns the losses of positive pairs (P,) from their distances or similarities.
    - `pushed(near, *constants)` returns the losses of negative pairs, in the shape of `near`.
    - `pushed_(mat, pairs, rows, slopes, *constants)` returns these losses for some rows (R, M), 0
      for other pairs, and the derivatives of their sums by each of `constants`. It fills `slopes`
      with the derivatives of the losses; see `pair_matrix.by_rows`.
    """

    def whole(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return the losses by name, the negatives' reduced; None if it needs single pairs."""
        limits = bounds(self.reducer_of("neg_loss"))
        if limits is None:
            return None
        pairs = Pairs(labels, ref_labels)
        anchor, positive = pairs.positives()
        if not int(pairs.counts()[1].sum()) and not len(anchor):
            return self.zero_losses()
        mat = similarities(self.distance, embeddings, ref_emb)
        low, high, mean = limits

        def plain(
            mat: Tensor, _: Tensor, negative: Tensor, *constants: Tensor
        ) -> tuple[Tensor, Tensor]:
            loss = self.pushed(mat, *(pushes.unsqueeze(1) for pushes in constants))
            kept = negative
            if low is not None:
                kept = kept & (loss > low)
            if high is not None:
                kept = kept & (loss < high)
            return (loss * kept).sum(1), kept.sum(1)

        def fused(
            mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor, *constants: Tensor
        ) -> tuple[Tensor, ...]:
            loss, *of_constants = self.pushed_(mat, pairs, rows, slopes, *constants)
            if low is None:
                return loss.sum(1), pairs.counts()[1][rows], *of_constants
            kept = loss > low
            return loss.sum(1), kept.sum(1), *of_constants

        # the fused form does not count losses of 0, so another bound needs the masks
        written = high is None and low in (None, 0)
        constants = self.constants(mat, pairs)
        pushes, counts, near = rows_and_pairs(
            mat, pairs, (anchor, positive), plain, *constants, fused=fused if written else None
        )
        parts = {name: self.zero_loss() for name in ("pos_loss", "neg_loss")}
        if len(anchor):
            parts |= numbers(self.pulled(near), (anchor, positive), "pos_pair", "pos_loss")
        total, counted = pushes.sum(), counts.sum()
        if isinstance(self.reducer, Sums):
            parts["neg_loss"] = summed(total, counted)
        else:
            parts["neg_loss"] = reduced(total / counted.clamp(min=1) if mean else total)["loss"]
        return parts

    def constants(self, mat: Tensor, pairs: Pairs) -> list[Tensor]:
        """Return the statistics of all pairs that `pushed` needs, each (N,)."""
        return []


class ContrastiveLoss(SumsOfPairs, PreciseLoss, EveryPair, losses.ContrastiveLoss):
    """Upstream's loss, computed through `SumsOfPairs`."""

    rows, rows_by_labels = "anchors", True

    def pulled(self, near: Tensor) -> Tensor:
        """Return the losses of positive pairs (P,) by their distances or similarities."""
        return self.pos_calc(near, self.pos_margin)  # type: ignore[no-any-return]

    def pushed(self, near: Tensor) -> Tensor:
        """Return the losses of negative pairs, of any shape."""
        return self.neg_calc(near, self.neg_margin)  # type: ignore[no-any-return]

    def pushed_(
        self, mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor, *constants: Tensor
    ) -> Any:
        """Return the negative pairs' losses (R, M), 0 of others; see `SumsOfPairs`."""
        sign = 1 if self.distance.is_inverted else -1
        over = (mat - self.neg_margin).mul_(sign)
        pairs.leave_negatives(over, rows, 0)
        over.relu_()
        torch.mul(over > 0, sign, out=slopes)
        return (over,)


@forwards(ContrastiveLoss, REGULARIZED)
def contrastive(
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.ContrastiveLoss:
    """Contrastive loss: pulls positive pairs within one margin, pushes negatives beyond another.

    Hadsell, Chopra & LeCun, Dimensionality Reduction by Learning an Invariant Mapping, CVPR 2006
    (here without the square).

    Args:
        pos_margin: distance up to which a positive pair has loss 0; for a similarity use 1.
        neg_margin: distance from which on a negative pair has loss 0; for a similarity use 0.
        reducer: reduces the pairs' losses to one number; by default the mean of those above 0.
    """


class SignalToNoiseRatioContrastiveLoss(ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss):
    """Upstream's loss, computed through `SumsOfPairs`."""


def signal_to_noise_ratio_contrastive(
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    normalize_embeddings: bool = True,
    p: Positive = 2,
    power: Positive = 1,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.SignalToNoiseRatioContrastiveLoss:
    """Contrastive loss on the signal-to-noise distance var(anchor − other) / var(anchor).

    Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric
    Learning, CVPR 2019. The paper adds the regulariser `pml.zero_mean`.

    Args:
        pos_margin: distance up to which a positive pair has loss 0.
        neg_margin: distance from which on a negative pair has loss 0.
        normalize_embeddings: whether to scale embeddings to length 1 first.
        p: norm that measures this length.
        power: exponent of the distance.
        reducer: reduces the pairs' losses to one number; by default the mean of those above 0.
        embedding_regularizer: a penalty on the embeddings, added to the loss.
        embedding_reg_weight: the factor of that penalty.
    """
    return SignalToNoiseRatioContrastiveLoss(
        pos_margin=pos_margin,
        neg_margin=neg_margin,
        distance=SNRDistance(normalize_embeddings=normalize_embeddings, p=p, power=power),
        reducer=reducer,
        embedding_regularizer=embedding_regularizer,
        embedding_reg_weight=embedding_reg_weight,
    )


class IntraPairVarianceLoss(SumsOfPairs, PreciseLoss, EveryPair, losses.IntraPairVarianceLoss):
    """Upstream's loss, computed through `SumsOfPairs`."""

    def pulled(self, near: Tensor) -> Tensor:
        """Return the losses of positive pairs (P,) by their distances or similarities."""
        closer = self.distance.is_inverted
        return F.relu(self.variance_with_eps(near, near.mean(), self.pos_eps, closer)) ** 2

    def pushed(self, near: Tensor, mean: Tensor) -> Tensor:
        """Return the losses of negative pairs, of any shape, by the mean of all of them."""
        farther = not self.distance.is_inverted
        return F.relu(self.variance_with_eps(near, mean, self.neg_eps, farther)) ** 2

    def pushed_(
        self, mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor, *constants: Tensor
    ) -> Any:
        """Return the negative pairs' losses and their sums' derivatives; see `SumsOfPairs`."""
        sign = 1 if self.distance.is_inverted else -1
        share = 1 + sign * self.neg_eps
        over = (mat - share * constants[0].unsqueeze(1)).mul_(sign)
        pairs.leave_negatives(over, rows, 0)
        over.relu_()
        torch.mul(over, 2 * sign, out=slopes)
        return over.square_(), slopes.sum(1).mul_(-share)

    def constants(self, mat: Tensor, pairs: Pairs) -> list[Tensor]:
        """Return the mean of all negative pairs, for each row."""
        mean: Tensor = _MeanOfNegatives.apply(mat, pairs)
        return [mean.expand(len(mat))]


class _MeanOfNegatives(torch.autograd.Function):
    """The mean over all negative pairs; it stores nothing for the gradient."""

    @staticmethod
    def forward(ctx: Any, mat: Tensor, pairs: Pairs) -> Tensor:
        ctx.constants = pairs, mat.shape, int(pairs.counts()[1].sum())
        total = mat.new_zeros(())
        for part in blocks(*mat.shape):
            rows = mat[part].clone()
            pairs.leave_negatives(rows, part, 0)
            total += rows.sum()
        return total.div_(max(ctx.constants[2], 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        pairs, shape, count = ctx.constants
        slope = (gradient / max(count, 1)).expand(shape)
        if torch.is_grad_enabled():  # the gradient will be differentiated
            return slope * pairs.of(slice(None))[1], None
        slopes = slope.contiguous()
        for part in blocks(*shape):
            pairs.leave_negatives(slopes[part], part, 0)
        return slopes, None


@forwards(IntraPairVarianceLoss, REGULARIZED)
def intra_pair_variance(
    pos_eps: NonNegative = 0.01,
    neg_eps: NonNegative = 0.01,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.IntraPairVarianceLoss:
    """Pulls similarities of positive pairs to their mean, and likewise those of negative pairs.

    Yu & Tao, Deep Metric Learning with Tuplet Margin Loss, ICCV 2019. Use it together with
    `pml.tuplet_margin` in `pml.multiple`.

    Args:
        pos_eps: relative distance below the mean up to which a positive pair has loss 0.
        neg_eps: relative distance above the mean up to which a negative pair has loss 0.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the pairs' losses to one number; the mean by default.
    """


class ThresholdConsistentMarginLoss(PreciseLoss, losses.ThresholdConsistentMarginLoss):
    """Upstream's loss, but with positives and negatives from the reference set if there is one.

    Upstream looks them up in the batch, with indices into the reference set.
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
        mat = similarities(self.distance, embeddings, ref_emb)
        if indices_tuple is None:
            assert labels is not None and ref_labels is not None
            pairs = Pairs(labels, ref_labels)
            a1, p = pairs.positives()
            over, counts = by_rows(mat, pairs, self._plain)
            push = over.sum() / counts.sum().clamp(min=1)
        else:
            a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
            over = mat[a2, n] - self.margin_minus
            push = _mean_where(over, over >= 0)
        pull = self.margin_plus - mat[a1, p]
        pulled = self.lambda_plus * _mean_where(pull, pull >= 0)
        return reduced(pulled + self.lambda_minus * push + 0 * embeddings.sum())

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        over = mat - self.margin_minus
        kept = negative & (over >= 0)
        return (over * kept).sum(1), kept.sum(1)


def _mean_where(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


@traits(ref_emb=True)
@forwards(ThresholdConsistentMarginLoss, REGULARIZED)
def threshold_consistent_margin(
    lambda_plus: NonNegative = 1.0,
    lambda_minus: NonNegative = 1.0,
    margin_plus: float = 0.9,
    margin_minus: float = 0.5,
) -> losses.ThresholdConsistentMarginLoss:
    """A regulariser in the form of a loss that makes one similarity threshold fit all classes.

    Zhang et al., Threshold-Consistent Margin Loss for Open-World Deep Metric Learning, ICLR 2024.
    Use it together with another loss in `pml.multiple`. Positives and negatives come from the
    reference set if there is one; upstream takes them from the batch.

    Args:
        lambda_plus: weight of positive pairs.
        lambda_minus: weight of negative pairs.
        margin_plus: cosine from which on a positive pair has loss 0.
        margin_minus: cosine up to which a negative pair has loss 0.
    """


class LiftedStructureLoss(PreciseLoss, losses.LiftedStructureLoss):
    """Upstream's formula in memory of N², while upstream compares all pairs with all pairs.

    A pair without negatives has loss 0. With a reference set only the anchor's negatives count;
    upstream also uses those of the batch item with the positive's index.
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
        mat = similarities(self.distance, embeddings, ref_emb)
        if indices_tuple is None:
            assert labels is not None and ref_labels is not None
            pairs = Pairs(labels, ref_labels)
            a1, p = pairs.positives()
            push, _ = by_rows(
                mat,
                pairs,
                lambda rows, _, other: lse(self.distance.margin(self.neg_margin, rows), other),
            )
        else:
            a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
            a1 = a1[: 0 if len(a2) == 0 else None]
            push = segment_logsumexp(
                self.distance.margin(self.neg_margin, mat[a2, n]), a2, len(embeddings)
            )
        if len(a1) == 0:
            return self.zero_losses()
        around = push[a1] if ref_emb is not embeddings else torch.logaddexp(push[a1], push[p])
        loss = F.relu(around + self.distance.margin(mat[a1, p], self.pos_margin)) ** 2 / 2
        return numbers(loss, (a1, p), "pos_pair")


@forwards(LiftedStructureLoss, REGULARIZED)
def lifted_structure(
    neg_margin: float = 1.0,
    pos_margin: float = 0.0,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.LiftedStructureLoss:
    """Lifted structure loss: each positive pair against all negatives of both its items.

    Oh Song, Xiang, Jegelka & Savarese, Deep Metric Learning via Lifted Structured Feature
    Embedding, CVPR 2016. Memory grows with N²; upstream compares all positive with all negative
    pairs.

    Args:
        neg_margin: margin that negatives' distances are subtracted from, in units of the distance.
        pos_margin: margin that is subtracted from the positive's distance.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """


class GeneralizedLiftedStructureLoss(
    PreciseLoss, MaskedPairs, losses.GeneralizedLiftedStructureLoss
):
    """Upstream's loss, except that an anchor without positives or negatives has loss 0.

    The logarithm of an empty sum is −∞; upstream replaces it by 0.
    """

    def of_rows(self, mat: Tensor, pairs: Pairs) -> Tensor:
        """Return the anchors' losses (N,)."""
        return by_rows(mat, pairs, self._plain)[0]

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        pull = lse_of_few(self.distance.margin(mat, self.pos_margin), positive)
        push = lse(self.distance.margin(self.neg_margin, mat), negative)
        return F.relu(pull + push).masked_fill(~(positive.any(1) & negative.any(1)), 0)


@forwards(GeneralizedLiftedStructureLoss, REGULARIZED)
def generalized_lifted_structure(
    neg_margin: float = 1.0,
    pos_margin: float = 0.0,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.GeneralizedLiftedStructureLoss:
    """Generalised lifted loss: all of an anchor's positives against all of its negatives at once.

    Hermans, Beyer & Leibe, In Defense of the Triplet Loss for Person Re-Identification, 2017,
    equation 8. An anchor without positives or without negatives has loss 0.

    Args:
        neg_margin: margin that negatives' distances are subtracted from, in units of the distance.
        pos_margin: margin that is subtracted from the positives' distances.
        reducer: reduces the anchors' losses to one number; the mean by default.
    """


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make
    for make in (
        contrastive,
        signal_to_noise_ratio_contrastive,
        intra_pair_variance,
        threshold_consistent_margin,
        lifted_structure,
        generalized_lifted_structure,
    )
}
