"""The loss of two views whose gradient is written down: upstream's numbers, plain loops, finite
differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses, reducers
from retrieval.plugin import pair_views
from torch import Tensor

from retrieval_pml.view_losses import VICRegLoss

OPTIONS: dict[str, Any] = {
    "invariance_lambda": 3.0,
    "variance_mu": 20.0,
    "covariance_v": 7.0,
    "eps": 1e-2,
}
LABELS = torch.tensor([4, 1, 0, 4, 2, 1, 2, 0, 9, 1, 3, 9, 1])  # 3 has one view
REDUCERS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "sum": reducers.SumReducer,
    "above zero": reducers.AvgNonZeroReducer,
    "by name": lambda: reducers.MultipleReducers({"variance_loss2": reducers.SumReducer()}),
}


def codes() -> Tensor:
    """Return codes of which some dimensions spread more than 1, and cost nothing."""
    built = torch.randn(13, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return built * torch.tensor([0.3, 0.6, 0.9, 1.5, 3.0]) + 2


def places() -> tuple[Tensor, Tensor]:
    first, second = pair_views(LABELS)
    assert len(first) == 6 and bool((LABELS[first] == LABELS[second]).all())
    return first, second


@pytest.mark.parametrize("reduced_by", REDUCERS)
@pytest.mark.parametrize("by_label", [True, False])
def test_upstreams_numbers(by_label: bool, reduced_by: str) -> None:
    ours, theirs = (
        cls(**OPTIONS, reducer=REDUCERS[reduced_by]()) for cls in (VICRegLoss, losses.VICRegLoss)
    )
    x, (first, second) = codes().requires_grad_(), places()
    expected = theirs(x[first], ref_emb=x[second])
    actual = ours(x, LABELS) if by_label else ours(x[first], ref_emb=x[second])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(3 * value, x)[0] for value in (actual, expected)]
    assert not gradients[0][10].any()  # the view left over
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_a_gradient_of_a_gradient() -> None:
    x, (first, second) = codes().requires_grad_(), places()
    actual = []
    for value in (
        VICRegLoss(**OPTIONS)(x, LABELS),
        losses.VICRegLoss(**OPTIONS)(x[first], ref_emb=x[second]),
    ):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        actual.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(*actual, rtol=1e-9, atol=1e-12)


def test_finite_differences() -> None:
    assert torch.autograd.gradcheck(
        lambda x: VICRegLoss(**OPTIONS)(x, LABELS), codes().requires_grad_()
    )


def test_plain_loops() -> None:
    x, (first, second) = codes(), places()
    total, things, width = 0.0, len(first), 5
    views = [[x[i].tolist() for i in value] for value in (first, second)]
    total += 3.0 * sum(
        (p - q) ** 2 / width / things
        for a, b in zip(*views, strict=True)
        for p, q in zip(a, b, strict=True)
    )
    for view in views:
        mean = [sum(row[k] for row in view) / things for k in range(width)]
        for k in range(width):
            for m in range(width):
                both = sum((row[k] - mean[k]) * (row[m] - mean[m]) for row in view) / (things - 1)
                if k == m:
                    total += 20.0 * max(0.0, 1 - math.sqrt(both + 1e-2)) / 2 / width
                else:
                    total += 7.0 * both**2 / width
    assert VICRegLoss(**OPTIONS)(x, LABELS).item() == pytest.approx(total, rel=1e-12)


def test_views_that_are_alike_are_not_apart() -> None:
    x = codes()[:4]
    value = VICRegLoss(variance_mu=0.0, covariance_v=0.0)(x, ref_emb=x.clone())
    assert value.item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_that_of_the_codes_alone(dtype: torch.dtype) -> None:
    x = codes().to(dtype)
    torch.testing.assert_close(
        VICRegLoss(**OPTIONS)(x, LABELS).float(),
        VICRegLoss(**OPTIONS)(x.float(), LABELS),
        rtol=1e-2,
        atol=0,
    )


def test_fewer_than_two_pairs_cost_nothing() -> None:
    x = codes()[:3].requires_grad_()
    value = VICRegLoss()(x, torch.tensor([1, 1, 2]))
    value.backward()
    assert value.item() == 0 and x.grad is not None and not x.grad.any()
