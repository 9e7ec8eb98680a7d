"""ABTL, the hedge update and a whole step against plain loops in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import oahu_loops as loops
import pytest

from retrieval_oahu.network import (
    Network,
    bounds_loss,
    dissimilar_threshold,
    hedge_update,
    similar_threshold,
    triplet_gradient,
)
from retrieval_oahu.online import ROWS, OnlineLearner

TAUS = (0.01, 0.1, 0.5, 2 / 3, 1.0, 1.9)


@pytest.mark.parametrize("tau", TAUS)
def test_thresholds_are_monotone_and_on_the_right_side(tau):
    d = np.linspace(0, 2, 401)
    near, far = similar_threshold(d, tau), dissimilar_threshold(d, tau)
    assert (np.diff(near) > 0).all() and (np.diff(far) > 0).all()  # the paper has d_dis decreasing
    assert near[0] == 0 and near[-1] == pytest.approx(tau)
    assert far[0] == pytest.approx(2 - tau) and far[-1] == pytest.approx(2)
    assert (near <= d + 1e-12).all() and (far >= d - 1e-12).all()


@pytest.mark.parametrize("tau", TAUS)
def test_loss_and_slopes_by_loops(tau):
    rng = np.random.default_rng(0)
    positive, negative = rng.uniform(0, 2, 50), rng.uniform(0, 2, 50)
    loss, slope_p, slope_n = bounds_loss(positive, negative, tau)
    for i in range(50):
        p, n = float(positive[i]), float(negative[i])
        near, far = loops.thresholds(p, n, tau)
        assert loss[i] == pytest.approx(loops.local_loss(p, n, near, far), abs=1e-14)
        step = 1e-6  # the thresholds are constants
        by_p = loops.local_loss(p + step, n, near, far) - loops.local_loss(p - step, n, near, far)
        by_n = loops.local_loss(p, n + step, near, far) - loops.local_loss(p, n - step, near, far)
        assert slope_p[i] == pytest.approx(by_p / (2 * step), abs=1e-8)
        assert slope_n[i] == pytest.approx(by_n / (2 * step), abs=1e-8)
        assert 0 < loss[i] <= 1
    assert bounds_loss(np.zeros(1), np.full(1, 2.0), tau)[0][0] == pytest.approx(0, abs=1e-12)
    assert bounds_loss(np.full(1, 2.0), np.zeros(1), tau)[0][0] == pytest.approx(1)


@pytest.mark.parametrize("rule", ["exp", "linear", "paper"])
def test_hedge_by_loops(rule):
    rng, kinds = np.random.default_rng(1), set()
    for beta, s, low in itertools.product((0.99, 0.5, 0.1), (0.1, 0.9), (0.0, 0.3, 0.7)):
        alpha, loss = rng.dirichlet(np.ones(4)), rng.uniform(low, 1, 4)
        kinds.add(beta ** loss.min() * math.log(beta) > beta - 1)
        actual = hedge_update(alpha, loss, beta, s, rule)
        expected = loops.hedge(alpha.tolist(), loss.tolist(), beta, s, rule)
        assert np.allclose(actual, expected, atol=1e-15)
        assert actual.sum() == pytest.approx(1)
        least = (s / 4) / (1 + s * 3 / 4)
        assert actual.min() >= least - 1e-12
        # one weight of 1 and no loss reach the guaranteed minimum, which is below s / 4
        actual = hedge_update(np.eye(4)[0], np.zeros(4), beta, s, rule)
        assert actual[1:] == pytest.approx([least] * 3) and least < s / 4
    assert kinds == {True, False}  # both branches of Eq 20 were taken


def test_the_level_with_the_least_loss_wins():
    alpha = np.full(5, 0.2)
    for _ in range(3000):
        alpha = hedge_update(alpha, np.array([0.1, 0.9, 0.9, 0.9, 0.9]), 0.9, 0.1)
    assert alpha[0] > 0.9 and np.allclose(alpha[1:], alpha[1])


def parts(network: Network) -> tuple[list[Any], list[Any]]:
    hidden = network.hidden
    w = [level[:, :hidden].tolist() for level in network.levels[: network.depth]]
    return w, [level[:, hidden:].tolist() for level in network.levels]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_step_moves_every_weight_down_the_numerical_gradient(depth):
    rng = np.random.default_rng(3)
    network = Network.random(4, depth, 3, 2, 5, np.float64)
    triplet = rng.standard_normal((3, 4))
    alpha, tau, rate = rng.dirichlet(np.ones(depth + 1)), 0.4, 0.3
    w, theta = parts(network)
    rows = triplet.tolist()
    fixed = loops.fixed_thresholds(rows, w, theta, tau)
    before = [level.copy() for level in network.levels]
    actual = network.step(triplet, alpha, tau, rate)
    assert np.allclose(actual, loops.losses(rows, w, theta, tau), atol=1e-14)
    after_w, after_theta = parts(network)
    step = 1e-6
    for old, new in ((w, after_w), (theta, after_theta)):
        for matrix, moved in zip(old, new, strict=True):
            for row, column in np.ndindex(len(matrix), len(matrix[0])):
                kept, sides = matrix[row][column], []
                for sign in (1, -1):
                    matrix[row][column] = kept + sign * step
                    sides.append(loops.overall(rows, w, theta, tau, alpha.tolist(), fixed))
                matrix[row][column] = kept
                gradient = (sides[0] - sides[1]) / (2 * step)
                assert moved[row][column] == pytest.approx(kept - rate * gradient, abs=2e-8)
    assert any((a != b).any() for a, b in zip(before, network.levels, strict=True))
    assert not network.levels[-1][:, : network.hidden].any()  # the last level has no next layer


def test_zero_and_equal_embeddings_have_no_gradient_and_stay_finite():
    z = np.zeros((2, 3, 4))
    z[1] = 1.0  # three equal embeddings
    loss, gradient = triplet_gradient(z, np.array([0.5, 0.5]), 0.1)
    assert np.isfinite(loss).all() and not gradient.any()
    z[0, 0] = 1e-13
    assert not triplet_gradient(z, np.array([0.5, 0.5]), 0.1)[1].any()


def test_embeddings_by_loops_and_in_float32():
    network = Network.random(6, 3, 5, 4, 1, np.float64)
    x = np.random.default_rng(0).standard_normal((7, 6))
    actual = network.embed(x)
    w, theta = parts(network)
    for i in range(7):
        assert np.allclose(actual[:, i], loops.embed(x[i].tolist(), w, theta), atol=1e-14)
    lengths = np.linalg.norm(actual, axis=2)
    assert (np.isclose(lengths, 1) | (lengths == 0)).all() and np.isclose(lengths, 1).mean() > 0.9
    single = Network.random(6, 3, 5, 4, 1, np.float32).embed(x.astype(np.float32))
    assert single.dtype == np.float32 and np.abs(single - actual).max() < 1e-5


def test_the_record_of_weights_is_bounded_and_has_equal_steps():
    learner = OnlineLearner()
    for step in range(20_000):
        learner._record(np.array([float(step)]), step)
        assert len(learner.weights_) <= ROWS
    kept, place = learner.weights_, learner.weights_at_
    assert (np.diff(place) == learner.stride_).all() and place[0] == 0
    assert (kept[:, 0] == place).all() and len(kept) > ROWS // 2 - 1
