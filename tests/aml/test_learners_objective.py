"""AML's algebra against loops, autograd and differences: Eq 9, D(M), its gradient and limits, and
the equation of its optimum.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pairs_by_loops as loops
import pytest
import torch
from scipy.linalg import inv, sqrtm
from sklearn.datasets import load_wine

from retrieval_aml import AML, GMML
from retrieval_aml.aml import Objective, adversarial_pairs, divided_difference
from retrieval_aml.gmml import (
    BLOCK,
    geodesic_factor,
    lifted,
    moments_of_classes,
    moments_of_drawn_pairs,
    moments_of_pairs,
)

RANDOM = np.random.default_rng(0)
Y = np.repeat([0, 1, 2], [5, 6, 1])
X = RANDOM.normal(size=(12, 4)) + Y[:, None] + 3
PAIRS, SIMILAR = loops.all_pairs(X, Y)


def geodesic(a: Any, b: Any, t: float) -> Any:
    half = geodesic_factor(a, b, t)
    return half @ half.T


def spd(size: int, spread: float, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    turn = np.linalg.qr(random.normal(size=(size, size)))[0]
    return (turn * np.exp(random.uniform(-spread, spread, size))) @ turn.T


TURN = np.linalg.qr(RANDOM.normal(size=(4, 4)))[0]
METRICS = {
    "identity": np.eye(4),
    "twice the identity": 2 * np.eye(4),
    "regular": spd(4, 1.0),
    "two eigenvalues": TURN @ np.diag([0.5, 0.5, 2, 2]) @ TURN.T,
    "ill-conditioned": spd(4, 4.0),
}
metrics = pytest.mark.parametrize("m", METRICS.values(), ids=METRICS)


@metrics
@pytest.mark.parametrize("beta", [1e-3, 0.7, 1e3])
def test_eq_9_is_where_the_confusion_is_stationary(m, beta):
    actual = adversarial_pairs(m, PAIRS, SIMILAR, beta)
    inverse = np.linalg.inv(m)
    for pair, alike, points in zip(PAIRS, SIMILAR, actual, strict=True):
        np.testing.assert_allclose(
            points, loops.printed_eq_9(m, pair, bool(alike), beta), rtol=1e-8
        )
        # Eq 8
        opposite = inverse if alike else m
        d = points[0] - points[1]
        scale = np.abs(beta * m).max() * np.abs(pair).max()
        scale += np.abs(opposite).max() * np.abs(d).max()
        assert np.abs(opposite @ d + beta * m @ (points[0] - pair[0])).max() < 1e-10 * scale
        assert np.abs(-opposite @ d + beta * m @ (points[1] - pair[1])).max() < 1e-10 * scale


def test_moments_of_classes_are_those_of_all_pairs():
    a, b = loops.moments(PAIRS, SIMILAR)
    for actual in (moments_of_classes(X, Y), moments_of_pairs(PAIRS, SIMILAR)):
        np.testing.assert_allclose(actual.similar, a, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(actual.dissimilar, b, rtol=1e-12, atol=1e-13)
        assert (actual.n_similar, actual.n_dissimilar) == (25, 41)
    far = moments_of_classes(X + 1e6, Y)
    np.testing.assert_allclose(far.dissimilar, b, rtol=1e-7)


def test_drawn_pairs_tend_to_all_pairs():
    assert 400_000 * X.shape[1] > BLOCK  # drawn in several blocks
    many = moments_of_drawn_pairs(X, Y, 400_000, 3)
    a, b = loops.moments(PAIRS, SIMILAR)
    np.testing.assert_allclose(many.similar, a, atol=0.02 * np.abs(a).max())
    np.testing.assert_allclose(many.dissimilar, b, atol=0.02 * np.abs(b).max())
    assert many.n_similar / 400_000 == pytest.approx(25 / 66, abs=0.005)


@metrics
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1e-3, 1e3), (1e3, 1e-3), (5.0, 0.2)])
def test_the_objective_is_the_sum_over_explicit_pairs(m, alpha, beta):
    moments = moments_of_classes(X, Y)
    value, _ = Objective(moments.similar, moments.dissimilar, alpha, beta)(m)
    assert value == pytest.approx(loops.whole(m, PAIRS, SIMILAR, alpha, beta), rel=1e-10)


def by_autograd(m: Any, alpha: float, beta: float) -> Any:
    """The gradient of Eq 11 through the linear equations of Eq 9, without eigenvectors."""
    place = torch.tensor(m, dtype=torch.float64, requires_grad=True)
    d = torch.tensor(PAIRS[:, 0] - PAIRS[:, 1])
    alike = torch.tensor(SIMILAR)
    inverse = torch.linalg.inv(place)
    total = torch.zeros((), dtype=torch.float64)
    for chosen, metric, opposite in ((d[alike], place, inverse), (d[~alike], inverse, place)):
        near = torch.linalg.solve(2 * opposite + beta * place, beta * place @ chosen.T).T
        for differences, weight in ((chosen, 1.0), (near, alpha)):
            total = total + weight * ((differences @ metric) * differences).sum() / len(chosen)
    total.backward()
    assert place.grad is not None
    gradient = place.grad.numpy()
    return (gradient + gradient.T) / 2


@metrics
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1e-2, 1e3), (1e3, 1e-2)])
def test_the_gradient_equals_autograds_and_differences(m, alpha, beta):
    moments = moments_of_classes(X, Y)
    objective = Objective(moments.similar, moments.dissimilar, alpha, beta)
    gradient = objective(m)[1]
    np.testing.assert_array_equal(gradient, gradient.T)
    assert np.abs(gradient - by_autograd(m, alpha, beta)).max() < 1e-9 * np.abs(gradient).max()
    if np.linalg.cond(m) > 100:
        return
    for i, j in itertools.combinations_with_replacement(range(4), 2):
        step = np.zeros((4, 4))
        step[i, j] = step[j, i] = 1e-6
        slope = (objective(m + step)[0] - objective(m - step)[0]) / 2e-6
        expected = (gradient * step).sum() / 1e-6
        assert slope == pytest.approx(expected, abs=1e-6 * np.abs(gradient).max())


def spectrum(values: float, beta: float) -> float:
    """h(λ) = β² λ⁵ / (2 + βλ²)²."""
    return values / (1 + 2 / (beta * values**2)) ** 2


def test_the_divided_difference_keeps_its_digits():
    values = np.array([1e-6, 0.3, 0.3 + 1e-13, 1.0, 5.0, 1e6])
    for beta in (1e-3, 1.0, 1e3):
        actual = divided_difference(values[:, None], values[None, :], beta)
        for (i, a), (j, b) in itertools.product(enumerate(values), repeat=2):
            if abs(a - b) > 1e-3 * a:
                expected = (spectrum(a, beta) - spectrum(b, beta)) / (a - b)
            else:
                p = 2 + beta * a**2  # h′, by hand
                expected = beta**2 * (5 * a**4 * p - 4 * beta * a**6) / p**3
            assert actual[i, j] == pytest.approx(expected, rel=1e-10), (a, b, beta)


def riccati(a: Any, b: Any) -> Any:
    """A⁻¹ # B from matrix roots."""
    root = np.real(sqrtm(inv(a)))
    back = inv(root)
    return root @ np.real(sqrtm(back @ b @ back)) @ root


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_gmml_is_the_geometric_mean(spread):
    a, b = spd(6, spread, 1), spd(6, spread, 2)
    m = geodesic(a, b, 0.5)
    np.testing.assert_allclose(m, riccati(a, b), rtol=1e-7, atol=1e-7 * np.abs(m).max())
    np.testing.assert_allclose(m @ a @ m, b, atol=1e-9 * np.abs(b).max())
    np.testing.assert_allclose(geodesic(a, b, 0.0), inv(a), atol=1e-9 * np.abs(inv(a)).max())
    np.testing.assert_allclose(geodesic(a, b, 1.0), b, atol=1e-9 * np.abs(b).max())
    # a geodesic: its midpoint's midpoint
    quarter = geodesic(a, geodesic(a, b, 0.5), 0.5)
    np.testing.assert_allclose(geodesic(a, b, 0.25), quarter, atol=1e-8 * np.abs(quarter).max())


PRIORS = {
    "matrix": spd(4, 1.0, 5),
    "identity": np.eye(4),
    "covariance": inv(np.cov(X, rowvar=False)),
}


@pytest.mark.parametrize("name", PRIORS)
def test_gmml_with_a_prior(name):
    prior, near = PRIORS["matrix"] if name == "matrix" else name, PRIORS[name]
    a, b = loops.moments(PAIRS, SIMILAR)
    m = GMML(0.5, 0.3, prior).fit(X, Y).get_mahalanobis_matrix()
    expected = riccati(a + 0.3 * inv(near), b + 0.3 * near)
    np.testing.assert_allclose(m, expected, rtol=1e-8, atol=1e-9)
    heavy = GMML(0.5, 1e9, prior).fit(X, Y).get_mahalanobis_matrix()
    np.testing.assert_allclose(heavy, near, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("alpha", "beta"), [(1e-9, 1.0), (1.0, 1e-7), (1.0, 1e9)], ids=["α → 0", "β → 0", "β → ∞"]
)
@pytest.mark.parametrize("t", [0.5, 0.2])
def test_limits_are_gmml_up_to_scale(alpha, beta, t):
    m = AML(alpha, beta, t).fit(X, Y).get_mahalanobis_matrix()
    g = GMML(t).fit(X, Y).get_mahalanobis_matrix()
    np.testing.assert_allclose(m / np.trace(m), g / np.trace(g), atol=2e-6)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (10.0, 0.1), (100.0, 100.0)])
def test_the_optimum_solves_its_equation(alpha, beta):
    x, y = load_wine(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    learner = AML(alpha, beta, tol=1e-9, max_iter=3000).fit(x, y)
    moments = moments_of_classes(x, y)
    objective = Objective(moments.similar, moments.dissimilar, alpha, beta)
    m = learner.get_mahalanobis_matrix()
    expected = riccati(objective.effective_similar(m), objective.pull * moments.dissimilar)
    np.testing.assert_allclose(m, expected, atol=1e-5 * np.abs(m).max())
    assert learner.objective_ == pytest.approx(objective(m)[0], rel=1e-10)
    start = np.sqrt(objective.pull) * GMML().fit(x, y).get_mahalanobis_matrix()
    assert learner.objective_ < objective(start)[0]
    # AML_t moves along the geodesic of that equation
    slid = AML(alpha, beta, 0.3, tol=1e-9, max_iter=3000).fit(x, y).get_mahalanobis_matrix()
    along = geodesic(objective.effective_similar(m), objective.pull * moments.dissimilar, 0.3)
    np.testing.assert_allclose(slid, along, atol=1e-4 * np.abs(along).max())


def test_descent_from_random_metrics_ends_no_lower():
    moments = moments_of_classes(X, Y)
    least = AML(3.0, 0.5, tol=1e-10).fit(X, Y).objective_
    a, b = torch.tensor(moments.similar), torch.tensor(moments.dissimilar)
    for seed in range(3):
        root = torch.tensor(np.linalg.cholesky(spd(4, 1.0, seed)), requires_grad=True)
        options = {"line_search_fn": "strong_wolfe", "tolerance_grad": 1e-10}
        descent = torch.optim.LBFGS([root], max_iter=500, **options)

        def value(root: Any = root) -> Any:
            m = root @ root.T
            inverse = torch.linalg.inv(m)
            near = torch.linalg.solve(2 * inverse + 0.5 * m, 0.5 * m)
            similar = torch.trace(a @ m) + 3.0 * torch.trace(near @ a @ near.T @ m)
            return similar + (1 + 3.0 * (0.5 / 2.5) ** 2) * torch.trace(b @ inverse)

        def closure(descent: Any = descent, value: Any = value) -> Any:
            descent.zero_grad()
            (loss := value()).backward()
            return loss

        descent.step(closure)
        assert value().item() > least * (1 - 1e-7)


def test_only_small_eigenvalues_are_raised():
    regular = spd(4, 3.0)
    assert lifted(regular, 1.0) is regular
    flat = np.diag([1.0, 1.0, 0.0])
    np.testing.assert_allclose(lifted(flat, 2.0), np.diag([1.0, 1.0, 2e-10]))
