"""Train one model in several processes: batch norm, gradients and the loss.

Each process has a device and computes on its share of the batch's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import Parameter, functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from retrieval.model.contracts import TripletIndices
from retrieval.model.loss_division import Rows, is_mean, row_sums
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe

NOT_SYNCHRONISED = (
    "batch norm takes its mean and variance from each process's own share of the batch, so this run"
    " of {processes} processes differs from a run of one process. [train] sync_batch_norm = true"
    " takes them from the whole batch."
)
"""Warning about several processes that train batch norm without synchronisation."""


def trains_batch_norm(model: Model, recipe: Recipe) -> bool:
    """Return whether a phase of the recipe trains a backbone or head with batch norm."""
    parts = {part for phase in recipe.phases for part in phase.train}
    modules: list[nn.Module] = []
    if "backbone" in parts and not recipe.backbone.frozen:
        modules += model.backbone.modules()
    if "head" in parts:
        modules += model.head.modules()
    return any(isinstance(module, _BatchNorm) for module in modules)


class WholeBatch(TorchFunctionMode):
    """Mode in which batch norm in training uses the mean and variance of all processes' rows.

    The mode replaces the function `torch.nn.functional.batch_norm`, not modules. Layers of timm
    call this function too, and the saved model does not change. All processes must call the same
    layers in the same order, on the device of their process group.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch; compute batch norm over all processes' rows."""
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
    """As `torch.nn.functional.batch_norm`, but in training computed over all processes' rows.

    The gradient with respect to `input` is the gradient of the sum of all processes' objectives.
    """
    if not training:
        return functional.batch_norm(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )
    x = input
    if input.dtype in (torch.float16, torch.bfloat16):
        x = input.float()  # their sums would overflow or lose digits
    shape = [1, x.shape[1], *([1] * (x.ndim - 2))]
    rows = [0, *range(2, x.ndim)]
    count = _summed(x.new_tensor(x.numel() / max(1, x.shape[1])))
    mean = _Sum.apply(x.sum(rows)) / count
    centred = x - mean.view(shape)
    # of centred values: the mean of squares minus the square of the mean would cancel
    variance = _Sum.apply(centred.square().sum(rows)) / count
    y = centred * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        y = y * weight.to(x.dtype).view(shape)
    if bias is not None:
        y = y + bias.to(x.dtype).view(shape)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            # as torch does: normalised with the biased variance, remembered with the unbiased one
            unbiased = variance * (count / (count - 1).clamp(min=1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    normalised: Tensor = y.to(input.dtype)
    return normalised


class _Sum(torch.autograd.Function):
    """Sum of a tensor over all processes; its gradient is summed over all processes too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _summed(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _summed(gradient)


class _Gather(torch.autograd.Function):
    """Rows of all processes, in order of the processes; their gradient is summed over processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        start = distributed.get_rank() * len(x)
        ctx.rows = slice(start, start + len(x))  # of this process
        return torch.cat(_gathered(x))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _summed(gradient)[ctx.rows]


def _summed(x: Tensor) -> Tensor:
    """Return the sum of all processes' tensors, detached."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total)
    return total


def _gathered(x: Tensor) -> list[Tensor]:
    """Return the tensors of all processes, detached; all have the same shape."""
    x = x.detach().contiguous()
    rows = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, x)
    return rows


class Devices:
    """The processes that share each batch, as one of them sees them.

    After the backward pass, `reduce_gradients` replaces the gradients with their mean over the
    processes. A process must therefore compute the whole gradient, as all others do, or its own
    part of the gradient times the number of processes.

    Attributes:
        world: number of processes.
        rank: number of this process, from 0.
    """

    def __init__(self, accelerator: Any) -> None:
        self.world = int(accelerator.num_processes)
        self.rank = int(accelerator.process_index)

    def share(self, x: Tensor) -> Tensor:
        """Return all processes' rows in order; gradients flow only to this process's own rows.

        Use this if every process computes the objective of the whole batch. The gradient of this
        process's rows is multiplied by the number of processes; see `Devices`.
        """
        rows = _gathered(x)
        if x.is_floating_point():
            rows[self.rank] = self.part(x.detach(), x)
        return torch.cat(rows)

    def gather(self, x: Tensor) -> Tensor:
        """Return all processes' rows in order; gradients flow to the rows of every process.

        Use this if each process computes a part of the objective.
        """
        rows: Tensor = _Gather.apply(x)
        return rows

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all processes' `x`, detached."""
        return _summed(x)

    def part(self, value: Tensor, part: Tensor) -> Tensor:
        """Return `value` with the gradient of `part`, times the number of processes.

        `part` is this process's part of `value`; see `Devices`.
        """
        return value + self.world * (part - part.detach())

    def reduce_gradients(
        self, parameters: Sequence[Parameter], divided: Collection[int] = ()
    ) -> None:
        """Replace each parameter's gradient with its mean over all processes.

        A process without a gradient counts as zero if another process has one. `divided` holds the
        ids of parameters of which each process has different rows; their gradients are only divided
        by the number of processes.
        """
        gradients = [p.grad for p in parameters if id(p) in divided and p.grad is not None]
        shared = [p for p in parameters if id(p) not in divided]
        if shared:
            has_gradient = torch.tensor([p.grad is not None for p in shared], dtype=torch.int32)
            has_gradient = has_gradient.to(shared[0].device)
            # all processes must sum the same gradients, or they wait for one another for ever
            distributed.all_reduce(has_gradient, distributed.ReduceOp.MAX)
            works = []
            for parameter, is_present in zip(shared, has_gradient.tolist(), strict=True):
                if not is_present:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                # started together, so that the transfers overlap
                works.append(distributed.all_reduce(parameter.grad, async_op=True))
                gradients.append(parameter.grad)
            for work in works:
                work.wait()
        for gradient in gradients:
            gradient /= self.world

    def clip(self, parameters: Sequence[Parameter], divided: Collection[int], limit: float) -> None:
        """Scale the gradients so that their norm is at most `limit`.

        `divided` holds the ids of parameters of which each process has different rows. The norm
        includes the rows of all processes.
        """
        shared = parameters[0].new_zeros(())
        own_rows = parameters[0].new_zeros(())
        for parameter in parameters:
            if parameter.grad is not None:
                square = parameter.grad.square().sum()
                if id(parameter) in divided:
                    own_rows += square
                else:
                    shared += square
        norm = (shared + self.total(own_rows)).sqrt()
        scale = limit / (norm + 1e-6)  # as torch's `clip_grad_norm_`
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= scale.clamp(max=1)


PLAIN = 2**20
"""Largest number of entries of a matrix (a process's rows × the batch) that is computed at once.

A loss keeps about ten such matrices in memory, 40 MB. Larger matrices are computed in blocks of
rows. A block is computed twice, which takes more than 1.5 times the processor time.
"""


def divided_loss(
    loss: Any,
    kind: Rows,
    codes: Tensor,
    labels: Tensor,
    indices: TripletIndices | None,
    devices: Devices,
) -> Tensor:
    """Return the loss of the whole batch, with the gradient of this process's part.

    If `kind` is "anchors", the loss compares this process's R rows with the whole batch. If this
    matrix has more than `PLAIN` entries, it is computed in blocks of rows, which the backward pass
    recomputes. A block has at most `PLAIN` entries, or R² if that is more.

    Args:
        loss: the loss.
        kind: how the loss can be divided; see `retrieval.model.loss_division`.
        codes: this process's codes (R, C).
        labels: this process's labels (R,).
        indices: the pairs or triplets of the whole batch that the miner picked, if there is one.
        devices: the processes.
    """
    if kind == "classes":
        # the loss sums over the classes of all processes itself
        value: Tensor = loss(devices.gather(codes), devices.gather(labels))
        return devices.part(value.detach(), value)
    if kind == "items":
        sums, counts = row_sums(loss, kind, codes, labels, (codes, labels), 0, None)
    else:
        sums, counts = _by_blocks(loss, codes, labels, indices, devices)
    counts = devices.total(counts)
    means = torch.tensor(
        [is_mean(loss, name) for name in loss.sub_loss_names()], device=codes.device
    )
    # a mean is over the terms of all processes, not over this process's
    divisors = torch.where(means, counts.clamp(min=1), 1).to(sums.dtype)
    part = (sums / divisors).sum()
    return devices.part(devices.total(part.detach()), part)


def _by_blocks(
    loss: Any, codes: Tensor, labels: Tensor, indices: TripletIndices | None, devices: Devices
) -> tuple[Tensor, Tensor]:
    """Return the sums of the loss over this process's anchors, and their numbers of terms."""
    all_codes = devices.gather(codes)
    all_labels = devices.gather(labels)
    first = devices.rank * len(codes)
    rows = len(codes)
    # the entries per row of the loss's matrices: one per item, or per triplet if these are more
    entries = len(all_codes)
    if indices is not None:
        entries = max(entries, len(indices[0]) // len(all_codes))
    size = min(rows, max(math.ceil(rows / devices.world), PLAIN // entries))

    def block(
        codes: Tensor, reference: Tensor, labels: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        return row_sums(loss, "anchors", codes, labels, (reference, all_labels), start, indices)

    if size == rows:
        return block(codes, all_codes, labels, first)
    sums = []
    counts = []
    for start in range(0, rows, size):
        block_sums, block_counts = checkpoint(
            block,
            codes[start : start + size],
            all_codes,
            labels[start : start + size],
            first + start,
            use_reentrant=False,
            preserve_rng_state=False,  # the block draws no random numbers
        )
        sums.append(block_sums)
        counts.append(block_counts)
    return torch.stack(sums).sum(0), torch.stack(counts).sum(0)
