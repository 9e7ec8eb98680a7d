"""Losses of pairs: sums over pairs, soft maxima of a row's pairs, and lifted structures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_metric_learning import distances, losses
from pytorch_metric_learning.losses.generic_pair_loss import GenericPairLoss
from pytorch_metric_learning.utils import loss_and_miner_utils
from retrieval.plugin import first_row
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.offers import (
    FIXED,
    NonNegative,
    Positive,
    cosines_within,
    element,
    label_masks,
    losses_of,
    offer,
    reduced,
)


class _ListedPairs(GenericPairLoss):
    """Computes the loss of a batch with a single pair, for which upstream returns 0."""

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
        pairs = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        # a mean over anchors includes rows without a pair if other rows of the batch have some
        if all(len(indices) == 0 for indices in pairs) and first_row() is None:
            return self.zero_losses()
        return self.loss_method(self.distance(embeddings, ref_emb), pairs)


class _MaskedPairs(GenericPairLoss):
    """Passes pairs to upstream's formula as masks of labels, without lists of all pairs.

    A batch with a single pair has a loss; upstream returns 0 if no list has more than one pair.
    """

    rows_by_labels = True

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
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
        pos_margin: distance up to which a positive pair has loss 0; for a similarity use 1.
        neg_margin: distance from which on a negative pair has loss 0; for a similarity use 0.
        reducer: reduces the pairs' losses to one number; by default the mean of those above 0.
    """


class SignalToNoiseRatioContrastiveLoss(ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss):
    """Contrastive loss on the signal-to-noise distance var(anchor − other) / var(anchor).

    Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric
    Learning, CVPR 2019. The paper adds the regulariser `pml.zero_mean`. Keeps the differences of
    all pairs, so it is for small batches.

    Args:
        pos_margin: distance up to which a positive pair has loss 0.
        neg_margin: distance from which on a negative pair has loss 0.
        normalize_embeddings: whether to scale embeddings to length 1 first.
        p: norm that measures this length.
        power: exponent of the distance.
        reducer: reduces the pairs' losses to one number; by default the mean of those above 0.
    """

    def __init__(
        self,
        normalize_embeddings: bool = True,
        p: Positive = 2,
        power: Positive = 1,
        **parameters: Any,
    ) -> None:
        distance = distances.SNRDistance(
            normalize_embeddings=normalize_embeddings, p=p, power=power
        )
        super().__init__(distance=distance, **parameters)


class IntraPairVarianceLoss(_ListedPairs, losses.IntraPairVarianceLoss):
    """Pulls similarities of positive pairs to their mean, and likewise those of negative pairs.

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
    Use it together with another loss in `pml.multiple`. Positives and negatives come from the
    reference set if there is one; upstream looks them up in the batch.

    Args:
        lambda_plus: weight of positive pairs.
        lambda_minus: weight of negative pairs.
        margin_plus: cosine from which on a positive pair has loss 0.
        margin_minus: cosine up to which a negative pair has loss 0.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the loss by name, in memory of the pairs."""
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        mat = self.distance(embeddings, ref_emb)
        pull, push = self.margin_plus - mat[a1, p], mat[a2, n] - self.margin_minus
        pulled, pushed = (x.relu().sum() / (x >= 0).sum().clamp(min=1) for x in (pull, push))
        return reduced(self.lambda_plus * pulled + self.lambda_minus * pushed)


class LiftedStructureLoss(losses.LiftedStructureLoss):
    """Lifted structure loss: each positive pair against all negatives of both its items.

    Oh Song, Xiang, Jegelka & Savarese, Deep Metric Learning via Lifted Structured Feature
    Embedding, CVPR 2016. Memory grows with N²; upstream compares all positive with all negative
    pairs. A pair without negatives has loss 0. With a reference set only the anchor's negatives
    count; upstream also uses those of the batch item with the positive's index.

    Args:
        neg_margin: margin that negatives' distances are subtracted from, in units of the distance.
        pos_margin: margin that is subtracted from the positive's distance.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        if len(a1) == 0 or len(a2) == 0:
            return self.zero_losses()
        mat = self.distance(embeddings, ref_emb)
        push = _log_sums(self.distance.margin(self.neg_margin, mat[a2, n]), a2, len(embeddings))
        around = push[a1] if ref_emb is not embeddings else torch.logaddexp(push[a1], push[p])
        loss = F.relu(around + self.distance.margin(mat[a1, p], self.pos_margin)) ** 2 / 2
        return losses_of(loss, (a1, p), "pos_pair")


def _log_sums(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Return log Σ exp of each segment's values; the lowest number for an empty one."""
    lowest = torch.finfo(values.dtype).min
    top = values.new_full((segments,), lowest).scatter_reduce(0, segment, values.detach(), "amax")
    total = values.new_zeros(segments).index_add(0, segment, torch.exp(values - top[segment]))
    empty = total == 0
    return torch.where(empty, lowest, top + torch.log(total.masked_fill(empty, 1)))


class GeneralizedLiftedStructureLoss(_MaskedPairs, losses.GeneralizedLiftedStructureLoss):
    """Generalised lifted loss: all of an anchor's positives against all of its negatives at once.

    Hermans, Beyer & Leibe, In Defense of the Triplet Loss for Person Re-Identification, 2017,
    equation 8. An anchor without positives or without negatives has loss 0.

    Args:
        neg_margin: margin that negatives' distances are subtracted from, in units of the distance.
        pos_margin: margin that is subtracted from the positives' distances.
        reducer: reduces the anchors' losses to one number; the mean by default.
    """

    def _compute_loss(self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor) -> Any:
        parts = super()._compute_loss(mat, pos_mask, neg_mask)
        # the logarithm of an empty sum is −∞, which upstream replaces by 0
        both = pos_mask.bool().any(1, keepdim=True) & neg_mask.bool().any(1, keepdim=True)
        parts["loss"]["losses"] = parts["loss"]["losses"].masked_fill(~both, 0)
        return parts


class MultiSimilarityLoss(_MaskedPairs, losses.MultiSimilarityLoss):
    """Multi-similarity loss: soft maxima of an anchor's positives and of its negatives.

    Wang, Han, Huang, Dong & Scott, Multi-Similarity Loss with General Pair Weighting for Deep
    Metric Learning, CVPR 2019; the paper mines with `pml.multi_similarity`.

    Args:
        alpha: the exponent's scale for positives.
        beta: the exponent's scale for negatives.
        base: the similarity (λ in the paper) that both are measured from.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the anchors' losses to one number; the mean by default.
    """


class CircleLoss(_MaskedPairs, losses.CircleLoss):
    """Circle loss: each similarity weighs as much as it is away from its optimum.

    Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR 2020. The
    paper sets m = 0.25, gamma = 256 for faces, 0.25 and 128 for persons, 0.4 and 80 for
    fine-grained retrieval.

    Args:
        m: the relaxation: positives should pass a cosine of 1 − m, negatives stay below m.
        gamma: the exponent's scale.
        reducer: reduces the anchors' losses to one number; by default the mean of those above 0.
    """


class SupConLoss(_MaskedPairs, losses.SupConLoss):
    """Supervised contrastive loss: the mean log-probability of an anchor's positives.

    Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, equation 2 (the sum outside the
    logarithm).

    Args:
        temperature: similarities are divided by it.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the anchors' losses to one number; by default the mean of those above 0.
    """

    rows_mined = False

    def _compute_loss(self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor) -> Any:
        if first_row() is not None and not bool(pos_mask.any()):
            return element(mat.sum(1) * 0)  # other rows of the batch may have positives
        return super()._compute_loss(mat, pos_mask, neg_mask)


class _AgainstNegatives(_ListedPairs):
    """A positive pair against all its anchor's negatives: log(1 + Σ exp(pushed − pulled)).

    Upstream compares every positive with every negative pair, and its NT-Xent adds the smallest
    number to the logarithm's argument, which bounds it at 87.
    """

    def _compute_loss(self, pos_pairs: Any, neg_pairs: Any, indices_tuple: Any) -> Any:
        a1, p, a2, _ = indices_tuple
        if len(a1) == 0 or (len(a2) == 0 and first_row() is None):
            return self.zero_losses()
        if len(a2) == 0:  # other rows of the batch may have negatives, and these count in the mean
            neg_pairs = pos_pairs[:0]
        anchors = int(torch.cat([a1, a2]).max()) + 1
        pushed = _log_sums(self.pushed(neg_pairs), a2, anchors)[a1]
        loss = F.softplus(pushed - self.pulled(pos_pairs))
        return losses_of(loss, (a1, p), "pos_pair")


class NTXentLoss(_AgainstNegatives, losses.NTXentLoss):
    """NT-Xent (InfoNCE): softmax of each positive pair against its anchor's negatives.

    Sohn, NIPS 2016; van den Oord, Li & Vinyals, 2018; Chen et al., SimCLR, ICML 2020. Computed in
    memory of the pairs, where upstream compares all positive with all negative pairs.

    Args:
        temperature: similarities are divided by it.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """

    def pushed(self, near: Tensor) -> Tensor:
        """Return pairs' exponents (P,)."""
        sign = 1 if self.distance.is_inverted else -1
        exponents: Tensor = near * (sign / self.temperature)
        return exponents

    pulled = pushed


class TupletMarginLoss(_AgainstNegatives, losses.TupletMarginLoss):
    """Tuplet margin loss: a positive against all negatives, with slack in its angle.

    Yu & Tao, Deep Metric Learning with Tuplet Margin Loss, ICCV 2019; the paper adds
    `pml.intra_pair_variance`. Computed in memory of the pairs, where upstream compares all positive
    with all negative pairs; finite where a cosine is 1 or rounds to more.

    Args:
        margin: the slack β, in degrees.
        scale: cosines are multiplied by it.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """

    def pushed(self, near: Tensor) -> Tensor:
        """Return negative pairs' exponents (P,)."""
        return self.scale * near  # type: ignore[no-any-return]

    def pulled(self, near: Tensor) -> Tensor:
        """Return positive pairs' exponents (P,)."""
        angles = torch.acos(cosines_within(near))
        logits: Tensor = self.scale * torch.cos(angles - self.margin)
        return logits


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "contrastive": offer(ContrastiveLoss, rows="anchors"),
    "signal_to_noise_ratio_contrastive": offer(
        SignalToNoiseRatioContrastiveLoss, rows="anchors", without=FIXED
    ),
    "intra_pair_variance": offer(IntraPairVarianceLoss, pos_eps=NonNegative, neg_eps=NonNegative),
    "threshold_consistent_margin": offer(
        ThresholdConsistentMarginLoss,
        without=("distance", "reducer"),
        lambda_plus=NonNegative,
        lambda_minus=NonNegative,
    ),
    "lifted_structure": offer(LiftedStructureLoss),
    "generalized_lifted_structure": offer(GeneralizedLiftedStructureLoss, rows="anchors"),
    "multi_similarity": offer(MultiSimilarityLoss, rows="anchors"),
    "circle": offer(CircleLoss, rows="anchors", without=FIXED),
    "sup_con": offer(SupConLoss, rows="anchors"),
    "nt_xent": offer(NTXentLoss, rows="anchors"),
    "tuplet_margin": offer(TupletMarginLoss, rows="anchors", without=FIXED, margin=NonNegative),
}
