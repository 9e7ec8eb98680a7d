"""Losses of pairs and triplets where upstream departs from the paper, fails on some batch, or needs P × N memory.

Each class says what differs from pytorch-metric-learning; all else is inherited.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.common import EveryPair, PreciseLoss, on_labels, reduced, segment_logsumexp


class TripletMarginLoss(PreciseLoss, losses.TripletMarginLoss):
    """Upstream's, except that `swap` compares positive and negative within the reference set that holds both.

    Upstream reads their distance from the matrix of *batch* × reference with an index into the reference.
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
        if not self.swap or ref_emb is embeddings:
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        common_functions.labels_or_indices_tuple_required(labels, indices_tuple)
        triplets = loss_and_miner_utils.convert_to_triplets(
            indices_tuple, labels, ref_labels, t_per_anchor=self.triplets_per_anchor
        )
        anchor, positive, negative = triplets
        if len(anchor) == 0:
            return self.zero_losses()
        mat = self.distance(embeddings, ref_emb)
        nearest = self.distance.smallest_dist(
            mat[anchor, negative], self.distance(ref_emb)[positive, negative]
        )
        violation = self.distance.margin(mat[anchor, positive], nearest) + self.margin
        loss = F.softplus(violation) if self.smooth_loss else F.relu(violation)
        return {"loss": {"losses": loss, "indices": triplets, "reduction_type": "triplet"}}


class AngularLoss(PreciseLoss, losses.AngularLoss):
    """Upstream's, except that negatives are normalised as anchors and positives are.

    Equation 8 of the paper assumes unit vectors throughout; upstream leaves `ref_emb`, which holds the
    negatives, at its own length.
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
        unit = self.distance.normalize(ref_emb)
        return super().compute_loss(embeddings, labels, indices_tuple, unit, ref_labels)


class DynamicSoftMarginLoss(PreciseLoss, losses.DynamicSoftMarginLoss):
    """Upstream's, except for the histogram of differences.

    It is a buffer, so that a resumed run goes on with it. It is a constant of the loss, as in the paper; upstream
    differentiates through it into the batch before, which fails on the second step. Differences in the last bin are
    counted there instead of failing.
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

    def update_histogram(self, data: Tensor) -> None:
        """Mix the histogram of this batch's differences d(a, p) − d(a, n), (T,), into the running one."""
        low, upper_share = self._bins(data)
        high = (low + 1).clamp(max=self.num_bins - 1)
        batch = torch.zeros_like(self.hist_).index_add(0, low, 1 - upper_share)
        batch = batch.index_add(0, high, upper_share)
        momentum = self.momentum if bool(self.hist_.any()) else 1.0
        mixed = (1 - momentum) * self.hist_ + momentum * batch
        self.hist_ = mixed / mixed.sum()

    def weigh_loss(self, data: Tensor) -> Tensor:
        """Return each difference times the share of differences up to it, (T,)."""
        return torch.cumsum(self.hist_, 0)[self._bins(data)[0]] * data


class LiftedStructureLoss(PreciseLoss, losses.LiftedStructureLoss):
    """Upstream's formula in memory of N², where upstream compares every positive with every negative pair.

    A pair without negatives costs 0 (the sum of none is 0, its logarithm −∞). With a reference set, the negatives of
    the anchor count; upstream also takes those of the batch item that has the positive's index.
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
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        if len(a1) == 0 or len(a2) == 0:
            return self.zero_losses()
        mat = self.distance(embeddings, ref_emb)
        push = segment_logsumexp(self.distance.margin(self.neg_margin, mat[a2, n]), a2, len(embeddings))
        around = push[a1] if ref_emb is not embeddings else torch.logaddexp(push[a1], push[p])
        loss = F.relu(around + self.distance.margin(mat[a1, p], self.pos_margin)) ** 2 / 2
        return {"loss": {"losses": loss, "indices": (a1, p), "reduction_type": "pos_pair"}}


class GeneralizedLiftedStructureLoss(PreciseLoss, EveryPair, losses.GeneralizedLiftedStructureLoss):
    """Upstream's, except that an anchor without positives or without negatives costs 0.

    The sum of none is 0 and its logarithm −∞; upstream puts 0 in its place.
    """

    def _compute_loss(self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor) -> Any:
        made = super()._compute_loss(mat, pos_mask, neg_mask)
        both = pos_mask.bool().any(1) & neg_mask.bool().any(1)
        made["loss"]["losses"] = made["loss"]["losses"].squeeze(1) * both
        return made


class ThresholdConsistentMarginLoss(PreciseLoss, losses.ThresholdConsistentMarginLoss):
    """Upstream's, except that positives and negatives come from the reference set when there is one.

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
        """Return the losses by name, as upstream's reducers read them."""
        common_functions.labels_or_indices_tuple_required(labels, indices_tuple)
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        mat = self.distance(embeddings, ref_emb)
        pull, push = self.margin_plus - mat[a1, p], mat[a2, n] - self.margin_minus
        return reduced(
            self.lambda_plus * _mean_where(pull, pull >= 0)
            + self.lambda_minus * _mean_where(push, push >= 0)
            + 0 * embeddings.sum()
        )


def _mean_where(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


class NTXentLoss(PreciseLoss, EveryPair, losses.NTXentLoss):
    """Upstream's formula in memory of the pairs, where upstream compares every positive with every negative pair.

    The logarithm is exact; upstream adds the smallest number to its argument, which bounds it at 87.
    """

    def _compute_loss(self, pos_pairs: Any, neg_pairs: Any, indices_tuple: Any) -> Any:
        a1, p, a2, _ = indices_tuple
        if len(a1) == 0 or len(a2) == 0:
            return self.zero_losses()
        sign = (1 if self.distance.is_inverted else -1) / self.temperature
        others = segment_logsumexp(sign * neg_pairs, a2, int(torch.cat([a1, a2]).max()) + 1)[a1]
        loss = torch.logaddexp(others - sign * pos_pairs, torch.zeros_like(others))
        return {"loss": {"losses": loss, "indices": (a1, p), "reduction_type": "pos_pair"}}


class TupletMarginLoss(PreciseLoss, EveryPair, losses.TupletMarginLoss):
    """Upstream's formula in memory of the pairs, and finite where a cosine is 1 or rounds to more."""

    def _compute_loss(self, pos_pairs: Any, neg_pairs: Any, indices_tuple: Any) -> Any:
        a1, p, a2, _ = indices_tuple
        if len(a1) == 0 or len(a2) == 0:
            return self.zero_losses()
        edge = 1 - 4 * torch.finfo(pos_pairs.dtype).eps
        slack = self.scale * torch.cos(torch.acos(pos_pairs.clamp(-edge, edge)) - self.margin)
        others = segment_logsumexp(self.scale * neg_pairs, a2, int(torch.cat([a1, a2]).max()) + 1)[a1]
        loss = torch.logaddexp(others - slack, torch.zeros_like(slack))
        return {"loss": {"losses": loss, "indices": (a1, p), "reduction_type": "pos_pair"}}


class LogNCA:
    """NCA by logarithms: upstream drops items whose probability rounds to 0, and fails when there are none left."""

    def nca_computation(
        self,
        query: Tensor,
        reference: Tensor,
        query_labels: Tensor,
        reference_labels: Tensor,
        indices_tuple: Any,
    ) -> Any:
        """Return −log of each query's probability of a neighbour of its class, by name."""
        this: Any = self
        own = query is reference
        weights = loss_and_miner_utils.convert_to_weights(
            indices_tuple, query_labels, dtype=query.dtype, using_ref=not own
        )
        logits = this.distance(query, reference) * this.softmax_scale
        if not this.distance.is_inverted:
            logits = -logits
        lowest = torch.finfo(logits.dtype).min
        same = query_labels.unsqueeze(1) == reference_labels.unsqueeze(0)
        if own:
            itself = torch.eye(len(query), dtype=torch.bool, device=query.device)
            same, logits = same & ~itself, logits.masked_fill(itself, lowest)
        kept = torch.where(same.any(1))[0]
        if len(kept) == 0:
            return this.zero_losses()
        logits, same = logits[kept], same[kept]
        loss = torch.logsumexp(logits, 1) - torch.logsumexp(logits.masked_fill(~same, lowest), 1)
        return {"loss": {"losses": loss * weights[kept], "indices": kept, "reduction_type": "element"}}


class NCALoss(PreciseLoss, LogNCA, losses.NCALoss):
    """Upstream's, computed by logarithms; 0 for a batch where no item has a neighbour of its class."""


class InstanceLoss(PreciseLoss, losses.InstanceLoss):
    """Cross-entropy over the *labels* of the batch, each item voting for its own.

    −log( Σ over items of i's label exp(γ cos) / Σ over all items exp(γ cos) ). With a label for each item it is the
    paper's instance loss within the batch. Upstream uses the rank of i's label as if it were the position of an
    item, which draws items towards those of other classes.
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
        common_functions.indices_tuple_not_supported(indices_tuple)
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        labels = on_labels(labels, embeddings, "InstanceLoss")
        logits = self.distance(embeddings) * self.gamma
        other = labels.unsqueeze(1) != labels.unsqueeze(0)
        own = logits.masked_fill(other, torch.finfo(logits.dtype).min)
        loss = torch.logsumexp(logits, 1) - torch.logsumexp(own, 1)
        indices = common_functions.torch_arange_from_size(embeddings)
        return {"loss": {"losses": loss, "indices": indices, "reduction_type": "element"}}
