"""The learners: metric-learn's names, parameters and defaults, each described and typed so that a
recipe can be checked.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from retrieval_metric_learn.adapter import MetricLearnLearner

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Prior = Literal["identity", "covariance", "random"]


class LMNN(MetricLearnLearner):
    """Large margin nearest neighbour: target neighbours near, impostors a margin farther; gradient
    descent.

    Weinberger et al., "Distance Metric Learning for Large Margin Nearest Neighbor Classification",
    NeurIPS 2005.

    Args:
        n_neighbors: target neighbours of each item, the nearest of its class; every class needs one
            member more.
        init: where it starts: "auto" takes "lda", "pca" or "identity" by the sizes.
        n_components: width of the codes; none: the number of features.
        regularization: weight of pulling target neighbours together against pushing impostors away,
            0 to 1.
        learn_rate: first step of the gradient descent, which adapts it.
        convergence_tol: change of the objective below which it stops.
        min_iter: fewest iterations.
        max_iter: most iterations.
        seed: seed of a random start and of PCA's randomised solver; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.
    """

    estimator = "LMNN"

    def __init__(
        self,
        n_neighbors: Count = 3,
        init: Literal["auto", "pca", "lda", "identity", "random"] = "auto",
        n_components: Count | None = None,
        regularization: Annotated[float, Field(ge=0, le=1)] = 0.5,
        learn_rate: Positive = 1e-7,
        convergence_tol: Positive = 0.001,
        min_iter: Count = 50,
        max_iter: Count = 1000,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.init = init
        self.n_components = n_components
        self.regularization = regularization
        self.learn_rate = learn_rate
        self.convergence_tol = convergence_tol
        self.min_iter = min_iter
        self.max_iter = max_iter
        self.seed = seed
        self.random_state = random_state

    def _refuse(self, counts: NDArray[np.intp], features: int) -> None:
        if counts.min() <= self.n_neighbors:
            raise ValueError(
                f"n_neighbors is {self.n_neighbors}, so each class needs {self.n_neighbors + 1}"
                f" members; the smallest has {counts.min()}. Lower n_neighbors, or leave such"
                " classes out."
            )


class ITML(MetricLearnLearner):
    """Information-theoretic metric learning: the metric nearest to a prior under which pairs keep
    their bounds.

    Davis et al., "Information-Theoretic Metric Learning", ICML 2007. Pairs are drawn from the
    labels.

    Args:
        gamma: weight of the bounds against the prior.
        max_iter: most iterations.
        tol: change of the multipliers below which it stops.
        n_constraints: pairs of each kind; none: 20 times the classes squared.
        prior: the metric that it starts from and stays near: "covariance" is the inverse
            covariance.
        lower: bound above the distance of similar pairs; none: the 5th percentile of all distances.
        upper: bound below the distance of dissimilar pairs; none: the 95th percentile. Set both or
            neither.
        seed: seed of the random choice of pairs; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.
    """

    estimator = "ITML_Supervised"

    def __init__(
        self,
        gamma: Positive = 1.0,
        max_iter: Count = 1000,
        tol: Positive = 0.001,
        n_constraints: Count | None = None,
        prior: Prior = "identity",
        lower: Positive | None = None,
        upper: Positive | None = None,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.gamma = gamma
        self.max_iter = max_iter
        self.tol = tol
        self.n_constraints = n_constraints
        self.prior = prior
        self.lower = lower
        self.upper = upper
        self.seed = seed
        self.random_state = random_state

    def _settings(self) -> dict[str, Any]:
        return {k: v for k, v in super()._settings().items() if k not in ("lower", "upper")}

    def _fit_options(self) -> dict[str, Any]:
        if (self.lower is None) != (self.upper is None):
            raise ValueError("lower and upper belong together: set both or neither.")
        return {} if self.lower is None else {"bounds": [self.lower, self.upper]}


class SCML(MetricLearnLearner):
    """Sparse compositional metric learning: a sparse weighted sum of rank-one metrics from local
    discriminants.

    Shi et al., "Sparse Compositional Metric Learning", AAAI 2014.

    Args:
        k_genuine: nearest items of the class in the triplets of each item.
        k_impostor: nearest items of other classes in them.
        beta: weight of the sparsity.
        basis: rank-one metrics: "lda" from discriminants of local clusters, "triplet_diffs" from
            differences.
        n_basis: how many; none: 20 times the features, at most what the items allow.
        gamma: step of the stochastic search.
        max_iter: its iterations.
        output_iter: iterations between two evaluations of the objective.
        batch_size: triplets of an iteration.
        seed: seed of the clusters and the triplets; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.
    """

    estimator = "SCML_Supervised"

    def __init__(
        self,
        k_genuine: Count = 3,
        k_impostor: Count = 10,
        beta: Positive = 1e-5,
        basis: Literal["lda", "triplet_diffs"] = "lda",
        n_basis: Count | None = None,
        gamma: Positive = 5e-3,
        max_iter: Count = 10000,
        output_iter: Count = 500,
        batch_size: Count = 10,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.k_genuine = k_genuine
        self.k_impostor = k_impostor
        self.beta = beta
        self.basis = basis
        self.n_basis = n_basis
        self.gamma = gamma
        self.max_iter = max_iter
        self.output_iter = output_iter
        self.batch_size = batch_size
        self.seed = seed
        self.random_state = random_state

    def _refuse(self, counts: NDArray[np.intp], features: int) -> None:
        if counts.min() < 2:
            raise ValueError(
                "Each class needs 2 members; the smallest has 1. Leave such classes out."
            )


class MMC(MetricLearnLearner):
    """Similar pairs near under the constraint that dissimilar ones stay apart.

    Xing et al., "Distance Metric Learning with Application to Clustering with Side-Information",
    NeurIPS 2002. Pairs are drawn from the labels.

    Args:
        max_iter: most iterations.
        max_proj: most projections in each.
        tol: change below which it stops.
        n_constraints: pairs of each kind; none: 20 times the classes squared.
        init: the metric that it starts from.
        diagonal: whether only a weight for each feature is learned.
        diagonal_c: weight of the dissimilar, for a diagonal metric.
        seed: seed of the random choice of pairs; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.
    """

    estimator = "MMC_Supervised"

    def __init__(
        self,
        max_iter: Count = 100,
        max_proj: Count = 10000,
        tol: Positive = 1e-6,
        n_constraints: Count | None = None,
        init: Prior = "identity",
        diagonal: bool = False,
        diagonal_c: Positive = 1.0,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.max_iter = max_iter
        self.max_proj = max_proj
        self.tol = tol
        self.n_constraints = n_constraints
        self.init = init
        self.diagonal = diagonal
        self.diagonal_c = diagonal_c
        self.seed = seed
        self.random_state = random_state


class LSML(MetricLearnLearner):
    """Least squared-residual metric learning: of two pairs, the similar one shall be the nearer.

    Liu et al., "Metric Learning from Relative Comparisons by Minimizing Squared Residual", ICDM
    2012. Pairs are drawn from the labels.

    Args:
        tol: change below which it stops.
        max_iter: most iterations.
        prior: the metric that it stays near.
        n_constraints: comparisons; none: 20 times the classes squared.
        seed: seed of the random choice of pairs; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.
    """

    estimator = "LSML_Supervised"

    def __init__(
        self,
        tol: Positive = 1e-3,
        max_iter: Count = 1000,
        prior: Prior = "identity",
        n_constraints: Count | None = None,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.tol = tol
        self.max_iter = max_iter
        self.prior = prior
        self.n_constraints = n_constraints
        self.seed = seed
        self.random_state = random_state


class LFDA(MetricLearnLearner):
    """Local Fisher discriminants: classes apart, near items of a class together, far ones left
    alone.

    Sugiyama, "Dimensionality Reduction of Multimodal Labeled Data by Local Fisher Discriminant
    Analysis", JMLR 2007.

    Args:
        n_components: width of the codes; none: the number of features.
        k: which nearest neighbour sets the scale of an item's surroundings; none: the 7th, or the
            last.
        embedding_type: "weighted" scales each direction by its strength, "orthonormalized" makes
            them unit and right-angled, "plain" leaves them.
    """

    estimator = "LFDA"

    def __init__(
        self,
        n_components: Count | None = None,
        k: Count | None = None,
        embedding_type: Literal["weighted", "orthonormalized", "plain"] = "weighted",
    ) -> None:
        self.n_components = n_components
        self.k = k
        self.embedding_type = embedding_type

    def _refuse(self, counts: NDArray[np.intp], features: int) -> None:
        if self.n_components is not None and not 1 <= self.n_components <= features:
            raise ValueError(
                f"n_components is {self.n_components}; it must lie between 1 and the {features}"
                " features."
            )

    def _settings(self) -> dict[str, Any]:
        # for some of the directions it starts ARPACK anywhere, and gives other digits and signs
        # each time; for all of them it calls LAPACK, and the first are the same
        return {**super()._settings(), "n_components": None}

    def _components(self, found: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
        return found[: self.n_components]


class RCA(MetricLearnLearner):
    """Relevant components: whitens the spread within small chunks of a class.

    Shental et al., "Adjustment Learning and Relevant Component Analysis", ECCV 2002. Chunks are
    drawn from the labels.

    Args:
        n_components: width of the codes; none: the number of features.
        n_chunks: how many chunks; none: 100, or as many as the classes hold.
        chunk_size: items in each.
        seed: seed of the random choice of chunks; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.
    """

    estimator = "RCA_Supervised"

    def __init__(
        self,
        n_components: Count | None = None,
        n_chunks: Count | None = None,
        chunk_size: Annotated[int, Field(ge=2)] = 2,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.n_components = n_components
        self.n_chunks = n_chunks
        self.chunk_size = chunk_size
        self.seed = seed
        self.random_state = random_state

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "n_chunks": self._chunks}

    def _refuse(self, counts: NDArray[np.intp], features: int) -> None:
        most = int((counts // self.chunk_size).sum())
        self._chunks = min(100, most) if self.n_chunks is None else self.n_chunks
        if self._chunks > most:
            raise ValueError(
                f"n_chunks is {self.n_chunks}; classes of these sizes hold {most} chunks of"
                f" {self.chunk_size}. Lower it."
            )
        if self._chunks * (self.chunk_size - 1) < features:
            raise ValueError(
                f"{self._chunks} chunks of {self.chunk_size} cannot span {features} features. Raise"
                " n_chunks or chunk_size, or give it more items."
            )


LEARNERS = {
    "itml": ITML,
    "lfda": LFDA,
    "lmnn": LMNN,
    "lsml": LSML,
    "mmc": MMC,
    "rca": RCA,
    "scml": SCML,
}
"""By name.

Left out: NCA, which is scikit-learn's (`core.nca`); Covariance, which is `core.pca` with `whiten`;
MLKR, which is for regression; SDML, which calls scikit-learn's graphical lasso with an argument
that it no longer has.
"""
