"""What several processes that train one model tell one another: rows of the batch, gradients,
statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Parameter

from retrieval.training.batch_norm import whole_batch

BUCKET = 2**22
"""So many numbers of gradients travel at once: 16 MB, which is what a step takes besides."""


class Devices:
    """The processes that share each batch, as one of them sees them; with one process nothing is
    told.

    Each process's gradient of a parameter is that of an objective of its own, and all take the
    mean. So what counts in the mean is one process's part times their number, or the same whole on
    every one.

    Args:
        accelerator: Hugging Face Accelerate's, which has made the process group.
        sync_batch_norm: whether batch norm is of the whole batch.

    Attributes:
        world: how many processes there are.
        rank: which of them this is.
    """

    def __init__(self, accelerator: Any, sync_batch_norm: bool = False) -> None:
        self.world, self.rank = int(accelerator.num_processes), int(accelerator.process_index)
        self._synchronised = sync_batch_norm and self.world > 1

    def statistics(self) -> AbstractContextManager[Any]:
        """Return the context in which the model sees this process's rows."""
        return whole_batch(self._synchronised)

    def share(self, x: Tensor) -> Tensor:
        """Return all processes' rows, in the batch's order; gradients reach this process's own
        rows.

        For an objective of the whole batch that every process computes: the own rows' gradient
        counts once for each process.
        """
        if self.world == 1:
            return x
        rows = _gathered(x.detach(), self.world)
        if x.is_floating_point():
            rows[self.rank] = x.detach() + self.world * (x - x.detach())
        return torch.cat(rows)

    def gather(self, x: Tensor) -> Tensor:
        """Return all processes' rows, in the batch's order; gradients reach all rows, from every
        process's objective.

        For objectives that are parts of one: each process's rows get what every part owes to them.
        """
        if self.world == 1:
            return x
        gathered: Tensor = _Gather.apply(x, self.world, self.rank)
        return gathered

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of what all processes give; without a gradient."""
        total = x.detach().clone()
        if self.world > 1:
            distributed.all_reduce(total)
        return total

    def part(self, value: Tensor, part: Tensor) -> Tensor:
        """Return a scalar with this value and the gradient of this process's part of it, as it
        counts in the mean.
        """
        return value + self.world * (part - part.detach())

    def reduce_gradients(
        self, parameters: Sequence[Parameter], divided: Collection[int] = ()
    ) -> None:
        """Give each parameter the mean of all processes' gradients; one that has none counts as
        zero if another's has one.

        Args:
            parameters: in the same order on every process.
            divided: ids of those of which each process has rows of its own, whose gradients no
                other has.
        """
        if self.world == 1 or not parameters:
            return
        for parameter in parameters:
            if id(parameter) in divided and parameter.grad is not None:
                parameter.grad /= self.world
        parameters = [p for p in parameters if id(p) not in divided]
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        has = has.to(parameters[0].device)
        distributed.all_reduce(has, distributed.ReduceOp.MAX)
        wanted = [p for p, some in zip(parameters, has.tolist(), strict=True) if some]
        for parameter in wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in wanted if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            distributed.all_reduce(flat)
            flat /= self.world
            at = 0
            for gradient in bucket:
                gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
                at += gradient.numel()

    def clip(self, parameters: Sequence[Parameter], divided: Collection[int], limit: float) -> None:
        """Scale gradients so that their norm, over all rows of all processes, is at most `limit`."""
        squares = parameters[0].new_zeros(2)
        for parameter in parameters:
            if parameter.grad is not None:
                squares[int(id(parameter) in divided)] += parameter.grad.square().sum()
        scale = limit / ((squares[0] + self.total(squares[1])).sqrt() + 1e-6)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= scale.clamp(max=1)


class _Gather(torch.autograd.Function):
    """All processes' rows; the gradient of a row is the sum of those that it has on every process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int, rank: int) -> Tensor:
        """Return (world × R, …) of each process's (R, …)."""
        ctx.own = slice(rank * len(x), (rank + 1) * len(x))
        return torch.cat(_gathered(x, world))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the own rows' gradient."""
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient)
        return gradient[ctx.own], None, None


def _gathered(x: Tensor, world: int) -> list[Tensor]:
    """Return each process's tensor, all of one shape."""
    rows = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
    distributed.all_gather(rows, x.contiguous())
    return rows


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors in order, of one type and together of some `BUCKET` numbers."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(each.numel() for each in bucket) + tensor.numel() > BUCKET
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
