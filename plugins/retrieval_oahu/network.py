"""OAHU's network in NumPy, with one embedding per level: forward pass, gradient and update.

Level l of L + 1 maps h_l (h_0 is the input) to h_{l+1} = relu(h_l W_{l+1}) and to the embedding f_l
= h_l Θ_l, scaled to unit length (Gao et al., "Towards Self-Adaptive Metric Learning On the Fly",
WWW 2019, Eq 1). W_{l+1} and Θ_l are side by side in one matrix. For a triplet, a level therefore
costs one product forward, one backward and one rank-three update in place.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from retrieval.base.arrays import Floats, Floats64
from scipy.linalg import blas

# At the largest distance, 2, these divisors make d_sim equal τ and d_dis equal 2.
_SIM = math.exp(2.0) - 1.0
_DIS = 1.0 - math.exp(-2.0)
Rule = Literal["exp", "linear", "paper"]
TINY = 1e-12
"""An embedding shorter than this counts as zero: its unit vector and its gradient are 0."""


def similar_threshold(distance: Floats, tau: float) -> Floats:
    """Return d_sim (Eq 11), from 0 to τ; it increases with the distance and never exceeds it."""
    return tau / _SIM * np.expm1(distance)


def dissimilar_threshold(distance: Floats, tau: float) -> Floats:
    """Return d_dis (Eq 11), from 2 − τ to 2; increases with the distance and is never below it."""
    return (2.0 - tau) - tau / _DIS * np.expm1(-distance)


def bounds_loss(positive: Floats, negative: Floats, tau: float) -> tuple[Floats, Floats, Floats]:
    """Return the loss ½ (attractive + repulsive) of Eq 12–13, and its derivatives by D⁺ and D⁻.

    The distances D⁺ (`positive`) and D⁻ (`negative`) are between 0 and 2, the loss is between 0 and
    1, ∂/∂D⁺ ≥ 0 and ∂/∂D⁻ ≤ 0.
    """
    d_sim = similar_threshold(positive, tau)
    d_dis = dissimilar_threshold(negative, tau)
    slope_p = 0.5 / (2.0 - d_sim)
    slope_n = -0.5 / d_dis
    attractive = np.maximum(positive - d_sim, 0.0)
    repulsive = np.maximum(d_dis - negative, 0.0)
    # Only rounding can put a distance beyond its threshold; there, loss and derivative are 0.
    return (
        slope_p * attractive - slope_n * repulsive,
        slope_p * (positive > d_sim),
        slope_n * (negative < d_dis),
    )


def hedge_update(
    alpha: Floats, losses: Floats, beta: float, smoothing: float, rule: Rule = "exp"
) -> Floats64:
    """Return the weights after one hedge update: discounted by the losses, floored and normalised.

    Args:
        alpha: (L + 1,) weights that sum to 1.
        losses: (L + 1,) losses of the levels, 0 to 1.
        beta: β, between 0 and 1.
        smoothing: s. The floor s / (L + 1) is applied before normalising, so the guaranteed minimum
            is (s / (L + 1)) / (1 + s L / (L + 1)).
        rule: "exp" multiplies a weight by β^loss, "linear" by 1 − (1 − β) loss. By convexity "exp"
            is the larger discount, which the paper's text asks for. "paper" is Eq 20 with its
            condition corrected: "exp" if β^{min loss} log β > β − 1, and "linear" otherwise.
    """
    exponential = rule == "exp" or (
        rule == "paper" and beta ** float(losses.min()) * math.log(beta) > beta - 1.0
    )
    discount: Floats = 1.0 - (1.0 - beta) * losses
    if exponential:
        discount = beta ** losses.astype(np.float64)
    changed = np.maximum(alpha * discount, smoothing / len(alpha))
    updated: Floats64 = changed / changed.sum()
    return updated


class Network:
    """The weights of the network, and buffers for a step.

    Args:
        first: (F, H + E) the columns of W₁, then of Θ₀.
        deeper: (L, H, H + E) the columns of W_{l+1}, then of Θ_l, for each hidden layer. The last W
            is unused and stays zero. `step` changes both arrays in place.
        hidden: H, the number of units per hidden layer.
    """

    def __init__(self, first: Floats, deeper: Floats, hidden: int) -> None:
        if not (
            first.flags.c_contiguous and deeper.flags.c_contiguous and first.dtype == deeper.dtype
        ):
            raise ValueError("the weights must be C-contiguous arrays of one type")
        self.hidden = hidden
        self.levels = [first, *deeper]
        self.depth = len(deeper)
        width = first.shape[1]
        # Without these buffers and the updates in place, a step takes up to three times as long.
        self._out = np.empty((self.depth + 1, 3, width), first.dtype)
        self._back = np.zeros((self.depth + 1, 3, width), first.dtype)
        self._active = np.empty((self.depth, 3, hidden), first.dtype)
        self._ger = blas.sgemm if first.dtype == np.float32 else blas.dgemm

    @classmethod
    def random(
        cls, features: int, depth: int, hidden: int, embedding: int, seed: int, dtype: Any
    ) -> Network:
        """Return a network with random weights of variance 2 / fan-in (W) or 1 / fan-in (Θ)."""
        rng = np.random.default_rng(seed)
        first = rng.standard_normal((features, hidden + embedding))
        deeper = rng.standard_normal((depth, hidden, hidden + embedding))
        for level in (first, *deeper):
            level[:, :hidden] *= (2.0 / len(level)) ** 0.5
            level[:, hidden:] *= (1.0 / len(level)) ** 0.5
        (deeper[-1] if depth else first)[:, :hidden] = 0.0
        return cls(first.astype(dtype), deeper.astype(dtype), hidden)

    def embed(self, x: Floats) -> Floats:
        """Return the unit embeddings (L + 1, N, E) of standardised features (N, F)."""
        h = x
        embeddings = []
        for level in self.levels:
            out = h @ level
            embeddings.append(unit(out[:, self.hidden :]))
            h = np.maximum(out[:, : self.hidden], 0)
        return np.stack(embeddings)

    def step(self, rows: Floats, alpha: Floats, tau: float, rate: float) -> Floats:
        """Learn from one triplet; return the levels' losses (L + 1,) before the update (Eq 13).

        Args:
            rows: (3, F) standardised anchor, positive and negative.
            alpha: (L + 1,) weights of the levels' losses (Eq 19).
            tau: τ of the thresholds.
            rate: learning rate.
        """
        hidden = self.hidden
        out = self._out
        back = self._back
        active = self._active
        h = rows
        for number, level in enumerate(self.levels):
            np.dot(h, level, out=out[number])
            if number < self.depth:
                h = np.maximum(out[number, :, :hidden], 0, out=active[number])
        losses, gradient = triplet_gradient(out[:, :, hidden:], alpha, tau)
        back[:, :, hidden:] = gradient
        for number in range(self.depth, 0, -1):
            # h_l feeds its embedding and the next layer, so this is the sum of Eq 22 from j = l.
            through = np.dot(back[number], self.levels[number].T)
            np.multiply(through, active[number - 1] > 0, out=back[number - 1, :, :hidden])
        for number, level in enumerate(self.levels):
            if number:
                h = active[number - 1]
            else:
                h = rows
            # level −= η hᵀ back, in place. BLAS is column-major, so all arrays are transposed.
            self._ger(-rate, back[number].T, h.T, beta=1.0, c=level.T, trans_b=1, overwrite_c=1)
        return losses


def triplet_gradient(z: Floats, alpha: Floats, tau: float) -> tuple[Floats, Floats]:
    """Return the losses (L + 1,), and the gradient of Σ α_l loss_l by the embeddings `z`.

    `z` (L + 1, 3, E) has the unscaled embeddings of anchor, positive and negative for each level.
    """
    norms = np.sqrt(np.einsum("lie,lie->li", z, z))
    inverse = np.divide(1, norms, out=np.zeros_like(norms), where=norms >= TINY)
    f = z * inverse[:, :, None]
    # Anchor − positive, anchor − negative.
    differences = f[:, :1] - f[:, 1:]
    squares = np.einsum("lie,lie->li", differences, differences)
    distances = np.minimum(np.sqrt(squares), 2)
    losses, slope_p, slope_n = bounds_loss(distances[:, 0], distances[:, 1], tau)
    slopes = np.stack([slope_p, slope_n], axis=1) * alpha[:, None]
    # The distance of two equal embeddings has no gradient.
    pull = np.divide(slopes, distances, out=np.zeros_like(slopes), where=distances > TINY)
    differences *= pull[:, :, None]
    g = np.empty_like(f)
    np.add(differences[:, 0], differences[:, 1], out=g[:, 0])
    np.negative(differences, out=g[:, 1:])
    g -= f * np.einsum("lie,lie->li", f, g)[:, :, None]
    g *= inverse[:, :, None]
    return losses, g


def unit(z: Floats) -> Floats:
    """Return rows (…, E) scaled to length 1; 0 where the length is below `TINY`."""
    norms = np.sqrt((z * z).sum(axis=-1, keepdims=True))
    scaled: Floats = np.divide(z, norms, out=np.zeros_like(z), where=norms >= TINY)
    return scaled
