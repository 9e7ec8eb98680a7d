"""AML: adversarial metric learning."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.exceptions import ConvergenceWarning

from retrieval_aml.adversarial import adversarial_pairs
from retrieval_aml.estimator import PairLearner
from retrieval_aml.gmml import Count, NotNegative, Positive, Prior, Share
from retrieval_aml.objective import Objective
from retrieval_aml.search import minimise
from retrieval_aml.spd import eigen_of_factor

Floats = NDArray[np.floating[Any]]


class AML(PairLearner):
    """GMML that is trained on the most misleading pair near each pair too.

    Chen et al., "Adversarial Metric Learning" (IJCAI 2018), Eq 11: it minimises

        L(M; pairs) + α L(M; adversarial pairs(M)),    L(M; pairs) = mean over similar δᵀMδ + mean over dissimilar δᵀM⁻¹δ,

    in which the adversarial pairs are a closed form of M (Eq 9), so that one function of M is left:
    exact, from two F × F matrices, however many pairs there are. L-BFGS on symmetric S, M = W
    exp(S) W, keeps M positive definite; the paper's projected gradient does not. As α → 0, β → 0 or
    β → ∞ it is GMML. Stationary points only: the paper's "global convergence" is that.

    `t` other than .5 is our AML_t: the optimum is M = A_eff⁻¹ # cB, the middle of a geodesic as in
    GMML, and `t` moves along it.

    Args:
        alpha: α > 0: weight of the adversarial pairs.
        beta: β > 0: weight of their staying near the pairs that they come from.
        t: where on the geodesic from A_eff⁻¹ (0) to cB (1); .5 is the paper's AML.
        regularization: λ, as in `aml.gmml`: A + λ M₀⁻¹ and B + λ M₀ take the places of A and B.
        prior: M₀: "identity" (also none), "covariance" (the inverse covariance of the features), or
            a symmetric positive definite matrix. Without `regularization` it is not used.
        n_pairs: none: all pairs of the training items, with no pair formed. Otherwise so many are
            drawn with `seed`; "paper" draws 1,000 C (C − 1) of C classes.
        balance: whether similar and dissimilar pairs weigh the same in total. False weighs each
            pair the same, as the paper's sums do, which makes M larger by about the root of
            dissimilar per similar pairs.
        standardize: whether each feature is first divided by its standard deviation; the map takes
            that in, so features are given as they come. The result depends on the features' scales,
            so use it where their units differ.
        tol: slope, relative to the objective, at which the search has converged.
        max_iter: most iterations of L-BFGS.
        seed: seed of the random choice of pairs; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Attributes:
        objective_: D(M) reached, before `t`.

    Example:
        >>> from sklearn.datasets import load_wine
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> from sklearn.pipeline import make_pipeline
        >>> x, y = load_wine(return_X_y=True)
        >>> knn = make_pipeline(AML(standardize=True), KNeighborsClassifier(5)).fit(x[::2], y[::2])
        >>> bool(knn.score(x[1::2], y[1::2]) > 0.95)
        True
    """

    objective_: float

    def __init__(
        self,
        alpha: Positive = 1.0,
        beta: Positive = 1.0,
        t: Share = 0.5,
        regularization: NotNegative = 0.0,
        prior: Prior = None,
        n_pairs: Count | Literal["paper"] | None = None,
        balance: bool = True,
        standardize: bool = False,
        tol: Positive = 1e-6,
        max_iter: Count = 500,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.alpha = alpha
        self.beta = beta
        self.t = t
        self.regularization = regularization
        self.prior = prior
        self.n_pairs = n_pairs
        self.balance = balance
        self.standardize = standardize
        self.tol = tol
        self.max_iter = max_iter
        self.seed = seed
        self.random_state = random_state

    def adversarial_pairs(self, pairs: ArrayLike, similar: ArrayLike) -> Floats:
        """Return each pair's most misleading neighbour under the learned metric, π and π′ of Eq 9.

        With `standardize` they are found among standardised features, as in the fit, and given in
        the features' own units.

        Args:
            pairs: (N, 2, F) the two points of each pair; none need to have been fitted on.
            similar: (N,) whether they are similar, as in `fit_pairs`.

        Returns:
            (N, 2, F).

        Raises:
            ValueError: shapes do not fit or numbers are not finite.
        """
        both, alike = self._checked_pairs_as_fitted(pairs, similar)
        m = self.get_mahalanobis_matrix() * self.scale_ * self.scale_[:, None]
        found: Floats = adversarial_pairs(m, both / self.scale_, alike, self.beta) * self.scale_
        return found

    def _learn(self, similar: Floats, dissimilar: Floats) -> Floats:
        if not self.balance:
            dissimilar = dissimilar * (self.n_dissimilar_ / self.n_similar_)
        objective = Objective(similar, dissimilar, self.alpha, self.beta)
        found = minimise(objective, tol=self.tol, max_iter=self.max_iter)
        self.objective_ = found.value
        self.n_iter_ = found.iterations
        self.converged_ = found.slope <= self.tol
        if not self.converged_:
            warnings.warn(
                f"AML stopped at a relative slope of {found.slope:.1g} after {found.iterations}"
                f" iterations, above tol = {self.tol:g}. Raise max_iter or tol, standardize the"
                " features, or raise regularization.",
                ConvergenceWarning,
                stacklevel=4,
            )
        return (
            found.half if self.t == 0.5 else _slid(found.half, objective.pull * dissimilar, self.t)
        )

    def _refuse_parameters(self) -> None:
        super()._refuse_parameters()
        for name in ("alpha", "beta", "tol"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be finite and greater than 0.")
        if self.max_iter < 1:
            raise ValueError(f"max_iter is {self.max_iter}; it must be at least 1.")


def _slid(half: Floats, end: Floats, t: float) -> Floats:
    """Return the factor of the point at t on the geodesic to `end` (t = 1) whose middle is M = HHᵀ.

    It is M^½ Zˢ M^½ with Z = M^−½ E M^−½ and s = 2t − 1.
    """
    values, vectors = eigen_of_factor(half)
    root, back = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    _, singular, right = np.linalg.svd(np.linalg.cholesky(end).T @ back)
    slid: Floats = root @ (right.T * singular ** (2 * t - 1))
    return slid
