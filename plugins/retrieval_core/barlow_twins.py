"""Barlow Twins: a loss of two views of each item, without labels or negatives."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import NonNegativeFloat
from retrieval.helpers import pair_views, reduced_loss
from retrieval.plugin import CheckedLoss, traits
from torch import Tensor


@traits(ref_emb=False, miner=False)
class BarlowTwins(CheckedLoss):
    """Makes two views of an item alike and decorrelates the embedding's dimensions.

    Zbontar, Jing, Misra, LeCun & Deny, "Barlow Twins: Self-Supervised Learning via Redundancy
    Reduction" (ICML 2021), equations 1 and 2. The loss is

        Σ_i (1 − C_ii)² + λ Σ_i Σ_{j ≠ i} C_ij²

    where C_ij is the correlation over the batch between dimension i of the first views and
    dimension j of the second views. Rows with the same label are views of one item and are paired
    in order. Use the loss with `[augmentation] positives = "item"` and `views = 2`. The loss needs
    neither negatives nor large batches.

    Args:
        weight: λ, weight of the correlations between different dimensions.
    """

    def __init__(self, weight: NonNegativeFloat = 0.005) -> None:
        super().__init__()
        self.weight = weight

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, Any]:
        """Return the loss as one number; 0 for fewer than two pairs of views."""
        first, second = pair_views(labels)
        # One pair has no correlation.
        if len(first) < 2:
            return self.zero_losses()
        x, y = (_standard(embeddings[rows]) for rows in (first, second))
        correlation = x.T @ y / len(first)
        difference = correlation - torch.eye(len(correlation)).to(correlation)
        weights = torch.full_like(difference, self.weight).fill_diagonal_(1)
        total = (weights * difference.square()).sum()
        return reduced_loss(total)


def _standard(views: Tensor) -> Tensor:
    """Return views with mean 0 and variance 1 in each dimension."""
    centred = views - views.mean(0)
    # The summand keeps the gradient finite for a constant dimension.
    return centred / (centred.square().mean(0) + 1e-12).sqrt()
