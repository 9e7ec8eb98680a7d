"""Log-sum-exps over the negatives of each anchor, in which most losses of pairs are written.

A batch has few positive pairs, which are listed, and many negative pairs, which are not: a sum over
them goes through the matrix of all pairs, in which the other pairs are set to −∞. The backward pass
computes the exponentials again, so the memory is two matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_metric_learning import distances, reducers
from retrieval.helpers import Sums, first_row, reduced_loss, summed
from torch import Tensor
from torch.nn import functional as F

Exponents = Callable[[Tensor], tuple[Tensor, Tensor | float]]
"""Returns the exponents of a matrix of pairs, as a new tensor, and their derivative."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of N anchors with M other items.

    Args:
        anchors: anchors (P,) of the positive pairs.
        positives: the other items (P,) of the positive pairs.
        not_negative: anchors (K,) and other items (K,) of pairs that are not negative.
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
    lengths = column_lengths = rows.square().sum(1)
    if ref_emb is not embeddings:
        columns = distance.maybe_normalize(ref_emb)
        column_lengths = columns.square().sum(1)
    squares = torch.addmm(column_lengths, rows, columns.T, alpha=-2)
    return squares.add_(lengths.unsqueeze(1))


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
    single = mat.new_ones(())
    counts = torch.zeros_like(mat).index_put_((a2, n), single, accumulate=repeated)
    # The logarithms of all entries would take long: most are of 0.
    weights = torch.full_like(mat, -torch.inf).index_put_((a2, n), counts[a2, n].log())
    if not repeated:
        a1, p = torch.where(torch.zeros_like(mat).index_put_((a1, p), single))
    return Pairs(a1, p, (a1[:0], p[:0]), weights=weights, negatives=len(a2))


def nearness(distance: Any, factor: float) -> float:
    """Return a factor of similarities, or its negative for distances."""
    if distance.is_inverted:
        return factor
    return -factor


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
    sums, values, _ = _Sums.apply(mat, exponents, pairs, False)
    return sums, values


def excesses_over_others(
    mat: Tensor, exponents: Exponents, pairs: Pairs
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ max(0, exponent) of the negatives of each anchor instead of log Σ exp(exponent).

    Returns:
        The sums (N,), the positive pairs' values (P,), and the numbers (N,) of exponents above 0.
    """
    sums, values, counts = _Sums.apply(mat, exponents, pairs, True)
    return sums, values, counts


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mat: Tensor, exponents: Exponents, pairs: Pairs, hinge: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        powers, _ = _of_negatives(mat, exponents, pairs)
        counts = None
        if hinge:
            sums = powers.relu_().sum(1)
            counts = powers.sign_().sum(1).long()
            ctx.mark_non_differentiable(counts)
        else:
            lowest = torch.finfo(mat.dtype).min
            top = powers.amax(1, keepdim=True).clamp_(min=lowest)
            total = powers.sub_(top).clamp_(min=_lowest_exponent(mat)).exp_().sum(1)
            sums = total.log_().add_(top.squeeze(1)).clamp_(min=lowest)
        ctx.save_for_backward(mat, sums)
        ctx.arguments = exponents, pairs, hinge
        return sums, mat[pairs.anchors, pairs.positives], counts

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        of_sums, of_values, _ = of_outputs
        mat, sums = ctx.saved_tensors
        exponents, pairs, hinge = ctx.arguments
        powers, slopes = _of_negatives(mat, exponents, pairs)
        slopes = of_sums.unsqueeze(1) * slopes
        if hinge:
            shares = powers.detach().gt_(0)
            limit = 0.0
        else:
            low = _lowest_exponent(mat)
            shares = powers.sub_(sums.unsqueeze(1)).clamp_(min=low).exp_()
            limit = 1.01 * math.exp(low)
        if torch.is_grad_enabled():
            # A second derivative needs the exponentials. `where` keeps out that of the distance of
            # an item from itself, which is NaN.
            gradient = torch.where(shares > limit, shares * slopes, 0)
        else:
            gradient = F.threshold(shares, limit, 0, inplace=True).mul_(slopes)
        # A positive pair may be listed twice.
        gradient.index_put_((pairs.anchors, pairs.positives), of_values, accumulate=True)
        return gradient, None, None, None


def _lowest_exponent(mat: Tensor) -> float:
    # Exponentials that are subnormal or round to 0 take a CPU twenty to eighty times as long.
    return 0.9 * math.log(torch.finfo(mat.dtype).tiny)


def _of_negatives(mat: Tensor, exponents: Exponents, pairs: Pairs) -> tuple[Tensor, Tensor | float]:
    """Return the exponents, −∞ for all pairs that are not negative, and their derivative."""
    powers, slopes = exponents(mat)
    if pairs.weights is not None:
        powers += pairs.weights
    return powers.index_put_(pairs.not_negative, powers.new_full((), -torch.inf)), slopes


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
