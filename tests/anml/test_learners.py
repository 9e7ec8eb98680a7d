"""LANML and PNCA as scikit-learn estimators: the fit, odd data, and error messages."""

from __future__ import annotations

import doctest
import warnings

import numpy as np
import pytest
from refusals import refusal
from sklearn.datasets import load_wine
from sklearn.exceptions import NotFittedError
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from retrieval_anml import LANML, PNCA, linear_learners

LEARNERS = [
    LANML(),
    LANML(1.0, 2.0),
    LANML(0.0, loss="logistic", n_components=2),
    PNCA(0.3),
    PNCA(2.0, "sum"),
]
each = pytest.mark.parametrize("learner", LEARNERS, ids=str)


@pytest.fixture(scope="module")
def wine():
    x, y = load_wine(return_X_y=True)
    return StandardScaler().fit_transform(x), y


@pytest.mark.parametrize(
    "learner", [LANML(max_iter=5), LANML(1.0, max_iter=5), PNCA(max_iter=5)], ids=str
)
def test_keeps_scikit_learns_rules(learner):
    with warnings.catch_warnings():
        # some of its checks fit on pure noise
        warnings.filterwarnings("ignore", message=".* learned the zero map")
        check_estimator(learner, on_skip=None)


def test_examples_in_docstrings():
    assert doctest.testmod(linear_learners, raise_on_error=True).attempted


@each
def test_fit_ends_where_the_gradient_is_small(learner, wine):
    x, y = wine
    learner = type(learner)(**learner.get_params()).set_params(tol=1e-10, max_iter=500).fit(x, y)
    value, gradient = learner.objective(learner.components_.T, x, y)
    assert value == pytest.approx(learner.objective_, rel=1e-9, abs=1e-12)
    first_value, first_gradient = learner.objective(learner._start(x), x, y)
    assert value < 0.7 * first_value
    assert np.abs(gradient).max() < 0.02 * max(1, np.abs(first_gradient).max())
    assert 1 <= learner.n_iter_ <= 500 and learner.n_queries_ == len(x)


def test_queries_are_drawn_by_seed_and_by_class(wine):
    x, y = wine
    first, second = (LANML(max_queries=60, seed=4).fit(x, y) for _ in range(2))
    np.testing.assert_array_equal(first.components_, second.components_)
    assert 57 <= first.n_queries_ <= 63
    other = LANML(max_queries=60, seed=5).fit(x, y)
    assert not np.array_equal(first.components_, other.components_)
    for limit in (178, 500, None):
        assert LANML(max_queries=limit, max_iter=1).fit(x, y).n_queries_ == 178
    # the same share of each class: a class of two items among a thousand still has a query
    many = np.vstack([np.random.default_rng(0).normal(size=(1000, 2)), [[9, 9], [9, 8]]])
    assert LANML(max_queries=100, max_iter=1).fit(many, [0, 1] * 500 + [2, 2]).n_queries_ == 101


def test_odd_data_give_finite_maps(wine):
    x, y = wine
    odd = {
        "constant feature": (np.hstack([x, np.full((178, 1), 3.0)]), y),
        "all constant": (np.ones((20, 3)), np.arange(20) % 2),
        "one member": (x, np.where(np.arange(178) == 5, 9, y)),
        "fewer than neighbors": (x[::30], y[::30]),
        "twins": (np.repeat(x[:40:4], 2, 0), np.arange(20) % 2),
        "text": (x, np.array(["a", "b", "c"])[y]),
        "huge": (1e6 * x, y),
        "tiny": (1e-6 * x, y),
        "one feature": (x[:, :1], y),
        "wide": (np.random.default_rng(0).normal(size=(12, 30)), np.arange(12) % 2),
    }
    for name, (features, labels) in odd.items():
        for learner in (LANML(), LANML(1.0), PNCA(0.1), PNCA(0.1, "sum")):
            learner.set_params(max_iter=20).fit(features, labels)
            numbers = [*learner.components_.ravel(), learner.objective_]
            assert np.isfinite(numbers).all() and learner.components_.any(), (name, learner)


@each
def test_scales_of_features_do_not_matter(learner, wine):
    x, y = wine
    scales = 10.0 ** np.arange(-6, 7)
    plain, scaled = (type(learner)(**learner.get_params()).fit(f, y) for f in (x, 7 + x * scales))
    np.testing.assert_allclose(scaled.objective_, plain.objective_, rtol=1e-2)
    raw = type(learner)(**learner.get_params()).set_params(standardize=False)
    matrices = (learner.get_mahalanobis_matrix() for learner in (raw.fit(x, y), plain))
    np.testing.assert_allclose(*matrices, rtol=1e-6, atol=1e-6)


def test_an_item_alone_in_its_class_is_no_query_but_is_pushed_away(wine):
    x, y = wine[0][:60, :3], wine[1][:60] * 0
    y[:2] = 1, 2
    y[2:30] = 3
    learner = LANML(max_iter=10).fit(x, y)
    assert learner.n_queries_ == 58
    moved = x.copy()
    moved[0] += 0.5
    L = learner.components_.T
    assert learner.objective(L, moved, y)[0] != learner.objective(L, x, y)[0]


def test_a_zero_map_is_warned_of(wine):
    with pytest.warns(UserWarning, match="zero map"):
        LANML(regularization=1e3, max_iter=300, tol=1e-12).fit(*wine)


@pytest.mark.parametrize(
    ("learner", "sentence"),
    [
        (LANML(gamma2=0.0), r"LANML gamma2: should be a number \(> 0\), not 0\.0"),
        (LANML(gamma1="a"), "gamma1: should be a number"),
        (LANML(max_iter=None), "max_iter: should be an integer"),
        (LANML(gamma2=np.inf), "gamma2"),
        (LANML(gamma1=np.nan, margin=0.0), "gamma1: is nan, .*\nLANML margin: should"),
        (LANML(width=0.0), "width"),
        (LANML(regularization=-0.1), "regularization"),
        (LANML(loss="square"), 'loss: should be "hinge" or'),  # type: ignore[arg-type]
        (LANML(neighbors=0), "neighbors"),
        (LANML(neighbors="some"), "neighbors"),  # type: ignore[arg-type]
        (LANML(k1=0), "k1 is 0"),
        (LANML(k2=0), "k2: should be"),
        (LANML(n_components=14), "n_components is 14; it must lie between 1 and the 13 features"),
        (LANML(n_components=0), "n_components"),
        (LANML(tol=0.0, max_queries=0), "max_queries: .*\n.*tol: should"),
        (LANML(seed=1, random_state=2), "two names of one parameter"),
        (PNCA(0.0), "alpha"),
        (PNCA(form="median"), "form"),  # type: ignore[arg-type]
        (PNCA(regularization=-1.0), "regularization"),
    ],
    ids=str,
)
def test_refuses_parameters(learner, sentence, wine):
    with pytest.raises(ValueError, match=sentence):
        learner.fit(*wine)


@pytest.mark.parametrize("learner", [LANML(), PNCA()], ids=str)
def test_refuses_data(learner, wine):
    x, y = wine
    broken, infinite = x.copy(), x.copy()
    broken[3, 3], infinite[3, 3] = np.nan, np.inf
    for x_, y_, sentence in [
        (x, 0 * y, "All 178 items are of one class"),
        (x, np.arange(178), "the only one of its class"),
        (broken, y, "NaN"),
        (infinite, y, "infinity"),
    ]:
        assert sentence in refusal(ValueError, learner.fit, x_, y_)
    rows = refusal(ValueError, learner.objective, np.eye(12), x, y)
    assert "L must have as many rows as X has columns, 13, not 12" in rows
    assert "178 items, but 3 labels" in refusal(ValueError, learner.objective, np.eye(13), x, y[:3])
    for call in (
        lambda: type(learner)().transform(x),
        type(learner)().to_model_parts,
        type(learner)().get_mahalanobis_matrix,
    ):
        refusal(NotFittedError, call)
