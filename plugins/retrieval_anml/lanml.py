"""LANML: linear adaptive neighbourhood metric learning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from retrieval_anml.estimator import NeighborhoodLearner
from retrieval_anml.neighborhoods import Neighborhoods
from retrieval_anml.outer import Outer

Count = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

NEAREST = 10
"""How many neighbours of its class a query has for γ₁ < 0, as in the paper's experiments."""


class LANML(NeighborhoodLearner):
    """A linear map under which each item's own class lies nearer than the others, up to the few
    that cannot.

    Song et al., "Adaptive Neighborhood Metric Learning", Eq 19, with the margin that it lacks
    (without one M = 0 is optimal): it minimises

        mean over i of ℓ(b_{γ₁}(d_ij : j ∈ S_i) − b_{γ₂}(d_ij : j ∈ D_i)) + λ Ω(M),    d_ij = (x_i − x_j)ᵀ M (x_i − x_j),

    b_γ the log-exp mean: a smooth mean of a query's farthest (γ < 0) or nearest (γ > 0) items. Ω is
    the mean of d_ij over queries and S_i (§7.1.1). The paper sums ℓ where this takes the mean: its
    λ is N times this one. γ₁ < 0 is LANML⁻, convex in M; γ₁ > 0 is LANML⁺, not convex; at γ₁ = 0 a
    query looks at the mean of S_i, which is convex too.

    The log-exp means stand in for what the paper starts from, the mean of the K₁ nearest (or
    farthest) similar and of the K₂ nearest dissimilar items (Eq 6, 10 and 11): `k1` and `k2` are
    that hard form. It is continuous, but has kinks where distances tie, so L-BFGS may end a little
    above its minimum.

    An item whose class has no other member is nobody's query, only everybody's dissimilar item. A
    feature that is constant takes no part. A class with fewer than `neighbors` + 1 members uses all
    of them.

    Args:
        gamma1: γ₁: how a query's similar items are averaged; more negative listens more to the
            farthest, more positive more to the nearest.
        gamma2: γ₂ > 0: how its dissimilar items are averaged; the larger, the fewer of the nearest
            it listens to. Near-hard behaviour among a few hundred needs 8 or more.
        regularization: λ; the larger, the more the similar are pulled together whether they are
            well placed or not.
        margin: by how much (in squared distance) the dissimilar shall be farther.
        neighbors: S_i: that many nearest of the class by the Euclidean distance before learning, or
            "all"; none: 10 for γ₁ < 0 (with `k1`: k1 < 0) and all otherwise, as in the paper.
        loss: ℓ: "hinge" [margin + x]₊, "smooth_hinge" the same with a parabola of `width` in place
            of the kink, or "logistic" log(1 + e^(margin + x)).
        width: of the smooth hinge's parabola.
        standardize: whether each feature is first divided by its standard deviation, as in the
            paper's experiments; the map takes that in, so features are given as they come. The γs
            and the margin are compared with distances, and the search starts from one scale, so
            without it scale the features yourself.
        n_components: width C of the codes; none: the number of features.
        max_queries: at most so many items are queries: beyond, so many are drawn with `seed`, in
            each class alike, and all others stay their neighbours. None: no limit. Time grows with
            queries × items.
        max_iter: most iterations of L-BFGS.
        tol: least gain of an iteration that is worth another.
        seed: seed of the random choice of queries; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.
        k1: K₁α₁ of Eq 6, in the place of γ₁: the mean distance of that many nearest of S_i, or
            below 0 of the farthest; at most all of S_i. None: the log-exp mean.
        k2: K₂ of Eq 11, in the place of γ₂: the mean distance of that many nearest dissimilar
            items. None: the log-exp mean.

    Example:
        >>> from sklearn.datasets import load_wine
        >>> from sklearn.neighbors import KNeighborsClassifier
        >>> from sklearn.pipeline import make_pipeline
        >>> x, y = load_wine(return_X_y=True)
        >>> knn = make_pipeline(LANML(), KNeighborsClassifier(5)).fit(x[::2], y[::2])
        >>> bool(knn.score(x[1::2], y[1::2]) > 0.95)
        True
    """

    def __init__(
        self,
        gamma1: Finite = -1.0,
        gamma2: Positive = 8.0,
        regularization: NotNegative = 0.1,
        margin: Positive = 1.0,
        neighbors: Count | Literal["all"] | None = None,
        loss: Literal["hinge", "smooth_hinge", "logistic"] = "smooth_hinge",
        width: Positive = 0.1,
        standardize: bool = True,
        n_components: Count | None = None,
        max_queries: Count | None = 5000,
        max_iter: Count = 100,
        tol: Positive = 1e-5,
        seed: int | None = None,
        k1: int | None = None,
        k2: Count | None = None,
        random_state: int | None = None,
    ) -> None:
        self.gamma1 = gamma1
        self.gamma2 = gamma2
        self.regularization = regularization
        self.margin = margin
        self.neighbors = neighbors
        self.loss = loss
        self.width = width
        self.standardize = standardize
        self.n_components = n_components
        self.max_queries = max_queries
        self.max_iter = max_iter
        self.tol = tol
        self.seed = seed
        self.random_state = random_state
        self.k1 = k1
        self.k2 = k2

    def _neighborhoods(
        self, x: NDArray[np.floating[Any]], codes: NDArray[np.intp], queries: int | None
    ) -> Neighborhoods:
        near = self.neighbors
        if near is None:
            near = NEAREST if (self.gamma1 if self.k1 is None else self.k1) < 0 else "all"
        return Neighborhoods(
            x,
            codes,
            gamma1=self.gamma1,
            gamma2=self.gamma2,
            outer=Outer(self.loss, self.margin, self.width),
            neighbors=None if near == "all" else near,
            regularization=self.regularization,
            queries=queries,
            seed=self._chosen_seed(),
            k1=self.k1,
            k2=self.k2,
        )

    def _refuse_parameters(self) -> None:
        self._refuse_common()
        if not np.isfinite(self.gamma1):
            raise ValueError(f"gamma1 is {self.gamma1}; it must be a finite number.")
        for name in ("gamma2", "margin", "width"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be finite and greater than 0.")
        if self.k1 == 0:
            raise ValueError(
                "k1 is 0; it must be above 0 (the nearest of its class) or below (the farthest)."
            )
        if self.k2 is not None and self.k2 < 1:
            raise ValueError(f"k2 is {self.k2}; it must be at least 1.")
        if not (np.isfinite(self.regularization) and self.regularization >= 0):
            raise ValueError(
                f"regularization is {self.regularization}; it must be finite and at least 0."
            )
        if self.loss not in ("hinge", "smooth_hinge", "logistic"):
            raise ValueError(
                f"loss is {self.loss!r}; it must be 'hinge', 'smooth_hinge' or 'logistic'."
            )
        if isinstance(self.neighbors, str):
            if self.neighbors != "all":
                raise ValueError(
                    f"neighbors is {self.neighbors!r}; it must be a number, 'all' or None."
                )
        elif self.neighbors is not None and self.neighbors < 1:
            raise ValueError(f"neighbors is {self.neighbors}; it must be at least 1.")
