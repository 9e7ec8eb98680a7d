"""What GMML and AML have in common: checked labels or pairs, their moments, and the map of the
metric found.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from retrieval.model.labels import learner_labels
from retrieval.model.linear import class_codes, deviations
from retrieval.plugin import LinearMap
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from threadpoolctl import threadpool_limits

from retrieval_aml.moments import (
    Moments,
    count_to_draw,
    moments_of_classes,
    moments_of_drawn_pairs,
    moments_of_pairs,
)
from retrieval_aml.spd import completed, components, lifted, spread_of, symmetric

Floats = NDArray[np.floating[Any]]

ONE_THREAD = 200
"""Up to so many features, one thread: several gain nothing on small matrices, and cost dearly where
cores are busy.
"""


class PairLearner(LinearMap):
    """A metric learned from the second moments of similar and dissimilar pairs; subclasses say how.

    Parameters that every subclass has: `t`, `regularization`, `prior`, `n_pairs`, `standardize`,
    `seed`, `random_state`.

    Attributes:
        components_: (F, F) the learned map: M's eigenvectors times the roots of its eigenvalues,
            the largest first.
        mean_: (F,) the training features' mean, which `transform` subtracts; no distance depends on
            it.
        scale_: (F,) what features are divided by before the metric is learned: 1 without
            `standardize`.
        n_similar_: how many similar pairs there were.
        n_dissimilar_: how many dissimilar pairs there were.
        converged_: whether the search met its tolerance; always true of a closed form.
        n_iter_: iterations made; 0 for a closed form.
    """

    t: float
    regularization: float
    prior: Any
    n_pairs: int | Literal["paper"] | None
    standardize: bool
    seed: int | None
    random_state: int | None

    converged_: bool
    n_iter_: int

    def _learn(self, similar: Floats, dissimilar: Floats) -> Floats:
        """Return H (F, F), M = HHᵀ, of two positive definite moments, and set `converged_` and
        `n_iter_`.
        """
        raise NotImplementedError

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from features (N, F) and labels (N,), which may be text: pairs of a class are
        similar, all others dissimilar.

        All pairs count, in closed form from sums of classes, unless `n_pairs` says how many to
        draw.

        Raises:
            ValueError: features are not finite, there is one class only, no class has two members,
                no pair was drawn of one kind, or a parameter is out of its range.
        """
        self._refuse_parameters()
        raw, labels = validate_data(
            self, X, learner_labels(y), dtype=np.float64, ensure_min_samples=2
        )
        codes = class_codes(labels, type(self).__name__)
        scale = self._scale(raw)
        x = raw / scale
        if self.n_pairs is None:
            moments = moments_of_classes(x, codes)
        else:
            drawn = count_to_draw(self.n_pairs, int(codes.max()) + 1)
            moments = moments_of_drawn_pairs(x, codes, drawn, self._chosen_seed())
        return self._fit(moments, x, raw.mean(axis=0), scale)

    def fit_pairs(self, pairs: ArrayLike, similar: ArrayLike) -> Self:
        """Learn from pairs, knowing only whether each pair is similar.

        `n_pairs` is not used here: every pair given counts once. The pairs' points take the part of
        the features that `standardize`, the prior "covariance" and `mean_` need.

        Args:
            pairs: (N, 2, F) the two points of each pair.
            similar: (N,) whether they are similar: true or false, 1 or 0, or 1 or −1 as the papers
                have it.

        Raises:
            ValueError: shapes do not fit, numbers are not finite, all pairs are similar or all
                dissimilar, no pair's points differ, or a parameter is out of its range.
        """
        self._refuse_parameters()
        both, alike = _checked_pairs(pairs, similar)
        points = validate_data(self, both.reshape(-1, both.shape[2]), dtype=np.float64)
        scale = self._scale(points)
        return self._fit(
            moments_of_pairs(both / scale, alike), points / scale, points.mean(axis=0), scale
        )

    def _fit(self, moments: Moments, x: Floats, mean: Floats, scale: Floats) -> Self:
        _refuse_missing(moments)
        self.n_similar_, self.n_dissimilar_ = moments.n_similar, moments.n_dissimilar
        features = x.shape[1]
        with threadpool_limits(1 if features <= ONE_THREAD else None, user_api="blas"):
            a, b = self._regularized(moments, x)
            spread, still = spread_of(a + b)
            half = spread @ self._learn(*_definite(spread.T @ a @ spread, spread.T @ b @ spread))
            self.components_ = components(completed(half, still)) / scale
        self.mean_ = mean
        self.scale_ = scale
        return self

    def _scale(self, x: Floats) -> Floats:
        return deviations(x) if self.standardize else np.ones(x.shape[1])

    def _regularized(self, moments: Moments, x: Floats) -> tuple[Floats, Floats]:
        """Return A + λM₀⁻¹ and B + λM₀."""
        a, b = moments.similar, moments.dissimilar
        if self.regularization > 0:
            prior = self._prior(x)
            a = symmetric(a + self.regularization * np.linalg.inv(prior))
            b = symmetric(b + self.regularization * prior)
        if not (np.trace(a) > 0 or np.trace(b) > 0):
            raise ValueError(
                "No pair's two points differ, so there is nothing to learn a distance from. Are all"
                " features constant?"
            )
        return a, b

    def _prior(self, x: Floats) -> Floats:
        features = x.shape[1]
        if self.prior is None or (isinstance(self.prior, str) and self.prior == "identity"):
            return np.eye(features)
        if isinstance(self.prior, str) and self.prior == "covariance":
            covariance = np.atleast_2d(np.cov(x, rowvar=False))
            unit = np.trace(covariance) / features
            inverse: Floats = np.linalg.inv(
                lifted(covariance, unit) if unit > 0 else np.eye(features)
            )
            return symmetric(inverse)
        prior = np.asarray(self.prior, dtype=np.float64)
        if prior.shape != (features, features):
            raise ValueError(
                f"prior has the shape {prior.shape}; for {features} features it must be"
                f" ({features}, {features})."
            )
        if (
            not np.isfinite(prior).all()
            or np.abs(prior - prior.T).max() > 1e-9 * np.abs(prior).max()
        ):
            raise ValueError("prior must be a symmetric matrix of finite numbers.")
        if not np.linalg.eigvalsh(prior)[0] > 0:
            raise ValueError(
                "prior must be positive definite: its smallest eigenvalue is not above 0."
            )
        return symmetric(prior)

    def _refuse_parameters(self) -> None:
        self._chosen_seed()
        if not (np.isfinite(self.t) and 0 <= self.t <= 1):
            raise ValueError(
                f"t is {self.t}; it must lie between 0 (similar pairs only) and 1 (dissimilar pairs"
                " only)."
            )
        if not (np.isfinite(self.regularization) and self.regularization >= 0):
            raise ValueError(
                f"regularization is {self.regularization}; it must be finite and at least 0."
            )
        if isinstance(self.prior, str) and self.prior not in ("identity", "covariance"):
            raise ValueError(
                f"prior is {self.prior!r}; it must be 'identity', 'covariance', a matrix or None."
            )
        if isinstance(self.n_pairs, str):
            if self.n_pairs != "paper":
                raise ValueError(
                    f"n_pairs is {self.n_pairs!r}; it must be a number, 'paper' or None."
                )
        elif self.n_pairs is not None and self.n_pairs < 1:
            raise ValueError(
                f"n_pairs is {self.n_pairs}; it must be at least 1, or None for all pairs."
            )

    def _checked_pairs_as_fitted(
        self, pairs: ArrayLike, similar: ArrayLike
    ) -> tuple[Floats, NDArray[np.bool_]]:
        check_is_fitted(self, "components_")
        both, alike = _checked_pairs(pairs, similar)
        if both.shape[2] != self.n_features_in_:
            raise ValueError(
                f"The pairs' points have {both.shape[2]} features, and {type(self).__name__} was"
                f" fitted on {self.n_features_in_}."
            )
        return both, alike


def _checked_pairs(pairs: ArrayLike, similar: ArrayLike) -> tuple[Floats, NDArray[np.bool_]]:
    both = check_array(pairs, dtype=np.float64, allow_nd=True, ensure_2d=False, input_name="pairs")
    if both.ndim != 3 or both.shape[1] != 2 or both.shape[2] < 1:
        raise ValueError(f"pairs has the shape {both.shape}; it must be (pairs, 2, features).")
    flags = np.asarray(similar)
    if flags.shape != (len(both),):
        raise ValueError(f"There are {len(both)} pairs, and similar has the shape {flags.shape}.")
    if flags.dtype != np.bool_:
        known = set(np.unique(flags).tolist()) if flags.dtype.kind in "iuf" else {None}
        if not (known <= {0, 1} or known <= {-1, 1}):
            raise ValueError(
                "similar must hold true and false, 1 and 0, or 1 and -1: 1 for pairs that are"
                " similar."
            )
    return both, flags > 0


def _definite(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Return both moments, eigenvalues lifted above 0 where they are not."""
    units = np.trace(a) / len(a), np.trace(b) / len(b)
    # points that differ in pairs of one kind only leave the other kind's moment 0
    return lifted(symmetric(a), units[0] or units[1]), lifted(symmetric(b), units[1] or units[0])


def _refuse_missing(moments: Moments) -> None:
    for count, missing, other in (
        (moments.n_similar, "similar", "dissimilar"),
        (moments.n_dissimilar, "dissimilar", "similar"),
    ):
        if not count:
            raise ValueError(
                f"No pair is {missing}: all are {other}. A metric needs pairs of both kinds; draw"
                " more of them, or give some."
            )
