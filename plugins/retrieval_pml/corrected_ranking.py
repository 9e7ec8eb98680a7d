"""Ranking losses where upstream departs from the paper or fails on some batch; each class says what differs."""

from __future__ import annotations

import math
from typing import Any

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from torch import Tensor

from retrieval_pml.common import PreciseLoss, on_labels, reduced


class SmoothAPLoss(PreciseLoss, losses.SmoothAPLoss):
    """Smoothed average precision of any batch, in memory of (positive pairs) × N.

    Upstream reads the number of classes where it needs the items of each, so that its groups mix classes unless both
    numbers agree; and it requires the batch sorted by class, with equally many items of each. Here the batch may
    have any order and any class sizes; an item without another of its class is left out. As in the authors' code, a
    query counts among its own positives.
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
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        labels = on_labels(labels, embeddings, "SmoothAPLoss")
        same = labels.unsqueeze(1) == labels.unsqueeze(0)
        kept = torch.where(same.sum(1) > 1)[0]
        if len(kept) == 0:
            return self.zero_losses()
        sims = self.distance(embeddings)
        query, item = torch.where(same & (same.sum(1) > 1).unsqueeze(1))
        # (pairs, N): how far each batch item is ahead of this positive in the query's ranking
        ahead = torch.sigmoid((sims[query] - sims[query, item].unsqueeze(1)) / self.temperature)
        ahead = ahead.scatter(1, item.unsqueeze(1), 0)
        precision = (1 + (ahead * same[query]).sum(1)) / (1 + ahead.sum(1))
        ap = precision.new_zeros(len(embeddings)).index_add(0, query, precision) / same.sum(1)
        weights = loss_and_miner_utils.convert_to_weights(indices_tuple, labels, dtype=ap.dtype)
        loss = ((1 - ap) * weights)[kept]
        return {"loss": {"losses": loss, "indices": kept, "reduction_type": "element"}}


class HistogramLoss(PreciseLoss, losses.HistogramLoss):
    """Upstream's histograms, of all positive and all negative pairs once each, as the paper defines them.

    Upstream goes through all triplets (N³), leaves out negative pairs of items that have no positive, fails on a
    cosine that rounds to 1 or more, and indexes a matrix by lists, which newer releases of PyTorch read differently.
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
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels)
        if len(a1) == 0 or len(a2) == 0:
            return self.zero_losses()
        mat = self.distance(embeddings)
        positive = self.compute_density(mat[_unordered(a1, p)])
        negative = self.compute_density(mat[_unordered(a2, n)])
        return reduced(torch.sum(negative * torch.cumsum(positive, 0)))

    def compute_density(self, distances: Tensor) -> Tensor:
        """Return the soft histogram (bins + 1,) of cosines (N,): each is shared between its bin's two ends."""
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
