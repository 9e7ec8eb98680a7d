"""Metrics of verification against plain loops, with and without ties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from retrieval.errors import DataError
from retrieval.evaluation.verification import FAR_LEVELS, verification
from retrieval.evaluation.verify_run import draw_roc


def random_pairs(
    seed: int, count: int = 240, tied: bool = False
) -> tuple[list[float], list[bool], list[int]]:
    generator = np.random.default_rng(seed)
    same = generator.random(count) < 0.45
    distances = generator.normal(np.where(same, 1.0, 1.8), 0.6)
    if tied:
        distances = np.round(distances * 3) / 3
    return distances.tolist(), same.tolist(), generator.integers(0, 6, count).tolist()


def auc_by_loops(distances: list[float], same: list[bool]) -> float:
    """The probability that a same pair is nearer than a different one."""
    won = total = 0.0
    for d, s in zip(distances, same, strict=True):
        for e, t in zip(distances, same, strict=True):
            if s and not t:
                total += 1
                won += 1.0 if d < e else 0.5 if d == e else 0.0
    return won / total


def rates(distances: list[float], same: list[bool], threshold: float) -> tuple[float, float]:
    """FAR and TAR at a threshold, by counting."""
    far = [d <= threshold for d, s in zip(distances, same, strict=True) if not s]
    tar = [d <= threshold for d, s in zip(distances, same, strict=True) if s]
    return sum(far) / len(far), sum(tar) / len(tar)


def curve(distances: list[float], same: list[bool]) -> list[tuple[float, float]]:
    return [(0.0, 0.0), *(rates(distances, same, t) for t in sorted(set(distances)))]


def eer_by_loops(distances: list[float], same: list[bool]) -> float:
    """Where the line from one point to the next meets FAR = 1 − TAR, by bisection."""
    for (f0, t0), (f1, t1) in itertools.pairwise(curve(distances, same)):
        if f0 + t0 <= 1 <= f1 + t1:
            low, high = 0.0, 1.0
            for _ in range(80):
                x = (low + high) / 2
                above = f0 + x * (f1 - f0) + t0 + x * (t1 - t0) >= 1
                low, high = (low, x) if above else (x, high)
            return f0 + low * (f1 - f0)
    raise AssertionError


def accuracy_by_loops(
    distances: list[float], same: list[bool], folds: list[int]
) -> tuple[list[float], list[float]]:
    """Each fold's accuracy and threshold, by trying every cut of the other folds' distances."""
    accuracy, thresholds = [], []
    for fold in sorted(set(folds)):
        others = [(d, s) for d, s, f in zip(distances, same, folds, strict=True) if f != fold]
        mine = [(d, s) for d, s, f in zip(distances, same, folds, strict=True) if f == fold]
        values = sorted({d for d, _ in others})
        cuts = [math.nextafter(values[0], -math.inf)]
        cuts += [(a + b) / 2 for a, b in itertools.pairwise(values)] + [values[-1]]
        scores = [sum((d <= t) == s for d, s in others) for t in cuts]
        best = cuts[scores.index(max(scores))]
        thresholds.append(best)
        accuracy.append(sum((d <= best) == s for d, s in mine) / len(mine))
    return accuracy, thresholds


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_against_plain_loops(seed, tied):
    distances, same, folds = random_pairs(seed, tied=tied)
    found = verification(distances, same, folds, far=(0.25, 0.1, 1e-2))
    accuracy, thresholds = accuracy_by_loops(distances, same, folds)
    mean = sum(accuracy) / 6
    error = math.sqrt(sum((a - mean) ** 2 for a in accuracy) / 5) / math.sqrt(6)
    points = curve(distances, same)
    expected = {"auc": auc_by_loops(distances, same), "eer": eer_by_loops(distances, same)}
    expected |= {"accuracy": mean, "accuracy_se": error}
    for rate in (0.25, 0.1, 1e-2):
        expected[f"tar_at_far_{rate:g}"] = max(t for f, t in points if f <= rate)
    assert found.values == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(found.accuracy, accuracy, atol=1e-12)
    np.testing.assert_allclose(found.threshold, thresholds, rtol=1e-12)
    np.testing.assert_allclose(np.stack([found.roc.far, found.roc.tar], 1), points, atol=1e-12)
    assert found.roc.threshold.tolist() == [-math.inf, *sorted(set(distances))]


def test_true_accept_rates_only_where_pairs_suffice():
    same = np.arange(400) % 2 == 0
    distances = np.random.default_rng(0).normal(size=400) + np.where(same, 0, 1)
    names = set(verification(distances, same, np.arange(400) // 40).values)
    assert "tar_at_far_0.01" in names
    assert "tar_at_far_0.001" not in names
    assert FAR_LEVELS == (1e-2, 1e-3)
    few = verification(distances[:100], same[:100], np.arange(100) // 10).values
    assert not any(name.startswith("tar") for name in few)


def test_equal_curves_are_drawn_as_equal_bytes():
    roc = verification(*random_pairs(3)).roc
    picture = draw_roc({"ours": (roc, 0.8), "theirs": (roc, 0.8)})
    assert picture.startswith(b"<?xml") and b"ours (AUC 0.8000)" in picture
    assert picture == draw_roc({"ours": (roc, 0.8), "theirs": (roc, 0.8)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"same": [1, 1, 1, 1]}, "All 4 pairs are the same: both kinds are needed"),
        ({"same": [0, 0, 0, 0]}, "All 4 pairs are different"),
        ({"distances": [1, 2, math.nan, math.inf]}, "2 of 4 distances are NaN or infinite"),
        ({"distances": [1, 2]}, "each pair needs one distance"),
        ({"folds": [1, 1, 1, 1]}, "all pairs are in one fold"),
        (
            {"folds": [0, 1, 1, 1], "same": [1, 0, 0, 0]},
            "outside the fold '0' all pairs are different",
        ),
        ({"distances": [], "same": [], "folds": []}, "pairs are missing"),
    ],
)
def test_pairs_that_cannot_be_verified_are_refused(change, says):
    pairs = {"distances": [1, 2, 3, 4], "same": [1, 0, 1, 0], "folds": [0, 0, 1, 1]}
    with pytest.raises(DataError, match=says):
        verification(**pairs | change)
