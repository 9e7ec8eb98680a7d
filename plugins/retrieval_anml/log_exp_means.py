"""The log-exp mean, which varies smoothly from the minimum through the mean to the maximum."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from retrieval.base.arrays import Array, Floats

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", Floats, "Tensor")


def log_exp_mean(a: Any, gamma: float, axis: int = -1) -> Any:
    """Return b(γ) = −(1/γ) log(mean(e^{−γ a})), the log-exp mean (Song et al., Eq 12).

    The mean decreases in γ (the paper's Lemma 2 says the opposite): from the maximum at γ = −∞
    through the mean at γ = 0 to the minimum at γ = ∞. The computation does not overflow, and is
    precise for every γ, even near 0.

    Args:
        a: numbers, at least one along `axis`, as a torch tensor or an array-like.
        gamma: γ, of either sign, including 0 and ±∞.
        axis: axis over which to average.

    Returns:
        A differentiable tensor if `a` is a tensor, otherwise a NumPy array.

    Raises:
        ValueError: γ is NaN, or the axis is empty.
    """
    gamma = float(gamma)
    if np.isnan(gamma):
        raise ValueError("gamma is NaN; the log-exp mean needs a number or ±infinity.")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(a, torch.Tensor):
        if not a.is_floating_point():
            a = a.to(torch.get_default_dtype())
        _refuse_empty(a.shape[axis])
        return _tensor_mean(a, gamma, axis)
    a = np.asarray(a)
    if a.dtype.kind != "f":
        a = a.astype(np.float64)
    _refuse_empty(a.shape[axis])
    return _array_mean(a, gamma, axis)


def _refuse_empty(length: int) -> None:
    if not length:
        raise ValueError("There are no numbers to average: the log-exp mean needs at least one.")


def _array_mean(a: Array, gamma: float, axis: int) -> Array:
    if np.isinf(gamma):
        extreme: Array = a.min(axis) if gamma > 0 else a.max(axis)
        return extreme
    mean = a.mean(axis, keepdims=True)
    if gamma == 0:
        zero_limit: Array = mean.squeeze(axis)
        return zero_limit
    t = -gamma * (a - mean)
    top = t.max(axis, keepdims=True)
    # For a small γ, log(mean(e^t)) is about var(t)/2. Then log1p and expm1 keep digits that log and
    # exp would lose.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        small = np.log1p(np.expm1(t).mean(axis, keepdims=True)) / gamma
        large = (top + np.log(np.exp(t - top).mean(axis, keepdims=True))) / gamma
        means = mean - np.where(top < 1, small, large)
    # γ so small that 1/γ overflows.
    means = np.where(np.isfinite(means), means, mean)
    squeezed: Array = means.squeeze(axis)
    return squeezed


def _tensor_mean(a: Tensor, gamma: float, axis: int) -> Tensor:
    import torch

    if np.isinf(gamma):
        if gamma > 0:
            return a.amin(axis)
        return a.amax(axis)
    mean = a.mean(axis, keepdim=True)
    if abs(gamma) < torch.finfo(a.dtype).tiny:
        return mean.squeeze(axis)
    t = -gamma * (a - mean)
    top = t.detach().amax(axis, keepdim=True)
    small = top < 1
    # Both branches are computed, so both need valid inputs: even a masked NaN would spoil the
    # gradient.
    if_small = torch.log1p(
        torch.expm1(torch.where(small, t, torch.zeros_like(t))).mean(axis, keepdim=True)
    )
    if_large = top + torch.log(torch.exp(t - top).mean(axis, keepdim=True))
    return (mean - torch.where(small, if_small, if_large) / gamma).squeeze(axis)


def gamma_for_mean_of_k_smallest(a: ArrayLike, k: int, *, tol: float = 1e-12) -> float:
    """Return the γ at which the log-exp mean is the mean of the `k` smallest numbers.

    Song et al., Theorem 3, which relates γ to a number of neighbours. For the `k` largest numbers,
    negate the numbers and the result.

    Args:
        a: n numbers, not all equal.
        k: number of smallest numbers. The theorem holds for 1 < k < n; k = 1 returns ∞, and k = n
            returns 0.
        tol: relative tolerance of γ.

    Raises:
        ValueError: k is not between 1 and n, a number is not finite, or ties make the mean of the k
            smallest equal to the minimum or to the mean of all, so that no γ above 0 gives it.
    """
    values = np.sort(np.asarray(a, dtype=np.float64).ravel())
    n = len(values)
    if not np.isfinite(values).all():
        raise ValueError("The numbers must be finite.")
    if not 1 <= k <= n:
        raise ValueError(f"k is {k} and must be from 1 to the number of numbers, {n}.")
    if k == n:
        return 0.0
    if k == 1:
        return float("inf")
    target = values[:k].mean()
    spread = values[-1] - values[0]
    if not values[0] < target < values.mean():
        raise ValueError(
            f"The numbers have ties: the mean of the {k} smallest equals the"
            f" {'smallest' if target <= values[0] else 'mean of all'}, which no finite γ above 0"
            " gives."
        )
    low = 0.0
    high = 1.0 / spread
    # The mean decreases in γ.
    while _array_mean(values, high, 0) > target:
        low = high
        high = 2 * high
    while high - low > tol * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _array_mean(values, middle, 0) > target else (low, middle)
    return float(low + high) / 2
