"""The log-exp mean: its values, limits and gradient, and the correspondence of Theorem 3."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from retrieval_anml import gamma_for_mean_of_k_smallest, log_exp_mean

NUMBERS = [3.0, -1.5, 0.25, 7.0, 0.25]


def by_loop(a: list[float], gamma: float) -> float:
    return -math.log(sum(math.exp(-gamma * v) for v in a) / len(a)) / gamma


def by_series(a: list[float], gamma: float) -> float:
    """The first terms of the mean's expansion in γ, in exact arithmetic, for a tiny γ."""
    exact = [Fraction(v) for v in a]
    mean = sum(exact) / len(exact)
    second = sum((v - mean) ** 2 for v in exact) / len(exact)
    third = sum((v - mean) ** 3 for v in exact) / len(exact)
    g = Fraction(gamma)
    return float(mean - g * second / 2 + g * g * third / 6)


def both(a: Any, gamma: float) -> tuple[float, float]:
    array = log_exp_mean(np.array(a), gamma)
    tensor = log_exp_mean(torch.tensor(a, dtype=torch.float64), gamma)
    assert isinstance(array, np.generic | np.ndarray) and isinstance(tensor, torch.Tensor)
    return float(array), float(tensor)


def test_against_a_loop():
    for gamma in (-20.0, -1.0, -0.1, 0.3, 2.0, 40.0):
        assert both(NUMBERS, gamma) == pytest.approx([by_loop(NUMBERS, gamma)] * 2, rel=1e-13)


def test_keeps_its_digits_near_0():
    for gamma in (1e-4, -1e-5, 1e-8, -1e-12, 1e-100, 1e-300):
        assert both(NUMBERS, gamma) == pytest.approx([by_series(NUMBERS, gamma)] * 2, rel=1e-11)


def test_limits():
    assert both(NUMBERS, 0) == pytest.approx([1.8, 1.8], rel=1e-15)
    for gamma, limit in ((math.inf, -1.5), (-math.inf, 7.0)):
        assert both(NUMBERS, gamma) == (limit, limit)
        assert both(NUMBERS, math.copysign(1e9, gamma)) == pytest.approx([limit, limit], abs=1e-7)
    assert both(NUMBERS, 5e-324) == pytest.approx([1.8, 1.8])


def test_large_numbers_do_not_overflow():
    for gamma in (-3.0, 3.0):
        shifted = both([v + 1e4 for v in NUMBERS], gamma)
        assert shifted == pytest.approx([by_loop(NUMBERS, gamma) + 1e4] * 2, rel=1e-13)
        assert both([1e300, 1e300], gamma) == (1e300, 1e300)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=8),
    st.lists(st.floats(-9, 9), min_size=2, max_size=2),
)
def test_decreases_within_its_bounds(a, gammas):
    low, high = sorted(gammas)
    left, right = both(a, low), both(a, high)
    for x, y in zip(left, right, strict=True):
        assert max(a) + 1e-12 >= x >= y - 1e-12 >= min(a) - 2e-12


@pytest.mark.parametrize("gamma", [-4.0, -1e-3, 0.0, 1e-6, 0.5, 50.0, math.inf])
def test_gradient_in_torch(gamma):
    a = torch.tensor([NUMBERS, [1.0, 2.0, 3.0, 4.0, 6.0]], dtype=torch.float64, requires_grad=True)
    log_exp_mean(a, gamma, axis=1).sum().backward()
    assert a.grad is not None and a.grad.isfinite().all()
    torch.testing.assert_close(a.grad.sum(1), torch.ones(2, dtype=torch.float64), rtol=1e-9, atol=0)
    if math.isfinite(gamma):
        assert torch.autograd.gradcheck(lambda v: log_exp_mean(v, gamma, axis=0), (a,))


def test_axes_types_and_a_single_number():
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert log_exp_mean(a, 1.0, axis=0).shape == (4,) and log_exp_mean(a, 1.0).dtype == np.float32
    assert log_exp_mean(torch.from_numpy(a), -1.0, axis=0).shape == (4,)
    assert log_exp_mean([1, 2], 0) == 1.5 and float(log_exp_mean(torch.tensor([1, 2]), 0)) == 1.5
    assert both([4.0], 3.0) == both([4.0], -math.inf) == (4.0, 4.0)


def test_refuses():
    with pytest.raises(ValueError, match="NaN"):
        log_exp_mean([1.0], math.nan)
    for nothing in (np.zeros((2, 0)), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match="no number"):
            log_exp_mean(nothing, 1.0)


def test_theorem_3():
    a = np.random.default_rng(0).normal(size=10)
    ordered = sorted(a.tolist())
    actual = [gamma_for_mean_of_k_smallest(a, k) for k in range(1, 11)]
    assert actual[0] == math.inf and actual[-1] == 0.0
    assert actual == sorted(actual, reverse=True)
    for k in range(2, 10):
        assert by_loop(ordered, actual[k - 1]) == pytest.approx(sum(ordered[:k]) / k, abs=1e-10)
        around = [by_loop(ordered, actual[k - 1] * by) for by in (0.5, 0.9, 1.1, 2)]
        assert around == sorted(around, reverse=True)  # so no other γ has this mean
        assert around[1] > sum(ordered[:k]) / k > around[2]
        # the mean of the k largest: numbers and γ are negated
        gamma = -gamma_for_mean_of_k_smallest(-a, k)
        assert by_loop(ordered, gamma) == pytest.approx(sum(ordered[-k:]) / k, abs=1e-10)


@pytest.mark.parametrize(
    ("numbers", "k", "sentence"),
    [
        ([1, 2, 3], 0, "must be from 1 to"),
        ([1, 2, 3], 4, "must be from 1 to"),
        ([1, 1, 2], 2, "ties"),
        ([2, 2, 2], 2, "ties"),
        ([1, math.nan, 2], 2, "finite"),
    ],
)
def test_theorem_3_refuses(numbers, k, sentence):
    with pytest.raises(ValueError, match=sentence):
        gamma_for_mean_of_k_smallest(numbers, k)


def test_neither_the_mean_nor_a_fit_imports_torch():
    code = (
        "import sys, numpy as np; from retrieval_anml import LANML, PNCA, log_exp_mean;"
        " log_exp_mean([1.0, 2.0], 3.0);x = np.random.default_rng(0).normal(size=(30, 3)); y ="
        " np.arange(30) % 3;LANML(max_iter=3).fit(x, y).transform(x); PNCA(max_iter=3).fit(x, y);"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
