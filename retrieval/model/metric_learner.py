"""Base classes of learners: pair distances, a metric function, the seed, and a linear map.

Learners import torch only to make the head.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from retrieval.base.arrays import Floats
from retrieval.model.labels import class_codes, learner_labels

if TYPE_CHECKING:
    from torch import nn

MetricFunction = Callable[..., float]
"""`metric(u, v, squared=False)` returns the (squared) distance of two feature vectors (F,)."""
# Largest magnitude of a feature. Squares of larger ones, summed over pairs of items, overflow.
LARGEST = 1e140


class MetricLearner(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Base class of learners: a scikit-learn transformer with metric-learn's methods.

    The distance of two items is the Euclidean distance of their embeddings, in float64. A subclass
    that compares embeddings in another way overrides `pair_distance`.

    A subclass may declare its parameters as fields of a `@dataclass(eq=False, repr=False)`. Its
    `fit` checks the data with `_training_items`, or with `_training_features` if it ignores labels.
    A subclass that draws random numbers has two parameters for one seed, as `Seeded` declares them:
    `seed`, and scikit-learn's name `random_state`. `_chosen_seed` returns the seed.
    """

    def transform(self, X: ArrayLike) -> Floats:
        """Return embeddings (N, C) of features (N, F)."""
        raise NotImplementedError(f"{type(self).__name__} must define transform(X)")

    def pair_distance(self, pairs: ArrayLike) -> Floats:
        """Return the learned distance of each pair; smaller is closer.

        Args:
            pairs: features (P, 2, F) of the two items of each pair.

        Returns:
            Distances (P,), float64.

        Raises:
            NotFittedError: the learner is not fitted.
            ValueError: the array has another shape or width, or holds NaN or infinity.
        """
        first, second = self._sides(pairs)
        difference = self.transform(first) - self.transform(second)
        return np.asarray(np.linalg.norm(difference, axis=1), np.float64)

    def pair_score(self, pairs: ArrayLike) -> Floats:
        """Return the similarity (P,) of each pair (P, 2, F); larger is more alike.

        The score is the negative of `pair_distance`, unless the learner learns a similarity. Errors
        are as in `pair_distance`.
        """
        return -self.pair_distance(pairs)

    def get_metric(self) -> MetricFunction:
        """Return a function of two feature vectors (F,) that returns their learned distance.

        `metric(u, v)` is the distance, `metric(u, v, squared=True)` its square. Fitting the learner
        again does not change the function. scikit-learn accepts the function, as in
        `KNeighborsClassifier(metric=learner.get_metric())`, but is faster with the embeddings that
        `transform` returns.

        Raises:
            NotFittedError: the learner is not fitted. The function itself raises ValueError for a
                vector of another shape or width, or with NaN or infinity.
        """
        check_is_fitted(self)
        # A copy, so that another `fit` does not change the function.
        frozen = copy.deepcopy(self)

        def metric(u: ArrayLike, v: ArrayLike, squared: bool = False) -> float:
            pair = np.stack(_two_vectors(u, v, frozen.n_features_in_))
            distance = float(frozen.pair_distance(pair[None])[0])
            if squared:
                return distance**2
            return distance

        return metric

    def _training_features(self, X: ArrayLike) -> Floats:
        """Return the features (N, F) of at least two items, in float64, after checking them."""
        x: Floats = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        refuse_overflow(x)
        return x

    def _training_items(self, X: ArrayLike, y: ArrayLike) -> tuple[Floats, NDArray[np.intp]]:
        """Return features (N, F), in float64, and class ids (N,), after checking both."""
        x, labels = validate_data(
            self, X, learner_labels(y), dtype=np.float64, ensure_min_samples=2
        )
        refuse_overflow(x)
        return x, class_codes(labels, type(self).__name__)

    def _sides(self, pairs: ArrayLike) -> tuple[Floats, Floats]:
        """Return the first and second items of pairs (P, 2, F), each (P, F) float64."""
        check_is_fitted(self)
        array: Floats = check_array(
            pairs, dtype=np.float64, allow_nd=True, ensure_2d=False, input_name="pairs"
        )
        if array.ndim != 3 or array.shape[1] != 2:
            raise ValueError(
                "Pairs must have the shape (P, 2, F), two items of F features each, not"
                f" {array.shape}."
            )
        if array.shape[2] != self.n_features_in_:
            raise ValueError(
                f"The pairs have {array.shape[2]} features, and {type(self).__name__} was fitted on"
                f" {self.n_features_in_}."
            )
        return array[:, 0], array[:, 1]

    def _chosen_seed(self) -> int:
        """Return the seed from `seed` or `random_state`, or 0 if both are None."""
        seeds = set()
        for name in ("seed", "random_state"):
            value = getattr(self, name, None)
            if value is None:
                continue
            if not isinstance(value, numbers.Integral) or value < 0:
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number of at least 0, or None for 0."
                )
            seeds.add(int(value))
        if len(seeds) > 1:
            raise ValueError(
                f"seed is {self.seed} and random_state is {self.random_state}. They are two names"
                " of one parameter: give one of them, or both the same number."
            )
        return seeds.pop() if seeds else 0

    @property
    def _n_features_out(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define _n_features_out")


@dataclass(eq=False, repr=False, kw_only=True)
class Seeded(MetricLearner):
    """A learner that draws random numbers: two names of its seed, 0 by default."""

    seed: int | None = None
    random_state: int | None = None


def refuse_overflow(x: Floats) -> None:
    """Raise a ValueError if sums of squares of the features (…, F) would overflow."""
    largest = float(np.abs(x).max(initial=0))
    if largest > LARGEST:
        raise ValueError(
            f"The features have values up to {largest:.0e}, which are so large that their squares"
            " overflow. Scale the features."
        )


def _two_vectors(u: ArrayLike, v: ArrayLike, features: int) -> tuple[Floats, Floats]:
    """Check two feature vectors and return them as float64."""
    first = np.asarray(u, dtype=np.float64)
    second = np.asarray(v, dtype=np.float64)
    if first.shape != (features,) or second.shape != (features,):
        raise ValueError(
            f"The metric compares two vectors of {features} features, not arrays of the shapes"
            f" {first.shape} and {second.shape}."
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("The metric compares finite numbers, but a vector holds NaN or infinity.")
    return first, second


class LinearMap(MetricLearner):
    """A learner whose result is a mean and a linear map; subclasses define `fit`.

    Attributes:
        components_: (C, F), the linear map; embeddings are `(x − mean_) @ components_.T`.
        mean_: (F,), subtracted from the features first.
        n_features_in_: number of features F.
    """

    components_: Floats
    mean_: Floats

    def transform(self, X: ArrayLike) -> Floats:
        """Return embeddings (N, C) of features (N, F), to be compared by Euclidean distance."""
        check_is_fitted(self, "components_")
        x = validate_data(self, X, reset=False, dtype=(np.float64, np.float32))
        # Embeddings get the features' type: float32 takes half the memory.
        mean = self.mean_.astype(x.dtype)
        components = self.components_.astype(x.dtype)
        codes: Floats = (x - mean) @ components.T
        return codes

    def get_mahalanobis_matrix(self) -> Floats:
        """Return M (F, F); the distance of two items x and y is √((x − y)ᵀ M (x − y)).

        Changing the returned matrix does not change the learner.

        Raises:
            NotFittedError: the learner is not fitted.
        """
        check_is_fitted(self, "components_")
        return self.components_.T @ self.components_

    def get_metric(self) -> MetricFunction:
        """Return a function that returns the learned distance of two feature vectors (F,)."""
        check_is_fitted(self, "components_")
        # One product for both vectors, where the base class would transform and check each.
        components = np.array(self.components_, dtype=np.float64)

        def metric(u: ArrayLike, v: ArrayLike, squared: bool = False) -> float:
            first, second = _two_vectors(u, v, components.shape[1])
            difference = components @ (first - second)
            square = float(difference @ difference)
            if squared:
                return square
            return math.sqrt(square)

        return metric

    def to_model_parts(self) -> tuple[nn.Module, None]:
        """Return a float32 head that computes the same as `transform`, and no combiner."""
        from retrieval.model.model import linear_head

        check_is_fitted(self, "components_")
        return linear_head(self.components_, self.mean_), None

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)


def deviations(x: Floats) -> Floats:
    """Return each feature's standard deviation (F,), or 1 for a constant feature."""
    deviation = x.std(axis=0)
    # A constant feature's deviation is rarely 0, because its mean is rounded.
    rounding = len(x) * np.finfo(np.float64).eps * np.abs(x).max(axis=0)
    scales: Floats = np.where(deviation > rounding, deviation, 1.0)
    return scales
