"""Batch norm over the whole batch, where several processes have a share of it each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from retrieval.model.model import Model
from retrieval.recipe.read import Recipe

NOT_SYNCHRONISED = (
    "batch norm takes its mean and variance from each process's own share of the batch, so this run"
    " of {processes} processes is not what one process would train. [train] sync_batch_norm = true"
    " takes them from the whole batch."
)
"""Said of a run of several processes that trains batch norm by shares."""


def trains_batch_norm(model: Model, recipe: Recipe) -> bool:
    """Return whether a phase of the recipe trains a part that has batch norm."""
    parts = {part for phase in recipe.phases for part in phase.train}
    trained: Iterable[nn.Module | None] = (
        model.backbone if "backbone" in parts and not recipe.backbone.frozen else None,
        model.head if "head" in parts else None,
    )
    return any(
        isinstance(m, _BatchNorm) for part in trained if part is not None for m in part.modules()
    )


def whole_batch(synchronised: bool) -> AbstractContextManager[Any]:
    """Return a context in which batch norm takes the statistics of all processes' shares, where
    that is asked for.
    """
    return WholeBatch() if synchronised and distributed.is_initialized() else nullcontext()


class WholeBatch(TorchFunctionMode):
    """Inside, `torch.nn.functional.batch_norm` in training takes mean and variance from all
    processes' shares together.

    No module is exchanged, so the model that is saved and exported is the plain one. Any layer that
    calls that function is reached, timm's too. Every process must call the same layers in the same
    order, on the device of its process group.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, or batch norm over the whole batch in its place."""
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            return _batch_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Do what `torch.nn.functional.batch_norm` does, in training over all processes' rows."""
    if not training:
        return functional.batch_norm(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )
    output, mean, variance, count = _Normalised.apply(input, weight, bias, eps)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    normalised: Tensor = output
    return normalised


class _Normalised(torch.autograd.Function):
    """(x − mean) / √(variance + eps) · weight + bias; mean and variance of all processes' rows.

    The gradient of x is that of the sum of all processes' objectives; those of weight and bias are
    this process's part.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the normalised x (B, C, …), and mean (C,), biased variance (C,) and count () of
        each channel.

        The shares' means and squared deviations are added up as Chan, Golub & LeVeque (1983) do, so
        nothing cancels.
        """
        full = _full(x)
        rows = [0, *range(2, x.ndim)]
        count = full.new_tensor([x.numel() / max(1, x.shape[1])])
        variance, mean = torch.var_mean(full, rows, correction=0)
        own = torch.cat([count, mean, variance * count])
        every = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(every, own)
        counts, means, squares = torch.stack(every).tensor_split([1, 1 + len(mean)], dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale, total)
        shape = _wide(x)
        y = (full - mean.view(shape)) * scale.view(shape)
        if weight is not None:
            y = y * _full(weight).view(shape)
        if bias is not None:
            y = y + _full(bias).view(shape)
        ctx.mark_non_differentiable(mean, variance, total)
        return y.to(x.dtype), mean, variance, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight, mean, scale, total = ctx.saved_tensors
        shape, rows = _wide(x), [0, *range(2, x.ndim)]
        gradient = _full(gradient)
        normal = (_full(x) - mean.view(shape)) * scale.view(shape)
        sums = torch.cat([gradient.sum(rows), (gradient * normal).sum(rows)])
        own_bias, own_weight = sums.chunk(2)
        of_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            every = sums.clone()
            distributed.all_reduce(every)
            shift, stretch = (each.view(shape) / total for each in every.chunk(2))
            slope = scale if weight is None else scale * _full(weight)
            of_x = ((gradient - shift - normal * stretch) * slope.view(shape)).to(x.dtype)
        of_weight = own_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = own_bias if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _wide(x: Tensor) -> list[int]:
    return [1, x.shape[1], *([1] * (x.ndim - 2))]
