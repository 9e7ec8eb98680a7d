"""GMML: geometric mean metric learning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from retrieval_aml.estimator import PairLearner
from retrieval_aml.spd import geodesic_factor

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Prior = Literal["identity", "covariance"] | list[list[float]] | None


class GMML(PairLearner):
    """A linear map under which similar pairs are near and dissimilar ones far, in closed form.

    Zadeh et al., "Geometric Mean Metric Learning" (ICML 2016). With A and B the means of (x − x′)(x
    − x′)ᵀ over similar and dissimilar pairs, the minimum of tr(A M) + tr(B M⁻¹) is the geometric
    mean M = A⁻¹ # B; `t` moves along the geodesic from A⁻¹ to B, and `regularization` λ draws both
    towards a prior M₀:

        M = (A + λ M₀⁻¹)⁻¹ #_t (B + λ M₀).

    Args:
        t: where on the geodesic, 0 to 1: 0 is A⁻¹ alone (whitening within classes), .5 the
            geometric mean, 1 is B alone. Worth tuning: small values, .1 to .3, are often better.
        regularization: λ, in the units of A and B, which are squared features.
        prior: M₀: "identity" (also none), "covariance" (the inverse covariance of the features), or
            a symmetric positive definite matrix. Without `regularization` it is not used.
        n_pairs: none: all pairs of the training items, with no pair formed. Otherwise so many are
            drawn with `seed`; "paper" draws 1,000 C (C − 1) of C classes.
        standardize: whether each feature is first divided by its standard deviation; the map takes
            that in, so features are given as they come. The result depends on the features' scales,
            so use it where their units differ.
        seed: seed of the random choice of pairs; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Directions in which no pair differs (a constant feature) take no part; M has its own geometric
    mean there. Where pairs of one kind never differ (fewer items than features), that moment's
    eigenvalues are raised to 1e-10 of their mean. So M is always positive definite.

    Example:
        >>> from sklearn.datasets import load_wine
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> from sklearn.pipeline import make_pipeline
        >>> x, y = load_wine(return_X_y=True)
        >>> knn = make_pipeline(GMML(t=0.3, standardize=True), KNeighborsClassifier(5)).fit(x[::2], y[::2])
        >>> bool(knn.score(x[1::2], y[1::2]) > 0.95)
        True
    """

    def __init__(
        self,
        t: Share = 0.5,
        regularization: NotNegative = 0.0,
        prior: Prior = None,
        n_pairs: Count | Literal["paper"] | None = None,
        standardize: bool = False,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.t = t
        self.regularization = regularization
        self.prior = prior
        self.n_pairs = n_pairs
        self.standardize = standardize
        self.seed = seed
        self.random_state = random_state

    def _learn(
        self, similar: NDArray[np.floating[Any]], dissimilar: NDArray[np.floating[Any]]
    ) -> NDArray[np.floating[Any]]:
        self.converged_, self.n_iter_ = True, 0
        return geodesic_factor(similar, dissimilar, self.t)
