"""Losses of pairs: sums over pairs, soft maxima over an anchor's pairs, and lifted structures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from pytorch_metric_learning import distances, losses
from pytorch_metric_learning.losses.generic_pair_loss import GenericPairLoss
from pytorch_metric_learning.utils import loss_and_miner_utils
from retrieval.helpers import first_row, item_losses, losses_of, reduced_loss
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.upstream_factories import (
    FIXED,
    cosines_within,
    label_masks,
    offer,
)


class _ListedPairs(GenericPairLoss):
    """Also computes the loss of a single pair, for which pytorch-metric-learning returns 0."""

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name, in the format of pytorch-metric-learning's reducers."""
        pairs = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        # If other rows of the batch have pairs, a mean over anchors counts rows without a pair.
        if all(len(indices) == 0 for indices in pairs) and first_row() is None:
            return self.zero_losses()
        return self.loss_method(self.distance(embeddings, ref_emb), pairs)


class _MaskedPairs(GenericPairLoss):
    """Passes pairs to pytorch-metric-learning's formula as masks, without listing all pairs.

    A batch with a single pair has a loss; pytorch-metric-learning returns 0.
    """

    rows_by_labels = True

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name, in the format of pytorch-metric-learning's reducers."""
        mat = self.distance(embeddings, ref_emb)
        if indices_tuple is not None:
            pairs = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
            return self.mat_based_loss(mat, pairs)
        positive, negative = label_masks(labels, ref_labels)
        return self._compute_loss(mat, positive.to(mat.dtype), negative.to(mat.dtype))


class ContrastiveLoss(_ListedPairs, losses.ContrastiveLoss):
    """Contrastive loss: pulls positive pairs within one margin, pushes negatives beyond another.

    Hadsell, Chopra & LeCun, Dimensionality Reduction by Learning an Invariant Mapping, CVPR 2006
    (here without the square).

    Args:
        pos_margin: distance up to which a positive pair has loss 0. For a similarity, set 1.
        neg_margin: distance above which a negative pair has loss 0. For a similarity, set 0.
        reducer: reduces the pairs' losses to one number; by default the mean of those above 0.
    """


class SignalToNoiseRatioContrastiveLoss(ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss):
    """Contrastive loss on the signal-to-noise distance var(anchor − other) / var(anchor).

    Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric
    Learning, CVPR 2019. The paper adds the regulariser `pml.zero_mean`. The loss stores the
    differences of all pairs, so use it for small batches.

    Args:
        pos_margin: distance up to which a positive pair has loss 0.
        neg_margin: distance above which a negative pair has loss 0.
        normalize_embeddings: whether to scale embeddings to length 1 first.
        p: norm that measures this length.
        power: exponent of the distance.
        reducer: reduces the pairs' losses to one number; by default the mean of those above 0.
    """

    def __init__(
        self,
        normalize_embeddings: bool = True,
        p: PositiveFloat = 2,
        power: PositiveFloat = 1,
        **parameters: Any,
    ) -> None:
        distance = distances.SNRDistance(
            normalize_embeddings=normalize_embeddings, p=p, power=power
        )
        super().__init__(distance=distance, **parameters)


class IntraPairVarianceLoss(_ListedPairs, losses.IntraPairVarianceLoss):
    """Pulls similarities of positive pairs to their mean, and of negative pairs to theirs.

    Yu & Tao, Deep Metric Learning with Tuplet Margin Loss, ICCV 2019. Use it together with
    `pml.tuplet_margin` in `pml.multiple`.

    Args:
        pos_eps: relative distance below the mean up to which a positive pair has loss 0.
        neg_eps: relative distance above the mean up to which a negative pair has loss 0.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the pairs' losses to one number; the mean by default.
    """


class ThresholdConsistentMarginLoss(losses.ThresholdConsistentMarginLoss):
    """A regulariser in the form of a loss that makes one similarity threshold fit all classes.

    Zhang et al., Threshold-Consistent Margin Loss for Open-World Deep Metric Learning, ICLR 2024.
    Use it together with another loss in `pml.multiple`. If there is a reference set, positives and
    negatives come from it; pytorch-metric-learning looks them up in the batch.

    Args:
        lambda_plus: weight of positive pairs.
        lambda_minus: weight of negative pairs.
        margin_plus: cosine above which a positive pair has loss 0.
        margin_minus: cosine up to which a negative pair has loss 0.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the loss by name; its memory grows with the number of pairs."""
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        mat = self.distance(embeddings, ref_emb)
        excesses = self.margin_plus - mat[a1, p], mat[a2, n] - self.margin_minus
        plus, minus = (x.relu().sum() / (x >= 0).sum().clamp(min=1) for x in excesses)
        return reduced_loss(self.lambda_plus * plus + self.lambda_minus * minus)


class LiftedStructureLoss(losses.LiftedStructureLoss):
    """Lifted structure loss: each positive pair against all negatives of both its items.

    Oh Song, Xiang, Jegelka & Savarese, Deep Metric Learning via Lifted Structured Feature
    Embedding, CVPR 2016. The memory grows with N²; pytorch-metric-learning compares all positive
    pairs with all negative pairs. A pair without negatives has loss 0. With a reference set, only
    the negatives of the anchor count; pytorch-metric-learning also uses the negatives of the batch
    item that has the positive's index.

    Args:
        neg_margin: margin from which the distances of negatives are subtracted.
        pos_margin: margin that is subtracted from the distance of the positive.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name, in the format of pytorch-metric-learning's reducers."""
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        if len(a1) == 0 or len(a2) == 0:
            return self.zero_losses()
        mat = self.distance(embeddings, ref_emb)
        push = _log_sums(self.distance.margin(self.neg_margin, mat[a2, n]), a2, len(embeddings))
        if ref_emb is not embeddings:
            around = push[a1]
        else:
            around = torch.logaddexp(push[a1], push[p])
        loss = F.relu(around + self.distance.margin(mat[a1, p], self.pos_margin)) ** 2 / 2
        return losses_of(loss, (a1, p), "pos_pair")


def _log_sums(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Return log Σ exp of the values of each segment; the lowest number for an empty segment."""
    lowest = torch.finfo(values.dtype).min
    # The largest value cancels out of the result, so it needs no gradient. With −∞ in place of
    # the lowest number, `logaddexp` of two empty segments would have a NaN gradient.
    top = values.new_full((segments,), lowest).scatter_reduce(0, segment, values.detach(), "amax")
    total = values.new_zeros(segments).index_add(0, segment, torch.exp(values - top[segment]))
    empty = total == 0
    # log(0) has an infinite gradient, which `where` turns into NaN even where it is not chosen.
    return torch.where(empty, lowest, top + torch.log(total.masked_fill(empty, 1)))


class GeneralizedLiftedStructureLoss(_MaskedPairs, losses.GeneralizedLiftedStructureLoss):
    """Generalised lifted loss: all positives of an anchor against all its negatives at once.

    Hermans, Beyer & Leibe, In Defense of the Triplet Loss for Person Re-Identification, 2017,
    equation 8. An anchor without positives or without negatives has loss 0.

    Args:
        neg_margin: margin from which the distances of negatives are subtracted.
        pos_margin: margin that is subtracted from the distances of positives.
        reducer: reduces the anchors' losses to one number; the mean by default.
    """

    def _compute_loss(self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor) -> Any:
        parts = super()._compute_loss(mat, pos_mask, neg_mask)
        # The logarithm of an empty sum is −∞, which pytorch-metric-learning replaces with 0.
        both = pos_mask.bool().any(1, keepdim=True) & neg_mask.bool().any(1, keepdim=True)
        parts["loss"]["losses"] = parts["loss"]["losses"].masked_fill(~both, 0)
        return parts


class MultiSimilarityLoss(_MaskedPairs, losses.MultiSimilarityLoss):
    """Multi-similarity loss: soft maxima of an anchor's positives and of its negatives.

    Wang, Han, Huang, Dong & Scott, Multi-Similarity Loss with General Pair Weighting for Deep
    Metric Learning, CVPR 2019; the paper mines with `pml.multi_similarity`.

    Args:
        alpha: scale of the exponents of positives.
        beta: scale of the exponents of negatives.
        base: similarity (λ in the paper) that is subtracted from the similarities of both.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the anchors' losses to one number; the mean by default.
    """


class CircleLoss(_MaskedPairs, losses.CircleLoss):
    """Circle loss: a similarity is weighted by its difference from the optimum.

    Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR 2020. The
    paper sets m = 0.25 and gamma = 256 for faces, m = 0.25 and gamma = 128 for persons, and m = 0.4
    and gamma = 80 for fine-grained retrieval.

    Args:
        m: the cosines of positives should exceed 1 − m, those of negatives should stay below m.
        gamma: scale of the exponents.
        reducer: reduces the anchors' losses to one number; by default the mean of those above 0.
    """


class SupConLoss(_MaskedPairs, losses.SupConLoss):
    """Supervised contrastive loss: the mean log-probability of an anchor's positives.

    Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, equation 2 (the sum outside the
    logarithm).

    Args:
        temperature: number by which similarities are divided.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the anchors' losses to one number; by default the mean of those above 0.
    """

    rows_mined = False

    def _compute_loss(self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor) -> Any:
        if first_row() is not None and not bool(pos_mask.any()):
            # Zeros that keep a gradient: other rows of the batch may have positives.
            return item_losses(mat.sum(1) * 0)
        return super()._compute_loss(mat, pos_mask, neg_mask)


class _AgainstNegatives(_ListedPairs):
    """A positive pair against all negatives of its anchor: log(1 + Σ exp(pushed − pulled)).

    pytorch-metric-learning compares every positive pair with every negative pair. Its NT-Xent adds
    the smallest number to the argument of the logarithm, so its losses are at most 87.
    """

    def _compute_loss(self, pos_pairs: Any, neg_pairs: Any, indices_tuple: Any) -> Any:
        a1, p, a2, _ = indices_tuple
        if len(a1) == 0 or (len(a2) == 0 and first_row() is None):
            return self.zero_losses()
        # If other rows of the batch have negatives, a mean over pairs counts these pairs too.
        if len(a2) == 0:
            neg_pairs = pos_pairs[:0]
        # Upstream passes no embeddings here, so the indices tell how many anchors there are.
        anchors = int(torch.cat([a1, a2]).max()) + 1
        pushed = _log_sums(self.pushed(neg_pairs), a2, anchors)[a1]
        loss = F.softplus(pushed - self.pulled(pos_pairs))
        return losses_of(loss, (a1, p), "pos_pair")


class NTXentLoss(_AgainstNegatives, losses.NTXentLoss):
    """NT-Xent (InfoNCE): softmax of each positive pair against its anchor's negatives.

    Sohn, NIPS 2016; van den Oord, Li & Vinyals, 2018; Chen et al., SimCLR, ICML 2020. The memory
    grows with the number of pairs; pytorch-metric-learning compares all positive with all negative
    pairs.

    Args:
        temperature: number by which similarities are divided.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """

    def pushed(self, values: Tensor) -> Tensor:
        """Return the exponents (P,) of pairs with these distances or similarities."""
        if self.distance.is_inverted:
            sign = 1
        else:
            sign = -1
        exponents: Tensor = values * (sign / self.temperature)
        return exponents

    pulled = pushed


class TupletMarginLoss(_AgainstNegatives, losses.TupletMarginLoss):
    """Tuplet margin loss: a positive against all negatives, with slack in its angle.

    Yu & Tao, Deep Metric Learning with Tuplet Margin Loss, ICCV 2019. The paper adds
    `pml.intra_pair_variance`. The memory grows with the number of pairs; pytorch-metric-learning
    compares all positive with all negative pairs. The loss is finite if a cosine is 1 or rounds to
    more than 1.

    Args:
        margin: the slack β, in degrees.
        scale: number by which cosines are multiplied.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """

    def pushed(self, cosines: Tensor) -> Tensor:
        """Return the exponents (P,) of negative pairs."""
        return self.scale * cosines  # type: ignore[no-any-return]

    def pulled(self, cosines: Tensor) -> Tensor:
        """Return the exponents (P,) of positive pairs."""
        angles = torch.acos(cosines_within(cosines))
        logits: Tensor = self.scale * torch.cos(angles - self.margin)
        return logits


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "contrastive": offer(ContrastiveLoss, rows="anchors"),
    "signal_to_noise_ratio_contrastive": offer(
        SignalToNoiseRatioContrastiveLoss, rows="anchors", without=FIXED
    ),
    "intra_pair_variance": offer(
        IntraPairVarianceLoss, pos_eps=NonNegativeFloat, neg_eps=NonNegativeFloat
    ),
    "threshold_consistent_margin": offer(
        ThresholdConsistentMarginLoss,
        without=("distance", "reducer"),
        lambda_plus=NonNegativeFloat,
        lambda_minus=NonNegativeFloat,
    ),
    "lifted_structure": offer(LiftedStructureLoss),
    "generalized_lifted_structure": offer(GeneralizedLiftedStructureLoss, rows="anchors"),
    "multi_similarity": offer(MultiSimilarityLoss, rows="anchors"),
    "circle": offer(CircleLoss, rows="anchors", without=FIXED),
    "sup_con": offer(SupConLoss, rows="anchors"),
    "nt_xent": offer(NTXentLoss, rows="anchors"),
    "tuplet_margin": offer(
        TupletMarginLoss, rows="anchors", without=FIXED, margin=NonNegativeFloat
    ),
}
