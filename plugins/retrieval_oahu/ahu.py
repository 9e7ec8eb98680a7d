"""The adaptive hedge update of the levels' weights: Gao et al. 2019, Eq 20 and Algorithm 1, lines
9–11.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Rule = Literal["exp", "linear", "paper"]


def hedge_update(
    alpha: Floats, losses: Floats, beta: float, smoothing: float, rule: Rule = "exp"
) -> NDArray[np.float64]:
    """Return the weights after one round: discounted by the losses, floored at s / (L + 1), summing
    to 1.

    Args:
        alpha: (L + 1,) weights that sum to 1.
        losses: (L + 1,) each level's loss, 0 to 1.
        beta: β, within 0 and 1.
        smoothing: s. The floor comes before the sum is made 1, so what is guaranteed is (s / (L +
            1)) / (1 + s L / (L + 1)).
        rule: "exp" discounts by β^loss and "linear" by 1 − (1 − β) loss. By convexity β^loss is
            never the larger of the two, so "exp" is what the paper says that it wants, the larger
            step. "paper" is Eq 20 with its condition mended (β^{min loss} log β > β − 1), which
            takes "exp" only where it holds.
    """
    exponential = rule == "exp" or (
        rule == "paper" and beta ** float(losses.min()) * math.log(beta) > beta - 1.0
    )
    discount = beta ** losses.astype(np.float64) if exponential else 1.0 - (1.0 - beta) * losses
    changed = np.maximum(alpha * discount, smoothing / len(alpha))
    updated: NDArray[np.float64] = changed / changed.sum()
    return updated
