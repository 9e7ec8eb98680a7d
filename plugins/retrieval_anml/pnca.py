"""PNCA: neighbourhood components analysis with an exponent on the similar."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrieval_anml.estimator import NeighborhoodLearner
from retrieval_anml.lanml import Count, NotNegative, Positive
from retrieval_anml.neighborhoods import Neighborhoods
from retrieval_anml.outer import Outer


class PNCA(NeighborhoodLearner):
    """The linear map that makes a soft nearest neighbour's class right most often; `alpha` = 1 is
    NCA exactly.

    Song et al., "Adaptive Neighborhood Metric Learning", Eq 21: it minimises 1 − mean over i of
    p_i, the share of items that the soft neighbour gets wrong, with

        p_i = s_i / (s_i + Σ_{j ∈ D_i} e^{−d_ij}),    s_i = |S_i| (mean over S_i of e^{−α d_ij})^{1/α}    ("mean")
                                                   or s_i = (Σ over S_i of e^{−α d_ij})^{1/α}             ("sum")

    The paper prints the sum; it saturates for a small α (p_i = 1 wherever the search starts, so
    nothing is learned), and the mean form doesn't. Both are NCA (Goldberger et al., 2004) at α = 1.
    A large α looks at the nearest of the class only, a small one at all of it. Not convex; the
    search starts at M₀ = I / √N. An item whose class has no other member is nobody's query; a
    feature that is constant takes no part.

    Args:
        alpha: α > 0.
        form: "mean" or "sum", see above.
        regularization: λ of the mean squared distance of queries to their class, which the paper
            does not add; 0 for none.
        standardize: whether each feature is first divided by its standard deviation, as in the
            paper's experiments; the map takes that in, so features are given as they come. Without
            it, scale the features yourself.
        n_components: width C of the codes; none: the number of features.
        max_queries: at most so many items are queries: beyond, so many are drawn with `seed`, in
            each class alike, and all others stay their neighbours. None: no limit. Time grows with
            queries × items.
        max_iter: most iterations of L-BFGS.
        tol: least gain of an iteration that is worth another.
        seed: seed of the random choice of queries; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.
    """

    def __init__(
        self,
        alpha: Positive = 1.0,
        form: Literal["mean", "sum"] = "mean",
        regularization: NotNegative = 0.0,
        standardize: bool = True,
        n_components: Count | None = None,
        max_queries: Count | None = 5000,
        max_iter: Count = 100,
        tol: Positive = 1e-5,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.alpha = alpha
        self.form = form
        self.regularization = regularization
        self.standardize = standardize
        self.n_components = n_components
        self.max_queries = max_queries
        self.max_iter = max_iter
        self.tol = tol
        self.seed = seed
        self.random_state = random_state

    def _neighborhoods(
        self, x: NDArray[np.floating[Any]], codes: NDArray[np.intp], queries: int | None
    ) -> Neighborhoods:
        power = 1.0 if self.form == "mean" else 1 / self.alpha
        # log s = |S|'s share − b_α(S), log Σ_D = log |D| − b_1(D): 1 − p is the sigmoid of their
        # difference
        return Neighborhoods(
            x,
            codes,
            gamma1=self.alpha,
            gamma2=1.0,
            outer=Outer("sigmoid"),
            offset=lambda similar, dissimilar: math.log(dissimilar) - power * math.log(similar),
            regularization=self.regularization,
            queries=queries,
            seed=self._chosen_seed(),
        )

    def _refuse_parameters(self) -> None:
        self._refuse_common()
        if not (np.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha is {self.alpha}; it must be finite and greater than 0.")
        if self.form not in ("mean", "sum"):
            raise ValueError(f"form is {self.form!r}; it must be 'mean' or 'sum'.")
        if not (np.isfinite(self.regularization) and self.regularization >= 0):
            raise ValueError(
                f"regularization is {self.regularization}; it must be finite and at least 0."
            )
