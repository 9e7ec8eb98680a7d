"""Losses of pairs where upstream departs from the paper, fails on some batch, or needs P × N
memory.

Each class says what differs from pytorch-metric-learning; all else is inherited.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.model.rows import first_row
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.blocks import by_rows, lse, lse_of_few
from retrieval_pml.common import (
    EveryPair,
    OfBatch,
    PreciseLoss,
    cosines_within,
    element,
    reduced,
    segment_logsumexp,
)
from retrieval_pml.fused import votes
from retrieval_pml.matrices import similarities
from retrieval_pml.pairs import Pairs


class LiftedStructureLoss(PreciseLoss, losses.LiftedStructureLoss):
    """Upstream's formula in memory of N², where upstream compares every positive with every
    negative pair.

    A pair without negatives costs 0 (the sum of none is 0, its logarithm −∞). With a reference set,
    the negatives of the anchor count; upstream also takes those of the batch item that has the
    positive's index.
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
        return {"loss": {"losses": loss, "indices": (a1, p), "reduction_type": "pos_pair"}}


class ThresholdConsistentMarginLoss(PreciseLoss, losses.ThresholdConsistentMarginLoss):
    """Upstream's, except that positives and negatives come from the reference set when there is
    one.

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


class AgainstNegatives(EveryPair):
    """A loss of each positive pair against all its anchor's negatives: log(1 + Σ exp(pushed −
    pulled)), in memory of the pairs.

    Upstream compares every positive with every negative pair. The logarithm is exact; upstream's
    NT-Xent adds the smallest number to its argument, which bounds it at 87.
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
        if indices_tuple is not None or labels is None or ref_labels is None:
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        pairs = Pairs(labels, ref_labels)
        anchor, other = pairs.positives()
        if len(anchor) == 0:
            return self.zero_losses()
        mat = similarities(self.distance, embeddings, ref_emb)
        pushed, _ = by_rows(mat, pairs, lambda rows, _, negative: lse(self.pushed(rows), negative))
        return self._against(pushed[anchor], mat[anchor, other], (anchor, other))

    def _compute_loss(self, pos_pairs: Any, neg_pairs: Any, indices_tuple: Any) -> Any:
        a1, p, a2, _ = indices_tuple
        if len(a1) == 0 or (len(a2) == 0 and first_row() is None):
            return self.zero_losses()
        if len(a2) == 0:  # other rows of the batch may have negatives, and these count in the mean
            neg_pairs = pos_pairs[:0]
        others = segment_logsumexp(self.pushed(neg_pairs), a2, int(torch.cat([a1, a2]).max()) + 1)[
            a1
        ]
        return self._against(others, pos_pairs, (a1, p))

    def _against(self, pushed: Tensor, near: Tensor, indices: tuple[Tensor, Tensor]) -> Any:
        loss = torch.logaddexp(pushed - self.pulled(near), torch.zeros_like(pushed))
        return {"loss": {"losses": loss, "indices": indices, "reduction_type": "pos_pair"}}


class NTXentLoss(PreciseLoss, AgainstNegatives, losses.NTXentLoss):
    """Upstream's formula, by `AgainstNegatives`."""

    def pushed(self, near: Tensor) -> Tensor:
        """Return exponents, of any shape."""
        sign = 1 if self.distance.is_inverted else -1
        exponents: Tensor = near * (sign / self.temperature)
        return exponents

    pulled = pushed


class TupletMarginLoss(PreciseLoss, AgainstNegatives, losses.TupletMarginLoss):
    """Upstream's formula, by `AgainstNegatives`, and finite where a cosine is 1 or rounds to more."""

    def pushed(self, near: Tensor) -> Tensor:
        """Return negatives' exponents, of any shape."""
        return self.scale * near  # type: ignore[no-any-return]

    def pulled(self, near: Tensor) -> Tensor:
        """Return positives' exponents (P,)."""
        return self.scale * torch.cos(torch.acos(cosines_within(near)) - self.margin)  # type: ignore[no-any-return]


class LogNCA:
    """NCA by logarithms: upstream drops items whose probability rounds to 0, and fails when there
    are none left.
    """

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
        scale = this.softmax_scale if this.distance.is_inverted else -this.softmax_scale
        pairs = Pairs(query_labels, reference_labels)
        pairs.own = 0 if own else None

        def plain(mat: Tensor, same: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
            logits, some = mat * scale, same.any(1)
            loss = lse(logits, same | other) - lse_of_few(logits, same)
            return loss.masked_fill(~some, 0), some

        mat = similarities(this.distance, query, reference)
        loss, some = by_rows(mat, pairs, plain, fused=votes(scale))
        kept = torch.where(some)[0]
        if len(kept) == 0:
            return this.zero_losses()
        return {
            "loss": {
                "losses": loss[kept] * weights[kept],
                "indices": kept,
                "reduction_type": "element",
            }
        }


class NCALoss(PreciseLoss, LogNCA, losses.NCALoss):
    """Upstream's, computed by logarithms; 0 for a batch where no item has a neighbour of its class."""


class InstanceLoss(PreciseLoss, OfBatch, losses.InstanceLoss):
    """Cross-entropy over the *labels* of the batch, each item voting for its own.

    −log( Σ over items of i's label exp(γ cos) / Σ over all items exp(γ cos) ). With a label for
    each item it is the paper's instance loss within the batch. Upstream uses the rank of i's label
    as if it were the position of an item, which draws items towards those of other classes.
    """

    def of_batch(self, mat: Tensor, labels: Tensor, indices_tuple: Any) -> Any:
        """Return the losses by name; see `OfBatch`."""
        pairs = Pairs(labels, labels)
        pairs.own = None  # an item votes for itself

        def plain(mat: Tensor, same: Tensor, other: Tensor) -> Tensor:
            logits = mat * self.gamma
            return lse(logits, same | other) - lse_of_few(logits, same)

        return element(by_rows(mat, pairs, plain, fused=votes(self.gamma))[0])


class NPairsLoss(PreciseLoss, losses.NPairsLoss):
    """Upstream's, which finds each label's first two items by sorting the labels, where upstream
    lists all pairs.
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
        if indices_tuple is None and labels is not None:
            common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
            known, order = labels.sort(stable=True)
            alike = known[1:] == known[:-1]
            alike[1:] &= known[1:-1] != known[:-2]  # a label's first two
            first = torch.where(alike)[0]
            anchor, positive = order[first], order[first + 1]
            none = order[:0]
            indices_tuple = anchor, positive, none, none
        return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
