"""GMML and AML as scikit-learn estimators."""

from __future__ import annotations

import doctest
import itertools
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils.estimator_checks import check_estimator

from retrieval_aml import AML, GMML, aml, gmml

LEARNERS = [
    GMML(),
    GMML(0.2, 0.1, "covariance", standardize=True),
    GMML(0.0, n_pairs=2000),
    AML(),
    AML(10.0, 0.3, 0.2, 0.01, standardize=True),
    AML(n_pairs="paper", balance=False),
]
each = pytest.mark.parametrize("learner", LEARNERS, ids=str)


def again(learner: Any, **changes: Any) -> Any:
    return type(learner)(**{**learner.get_params(), **changes})


@each
def test_keeps_scikit_learns_rules(learner):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # some checks fit on next to nothing
        check_estimator(again(learner), on_skip=None)


@pytest.mark.parametrize("module", [aml, gmml])
def test_examples_in_docstrings(module):
    assert doctest.testmod(module, raise_on_error=True).attempted


@each
def test_a_list_of_all_pairs_gives_the_same_as_labels(learner, wine):
    x, y = wine[0][::3], wine[1][::3]
    learner = again(learner, n_pairs=None, prior=None, standardize=False)
    pairs = np.array([[x[i], x[j]] for i, j in itertools.combinations(range(len(x)), 2)])
    similar = np.array([y[i] == y[j] for i, j in itertools.combinations(range(len(x)), 2)])
    expected = learner.fit(x, y).get_mahalanobis_matrix()
    for flags in (
        similar,
        similar.astype(int),
        np.where(similar, 1, -1),
        np.where(similar, 1.0, -1.0),
    ):
        actual = learner.fit_pairs(pairs, flags)
        np.testing.assert_allclose(actual.get_mahalanobis_matrix(), expected, rtol=1e-5, atol=1e-6)
    assert actual.n_similar_ == similar.sum() and actual.n_dissimilar_ == (~similar).sum()
    assert actual.transform(x).shape == (60, 13) and actual.n_features_in_ == 13


def test_pairs_are_drawn_by_seed(wine):
    x, y = wine
    first, other = (GMML(n_pairs=500, seed=seed).fit(x, y) for seed in (4, 5))
    assert not np.array_equal(first.components_, other.components_)
    assert first.n_similar_ + first.n_dissimilar_ == 500
    paper = GMML(n_pairs="paper").fit(x, y)
    assert paper.n_similar_ + paper.n_dissimilar_ == 1000 * 3 * 2
    whole = GMML().fit(x, y)
    assert whole.n_similar_ + whole.n_dissimilar_ == 178 * 177 // 2
    near = np.abs(paper.get_mahalanobis_matrix() - whole.get_mahalanobis_matrix()).max()
    assert (
        near < 0.15 < np.abs(first.get_mahalanobis_matrix() - whole.get_mahalanobis_matrix()).max()
    )


def test_without_balance_amls_metric_is_larger_and_another(wine):
    x, y = wine
    even, sums = (AML(balance=b).fit(x, y).get_mahalanobis_matrix() for b in (True, False))
    assert np.trace(sums) > 1.1 * np.trace(even)
    assert np.abs(sums / np.trace(sums) - even / np.trace(even)).max() > 1e-4


def test_the_learned_map_includes_the_standardisation(wine):
    x, y = wine
    scales = 10.0 ** np.arange(-6, 7)
    for learner in (GMML(0.3), AML(), AML(n_pairs=1000)):
        plain = again(learner, standardize=True).fit(x, y)
        scaled = again(learner, standardize=True).fit(7 + x * scales, y)
        np.testing.assert_allclose(
            scaled.transform(7 + x * scales), plain.transform(x), rtol=1e-4, atol=1e-5
        )
        by_hand = again(learner).fit(x, y).get_mahalanobis_matrix()
        np.testing.assert_allclose(plain.get_mahalanobis_matrix(), by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("standardize", [False, True])
def test_adversarial_pairs_of_a_fitted_learner(standardize, wine):
    x, y = wine
    scales = np.linspace(0.1, 3, 13) if standardize else np.ones(13)
    learner = AML(1.0, 0.7, standardize=standardize).fit(x * scales, y)
    pairs = np.stack([x[:50], x[90:140]], axis=1)
    similar = np.arange(50) % 2 == 0
    actual = learner.adversarial_pairs(pairs * scales, similar) / scales
    m = AML(1.0, 0.7).fit(x, y).get_mahalanobis_matrix()
    inverse = np.linalg.inv(m)
    for pair, alike, points in zip(pairs, similar, actual, strict=True):
        opposite = inverse if alike else m
        slope = opposite @ (points[0] - points[1]) + 0.7 * m @ (points[0] - pair[0])  # Eq 8
        assert np.abs(slope).max() < 1e-4
    np.testing.assert_array_equal(
        learner.adversarial_pairs(pairs, similar.astype(int)),
        learner.adversarial_pairs(pairs, similar),
    )
    with pytest.raises(ValueError, match="have 12 features, but AML was fitted on 13"):
        learner.adversarial_pairs(pairs[:, :, 1:], similar)
    with pytest.raises(NotFittedError):
        AML().adversarial_pairs(pairs, similar)


def test_fits_without_torch():
    code = (
        "import sys; import numpy as np; from retrieval_aml import AML, GMML; "
        "x = np.random.default_rng(0).normal(size=(30, 3)); y = np.arange(30) % 3; "
        "AML().fit(x, y).transform(x), GMML().fit(x, y).transform(x); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
