"""AML's objective as a function of the metric alone, exact, from the two moments of the pairs:
O(F³), however many pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_aml.spd import symmetric

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Objective:
    """D(M) = tr(A M) + α tr(A h(M)) + c tr(B M⁻¹), Eq 11 with the adversarial pairs put in (Eq 12,
    corrected).

    The adversarial pair of a similar pair with difference δ has the difference βM²(2I + βM²)⁻¹ δ,
    that of a dissimilar pair β/(2 + β) δ. So, A and B the mean of δδᵀ over similar and dissimilar
    pairs,

        h(λ) = β² λ⁵ / (2 + βλ²)²,    c = 1 + α (β / (2 + β))².

    Attributes:
        similar: A, (F, F).
        dissimilar: B, (F, F).
        alpha: α > 0, weight of the adversarial pairs.
        beta: β > 0, weight of their staying near the pairs that they come from.
    """

    similar: Floats
    dissimilar: Floats
    alpha: float
    beta: float

    @property
    def pull(self) -> float:
        """c, the weight of the dissimilar pairs, real and adversarial."""
        return 1 + self.alpha * (self.beta / (2 + self.beta)) ** 2

    def __call__(self, m: Floats) -> tuple[float, Floats]:
        """Return D(M) and its gradient, both exact at repeated eigenvalues too.

        The gradient is A_eff − c M⁻¹ B M⁻¹ (the Daleckii–Krein form, where Eq 14 is not symmetric).

        Args:
            m: (F, F) symmetric positive definite.
        """
        return self.at(*np.linalg.eigh(m))

    def at(self, values: Floats, vectors: Floats) -> tuple[float, Floats]:
        """Return the same, given M's eigenvalues (F,) and eigenvectors (F, F), one per column."""
        turned = vectors.T @ self.similar @ vectors
        inverse = (vectors / values) @ vectors.T
        back = inverse @ self.dissimilar @ inverse
        ratio = 1 / (1 + 2 / (self.beta * values**2))
        value = ((values + self.alpha * values * ratio**2) * turned.diagonal()).sum()
        value += self.pull * (inverse * self.dissimilar).sum()
        effective = vectors @ (self._slopes(values) * turned) @ vectors.T
        return float(value), symmetric(effective - self.pull * back)

    def effective_similar(self, m: Floats) -> Floats:
        """Return A_eff(M) = U [F ∘ (Uᵀ A U)] Uᵀ, F_ab = 1 + α h[λ_a, λ_b]: a minimiser is M =
        A_eff⁻¹ # cB.
        """
        return self.effective_similar_at(*np.linalg.eigh(m))

    def effective_similar_at(self, values: Floats, vectors: Floats) -> Floats:
        """Return the same, given M's eigenvalues (F,) and eigenvectors (F, F), one per column."""
        turned = vectors.T @ self.similar @ vectors
        return symmetric(vectors @ (self._slopes(values) * turned) @ vectors.T)

    def _slopes(self, values: Floats) -> Floats:
        return 1 + self.alpha * divided_difference(values[:, None], values[None, :], self.beta)


def spectrum(values: Floats, beta: float) -> Floats:
    """Return h(λ) = β² λ⁵ / (2 + βλ²)², elementwise: what a similar pair's adversarial distance is
    along an eigenvector.
    """
    found: Floats = values / (1 + 2 / (beta * values**2)) ** 2
    return found


def divided_difference(a: Floats, b: Floats, beta: float) -> Floats:
    """Return h[a, b] = (h(a) − h(b)) / (a − b), written out so that nothing cancels; h′(a) where a
    = b.
    """
    aa, bb = a * a, b * b
    ab = a * b
    top = 4 * (aa * aa + aa * ab + aa * bb + ab * bb + bb * bb)
    top = top + 4 * beta * aa * bb * (aa + ab + bb) + beta**2 * aa**2 * bb**2
    return beta**2 * top / ((2 + beta * aa) ** 2 * (2 + beta * bb) ** 2)
