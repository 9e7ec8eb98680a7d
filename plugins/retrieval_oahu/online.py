"""`OnlineLearner`, the base class of learners from a stream of triplets."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from operator import methodcaller
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import NonNegativeInt
from retrieval.base.arrays import Array, Floats, Ints
from retrieval.errors import DataError
from retrieval.helpers import check_parameters, refuse_overflow, write_bytes
from retrieval.plugin import MetricLearner
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes
from sklearn.utils.validation import check_is_fitted
from threadpoolctl import ThreadpoolController

from retrieval_oahu.streams import Triplet, in_chunks, paper_stream

ROWS = 512
"""Maximum number of rows in a record of weights along the stream."""
_KEY = "retrieval_oahu"
CHUNK = 256
"""Number of triplets per chunk in `fit`; results do not depend on it."""


def refuse_range(name: str, value: float, low: float, high: float, *, closed: bool = False) -> None:
    """Raise a `ValueError` if a parameter is not between `low` and `high`."""
    if not (low < value < high or (closed and value == high)):
        raise ValueError(
            f"{name} is {value} and must be above {low:g} and {'at most' if closed else 'below'}"
            f" {high:g}."
        )


def warn_tau(tau: float) -> None:
    """Warn if τ is above 2/3, where Theorem 3.1 does not hold."""
    if tau > 2 / 3:
        warnings.warn(
            f"tau is {tau:g}. Above 2/3, Theorem 3.1 does not guarantee that classes are separated."
            " Larger values work in practice.",
            stacklevel=4,
        )


class OnlineLearner(MetricLearner):
    """Base class of learners from triplets of vectors; subclasses define `_begin` and `_learn`.

    A subclass also defines `_stream`, and has the parameters `seed` and `random_state`.

    Attributes:
        n_triplets_: number of triplets passed to the learner.
        n_used_: number of triplets that changed the model.
        n_skipped_: number of triplets skipped because anchor and negative are the same vector.
        n_features_in_: F, the number of features.
    """

    def _begin(self, features: int, sample: Floats | None) -> None:
        """Set the fitted attributes to their initial values."""
        raise NotImplementedError

    def _learn(self, triplets: Floats) -> int:
        """Learn from triplets (T, 3, F) in order; return how many of them changed the model."""
        raise NotImplementedError

    def _stream(self, codes: Ints) -> Iterable[Triplet]:
        """Return the triplets from which `fit` learns items of these classes (N,)."""
        raise NotImplementedError

    def prepare(self, X: ArrayLike) -> Self:
        """Reset the learner and estimate the features' statistics from unlabelled vectors (N, F).

        No metric is learned. Without this call, the statistics come from the first triplets.
        """
        x = self._training_features(X)
        self._reset(x.shape[1], x)
        return self

    def partial_fit(self, triplets: ArrayLike, y: Any = None) -> Self:
        """Learn from triplets in order; their division into chunks does not change the result.

        A triplet is learned even if it repeats or contradicts earlier triplets;
        `retrieval_oahu.with_closure` skips such triplets.

        Args:
            triplets: (T, 3, F) anchors, positives and negatives; or one triplet (3, F).
            y: ignored; part of scikit-learn's interface.

        Raises:
            ValueError: the chunk has a wrong shape, or has NaN or infinity. Nothing is learned from
                such a chunk.
        """
        chunk = np.asarray(triplets)
        if chunk.dtype.kind not in "fiub":
            raise ValueError(f"Triplets must be real numbers, not {chunk.dtype}.")
        if chunk.ndim == 2:
            chunk = chunk[None]
        if chunk.ndim != 3 or chunk.shape[1] != 3 or not chunk.shape[2]:
            raise ValueError(
                "Triplets must have the shape (T, 3, F): anchor, positive and negative of F"
                f" features each, not {chunk.shape}."
            )
        features = chunk.shape[2]
        is_fitted = hasattr(self, "n_triplets_")
        expected = getattr(self, "n_features_in_", None)
        if is_fitted and features != expected:
            raise ValueError(
                f"The triplets have {features} features, but {type(self).__name__} learns from"
                f" {expected}."
            )
        chunk = chunk.astype(np.float64)
        finite = np.isfinite(chunk).all(axis=(1, 2))
        if not finite.all():
            raise ValueError(
                f"{int((~finite).sum())} of {len(chunk)} triplets have NaN or infinity; the first"
                f" is number {int(np.argmin(finite))}. Nothing was learned from this chunk."
            )
        refuse_overflow(chunk)
        if not is_fitted:
            self.n_features_in_ = features
            self._reset(features, None)
        possible = (chunk[:, 0] != chunk[:, 2]).any(axis=1)
        # For small products, several threads are no faster, and much slower on busy cores.
        with _pools().limit(limits=1, user_api="blas"):
            self.n_used_ += self._learn(chunk if possible.all() else chunk[possible])
        self.n_triplets_ += len(chunk)
        self.n_skipped_ += int((~possible).sum())
        return self

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Reset the learner and learn from the triplets that it forms of labelled vectors.

        Args:
            X: (N, F) features.
            y: (N,) labels, which may be text.

        Raises:
            ValueError: features are not finite, there is only one class, or no class has two
                members.
        """
        x, codes = self._training_items(X, y)
        self._reset(x.shape[1], x)
        self.learn_from(in_chunks(self._stream(codes), x, CHUNK))
        return self

    def learn_from(self, chunks: Iterable[ArrayLike]) -> Self:
        """Call `partial_fit` on each chunk of a stream until it ends."""
        for chunk in chunks:
            self.partial_fit(chunk)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A view shares memory with the fitted arrays. A copy builds a view of its own arrays.
        state: dict[str, Any] = {**super().__getstate__()}
        state.pop("_view", None)
        return state

    @property
    def constraint_utilization_(self) -> float:
        """Share of the triplets that changed the model (Table 3's U); NaN without any triplet."""
        check_is_fitted(self, "n_triplets_")
        usable = self.n_triplets_ - self.n_skipped_
        if usable:
            return self.n_used_ / usable
        return float("nan")

    def save(self, path: str | Path) -> None:
        """Write parameters and fitted state as safetensors; learning can continue after `load`."""
        check_is_fitted(self, "n_triplets_")
        arrays: dict[str, Array] = {}
        numbers: dict[str, Any] = {}
        for name, value in vars(self).items():
            if not name.endswith("_") or name.startswith("_"):
                continue
            if isinstance(value, np.ndarray):
                arrays[name] = np.ascontiguousarray(value)
            elif isinstance(value, bool | int | float | str) or value is None:
                numbers[name] = value
        about = {
            "learner": type(self).__name__,
            "parameters": self.get_params(),
            "fitted": numbers,
        }
        # Parameters may be numbers of NumPy, as from a grid search over an array.
        metadata = {_KEY: json.dumps(about, default=methodcaller("tolist"))}
        write_bytes(Path(path), to_bytes(arrays, metadata=metadata), DataError, shared=True)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a learner that `save` wrote.

        Raises:
            DataError: the file is missing or damaged, or has another learner.
        """
        path = Path(path)
        try:
            with safe_open(path, framework="numpy") as file:
                about = json.loads((file.metadata() or {}).get(_KEY, "{}"))
                names = file.keys()
                arrays = {name: np.array(file.get_tensor(name)) for name in names}
        except FileNotFoundError:
            raise DataError(f"{path} does not exist.") from None
        except (OSError, SafetensorError, ValueError) as error:
            raise DataError(
                f"{path} is not a complete safetensors file: {str(error).rstrip('.')}."
            ) from error
        learner_name = None
        if isinstance(about, dict):
            learner_name = about.get("learner")
        if learner_name != cls.__name__:
            content = learner_name or "no learner of a stream"
            raise DataError(f"{path} has {content}, not {cls.__name__}.")
        try:
            learner = cls(**about["parameters"])
            fitted = {**about["fitted"], **arrays}
            if "n_features_in_" not in fitted or "n_triplets_" not in fitted:
                raise KeyError("n_features_in_")
        except (TypeError, KeyError) as error:
            raise DataError(f"{path} lacks what {cls.__name__} needs: {error}.") from error
        for name, value in fitted.items():
            setattr(learner, name, value)
        return learner

    def _record(self, weights: Floats, step: int) -> None:
        """Record weights (W,) in `weights_` if `step` is a multiple of the stride; 0 begins anew.

        If the record exceeds `ROWS` rows, the stride doubles and every second row is dropped.
        """
        if not step:
            self.weights_ = weights[None].copy()
            self.weights_at_ = np.zeros(1, np.int64)
            self.stride_ = 1
        elif not step % self.stride_:
            self.weights_ = np.concatenate([self.weights_, weights[None]])
            self.weights_at_ = np.append(self.weights_at_, step)
            if len(self.weights_) > ROWS:
                self.stride_ *= 2
                mask = self.weights_at_ % self.stride_ == 0
                self.weights_ = self.weights_[mask]
                self.weights_at_ = self.weights_at_[mask]

    def _reset(self, features: int, sample: Floats | None) -> None:
        self.n_triplets_ = self.n_used_ = self.n_skipped_ = 0
        try:
            # Checked now, as some streams never use it.
            self._chosen_seed()
            check_parameters(self)
            self._begin(features, sample)
        except Exception:
            # The learner counts as not fitted.
            del self.n_triplets_
            raise


@dataclass(eq=False, repr=False, kw_only=True)
class RandomTriplets(OnlineLearner):
    """Base class of learners whose `fit` draws triplets as in OAHU's paper (§4.3.2).

    Its parameters are keyword-only, and come last in a subclass.
    """

    seeds: NonNegativeInt = 5000
    closure: NonNegativeInt = 5000
    seed: int | None = None
    random_state: int | None = None

    def _stream(self, codes: Ints) -> Iterable[Triplet]:
        return paper_stream(codes, self.seeds, self.closure, seed=self._chosen_seed())


@cache
def _pools() -> ThreadpoolController:
    return ThreadpoolController()
