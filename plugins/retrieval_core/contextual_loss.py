"""Contextual similarity loss: two items are similar if they share neighbours."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat
from retrieval.helpers import reduced_loss
from retrieval.plugin import CheckedLoss, traits
from torch import Tensor
from torch.nn import functional

Count = Annotated[int, Field(ge=2)]
Share = Annotated[float, Field(ge=0, le=1)]
STEEPNESS = 10.0
"""Slope that replaces the zero gradient of a step function in the backward pass."""


@traits(ref_emb=False, miner=False)
class Contextual(CheckedLoss):
    """Combines a loss of shared neighbours with a contrastive loss and a mean regulariser.

    Liao, Tsiligkaridis & Kulis, "Supervised Metric Learning to Rank for Retrieval via Contextual
    Similarity Optimization" (ICML 2023), implemented like the authors' code. Let s be the cosines
    of the batch, D = 2 − 2 s, and D_i(k) the value of D for item i and its k-th nearest item,
    counting i itself. Then

        N_k(i, j) = 1 if D_ij ≤ D_i(k) + ε, else 0
        w̃_ij = ½ (|N_k(i) ∩ N_k(j)| / |N_k(i)| + |N̄_k(i) ∩ N̄_k(j)| / |N̄_k(i)|) N_k(i, j)
        R(i, j) = N_{k/2}(i, j) N_{k/2}(j, i)
        ŵ_ij = Σ_l R(i, l) w̃_lj / |R(i)|,    w_ij = ½ (ŵ_ij + ŵ_ji)

    where N_k(i) is the set of j with N_k(i, j) = 1 and N̄_k(i) its complement. The loss is

        λ L_context + γ L_mean + (1 − λ − γ) L_contrast

    L_context is the mean of (w_ij − y_ij)² over all pairs, with y = 1 for pairs of one class and 0
    for others. L_mean is (mean of s − m)². L_contrast is the mean of [p − s]₊ over pairs of one
    class plus the mean of [s − n]₊ over pairs of two classes. Both means are over the numbers above
    0. In the gradient, the steps in N have slope 10, and |N_k(i)| and |N̄_k(i)| are constants.

    Args:
        neighbors: k, which should equal `[sampler] items`.
        epsilon: ε, tolerance at the border of a neighbourhood.
        weight: λ, weight of the contextual loss.
        mean_weight: γ, weight of the mean similarity's regulariser; λ + γ ≤ 1.
        mean: m, the desired mean cosine of the batch.
        positive_margin: p, the cosine above which a pair of one class costs nothing.
        negative_margin: n, the cosine below which a pair of two classes costs nothing.
    """

    def __init__(
        self,
        neighbors: Count = 4,
        epsilon: NonNegativeFloat = 0.05,
        weight: Share = 0.4,
        mean_weight: Share = 0.1,
        mean: float = 0.25,
        positive_margin: float = 0.75,
        negative_margin: float = 0.6,
    ) -> None:
        super().__init__()
        if weight + mean_weight > 1:
            raise ValueError(
                f"weight + mean_weight is {weight + mean_weight:g} but must be at most 1, because"
                " the contrastive loss gets the rest"
            )
        self.neighbors = neighbors
        self.epsilon = epsilon
        self.weight = weight
        self.mean_weight = mean_weight
        self.mean = mean
        self.positive_margin = positive_margin
        self.negative_margin = negative_margin

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> dict[str, Any]:
        """Return the weighted sum of the three losses as one number."""
        count = len(embeddings)
        if count < 2:
            return self.zero_losses()
        unit = functional.normalize(embeddings)
        similarity = unit @ unit.T
        same = (labels[:, None] == labels).to(similarity.dtype)
        pairs = 1 - torch.eye(count).to(similarity)
        error = (contextual(similarity, self.neighbors, self.epsilon) - same).square() * pairs
        contrast = _mean((self.positive_margin - similarity).relu() * same) + _mean(
            (similarity - self.negative_margin).relu() * (1 - same)
        )
        total = (
            self.weight * error.sum() / count**2
            + self.mean_weight * (similarity.mean() - self.mean).square()
            + (1 - self.weight - self.mean_weight) * contrast
        )
        return reduced_loss(total)


def contextual(similarity: Tensor, neighbors: int, epsilon: float) -> Tensor:
    """Return the contextual similarities w (N, N) of a batch with cosines (N, N)."""
    # Rounding can make the distance of equal vectors negative.
    closeness = -(2 - 2 * similarity).clamp(min=0)
    ranked = closeness.detach().sort(1, descending=True).values
    last = len(ranked) - 1

    def near(k: int) -> Tensor:
        border: Tensor = ranked[:, min(k - 1, last), None]
        step: Tensor = _Step.apply(closeness + epsilon - border)
        return step

    inside = near(neighbors)
    outside = 1 - inside
    overlap = inside @ inside.T / inside.sum(1, keepdim=True).detach()
    # The clamp is for a neighbourhood of the whole batch, which has nothing outside.
    beyond = outside @ outside.T / outside.sum(1, keepdim=True).detach().clamp(min=1)
    half = near(neighbors // 2)
    mutual = half * half.T
    expanded = mutual @ (0.5 * (overlap + beyond) * inside) / mutual.sum(1, keepdim=True)
    return 0.5 * (expanded + expanded.T)


def _mean(losses: Tensor) -> Tensor:
    """Return the mean of the losses above 0, or 0 if there are none."""
    return losses.sum() / (losses > 0).sum().clamp(min=1)


class _Step(torch.autograd.Function):
    """1 where a number is at least 0, else 0; its gradient is `STEEPNESS`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * STEEPNESS
