"""AML (adversarial metric learning): GMML's objective, on real and on misleading pairs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import PositiveInt
from retrieval.base.arrays import Bools, Floats
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from retrieval_aml.gmml import (
    NotNegative,
    PairLearner,
    Positive,
    Prior,
    Share,
    checked_pairs,
    eigen_of_factor,
    geodesic_factor,
    symmetric,
)

FARTHEST = 20.0
"""Bound of the magnitude of S's eigenvalues in `minimise`. The optimum is well within the bound."""
ROUND = 25
"""Number of iterations after which the search restarts with new second derivatives."""
RESOLVED = 1e-7
"""Slope below which steps follow the gradient alone: D changes by less than its rounding error."""
FLATTEST = 1e-8
"""Lower bound of the curvature by which a direction is scaled, as a share of the largest one."""


def adversarial_pairs(m: Floats, pairs: Floats, similar: Bools, beta: float) -> Floats:
    """Return the points π, π′ (N, 2, F) that confuse each pair most (Chen et al., Eq 3 and 9).

    For a pair x, x′ with y = 1 (similar) or y = −1 (dissimilar), the points minimise

        (π − π′)ᵀ M^(−y) (π − π′) + β [(π − x)ᵀ M (π − x) + (π′ − x′)ᵀ M (π′ − x′)].

    The midpoint stays, and the difference becomes β (2M^(−y) + βM)⁻¹ M (x − x′). Along an
    eigenvector of M with eigenvalue λ, the difference shrinks by the factor βλ² / (2 + βλ²) for a
    similar pair, and by β / (2 + β) for a dissimilar pair. The points of both kinds of pairs
    therefore approach each other.

    Args:
        m: (F, F) the metric, symmetric positive definite.
        pairs: (N, 2, F) the two points of each pair.
        similar: (N,) whether each pair is similar.
        beta: β > 0. The larger it is, the nearer the points stay to the pair.
    """
    values, vectors = np.linalg.eigh(m)
    middle = pairs.mean(axis=1)
    difference = pairs[:, 0] - pairs[:, 1]
    shorter = 1 / (1 + 2 / (beta * values**2))
    of_similar = ((difference @ vectors) * shorter) @ vectors.T
    half = np.where(similar[:, None], of_similar, beta / (2 + beta) * difference) / 2
    moved: Floats = np.stack([middle + half, middle - half], axis=1)
    return moved


@dataclass(frozen=True)
class Objective:
    """D(M) = tr(A M) + α tr(A h(M)) + c tr(B M⁻¹), which is Eq 11 with the corrected Eq 12.

    A and B are the means of δδᵀ over similar and dissimilar pairs. The adversarial pair of a
    similar pair with difference δ has the difference βM²(2I + βM²)⁻¹ δ; that of a dissimilar pair
    has β/(2 + β) δ. This gives

        h(λ) = β² λ⁵ / (2 + βλ²)²,    c = 1 + α (β / (2 + β))².

    Attributes:
        similar: A (F, F).
        dissimilar: B (F, F).
        alpha: α > 0, weight of the adversarial pairs.
        beta: β > 0. The larger it is, the nearer adversarial pairs stay to the original pairs.
    """

    similar: Floats
    dissimilar: Floats
    alpha: float
    beta: float

    @property
    def pull(self) -> float:
        """The weight c of the dissimilar pairs, real and adversarial."""
        return 1 + self.alpha * (self.beta / (2 + self.beta)) ** 2

    def __call__(self, m: Floats) -> tuple[float, Floats]:
        """Return D(M) and its gradient for a symmetric positive definite M (F, F).

        The gradient is A_eff − c M⁻¹ B M⁻¹ in Daleckii–Krein form, which is exact also for repeated
        eigenvalues. Eq 14 of the paper is not symmetric.
        """
        return self.at_eigen(*np.linalg.eigh(m))

    def at_eigen(self, values: Floats, vectors: Floats) -> tuple[float, Floats]:
        """Return D(M) and its gradient from eigenvalues (F,) and eigenvectors (F, F) of M."""
        rotated = vectors.T @ self.similar @ vectors
        inverse = (vectors / values) @ vectors.T
        back = inverse @ self.dissimilar @ inverse
        ratio = 1 / (1 + 2 / (self.beta * values**2))
        value = ((values + self.alpha * values * ratio**2) * rotated.diagonal()).sum()
        value += self.pull * (inverse * self.dissimilar).sum()
        effective = vectors @ (self._slopes(values) * rotated) @ vectors.T
        return float(value), symmetric(effective - self.pull * back)

    def effective_similar(self, m: Floats) -> Floats:
        """Return A_eff(M) = U [F ∘ (Uᵀ A U)] Uᵀ with F_ab = 1 + α h[λ_a, λ_b]."""
        return self.effective_similar_at(*np.linalg.eigh(m))

    def effective_similar_at(self, values: Floats, vectors: Floats) -> Floats:
        """Return A_eff(M) from eigenvalues (F,) and eigenvectors (F, F) of M."""
        rotated = vectors.T @ self.similar @ vectors
        return symmetric(vectors @ (self._slopes(values) * rotated) @ vectors.T)

    def _slopes(self, values: Floats) -> Floats:
        """Return F of `effective_similar`, (F, F)."""
        return 1 + self.alpha * divided_difference(values[:, None], values[None, :], self.beta)


def divided_difference(a: Floats, b: Floats, beta: float) -> Floats:
    """Return (h(a) − h(b)) / (a − b) of `Objective`'s h without cancellation; h′(a) where a = b."""
    aa = a * a
    bb = b * b
    ab = a * b
    top = 4 * (aa * aa + aa * ab + aa * bb + ab * bb + bb * bb)
    top = top + 4 * beta * aa * bb * (aa + ab + bb) + beta**2 * aa**2 * bb**2
    return beta**2 * top / ((2 + beta * aa) ** 2 * (2 + beta * bb) ** 2)


@dataclass(frozen=True)
class Result:
    """The result of the search.

    Attributes:
        half: (F, F) factor H of the metric M = HHᵀ.
        value: D(M).
        slope: largest entry of the scaled gradient of D(M) / D(start). Half its square is about the
            remaining gain.
        iterations: number of L-BFGS iterations.
    """

    half: Floats
    value: float
    slope: float
    iterations: int


def minimise(objective: Objective, *, tol: float, max_iter: int) -> Result:
    """Minimise D(M) over M = W exp(S) W, starting at S = 0.

    At first, W² is √c A⁻¹ # B, GMML's metric. Every `ROUND` iterations, and after a failed line
    search, the search restarts with the current metric as W². Line searches fail for moments of low
    rank and large α. The search ends when `Result.slope` is at most `tol`, after `max_iter`
    iterations, or when a restart does not lower D(M).
    """
    half = objective.pull**0.25 * geodesic_factor(objective.similar, objective.dissimilar, 0.5)
    iterations = 0
    value = np.inf
    while True:
        result = _round(objective, half, tol, min(ROUND, max_iter - iterations))
        iterations += result.iterations
        stuck = not result.value < value * (1 - 1e-12)
        if result.slope <= tol or iterations >= max_iter or stuck:
            return Result(result.half, result.value, result.slope, iterations)
        half = result.half
        value = result.value


def _round(objective: Objective, start: Floats, tol: float, max_iter: int) -> Result:
    """Search from S = 0 with W² = HHᵀ, where H is `start`.

    S is expressed in the eigenvectors of K = (W A_eff W + c W⁻¹ B W⁻¹) / 2. Along entry (i, j), the
    second derivative is about kᵢ + kⱼ, a sum of eigenvalues of K. Each variable of the search is an
    entry times the root of this derivative, so that ill-conditioned moments need no more iterations
    than others.
    """
    values, vectors = eigen_of_factor(start)
    unit = objective.at_eigen(values, vectors)[0]
    root, back = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    stretched = root @ objective.effective_similar_at(values, vectors) @ root
    shrunk = objective.pull * (back @ objective.dissimilar @ back)
    curvature, rotation = np.linalg.eigh((stretched + shrunk) / 2)
    w = root @ rotation
    size = len(w)
    curved = (curvature[:, None] + curvature[None, :]) / unit
    scale = 1 / np.sqrt(np.maximum(curved, FLATTEST * curved.max()))
    upper = np.triu_indices(size)
    # Off-diagonal entries occur twice: the factor √2 gives the vector the norm of the matrix.
    weight = np.where(upper[0] == upper[1], 1.0, np.sqrt(2.0))

    def factor(flat: Floats) -> tuple[Floats, Floats, Floats]:
        s = np.zeros((size, size))
        s[upper] = flat / weight
        s = (s + np.triu(s, 1).T) * scale
        values, vectors = np.linalg.eigh(s)
        values = np.clip(values, -FARTHEST, FARTHEST)
        return w @ (vectors * np.exp(values / 2)), values, vectors

    def loss(flat: Floats) -> tuple[float, Floats]:
        half, values, vectors = factor(flat)
        value, gradient = objective.at_eigen(*eigen_of_factor(half))
        rotated = vectors.T @ (w.T @ gradient @ w) @ vectors
        back = vectors @ (_exponential_slopes(values) * rotated) @ vectors.T
        return value / unit, weight * (scale * back)[upper] / unit

    result = minimize(
        loss,
        np.zeros(len(weight)),
        jac=True,
        method="L-BFGS-B",
        options={
            "maxiter": max_iter,
            "maxfun": 20 * max_iter,
            "gtol": tol,
            "ftol": 0.0,
            "maxcor": 20,
        },
    )
    flat = result.x
    iterations = int(result.nit)
    value, gradient = loss(flat)
    slope = float(np.abs(gradient).max())
    # At such slopes, the line search fails, because a step changes the value by less than its
    # rounding error. The gradient is still precise. All second derivatives are about 1, so the
    # gradient is the step.
    while tol < slope < RESOLVED and iterations < max_iter:
        next_value, next_gradient = loss(flat - gradient)
        next_slope = float(np.abs(next_gradient).max())
        if next_slope >= slope:
            break
        flat = flat - gradient
        value = next_value
        gradient = next_gradient
        slope = next_slope
        iterations += 1
    return Result(factor(flat)[0], value * unit, slope, iterations)


def _exponential_slopes(s: Floats) -> Floats:
    """Return (eᵃ − eᵇ) / (a − b) for all pairs a, b of `s`, and eᵃ where a = b."""
    half = (s[:, None] - s[None, :]) / 2
    safe = np.where(np.abs(half) < 1e-4, 1.0, half)
    ratio = np.where(np.abs(half) < 1e-4, 1 + half**2 / 6, np.sinh(safe) / safe)
    slopes: Floats = np.exp((s[:, None] + s[None, :]) / 2) * ratio
    return slopes


@dataclass(eq=False, repr=False)
class AML(PairLearner):
    """A metric trained like GMML, on pairs and on the most misleading pairs near them.

    Chen et al., "Adversarial Metric Learning" (IJCAI 2018), Eq 11. AML minimises

        L(M; pairs) + α L(M; adversarial pairs(M)),
        L(M; pairs) = mean over similar δᵀMδ + mean over dissimilar δᵀM⁻¹δ.

    Adversarial pairs have a closed form in M (Eq 9), so the objective is an exact function of M and
    two F × F matrices, for any number of pairs. L-BFGS on a symmetric S with M = W exp(S) W keeps M
    positive definite; the paper's projected gradient does not. The search finds stationary points,
    which is all that the paper's "global convergence" means. As α → 0, β → 0 or β → ∞, AML becomes
    GMML.

    The optimum M = A_eff⁻¹ # cB is the middle of a geodesic, as in GMML. A `t` other than .5 moves
    M along this geodesic, which the paper does not do.

    Args:
        alpha: α > 0, weight of the adversarial pairs.
        beta: β > 0. The larger it is, the nearer adversarial pairs stay to the original pairs.
        t: position on the geodesic from A_eff⁻¹ (0) to cB (1); .5 is the paper's AML.
        regularization: λ: A + λ M₀⁻¹ and B + λ M₀ replace A and B, as in `aml.gmml`.
        prior: M₀, one of "identity" (as `None`), "covariance" (the inverse covariance of the
            features) and a symmetric positive definite matrix. Only used with `regularization`.
        n_pairs: number of pairs to draw with `seed`. "paper" draws 1,000 C (C − 1) for C classes.
            `None` uses all pairs of the training items, without forming them.
        balance: whether similar and dissimilar pairs have the same total weight. If false, each
            pair has the same weight, as in the paper's sums, and M grows by about the root of
            (number of dissimilar pairs / number of similar pairs).
        standardize: whether to divide each feature by its standard deviation before learning. The
            learned map includes the scaling, so `transform` takes unscaled features. The result
            depends on the scales of the features, so standardise them if their units differ.
        tol: slope, relative to the objective, at which the search has converged.
        max_iter: largest number of L-BFGS iterations.
        seed: seed of the random choice of pairs; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.

    Attributes:
        objective_: D(M) at the end of the search, before `t` moves M.

    Example:
        >>> from sklearn.datasets import load_wine
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> from sklearn.pipeline import make_pipeline
        >>> x, y = load_wine(return_X_y=True)
        >>> knn = make_pipeline(AML(standardize=True), KNeighborsClassifier(5)).fit(x[::2], y[::2])
        >>> bool(knn.score(x[1::2], y[1::2]) > 0.9)
        True
    """

    alpha: Positive = 1.0
    beta: Positive = 1.0
    t: Share = 0.5
    regularization: NotNegative = 0.0
    prior: Prior = None
    n_pairs: PositiveInt | Literal["paper"] | None = None
    balance: bool = True
    standardize: bool = False
    tol: Positive = 1e-6
    max_iter: PositiveInt = 500

    def adversarial_pairs(self, pairs: ArrayLike, similar: ArrayLike) -> Floats:
        """Return the adversarial pairs π, π′ (Eq 9) under the learned metric.

        With `standardize`, the pairs are computed on standardised features, as in `fit`, and
        returned in the units of the original features.

        Args:
            pairs: (N, 2, F) the two points of each pair, which need not be training data.
            similar: (N,) whether each pair is similar, as in `fit_pairs`.

        Returns:
            The points (N, 2, F) of the adversarial pairs.

        Raises:
            ValueError: shapes do not fit or numbers are not finite.
        """
        check_is_fitted(self, "components_")
        x, alike = checked_pairs(pairs, similar)
        if x.shape[2] != self.n_features_in_:
            raise ValueError(
                f"The points of the pairs have {x.shape[2]} features, but AML was fitted on"
                f" {self.n_features_in_}."
            )
        m = self.get_mahalanobis_matrix() * self.scale_ * self.scale_[:, None]
        moved: Floats = adversarial_pairs(m, x / self.scale_, alike, self.beta) * self.scale_
        return moved

    def _learn(self, similar: Floats, dissimilar: Floats) -> Floats:
        if not self.balance:
            dissimilar = dissimilar * (self.n_dissimilar_ / self.n_similar_)
        objective = Objective(similar, dissimilar, self.alpha, self.beta)
        result = minimise(objective, tol=self.tol, max_iter=self.max_iter)
        self.objective_ = result.value
        self.n_iter_ = result.iterations
        self.converged_ = result.slope <= self.tol
        if not self.converged_:
            warnings.warn(
                f"AML stopped at a relative slope of {result.slope:.1g} after {result.iterations}"
                f" iterations, above tol = {self.tol:g}. Raise max_iter or tol, standardize the"
                " features, or raise regularization.",
                ConvergenceWarning,
                stacklevel=4,
            )
        if self.t == 0.5:
            return result.half
        return _moved(result.half, objective.pull * dissimilar, self.t)


def _moved(half: Floats, end: Floats, t: float) -> Floats:
    """Return a factor of the point at t on the geodesic with middle M = HHᵀ and end E (t = 1).

    The point is M^½ Zˢ M^½ with Z = M^−½ E M^−½ and s = 2t − 1.
    """
    values, vectors = eigen_of_factor(half)
    root, back = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    _, singular, right = np.linalg.svd(np.linalg.cholesky(end).T @ back)
    moved: Floats = root @ (right.T * singular ** (2 * t - 1))
    return moved
