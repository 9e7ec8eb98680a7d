"""metric-learn's learners under the installed scikit-learn: metric-learn's numbers, our errors."""

from __future__ import annotations

import sys
from pkgutil import resolve_name

import numpy as np
import pytest
from refusals import refusal
from retrieval.errors import MissingDependency
from retrieval.host.plugins import load_plugins
from sklearn.datasets import load_wine
from sklearn.exceptions import NotFittedError
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

metric_learn = pytest.importorskip("metric_learn")

from retrieval_metric_learn import learners, retrieval_learners  # noqa: E402
from retrieval_metric_learn.learners import (  # noqa: E402
    ITML,
    LFDA,
    LMNN,
    LSML,
    MMC,
    RCA,
    SCML,
)

LEARNERS = {name: resolve_name(place) for name, place in retrieval_learners().items()}
SMALL = [
    ITML(max_iter=20),
    ITML(lower=1.0, upper=8.0, max_iter=20, prior="covariance"),
    LFDA(n_components=5),
    LMNN(2, max_iter=20, min_iter=5, learn_rate=1e-4),
    LSML(max_iter=20),
    MMC(max_iter=3, max_proj=50),
    MMC(diagonal=True, max_iter=3),
    RCA(),
    RCA(n_chunks=40),
    SCML(max_iter=200, output_iter=100),
]
each = pytest.mark.parametrize("learner", SMALL, ids=str)


@pytest.fixture(scope="module")
def wine():
    x, y = load_wine(return_X_y=True)
    return StandardScaler().fit_transform(x), y


def test_every_learner_is_tested():
    assert {type(learner) for learner in SMALL} == set(LEARNERS.values())


@pytest.mark.parametrize("kind", ["weighted", "orthonormalized", "plain"])
def test_lfda_takes_the_first_of_all_directions(kind, wine):
    x, y = wine
    theirs = learners.adapted("LFDA")(n_components=4, embedding_type=kind).fit(x, y).components_
    ours = LFDA(4, embedding_type=kind).fit(x, y).components_
    np.testing.assert_allclose(np.abs(ours), np.abs(theirs), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "learner",
    [ITML(max_iter=5), LFDA(), LMNN(1, max_iter=3, min_iter=1), LSML(max_iter=5), RCA(n_chunks=5)],
    ids=str,
)
def test_keeps_scikit_learns_rules_on_data_that_metric_learn_can_fit(learner):
    for result in check_estimator(learner, on_fail=None, on_skip=None):
        if result["status"] == "failed":
            message = str(result["exception"])
            assert "metric-learn's" in message or "chunks" in message, result


def test_refuses(wine):
    x, y = wine
    two, alone = (np.where(np.arange(178) < n, 7, y) for n in (2, 1))
    for learner, x_, y_, sentence in [
        (LMNN(3), x, two, "metric-learn's LMNN cannot be fitted on these 178 items"),
        (SCML(), x, alone, "Each class needs 2 items"),
        (RCA(n_chunks=100), x, y, "have only 88 chunks"),
        (RCA(n_chunks=5), x, y, "cannot span 13 features"),
        (LFDA(n_components=14), x, y, "between 1 and the 13 features"),
        (ITML(lower=1.0), x, y, "set both or neither"),
        (LFDA(), np.ones((20, 3)), np.arange(20) % 2, "metric-learn's LFDA"),
    ]:
        assert sentence in refusal(ValueError, learner.fit, x_, y_)
    for learner in SMALL:
        learner = type(learner)(**learner.get_params())
        assert "one class" in refusal(ValueError, learner.fit, x, 0 * y)
        assert "NaN" in refusal(ValueError, learner.fit, np.where(x == x[0, 0], np.nan, x), y)
        refusal(NotFittedError, learner.transform, x)


@each
@pytest.mark.filterwarnings(
    "ignore:Only generated", "ignore:As no value", "ignore:k >= N:RuntimeWarning"
)
def test_distances_are_those_of_metric_learns_estimator(learner, wine, monkeypatch):
    x, y = wine
    # metric-learn's check of pairs calls scikit-learn with a removed argument
    monkeypatch.setattr("metric_learn.base_metric.check_input", lambda pairs, **checks: pairs)
    learner = type(learner)(**learner.get_params()).fit(x, np.array(["a", "b", "c"])[y])
    theirs = learners.adapted(learner.estimator)(**learner._settings()).fit(
        x, y, **learner._fit_options()
    )
    if isinstance(learner, LFDA):  # which learns all directions and keeps the first
        theirs.components_ = theirs.components_[: learner.n_components]
    pairs = np.stack([x[:40], x[60:100]], axis=1)
    np.testing.assert_allclose(learner.pair_score(pairs), theirs.pair_score(pairs), rtol=1e-6)
    mapped = np.linalg.norm(learner.transform(x[:40]) - learner.transform(x[60:100]), axis=1)
    np.testing.assert_allclose(mapped, -theirs.pair_score(pairs), rtol=1e-6)
    matrix = theirs.get_mahalanobis_matrix()
    atol = 1e-6 * np.abs(matrix).max()
    np.testing.assert_allclose(learner.get_mahalanobis_matrix(), matrix, atol=atol)
    expected = theirs.get_metric()(*pairs[0])
    assert learner.get_metric()(*pairs[0]) == pytest.approx(expected, rel=1e-6)


def test_a_singular_matrix_is_a_lin_alg_error_as_in_metric_learn(wine):
    x, y = wine
    doubled = np.hstack([x, x[:, :1]])
    with pytest.raises(np.linalg.LinAlgError):
        learners.adapted("ITML_Supervised")(prior="covariance").fit(doubled, y)
    says = "metric-learn's ITML_Supervised cannot be fitted on these 178 items"
    with pytest.raises(np.linalg.LinAlgError, match=says):
        ITML(prior="covariance").fit(doubled, y)


def test_without_metric_learn(monkeypatch, wine):
    learners.adapted.cache_clear()
    monkeypatch.setitem(sys.modules, "metric_learn", None)
    says = r"pip install 'embedding-retrieval\[metric-learn\]'"
    with pytest.raises(MissingDependency, match=says):
        LFDA().fit(*wine)
    assert load_plugins(block=["pml"]).find("learners", "metric_learn.lfda")
    learners.adapted.cache_clear()
