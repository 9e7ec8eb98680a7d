"""The objectives of LANML and PNCA against plain loops, finite differences and scikit-learn's NCA;
their limits and convexity.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.neighbors import NeighborhoodComponentsAnalysis

from retrieval_anml import LANML, PNCA, neighborhoods as module
from retrieval_anml.neighborhoods import Neighborhoods, Objective, Outer

Floats = NDArray[np.floating[Any]]

SETTINGS = [
    LANML(-0.7, 2.0, 0.3),
    LANML(-0.7, 2.0, 0.3, neighbors=3, loss="hinge"),
    LANML(-2.0, 0.5, 0.0, neighbors="all", margin=3.0, width=2.0),
    LANML(0.0, 1.0, 0.1, loss="logistic"),
    LANML(0.5, 30.0, 0.3, neighbors=4, margin=0.2),
    LANML(5.0, 1e-3, 0.01),
    LANML(k1=3, k2=5, regularization=0.3),
    LANML(k1=-2, k2=1, loss="hinge"),
    LANML(k1=-4, gamma2=2.0, neighbors="all", width=2.0),
    LANML(gamma1=0.7, k2=100, loss="logistic"),
    PNCA(1.0),
    PNCA(0.3),
    PNCA(0.3, "sum"),
    PNCA(4.0, "sum", regularization=0.2),
]
each = pytest.mark.parametrize("learner", SETTINGS, ids=str)


@pytest.fixture
def data():
    """Features, labels and a map L (4, 3). Four classes, one with one member and one with two."""
    random = np.random.default_rng(0)
    y = np.array([0] * 11 + [1] * 8 + [2] * 2 + [3])
    x = random.normal(size=(len(y), 4)) + 0.7 * y[:, None] + 5
    order = random.permutation(len(y))
    return x[order], y[order], random.normal(size=(4, 3)) * 0.5


def squared(x: Floats, L: Floats, i: int, j: int) -> float:
    total = 0.0
    for c in range(L.shape[1]):
        total += sum((x[i, f] - x[j, f]) * L[f, c] for f in range(x.shape[1])) ** 2
    return total


def mean_of(distances: list[float], gamma: float) -> float:
    if gamma == 0:
        return sum(distances) / len(distances)
    return -math.log(sum(math.exp(-gamma * d) for d in distances) / len(distances)) / gamma


def radius_of(distances: list[float], gamma: float, k: int | None) -> float:
    """Eq 10: the least mean of |k| distances over all subsets, or the greatest for k < 0.

    Without k, the log-exp mean.
    """
    if k is None:
        return mean_of(distances, gamma)
    size = min(abs(k), len(distances))
    means = [sum(chosen) / size for chosen in itertools.combinations(distances, size)]
    return min(means) if k > 0 else max(means)


def loss_of(x: float, name: str, margin: float, width: float) -> float:
    t = x + margin
    if name == "logistic":
        return math.log(1 + math.exp(t))
    if name == "hinge" or t > width:
        return max(t, 0) - (width / 2 if name == "smooth_hinge" else 0)
    return t * t / (2 * width) if t > 0 else 0.0


def by_loops(learner: Any, L: Floats, x: Floats, y: NDArray[np.int64]) -> float:
    """Eqs 19 and 21, pair by pair."""
    total, pull, queries = 0.0, 0.0, 0
    for i in range(len(x)):
        similar = [j for j in range(len(x)) if j != i and y[j] == y[i]]
        if not similar:
            continue
        if isinstance(learner, LANML):
            farthest = (learner.gamma1 if learner.k1 is None else learner.k1) < 0
            count = learner.neighbors or (10 if farthest else "all")
            if count != "all":
                similar.sort(key=lambda j: squared(x, np.eye(x.shape[1]), i, j))
                similar = similar[: int(count)]
        near = [squared(x, L, i, j) for j in similar]
        far = [squared(x, L, i, j) for j in range(len(x)) if y[j] != y[i]]
        if isinstance(learner, LANML):
            gap = radius_of(near, learner.gamma1, learner.k1) - radius_of(
                far, learner.gamma2, learner.k2
            )
            total += loss_of(gap, learner.loss, learner.margin, learner.width)
        else:
            s = sum(math.exp(-learner.alpha * d) for d in near)
            if learner.form == "mean":
                s = len(near) * (s / len(near)) ** (1 / learner.alpha)
            else:
                s = s ** (1 / learner.alpha)
            total += 1 - s / (s + sum(math.exp(-d) for d in far))
        pull += sum(near) / len(near)
        queries += 1
    return (total + learner.regularization * pull) / queries


def differences(f: Any, L: Floats, step: float = 1e-5) -> Floats:
    actual = np.zeros_like(L)
    for place in np.ndindex(*L.shape):
        by = np.zeros_like(L)
        by[place] = step
        actual[place] = (f(L + by) - f(L - by)) / (2 * step)
    return actual


@each
@pytest.mark.parametrize("block", [1, 40, 1 << 20])
def test_against_loops_and_differences(learner, block, data, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    x, y, L = data
    value, gradient = learner.objective(L, x, y)
    assert value == pytest.approx(by_loops(learner, L, x, y), rel=1e-11)
    expected = differences(lambda at: learner.objective(at, x, y)[0], L)
    np.testing.assert_allclose(
        gradient, expected, rtol=2e-6, atol=2e-8 * max(1, np.abs(expected).max())
    )
    assert np.abs(expected).max() > 1e-3


@pytest.mark.parametrize("learner", [LANML(), LANML(2.0, 30.0), LANML(k1=2, k2=4)], ids=str)
def test_classes_of_one_size_together_give_the_same_as_one_by_one(learner, monkeypatch):
    random = np.random.default_rng(4)
    y = np.concatenate([np.repeat(np.arange(40), random.integers(1, 6, 40)), np.full(90, 40)])
    x, L = random.normal(size=(len(y), 6)) + 3 * random.normal(size=(41, 6))[y], np.eye(6) * 0.8
    value, gradient = learner.objective(L, x, y)
    monkeypatch.setattr(module, "BLOCK", 1)  # each block is a single query
    expected, slope = learner.objective(L, x, y)
    assert value == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-11)


def test_leaving_out_negligible_exponentials_changes_nothing(monkeypatch):
    random = np.random.default_rng(1)
    x, y = random.normal(size=(120, 3)), random.integers(0, 3, 120)
    learner = LANML(-1.0, 400.0, 0.1, margin=20.0)
    value, gradient = learner.objective(np.eye(3), x, y)
    calls: list[Any] = []
    real = module.exponentials
    monkeypatch.setattr(module, "exponentials", lambda t: calls.append(real(t)) or calls[-1])
    learner.objective(np.eye(3), x, y)
    assert not any(isinstance(e, np.ndarray) for e, _ in calls)
    monkeypatch.setattr(module, "exponentials", real)
    monkeypatch.setattr(module, "NEGLIGIBLE", -np.inf)
    dense_value, dense_gradient = learner.objective(np.eye(3), x, y)
    assert value == pytest.approx(dense_value, rel=1e-14)
    np.testing.assert_allclose(gradient, dense_gradient, rtol=1e-12, atol=1e-13)


def test_alpha_1_is_scikit_learns_nca(data):
    x, y, L = data
    same = (y[:, None] == y).astype(float)
    nca = NeighborhoodComponentsAnalysis()
    nca.n_iter_ = 0
    theirs, slope = nca._loss_grad_lbfgs(L.T.ravel().copy(), x, same, -1.0)
    queries = int((np.bincount(y)[y] > 1).sum())
    for form in ("mean", "sum"):
        value, gradient = PNCA(1.0, form).objective(L, x, y)  # type: ignore[arg-type]
        assert queries * (1 - value) == pytest.approx(-theirs, rel=1e-10)
        np.testing.assert_allclose(
            queries * gradient, slope.reshape(L.T.shape).T, rtol=1e-8, atol=1e-10
        )


def mean_gap(x: Floats, y: Any, L: Floats, gamma1: float, gamma2: float) -> float:
    """The mean of the gaps xᵢ, with ℓ(x) = x."""
    codes = np.asarray(y, dtype=np.intp)
    objective = Objective(gamma1=gamma1, gamma2=gamma2, outer=Outer("identity"))
    return Neighborhoods(x, codes, objective)(L)[0]


def test_limits_of_gamma(data):
    x, y, L = data
    near = [
        [squared(x, L, i, j) for j in range(len(x)) if j != i and y[j] == y[i]]
        for i in range(len(x))
    ]
    far = [[squared(x, L, i, j) for j in range(len(x)) if y[j] != y[i]] for i in range(len(x))]
    pairs = [(s, d) for s, d in zip(near, far, strict=True) if s]
    mean = sum(sum(s) / len(s) - sum(d) / len(d) for s, d in pairs) / len(pairs)
    hardest = sum(max(s) - min(d) for s, d in pairs) / len(pairs)
    for gamma in (0.0, 1e-12, -1e-12, 1e-7):
        assert mean_gap(x, y, L, gamma, 1e-7) == pytest.approx(mean, abs=1e-5)
    # Proposition 3, corrected: the limit is the hardest triplet of each query
    assert mean_gap(x, y, L, -1e6, 1e6) == pytest.approx(hardest, abs=1e-5)
    nearest = sum(min(s) - min(d) for s, d in pairs) / len(pairs)
    assert mean_gap(x, y, L, 1e6, 1e6) == pytest.approx(nearest, abs=1e-5)


def half(M: Floats) -> Floats:
    values, vectors = np.linalg.eigh(M)
    root: Floats = vectors * np.sqrt(np.maximum(values, 0))
    return root


def excesses(learner: LANML, x: Floats, y: Any) -> list[float]:
    """f at the midpoint minus the mean of f at the ends, on random segments of matrices M."""
    random = np.random.default_rng(3)
    actual = []
    for _ in range(25):
        a, b = (
            random.normal(size=(4, random.integers(1, 5))) * random.uniform(0.2, 1.5) for _ in "ab"
        )
        ends = [learner.objective(half(m @ m.T), x, y)[0] for m in (a, b)]
        actual.append(learner.objective(half((a @ a.T + b @ b.T) / 2), x, y)[0] - sum(ends) / 2)
    return actual


@pytest.mark.parametrize("loss", ["hinge", "smooth_hinge", "logistic"])
def test_convex_for_gamma1_below_0_and_only_then(loss, data):
    x, y, _ = data
    for gamma1 in (-3.0, -0.2, 0.0):
        actual = excesses(LANML(gamma1, 2.0, 0.1, loss=loss, neighbors="all"), x, y)
        assert max(actual) < 1e-9 and min(actual) < -1e-3
    assert max(excesses(LANML(3.0, 2.0, 0.1, loss=loss), x, y)) > 1e-3
