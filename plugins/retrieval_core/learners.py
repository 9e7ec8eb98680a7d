"""Linear maps from scikit-learn as learners: PCA, LDA and NCA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, PositiveFloat, PositiveInt
from retrieval.helpers import Seeded
from retrieval.plugin import LinearMap
from sklearn.decomposition import PCA as SklearnPCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NeighborhoodComponentsAnalysis


@dataclass(eq=False, repr=False)
class PCA(Seeded, LinearMap):
    """Principal components: the directions of largest variance; labels are ignored.

    Pearson, "On Lines and Planes of Closest Fit to Systems of Points in Space", 1901;
    scikit-learn's `PCA`.

    Args:
        n_components: output dimension C, at most the number of features and of items. `None` means
            the smallest of 64 and these two numbers.
        whiten: whether to scale each component to unit variance.
        seed: seed of the randomised solver, which scikit-learn chooses for large data; 0 by
            default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.
    """

    n_components: PositiveInt | None = None
    whiten: bool = False

    def fit(self, X: ArrayLike, y: ArrayLike | None = None) -> Self:
        """Learn from features (N, F); labels are ignored."""
        x = self._training_features(X)
        if self.n_components is None:
            width = min(64, *x.shape)
        else:
            width = self.n_components
        fitted = SklearnPCA(width, whiten=self.whiten, random_state=self._chosen_seed()).fit(x)
        self.mean_ = fitted.mean_
        self.components_ = fitted.components_
        if self.whiten:
            scale = np.sqrt(fitted.explained_variance_)[:, None]
            # As in scikit-learn, a direction without variance stays small; scaled up it is noise.
            self.components_ = self.components_ / np.maximum(scale, np.finfo(np.float64).eps)
        return self


@dataclass(eq=False, repr=False)
class LDA(LinearMap):
    """Linear discriminants: directions with much variance between classes and little within.

    Fisher, "The Use of Multiple Measurements in Taxonomic Problems", 1936; scikit-learn's
    `LinearDiscriminantAnalysis` with its eigenvalue solver.

    Args:
        n_components: output dimension C, at most the number of features and the number of classes
            minus one, which is also the default.
        shrinkage: how far to shrink the covariance within classes towards a multiple of the
            identity, 0 to 1; "auto" uses the lemma of Ledoit and Wolf. A value above 0 prevents
            overfitting with many features and few items.
    """

    n_components: PositiveInt | None = None
    shrinkage: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from features (N, F) and labels (N,)."""
        x, codes = self._training_items(X, y)
        fitted = LinearDiscriminantAnalysis(
            "eigen", n_components=self.n_components, shrinkage=self.shrinkage
        )
        try:
            fitted.fit(x, codes)
        except np.linalg.LinAlgError as error:
            raise ValueError(
                f"LDA cannot be fitted on these {len(x)} items with {x.shape[1]} features, because"
                " the covariance within classes cannot be inverted. Remove constant and repeated"
                " features, use more items, or set shrinkage above 0."
            ) from error
        # scikit-learn keeps all directions in `scalings_`; `transform` cuts them, too.
        width = fitted._max_components
        self.components_ = np.ascontiguousarray(fitted.scalings_[:, :width].T)
        # Distances do not depend on the mean; float32 embeddings near zero are more precise.
        self.mean_ = x.mean(axis=0)
        return self


@dataclass(eq=False, repr=False)
class NCA(Seeded, LinearMap):
    """Neighbourhood components: a map that maximises the accuracy of a soft nearest neighbour.

    Goldberger et al., "Neighbourhood Components Analysis", NeurIPS 2004; scikit-learn's
    `NeighborhoodComponentsAnalysis`. The memory and time of a step grow with the square of the
    number of items.

    Args:
        n_components: output dimension C. `None` keeps the number of features.
        init: initial map; "auto" chooses "lda", "pca" or "identity" by the sizes.
        max_iter: largest number of L-BFGS iterations.
        tol: L-BFGS stops when an iteration improves the objective by less than this share.
        seed: seed of a random initial map and of PCA's randomised solver; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.
    """

    n_components: PositiveInt | None = None
    init: Literal["auto", "pca", "lda", "identity", "random"] = "auto"
    max_iter: PositiveInt = 50
    tol: PositiveFloat = 1e-5

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from features (N, F) and labels (N,)."""
        x, codes = self._training_items(X, y)
        fitted = NeighborhoodComponentsAnalysis(
            self.n_components,
            init=self.init,
            max_iter=self.max_iter,
            tol=self.tol,
            random_state=self._chosen_seed(),
        ).fit(x, codes)
        self.components_ = fitted.components_
        self.n_iter_ = fitted.n_iter_
        # Distances do not depend on the mean; float32 embeddings near zero are more precise.
        self.mean_ = x.mean(axis=0)
        return self
