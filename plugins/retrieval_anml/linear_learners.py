"""LANML and PNCA: linear maps that separate neighbours, learned by L-BFGS."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, PositiveInt
from retrieval.base.arrays import Floats, Ints
from retrieval.helpers import check_parameters, deviations
from retrieval.plugin import LinearMap
from scipy.optimize import minimize
from sklearn.base import clone
from sklearn.utils.validation import check_array
from threadpoolctl import threadpool_limits

from retrieval_anml.neighborhoods import Neighborhoods, Objective, Outer

ONE_THREAD = 10_000_000
"""Below this many pairs of a query and an item, `fit` limits BLAS to one thread."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
NEAREST = 10
"""Default number of neighbours from the class of a query for γ₁ < 0, as in the paper."""


@dataclass(eq=False, repr=False, kw_only=True)
class NeighborhoodLearner(LinearMap):
    """A linear map L (F, C) with M = LLᵀ, found by L-BFGS; subclasses define the objective.

    The parameters that every subclass shares are keyword-only.

    Attributes:
        components_: (C, F) the learned map, Lᵀ.
        objective_: value of the objective at the end.
        n_iter_: number of iterations. If it equals `max_iter`, `fit` stopped before `tol` was met.
        n_queries_: number of items that were queries.
    """

    standardize: bool = True
    n_components: PositiveInt | None = None
    max_queries: PositiveInt | None = 5000
    max_iter: PositiveInt = 100
    tol: Positive = 1e-5
    seed: int | None = None
    random_state: int | None = None

    def _neighborhoods(self, x: Floats, codes: Ints, queries: int | None) -> Neighborhoods:
        raise NotImplementedError

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from features (N, F) and labels (N,), which may be text.

        Raises:
            ValueError: features are not finite, there is only one class, no class has two members,
                or a parameter is out of range.
        """
        raw, codes = self._checked(X, y)
        if self.standardize:
            scale = deviations(raw)
        else:
            scale = np.ones(raw.shape[1])
        x = raw / scale
        loss = self._neighborhoods(x, codes, self.max_queries)
        start = self._start(x)
        # For small products, several threads are no faster, and much slower on busy cores.
        with threadpool_limits(1 if loss.queries * len(x) < ONE_THREAD else None, user_api="blas"):
            result = minimize(
                lambda flat: _flat(loss(flat.reshape(start.shape))),
                start.ravel(),
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": self.max_iter, "ftol": self.tol, "gtol": 1e-8},
            )
        learned = result.x.reshape(start.shape)
        self.components_ = np.ascontiguousarray(learned.T / scale)
        self.mean_ = raw.mean(axis=0)
        self.objective_ = float(result.fun)
        self.n_iter_ = int(result.nit)
        self.n_queries_ = loss.queries
        if np.abs(learned).max() < 1e-6 * np.abs(start).max():
            warnings.warn(
                f"{type(self).__name__} learned the zero map: every distance is 0. Reduce"
                " regularization.",
                stacklevel=2,
            )
        return self

    def objective(self, L: ArrayLike, X: ArrayLike, y: ArrayLike) -> tuple[float, Floats]:
        """Return the objective that `fit` minimises, and its gradient (F, C), at a map L (F, C).

        All items are queries and features are used unscaled, whatever `max_queries` and
        `standardize` are. The learner need not be fitted, and does not change.

        Args:
            L: (F, C) the map, the transpose of `components_`.
            X: (N, F) features.
            y: (N,) labels.

        Raises:
            ValueError: as for `fit`; or L does not have as many rows as X has columns.
        """
        items = len(np.atleast_1d(X))
        if items != np.size(y):
            raise ValueError(f"There are {items} items, but {np.size(y)} labels.")
        x, codes = clone(self)._checked(X, y)
        point = check_array(L, dtype=np.float64)
        if len(point) != x.shape[1]:
            raise ValueError(
                f"L must have as many rows as X has columns, {x.shape[1]}, not {len(point)}."
            )
        return self._neighborhoods(x, codes, None)(point)

    def _checked(self, X: ArrayLike, y: ArrayLike) -> tuple[Floats, Ints]:
        self._chosen_seed()
        check_parameters(self)
        return self._training_items(X, y)

    def _start(self, x: Floats) -> Floats:
        """Return L₀ = N^(−1/4) V, where V is the identity, or the principal directions if C < F."""
        features = x.shape[1]
        if self.n_components is None:
            width = features
        else:
            width = self.n_components
        if not 1 <= width <= features:
            raise ValueError(
                f"n_components is {width}; it must lie between 1 and the {features} features."
            )
        directions = np.eye(features)
        if width < features:
            centred = x - x.mean(axis=0)
            directions = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :width]
            # The sign of an eigenvector is arbitrary: make its largest component positive.
            largest = np.abs(directions).argmax(axis=0)
            directions = directions * np.where(directions[largest, np.arange(width)] < 0, -1.0, 1.0)
        start: Floats = np.ascontiguousarray(directions) / len(x) ** 0.25
        return start


def _flat(value_and_gradient: tuple[float, Floats]) -> tuple[float, Floats]:
    return value_and_gradient[0], value_and_gradient[1].ravel()


@dataclass(eq=False, repr=False)
class LANML(NeighborhoodLearner):
    """A linear map that brings items nearer to their own class than to the other classes.

    Song et al., "Adaptive Neighborhood Metric Learning", Eq 19, plus a margin, without which M = 0
    would be optimal. LANML minimises

        mean over i of ℓ(b_{γ₁}(d_ij : j ∈ S_i) − b_{γ₂}(d_ij : j ∈ D_i)) + λ Ω(M),
        d_ij = (x_i − x_j)ᵀ M (x_i − x_j).

    S_i are similar items of the query i, which belong to its class; D_i are all items of other
    classes. b_γ is the log-exp mean, which weights the farthest items (γ < 0) or the nearest items
    (γ > 0) most. Ω is the mean of d_ij over queries and S_i (§7.1.1). The paper sums ℓ instead of
    averaging it, so its λ is N times this λ. γ₁ < 0 is LANML⁻, which is convex in M. γ₁ > 0 is
    LANML⁺, which is not convex. γ₁ = 0 uses the mean of S_i, which is convex too.

    The paper starts from a hard form: the mean distance of the K₁ nearest (or farthest) similar
    items and that of the K₂ nearest dissimilar items (Eq 6, 10 and 11). The log-exp means are
    smooth forms of these means. `k1` and `k2` select the hard form, which has kinks where distances
    tie, so L-BFGS may end slightly above its minimum.

    An item that is alone in its class is never a query, only a dissimilar item of all others. A
    constant feature has no influence. In a class with at most `neighbors` + 1 members, S_i is all
    other members.

    Args:
        gamma1: γ₁ of the average over similar items. The more negative it is, the more weight the
            farthest items get. The more positive it is, the more weight the nearest items get.
        gamma2: γ₂ > 0 of the average over dissimilar items. The larger it is, the more weight the
            nearest items get. From 8 on, the average over a few hundred items is almost the
            minimum.
        regularization: λ. The larger it is, the more similar items are pulled together, even if
            they are already near.
        margin: squared distance by which dissimilar items should be farther away.
        neighbors: size of S_i, the nearest items of the class by Euclidean distance before
            learning, or "all". As in the paper, `None` means 10 for γ₁ < 0 (or k1 < 0 if `k1` is
            set) and "all" otherwise.
        loss: ℓ, one of "hinge" [margin + x]₊, "smooth_hinge" (the kink replaced by a parabola of
            `width`) and "logistic" log(1 + e^(margin + x)).
        width: width of the smooth hinge's parabola.
        k1: K₁α₁ of Eq 6, instead of γ₁: the mean distance of the k1 nearest items of S_i (at most
            all of them), or of the −k1 farthest if k1 is negative. `None` uses the log-exp mean.
        k2: K₂ of Eq 11, instead of γ₂: the mean distance of the k2 nearest dissimilar items (at
            most all of them). `None` uses the log-exp mean.
        standardize: whether to divide each feature by its standard deviation before learning, as in
            the paper's experiments. The learned map includes the scaling, so `transform` takes
            unscaled features. Without it, scale the features yourself, because γ₁, γ₂ and the
            margin depend on the scale of the distances.
        n_components: output dimension C. `None` keeps the number of features.
        max_queries: largest number of queries. If there are more items, this many are drawn with
            `seed`, the same share of each class. The others remain neighbours. `None` means no
            limit. The time grows with queries × items.
        max_iter: largest number of L-BFGS iterations.
        tol: L-BFGS stops when an iteration improves the objective by less than this share.
        seed: seed of the random choice of queries; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.

    Example:
        >>> from sklearn.datasets import load_wine
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> from sklearn.pipeline import make_pipeline
        >>> x, y = load_wine(return_X_y=True)
        >>> knn = make_pipeline(LANML(), KNeighborsClassifier(5)).fit(x[::2], y[::2])
        >>> bool(knn.score(x[1::2], y[1::2]) > 0.95)
        True
    """

    gamma1: Finite = -1.0
    gamma2: Positive = 8.0
    regularization: NotNegative = 0.1
    margin: Positive = 1.0
    neighbors: PositiveInt | Literal["all"] | None = None
    loss: Literal["hinge", "smooth_hinge", "logistic"] = "smooth_hinge"
    width: Positive = 0.1
    k1: int | None = None
    k2: PositiveInt | None = None

    def _neighborhoods(self, x: Floats, codes: Ints, queries: int | None) -> Neighborhoods:
        if self.k1 == 0:
            raise ValueError(
                "k1 is 0; it must be above 0 (nearest items of a class) or below 0 (farthest)."
            )
        count = self.neighbors
        if count is None:
            if (self.gamma1 if self.k1 is None else self.k1) < 0:
                count = NEAREST
            else:
                count = "all"
        objective = Objective(
            gamma1=self.gamma1,
            gamma2=self.gamma2,
            outer=Outer(self.loss, self.margin, self.width),
            neighbors=None if count == "all" else count,
            regularization=self.regularization,
            k1=self.k1,
            k2=self.k2,
        )
        return Neighborhoods(x, codes, objective, queries=queries, seed=self._chosen_seed())


@dataclass(eq=False, repr=False)
class PNCA(NeighborhoodLearner):
    """A linear map that maximises the accuracy of a soft nearest-neighbour classifier.

    Song et al., "Adaptive Neighborhood Metric Learning", Eq 21. With the similar items S_i and the
    dissimilar items D_i of a query i, and squared distances d_ij, PNCA minimises the expected error
    of the soft nearest neighbour, 1 − mean over i of p_i, with

        p_i = s_i / (s_i + Σ_{j ∈ D_i} e^{−d_ij}),
        s_i = |S_i| (mean over S_i of e^{−α d_ij})^{1/α}    ("mean")
        or s_i = (Σ over S_i of e^{−α d_ij})^{1/α}          ("sum")

    The paper prints the sum. For a small α it saturates: p_i = 1 from the start, so nothing is
    learned. The mean does not saturate. Both are NCA (Goldberger et al., 2004) at α = 1. With a
    large α only the nearest items of the class count, with a small α the whole class. The objective
    is not convex; the search starts at M₀ = I / √N. An item that is alone in its class is never a
    query. A constant feature has no influence.

    Args:
        alpha: α > 0.
        form: "mean" or "sum"; see above.
        regularization: λ, weight of the mean squared distance of queries to their class, a term
            that the paper does not have.
        standardize: whether to divide each feature by its standard deviation before learning, as in
            the paper's experiments. The learned map includes the scaling, so `transform` takes
            unscaled features. Without it, scale the features yourself.
        n_components: output dimension C. `None` keeps the number of features.
        max_queries: largest number of queries. If there are more items, this many are drawn with
            `seed`, the same share of each class. The others remain neighbours. `None` means no
            limit. The time grows with queries × items.
        max_iter: largest number of L-BFGS iterations.
        tol: L-BFGS stops when an iteration improves the objective by less than this share.
        seed: seed of the random choice of queries; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.
    """

    alpha: Positive = 1.0
    form: Literal["mean", "sum"] = "mean"
    regularization: NotNegative = 0.0

    def _neighborhoods(self, x: Floats, codes: Ints, queries: int | None) -> Neighborhoods:
        if self.form == "mean":
            power = 1.0
        else:
            power = 1 / self.alpha
        # log s = power · log |S| − b_α(S) and log Σ_D = log |D| − b_1(D); 1 − p is the sigmoid of
        # log Σ_D − log s.
        objective = Objective(
            gamma1=self.alpha,
            gamma2=1.0,
            outer=Outer("sigmoid"),
            offset=lambda similar, dissimilar: math.log(dissimilar) - power * math.log(similar),
            regularization=self.regularization,
        )
        return Neighborhoods(x, codes, objective, queries=queries, seed=self._chosen_seed())
