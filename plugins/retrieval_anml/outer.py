"""The function ℓ that is applied to xᵢ = (radius of the similar) − (radius of the dissimilar), and
its slope.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Floats = NDArray[np.floating[Any]]
Name = Literal["hinge", "smooth_hinge", "logistic", "identity", "sigmoid"]


@dataclass(frozen=True)
class Outer:
    """ℓ(x), where x > 0 is a query whose similar items reach further than its dissimilar ones.

    Args:
        name: "hinge" [m + x]₊, "smooth_hinge" the same with a parabola over `width` in place of the
            kink, "logistic" log(1 + e^{m + x}), "identity" x, "sigmoid" 1 / (1 + e^{−x}).
        margin: m.
        width: over how much of m + x the smooth hinge's slope grows from 0 to 1.
    """

    name: Name = "smooth_hinge"
    margin: float = 1.0
    width: float = 0.1

    @property
    def floor(self) -> float:
        """At and below this x, ℓ and its slope are exactly 0."""
        return -self.margin if self.name in ("hinge", "smooth_hinge") else -np.inf

    def __call__(self, x: Floats) -> tuple[Floats, Floats]:
        """Return ℓ and its slope at each x, a subgradient at the hinge's kink."""
        if self.name == "identity":
            return x, np.ones_like(x)
        if self.name == "sigmoid":
            p = expit(x)
            return p, p * expit(-x)
        t = x + self.margin
        if self.name == "logistic":
            return np.logaddexp(0, t), expit(t)
        if self.name == "hinge":
            return np.maximum(t, 0), (t > 0).astype(x.dtype)
        slope = np.clip(t / self.width, 0, 1)
        return np.where(t < self.width, t * slope / 2, t - self.width / 2), slope
