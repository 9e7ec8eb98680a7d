"""LEGO: online metric learning by LogDet steps."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from retrieval_oahu.linear import Floats, MatrixLearner, add_outer


class LEGO(MatrixLearner):
    """LogDet exact gradient online: each violated pair moves the matrix as far as a LogDet penalty
    lets it, in closed form.

    Jain, Kulis, Dhillon & Grauman, "Online Metric Learning and Fast Similarity Search", NeurIPS
    2008. A similar pair farther than the upper target is drawn towards it, a dissimilar one nearer
    than the lower target pushed; the targets are percentiles of the distances between random items,
    as in ITML. M stays positive definite without a projection.

    Args:
        learning_rate: η.
        upper: percentile of squared distances that similar pairs should stay below.
        lower: percentile that dissimilar pairs should stay above. 50 and 50 do far better on
            Fashion-MNIST than the customary 5 and 95.
        seeds: how many random triplets `fit` draws.
        closure: how many triplets that follow from those it adds.
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
        # the root of η ŷ ȳ² + (1 − η y ŷ) ȳ − ŷ = 0 above 0: the squared distance after the step
        b = eta * target * now - 1
        after = (b + (b * b + 4 * eta * now * now) ** 0.5) / (2 * eta * now)
        factor = eta * (after - target)
        add_outer(self.matrix_, -factor / (1 + factor * now), moved, moved)
        return True
