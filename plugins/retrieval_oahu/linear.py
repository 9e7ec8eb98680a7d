"""Linear metrics from a stream: LEGO, OASIS, OPML and RDML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Self
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from retrieval.plugin import LinearMap, class_codes, learner_labels
from scipy.linalg import blas
from sklearn.utils.validation import check_is_fitted, validate_data

from retrieval_oahu.network import unit
from retrieval_oahu.online import CHUNK, OnlineLearner
from retrieval_oahu.streams import Triplet, in_chunks

if TYPE_CHECKING:
    from torch import nn

    from retrieval_oahu.combiners import Bilinear

Floats = NDArray[np.floating[Any]]
SETTLE = 100
"""Without `prepare` or `fit`, the first this many triplets only set the scale of distances."""
_PAIRS = 5000
_roots: WeakKeyDictionary[MatrixLearner, Floats] = WeakKeyDictionary()
"""Cache of `components_`, valid until the learner learns again.

It is not an attribute, because reading a property must not change an estimator.
"""
SHARE = 0.9
"""Upper bound of RDML's step for a similar pair, as a share of the step that makes M singular."""
REFRESH = 1000
"""Number of rank-one updates of RDML's inverse, whose rounding accumulates, before a new
inversion."""


class MatrixLearner(LinearMap, OnlineLearner):
    """Base of learners of M in the squared distance (x − y)ᵀ M (x − y); subclasses define `_pair`.

    Each triplet is learned as two pairs, the similar one first. Features are divided by the root of
    the mean squared distance, so that the papers' constants mean the same on all data.

    Attributes:
        matrix_: (F, F) M, for features divided by `unit_`.
        unit_: number that features are divided by.
        distances_: sorted squared distances of a sample of pairs, at most some thousand, from which
            subclasses take thresholds.
    """

    matrix_: Floats
    unit_: float
    distances_: Floats
    mean_: Floats

    def _start(self, features: int) -> None:
        """Check parameters and set the subclass's further attributes."""

    def _pair(self, apart: Floats, alike: bool) -> bool:
        """Learn from one pair's difference (F,); return whether that changed the model."""
        raise NotImplementedError

    def _begin(self, features: int, sample: Floats | None) -> None:
        _roots.pop(self, None)
        self.matrix_ = np.eye(features)
        self.mean_ = np.zeros(features) if sample is None else sample.mean(axis=0)
        self.unit_ = 0.0
        self.distances_ = np.zeros(0)
        self._start(features)
        if sample is not None:
            rng = np.random.default_rng(self._chosen_seed())
            left, right = rng.integers(0, len(sample), (2, _PAIRS))
            kept = left != right
            self._settle(((sample[left[kept]] - sample[right[kept]]) ** 2).sum(axis=1))

    def _settle(self, squares: Floats) -> None:
        mean = float(squares.mean()) or 1.0
        self.unit_ = mean**0.5
        self.distances_ = np.sort(squares / mean)

    def _learn(self, triplets: Floats) -> int:
        used = 0
        for triplet in triplets:
            apart = triplet[0] - triplet[1:]
            if not self.unit_:
                self.distances_ = np.append(self.distances_, (apart**2).sum(axis=1))
                if len(self.distances_) == 2 * SETTLE:
                    self._settle(self.distances_)
                continue
            apart /= self.unit_
            similar, dissimilar = self._pair(apart[0], True), self._pair(apart[1], False)
            used += similar or dissimilar
        _roots.pop(self, None)
        return used

    @property
    def components_(self) -> Floats:  # type: ignore[override]
        """The learned map (F, F), a root of M in the units of the original features."""
        if not hasattr(self, "matrix_"):
            raise AttributeError("components_")
        components = _roots.get(self)
        if components is None:
            values, vectors = np.linalg.eigh((self.matrix_ + self.matrix_.T) / 2)
            order = np.argsort(-values, kind="stable")
            root = np.sqrt(np.maximum(values[order], 0.0)) / (self.unit_ or 1.0)
            components = _roots[self] = np.ascontiguousarray((vectors[:, order] * root).T)
        return components


def add_outer(matrix: Floats, factor: float, x: Floats, y: Floats) -> None:
    """Add factor · x yᵀ to a C-contiguous float64 matrix, in place."""
    # BLAS is column-major, so it updates the transpose
    blas.dger(factor, y, x, a=matrix.T, overwrite_a=1)


class LEGO(MatrixLearner):
    """LEGO (LogDet exact gradient online): a closed-form step for each violated pair.

    Jain, Kulis, Dhillon & Grauman, "Online Metric Learning and Fast Similarity Search", NeurIPS
    2008. A similar pair above its target distance is pulled towards the target, and a dissimilar
    pair below its target is pushed towards it. The targets are percentiles of the distances between
    random items, as in ITML. M stays positive definite without a projection.

    Args:
        learning_rate: η.
        upper: percentile of squared distances that similar pairs should stay below.
        lower: percentile of squared distances that dissimilar pairs should stay above. On
            Fashion-MNIST 50 and 50 are far better than the customary 5 and 95.
        seeds: number of random triplets that `fit` draws.
        closure: number of triplets that `fit` derives from those and adds.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Attributes:
        matrix_: (F, F) M, of features divided by `unit_`.
    """

    def __init__(
        self,
        learning_rate: Annotated[float, Field(gt=0)] = 0.1,
        upper: Annotated[float, Field(gt=0, lt=100)] = 5.0,
        lower: Annotated[float, Field(gt=0, lt=100)] = 95.0,
        seeds: Annotated[int, Field(ge=0)] = 5000,
        closure: Annotated[int, Field(ge=0)] = 5000,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.upper = upper
        self.lower = lower
        self.seeds = seeds
        self.closure = closure
        self.seed = seed
        self.random_state = random_state

    def _start(self, features: int) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate} and must be above 0.")
        for name in ("upper", "lower"):
            if not 0 < getattr(self, name) < 100:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; a percentile must be above 0 and below 100."
                )

    def _settle(self, squares: Floats) -> None:
        super()._settle(squares)
        self.targets_ = np.percentile(self.distances_, [self.upper, self.lower])

    def _pair(self, apart: Floats, alike: bool) -> bool:
        target = float(self.targets_[0 if alike else 1])
        moved = self.matrix_ @ apart
        now = float(apart @ moved)
        if now <= 0 or (now <= target if alike else now >= target):
            return False
        eta = self.learning_rate
        # the squared distance after the step is the positive root of η ŷ ȳ² + (1 − η y ŷ) ȳ − ŷ = 0
        b = eta * target * now - 1
        after = (b + (b * b + 4 * eta * now * now) ** 0.5) / (2 * eta * now)
        factor = eta * (after - target)
        add_outer(self.matrix_, -factor / (1 + factor * now), moved, moved)
        return True


class RDML(MatrixLearner):
    """RDML, a perceptron of pairs: violated pairs add or subtract their difference's outer product.

    Jin, Wang & Zhou, "Regularized Distance Metric Learning: Theory and Algorithm", NeurIPS 2009. A
    similar pair is violated if it lies farther apart than the mean squared distance, a dissimilar
    one if it lies nearer. The step of a similar pair is limited by the paper's bound 1 / (xᵀ M⁻¹
    x), which keeps M positive definite without a projection.

    Args:
        learning_rate: λ.
        seeds: number of random triplets that `fit` draws.
        closure: number of triplets that `fit` derives from those and adds.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Attributes:
        matrix_: (F, F) M, of features divided by `unit_`.
        inverse_: (F, F) M⁻¹.
    """

    def __init__(
        self,
        learning_rate: Annotated[float, Field(gt=0)] = 0.1,
        seeds: Annotated[int, Field(ge=0)] = 5000,
        closure: Annotated[int, Field(ge=0)] = 5000,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.seeds = seeds
        self.closure = closure
        self.seed = seed
        self.random_state = random_state

    def _start(self, features: int) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate} and must be above 0.")
        self.inverse_ = np.eye(features)
        self.changes_ = 0

    def _pair(self, apart: Floats, alike: bool) -> bool:
        now = float(apart @ self.matrix_ @ apart)
        if now <= 0 or (now < 1 if alike else now > 1):
            return False
        step = -self.learning_rate if alike else self.learning_rate
        moved = self.inverse_ @ apart
        room = float(apart @ moved)
        if alike:
            step = max(step, -SHARE / room)
        add_outer(self.matrix_, step, apart, apart)
        add_outer(self.inverse_, -step / (1 + step * room), moved, moved)  # Sherman–Morrison
        self.changes_ += 1
        if self.changes_ % REFRESH == 0:
            self.inverse_ = np.ascontiguousarray(np.linalg.inv(self.matrix_))
        return True


class OPML(MatrixLearner):
    """OPML (one-pass metric learning): each violated triplet has a closed-form step, (I + γ A)⁻¹.

    Li, Gao, Wang, Zhou, Huo & Shi, "OPML: A One-Pass Closed-Form Solution for Online Metric
    Learning", Pattern Recognition 2018. `fit` builds its own triplets in one pass over the items:
    each item, the latest one of its class and the latest one of another class. If the step would
    not be invertible, γ is reduced to ½ / |x − x⁻|².

    Args:
        gamma: γ, the size of the step.
        seed: seed of the order of the items in `fit`; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Attributes:
        map_: (F, F) L; embeddings are L x, where x is centred and divided by `unit_`.
    """

    def __init__(
        self,
        gamma: Annotated[float, Field(gt=0)] = 1e-3,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.gamma = gamma
        self.seed = seed
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Reset the learner and pass once over labelled vectors (N, F), in random order."""
        x, labels = validate_data(
            self, X, learner_labels(y), dtype=np.float64, ensure_min_samples=2
        )
        self._reset(x.shape[1], x)
        order = np.random.default_rng(self._chosen_seed()).permutation(len(x))
        triplets = one_pass(class_codes(labels, "OPML"), order)
        self.learn_from(in_chunks(triplets, x, CHUNK))
        return self

    def _start(self, features: int) -> None:
        if not self.gamma > 0:
            raise ValueError(f"gamma is {self.gamma} and must be above 0.")
        self.matrix_ = np.eye(features)

    def _learn(self, triplets: Floats) -> int:
        used = 0
        for triplet in triplets:
            apart = triplet[0] - triplet[1:]
            if not self.unit_:
                used += super()._learn(triplet[None])
                continue
            used += self._triplet(apart / self.unit_)
        return used

    def _triplet(self, apart: Floats) -> bool:
        codes = apart @ self.matrix_.T  # (2, F): L u and L v
        if 1 + codes[0] @ codes[0] - codes[1] @ codes[1] <= 0:
            return False
        gram = apart @ apart.T
        gamma = min(self.gamma, 0.5 / gram[1, 1])
        # Woodbury: (I + K C Kᵀ)⁻¹ = I − K (C⁻¹ + KᵀK)⁻¹ Kᵀ with K = [u v], C = diag(γ, −γ)
        middle = np.linalg.inv(np.diag([1 / gamma, -1 / gamma]) + gram)
        left = middle.T @ codes
        for row, column in zip(left, apart, strict=True):
            add_outer(self.matrix_, -1.0, row, column)
        return True

    @property
    def map_(self) -> Floats:
        """The map L (F, F), which this learner stores in `matrix_` instead of M."""
        return self.matrix_

    @property
    def components_(self) -> Floats:  # type: ignore[override]
        """The learned map (F, F), in the units of the original features."""
        if not hasattr(self, "matrix_"):
            raise AttributeError("components_")
        components: Floats = self.matrix_ / (self.unit_ or 1.0)
        return components


def one_pass(labels: NDArray[np.intp], order: NDArray[Any]) -> Iterator[Triplet]:
    """Yield triplets: each item in `order`, the latest of its class, the latest of another."""
    latest: dict[int, int] = {}
    # the two classes seen last, the later one first; the other class is one of them
    recent: list[int] = []
    for item in map(int, order):
        own = int(labels[item])
        other = next((c for c in recent if c != own), None)
        if own in latest and other is not None:
            yield Triplet(item, latest[own], latest[other])
        latest[own] = item
        recent = [own, *(c for c in recent if c != own)][:2]


class OASIS(OnlineLearner):
    """OASIS, a similarity S(x, y) = xᵀ W y with a passive-aggressive step per violated margin.

    Chechik, Sharma, Shalit & Bengio, "Large Scale Online Learning of Image Similarity Through
    Ranking", JMLR 2010. W is neither symmetric nor positive, so S is not a distance. Vectors are
    scaled to unit length, so that a search by inner product is a search by distance; queries are
    multiplied by Wᵀ.

    Args:
        aggressiveness: C, the largest step.
        margin: similarity by which a positive should exceed a negative. 0.01 on unit vectors
            corresponds to the paper's 1 on vectors of length 10, such as images of some hundred
            pixels.
        seeds: number of random triplets that `fit` draws.
        closure: number of triplets that `fit` derives from those and adds.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Attributes:
        similarity_: (F, F) W.
    """

    similarity_: Floats

    def __init__(
        self,
        aggressiveness: Annotated[float, Field(gt=0)] = 0.1,
        margin: Annotated[float, Field(gt=0)] = 0.01,
        seeds: Annotated[int, Field(ge=0)] = 5000,
        closure: Annotated[int, Field(ge=0)] = 5000,
        seed: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.aggressiveness = aggressiveness
        self.margin = margin
        self.seeds = seeds
        self.closure = closure
        self.seed = seed
        self.random_state = random_state

    def transform(self, X: ArrayLike) -> Floats:
        """Return unit vectors (N, F) to index; `queries` returns the vectors to search with."""
        check_is_fitted(self, "n_triplets_")
        return unit(validate_data(self, X, reset=False, dtype=(np.float64, np.float32)))

    def queries(self, X: ArrayLike) -> Floats:
        """Return Wᵀ x (N, F), whose inner product with `transform`'s vectors is the similarity."""
        codes = self.transform(X)
        vectors: Floats = codes @ self.similarity_.astype(codes.dtype)
        return vectors

    def pair_distance(self, pairs: ArrayLike) -> Floats:
        """Return |Wᵀx − y| (P,) of each pair's unit vectors, the distance of the exported model.

        The first item of a pair is the query. For one query, this distance and `pair_score` give
        the same order. The distance is not symmetric, and the distance of an item to itself is not
        0.

        Raises:
            NotFittedError: the learner is not fitted.
            ValueError: the array has a wrong shape, or holds NaN or infinity.
        """
        query, item = self._sides(pairs)
        return np.asarray(np.linalg.norm(self.queries(query) - self.transform(item), axis=1))

    def pair_score(self, pairs: ArrayLike) -> Floats:
        """Return the similarity xᵀ W y (P,) of each pair's unit vectors.

        See `pair_distance` for the errors.
        """
        query, item = self._sides(pairs)
        return np.asarray(np.einsum("pf,pf->p", self.queries(query), self.transform(item)))

    def to_model_parts(self) -> tuple[nn.Module, Bilinear]:
        """Return a head that scales to unit length and a combiner that applies Wᵀ to queries."""
        from retrieval_oahu.combiners import Bilinear, UnitLength

        check_is_fitted(self, "n_triplets_")
        return UnitLength(), Bilinear(self.similarity_)

    def _begin(self, features: int, sample: Floats | None) -> None:
        for name in ("aggressiveness", "margin"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)} and must be above 0.")
        self.similarity_ = np.eye(features)

    def _learn(self, triplets: Floats) -> int:
        used = 0
        for a, p, n in unit(triplets):
            apart = p - n
            loss = self.margin - float(a @ self.similarity_ @ apart)
            size = float(a @ a) * float(apart @ apart)
            if loss > 0 and size > 0:
                add_outer(self.similarity_, min(self.aggressiveness, loss / size), a, apart)
                used += 1
        return used

    @property
    def _n_features_out(self) -> int:
        return int(self.n_features_in_)
