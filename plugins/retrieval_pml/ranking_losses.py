"""Losses of whole rankings, distributions of similarities and neighbourhoods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import loss_and_miner_utils
from torch import Tensor

from retrieval_pml.offers import (
    FIXED,
    Count,
    NonNegative,
    Positive,
    Share,
    element,
    losses_of,
    offer,
    reduced,
)


class SmoothAPLoss(losses.SmoothAPLoss):
    """Smooth-AP: 1 − average precision, with a sigmoid in place of each comparison of ranks.

    Brown, Xie, Kalogeiton & Zisserman, Smooth-AP: Smoothing the Path Towards Large-Scale Image
    Retrieval, ECCV 2020. Takes batches in any order and with any class sizes; upstream mixes up the
    number of classes and of items in each, and requires sorted, equal classes. An item without
    another of its class is left out; as in the authors' code, a query counts among its own
    positives.

    Args:
        temperature: of the sigmoid; smaller is closer to the true ranks.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the queries' losses by name, in the memory of positive pairs × N."""
        mat, same = self.distance(embeddings), labels.unsqueeze(1) == labels.unsqueeze(0)
        query, item = torch.where(same)
        # (pairs, N): how far each batch item is ahead of this positive in the query's ranking
        ahead = torch.sigmoid((mat[query] - mat[query, item].unsqueeze(1)) / self.temperature)
        ahead = ahead.scatter(1, item.unsqueeze(1), 0)
        precision = (1 + (ahead * same[query]).sum(1)) / (1 + ahead.sum(1))
        loss = 1 - mat.new_zeros(len(mat)).index_add(0, query, precision) / same.sum(1)
        kept = torch.where(same.sum(1) > 1)[0]
        if len(kept) == 0:
            return self.zero_losses()
        weights = loss_and_miner_utils.convert_to_weights(indices_tuple, labels, dtype=loss.dtype)
        return losses_of((loss * weights)[kept], kept)


class PNPLoss(losses.PNPLoss):
    """Penalises the negatives that rank before a positive, and nothing else.

    Li, Min, Song, Li, Zhang & Jiang, Rethinking the Optimization of Average Precision: Only
    Penalizing Negative Instances before Positive Ones is Enough, AAAI 2022. Asks of the negatives
    before each positive, where upstream asks of each item (N³).

    Args:
        b: the base of variant Ib.
        alpha: the exponent of variant Dq.
        anneal: the temperature of the sigmoid that counts negatives.
        variant: how the count R of negatives costs: O as R, Ds as log(1 + R), Dq as 1 − 1/(1 +
            R)^alpha, Iu as (1 + R) log(1 + R), Ib as (bR − log(1 + bR)) / b².
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the loss by name, in the memory of positive pairs × N."""
        mat, same = self.distance(embeddings), labels.unsqueeze(1) == labels.unsqueeze(0)
        query, item = torch.where(same)  # a query counts among its own positives
        before = torch.sigmoid((mat[query] - mat[query, item].unsqueeze(1)) / self.anneal)
        rank = (before * ~same[query]).sum(1)
        if self.variant == "Ds":
            rank = torch.log(1 + rank)
        elif self.variant == "Dq":
            rank = 1 / (1 + rank) ** self.alpha
        elif self.variant == "Iu":
            rank = (1 + rank) * torch.log(1 + rank)
        elif self.variant == "Ib":
            rank = (self.b * rank - torch.log(1 + self.b * rank)) / self.b**2
        loss = (mat.new_zeros(len(mat)).index_add(0, query, rank) / same.sum(1)).mean()
        return reduced(1 - loss if self.variant == "Dq" else loss)


class HistogramLoss(losses.HistogramLoss):
    """Histogram loss: the probability that a negative pair is more similar than a positive one.

    Ustinova & Lempitsky, Learning Deep Embeddings with Histogram Loss, NIPS 2016. Counts every pair
    once; upstream goes through all triplets (N³), leaves out negative pairs of items that have no
    positive, and fails when a cosine rounds to 1.

    Args:
        n_bins: number of bins that divide the cosines from −1 to 1; 100 when neither is given.
        delta: a bin's width, 2 / n_bins, instead of `n_bins`.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the loss by name, in the format of upstream's reducers."""
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels)
        if len(a1) == 0 or len(a2) == 0:
            return self.zero_losses()
        mat = self.distance(embeddings)
        positive = self.compute_density(mat[_unordered(a1, p)])
        negative = self.compute_density(mat[_unordered(a2, n)])
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


class InstanceLoss(losses.InstanceLoss):
    """Instance loss: each item is to be told from all others of the batch, by cross-entropy.

    Zheng, Zheng, Garrett, Yang, Xu & Shen, Dual-Path Convolutional Image-Text Embeddings with
    Instance Loss, ACM TOMM 2020. Items that share a label share their vote: −log Σ over own label /
    Σ over all, of exp(γ cos). Upstream takes the rank of a label for the position of an item, which
    draws items towards other classes.

    Args:
        gamma: cosines are multiplied by it.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the items' losses by name, in the format of upstream's reducers."""
        votes = self.distance(embeddings) * self.gamma
        same = labels.unsqueeze(1) == labels.unsqueeze(0)
        own = votes.masked_fill(~same, -torch.inf)
        return element(torch.logsumexp(votes, 1) - torch.logsumexp(own, 1))


class NCALoss(losses.NCALoss):
    """Neighbourhood components analysis: −log probability that a neighbour has the item's class.

    Goldberger, Roweis, Hinton & Salakhutdinov, Neighbourhood Components Analysis, NIPS 2004 (the
    logarithmic objective). Computed by logarithms; upstream drops items whose probability rounds to
    0.

    Args:
        softmax_scale: distances are multiplied by it.
        distance: how two embeddings are compared; squared Euclidean on unit vectors by default.
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
        own = query is reference
        weights = loss_and_miner_utils.convert_to_weights(
            indices_tuple, query_labels, dtype=query.dtype, using_ref=not own
        )
        scale = self.softmax_scale if self.distance.is_inverted else -self.softmax_scale
        logits = self.distance(query, reference) * scale
        same = query_labels.unsqueeze(1) == reference_labels.unsqueeze(0)
        if own:
            itself = torch.eye(len(query), dtype=torch.bool, device=query.device)
            logits, same = logits.masked_fill(itself, -torch.inf), same & ~itself
        kept = torch.where(same.any(1))[0]
        if len(kept) == 0:
            return self.zero_losses()
        logits, same = logits[kept], same[kept]
        neighbours = torch.logsumexp(logits.masked_fill(~same, -torch.inf), 1)
        loss = torch.logsumexp(logits, 1) - neighbours
        return losses_of(loss * weights[kept], kept)


class ProxyNCALoss(losses.ProxyNCALoss):
    """Proxy-NCA: neighbourhood components analysis with one proxy per class in place of neighbours.

    Movshovitz-Attias, Toshev, Leung, Ioffe & Singh, No Fuss Distance Metric Learning Using Proxies,
    ICCV 2017. As upstream's, and unlike the paper's, the denominator includes the item's own proxy
    (Teh, DeVries & Taylor, ProxyNCA++, ECCV 2020): a proper softmax.

    Args:
        softmax_scale: distances are multiplied by it.
        distance: how embeddings are compared with proxies; squared Euclidean on unit vectors by
            default.
        weight_regularizer: a penalty on the proxies, added to the loss.
        weight_init_func: how the proxies begin; standard normal by default.
    """

    nca_computation = NCALoss.nca_computation


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "fast_ap": offer(
        losses.FastAPLoss,
        """FastAP: 1 − average precision, from soft histograms of squared distances.

        Cakir, He, Xia, Kulis & Sclaroff, Deep Metric Learning to Rank, CVPR 2019. Wants large
        batches.

        Args:
            num_bins: number of bins that divide the range of squared distances, 0 to 4.
        """,
        ref_emb=False,
        without=FIXED,
    ),
    "smooth_ap": offer(SmoothAPLoss, ref_emb=False, without=FIXED),
    "pnp": offer(
        PNPLoss,
        ref_emb=False,
        miner=False,
        without=("distance", "reducer"),
        b=Positive,
        anneal=Positive,
        variant=Literal["Ds", "Dq", "Iu", "Ib", "O"],
    ),
    "ranked_list": offer(
        losses.RankedListLoss,
        """Ranked list loss: positives within a sphere around each query, negatives outside another.

        Wang, Hua, Kodirov, Hu, Garnier & Robertson, Ranked List Loss for Deep Metric Learning,
        CVPR 2019; the paper uses margin = 0.4, alpha = 1.2, Tn = 10. Above 5 a temperature makes
        exp overflow-prone, and upstream warns.

        Args:
            margin: between both spheres, in the distance's unit.
            Tn: the temperature that weighs negatives by how much they violate; 0 weighs them
                equally.
            imbalance: the weight of negatives against positives.
            alpha: the radius of the outer sphere; by default 1 + margin / 2.
            Tp: the temperature that weighs positives by how much they violate; 0 weighs them
                equally.
            reducer: reduces the queries' losses to one number; the mean by default.
        """,
        ref_emb=False,
        miner=False,
        margin=Positive,
        Tn=NonNegative,
        imbalance=Share,
        alpha=Positive | None,
        Tp=NonNegative,
    ),
    "histogram": offer(
        HistogramLoss,
        ref_emb=False,
        without=("distance", "reducer"),
        n_bins=Count | None,
        delta=Positive | None,
    ),
    "instance": offer(InstanceLoss, ref_emb=False, miner=False, without=FIXED),
    "nca": offer(NCALoss),
    "proxy_nca": offer(ProxyNCALoss, ref_emb=False, rows="items"),
    "n_pairs": offer(
        losses.NPairsLoss,
        """N-pairs loss: one positive pair per class, each anchor against other classes' positives.

        Sohn, Improved Deep Metric Learning with Multi-class N-pair Loss Objective, NIPS 2016. Only
        the first positive pair of each class counts, so a batch of two items per class wastes
        nothing. The paper does not normalise (set `distance` to `pml.dot_product_similarity` with
        `normalize_embeddings = false`) and adds `pml.lp`.

        Args:
            distance: how two embeddings are compared; the dot product of unit vectors by default.
            reducer: reduces the pairs' losses to one number; the mean by default.
        """,
        ref_emb=False,
    ),
}
