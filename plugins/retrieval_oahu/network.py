"""OAHU's over-complete network in numpy, with forward pass, gradient and update for one triplet.

Level l of L + 1 maps h_l (h_0 is the input) to h_{l+1} = relu(h_l W_{l+1}) and to the embedding f_l
= h_l Θ_l, scaled to unit length (Gao et al. 2019, Eq 1). W_{l+1} and Θ_l lie side by side in one
matrix, so a level costs one product forward, one backward and one rank-three update in place.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import blas

Floats = NDArray[np.floating[Any]]
_SIM = math.exp(2.0) - 1.0
_DIS = 1.0 - math.exp(-2.0)
Rule = Literal["exp", "linear", "paper"]
TINY = 1e-12
"""An embedding shorter than this counts as zero: its unit vector is 0, and it has no gradient."""


def similar_threshold(distance: Floats, tau: float) -> Floats:
    """Return d_sim (Eq 11), between 0 and τ; increases with the distance, never above it."""
    return tau / _SIM * np.expm1(distance)


def dissimilar_threshold(distance: Floats, tau: float) -> Floats:
    """Return d_dis (Eq 11), between 2 − τ and 2; increases with the distance, never below it."""
    return (2.0 - tau) - tau / _DIS * np.expm1(-distance)


def bounds_loss(positive: Floats, negative: Floats, tau: float) -> tuple[Floats, Floats, Floats]:
    """Return the loss ½ (attractive + repulsive) of Eq 12–13, and its derivatives by D⁺ and D⁻.

    Distances lie between 0 and 2, the loss between 0 and 1; ∂/∂D⁺ ≥ 0 and ∂/∂D⁻ ≤ 0.
    """
    near, far = similar_threshold(positive, tau), dissimilar_threshold(negative, tau)
    slope_p, slope_n = 0.5 / (2.0 - near), -0.5 / far
    loss = slope_p * np.maximum(positive - near, 0.0) - slope_n * np.maximum(far - negative, 0.0)
    # only rounding can put a distance beyond its threshold; loss and derivative are 0 there
    return loss, slope_p * (positive > near), slope_n * (negative < far)


def hedge_update(
    alpha: Floats, losses: Floats, beta: float, smoothing: float, rule: Rule = "exp"
) -> NDArray[np.float64]:
    """Return the weights after one hedge update: discounted by losses, floored and normalised.

    Args:
        alpha: (L + 1,) weights that sum to 1.
        losses: (L + 1,) each level's loss, 0 to 1.
        beta: β, between 0 and 1.
        smoothing: s. The floor s / (L + 1) is applied before normalising, so the guaranteed minimum
            is (s / (L + 1)) / (1 + s L / (L + 1)).
        rule: "exp" discounts by β^loss, "linear" by 1 − (1 − β) loss. By convexity β^loss is the
            larger discount, which the paper's text asks for. "paper" is Eq 20 with its condition
            corrected (β^{min loss} log β > β − 1): "exp" if it holds, "linear" otherwise.
    """
    exponential = rule == "exp" or (
        rule == "paper" and beta ** float(losses.min()) * math.log(beta) > beta - 1.0
    )
    discount = beta ** losses.astype(np.float64) if exponential else 1.0 - (1.0 - beta) * losses
    changed = np.maximum(alpha * discount, smoothing / len(alpha))
    updated: NDArray[np.float64] = changed / changed.sum()
    return updated


class Network:
    """The network's weights, and buffers for a step.

    Args:
        first: (F, H + E) columns of W₁, then Θ₀; `step` changes them in place.
        deeper: (L, H, H + E) columns of W_{l+1}, then Θ_l, for each hidden layer; `step` changes
            them in place. The last W is unused and stays zero.
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
        self._out = np.empty((self.depth + 1, 3, width), first.dtype)
        self._back = np.zeros((self.depth + 1, 3, width), first.dtype)
        self._active = np.empty((self.depth, 3, hidden), first.dtype)
        self._ger = blas.sgemm if first.dtype == np.float32 else blas.dgemm

    @classmethod
    def random(
        cls, features: int, depth: int, hidden: int, embedding: int, seed: int, dtype: Any
    ) -> Network:
        """Return a network with normal weights of variance 2 / fan-in (He et al.) or 1 / fan-in."""
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
        h, embeddings = x, []
        for level in self.levels:
            out = h @ level
            embeddings.append(unit(out[:, self.hidden :]))
            h = np.maximum(out[:, : self.hidden], 0)
        return np.stack(embeddings)

    def step(self, rows: Floats, alpha: Floats, tau: float, rate: float) -> Floats:
        """Learn from one triplet; return each level's loss (L + 1,) before the update (Eq 13).

        Args:
            rows: (3, F) standardised anchor, positive and negative.
            alpha: (L + 1,) weights of the levels' losses (Eq 19).
            tau: τ of the thresholds.
            rate: learning rate.
        """
        hidden, out, back, active = self.hidden, self._out, self._back, self._active
        h = rows
        for number, level in enumerate(self.levels):
            np.dot(h, level, out=out[number])
            if number < self.depth:
                h = np.maximum(out[number, :, :hidden], 0, out=active[number])
        losses, gradient = triplet_gradient(out[:, :, hidden:], alpha, tau)
        back[:, :, hidden:] = gradient
        for number in range(self.depth, 0, -1):
            # h_l feeds its embedding and the next layer, which gives the sum of Eq 22 from j = l
            flowing = np.dot(back[number], self.levels[number].T)
            np.multiply(flowing, active[number - 1] > 0, out=back[number - 1, :, :hidden])
        for number, level in enumerate(self.levels):
            h = rows if number == 0 else active[number - 1]
            # level −= η hᵀ back, in place; BLAS is column-major, so everything is transposed
            self._ger(-rate, back[number].T, h.T, beta=1.0, c=level.T, trans_b=1, overwrite_c=1)
        return losses


def triplet_gradient(z: Floats, alpha: Floats, tau: float) -> tuple[Floats, Floats]:
    """Return the losses (L + 1,) and the gradient of Σ α_l loss_l by the unscaled embeddings.

    `z` (L + 1, 3, E) holds the unscaled embeddings of anchor, positive and negative per level.
    """
    norms = np.sqrt(np.einsum("lie,lie->li", z, z))
    inverse = np.divide(1, norms, out=np.zeros_like(norms), where=norms >= TINY)
    f = z * inverse[:, :, None]
    # the differences anchor − positive and anchor − negative
    apart = f[:, :1] - f[:, 1:]
    distances = np.minimum(np.sqrt(np.einsum("lie,lie->li", apart, apart)), 2)
    losses, slope_p, slope_n = bounds_loss(distances[:, 0], distances[:, 1], tau)
    slopes = np.stack([slope_p, slope_n], axis=1) * alpha[:, None]
    # the distance of two equal embeddings has no gradient
    pull = np.divide(slopes, distances, out=np.zeros_like(slopes), where=distances > TINY)
    apart *= pull[:, :, None]
    g = np.empty_like(f)
    np.add(apart[:, 0], apart[:, 1], out=g[:, 0])
    np.negative(apart, out=g[:, 1:])
    g -= f * np.einsum("lie,lie->li", f, g)[:, :, None]
    g *= inverse[:, :, None]
    return losses, g


def unit(z: Floats) -> Floats:
    """Return rows (…, E) scaled to length 1; 0 where the length is below `TINY`."""
    norms = np.sqrt((z * z).sum(axis=-1, keepdims=True))
    scaled: Floats = np.divide(z, norms, out=np.zeros_like(z), where=norms >= TINY)
    return scaled
