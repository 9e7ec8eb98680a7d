"""Functions of all pairs in blocks: no tensor of (queries, references, width) grows with both,
forward or backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PairFunction = Callable[..., Tensor]
"""(b, C) and (c, C) codes, then parameters, to (b, c) or (b, c, K)."""

BLOCK = 2**20
"""Numbers that a pair function may hold in one tensor of a block."""

DIRECT = 2**22
"""Up to so many numbers in one tensor, all pairs are computed at once, and kept for the gradient.
"""


def all_pairs(
    function: PairFunction,
    query: Tensor,
    reference: Tensor,
    *parameters: Tensor,
    width: int,
    tail: int = 0,
) -> Tensor:
    """Return `function` of all pairs, computed at once where that is small, else in blocks that the
    gradient computes again.

    Args:
        function: of a block of queries, one of references, and the parameters.
        query: (Q, C).
        reference: (R, C).
        parameters: further tensors that gradients reach.
        width: numbers that the function holds for a pair.
        tail: K, if the function gives (b, c, K); 0 if it gives (b, c).

    Returns:
        (Q, R) or (Q, R, K).
    """
    if exporting() or len(query) * len(reference) * width <= DIRECT:
        return function(query, reference, *parameters)
    made: Tensor = _Blocks.apply(function, width, tail, query, reference, *parameters)
    return made


def exporting() -> bool:
    """Return whether a graph is being traced, whose sizes are unknown: then nothing may depend on
    them.
    """
    return torch.onnx.is_in_onnx_export() or torch.compiler.is_compiling()


def _blocks(rows: int, columns: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Give the blocks: whole rows where they fit, as they lie in memory."""
    across = max(1, min(columns, BLOCK // width))
    down = max(1, BLOCK // (across * width))
    for top in range(0, rows, down):
        for left in range(0, columns, across):
            yield slice(top, top + down), slice(left, left + across)


class _Blocks(torch.autograd.Function):
    """Keeps the inputs alone; the gradient computes each block again."""

    @staticmethod
    def forward(
        ctx: Any,
        function: PairFunction,
        width: int,
        tail: int,
        query: Tensor,
        reference: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(query, reference, *parameters)
        ctx.function, ctx.width = function, width
        shape = (len(query), len(reference), *([tail] if tail else []))
        out = query.new_empty(shape)
        for rows, columns in _blocks(len(query), len(reference), width):
            out[rows, columns] = function(query[rows], reference[columns], *parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        sums = [
            torch.zeros_like(x) if want else None for x, want in zip(saved, wanted, strict=True)
        ]
        for rows, columns in _blocks(len(saved[0]), len(saved[1]), ctx.width):
            with torch.enable_grad():
                parts = [saved[0][rows], saved[1][columns], *saved[2:]]
                parts = [
                    x.detach().requires_grad_(want) for x, want in zip(parts, wanted, strict=True)
                ]
                value = ctx.function(*parts)
            inputs = [x for x in parts if x.requires_grad]
            found = iter(
                torch.autograd.grad(value, inputs, gradient[rows, columns], allow_unused=True)
            )
            for place, total in enumerate(sums):
                if total is None or (part := next(found)) is None:
                    continue
                where = (rows, columns)[place] if place < 2 else slice(None)
                total[where] += part
        return (None, None, None, *sums)
