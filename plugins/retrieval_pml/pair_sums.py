"""Log-sum-exps over the negatives of each anchor, in which most losses of pairs are written.

A batch has few positive pairs, which are listed, and many negative pairs, which are not: a sum over
them goes through the matrix of all pairs, in which the other pairs are set to −∞. The backward pass
computes the exponentials again, so the memory is two matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_metric_learning import distances, reducers
from retrieval.helpers import Sums, first_row, reduced_loss, summed
from torch import Tensor
from torch.nn import functional as F

Exponents = Callable[[Tensor], tuple[Tensor, Tensor | float]]
"""Returns the exponents of rows of the matrix of pairs, as a new tensor, and their derivative."""
ENTRIES = 2**17
"""Number of exponents that the forward pass has in memory at a time, on a CPU."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of N anchors with M other items.

    Args:
        anchors: anchors (P,) of the positive pairs.
        positives: the other items (P,) of the positive pairs.
        not_negative: anchors (K,), ascending, and other items (K,) of pairs that are not negative.
        weights: logarithms (N, M) of the weights of pairs as negatives, −∞ for others.
        negatives: number of negative pairs; the losses of classes do not need it.
    """

    anchors: Tensor
    positives: Tensor
    not_negative: tuple[Tensor, Tensor]
    weights: Tensor | None = None
    negatives: int = 0


def matrix_of(distance: Any, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
    """Return the distances or similarities (N, M) of embeddings (N, C) and references (M, C)."""
    # Embeddings that are compared with each other are scaled to length 1 only once.
    if not (type(distance) is distances.LpDistance and distance.p == distance.power == 2):
        mat: Tensor = distance(embeddings, None if ref_emb is embeddings else ref_emb)
        return mat
    # A squared Euclidean distance needs no root.
    rows = columns = distance.maybe_normalize(embeddings)
    if ref_emb is not embeddings:
        columns = distance.maybe_normalize(ref_emb)
    squares = torch.addmm(columns.square().sum(1), rows, columns.T, alpha=-2)
    return squares.add_(rows.square().sum(1, keepdim=True))


def labelled_pairs(labels: Tensor, ref_labels: Tensor, itself: int | None) -> Pairs:
    """Return the positive pairs of equal labels, ordered by anchor; all others are negative.

    `itself` is the column of the first anchor, if the anchors are among the columns: the pair of an
    anchor with itself is then neither positive nor negative.
    """
    ordered, order = torch.sort(ref_labels, stable=True)
    first = torch.searchsorted(ordered, labels)
    count = torch.searchsorted(ordered, labels, right=True) - first
    rows = torch.repeat_interleave(count)
    # The k-th pair of an anchor is with the k-th item of its label.
    skipped = first - count.cumsum(0) + count
    columns = order[torch.arange(len(rows), device=rows.device) + skipped[rows]]
    equal = rows, columns
    if itself is not None:
        other = columns - rows != itself
        rows = rows[other]
        columns = columns[other]
    return Pairs(
        rows,
        columns,
        equal,
        negatives=len(labels) * len(ref_labels) - len(equal[0]),
    )


def column_of_anchors(labels: Tensor, ref_labels: Tensor) -> int | None:
    """Return the column of the first anchor itself, or None if the anchors are not compared."""
    if ref_labels is labels:
        return 0
    # A process that has some rows of the batch compares them with the whole batch.
    return first_row()


def listed_pairs(mat: Tensor, indices: Any, repeated: bool) -> Pairs:
    """Return the pairs of four index tensors: anchors, positives, anchors, negatives.

    If not `repeated`, a pair that is listed several times counts once.
    """
    a1, p, a2, n = indices
    if repeated:
        single = mat.new_ones(())
        counts = torch.zeros_like(mat).index_put_((a2, n), single, accumulate=True)
        log_counts = counts[a2, n].log_()
    else:
        log_counts = mat.new_zeros(())
        mask = torch.zeros_like(mat, dtype=torch.bool)
        a1, p = torch.where(mask.index_put_((a1, p), torch.ones_like(mask[0, 0])))
    weights = torch.full_like(mat, -torch.inf).index_put_((a2, n), log_counts)
    return Pairs(a1, p, (a1[:0], p[:0]), weights=weights, negatives=len(a2))


def scaled(factor: float) -> Exponents:
    """Return exponents that are proportional to the matrix."""
    return lambda mat: (mat * factor, factor)


def against_others(mat: Tensor, exponents: Exponents, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return log Σ exp(exponents) of the negatives of each anchor, and the positive pairs' values.

    Args:
        mat: distances or similarities (N, M) of the anchors and the other items.
        exponents: the exponents as a function of `mat`.
        pairs: which pairs are positive and which are negative.

    Returns:
        The logarithms (N,), the lowest number for an anchor without negatives, and the entries (P,)
        of `mat` at the positive pairs.
    """
    sums, values = _AgainstOthers.apply(mat, exponents, pairs)
    return sums, values


class _AgainstOthers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mat: Tensor, exponents: Exponents, pairs: Pairs) -> tuple[Tensor, Tensor]:
        lowest = torch.finfo(mat.dtype).min
        blocks = []
        for powers, _ in _of_negatives(mat, exponents, pairs, _rows_of_block(mat)):
            top = powers.amax(1, keepdim=True).clamp_(min=lowest)
            total = powers.sub_(top).clamp_(min=_lowest_exponent(mat)).exp_().sum(1)
            blocks.append(total.log_().add_(top.squeeze(1)))
        sums = torch.cat(blocks).clamp_(min=lowest)
        ctx.save_for_backward(mat, sums)
        ctx.exponents = exponents
        ctx.pairs = pairs
        return sums, mat[pairs.anchors, pairs.positives]

    @staticmethod
    def backward(ctx: Any, of_sums: Tensor, of_values: Tensor) -> tuple[Tensor, None, None]:
        mat, sums = ctx.saved_tensors
        ((powers, slopes),) = _of_negatives(mat, ctx.exponents, ctx.pairs, len(mat))
        slopes = of_sums.unsqueeze(1) * slopes
        low = _lowest_exponent(mat)
        shares = powers.sub_(sums.unsqueeze(1)).clamp_(min=low).exp_()
        limit = 1.01 * math.exp(low)
        if torch.is_grad_enabled():
            # A second derivative needs the exponentials. `where` keeps out that of the distance of
            # an item from itself, which is NaN.
            gradient = torch.where(shares > limit, shares * slopes, 0)
        else:
            gradient = F.threshold(shares, limit, 0, inplace=True).mul_(slopes)
        places = ctx.pairs.anchors, ctx.pairs.positives
        # A positive pair may be listed twice.
        return gradient.index_put_(places, of_values, accumulate=True), None, None


def _lowest_exponent(mat: Tensor) -> float:
    # Exponentials that are subnormal or round to 0 take a CPU twenty to eighty times as long.
    return 0.9 * math.log(torch.finfo(mat.dtype).tiny)


def excesses_over_others(
    mat: Tensor, exponents: Exponents, pairs: Pairs
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ max(0, excess) of the negatives of each anchor, like `against_others`.

    Returns:
        The sums (N,), the numbers (N,) of excesses above 0, and the positive pairs' values (P,).
    """
    sums, counts, values = _ExcessesOverOthers.apply(mat, exponents, pairs)
    return sums, counts, values


class _ExcessesOverOthers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mat: Tensor, exponents: Exponents, pairs: Pairs
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums, counts = [], []
        for excesses, _ in _of_negatives(mat, exponents, pairs, _rows_of_block(mat)):
            sums.append(excesses.relu_().sum(1))
            # Summing numbers is four times as fast as counting true values.
            counts.append(excesses.sign_().sum(1))
        count = torch.cat(counts).long()
        ctx.save_for_backward(mat)
        ctx.exponents = exponents
        ctx.pairs = pairs
        ctx.mark_non_differentiable(count)
        return torch.cat(sums), count, mat[pairs.anchors, pairs.positives]

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor, None, None]:
        of_sums, _, of_values = of_outputs
        (mat,) = ctx.saved_tensors
        ((excesses, slopes),) = _of_negatives(mat.detach(), ctx.exponents, ctx.pairs, len(mat))
        gradient = excesses.gt_(0).mul_(of_sums.unsqueeze(1) * slopes)
        places = ctx.pairs.anchors, ctx.pairs.positives
        return gradient.index_put_(places, of_values, accumulate=True), None, None


def _rows_of_block(mat: Tensor) -> int:
    # On a CPU, a small block stays in the cache, and its memory is used again.
    if mat.device.type == "cpu":
        return max(1, ENTRIES // mat.shape[1])
    return len(mat)


def _of_negatives(
    mat: Tensor, exponents: Exponents, pairs: Pairs, rows: int
) -> Iterator[tuple[Tensor, Tensor | float]]:
    """Yield the exponents of blocks of anchors, −∞ for pairs that are not negative; derivatives."""
    anchors, partners = pairs.not_negative
    starts = torch.arange(0, len(mat), rows, device=mat.device)
    ends = [len(anchors)]
    if rows < len(mat):
        ends = torch.searchsorted(anchors, starts[1:]).tolist() + ends
    first = 0
    for block, end in enumerate(ends):
        start = block * rows
        powers, slopes = exponents(mat[start : start + rows])
        if pairs.weights is not None:
            powers += pairs.weights[start : start + rows]
        skipped = anchors[first:end] - start, partners[first:end]
        yield powers.index_put_(skipped, powers.new_tensor(-torch.inf)), slopes
        first = end


def log_sums(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Return log Σ exp of the values of each segment; the lowest number for an empty segment."""
    lowest = torch.finfo(values.dtype).min
    # The largest value cancels out of the result, so it needs no gradient. With −∞ in place of
    # the lowest number, `logaddexp` of two empty segments would have a NaN gradient.
    top = values.new_full((segments,), lowest).scatter_reduce(0, segment, values.detach(), "amax")
    total = values.new_zeros(segments).index_add(0, segment, torch.exp(values - top[segment]))
    empty = total == 0
    # log(0) has an infinite gradient, which `where` turns into NaN even where it is not chosen.
    return torch.where(empty, lowest, top + torch.log(total.masked_fill(empty, 1)))


def reducer_of(loss: Any, name: str) -> Any:
    """Return the reducer of a sub-loss, also while processes divide the loss."""
    reducer = loss.reducer
    # `Sums` stands in for the reducer if processes divide the anchors.
    if isinstance(reducer, Sums):
        reducer = reducer.inner
    if isinstance(reducer, reducers.MultipleReducers):
        reducer = dict(reducer.reducers).get(name, reducer.default_reducer)
    return reducer


def loss_of_sum(loss: Any, name: str, total: Tensor, count: Tensor) -> Any:
    """Return a sub-loss by name, from the sum and the count of the numbers that are reduced."""
    if isinstance(loss.reducer, Sums):
        return {name: summed(total, count)}
    if type(reducer_of(loss, name)) is not reducers.SumReducer:
        total = total / count.clamp(min=1)
    return reduced_loss(total, name)
