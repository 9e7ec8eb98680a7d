"""RDML: regularised distance metric learning."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from retrieval_oahu.linear import Floats, MatrixLearner, add_outer

SHARE = 0.9
"""How much of a direction a similar pair may take away."""
REFRESH = 1000
"""Changes between two inversions: the inverse is kept by rank-one updates, whose rounding adds up.
"""


class RDML(MatrixLearner):
    """A perceptron of pairs: those on the wrong side of distance 1 add or subtract their
    difference's outer product.

    Jin, Wang & Zhou, "Regularized Distance Metric Learning: Theory and Algorithm", NeurIPS 2009. A
    similar pair is wrong when farther than the mean squared distance, a dissimilar one when nearer.
    The step of a similar pair is cut short where M would cease to be positive definite, by the
    paper's bound 1 / (xᵀ M⁻¹ x), so that no projection is needed.

    Args:
        learning_rate: λ.
        seeds: how many random triplets `fit` draws.
        closure: how many triplets that follow from those it adds.
        seed: seed of `fit`'s triplets; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Attributes:
        matrix_: (F, F) M, of features divided by `unit_`.
        inverse_: (F, F) its inverse.
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
        add_outer(self.inverse_, -step / (1 + step * room), moved, moved)  # Sherman and Morrison
        self.changes_ += 1
        if self.changes_ % REFRESH == 0:
            self.inverse_ = np.ascontiguousarray(np.linalg.inv(self.matrix_))
        return True
