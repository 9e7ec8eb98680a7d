"""OPML: one pass over labelled items, closed-form steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from retrieval.model.labels import learner_labels
from retrieval.model.linear import class_codes
from sklearn.utils.validation import validate_data

from retrieval_oahu.closure import Triplet
from retrieval_oahu.linear import Floats, MatrixLearner, add_outer
from retrieval_oahu.online import CHUNK
from retrieval_oahu.streams import in_chunks


class OPML(MatrixLearner):
    """One-pass metric learning: each violated triplet has a closed-form step of the linear map, (I
    + γ A)⁻¹.

    Li, Gao, Wang, Zhou, Huo & Shi, "OPML: A One-Pass Closed-Form Solution for Online Metric
    Learning", Pattern Recognition 2018. `fit` makes its own triplets in one pass: each item with
    the latest of its class and the latest of another. γ is cut to ½ / |x − x⁻|² where the step
    would not be invertible.

    Args:
        gamma: γ, the step's size.
        seed: seed of the order in which `fit` passes over the items; 0 by default.
        random_state: scikit-learn's name of `seed`; give one of them, or both the same number.

    Attributes:
        map_: (F, F) L: codes are L x of features divided by `unit_`, less their mean.
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
        """Start anew and pass once over labelled vectors (N, F), in a random order."""
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
        """L (F, F); the learner's `matrix_` is this map, not M."""
        return self.matrix_

    @property
    def components_(self) -> Floats:  # type: ignore[override]
        """The learned map (F, F), in the features' own units."""
        if not hasattr(self, "matrix_"):
            raise AttributeError("components_")
        found: Floats = self.matrix_ / (self.unit_ or 1.0)
        return found


def one_pass(labels: NDArray[np.intp], order: NDArray[Any]) -> Iterator[Triplet]:
    """Return the triplets of one pass: each item, the latest before it of its class, the latest of
    another.

    Args:
        labels: (N,).
        order: in which order the items come.
    """
    latest: dict[int, int] = {}
    # the two classes seen last, the later one first: the other class is one of them
    recent: list[int] = []
    for item in map(int, order):
        own = int(labels[item])
        other = next((c for c in recent if c != own), None)
        if own in latest and other is not None:
            yield Triplet(item, latest[own], latest[other])
        latest[own] = item
        recent = [own, *(c for c in recent if c != own)][:2]
