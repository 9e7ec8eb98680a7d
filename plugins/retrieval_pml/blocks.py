"""Losses of a matrix of pairs, some rows at a time: plain formulas on as many numbers as a
processor's cache holds, and their gradient with them.

Nothing of a block is kept but its rows' losses and the gradient, so that a loss needs the matrix,
one more, and no lists of indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from retrieval_pml.common import segment_logsumexp
from retrieval_pml.pairs import Pairs

ENTRIES = 2**17
"""Numbers that are worked on at a time."""

Plain = Callable[..., Any]
Fused = Callable[..., Any]


def blocks(rows: int, columns: int, each: Tensor | None = None) -> list[slice]:
    """Return slices of rows that make at most `ENTRIES` numbers, or one row.

    Args:
        rows: how many there are.
        columns: how many numbers a row has.
        each: (rows,) how often a row is repeated; 1 by default.
    """
    if each is None:
        step = max(1, ENTRIES // max(columns, 1))
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    found, start, filled = [], 0, 0
    for row, count in enumerate(each.tolist()):
        if row > start and (filled + count) * columns > ENTRIES:
            found.append(slice(start, row))
            start, filled = row, 0
        filled += count
    return [*found, slice(start, rows)] if rows else []


def by_rows(
    mat: Tensor,
    pairs: Pairs,
    plain: Plain,
    *others: Tensor,
    fused: Fused | None = None,
    parts: list[slice] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses (N,) of a matrix's rows, and what else is counted in each (N,).

    Args:
        mat: (N, M) similarities or distances.
        pairs: which of its pairs are positive and which negative.
        plain: of some rows (R, M), their two masks, and their rows of `others`: their losses (R,),
            differentiable, and where there is something to count a second (R,), which is not. Each
            is of its row alone.
        others: more of each row, each (N, …).
        fused: of some rows (R, M), the pairs, which rows they are, a tensor (R, M) that it fills
            with the losses' derivatives, and their rows of `others`: what `plain` returns and the
            losses' derivatives by each of `others`, instead of `plain` where the gradient is not
            differentiated again.
        parts: the rows of each block; by default as many as `ENTRIES` allow.
    """
    losses, counts, _ = rows_and_pairs(mat, pairs, None, plain, *others, fused=fused, parts=parts)
    return losses, counts


def rows_and_pairs(
    mat: Tensor,
    pairs: Pairs,
    listed: tuple[Tensor, Tensor] | None,
    plain: Plain,
    *others: Tensor,
    fused: Fused | None = None,
    parts: list[slice] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `by_rows` does, and the numbers (P,) of listed pairs, of which none comes twice:
    all by one gradient of the matrix.
    """
    parts = blocks(*mat.shape) if parts is None else parts
    found: tuple[Tensor, Tensor, Tensor] = _ByRows.apply(
        mat, pairs, listed, plain, fused, parts, *others
    )
    return found


def _both(made: Any) -> tuple[Tensor, Tensor]:
    if isinstance(made, tuple):
        return made[0], made[1]
    return made, made.new_zeros(len(made), dtype=torch.int64)


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


class _ByRows(torch.autograd.Function):
    """See `by_rows`."""

    @staticmethod
    def forward(
        ctx: Any,
        mat: Tensor,
        pairs: Pairs,
        listed: tuple[Tensor, Tensor] | None,
        plain: Plain,
        fused: Fused | None,
        parts: list[slice],
        *others: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[6:]]
        empty = torch.zeros if fused is None else torch.empty
        slopes = [
            empty(x.shape, dtype=x.dtype, device=x.device) if want else None
            for x, want in zip((mat, *others), wanted, strict=True)
        ]
        losses, counts = (
            mat.new_zeros(len(mat)),
            torch.zeros(len(mat), dtype=torch.int64, device=mat.device),
        )
        for part in parts:
            if fused is not None:
                rows = mat[part]
                out = (
                    torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
                    if slopes[0] is None
                    else slopes[0][part]
                )
                made = fused(rows, pairs, part, out, *(x[part] for x in others))
                losses[part], counts[part] = _both(made)
                for whole, slope in zip(slopes[1:], made[2:] if others else (), strict=True):
                    if whole is not None:
                        whole[part] = slope
                continue
            masks = pairs.of(part)
            # a checkpoint around all of this would have every tensor that is saved here computed
            # anew, amid this very forward
            with torch.enable_grad(), saved_tensors_hooks(_as_is, _as_is):
                given = [
                    x[part].detach().requires_grad_(want)
                    for x, want in zip((mat, *others), wanted, strict=True)
                ]
                value, count = _both(plain(given[0], *masks, *given[1:]))
                losses[part], counts[part] = value.detach(), count
                leaves = [x for x in given if x.requires_grad]
                if not value.requires_grad:
                    continue
                found = iter(torch.autograd.grad(value.sum(), leaves, allow_unused=True))
            for whole in slopes:
                if whole is not None and (gradient := next(found)) is not None:
                    whole[part] = gradient
        ctx.save_for_backward(mat, *others, *(slope for slope in slopes if slope is not None))
        ctx.made = pairs, listed, plain, wanted
        ctx.mark_non_differentiable(counts)
        return losses, counts, mat.new_zeros(0) if listed is None else mat[listed]

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor, _: Any, of_listed: Tensor
    ) -> tuple[Tensor | None, ...]:
        pairs, listed, plain, wanted = ctx.made
        saved = ctx.saved_tensors
        given, slopes = saved[: len(wanted)], iter(saved[len(wanted) :])
        if torch.is_grad_enabled():  # the gradient will be differentiated

            def formula(mat: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
                losses, _ = _both(plain(mat, *pairs.of(slice(None)), *others))
                return losses, mat.flatten()[:0] if listed is None else mat[listed]

            found = derivatives(formula, given, (gradient, of_listed))
        else:
            found = [
                next(slopes) * gradient.view(-1, *[1] * (x.ndim - 1)) if want else None
                for x, want in zip(given, wanted, strict=True)
            ]
            if listed is not None and found[0] is not None:
                found[0][listed] += of_listed
        return found[0], None, None, None, None, None, *found[1:]


def derivatives(
    formula: Plain, inputs: Sequence[Tensor | None], gradient: Any
) -> list[Tensor | None]:
    """Return the derivatives of a formula of some tensors, each for itself, in a form that can be
    differentiated again.

    Args:
        formula: of the inputs.
        inputs: one of them may have been made of another, which counts for nothing here; None is
            handed on.
        gradient: of what the formula gives.
    """
    # aliases: the way from one input to another ends at them
    given = [None if x is None else x.view_as(x) for x in inputs]
    leaves = [x for x in given if x is not None and x.requires_grad]
    found = iter(
        torch.autograd.grad(
            formula(*given), leaves, gradient, create_graph=True, materialize_grads=True
        )
    )
    return [next(found) if x is not None and x.requires_grad else None for x in given]


class _Lse(torch.autograd.Function):
    """See `lse`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        kept = values.masked_fill(~mask, torch.finfo(values.dtype).min)
        top = kept.amax(1, keepdim=True)
        # what is smaller adds nothing to a sum of 1 or more, and processors are slow at the
        # smallest numbers
        weights = kept.sub_(top).clamp_(min=-87).exp_()
        total = weights.sum(1, keepdim=True)
        found = (top + total.log()).squeeze(1)
        ctx.save_for_backward(values, mask, weights.div_(total))
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        values, mask, weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated
            weights = torch.softmax(values.masked_fill(~mask, torch.finfo(values.dtype).min), 1)
        return weights * gradient.unsqueeze(1), None


def lse(values: Tensor, mask: Tensor) -> Tensor:
    """Return log Σ exp of each row's values in the mask (N,); the lowest finite number where there
    are none.

    The gradient of a row that has none is to be 0.
    """
    found: Tensor = _Lse.apply(values, mask)
    return found


def lse_of_few(values: Tensor, mask: Tensor) -> Tensor:
    """Return what `lse` returns, from a list: for masks that leave out most."""
    row, column = torch.where(mask)
    return segment_logsumexp(values[row, column], row, len(values))
