"""How an estimator of metric-learn is run under a current scikit-learn, and becomes one of our
learners.

metric-learn 0.7 checks its input through an argument of scikit-learn's (`force_all_finite`) that
scikit-learn 1.8 removed. Each of its estimators does so in one method, `_prepare_inputs`. We check
the input ourselves and run a subclass whose `_prepare_inputs` hands back what it is given: nothing
in metric-learn or scikit-learn is changed.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from retrieval.errors import MissingDependency
from retrieval.model.labels import learner_labels
from retrieval.plugin import LinearMap
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

Floats = NDArray[np.floating[Any]]


@cache
def adapted(name: str) -> type:
    """Return metric-learn's class `name`, made to take checked arrays as they are.

    Raises:
        MissingDependency: metric-learn is not installed.
    """
    try:
        import metric_learn
    except ImportError as error:
        raise MissingDependency(
            f"{name} comes from metric-learn, which is not installed. Install it: pip install"
            " 'embedding-retrieval[metric-learn]'."
        ) from error

    def hand_back(
        self: Any, X: Any, y: Any = None, type_of_inputs: str = "classic", **checks: Any
    ) -> Any:
        self.preprocessor_ = None
        self.n_features_in_ = X.shape[-1]
        return X if y is None else (X, y)

    return type(name, (getattr(metric_learn, name),), {"_prepare_inputs": hand_back})


class MetricLearnLearner(LinearMap):
    """A learner that metric-learn fits; subclasses say which estimator, and with what.

    Attributes:
        components_: (C, F) the learned map.
        mean_: (F,) the training features' mean, which `transform` subtracts; no distance depends on
            it.
    """

    estimator: ClassVar[str]

    def _settings(self) -> dict[str, Any]:
        """Return the keywords of metric-learn's estimator; by default our parameters, with one
        seed.
        """
        settings: dict[str, Any] = self.get_params(deep=False)
        if "seed" in settings:
            del settings["seed"]
            settings["random_state"] = self._chosen_seed()
        return settings

    def _refuse(self, counts: NDArray[np.intp], features: int) -> None:
        """Refuse class sizes (C,) that the estimator would stumble over."""

    def _fit_options(self) -> dict[str, Any]:
        return {}

    def _components(self, found: Floats) -> Floats:
        """Return the map (C, F) from the one that metric-learn found."""
        return found

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from features (N, F) and labels (N,), which may be text.

        Raises:
            ValueError: the features are not finite, there is one class only, or metric-learn cannot
                fit them.
            LinAlgError: a ValueError too: a matrix that it has to invert is singular.
            MissingDependency: metric-learn is not installed.
        """
        x, labels = validate_data(
            self, X, learner_labels(y), dtype=np.float64, ensure_min_samples=2
        )
        check_classification_targets(labels)
        names, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        if len(names) < 2:
            raise ValueError(
                f"All {len(x)} items are of one class, {names[0]!r}: {type(self).__name__} needs at"
                " least two."
            )
        self._refuse(counts, x.shape[1])
        fitted, options = adapted(self.estimator)(**self._settings()), self._fit_options()
        try:
            with warnings.catch_warnings():
                # fewer pairs than asked for, a default number of bases, divisions by zero: the
                # check of the result below is what counts
                for message in ("Only generated", "As no value for `n_basis`"):
                    warnings.filterwarnings("ignore", message=message)
                warnings.filterwarnings("ignore", category=RuntimeWarning, module="metric_learn")
                fitted.fit(x, codes, **options)
            components = self._components(np.atleast_2d(np.real(fitted.components_)))
        except (
            ValueError,
            RuntimeError,
            AssertionError,
            ArithmeticError,
            TypeError,
            IndexError,
        ) as error:
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            # LinAlgError is a ValueError: who catches either of metric-learn's finds it here too
            kind = np.linalg.LinAlgError if isinstance(error, np.linalg.LinAlgError) else ValueError
            raise kind(
                f"metric-learn's {self.estimator} cannot be fitted on these {len(x)} items:"
                f" {reason}."
            ) from error
        if not np.isfinite(components).all():
            raise ValueError(
                f"metric-learn's {self.estimator} ended in numbers that are not finite. Scale the"
                " features, leave constant ones out, or give it more items."
            )
        self.components_ = np.ascontiguousarray(components, dtype=np.float64)
        self.mean_ = x.mean(axis=0)
        if hasattr(fitted, "n_iter_"):
            self.n_iter_ = int(fitted.n_iter_)
        return self

    def score_pairs(self, pairs: ArrayLike) -> Floats:
        """Return what `pair_distance` does; metric-learn's older name of it."""
        return self.pair_distance(pairs)
