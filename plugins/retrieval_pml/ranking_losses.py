"""Losses of whole rankings, distributions of similarities and neighbourhoods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import loss_and_miner_utils
from retrieval.helpers import item_losses, losses_of, reduced_loss
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.pair_sums import (
    against_others,
    compared,
    labelled_pairs,
    log_sums,
    matrix_of,
    nearness,
    scaled,
)
from retrieval_pml.upstream_factories import FIXED, Share, offer


class SmoothAPLoss(losses.SmoothAPLoss):
    """Smooth-AP: 1 − average precision, with a sigmoid for each comparison of similarities.

    Brown, Xie, Kalogeiton & Zisserman, Smooth-AP: Smoothing the Path Towards Large-Scale Image
    Retrieval, ECCV 2020. Batches may have any order and any class sizes. pytorch-metric-learning
    confuses the number of classes with that of items per class, and requires sorted classes of
    equal size. An item that is alone in its class is left out. As in the authors' code, each query
    counts as one of its own positives.

    Args:
        temperature: temperature of the sigmoid. A lower one approximates the true ranks better.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the queries' losses, in the format of pytorch-metric-learning's reducers.

        The memory grows with the number of positive pairs times the number of items.
        """
        mat = self.distance(embeddings)
        same = labels.unsqueeze(1) == labels.unsqueeze(0)
        query, item = torch.where(same)
        # (pairs, N): whether each item ranks before this positive for the query, as a sigmoid
        ahead = torch.sigmoid((mat[query] - mat[query, item].unsqueeze(1)) / self.temperature)
        # A positive does not rank before itself.
        ahead = ahead.scatter(1, item.unsqueeze(1), 0)
        precision = (1 + (ahead * same[query]).sum(1)) / (1 + ahead.sum(1))
        loss = 1 - mat.new_zeros(len(mat)).index_add(0, query, precision) / same.sum(1)
        kept = torch.where(same.sum(1) > 1)[0]
        if len(kept) == 0:
            return self.zero_losses()
        weights = loss_and_miner_utils.convert_to_weights(indices_tuple, labels, dtype=loss.dtype)
        return losses_of((loss * weights)[kept], kept, "element")


class PNPLoss(losses.PNPLoss):
    """Penalises the negatives that rank before a positive, and nothing else.

    Li, Min, Song, Li, Zhang & Jiang, Rethinking the Optimization of Average Precision: Only
    Penalizing Negative Instances before Positive Ones is Enough, AAAI 2022. Negatives are counted
    before each positive only. pytorch-metric-learning counts them before every item, which takes
    memory for N³ numbers.

    Args:
        b: base of variant Ib.
        alpha: exponent of variant Dq.
        anneal: temperature of the sigmoid that counts negatives.
        variant: cost of R negatives: R for O, log(1 + R) for Ds, 1 − 1/(1 + R)^alpha for Dq, (1 +
            R) log(1 + R) for Iu, (bR − log(1 + bR)) / b² for Ib.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the loss, in the format of pytorch-metric-learning's reducers.

        The memory grows with the number of positive pairs times the number of items.
        """
        mat = self.distance(embeddings)
        same = labels.unsqueeze(1) == labels.unsqueeze(0)
        # A query counts as its own positive.
        query, item = torch.where(same)
        before = torch.sigmoid((mat[query] - mat[query, item].unsqueeze(1)) / self.anneal)
        # Negatives are counted before each positive only.
        cost = negatives = (before * ~same[query]).sum(1)
        if self.variant == "Ds":
            cost = torch.log(1 + negatives)
        elif self.variant == "Dq":
            cost = 1 / (1 + negatives) ** self.alpha
        elif self.variant == "Iu":
            cost = (1 + negatives) * torch.log(1 + negatives)
        elif self.variant == "Ib":
            cost = (self.b * negatives - torch.log(1 + self.b * negatives)) / self.b**2
        loss = (mat.new_zeros(len(mat)).index_add(0, query, cost) / same.sum(1)).mean()
        return reduced_loss(1 - loss if self.variant == "Dq" else loss)


class HistogramLoss(losses.HistogramLoss):
    """Histogram loss: the probability that a negative pair is more similar than a positive one.

    Ustinova & Lempitsky, Learning Deep Embeddings with Histogram Loss, NIPS 2016. Every pair counts
    once. pytorch-metric-learning goes through all triplets (N³), leaves out negative pairs of items
    that have no positive, and fails if a cosine rounds to 1.

    Args:
        n_bins: number of bins that divide the cosines from −1 to 1; 100 if `delta` is not set.
        delta: width of a bin, to be set instead of `n_bins`; it equals 2 / n_bins.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the loss, in the format of pytorch-metric-learning's reducers."""
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels)
        if len(a1) == 0 or len(a2) == 0:
            return self.zero_losses()
        mat = self.distance(embeddings)
        positive = self.compute_density(mat[_unordered(a1, p)])
        negative = self.compute_density(mat[_unordered(a2, n)])
        return reduced_loss(torch.sum(negative * torch.cumsum(positive, 0)))

    def compute_density(self, distances: Tensor) -> Tensor:
        """Return the soft histogram of cosines (N,): a weight for each edge of a bin, (bins + 1,).

        Each cosine is divided between the two edges of its bin, in proportion to nearness.
        """
        # 2 / delta may exceed a whole number by a rounding error, which would add a bin.
        bins = math.ceil(round(2 / self.delta, 6))
        place = (distances.clamp(-1, 1) + 1) / self.delta
        # The number of a bin is a step function; only the share has a gradient. A cosine of 1 is
        # in the last bin, whose upper edge it reaches.
        low = place.detach().floor().clamp(0, bins - 1).long()
        upper_share = place - low
        density = torch.zeros(bins + 1, dtype=distances.dtype, device=distances.device)
        density = density.index_add(0, low, 1 - upper_share).index_add(0, low + 1, upper_share)
        return density / len(distances)


def _unordered(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return each unordered pair once."""
    pairs = torch.stack([torch.minimum(first, second), torch.maximum(first, second)])
    low, high = torch.unique(pairs, dim=1)
    return low, high


class InstanceLoss(losses.InstanceLoss):
    """Instance loss: cross-entropy of recognising an item among all items of the batch.

    Zheng, Zheng, Garrett, Yang, Xu & Shen, Dual-Path Convolutional Image-Text Embeddings with
    Instance Loss, ACM TOMM 2020. Items that share a label count together: the loss of an item is
    −log(S / T), where S is the sum of exp(γ cos) over the items of its label, and T the sum over
    all items. pytorch-metric-learning takes a label's place among the sorted labels for the
    position of an item in the batch, which pulls items towards other classes.

    Args:
        gamma: γ, by which cosines are multiplied.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the items' losses, in the format of pytorch-metric-learning's reducers."""
        pairs = labelled_pairs(labels, labels, itself=None)
        mat = compared(self.distance, embeddings, embeddings)
        push, values = against_others(mat, scaled(self.gamma), pairs)
        pull = log_sums(self.gamma * values, pairs.anchors, len(labels))
        return item_losses(F.softplus(push - pull))


class NCALoss(losses.NCALoss):
    """Neighbourhood components analysis: −log probability that a neighbour has the item's class.

    Goldberger, Roweis, Hinton & Salakhutdinov, Neighbourhood Components Analysis, NIPS 2004 (the
    logarithmic objective). The loss is computed with logarithms; pytorch-metric-learning drops
    items whose probability rounds to 0.

    Args:
        softmax_scale: number by which distances are multiplied.
        distance: distance of two embeddings; by default the squared Euclidean distance of unit
            vectors.
    """

    def nca_computation(
        self,
        query: Tensor,
        reference: Tensor,
        query_labels: Tensor,
        reference_labels: Tensor,
        indices_tuple: Any,
    ) -> Any:
        """Return the queries' losses, in the format of pytorch-metric-learning's reducers."""
        same_items = query is reference
        weights = loss_and_miner_utils.convert_to_weights(
            indices_tuple, query_labels, dtype=query.dtype, using_ref=not same_items
        )
        scale = nearness(self.distance, self.softmax_scale)
        # An item is not its own neighbour.
        itself = 0 if same_items else None
        pairs = labelled_pairs(query_labels, reference_labels, itself)
        if len(pairs.anchors) == 0:
            return self.zero_losses()
        mat = compared(self.distance, query, reference)
        push, values = against_others(mat, scaled(scale), pairs)
        neighbours = log_sums(scale * values, pairs.anchors, len(query))
        kept = torch.unique_consecutive(pairs.anchors)
        loss = F.softplus((push - neighbours)[kept])
        return losses_of(loss * weights[kept], kept, "element")


class ProxyNCALoss(losses.ProxyNCALoss):
    """Proxy-NCA: neighbourhood components analysis with one proxy per class instead of neighbours.

    Movshovitz-Attias, Toshev, Leung, Ioffe & Singh, No Fuss Distance Metric Learning Using Proxies,
    ICCV 2017. Unlike in the paper, the denominator includes the proxy of the item's class, as in
    ProxyNCA++ (Teh, DeVries & Taylor, ECCV 2020), so that the loss is a proper softmax.

    Args:
        softmax_scale: number by which distances are multiplied.
        distance: distance of embeddings and proxies; by default the squared Euclidean distance of
            unit vectors.
        weight_regularizer: penalty on the proxies, added to the loss.
        weight_init_func: initialiser of the proxies; standard normal by default.
    """

    nca_computation = NCALoss.nca_computation


class NPairsLoss(losses.NPairsLoss):
    """N-pairs loss: one positive pair per class, each anchor against other classes' positives.

    Sohn, Improved Deep Metric Learning with Multi-class N-pair Loss Objective, NIPS 2016. Only the
    first positive pair of each class counts, so use two items per class. The paper does not scale
    embeddings (set `distance` to `pml.dot_product_similarity` with `normalize_embeddings = false`)
    and adds `pml.lp`.

    Args:
        distance: how two embeddings are compared; the dot product of unit vectors by default.
        reducer: reduces the pairs' losses to one number; the mean by default.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the losses of the pairs, in the format of pytorch-metric-learning's reducers."""
        if indices_tuple is not None:
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        ordered, order = torch.sort(labels, stable=True)
        same_as_next = ordered[1:] == ordered[:-1]
        starts = same_as_next.clone()
        starts[1:] &= ~same_as_next[:-1]
        (start,) = torch.where(starts)
        if len(start) == 0:
            return self.zero_losses()
        items = order[torch.stack([start, start + 1])]
        anchors, positives = embeddings.index_select(0, items.flatten()).chunk(2)
        mat = matrix_of(self.distance, anchors, positives)
        if not self.distance.is_inverted:
            mat = -mat
        targets = torch.arange(len(mat), device=mat.device)
        loss = F.cross_entropy(mat, targets, reduction="none")
        return losses_of(loss, items[0], "element")


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "fast_ap": offer(
        losses.FastAPLoss,
        """FastAP: 1 − average precision, from soft histograms of squared distances.

        Cakir, He, Xia, Kulis & Sclaroff, Deep Metric Learning to Rank, CVPR 2019. It needs large
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
        b=PositiveFloat,
        anneal=PositiveFloat,
        variant=Literal["Ds", "Dq", "Iu", "Ib", "O"],
    ),
    "ranked_list": offer(
        losses.RankedListLoss,
        """Ranked list loss: positives within a sphere around each query, negatives outside another.

        Wang, Hua, Kodirov, Hu, Garnier & Robertson, Ranked List Loss for Deep Metric Learning,
        CVPR 2019. The paper uses margin = 0.4, alpha = 1.2, Tn = 10. With a temperature above 5,
        exponentials may overflow, and pytorch-metric-learning warns.

        Args:
            margin: distance between the two spheres.
            Tn: temperature that weights negatives by their violation; 0 weights them equally.
            imbalance: weight of the negatives' loss; the positives' has weight 1 − imbalance.
            alpha: radius of the outer sphere; by default 1 + margin / 2.
            Tp: temperature that weights positives by their violation; 0 weights them equally.
            reducer: reduces the queries' losses to one number; the mean by default.
        """,
        ref_emb=False,
        miner=False,
        margin=PositiveFloat,
        similarity=False,
        Tn=NonNegativeFloat,
        imbalance=Share,
        alpha=PositiveFloat | None,
        Tp=NonNegativeFloat,
    ),
    "histogram": offer(
        HistogramLoss,
        ref_emb=False,
        without=("distance", "reducer"),
        n_bins=PositiveInt | None,
        delta=PositiveFloat | None,
    ),
    "instance": offer(InstanceLoss, ref_emb=False, miner=False, without=FIXED),
    "nca": offer(NCALoss),
    "proxy_nca": offer(ProxyNCALoss, ref_emb=False, rows="items"),
    "n_pairs": offer(NPairsLoss, ref_emb=False),
}
