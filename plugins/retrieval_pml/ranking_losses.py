"""Losses of whole rankings and of the distributions of similarities. None takes a reference set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.plugin import traits
from torch import Tensor

from retrieval_pml.adapters import (
    REGULARIZED,
    Count,
    Distance,
    NonNegative,
    OfBatch,
    Positive,
    PreciseLoss,
    Reducer,
    Share,
    element,
    forwards,
    reduced,
)
from retrieval_pml.pair_matrix import Pairs, blocks, by_rows, similarities


class FastAPLoss(PreciseLoss, OfBatch, losses.FastAPLoss):
    """Upstream's, in a few N × N: a distance is shared between the two ends of its bin."""

    weighted = True

    def of_batch(self, mat: Tensor, labels: Tensor, indices_tuple: Any) -> Any:
        """Return the losses by name; see `OfBatch`."""
        loss, positives = by_rows(mat, Pairs(labels, labels), self._plain)
        return self.weigh(loss, positives > 0, labels, indices_tuple)

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        place = mat * (self.num_bins / 2**self.distance.power)
        low = place.detach().floor().clamp_(0, self.num_bins - 1)
        upper, low = place - low, low.long()
        none = mat.new_zeros(len(mat), self.num_bins + 1)
        row, column = torch.where(positive)
        near, bin_place = upper[row, column], row * (self.num_bins + 1) + low[row, column]
        of_positives = (
            none.flatten()
            .index_add(0, bin_place, 1 - near)
            .index_add(0, bin_place + 1, near)
            .view_as(none)
        )
        kept = (positive | negative).to(mat.dtype)
        upper = upper * kept
        every = none.scatter_add(1, low, kept - upper).scatter_add(1, low + 1, upper).cumsum(1)
        product = of_positives * of_positives.cumsum(1)
        safe = (product > 0) & (every > 0)
        share = (product / every.masked_fill(~safe, 1)).masked_fill(~safe, 0)
        count = positive.sum(1)
        return (1 - share.sum(1) / count.clamp(min=1)).masked_fill(count == 0, 0), count


@traits(ref_emb=False)
@forwards(FastAPLoss, REGULARIZED)
def fast_ap(
    num_bins: Count = 10,
    reducer: Reducer = None,
) -> losses.FastAPLoss:
    """FastAP: 1 − average precision, from soft histograms of squared distances.

    Cakir, He, Xia, Kulis & Sclaroff, Deep Metric Learning to Rank, CVPR 2019. Wants large batches.

    Args:
        num_bins: number of bins that divide the range of squared distances, 0 to 4.
    """


class SmoothAPLoss(PreciseLoss, OfBatch, losses.SmoothAPLoss):
    """Smoothed average precision of any batch, in blocks of positive pairs × N.

    Upstream reads the number of classes where it needs the items of each, so that its groups mix
    classes unless both numbers agree; and it requires the batch sorted by class, with equally many
    items of each. Here the batch may have any order and any class sizes; an item without another of
    its class is left out. As in the authors' code, a query counts among its own positives.
    """

    weighted = True

    def of_batch(self, mat: Tensor, labels: Tensor, indices_tuple: Any) -> Any:
        """Return the losses by name; see `OfBatch`."""
        pairs = Pairs(labels, labels)
        pairs.own = None  # a query counts among its own positives
        positives = pairs.counts()[0]
        parts = blocks(len(labels), len(labels), repeats=positives)
        loss, _ = by_rows(mat, pairs, self._plain, parts=parts)
        return self.weigh(loss, positives > 1, labels, indices_tuple)

    def _plain(self, mat: Tensor, same: Tensor, other: Tensor) -> Tensor:
        query, item = torch.where(same)
        # (pairs, N): how far each batch item is ahead of this positive in the query's ranking
        ahead = torch.sigmoid((mat[query] - mat[query, item].unsqueeze(1)) / self.temperature)
        ahead = ahead.scatter(1, item.unsqueeze(1), 0)
        precision = (1 + (ahead * same[query]).sum(1)) / (1 + ahead.sum(1))
        return 1 - precision.new_zeros(len(mat)).index_add(0, query, precision) / same.sum(1)


@traits(ref_emb=False)
@forwards(SmoothAPLoss, REGULARIZED)
def smooth_ap(
    temperature: Positive = 0.01,
    reducer: Reducer = None,
) -> losses.SmoothAPLoss:
    """Smooth-AP: 1 − average precision, with a sigmoid in place of each comparison of ranks.

    Brown, Xie, Kalogeiton & Zisserman, Smooth-AP: Smoothing the Path Towards Large-Scale Image
    Retrieval, ECCV 2020. Takes batches in any order and with any class sizes; upstream mixes up the
    number of classes and of items in each, and requires sorted, equal classes.

    Args:
        temperature: of the sigmoid; smaller is closer to the true ranks.
    """


class PNPLoss(PreciseLoss, OfBatch, losses.PNPLoss):
    """Upstream's, of the negatives before each positive, where upstream asks of each item (N³)."""

    def of_batch(self, mat: Tensor, labels: Tensor, indices_tuple: Any) -> Any:
        """Return the losses by name; see `OfBatch`."""
        pairs = Pairs(labels, labels)
        pairs.own = None  # a query counts among its own positives
        parts = blocks(len(mat), mat.shape[1], repeats=pairs.counts()[0])
        loss = by_rows(mat, pairs, self._plain, parts=parts)[0].mean()
        return reduced(1 - loss if self.variant == "Dq" else loss)

    def _plain(self, mat: Tensor, same: Tensor, other: Tensor) -> Tensor:
        query, item = torch.where(same)
        before = torch.sigmoid((mat[query] - mat[query, item].unsqueeze(1)) / self.anneal)
        rank = (before * other[query]).sum(1)
        costs: dict[str, Any] = {
            "O": lambda: rank,
            "Ds": lambda: torch.log(1 + rank),
            "Dq": lambda: 1 / (1 + rank) ** self.alpha,
            "Iu": lambda: (1 + rank) * torch.log(1 + rank),
            "Ib": lambda: (self.b * rank - torch.log(1 + self.b * rank)) / self.b**2,
        }
        cost: Tensor = costs[self.variant]()
        return cost.new_zeros(len(mat)).index_add(0, query, cost) / same.sum(1)


@traits(ref_emb=False, miner=False)
@forwards(PNPLoss, REGULARIZED)
def pnp(
    b: Positive = 2.0,
    alpha: Positive = 1.0,
    anneal: Positive = 0.01,
    variant: Literal["Ds", "Dq", "Iu", "Ib", "O"] = "O",
) -> losses.PNPLoss:
    """Penalises the negatives that rank before a positive, and nothing else.

    Li, Min, Song, Li, Zhang & Jiang, Rethinking the Optimization of Average Precision: Only
    Penalizing Negative Instances before Positive Ones is Enough, AAAI 2022.

    Args:
        b: the base of variant Ib.
        alpha: the exponent of variant Dq.
        anneal: the temperature of the sigmoid that counts negatives.
        variant: how the count R of negatives costs: O as R, Ds as log(1 + R), Dq as 1 − 1/(1 +
            R)^alpha, Iu as (1 + R) log(1 + R), Ib as (bR − log(1 + bR)) / b².
    """


class RankedListLoss(PreciseLoss, OfBatch, losses.RankedListLoss):
    """Upstream's, in a few N × N."""

    def of_batch(self, mat: Tensor, labels: Tensor, indices_tuple: Any) -> Any:
        """Return the losses by name; see `OfBatch`."""
        return element(by_rows(mat, Pairs(labels, labels), self._plain)[0])

    def _plain(self, mat: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        least = 1e-5 * mat.shape[1]  # upstream adds it to each weight
        over = (self.alpha - mat) * (negative & (mat < self.alpha) & (mat > 0))
        push = torch.exp(self.Tn * over) * (over > 0)
        inner = self.alpha - self.margin
        row, column = torch.where(positive & (mat > inner) & (mat > 0))
        beyond = mat[row, column] - inner
        pull, none = torch.exp(self.Tp * beyond), mat.new_zeros(len(mat))
        pulled = none.index_add(0, row, pull * beyond) / (none.index_add(0, row, pull) + least)
        pushed = (push * over).sum(1) / (push.sum(1) + least)
        loss: Tensor = (1 - self.imbalance) * pulled + self.imbalance * pushed
        return loss


@traits(ref_emb=False, miner=False)
@forwards(RankedListLoss, REGULARIZED)
def ranked_list(
    margin: Positive,
    Tn: NonNegative,
    imbalance: Share = 0.5,
    alpha: Positive | None = None,
    Tp: NonNegative = 0.0,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.RankedListLoss:
    """Ranked list loss: positives within a sphere around each query, negatives outside another.

    Wang, Hua, Kodirov, Hu, Garnier & Robertson, Ranked List Loss for Deep Metric Learning, CVPR
    2019; the paper uses margin = 0.4, alpha = 1.2, Tn = 10. Above 5 a temperature makes exp
    overflow-prone, and upstream warns.

    Args:
        margin: between both spheres, in the distance's unit.
        Tn: the temperature that weighs negatives by how much they violate; 0 weighs them equally.
        imbalance: the weight of negatives against positives.
        alpha: the radius of the outer sphere; by default 1 + margin / 2.
        Tp: the temperature that weighs positives by how much they violate; 0 weighs them equally.
        reducer: reduces the queries' losses to one number; the mean by default.
    """


class HistogramLoss(PreciseLoss, losses.HistogramLoss):
    """Upstream's histograms, of all positive and all negative pairs once each.

    Upstream goes through all triplets (N³), leaves out negative pairs of items that have no
    positive, fails on a cosine that rounds to 1 or more, and indexes a matrix by lists, which newer
    releases of PyTorch read differently.
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
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        mat = similarities(self.distance, embeddings, embeddings)
        if indices_tuple is None:
            assert labels is not None
            near, far = (mat[mask.triu_(1)] for mask in Pairs(labels, labels).of(slice(None)))
        else:
            a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels)
            near, far = mat[_unordered(a1, p)], mat[_unordered(a2, n)]
        if len(near) == 0 or len(far) == 0:
            return self.zero_losses()
        positive, negative = self.compute_density(near), self.compute_density(far)
        return reduced(torch.sum(negative * torch.cumsum(positive, 0)))

    def compute_density(self, distances: Tensor) -> Tensor:
        """Return the soft histogram (bins + 1,) of cosines (N,), shared between bins' ends."""
        bins = math.ceil(round(2 / self.delta, 6))
        place = (distances.clamp(-1, 1) + 1) / self.delta
        low = place.detach().floor().clamp(0, bins - 1).long()
        upper_share = place - low
        density = torch.zeros(bins + 1, dtype=distances.dtype, device=distances.device)
        density = density.index_add(0, low, 1 - upper_share).index_add(0, low + 1, upper_share)
        return density / len(distances)


def _unordered(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    pairs = torch.stack([torch.minimum(first, second), torch.maximum(first, second)])
    low, high = torch.unique(pairs, dim=1)
    return low, high


@traits(ref_emb=False)
@forwards(HistogramLoss, REGULARIZED)
def histogram(
    n_bins: Count | None = None,
    delta: Positive | None = None,
) -> losses.HistogramLoss:
    """Histogram loss: the probability that a negative pair is more similar than a positive one.

    Ustinova & Lempitsky, Learning Deep Embeddings with Histogram Loss, NIPS 2016. Counts every pair
    once; upstream fails when a cosine rounds to 1.

    Args:
        n_bins: number of bins that divide the cosines from −1 to 1; 100 when neither is given.
        delta: a bin's width, 2 / n_bins, instead of `n_bins`.
    """


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make for make in (fast_ap, smooth_ap, pnp, ranked_list, histogram)
}
