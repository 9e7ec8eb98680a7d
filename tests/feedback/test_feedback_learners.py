"""The learners of feedback: their formula, what they learn of digits, and that they are exact."""

from __future__ import annotations

import time

import numpy as np
import pytest
from retrieval.errors import DataError
from retrieval.host.plugins import create
from scipy.linalg import expm, sqrtm
from sklearn.datasets import load_digits

from retrieval_feedback.learners import Diagonal, LowRank

LEARNERS = [Diagonal, LowRank]


def drawn(number: int, seed: int = 0) -> np.ndarray:
    """Return triplets (T, 3, 64) of digits: two of one half of the classes, one of the other."""
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    rows = rng.integers(len(x), size=(number * 20, 3))
    alike = (y[rows[:, 0]] < 5) == (y[rows[:, 1]] < 5)
    differ = (y[rows[:, 0]] < 5) != (y[rows[:, 2]] < 5)
    return x[rows[alike & differ][:number]] / 16


def right(triplets: np.ndarray) -> float:
    distances = np.linalg.norm(triplets[:, :1] - triplets[:, 1:], axis=2)
    return float((distances[:, 0] < distances[:, 1]).mean())


def test_the_metric_is_the_formula():
    triplets = drawn(300)[:, :, 20:28]
    learner = LowRank(strength=3.0, prior=200.0, rank=8).partial_fit(triplets)
    positive, negative = (
        sum(np.outer(t[0] - t[side], t[0] - t[side]) for t in triplets) for side in (1, 2)
    )
    scale = np.trace(positive + negative) / 2 / 8
    whitening = np.linalg.inv(sqrtm((positive + negative) / 2 / scale + np.eye(8)))
    change = 3 * 300 / 500 * whitening @ (negative - positive) / scale @ whitening
    np.testing.assert_allclose(learner.get_mahalanobis_matrix(), expm(change), rtol=1e-8)
    diagonal = Diagonal(strength=3.0, prior=200.0).partial_fit(triplets)
    sums = np.diag(positive + negative) / 2 / scale + 1
    expected = np.exp(1.8 * np.diag(negative - positive) / scale / sums)
    np.testing.assert_allclose(np.diag(diagonal.get_mahalanobis_matrix()), expected, rtol=1e-10)


@pytest.mark.parametrize("kind", LEARNERS)
def test_more_of_other_triplets_is_right(kind):
    test = drawn(3000, seed=1)
    learner = kind().partial_fit(drawn(3000))
    learned = learner.transform(test.reshape(-1, 64)).reshape(test.shape)
    assert right(learned) > right(test) + 0.01


@pytest.mark.parametrize("kind", LEARNERS)
def test_parts_and_all_at_once_learn_the_same_and_again_the_same_bits(kind):
    triplets = drawn(500)
    whole = kind().partial_fit(triplets)
    parts = kind().partial_fit(triplets[:200]).partial_fit(triplets[200:])
    np.testing.assert_allclose(parts.components_, whole.components_, atol=1e-10)
    assert kind().partial_fit(triplets).components_.tobytes() == whole.components_.tobytes()


@pytest.mark.parametrize("kind", LEARNERS)
def test_without_feedback_the_metric_is_euclidean(kind):
    learner = kind().partial_fit(np.zeros((0, 3, 4)))
    np.testing.assert_array_equal(learner.components_, np.eye(4))
    few = kind().partial_fit(drawn(1))
    assert np.abs(few.components_ - np.eye(64)).max() < 0.05


@pytest.mark.parametrize("kind", LEARNERS)
def test_labels_teach_as_all_their_triplets(kind):
    x, y = load_digits(return_X_y=True)
    # As many items of each class, so that triplets and pairs weigh the items alike.
    chosen = np.concatenate([np.flatnonzero(y == name)[:4] for name in range(8)])
    x, y = x[chosen], y[chosen]
    rows = [
        (a, p, n)
        for a in range(32)
        for p in range(32)
        for n in range(32)
        if y[a] == y[p] and y[a] != y[n]
    ]
    by_labels = kind(prior=1e-9).fit(x, y)
    by_triplets = kind(prior=1e-9).partial_fit(x[np.array(rows)])
    np.testing.assert_allclose(by_labels.components_, by_triplets.components_, atol=1e-8)


@pytest.mark.parametrize("kind", LEARNERS)
def test_wrong_triplets_are_refused_and_leave_the_learner(kind):
    learner = kind().partial_fit(drawn(100))
    before = learner.components_.tobytes()
    for wrong in (drawn(5)[0], drawn(5)[:, :2], drawn(5) * np.nan, drawn(5)[:, :, :3]):
        with pytest.raises(DataError, match="features"):
            learner.partial_fit(wrong)
    assert learner.components_.tobytes() == before


def test_learning_from_100_000_triplets_takes_seconds():
    triplets = np.random.default_rng(0).normal(size=(100_000, 3, 128)).astype(np.float32)
    start = time.process_time()
    create("learner", "feedback.low_rank").partial_fit(triplets)
    assert time.process_time() - start < 30
