"""Losses of pairs: sums over pairs, soft maxima over an anchor's pairs, and lifted structures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from pytorch_metric_learning import distances, losses, reducers
from pytorch_metric_learning.losses.generic_pair_loss import GenericPairLoss
from pytorch_metric_learning.utils import loss_and_miner_utils
from retrieval.helpers import first_row, item_losses, losses_of, reduced_loss
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.pair_sums import (
    Pairs,
    Vectors,
    against_others,
    column_of_anchors,
    compared,
    excesses_over_others,
    labelled_pairs,
    listed_pairs,
    log_sums,
    loss_of_sum,
    matrix_of,
    nearness,
    reducer_of,
    scaled,
)
from retrieval_pml.upstream_factories import FIXED, cosines_within, offer


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
        return self.loss_method(matrix_of(self.distance, embeddings, ref_emb), pairs)


class _PairSums(GenericPairLoss):
    """A loss of `against_others`: positive pairs, and sums over the negatives of each anchor.

    A batch with a single pair has a loss; pytorch-metric-learning returns 0.
    """

    rows_by_labels = True
    repeated = False
    """Whether a pair that a miner lists several times counts as often."""

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name, in the format of pytorch-metric-learning's reducers."""
        mat = compared(self.distance, embeddings, ref_emb)
        if indices_tuple is None:
            pairs = labelled_pairs(labels, ref_labels, column_of_anchors(labels, ref_labels))
        else:
            indices = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
            pairs = listed_pairs(mat, indices, self.repeated)
        return self.loss_of(mat, pairs, ref_emb is embeddings)

    def loss_of(self, mat: Tensor | Vectors, pairs: Pairs, same_items: bool) -> Any:
        """Return the losses by name, from distances (N, M), which may be those within a batch."""
        raise NotImplementedError


class ContrastiveLoss(_ListedPairs, losses.ContrastiveLoss):
    """Contrastive loss: pulls positive pairs within one margin, pushes negatives beyond another.

    Hadsell, Chopra & LeCun, Dimensionality Reduction by Learning an Invariant Mapping, CVPR 2006
    (here without the square).

    Args:
        pos_margin: distance up to which a positive pair has loss 0. For a similarity, set 1.
        neg_margin: distance above which a negative pair has loss 0. For a similarity, set 0.
        reducer: reduces the pairs' losses to one number; by default the mean of those above 0.
    """

    @property
    def rows_by_labels(self) -> bool:
        """Whether the loss adds up all pairs from the labels alone, without a list."""
        # Only these types, no subclasses: others may need the loss of each pair.
        summable = reducers.AvgNonZeroReducer, reducers.MeanReducer, reducers.SumReducer
        return all(type(reducer_of(self, name)) in summable for name in self._sub_loss_names())

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Any:
        """Return the losses by name; where possible, add up all pairs without their losses."""
        if indices_tuple is not None or not self.rows_by_labels:
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        pairs = labelled_pairs(labels, ref_labels, column_of_anchors(labels, ref_labels))
        mat = compared(self.distance, embeddings, ref_emb)
        slope = nearness(self.distance, 1)
        sums, values, counts = excesses_over_others(
            mat, lambda mat, _: (self.distance.margin(self.neg_margin, mat), slope), pairs
        )
        pull = self.pos_calc(values, self.pos_margin)
        parts: dict[str, Any] = {}
        for name, total, above, count in (
            ("pos_loss", pull.sum(), (pull > 0).sum(), len(pull)),
            ("neg_loss", sums.sum(), counts.sum(), pairs.negatives),
        ):
            if type(reducer_of(self, name)) is not reducers.AvgNonZeroReducer:
                above = above.new_full((), count)
            parts |= loss_of_sum(self, name, total, above)
        return parts


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
        mat = matrix_of(self.distance, embeddings, ref_emb)
        excesses = self.margin_plus - mat[a1, p], mat[a2, n] - self.margin_minus
        plus, minus = (x.relu().sum() / (x >= 0).sum().clamp(min=1) for x in excesses)
        return reduced_loss(self.lambda_plus * plus + self.lambda_minus * minus)


class LiftedStructureLoss(_PairSums, losses.LiftedStructureLoss):
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

    repeated = True

    def loss_of(self, mat: Tensor | Vectors, pairs: Pairs, same_items: bool) -> Any:
        """Return the losses of the positive pairs."""
        if len(pairs.anchors) == 0 or not pairs.negatives:
            return self.zero_losses()
        sign = nearness(self.distance, 1)
        push, values = against_others(mat, scaled(sign), pairs)
        around = push[pairs.anchors]
        if same_items:
            around = torch.logaddexp(around, push[pairs.positives])
        pull = self.distance.margin(values, self.pos_margin)
        loss = F.relu(around - sign * self.neg_margin + pull) ** 2 / 2
        return losses_of(loss, (pairs.anchors, pairs.positives), "pos_pair")


class GeneralizedLiftedStructureLoss(_PairSums, losses.GeneralizedLiftedStructureLoss):
    """Generalised lifted loss: all positives of an anchor against all its negatives at once.

    Hermans, Beyer & Leibe, In Defense of the Triplet Loss for Person Re-Identification, 2017,
    equation 8. An anchor without positives or without negatives has loss 0.

    Args:
        neg_margin: margin from which the distances of negatives are subtracted.
        pos_margin: margin that is subtracted from the distances of positives.
        reducer: reduces the anchors' losses to one number; the mean by default.
    """

    def loss_of(self, mat: Tensor | Vectors, pairs: Pairs, same_items: bool) -> Any:
        """Return the anchors' losses."""
        sign = nearness(self.distance, 1)
        push, values = against_others(mat, scaled(sign), pairs)
        pull = log_sums(self.distance.margin(values, self.pos_margin), pairs.anchors, len(push))
        # Without positives or negatives, the sum is close to the lowest number.
        return item_losses(F.relu(push - sign * self.neg_margin + pull))


class MultiSimilarityLoss(_PairSums, losses.MultiSimilarityLoss):
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

    def loss_of(self, mat: Tensor | Vectors, pairs: Pairs, same_items: bool) -> Any:
        """Return the anchors' losses."""
        alpha = nearness(self.distance, self.alpha)
        beta = nearness(self.distance, self.beta)
        push, values = against_others(mat, scaled(beta), pairs)
        pull = log_sums(-alpha * (values - self.base), pairs.anchors, len(push))
        push = F.softplus(push - beta * self.base) / self.beta
        return item_losses(F.softplus(pull) / self.alpha + push)


class CircleLoss(_PairSums, losses.CircleLoss):
    """Circle loss: a similarity is weighted by its difference from the optimum.

    Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR 2020. The
    paper sets m = 0.25 and gamma = 256 for faces, m = 0.25 and gamma = 128 for persons, and m = 0.4
    and gamma = 80 for fine-grained retrieval.

    Args:
        m: the cosines of positives should exceed 1 − m, those of negatives should stay below m.
        gamma: scale of the exponents.
        reducer: reduces the anchors' losses to one number; by default the mean of those above 0.
    """

    def loss_of(self, mat: Tensor | Vectors, pairs: Pairs, same_items: bool) -> Any:
        """Return the anchors' losses."""
        push, values = against_others(mat, self._exponents, pairs)
        weights = self.gamma * F.relu(self.op - values.detach())
        pull = log_sums(weights * (self.delta_p - values), pairs.anchors, len(push))
        # Without positives or negatives, the sum is close to the lowest number.
        return item_losses(F.softplus(pull + push))

    def _exponents(self, cosines: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the exponents of negative pairs and their derivative, with constant weights."""
        weights = (cosines.detach() - self.on).relu_().mul_(self.gamma)
        return cosines.sub_(self.delta_n).mul_(weights), weights


class SupConLoss(_PairSums, losses.SupConLoss):
    """Supervised contrastive loss: the mean log-probability of an anchor's positives.

    Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, equation 2 (the sum outside the
    logarithm).

    Args:
        temperature: number by which similarities are divided.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the anchors' losses to one number; by default the mean of those above 0.
    """

    rows_mined = False

    def loss_of(self, mat: Tensor | Vectors, pairs: Pairs, same_items: bool) -> Any:
        """Return the anchors' losses."""
        # If other rows of the batch have positives, a mean over anchors counts these rows too.
        if not pairs.negatives or (len(pairs.anchors) == 0 and first_row() is None):
            return self.zero_losses()
        scale = nearness(self.distance, 1 / self.temperature)
        anchors = len(mat.x) if isinstance(mat, Vectors) else len(mat)
        total, values = against_others(mat, scaled(scale), pairs.with_positives(anchors))
        zeros = torch.zeros_like(total)
        pull = zeros.index_add(0, pairs.anchors, values)
        count = torch.bincount(pairs.anchors, minlength=anchors).to(total)
        return item_losses((total - pull * (scale / count.clamp(min=1))) * (count > 0))


class _AgainstNegatives(_PairSums):
    """A positive pair against all negatives of its anchor: log(1 + Σ exp(pushed − pulled)).

    pytorch-metric-learning compares every positive pair with every negative pair. Its NT-Xent adds
    the smallest number to the argument of the logarithm, so its losses are at most 87.
    """

    repeated = True

    def loss_of(self, mat: Tensor | Vectors, pairs: Pairs, same_items: bool) -> Any:
        """Return the losses of the positive pairs."""
        # If other rows of the batch have negatives, a mean over pairs counts these pairs too.
        if len(pairs.anchors) == 0 or (not pairs.negatives and first_row() is None):
            return self.zero_losses()
        push, values = against_others(mat, scaled(self.factor), pairs)
        loss = F.softplus(push[pairs.anchors] - self.pulled(values))
        return losses_of(loss, (pairs.anchors, pairs.positives), "pos_pair")


class NTXentLoss(_AgainstNegatives, losses.NTXentLoss):
    """NT-Xent (InfoNCE): softmax of each positive pair against its anchor's negatives.

    Sohn, NIPS 2016; van den Oord, Li & Vinyals, 2018; Chen et al., SimCLR, ICML 2020. The memory
    grows with N²; pytorch-metric-learning compares all positive with all negative pairs.

    Args:
        temperature: number by which similarities are divided.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """

    @property
    def factor(self) -> float:
        """Factor of the exponents."""
        return nearness(self.distance, 1 / self.temperature)

    def pulled(self, values: Tensor) -> Tensor:
        """Return the exponents (P,) of positive pairs."""
        return self.factor * values


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

    @property
    def factor(self) -> float:
        """Factor of the exponents of negative pairs."""
        return self.scale  # type: ignore[no-any-return]

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
