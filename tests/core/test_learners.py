from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from retrieval.errors import RecipeError
from retrieval.host.plugins import load_plugins
from retrieval.model.contracts import Learner
from retrieval.plugin import LinearMap
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA as SklearnPCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier, NeighborhoodComponentsAnalysis
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
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
each = pytest.mark.parametrize("learner", LEARNERS, ids=str)


@pytest.fixture(scope="module")
def digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    found = load_digits()
    return found.data[:400], found.target[:400]


def scikit(learner: LinearMap) -> Any:
    """The estimator of scikit-learn with the same settings."""
    if isinstance(learner, PCA):
        return SklearnPCA(
            learner.n_components, whiten=learner.whiten, random_state=learner.seed or 0
        )
    if isinstance(learner, LDA):
        return LinearDiscriminantAnalysis(
            "eigen", n_components=learner.n_components, shrinkage=learner.shrinkage
        )
    assert isinstance(learner, NCA)
    return NeighborhoodComponentsAnalysis(
        learner.n_components,
        init=learner.init,
        max_iter=learner.max_iter,
        tol=learner.tol,
        random_state=learner.seed or 0,
    )


@each
def test_codes_are_scikit_learns(learner: LinearMap, digits: Any) -> None:
    x, y = digits
    theirs = scikit(learner).fit(x, y)
    expected = theirs.transform(x)
    if not isinstance(learner, PCA):  # ours are centred, which changes no distance
        expected = expected - theirs.transform(x.mean(0, keepdims=True))
    found = learner.fit(x, y).transform(x)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8 * np.abs(expected).max())


@each
def test_the_model_gives_the_numbers_of_transform(learner: LinearMap, digits: Any) -> None:
    x, y = digits
    assert isinstance(learner, Learner)
    # a mean far from zero, which a bias would lose digits to
    head, combiner = learner.fit(x + 1000, y).to_model_parts()
    assert combiner is None
    expected = learner.transform(x + 1000)
    with torch.no_grad():
        found = head(torch.from_numpy(x + 1000).float()).numpy()
    assert found.dtype == np.float32 and head(torch.zeros(2, 64)).shape == expected[:2].shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@each
def test_mahalanobis_matrix(learner: LinearMap, digits: Any) -> None:
    x, y = digits
    codes = learner.fit(x, y).transform(x[:5])
    m = learner.get_mahalanobis_matrix()
    for i in range(5):
        for j in range(5):
            d = x[i] - x[j]
            assert np.sqrt(max(d @ m @ d, 0)) == pytest.approx(
                np.linalg.norm(codes[i] - codes[j]), rel=1e-6, abs=1e-6
            )


@each
def test_the_fitted_attributes_are_the_whole_result(learner: LinearMap, digits: Any) -> None:
    x, y = digits
    learner.fit(x, y)
    again = type(learner)(**learner.get_params())
    for name, value in vars(learner).items():
        if name.endswith("_"):
            setattr(again, name, value)
    np.testing.assert_array_equal(again.transform(x), learner.transform(x))
    a, b = learner.to_model_parts()[0].state_dict(), again.to_model_parts()[0].state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_learning_helps(digits: Any) -> None:
    x, y = digits
    knn = KNeighborsClassifier(1)
    found = {
        name: knn.fit(learner.fit(x[:200], y[:200]).transform(x[:200]), y[:200]).score(
            learner.transform(x[200:]), y[200:]
        )
        for name, learner in {
            "pca": PCA(3),
            "lda": LDA(3),
            "nca": NCA(3, init="pca", max_iter=30),
        }.items()
    }
    assert found["pca"] < found["lda"] and found["pca"] < found["nca"]
    assert min(found.values()) > 0.5


@pytest.mark.parametrize("learner", [PCA(4), LDA(3), NCA(4, max_iter=2)], ids=str)
def test_in_a_pipeline_and_a_search(learner: LinearMap, digits: Any) -> None:
    x, y = digits[0][:150], digits[1][:150]
    name = type(learner).__name__.lower()
    pipeline = make_pipeline(StandardScaler(), learner, KNeighborsClassifier(1))
    search = GridSearchCV(
        pipeline, {f"{name}__n_components": [1, 5]}, cv=2, error_score="raise"
    ).fit(x, y)
    assert search.best_params_ == {f"{name}__n_components": 5}
    assert search.best_estimator_[:-1].transform(x).shape == (150, 5)
    assert len(search.best_estimator_[:-1].get_feature_names_out()) == 5


@pytest.mark.parametrize("learner", [PCA(1), LDA(), NCA(max_iter=5)], ids=str)
def test_keeps_scikit_learns_rules(learner: LinearMap) -> None:
    check_estimator(learner, on_skip=None)


def test_not_fitted() -> None:
    for learner in (PCA(), LDA(), NCA()):
        for call in (
            lambda n=learner: n.transform(np.zeros((2, 3))),
            learner.to_model_parts,
            learner.get_mahalanobis_matrix,
        ):
            with pytest.raises(NotFittedError):
                call()


def test_from_a_recipe() -> None:
    plugins = load_plugins(block=["pml"])
    made = plugins.build("learners", {"name": "core.pca", "n_components": 5}, {"features": 9})
    assert made.get_params()["n_components"] == 5
    made = plugins.build(
        "learners", {"name": "core.lda", "n_components": 3, "shrinkage": "auto"}, {"features": 9}
    )
    assert made.get_params() == {"n_components": 3, "shrinkage": "auto"}
    with pytest.raises(RecipeError, match="shrinkage"):
        plugins.build("learners", {"name": "core.lda", "shrinkage": 1.5})


def test_too_many_components(digits: Any) -> None:
    x, y = digits
    for learner in (PCA(65), LDA(10), NCA(65)):
        with pytest.raises(ValueError, match="components"):
            learner.fit(x, y)
