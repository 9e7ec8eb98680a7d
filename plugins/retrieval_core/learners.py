"""Linear maps from scikit-learn as learners: PCA, LDA and NCA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.decomposition import PCA as SklearnPCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NeighborhoodComponentsAnalysis
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

Floats = NDArray[np.floating[Any]]
Count = Annotated[int, Field(ge=1)]


class Shift(nn.Module):
    """Subtract a vector. Kept apart from the linear map: folded into its bias, large means would cost precision.

    Args:
        offset: (F,) what is subtracted.
    """

    def __init__(self, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("offset", offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (B, F) less the offset."""
        return x - self.get_buffer("offset")


class LinearLearner(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A learner whose whole result is a mean and a linear map.

    Attributes:
        components_: (C, F) rows that features are projected onto.
        mean_: (F,) what is subtracted from features first.
        n_features_in_: F.
    """

    components_: Floats
    mean_: Floats
    former_names: ClassVar[Mapping[str, str]] = {"components": "n_components"}

    def transform(self, X: ArrayLike) -> Floats:
        """Return codes (N, C) of features (N, F)."""
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
        check_is_fitted(self, "components_")
        width, features = self.components_.shape
        linear = nn.Linear(features, width, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(np.array(self.components_, dtype=np.float32)))
        return nn.Sequential(Shift(torch.from_numpy(np.array(self.mean_, dtype=np.float32))), linear), None

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)


class PCA(LinearLearner):
    """Principal components: the directions of largest variance; labels are not looked at.

    Pearson, "On Lines and Planes of Closest Fit to Systems of Points in Space", 1901; scikit-learn's `PCA`.

    Args:
        n_components: width C of the codes, at most the number of features and of items; none: 64, or as many as those allow.
        whiten: whether each component is scaled to unit variance.
        seed: seed of the randomised solver, which scikit-learn chooses for large data.
    """

    def __init__(self, n_components: Count | None = None, whiten: bool = False, seed: int = 0) -> None:
        self.n_components = n_components
        self.whiten = whiten
        self.seed = seed

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> Self:
        """Learn from features (N, F); labels are ignored."""
        x = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        width = min(64, *x.shape) if self.n_components is None else self.n_components
        fitted = SklearnPCA(width, whiten=self.whiten, random_state=self.seed).fit(x)
        self.mean_, self.components_ = fitted.mean_, fitted.components_
        if self.whiten:
            scale = np.sqrt(fitted.explained_variance_)[:, None]
            # as scikit-learn: a direction without variance stays small instead of becoming noise
            self.components_ = self.components_ / np.maximum(scale, np.finfo(np.float64).eps)
        return self


class LDA(LinearLearner):
    """Linear discriminants: directions that part the classes most, measured by their spread within.

    Fisher, "The Use of Multiple Measurements in Taxonomic Problems", 1936; scikit-learn's `LinearDiscriminantAnalysis`
    with its eigenvalue solver.

    Args:
        n_components: width C of the codes, at most the number of classes less one, and of features; none: as many.
        shrinkage: how far the classes' covariance is drawn towards a multiple of the identity, 0 to 1; "auto" finds it by
            the lemma of Ledoit and Wolf. Above 0 it keeps many features with few items from fitting noise.
    """

    def __init__(
        self,
        n_components: Count | None = None,
        shrinkage: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto",
    ) -> None:
        self.n_components = n_components
        self.shrinkage = shrinkage

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from features (N, F) and labels (N,)."""
        x, labels = validate_data(self, X, y, dtype=np.float64)
        fitted = LinearDiscriminantAnalysis(
            "eigen", n_components=self.n_components, shrinkage=self.shrinkage
        ).fit(x, labels)
        width = fitted._max_components
        self.components_ = np.ascontiguousarray(fitted.scalings_[:, :width].T)
        self.mean_ = x.mean(axis=0)  # no distance depends on it, and float32 codes near zero are more precise
        return self


class NCA(LinearLearner):
    """Neighbourhood components: the linear map that makes a soft nearest neighbour's class right most often.

    Goldberger et al., "Neighbourhood Components Analysis", NeurIPS 2004; scikit-learn's
    `NeighborhoodComponentsAnalysis`. Memory and time of a step grow with the square of the number of items.

    Args:
        n_components: width C of the codes; none: the number of features.
        init: where it starts: "auto" takes "lda", "pca" or "identity" by the sizes.
        max_iter: most iterations of L-BFGS.
        tol: smallest relative gain of an iteration that is worth another.
        seed: seed of a random start and of PCA's randomised solver.
    """

    def __init__(
        self,
        n_components: Count | None = None,
        init: Literal["auto", "pca", "lda", "identity", "random"] = "auto",
        max_iter: Count = 50,
        tol: Annotated[float, Field(gt=0)] = 1e-5,
        seed: int = 0,
    ) -> None:
        self.n_components = n_components
        self.init = init
        self.max_iter = max_iter
        self.tol = tol
        self.seed = seed

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from features (N, F) and labels (N,)."""
        x, labels = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        fitted = NeighborhoodComponentsAnalysis(
            self.n_components, init=self.init, max_iter=self.max_iter, tol=self.tol, random_state=self.seed
        ).fit(x, labels)
        self.components_, self.n_iter_ = fitted.components_, fitted.n_iter_
        self.mean_ = x.mean(axis=0)  # no distance depends on it, and float32 codes near zero are more precise
        return self
