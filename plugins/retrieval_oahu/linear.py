"""Linear metrics learned from a stream of triplets: LEGO, OASIS, OPML and RDML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field
from retrieval.base.arrays import Array, Floats, Ints
from retrieval.plugin import LinearMap
from scipy.linalg import blas
from sklearn.utils.validation import check_is_fitted, validate_data

from retrieval_oahu.network import unit
from retrieval_oahu.online import OnlineLearner, RandomTriplets
from retrieval_oahu.streams import Triplet

if TYPE_CHECKING:
    from torch import nn

    from retrieval_oahu.combiners import Bilinear

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Percentile = Annotated[float, Field(gt=0, lt=100, allow_inf_nan=False)]
SETTLE = 100
"""Number of first triplets that only set the scale of distances.

`prepare` and `fit` set the scale from their sample instead.
"""
# Number of random pairs of a sample that set the scale of distances.
_PAIRS = 5000
# Cache of `components_`, valid until the learner learns again. It is not an attribute, because
# reading a property must not change an estimator.
_roots: WeakKeyDictionary[MatrixLearner, Floats] = WeakKeyDictionary()
SHARE = 0.9
"""RDML limits the step of a similar pair to this share of the step that makes M singular."""
REFRESH = 1000
"""After this many updates of M⁻¹, whose rounding errors accumulate, RDML inverts M again."""


class MatrixLearner(LinearMap, OnlineLearner):
    """Base class of learners of M in the squared distance (x − y)ᵀ M (x − y).

    Subclasses define `_pair`, or `_triplet` and `_root`. A triplet is learned as two pairs, the
    similar pair first. Features are divided by the root of the mean squared distance, so that the
    constants of the papers have the same meaning on all data.

    Attributes:
        matrix_: (F, F) M, for features divided by `unit_`.
        unit_: number by which features are divided.
        distances_: sorted squared distances of at most a few thousand pairs, for thresholds.
    """

    matrix_: Floats
    unit_: float
    distances_: Floats
    mean_: Floats

    def _start(self, features: int) -> None:
        """Set the subclass's further attributes."""

    def _pair(self, difference: Floats, similar: bool) -> bool:
        """Learn from one pair's difference (F,); return whether the model has changed."""
        raise NotImplementedError

    def _triplet(self, differences: Floats) -> bool:
        """Learn from x − x⁺ and x − x⁻ (2, F); return whether the model has changed."""
        changed = [self._pair(differences[0], True), self._pair(differences[1], False)]
        return any(changed)

    def _root(self, unit: float) -> Floats:
        """Return a root of M (F, F), divided by `unit`."""
        values, vectors = np.linalg.eigh((self.matrix_ + self.matrix_.T) / 2)
        order = np.argsort(-values, kind="stable")
        lengths = np.sqrt(np.maximum(values[order], 0.0)) / unit
        return np.ascontiguousarray((vectors[:, order] * lengths).T)

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
            differences = (sample[left] - sample[right])[left != right]
            self._settle((differences**2).sum(axis=1))

    def _settle(self, squares: Floats) -> None:
        # It is 0 if all vectors are equal.
        mean = float(squares.mean()) or 1.0
        self.unit_ = mean**0.5
        self.distances_ = np.sort(squares / mean)

    def _learn(self, triplets: Floats) -> int:
        used = 0
        for triplet in triplets:
            differences = triplet[0] - triplet[1:]
            if not self.unit_:
                self.distances_ = np.append(self.distances_, (differences**2).sum(axis=1))
                if len(self.distances_) == 2 * SETTLE:
                    self._settle(self.distances_)
                continue
            used += self._triplet(differences / self.unit_)
        _roots.pop(self, None)
        return used

    @property
    def components_(self) -> Floats:  # type: ignore[override]
        """The learned map (F, F), a root of M in the units of the original features."""
        if not hasattr(self, "matrix_"):
            raise AttributeError("components_")
        components = _roots.get(self)
        if components is None:
            components = self._root(self.unit_ or 1.0)
            _roots[self] = components
        return components


def add_outer(matrix: Floats, factor: float, x: Floats, y: Floats) -> None:
    """Add factor · x yᵀ to a C-contiguous float64 matrix, in place."""
    # BLAS is column-major, so the transpose is updated.
    blas.dger(factor, y, x, a=matrix.T, overwrite_a=1)


@dataclass(eq=False, repr=False)
class LEGO(MatrixLearner, RandomTriplets):
    """LEGO (LogDet exact gradient online): a closed-form step for each violated pair.

    Jain, Kulis, Dhillon & Grauman, "Online Metric Learning and Fast Similarity Search", NeurIPS
    2008. A similar pair whose distance is above its target is pulled towards the target. A
    dissimilar pair whose distance is below its target is pushed towards the target. The targets are
    percentiles of the distances between random items, as in ITML. M stays positive definite without
    a projection.

    Args:
        learning_rate: η.
        upper: percentile of squared distances below which similar pairs should stay.
        lower: percentile of squared distances above which dissimilar pairs should stay. On
            Fashion-MNIST, 50 for both is far better than the customary 5 and 95.
        seeds: number of random triplets that `fit` draws.
        closure: number of implied triplets that `fit` adds to them.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.

    Attributes:
        matrix_: (F, F) M, of features divided by `unit_`.
    """

    learning_rate: Positive = 0.1
    upper: Percentile = 5.0
    lower: Percentile = 95.0

    def _settle(self, squares: Floats) -> None:
        super()._settle(squares)
        self.targets_ = np.percentile(self.distances_, [self.upper, self.lower])

    def _pair(self, difference: Floats, similar: bool) -> bool:
        moved = self.matrix_ @ difference
        now = float(difference @ moved)
        upper, lower = self.targets_.tolist()
        if similar:
            target = upper
        else:
            target = lower
        if now <= 0 or (similar and now <= target) or (not similar and now >= target):
            return False
        eta = self.learning_rate
        # The squared distance after the step is the positive root ȳ of η ŷ ȳ² + (1 − η y ŷ) ȳ − ŷ,
        # where ŷ is the squared distance now and y the target.
        b = eta * target * now - 1
        after = (b + (b * b + 4 * eta * now * now) ** 0.5) / (2 * eta * now)
        factor = eta * (after - target)
        add_outer(self.matrix_, -factor / (1 + factor * now), moved, moved)
        return True


@dataclass(eq=False, repr=False)
class RDML(MatrixLearner, RandomTriplets):
    """RDML, a perceptron of pairs: adds or subtracts the outer product of a pair's difference.

    Jin, Wang & Zhou, "Regularized Distance Metric Learning: Theory and Algorithm", NeurIPS 2009. A
    similar pair is learned if its squared distance exceeds the mean, a dissimilar pair if its
    squared distance is below the mean. The step of a similar pair with difference x stays below
    the paper's bound 1 / (xᵀ M⁻¹ x), which keeps M positive definite without a projection.

    Args:
        learning_rate: λ.
        seeds: number of random triplets that `fit` draws.
        closure: number of implied triplets that `fit` adds to them.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.

    Attributes:
        matrix_: (F, F) M, of features divided by `unit_`.
        inverse_: (F, F) M⁻¹.
    """

    learning_rate: Positive = 0.1

    def _start(self, features: int) -> None:
        self.inverse_ = np.eye(features)
        self.changes_ = 0

    def _pair(self, difference: Floats, similar: bool) -> bool:
        now = float(difference @ self.matrix_ @ difference)
        if now <= 0 or (similar and now < 1) or (not similar and now > 1):
            return False
        moved = self.inverse_ @ difference
        length = float(difference @ moved)
        step = self.learning_rate
        if similar:
            step = max(-step, -SHARE / length)
        add_outer(self.matrix_, step, difference, difference)
        # The formula of Sherman and Morrison needs no inversion.
        add_outer(self.inverse_, -step / (1 + step * length), moved, moved)
        self.changes_ += 1
        if self.changes_ % REFRESH == 0:
            self.inverse_ = np.ascontiguousarray(np.linalg.inv(self.matrix_))
        return True


@dataclass(eq=False, repr=False)
class OPML(MatrixLearner):
    """OPML (one-pass metric learning): a closed-form step for each violated triplet.

    Li, Gao, Wang, Zhou, Huo & Shi, "OPML: A One-Pass Closed-Form Solution for Online Metric
    Learning", Pattern Recognition 2018. `fit` forms triplets in one pass over the items: an item,
    the latest item of its class and the latest item of another class. A step replaces the map L by
    L (I + γ A)⁻¹, with A = u uᵀ − v vᵀ, u = x − x⁺ and v = x − x⁻. γ is reduced to ½ / |v|² if it
    is larger, which keeps I + γ A invertible.

    Args:
        gamma: γ, the size of the step.
        seed: seed of the order of the items in `fit`; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.

    Attributes:
        map_: (F, F) L. Embeddings are L x, where x is centred and divided by `unit_`.
    """

    gamma: Positive = 1e-3
    seed: int | None = None
    random_state: int | None = None

    def _stream(self, codes: Ints) -> Iterator[Triplet]:
        order = np.random.default_rng(self._chosen_seed()).permutation(len(codes))
        return one_pass(codes, order)

    def _triplet(self, differences: Floats) -> bool:
        # L u and L v, (2, F).
        codes = differences @ self.matrix_.T
        if 1 + codes[0] @ codes[0] - codes[1] @ codes[1] <= 0:
            return False
        gram = differences @ differences.T
        gamma = min(self.gamma, 0.5 / gram[1, 1])
        # Woodbury: (I + K C Kᵀ)⁻¹ = I − K (C⁻¹ + KᵀK)⁻¹ Kᵀ with K = [u v], C = diag(γ, −γ)
        middle = np.linalg.inv(np.diag([1 / gamma, -1 / gamma]) + gram)
        left = middle.T @ codes
        for row, column in zip(left, differences, strict=True):
            add_outer(self.matrix_, -1.0, row, column)
        return True

    @property
    def map_(self) -> Floats:
        """The map L (F, F), which this learner stores in `matrix_` instead of M."""
        return self.matrix_

    def _root(self, unit: float) -> Floats:
        return self.matrix_ / unit


def one_pass(labels: Ints, order: Array) -> Iterator[Triplet]:
    """Yield triplets: an item of `order`, the latest of its class, and the latest of another."""
    latest: dict[int, int] = {}
    # The two latest classes, the latest first.
    recent: list[int] = []
    for item in map(int, order):
        label = int(labels[item])
        other = next((c for c in recent if c != label), None)
        if label in latest and other is not None:
            yield Triplet(item, latest[label], latest[other])
        latest[label] = item
        recent = [label, *(c for c in recent if c != label)][:2]


@dataclass(eq=False, repr=False)
class OASIS(RandomTriplets):
    """OASIS, a similarity S(x, y) = xᵀ W y with a passive-aggressive step per violated margin.

    Chechik, Sharma, Shalit & Bengio, "Large Scale Online Learning of Image Similarity Through
    Ranking", JMLR 2010. W is neither symmetric nor positive, so S is not a distance. Vectors are
    scaled to unit length, and queries are then multiplied by Wᵀ. As all indexed vectors have length
    1, their distances to a query give the same order as their inner products with it.

    Args:
        aggressiveness: C, the largest step.
        margin: amount by which the similarity of a positive should exceed that of a negative. The
            paper's margin of 1 for vectors of length 10, such as images of a few hundred pixels,
            corresponds to 0.01 for unit vectors.
        seeds: number of random triplets that `fit` draws.
        closure: number of implied triplets that `fit` adds to them.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name for `seed`. Set only one of them, or both to one number.

    Attributes:
        similarity_: (F, F) W.
    """

    aggressiveness: Positive = 0.1
    margin: Positive = 0.01

    def transform(self, X: ArrayLike) -> Floats:
        """Return unit vectors (N, F) to index; `queries` returns the vectors to search with."""
        check_is_fitted(self, "n_triplets_")
        return unit(validate_data(self, X, reset=False, dtype=(np.float64, np.float32)))

    def queries(self, X: ArrayLike) -> Floats:
        """Return Wᵀ x (N, F); the inner product with a vector of `transform` is the similarity."""
        codes = self.transform(X)
        vectors: Floats = codes @ self.similarity_.astype(codes.dtype)
        return vectors

    def pair_distance(self, pairs: ArrayLike) -> Floats:
        """Return |Wᵀx − y| (P,) of the pairs' unit vectors, the distance of the exported model.

        The first item of a pair is the query. For one query, this distance orders items as
        `pair_score` does. The distance is not symmetric, and an item's distance to itself is not 0.

        Raises:
            NotFittedError: the learner is not fitted.
            ValueError: the array has a wrong shape, or has NaN or infinity.
        """
        query, item = self._sides(pairs)
        differences = self.queries(query) - self.transform(item)
        return np.asarray(np.linalg.norm(differences, axis=1))

    def pair_score(self, pairs: ArrayLike) -> Floats:
        """Return the similarities xᵀ W y (P,) of the pairs' unit vectors.

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
        self.similarity_: Floats = np.eye(features)

    def _learn(self, triplets: Floats) -> int:
        used = 0
        for a, p, n in unit(triplets):
            difference = p - n
            loss = self.margin - float(a @ self.similarity_ @ difference)
            size = float(a @ a) * float(difference @ difference)
            if loss > 0 and size > 0:
                add_outer(self.similarity_, min(self.aggressiveness, loss / size), a, difference)
                used += 1
        return used

    @property
    def _n_features_out(self) -> int:
        return int(self.n_features_in_)
