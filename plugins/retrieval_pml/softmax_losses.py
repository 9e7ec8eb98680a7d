"""Losses that weigh an item's positives against its negatives by exponentials, without proxies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.plugin import first_row, traits
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.adapters import (
    REGULARIZED,
    Distance,
    EveryPair,
    MaskedPairs,
    NonNegative,
    OfBatch,
    Positive,
    PreciseLoss,
    Reducer,
    cosines_within,
    element,
    forwards,
    numbers,
)
from retrieval_pml.pair_matrix import (
    LEAST,
    Fused,
    Pairs,
    by_rows,
    lse,
    lse_of_few,
    segment_logsumexp,
    similarities,
    softmax_rows,
)


class MultiSimilarityLoss(PreciseLoss, MaskedPairs, losses.MultiSimilarityLoss):
    """Upstream's loss, computed through `MaskedPairs`."""

    def of_rows(self, mat: Tensor, pairs: Pairs) -> Tensor:
        """Return the anchors' losses (N,)."""
        sign = 1 if self.distance.is_inverted else -1
        fused = _fused_multi_similarity(self.alpha, self.beta, self.base, sign)
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


def _fused_multi_similarity(alpha: float, beta: float, base: float, sign: int) -> Fused:
    """Return the fused Multi-Similarity loss; see `MultiSimilarityLoss`.

    `sign` is 1 of similarities, −1 of distances.
    """

    def fused(mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor) -> Tensor:
        torch.mul(mat, beta * sign, out=slopes)
        row, column = pairs.positives(rows)
        place = row * mat.shape[1] + column  # lists of places are quicker than pairs of lists
        pull = mat.reshape(-1).index_select(0, place).sub_(base).mul_(-alpha * sign)
        pairs.leave_negatives(slopes, rows, torch.finfo(mat.dtype).min)
        shares, every = softmax_rows(slopes)
        every -= beta * base * sign
        torch.hardshrink(shares.mul_((torch.sigmoid(every) * sign).unsqueeze(1)), LEAST, out=slopes)
        # with the 1 of log(1 + Σ exp)
        highest = torch.zeros_like(every).scatter_reduce_(0, row, pull, "amax")
        pull.sub_(highest.index_select(0, row)).exp_()
        total = torch.exp(-highest).index_add_(0, row, pull)
        slopes.view(-1).index_add_(0, place, pull.div_(total.index_select(0, row)), alpha=-sign)
        return (
            torch.logaddexp(every, torch.zeros_like(every)) / beta
            + (highest + total.log_()) / alpha
        )

    return fused


@forwards(MultiSimilarityLoss, REGULARIZED)
def multi_similarity(
    alpha: Positive = 2.0,
    beta: Positive = 50.0,
    base: float = 0.5,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.MultiSimilarityLoss:
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


class CircleLoss(PreciseLoss, MaskedPairs, losses.CircleLoss):
    """Upstream's loss, computed through `MaskedPairs`."""

    def of_rows(self, mat: Tensor, pairs: Pairs) -> Tensor:
        """Return the anchors' losses (N,)."""
        fused = _fused_circle(self.op, self.on, self.delta_p, self.delta_n, self.gamma)
        return by_rows(mat, pairs, self._plain, fused=fused)[0]

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        still = mat.detach()
        pull = -self.gamma * torch.relu(self.op - still) * (mat - self.delta_p)
        push = self.gamma * torch.relu(still - self.on) * (mat - self.delta_n)
        none = ~(positive.any(1) & negative.any(1))
        loss = F.softplus((lse(pull, positive) + lse(push, negative)).masked_fill(none, 0))
        return loss.masked_fill(none, 0)


def _fused_circle(op: float, on: float, delta_p: float, delta_n: float, gamma: float) -> Fused:
    """Return the fused circle loss of similarities; see `CircleLoss`."""

    def fused(mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor) -> Tensor:
        weights = (mat - on).relu_().mul_(gamma)
        torch.sub(mat, delta_n, out=slopes).mul_(weights)
        lowest = torch.finfo(mat.dtype).min
        pairs.leave_negatives(slopes, rows, lowest)
        row, column = pairs.positives(rows)
        place = row * mat.shape[1] + column
        some = torch.zeros(len(mat), dtype=torch.bool, device=mat.device).index_fill_(0, row, True)
        shares, every = softmax_rows(slopes)
        some &= every > lowest / 2
        near = mat.reshape(-1).index_select(0, place)
        weight = (op - near).relu_().mul_(-gamma)
        pull = weight * near.sub_(delta_p)
        highest = mat.new_full((len(mat),), -torch.inf).scatter_reduce_(0, row, pull, "amax")
        highest.masked_fill_(~some, 0)
        pull.sub_(highest.index_select(0, row)).exp_()
        total = torch.zeros_like(highest).index_add_(0, row, pull).masked_fill_(~some, 1)
        both = every + highest + total.log()
        share = torch.sigmoid(both).masked_fill_(~some, 0)
        torch.hardshrink(shares.mul_(weights).mul_(share.unsqueeze(1)), LEAST, out=slopes)
        slopes.view(-1).index_add_(
            0, place, weight.mul_(pull).mul_((share / total).index_select(0, row))
        )
        return torch.nn.functional.softplus(both).masked_fill_(~some, 0)

    return fused


@forwards(CircleLoss, REGULARIZED)
def circle(
    m: float = 0.4,
    gamma: Positive = 80.0,
    reducer: Reducer = None,
) -> losses.CircleLoss:
    """Circle loss: each similarity weighs as much as it is away from its optimum.

    Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR 2020. The
    paper sets m = 0.25, gamma = 256 for faces, 0.25 and 128 for persons, 0.4 and 80 for
    fine-grained retrieval.

    Args:
        m: the relaxation: positives should pass a cosine of 1 − m, negatives stay below m.
        gamma: the exponent's scale.
        reducer: reduces the anchors' losses to one number; by default the mean of those above 0.
    """


class SupConLoss(PreciseLoss, MaskedPairs, losses.SupConLoss):
    """Upstream's loss, computed through `MaskedPairs`."""

    rows_mined = False

    def of_rows(self, mat: Tensor, pairs: Pairs) -> Tensor:
        """Return the anchors' losses (N,); all are 0 where a batch lacks pairs of one kind."""
        losses, kinds = by_rows(mat, pairs, self._plain)
        if first_row() is None and not (bool((kinds & 1).any()) and bool((kinds & 2).any())):
            return losses * 0
        return losses

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        sign = 1 if self.distance.is_inverted else -1
        whole = lse(mat * (sign / self.temperature), positive | negative)
        row, column = torch.where(positive)
        apart = whole[row] - mat[row, column] * (sign / self.temperature)
        some = positive.any(1)
        loss = torch.zeros_like(whole).index_add(0, row, apart) / positive.sum(1).clamp(min=1)
        return loss, some + 2 * negative.any(1)


@forwards(SupConLoss, REGULARIZED)
def sup_con(
    temperature: Positive = 0.1,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.SupConLoss:
    """Supervised contrastive loss: the mean log-probability of an anchor's positives.

    Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, equation 2 (the sum outside the
    logarithm).

    Args:
        temperature: similarities are divided by it.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the anchors' losses to one number; by default the mean of those above 0.
    """


class AgainstNegatives(EveryPair):
    """A positive pair against all its anchor's negatives: log(1 + Σ exp(pushed − pulled)).

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
        """Return the losses by name, in the format of upstream's reducers."""
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
        pushed = segment_logsumexp(self.pushed(neg_pairs), a2, int(torch.cat([a1, a2]).max()) + 1)[
            a1
        ]
        return self._against(pushed, pos_pairs, (a1, p))

    def _against(self, pushed: Tensor, near: Tensor, indices: tuple[Tensor, Tensor]) -> Any:
        loss = torch.logaddexp(pushed - self.pulled(near), torch.zeros_like(pushed))
        return numbers(loss, indices, "pos_pair")


class NTXentLoss(PreciseLoss, AgainstNegatives, losses.NTXentLoss):
    """Upstream's formula, by `AgainstNegatives`."""

    def pushed(self, near: Tensor) -> Tensor:
        """Return exponents, of any shape."""
        sign = 1 if self.distance.is_inverted else -1
        exponents: Tensor = near * (sign / self.temperature)
        return exponents

    pulled = pushed


@forwards(NTXentLoss, REGULARIZED)
def nt_xent(
    temperature: Positive = 0.07,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.NTXentLoss:
    """NT-Xent (InfoNCE): softmax of each positive pair against its anchor's negatives.

    Sohn, NIPS 2016; van den Oord, Li & Vinyals, 2018; Chen et al., SimCLR, ICML 2020. Computed in
    memory of the pairs, where upstream compares all positive with all negative pairs.

    Args:
        temperature: similarities are divided by it.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """


class TupletMarginLoss(PreciseLoss, AgainstNegatives, losses.TupletMarginLoss):
    """Upstream's formula, by `AgainstNegatives`; finite where a cosine is 1 or rounds to more."""

    def pushed(self, near: Tensor) -> Tensor:
        """Return negatives' exponents, of any shape."""
        return self.scale * near  # type: ignore[no-any-return]

    def pulled(self, near: Tensor) -> Tensor:
        """Return positives' exponents (P,)."""
        return self.scale * torch.cos(torch.acos(cosines_within(near)) - self.margin)  # type: ignore[no-any-return]


@forwards(TupletMarginLoss, REGULARIZED)
def tuplet_margin(
    margin: NonNegative = 5.73,
    scale: Positive = 64.0,
    reducer: Reducer = None,
) -> losses.TupletMarginLoss:
    """Tuplet margin loss: a positive against all negatives, with slack in its angle.

    Yu & Tao, Deep Metric Learning with Tuplet Margin Loss, ICCV 2019; the paper adds
    `pml.intra_pair_variance`. Computed in memory of the pairs, where upstream compares all positive
    with all negative pairs.

    Args:
        margin: the slack β, in degrees.
        scale: cosines are multiplied by it.
        reducer: reduces the positive pairs' losses to one number; the mean by default.
    """


class LogNCA:
    """NCA by logarithms, where upstream drops items whose probability rounds to 0."""

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
        loss, some = by_rows(mat, pairs, plain, fused=_fused_votes(scale))
        kept = torch.where(some)[0]
        if len(kept) == 0:
            return this.zero_losses()
        return numbers(loss[kept] * weights[kept], kept, "element")


class NCALoss(PreciseLoss, LogNCA, losses.NCALoss):
    """Upstream's, computed by logarithms; 0 where no item has a neighbour of its class."""


def _fused_votes(rate: float) -> Fused:
    """Return the fused cross-entropy over labels of which each pair votes for one; see
    `InstanceLoss` and `LogNCA`; `rate` multiplies a pair's number: γ, or below 0 for distances.
    """

    def fused(mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor) -> tuple[Tensor, Tensor]:
        torch.mul(mat, rate, out=slopes)
        row, column = pairs.positives(rows)
        # lists of places are quicker than pairs of lists
        flat, place = slopes.view(-1), row * mat.shape[1] + column
        own = flat.index_select(0, place)
        if pairs.own is not None:
            slopes.diagonal(pairs.own + (rows.start or 0)).fill_(-torch.inf)
        shares, every = softmax_rows(slopes)
        highest = mat.new_full((len(mat),), -torch.inf).scatter_reduce_(0, row, own, "amax")
        own.sub_(highest.index_select(0, row)).exp_()
        total = torch.zeros_like(highest).index_add_(0, row, own)
        some = total > 0
        torch.hardshrink(shares.mul_(some.to(mat.dtype).mul_(rate).unsqueeze(1)), LEAST, out=slopes)
        flat.index_add_(0, place, own.div_(total.index_select(0, row)), alpha=-rate)
        return (every - highest - total.log_()).masked_fill_(~some, 0), some

    return fused


@forwards(NCALoss, REGULARIZED)
def nca(
    softmax_scale: Positive = 1.0,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.NCALoss:
    """Neighbourhood components analysis: −log probability that a neighbour has the item's class.

    Goldberger, Roweis, Hinton & Salakhutdinov, Neighbourhood Components Analysis, NIPS 2004 (the
    logarithmic objective). Computed by logarithms; upstream drops items whose probability rounds to
    0.

    Args:
        softmax_scale: distances are multiplied by it.
        distance: how two embeddings are compared; squared Euclidean on unit vectors by default.
    """


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

        return element(by_rows(mat, pairs, plain, fused=_fused_votes(self.gamma))[0])


@traits(ref_emb=False, miner=False)
@forwards(InstanceLoss, REGULARIZED)
def instance(
    gamma: Positive = 64.0,
    reducer: Reducer = None,
) -> losses.InstanceLoss:
    """Instance loss: each item is to be told from all others of the batch, by cross-entropy.

    Zheng, Zheng, Garrett, Yang, Xu & Shen, Dual-Path Convolutional Image-Text Embeddings with
    Instance Loss, ACM TOMM 2020. Items that share a label share their vote: −log Σ over own label /
    Σ over all, of exp(γ cos). Upstream takes the rank of a label for the position of an item, which
    draws items towards other classes.

    Args:
        gamma: cosines are multiplied by it.
    """


class NPairsLoss(PreciseLoss, losses.NPairsLoss):
    """Upstream's, by sorting the labels, where upstream lists all pairs."""

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
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


@traits(ref_emb=False)
@forwards(NPairsLoss, REGULARIZED)
def n_pairs(
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.NPairsLoss:
    """N-pairs loss: one positive pair per class, each anchor against the other classes' positives.

    Sohn, Improved Deep Metric Learning with Multi-class N-pair Loss Objective, NIPS 2016. Only the
    first positive pair of each class counts, so a batch of two items per class wastes nothing. The
    paper does not normalise (set `distance` to `pml.dot_product_similarity` with
    `normalize_embeddings = false`) and adds `pml.lp`.

    Args:
        distance: how two embeddings are compared; the dot product of unit vectors by default.
        reducer: reduces the pairs' losses to one number; the mean by default.
    """


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make
    for make in (multi_similarity, circle, nt_xent, sup_con, tuplet_margin, nca, n_pairs, instance)
}
