"""Base class of linear learners, which import torch only to make the head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted, validate_data

from retrieval.base.arrays import Floats
from retrieval.model.metric_learner import MetricFunction, MetricLearner, two_vectors

if TYPE_CHECKING:
    from torch import nn


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
        codes: Floats = (x - self.mean_.astype(x.dtype)) @ self.components_.T.astype(x.dtype)
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
        components = np.array(self.components_, dtype=np.float64)

        def metric(u: ArrayLike, v: ArrayLike, squared: bool = False) -> float:
            first, second = two_vectors(u, v, components.shape[1])
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
    scales: Floats = np.where(
        deviation > len(x) * np.finfo(np.float64).eps * np.abs(x).max(axis=0), deviation, 1.0
    )
    return scales
