"""Two learners of a small change to a metric, in closed form from triplets of vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, PositiveInt
from retrieval.errors import DataError
from retrieval.helpers import refuse_overflow
from retrieval.plugin import LinearMap
from threadpoolctl import threadpool_limits

Floats64 = NDArray[np.float64]
_ROWS = 8192
"""Triplets whose differences are in memory at once."""


@dataclass(eq=False, repr=False)
class MomentLearner(LinearMap):
    """Base class of learners of a linear map from two second moments.

    P is the second moment of anchor minus positive, N that of anchor minus negative, both divided
    by the mean eigenvalue of (P + N) / 2, then called S. The learned metric is exp(c · (S + I)^-½
    (N − P) (S + I)^-½): directions in which preferred items are farther from their anchors than
    others shrink, directions in which they are nearer grow. After T triplets, c is `strength` · T /
    (T + `prior`), so without triplets the metric is Euclidean, and few change it little.

    Contrasting two moments is the idea of KISSME (Köstinger et al., "Large scale metric learning
    from equivalence constraints", CVPR 2012), whose difference of inverses may have negative
    eigenvalues. An exponential has none, as in Tsuda, Rätsch & Warmuth, "Matrix exponentiated
    gradient updates for on-line learning and Bregman projection", JMLR 2005. Of the triplets, only
    the sums are kept.

    Args:
        strength: largest change, the limit of c.
        prior: number of triplets at which half of it is reached.

    Attributes:
        components_: (F, F), the map, a root of the metric.
        mean_: (F,), zeros.
        moments_: (2, F, F), the sums of P and N.
        n_triplets_: number of triplets.
    """

    strength: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 6.0
    prior: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 500.0

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Reset the learner and learn from labelled features, as from as many triplets.

        P is the second moment of all pairs of items of one class, N that of all other pairs.

        Args:
            X: (N, F) features.
            y: (N,) labels, which may be text.

        Raises:
            ValueError: features are not finite, there is only one class, or no class has two items.
        """
        x, codes = self._training_items(X, y)
        sizes = np.bincount(codes)
        pairs = np.array([(sizes**2).sum(), len(x) ** 2 - (sizes**2).sum()])
        if sizes.max() < 2 or len(sizes) < 2:
            raise ValueError("Triplets need at least two classes, one of them with two items.")
        self._reset(x.shape[1])
        with threadpool_limits(1, "blas"):
            for code, size in enumerate(sizes):
                deviations = x[codes == code] - x[codes == code].mean(axis=0)
                self.moments_[0] += 2 * size * deviations.T @ deviations
            deviations = x - x.mean(axis=0)
            self.moments_[1] = 2 * len(x) * deviations.T @ deviations - self.moments_[0]
            self.moments_ *= len(x) / pairs[:, None, None]
            self.n_triplets_ = len(x)
            self.components_ = self._map()
        return self

    def partial_fit(self, triplets: ArrayLike, y: Any = None) -> Self:
        """Learn from these and all earlier triplets; nothing is random.

        Args:
            triplets: (T, 3, F) anchors, positives and negatives.
            y: ignored; part of scikit-learn's interface.

        Raises:
            DataError: the array has another shape, or holds NaN or infinity. Nothing is learned.
            ValueError: squares of the values overflow.
        """
        chunk = np.asarray(triplets)
        if chunk.ndim != 3 or chunk.shape[1] != 3 or not np.isfinite(chunk).all():
            raise DataError(
                "Triplets must be finite numbers of the shape (T, 3, F): anchor, positive and"
                f" negative of F features each. The shape is {chunk.shape}."
            )
        refuse_overflow(chunk)
        features = chunk.shape[2]
        if not hasattr(self, "moments_"):
            self._reset(features)
        if features != self.n_features_in_:
            raise DataError(
                f"The triplets have {features} features, and {type(self).__name__} has learned from"
                f" {self.n_features_in_}."
            )
        # On one thread, the same triplets give the same bits.
        with threadpool_limits(1, "blas"):
            for start in range(0, len(chunk), _ROWS):
                anchors, *sides = np.moveaxis(chunk[start : start + _ROWS].astype(float), 1, 0)
                for moment, side in zip(self.moments_, sides, strict=True):
                    moment += (anchors - side).T @ (anchors - side)
            self.n_triplets_ += len(chunk)
            self.components_ = self._map()
        return self

    def _reset(self, features: int) -> None:
        self.n_features_in_ = features
        self.mean_ = np.zeros(features)
        self.moments_ = np.zeros((2, features, features))
        self.n_triplets_ = 0

    def _map(self) -> Floats64:
        """Return the map for the moments."""
        positive, negative = self.moments_
        scale = np.trace(positive + negative) / (2 * self.n_features_in_)
        if not scale:
            return np.eye(self.n_features_in_)
        factor = self.strength * self.n_triplets_ / (self.n_triplets_ + self.prior)
        return self._root(
            (positive + negative) / (2 * scale) + np.eye(self.n_features_in_),
            factor * (negative - positive) / scale,
        )

    def _root(self, sum_: Floats64, difference: Floats64) -> Floats64:
        """Return the root of the metric exp(`sum_`^-½ `difference` `sum_`^-½)."""
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class Diagonal(MomentLearner):
    """A weight for each feature, learned from triplets; see `MomentLearner`.

    Args:
        strength: largest change, the limit of c.
        prior: number of triplets at which half of it is reached.
    """

    def _root(self, sum_: Floats64, difference: Floats64) -> Floats64:
        return np.diag(np.exp(np.diag(difference) / np.diag(sum_) / 2))


@dataclass(eq=False, repr=False)
class LowRank(MomentLearner):
    """A linear map that differs from the identity along a few directions; see `MomentLearner`.

    Args:
        strength: largest change, the limit of c.
        prior: number of triplets at which half of it is reached.
        rank: number of directions that change, those with the largest change.
    """

    rank: PositiveInt = 32

    def _root(self, sum_: Floats64, difference: Floats64) -> Floats64:
        values, vectors = np.linalg.eigh(sum_)
        whitening = (vectors / np.sqrt(values)) @ vectors.T
        values, vectors = np.linalg.eigh(whitening @ difference @ whitening)
        largest = np.argsort(-np.abs(values), kind="stable")[: self.rank]
        directions = vectors[:, largest]
        root: Floats64 = (
            np.eye(len(values)) + (directions * np.expm1(values[largest] / 2)) @ directions.T
        )
        return root
