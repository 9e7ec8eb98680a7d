"""The scikit-learn half of a linear learner. Imports torch only to make the model's head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

if TYPE_CHECKING:
    from torch import nn

Floats = NDArray[np.floating[Any]]


class LinearMap(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A learner whose whole result is a mean and a linear map; subclasses define `fit`.

    Attributes:
        components_: (C, F) rows that features are projected onto.
        mean_: (F,) what is subtracted from features first.
        n_features_in_: F.
    """

    components_: Floats
    mean_: Floats

    def transform(self, X: ArrayLike) -> Floats:
        """Return codes (N, C) of features (N, F), whose Euclidean distances are the learned ones."""
        check_is_fitted(self, "components_")
        x = validate_data(self, X, reset=False, dtype=(np.float64, np.float32))
        codes: Floats = (x - self.mean_.astype(x.dtype)) @ self.components_.T.astype(x.dtype)
        return codes

    def get_mahalanobis_matrix(self) -> Floats:
        """Return M (F, F), by which the distance of codes is √((x − y)ᵀ M (x − y)) of features."""
        check_is_fitted(self, "components_")
        return self.components_.T @ self.components_

    def to_model_parts(self) -> tuple[nn.Module, None]:
        """Return the head, float32, with the numbers of `transform`; distances are Euclidean."""
        from retrieval.linear_head import linear_head

        check_is_fitted(self, "components_")
        return linear_head(self.components_, self.mean_), None

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)
