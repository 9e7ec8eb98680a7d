"""The adaptive-bound triplet loss of one space, on plain distances: thresholds, losses and slopes.

Gao et al. 2019, Eq 8–13. The thresholds come from the distance *before* the update, so no gradient
flows through them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

_SIM = math.exp(2.0) - 1.0
_DIS = 1.0 - math.exp(-2.0)


def similar_threshold(distance: Floats, tau: float) -> Floats:
    """Return d_sim (Eq 11), within 0 and τ, increasing with the distance and never above it."""
    return tau / _SIM * np.expm1(distance)


def dissimilar_threshold(distance: Floats, tau: float) -> Floats:
    """Return d_dis (Eq 11), within 2 − τ and 2, increasing with the distance and never below it."""
    return (2.0 - tau) - tau / _DIS * np.expm1(-distance)


def bounds_loss(positive: Floats, negative: Floats, tau: float) -> tuple[Floats, Floats, Floats]:
    """Return the loss ½ (attractive + repulsive) of Eq 12–13, and its slopes by both distances.

    Args:
        positive: distances D⁺, any shape, between 0 and 2.
        negative: distances D⁻, likewise.
        tau: τ of Eq 8, within 0 and 2.

    Returns:
        The loss, 0 to 1; ∂/∂D⁺ ≥ 0; ∂/∂D⁻ ≤ 0, each of the distances' shape.
    """
    near, far = similar_threshold(positive, tau), dissimilar_threshold(negative, tau)
    slope_p, slope_n = 0.5 / (2.0 - near), -0.5 / far
    loss = slope_p * np.maximum(positive - near, 0.0) - slope_n * np.maximum(far - negative, 0.0)
    # beyond the threshold by rounding alone: the loss is 0 there and so is its slope
    return loss, slope_p * (positive > near), slope_n * (negative < far)
