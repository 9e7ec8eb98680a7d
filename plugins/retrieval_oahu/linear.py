"""What the linear baselines share: bounds of distances from a sample or from the first triplets,
and a map made when it is asked for.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from retrieval.plugin import LinearMap
from scipy.linalg import blas

from retrieval_oahu.online import OnlineLearner

Floats = NDArray[np.floating[Any]]

SETTLE = 100
"""Without `prepare` or `fit`, sizes of distances are taken from this many triplets, which teach
nothing else.
"""
_PAIRS = 5000


class MatrixLearner(LinearMap, OnlineLearner):
    """A learner of a positive semi-definite matrix M, in which (x − y)ᵀ M (x − y) is the squared
    distance; subclasses define `_pair`.

    Each triplet is two pairs, first the similar one. Features are divided by one number, the root
    of the mean squared distance, so that the papers' constants mean the same on all data.

    Attributes:
        matrix_: (F, F) M, of features divided by `unit_`.
        unit_: what features are divided by.
        distances_: squared distances that were seen before learning starts, sorted, at most some
            thousand; they say how large is large.
    """

    matrix_: Floats
    unit_: float
    distances_: Floats
    mean_: Floats

    def _start(self, features: int) -> None:
        """Check parameters and set what the subclass keeps beside the matrix."""

    def _pair(self, apart: Floats, alike: bool) -> bool:
        """Learn from one difference (F,) of features in units; return whether that changed
        anything.
        """
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
            one, other = rng.integers(0, len(sample), (2, _PAIRS))
            kept = one != other
            self._settle(((sample[one[kept]] - sample[other[kept]]) ** 2).sum(axis=1))

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
        """The learned map (F, F): the root of M, in the features' own units."""
        if not hasattr(self, "matrix_"):
            raise AttributeError("components_")
        found = _roots.get(self)
        if found is None:
            values, vectors = np.linalg.eigh((self.matrix_ + self.matrix_.T) / 2)
            order = np.argsort(-values, kind="stable")
            root = np.sqrt(np.maximum(values[order], 0.0)) / (self.unit_ or 1.0)
            found = _roots[self] = np.ascontiguousarray((vectors[:, order] * root).T)
        return found


_roots: WeakKeyDictionary[MatrixLearner, Floats] = WeakKeyDictionary()
"""Maps that were asked for, until their learner learns on: kept here because to be asked must not
change an estimator.
"""


def add_outer(matrix: Floats, factor: float, x: Floats, y: Floats) -> None:
    """Add factor · x yᵀ to a C-contiguous float64 matrix, in place."""
    # BLAS counts by columns: the transpose is what it changes
    blas.dger(factor, y, x, a=matrix.T, overwrite_a=1)
