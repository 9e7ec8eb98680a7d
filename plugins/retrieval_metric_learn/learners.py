"""The estimators of metric-learn as learners that work with a current scikit-learn.

The method `_prepare_inputs` of an estimator of metric-learn 0.7 checks input with scikit-learn's
argument `force_all_finite`, which scikit-learn 1.8 removed. This module checks input itself and
uses subclasses whose `_prepare_inputs` returns its input. Neither library is changed.

Four estimators are left out: NCA (use scikit-learn's, `core.nca`), Covariance (use `core.pca` with
`whiten`), MLKR, which is for regression, and SDML, which calls scikit-learn's graphical lasso with
a removed argument.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, PositiveInt
from retrieval.base.arrays import Floats, Ints
from retrieval.errors import needing
from retrieval.helpers import Seeded
from retrieval.plugin import LinearMap

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Prior = Literal["identity", "covariance", "random"]

ADVICE = "Scale the features, remove constant and repeated ones, or use more items."


@cache
def adapted(name: str) -> type:
    """Return a subclass of metric-learn's class `name` that does not check its input."""
    with needing(f"{name} comes from metric-learn, which is not installed", "metric-learn"):
        import metric_learn

    def unchecked(
        self: Any, X: Any, y: Any = None, type_of_inputs: str = "classic", **checks: Any
    ) -> Any:
        self.preprocessor_ = None
        self.n_features_in_ = X.shape[-1]
        if y is None:
            return X
        return (X, y)

    return type(name, (getattr(metric_learn, name),), {"_prepare_inputs": unchecked})


class MetricLearnLearner(LinearMap):
    """Base class of learners of metric-learn; subclasses name the estimator and its parameters."""

    estimator: ClassVar[str]

    def _settings(self) -> dict[str, Any]:
        """Return keyword arguments of metric-learn's estimator: the parameters, with one seed."""
        settings: dict[str, Any] = self.get_params(deep=False)
        if "seed" in settings:
            del settings["seed"]
            settings["random_state"] = self._chosen_seed()
        return settings

    def _check_sizes(self, counts: Ints, features: int) -> None:
        """Raise a `ValueError` if class sizes (C,) or features do not suit the estimator."""

    def _fit_options(self) -> dict[str, Any]:
        """Return further arguments of the estimator's `fit`."""
        return {}

    def _components(self, components: Floats) -> Floats:
        """Return the learned map (C, F) from metric-learn's `components_`."""
        return components

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from features (N, F) and labels (N,), which may be text.

        Raises:
            ValueError: the features are not finite, there is only one class, or metric-learn cannot
                fit them.
            LinAlgError: a matrix to invert is singular. This is also a `ValueError`.
            MissingDependency: metric-learn is not installed.
        """
        x, codes = self._training_items(X, y)
        self._check_sizes(np.bincount(codes), x.shape[1])
        fitted = adapted(self.estimator)(**self._settings())
        options = self._fit_options()
        try:
            with warnings.catch_warnings():
                # metric-learn warns of fewer pairs than requested, of a default number of bases and
                # of divisions by zero. The check that the map is finite suffices.
                for message in ("Only generated", "As no value for `n_basis`"):
                    warnings.filterwarnings("ignore", message=message)
                warnings.filterwarnings("ignore", category=RuntimeWarning, module="metric_learn")
                fitted.fit(x, codes, **options)
            components = self._components(np.atleast_2d(np.real(fitted.components_)))
        except Exception as error:  # metric-learn raises many kinds
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            # LinAlgError is a ValueError, so callers can catch either, as with metric-learn itself.
            kind = ValueError
            if isinstance(error, np.linalg.LinAlgError):
                kind = np.linalg.LinAlgError
            raise kind(
                f"metric-learn's {self.estimator} cannot be fitted on these {len(x)} items with"
                f" {x.shape[1]} features ({reason}). {ADVICE}"
            ) from error
        if not np.isfinite(components).all():
            raise ValueError(
                f"metric-learn's {self.estimator} ended in numbers that are not finite. {ADVICE}"
            )
        self.components_ = np.ascontiguousarray(components, dtype=np.float64)
        self.mean_ = x.mean(axis=0)
        if hasattr(fitted, "n_iter_"):
            self.n_iter_ = int(fitted.n_iter_)
        return self


@dataclass(eq=False, repr=False)
class LMNN(Seeded, MetricLearnLearner):
    """Large margin nearest neighbour: pulls target neighbours near and pushes impostors away.

    Weinberger et al., "Distance Metric Learning for Large Margin Nearest Neighbor Classification",
    NeurIPS 2005.

    Args:
        n_neighbors: number of target neighbours per item, the nearest items of its class. A class
            needs at least one item more.
        init: initial map; "auto" chooses "lda", "pca" or "identity" by the sizes.
        n_components: output dimension. `None` keeps the number of features.
        regularization: weight of pulling target neighbours together relative to pushing impostors
            away, 0 to 1.
        learn_rate: initial step size of the gradient descent; it adapts.
        convergence_tol: change of the objective below which the search stops.
        min_iter: smallest number of iterations.
        max_iter: largest number of iterations.
        seed: seed of a random initial map and of PCA's randomised solver; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.
    """

    estimator = "LMNN"

    n_neighbors: PositiveInt = 3
    init: Literal["auto", "pca", "lda", "identity", "random"] = "auto"
    n_components: PositiveInt | None = None
    regularization: Annotated[float, Field(ge=0, le=1)] = 0.5
    learn_rate: Positive = 1e-7
    convergence_tol: Positive = 0.001
    min_iter: PositiveInt = 50
    max_iter: PositiveInt = 1000


@dataclass(eq=False, repr=False)
class ITML(Seeded, MetricLearnLearner):
    """Information-theoretic metric learning: the metric nearest to a prior under bounds on pairs.

    Davis et al., "Information-Theoretic Metric Learning", ICML 2007. Pairs are drawn from the
    labels.

    Args:
        gamma: weight of the bounds relative to the prior.
        max_iter: largest number of iterations.
        tol: change of the multipliers below which the search stops.
        n_constraints: number of similar and of dissimilar pairs. `None` means 20 times the squared
            number of classes.
        prior: initial metric, near which the result stays; "covariance" is the inverse covariance.
        lower: distance below which similar pairs should stay. `None` means the 5th percentile of
            all distances.
        upper: distance above which dissimilar pairs should stay. `None` means the 95th percentile.
            Set both bounds or neither.
        seed: seed of the random choice of pairs; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.
    """

    estimator = "ITML_Supervised"

    gamma: Positive = 1.0
    max_iter: PositiveInt = 1000
    tol: Positive = 0.001
    n_constraints: PositiveInt | None = None
    prior: Prior = "identity"
    lower: Positive | None = None
    upper: Positive | None = None

    def _settings(self) -> dict[str, Any]:
        return {k: v for k, v in super()._settings().items() if k not in ("lower", "upper")}

    def _fit_options(self) -> dict[str, Any]:
        if (self.lower is None) != (self.upper is None):
            raise ValueError("lower and upper belong together: set both or neither.")
        if self.lower is None:
            return {}
        return {"bounds": [self.lower, self.upper]}


@dataclass(eq=False, repr=False)
class SCML(Seeded, MetricLearnLearner):
    """Sparse compositional metric learning: a sparse weighted sum of rank-one metrics.

    Shi et al., "Sparse Compositional Metric Learning", AAAI 2014.

    Args:
        k_genuine: number of nearest items of the same class in the triplets of an item.
        k_impostor: number of nearest items of other classes in the triplets of an item.
        beta: weight of the sparsity.
        basis: origin of the rank-one metrics: "lda" for discriminants of local clusters,
            "triplet_diffs" for differences.
        n_basis: number of rank-one metrics. `None` means 20 times the number of features, or as
            many as the items allow.
        gamma: step size of the stochastic search.
        max_iter: number of iterations.
        output_iter: number of iterations between two evaluations of the objective.
        batch_size: number of triplets per iteration.
        seed: seed of the clusters and the triplets; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.
    """

    estimator = "SCML_Supervised"

    k_genuine: PositiveInt = 3
    k_impostor: PositiveInt = 10
    beta: Positive = 1e-5
    basis: Literal["lda", "triplet_diffs"] = "lda"
    n_basis: PositiveInt | None = None
    gamma: Positive = 5e-3
    max_iter: PositiveInt = 10000
    output_iter: PositiveInt = 500
    batch_size: PositiveInt = 10

    def _check_sizes(self, counts: Ints, features: int) -> None:
        if counts.min() < 2:
            raise ValueError(
                "Each class needs 2 items, but the smallest has 1. Remove such classes."
            )


@dataclass(eq=False, repr=False)
class MMC(Seeded, MetricLearnLearner):
    """MMC: pulls similar pairs together under the constraint that dissimilar pairs stay apart.

    Xing et al., "Distance Metric Learning with Application to Clustering with Side-Information",
    NeurIPS 2002. Pairs are drawn from the labels.

    Args:
        max_iter: largest number of iterations.
        max_proj: largest number of projections per iteration.
        tol: change below which the search stops.
        n_constraints: number of similar and of dissimilar pairs. `None` means 20 times the squared
            number of classes.
        init: initial metric.
        diagonal: whether to learn only one weight per feature.
        diagonal_c: weight of the dissimilar pairs, for a diagonal metric.
        seed: seed of the random choice of pairs; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.
    """

    estimator = "MMC_Supervised"

    max_iter: PositiveInt = 100
    max_proj: PositiveInt = 10000
    tol: Positive = 1e-6
    n_constraints: PositiveInt | None = None
    init: Prior = "identity"
    diagonal: bool = False
    diagonal_c: Positive = 1.0


@dataclass(eq=False, repr=False)
class LSML(Seeded, MetricLearnLearner):
    """Least squared-residual metric learning: similar pairs should be nearer than dissimilar pairs.

    Liu et al., "Metric Learning from Relative Comparisons by Minimizing Squared Residual", ICDM
    2012. Pairs are drawn from the labels.

    Args:
        tol: change below which the search stops.
        max_iter: largest number of iterations.
        prior: metric near which the result stays.
        n_constraints: number of comparisons. `None` means 20 times the squared number of classes.
        seed: seed of the random choice of pairs; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.
    """

    estimator = "LSML_Supervised"

    tol: Positive = 1e-3
    max_iter: PositiveInt = 1000
    prior: Prior = "identity"
    n_constraints: PositiveInt | None = None


@dataclass(eq=False, repr=False)
class LFDA(MetricLearnLearner):
    """Local Fisher discriminants: separate classes and keep nearby items of a class together.

    Sugiyama, "Dimensionality Reduction of Multimodal Labeled Data by Local Fisher Discriminant
    Analysis", JMLR 2007.

    Args:
        n_components: output dimension. `None` keeps the number of features.
        k: number of the neighbour whose distance is the local scale. `None` means the 7th nearest
            neighbour, or the last if there are fewer.
        embedding_type: "weighted" scales each direction by its strength, "orthonormalized" makes
            the directions orthonormal, "plain" leaves them unchanged.
    """

    estimator = "LFDA"

    n_components: PositiveInt | None = None
    k: PositiveInt | None = None
    embedding_type: Literal["weighted", "orthonormalized", "plain"] = "weighted"

    def _check_sizes(self, counts: Ints, features: int) -> None:
        if self.n_components is not None and not 1 <= self.n_components <= features:
            raise ValueError(
                f"n_components is {self.n_components}; it must lie between 1 and the {features}"
                " features."
            )

    def _settings(self) -> dict[str, Any]:
        # For some of the directions, metric-learn uses ARPACK with a random start, whose digits and
        # signs vary. For all directions it uses LAPACK, so compute all and keep the first.
        return {**super()._settings(), "n_components": None}

    def _components(self, components: Floats) -> Floats:
        return components[: self.n_components]


@dataclass(eq=False, repr=False)
class RCA(Seeded, MetricLearnLearner):
    """Relevant component analysis: whitens the covariance within small chunks of classes.

    Shental et al., "Adjustment Learning and Relevant Component Analysis", ECCV 2002. Chunks are
    drawn from the labels.

    Args:
        n_components: output dimension. `None` keeps the number of features.
        n_chunks: number of chunks. `None` means 100, or as many as the classes allow.
        chunk_size: number of items per chunk.
        seed: seed of the random choice of chunks; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.
    """

    estimator = "RCA_Supervised"

    n_components: PositiveInt | None = None
    n_chunks: PositiveInt | None = None
    chunk_size: Annotated[int, Field(ge=2)] = 2

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "n_chunks": self._chunks}

    def _check_sizes(self, counts: Ints, features: int) -> None:
        """Check the number of chunks, and keep it for `_settings`."""
        limit = int((counts // self.chunk_size).sum())
        self._chunks = min(100, limit) if self.n_chunks is None else self.n_chunks
        if self._chunks > limit:
            raise ValueError(
                f"n_chunks is {self.n_chunks}, but the classes have only {limit} chunks of"
                f" {self.chunk_size} items. Reduce n_chunks."
            )
        if self._chunks * (self.chunk_size - 1) < features:
            raise ValueError(
                f"{self._chunks} chunks of {self.chunk_size} items cannot span {features} features."
                " Increase n_chunks or chunk_size, or use more items."
            )
