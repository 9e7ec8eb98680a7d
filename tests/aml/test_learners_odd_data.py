"""GMML and AML on odd data and odd pairs, and their error messages."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from aml_metrics import assert_spd
from refusals import refusal
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from retrieval_aml import AML, GMML

SINGULAR = {
    "A: more features than similar pairs": lambda r: (
        r.normal(size=(12, 20)) + np.arange(12)[:, None] % 3,
        np.arange(12) % 3,
    ),
    "B: two items per class at one place": lambda r: (
        np.vstack([r.normal(size=(30, 3)), -r.normal(size=(30, 3))]) @ np.diag([1, 1, 0]) + 0.0,
        np.repeat([0, 1], 30),
    ),
    "A: twins": lambda r: (
        np.repeat(r.normal(size=(10, 4)), 2, axis=0),
        np.repeat(np.arange(10), 2),
    ),
    "both: constant and repeated features": lambda r: (
        (lambda z: np.hstack([z, z[:, :1], np.full((40, 1), 3.0)]))(r.normal(size=(40, 3))),
        np.arange(40) % 2,
    ),
}


@pytest.mark.parametrize("make", SINGULAR.values(), ids=SINGULAR)
@pytest.mark.parametrize("t", [0.0, 0.5, 1.0])
def test_positive_definite_for_all_weights_and_ranks(make, t):
    x, y = make(np.random.default_rng(0))
    assert_spd(GMML(t).fit(x, y).get_mahalanobis_matrix())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for alpha, beta in itertools.product((1e-3, 1.0, 1e3), repeat=2):
            learner = AML(alpha, beta, t, max_iter=60).fit(x, y)
            assert_spd(learner.get_mahalanobis_matrix())
            assert np.isfinite(learner.objective_) and learner.objective_ > 0


def test_odd_data_give_finite_maps(wine):
    x, y = wine
    odd = {
        "constant feature": (np.hstack([x, np.full((178, 1), 3.0)]), y),
        "one member": (x, np.where(np.arange(178) == 5, 9, y)),
        "text": (x, np.array(["a", "b", "c"])[y]),
        "huge": (1e9 * x, y),
        "tiny": (1e-9 * x, y),
        "one feature": (x[:, :1], y),
    }
    for name, (features, labels) in odd.items():
        for learner in (GMML(), AML(), AML(standardize=True), AML(n_pairs=300)):
            learner.fit(features, labels)
            assert learner.converged_ and np.isfinite(learner.components_).all(), (name, learner)
            assert_spd(learner.get_mahalanobis_matrix())
    text, numbers = AML().fit(*odd["text"]), AML().fit(x, y)
    np.testing.assert_array_equal(text.components_, numbers.components_)


def test_pairs_of_identical_points(wine):
    x = wine[0]
    similar = np.arange(60) < 30
    pairs = np.stack([x[:60], x[60:120]], axis=1)
    some = pairs.copy()
    some[::5, 1] = some[::5, 0]
    all_similar, all_dissimilar = pairs.copy(), pairs.copy()
    all_alike = np.repeat(pairs[:, :1], 2, axis=1)
    all_similar[:30, 1] = all_similar[:30, 0]
    all_dissimilar[30:, 1] = all_dissimilar[30:, 0]
    for learner in (GMML(), AML()):
        for arguments in (some, all_similar, all_dissimilar):
            assert_spd(learner.fit_pairs(arguments, similar).get_mahalanobis_matrix())
        constant = (learner.fit, np.ones((20, 3)), np.arange(20) % 2)
        for call in ((learner.fit_pairs, all_alike, similar), constant):
            assert "The two points of every pair are equal" in refusal(ValueError, *call)
    unmoved = AML().fit_pairs(pairs, similar).adversarial_pairs(all_alike, similar)
    np.testing.assert_allclose(unmoved, all_alike, rtol=1e-12)


@pytest.mark.parametrize(
    ("learner", "sentence"),
    [
        (GMML(-0.1), r"GMML t: should be a number \(≥ 0, ≤ 1\), not -0\.1"),
        (GMML(1.1), "t: should be"),
        (GMML(np.nan), "t: is nan"),
        (AML(t=2.0), "t: should be"),
        (GMML(regularization=-1.0), "regularization: should be a number"),
        (GMML(regularization=np.inf), "regularization"),
        (
            GMML(prior="euclid"),  # type: ignore[arg-type]
            'prior: should be "identity" or "covariance" or',
        ),
        (
            GMML(regularization=1.0, prior=[[1.0]]),
            r"prior must have the shape \(13, 13\) for 13 features",
        ),
        (
            GMML(regularization=1.0, prior=np.triu(np.ones((13, 13)))),  # type: ignore[arg-type]
            "symmetric",
        ),
        (GMML(regularization=1.0, prior=np.ones((13, 13)).tolist()), "positive definite"),
        (GMML(n_pairs=0), "n_pairs: should be"),
        (GMML(n_pairs="all"), "n_pairs: should be"),  # type: ignore[arg-type]
        (GMML(seed=1, random_state=2), "two names of one parameter"),
        (AML(0.0, np.inf), r"AML alpha: should be a number \(> 0\), not 0\.0\.\nAML beta: should"),
        (AML(tol=0.0), "tol: should be"),
        (AML(max_iter=0), "max_iter: should be"),
        (GMML(n_pairs=1), "No pair is (dis)?similar: all are (dis)?similar"),
    ],
    ids=str,
)
def test_refuses_parameters(learner, sentence, wine):
    with pytest.raises(ValueError, match=sentence):
        learner.fit(*wine)


@pytest.mark.parametrize("learner", [GMML(), AML()], ids=str)
def test_refuses_data(learner, wine):
    x, y = wine
    pairs, similar = np.stack([x[:80], x[80:160]], axis=1), np.arange(80) % 2
    broken, infinite = x.copy(), x.copy()
    broken[3, 3], infinite[3, 3] = np.nan, np.inf
    broken_pairs = np.stack([x[:80], infinite[:80]], axis=1)
    for x_, y_, sentence in [
        (x, 0 * y, f"of one class, 0: {type(learner).__name__} needs at least two"),
        (x, np.arange(178), "the only one of its class"),
        (x, x[:, 0], "continuous"),
        (broken, y, "NaN"),
        (infinite, y, "infinity"),
    ]:
        assert sentence in refusal(ValueError, learner.fit, x_, y_)
    flags = "similar must consist of True and False"
    for pairs_, similar_, sentence in [
        (broken_pairs, similar, "pairs contains infinity"),
        (pairs, np.ones(80), "No pair is dissimilar: all are similar"),
        (pairs, -np.ones(80), "No pair is similar: all are dissimilar"),
        (pairs[:, 0], similar, "pairs must have the shape (pairs, 2, features), not (80, 13)"),
        (pairs, similar[:3], "There are 80 pairs, but similar has the shape (3,)"),
        *((pairs, odd, flags) for odd in (similar + 1, similar * 0.5, similar.astype(str))),
    ]:
        assert sentence in refusal(ValueError, learner.fit_pairs, pairs_, similar_)
    for call in (lambda: type(learner)().transform(x), type(learner)().to_model_parts):
        refusal(NotFittedError, call)


def test_stopping_early_is_warned_of(wine):
    with pytest.warns(
        ConvergenceWarning, match="AML stopped at a relative slope of .* after 1 iterations"
    ):
        learner = AML(1000.0, 1.0, max_iter=1).fit(*wine)
    assert learner.converged_ is False and learner.n_iter_ == 1
    assert_spd(learner.get_mahalanobis_matrix())


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
def test_where_no_pair_differs_the_metric_has_the_mean_of_its_eigenvalues(t, wine):
    """Otherwise, for t = .1, M would be a hundred million times larger in such a direction."""
    x, y = wine
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(15, 15)))[0]
    still = turn[:, 13:]
    for learner in (GMML(t), AML(3.0, 1.0, t)):
        plain = learner.fit(x, y).get_mahalanobis_matrix()
        actual = learner.fit(np.pad(x, ((0, 0), (0, 2))) @ turn.T, y).get_mahalanobis_matrix()
        unit = np.exp(np.linalg.slogdet(plain)[1] / 13)
        np.testing.assert_allclose(still.T @ actual @ still, unit * np.eye(2), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            turn[:, :13].T @ actual @ turn[:, :13], plain, rtol=1e-4, atol=1e-5
        )
