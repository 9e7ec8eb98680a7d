"""What LANML and PNCA have in common: checked input, the search by L-BFGS, and the fitted
attributes.
"""

from __future__ import annotations

import inspect
import numbers
import warnings
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from retrieval.model.labels import learner_labels
from retrieval.model.linear import class_codes, deviations
from retrieval.plugin import LinearMap
from scipy.optimize import minimize
from sklearn.utils.validation import check_array, validate_data
from threadpoolctl import threadpool_limits

from retrieval_anml.neighborhoods import Neighborhoods

Floats = NDArray[np.floating[Any]]

ONE_THREAD = 10_000_000
"""Below so many pairs, one thread."""


class NeighborhoodLearner(LinearMap):
    """A linear map found by L-BFGS on L (F, C), M = LLᵀ, from M₀ = I / √N; subclasses give the
    objective.

    Parameters that every subclass has: `standardize`, `n_components`, `max_queries`, `max_iter`,
    `tol`, `seed`, `random_state`.

    Attributes:
        components_: (C, F) the learned map, Lᵀ.
        mean_: (F,) the training features' mean, which `transform` subtracts; no distance depends on
            it.
        objective_: the objective reached.
        n_iter_: iterations made; as many as `max_iter` means that it stopped before `tol` was met.
        n_queries_: how many items were queries.
    """

    standardize: bool
    n_components: int | None
    max_queries: int | None
    max_iter: int
    tol: float
    seed: int | None
    random_state: int | None

    def _neighborhoods(
        self, x: Floats, codes: NDArray[np.intp], queries: int | None
    ) -> Neighborhoods:
        raise NotImplementedError

    def _refuse_parameters(self) -> None:
        raise NotImplementedError

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from features (N, F) and labels (N,), which may be text.

        Raises:
            ValueError: features are not finite, there is one class only, no class has two members,
                or a parameter is out of its range.
        """
        raw, codes = self._checked(X, y, reset=True)
        scale = deviations(raw) if self.standardize else np.ones(raw.shape[1])
        x = raw / scale
        loss = self._neighborhoods(x, codes, self.max_queries)
        start = self._start(x)
        # several threads gain nothing on small products, and cost dearly where cores are busy
        with threadpool_limits(1 if loss.queries * len(x) < ONE_THREAD else None, user_api="blas"):
            found = minimize(
                lambda flat: _flat(loss(flat.reshape(start.shape))),
                start.ravel(),
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": self.max_iter, "ftol": self.tol, "gtol": 1e-8},
            )
        learned = found.x.reshape(start.shape)
        self.components_ = np.ascontiguousarray(learned.T / scale)
        self.mean_ = raw.mean(axis=0)
        self.objective_ = float(found.fun)
        self.n_iter_ = int(found.nit)
        self.n_queries_ = loss.queries
        if np.abs(learned).max() < 1e-6 * np.abs(start).max():
            warnings.warn(
                f"{type(self).__name__} learned the zero map: every distance is 0. Make"
                " regularization smaller.",
                stacklevel=2,
            )
        return self

    def objective(self, L: ArrayLike, X: ArrayLike, y: ArrayLike) -> tuple[float, Floats]:
        """Return what `fit` minimises, and its gradient (F, C), at a map L (F, C): codes are X L, M
        = LLᵀ.

        All items are queries, whatever `max_queries` says, and the features are taken as they come,
        whatever `standardize` says. Nothing needs to be fitted, and nothing is kept.

        Args:
            L: (F, C) the map, which is `components_` transposed.
            X: (N, F) features.
            y: (N,) labels.

        Raises:
            ValueError: as for `fit`, or the number of L's rows is not the number of X's columns.
        """
        x, codes = self._checked(X, y, reset=False)
        at = check_array(L, dtype=np.float64)
        if len(at) != x.shape[1]:
            raise ValueError(
                f"L has {len(at)} rows and the features {x.shape[1]} columns; they must agree."
            )
        return self._neighborhoods(x, codes, None)(at)

    def _checked(
        self, X: ArrayLike, y: ArrayLike, *, reset: bool
    ) -> tuple[Floats, NDArray[np.intp]]:
        self._refuse_parameters()
        if reset:
            x, labels = validate_data(
                self, X, learner_labels(y), dtype=np.float64, ensure_min_samples=2
            )
        else:
            x, labels = (
                check_array(X, dtype=np.float64, ensure_min_samples=2),
                np.asarray(learner_labels(y)),
            )
            if len(labels) != len(x):
                raise ValueError(f"There are {len(x)} items and {len(labels)} labels.")
        return x, class_codes(labels, type(self).__name__)

    def _start(self, x: Floats) -> Floats:
        """Return L₀ = N^(−1/4) V: V the identity, or for fewer columns the principal directions."""
        features = x.shape[1]
        width = features if self.n_components is None else self.n_components
        if not 1 <= width <= features:
            raise ValueError(
                f"n_components is {width}; it must lie between 1 and the {features} features."
            )
        directions = np.eye(features)
        if width < features:
            centred = x - x.mean(axis=0)
            directions = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :width]
            # eigenvectors come with an arbitrary sign
            largest = np.abs(directions).argmax(axis=0)
            directions = directions * np.where(directions[largest, np.arange(width)] < 0, -1.0, 1.0)
        start: Floats = np.ascontiguousarray(directions) / len(x) ** 0.25
        return start

    def _refuse_common(self) -> None:
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name)
            number = isinstance(value, numbers.Real) or (value is None and name == "max_queries")
            if type(parameter.default) in (int, float) and not number:
                raise ValueError(f"{name} is {value!r}; it must be a number.")
        self._chosen_seed()
        if self.max_queries is not None and self.max_queries < 1:
            raise ValueError(
                f"max_queries is {self.max_queries}; it must be at least 1, or None for all items."
            )
        if self.max_iter < 1:
            raise ValueError(f"max_iter is {self.max_iter}; it must be at least 1.")
        if not self.tol > 0:
            raise ValueError(f"tol is {self.tol}; it must be greater than 0.")


def _flat(found: tuple[float, Floats]) -> tuple[float, Floats]:
    return found[0], found[1].ravel()
