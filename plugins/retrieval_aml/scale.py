"""The multiple of a metric at which AML's objective is smallest: a convex function of one variable."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 60


@torch.no_grad()
def best_scale(
    moments: Tensor, eigenvalues: Tensor, dissimilar: Tensor, alpha: float, beta: float
) -> float:
    """Return t > 0 that minimises t Σ aᵢ (1 + α sᵢ(t)²) + d/t, with sᵢ(t) = βt²λᵢ² / (2 + βt²λᵢ²).

    That is AML's objective at tM (Eq 11). In τ = log t each summand is convex: the logarithm of e^τ
    s² has the slope g = 5 − 4s and the bend −8s(1 − s), and g² − 8s(1 − s) = 25 − 48s + 24s² is at
    least 1 on [0, 1]. The derivative's one root is bracketed by the case α = 0, as 1 ≤ 1 + αs²(5 −
    4s) ≤ 1 + 1.158α.

    Args:
        moments: aᵢ (C,), the similar pairs' mean squared difference along each eigenvector; their
            sum is above 0.
        eigenvalues: λᵢ (C,) of M.
        dissimilar: d > 0, the whole weight of the dissimilar pairs at t = 1.
        alpha: α ≥ 0.
        beta: β > 0.
    """
    a, squared, d = moments.double(), eigenvalues.double().square(), dissimilar.double()
    high = (d / a.sum()).log() / 2
    low = (
        high - torch.log1p(torch.as_tensor(1.158 * alpha, dtype=torch.float64, device=a.device)) / 2
    )
    for _ in range(STEPS if alpha else 0):
        middle = (low + high) / 2
        x = beta * (2 * middle).exp() * squared
        s = x / (2 + x)
        slope = middle.exp() * (a * (1 + alpha * s * s * (5 - 4 * s))).sum() - d * (-middle).exp()
        low, high = torch.where(slope > 0, low, middle), torch.where(slope > 0, middle, high)
    return float(((low + high) / 2).exp())
