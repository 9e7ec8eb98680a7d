"""The adversarial pairs in closed form: the most misleading pair near each pair, under a metric (Eq
9).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def adversarial_pairs(m: Floats, pairs: Floats, similar: NDArray[np.bool_], beta: float) -> Floats:
    """Return the points π, π′ (N, 2, F) that minimise the confusion of each pair (Chen et al., Eq 3
    and 9).

    For a pair x, x′ with y = 1 (similar) or −1 they minimise

        (π − π′)ᵀ M^(−y) (π − π′) + β [(π − x)ᵀ M (π − x) + (π′ − x′)ᵀ M (π′ − x′)].

    The midpoint stays; the difference becomes β (2M^(−y) + βM)⁻¹ M (x − x′), which along an
    eigenvector of M is shorter by βλ² / (2 + βλ²) for a similar pair and by β / (2 + β) for a
    dissimilar one. So both kinds move together, never apart.

    Args:
        m: (F, F) the metric, symmetric positive definite.
        pairs: (N, 2, F).
        similar: (N,).
        beta: β > 0; the larger, the nearer they stay.
    """
    values, vectors = np.linalg.eigh(m)
    middle = pairs.mean(axis=1)
    difference = pairs[:, 0] - pairs[:, 1]
    shorter = 1 / (1 + 2 / (beta * values**2))
    near = ((difference @ vectors) * shorter) @ vectors.T
    half = np.where(similar[:, None], near, beta / (2 + beta) * difference) / 2
    found: Floats = np.stack([middle + half, middle - half], axis=1)
    return found
