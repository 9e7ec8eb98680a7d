"""PCA, LDA and NCA against scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from retrieval.plugin import LinearMap
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA as SklearnPCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.neighbors import NeighborhoodComponentsAnalysis
from sklearn.utils.estimator_checks import check_estimator

from retrieval_core.learners import LDA, NCA, PCA

LEARNERS = [
    PCA(8),
    PCA(5, whiten=True),
    LDA(),
    LDA(4, shrinkage=0.3),
    NCA(6, init="pca", max_iter=5),
    NCA(6, init="random", max_iter=3, seed=3),
]


@pytest.fixture(scope="module")
def digits():
    actual = load_digits()
    return actual.data[:400], actual.target[:400]


def scikit(learner: LinearMap) -> Any:
    """The estimator of scikit-learn with the same settings."""
    values = learner.get_params()
    if isinstance(learner, LDA):
        return LinearDiscriminantAnalysis("eigen", **values)
    values["random_state"] = values.pop("seed") or 0
    return (SklearnPCA if isinstance(learner, PCA) else NeighborhoodComponentsAnalysis)(**values)


@pytest.mark.parametrize("learner", LEARNERS, ids=str)
def test_embeddings_are_scikit_learns(learner, digits):
    x, y = digits
    theirs = scikit(learner).fit(x, y)
    expected = theirs.transform(x)
    if not isinstance(learner, PCA):  # our embeddings are centred, which changes no distance
        expected = expected - theirs.transform(x.mean(0, keepdims=True))
    actual = learner.fit(x, y).transform(x)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-8 * np.abs(expected).max())


@pytest.mark.parametrize("learner", [PCA(1), LDA(), NCA(max_iter=5)], ids=str)
def test_keeps_scikit_learns_rules(learner):
    check_estimator(learner, on_skip=None)


def test_too_many_components(digits):
    x, y = digits
    for learner in (PCA(65), LDA(10), NCA(65)):
        with pytest.raises(ValueError, match="components"):
            learner.fit(x, y)
