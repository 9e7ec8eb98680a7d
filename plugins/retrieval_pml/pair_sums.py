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

Exponents = Callable[[Tensor, slice], tuple[Tensor, Tensor | float]]
"""Returns the exponents of some rows of a matrix of pairs, as a new tensor, and their derivative.

Its arguments are these rows (B, M), and which they are.
"""
ENTRIES = 2**17
"""Number of pairs to compute at once on a CPU, so that they stay in a core's cache."""


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
    reference = None if ref_emb is embeddings else ref_emb
    kind = type(distance)
    of_unit_vectors = (
        kind is distances.CosineSimilarity
        or (kind is distances.DotProductSimilarity and distance.normalize_embeddings)
        or (kind is distances.LpDistance and distance.normalize_embeddings)
    )
    powers = (1, 2) if kind is distances.LpDistance else (1,)
    # As torch does, measure few vectors by their differences, which is more precise.
    is_small = max(len(embeddings), len(ref_emb)) <= 25
    # A miner, which needs no gradient, sees upstream's numbers to the last bit.
    plain = is_small or not of_unit_vectors or not torch.is_grad_enabled()
    if plain or distance.p != 2 or distance.power not in powers:
        mat: Tensor = distance(embeddings, reference)
        return mat
    mat = _OfUnitVectors.apply(embeddings, reference, distance)
    return mat


class _OfUnitVectors(torch.autograd.Function):
    """Cosines, or Euclidean distances to the power of 1 or 2, of vectors scaled to length 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None, distance: Any) -> Tensor:
        rows, lengths = _unit(x)
        if y is None:
            columns = rows
            column_lengths = lengths
        else:
            columns, column_lengths = _unit(y)
        if distance.is_inverted:
            mat = rows @ columns.T
        else:
            squares = rows.square().sum(1, keepdim=True)
            column_squares = columns.square().sum(1)
            mat = torch.addmm(column_squares, rows, columns.T, alpha=-2)
            # What is within the rounding errors is 0, as between equal vectors.
            rounding = 4 * torch.finfo(mat.dtype).eps
            F.threshold(mat.add_(squares), rounding, 0, inplace=True)
            if distance.power == 1:
                mat.sqrt_()
        ctx.save_for_backward(x, y, rows, lengths, columns, column_lengths, mat)
        ctx.distance = distance
        return mat

    @staticmethod
    def backward(ctx: Any, of_mat: Tensor) -> tuple[Tensor | None, ...]:
        x, y, rows, lengths, columns, column_lengths, mat = ctx.saved_tensors
        distance = ctx.distance
        if torch.is_grad_enabled():
            # For a second derivative, torch differentiates each step.
            inputs = [tensor for tensor in (x, y) if tensor is not None and tensor.requires_grad]
            if distance.power == 2:
                # Without a root, which has no derivative at 0.
                a = F.normalize(x)
                b = a if y is None else F.normalize(y)
                again = a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.T
            else:
                again = distance(x, y)
            gradients = iter(torch.autograd.grad(again, inputs, of_mat, create_graph=True))
            needed = ctx.needs_input_grad[:2]
            of_x, of_y = (next(gradients) if need else None for need in needed)
            return of_x, of_y, None
        factor = 1.0
        if not distance.is_inverted:
            factor = -distance.power
            if distance.power == 1:
                # A distance of 0 has no derivative.
                of_mat = (of_mat / mat).masked_fill_(mat == 0, 0)
        # The lengths of vectors are constant, so their derivatives cancel out.
        of_rows = of_mat @ columns
        of_columns = (rows.T @ of_mat).T
        if y is None:
            return _of_unscaled(of_rows.add_(of_columns), rows, lengths, factor), None, None
        of_x = _of_unscaled(of_rows, rows, lengths, factor)
        return of_x, _of_unscaled(of_columns, columns, column_lengths, factor), None


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors (N, C) scaled to length 1 and their lengths (N, 1), as torch's `normalize`."""
    # torch's norm is slow for vectors that are columns in memory.
    lengths = x.square().sum(1, keepdim=True).sqrt_().clamp_(min=1e-12)
    return x / lengths, lengths


def _of_unscaled(of_unit: Tensor, unit: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """Return the gradient of vectors from that of the scaled ones, which is overwritten."""
    along = (of_unit * unit).sum(1, keepdim=True)
    return of_unit.addcmul_(unit, along, value=-1).div_(lengths / factor)


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
    return lambda mat, rows: (mat * factor, factor)


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
        sums = mat.new_empty(len(mat))
        counts = None
        if hinge:
            counts = torch.empty_like(sums, dtype=torch.int64)
            ctx.mark_non_differentiable(counts)
        lowest = torch.finfo(mat.dtype).min
        for rows, not_negative in _blocks(mat, pairs):
            powers, _ = _of_negatives(mat, exponents, pairs, rows, not_negative)
            if counts is not None:
                sums[rows] = powers.relu_().sum(1)
                counts[rows] = powers.sign_().sum(1)
                continue
            top = powers.amax(1, keepdim=True).clamp_(min=lowest)
            total = powers.sub_(top).clamp_(min=_lowest_exponent(mat)).exp_().sum(1)
            sums[rows] = total.log_().add_(top.squeeze(1)).clamp_(min=lowest)
        ctx.save_for_backward(mat, sums)
        ctx.arguments = exponents, pairs, hinge
        return sums, mat[pairs.anchors, pairs.positives], counts

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        of_sums, of_values, _ = of_outputs
        mat, sums = ctx.saved_tensors
        exponents, pairs, hinge = ctx.arguments
        low = _lowest_exponent(mat)
        limit = 1.01 * math.exp(low)
        if torch.is_grad_enabled():
            # A second derivative needs the exponentials. `where` keeps out that of the distance of
            # an item from itself, which is NaN.
            every = slice(None)
            powers, slopes = _of_negatives(mat, exponents, pairs, every, pairs.not_negative)
            slopes = of_sums.unsqueeze(1) * slopes
            if hinge:
                kept = powers > 0
                shares = kept.to(mat.dtype)
            else:
                shares = (powers - sums.unsqueeze(1)).clamp(min=low).exp()
                kept = shares > limit
            gradient = torch.where(kept, shares * slopes, 0)
        else:
            gradient = torch.empty_like(mat)
            # A factor of an exponential is part of the exponent, so that no product is subnormal.
            shifts = (sums - of_sums.abs().log()).unsqueeze(1)
            factors = of_sums.unsqueeze(1)
            if not hinge:
                factors = factors.sign()
            for rows, not_negative in _blocks(mat, pairs):
                powers, slopes = _of_negatives(mat, exponents, pairs, rows, not_negative)
                if hinge:
                    shares = powers.gt_(0)
                else:
                    shares = powers.sub_(shifts[rows]).clamp_(min=low).exp_()
                    shares = F.threshold(shares, limit, 0, inplace=True)
                torch.mul(shares, factors[rows] * slopes, out=gradient[rows])
            of_values = F.hardshrink(of_values, limit)
        # A positive pair may be listed twice.
        gradient.index_put_((pairs.anchors, pairs.positives), of_values, accumulate=True)
        return gradient, None, None, None


def _blocks(mat: Tensor, pairs: Pairs) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
    """Yield rows of a matrix of pairs, and the indices within them that are not negative."""
    rows, columns = pairs.not_negative
    step = len(mat)
    # A GPU computes faster the more pairs it has at once.
    if mat.device.type == "cpu":
        step = max(1, ENTRIES // max(1, mat.shape[1]))
    if step >= len(mat):
        yield slice(None), pairs.not_negative
        return
    starts = torch.arange(0, len(mat) + step, step)
    ends = torch.searchsorted(rows, starts.to(rows.dtype)).tolist()
    for start, low, high in zip(starts.tolist(), ends[:-1], ends[1:], strict=False):
        yield slice(start, start + step), (rows[low:high] - start, columns[low:high])


def _lowest_exponent(mat: Tensor) -> float:
    # Exponentials that are subnormal or round to 0 take a CPU twenty to eighty times as long.
    return 0.9 * math.log(torch.finfo(mat.dtype).tiny)


def _of_negatives(
    mat: Tensor,
    exponents: Exponents,
    pairs: Pairs,
    rows: slice,
    not_negative: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor | float]:
    """Return the exponents of rows, −∞ for pairs that are not negative, and their derivative."""
    powers, slopes = exponents(mat[rows], rows)
    if pairs.weights is not None:
        powers += pairs.weights[rows]
    return powers.index_put_(not_negative, powers.new_full((), -torch.inf)), slopes


def log_sums(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Return log Σ exp of the values of each segment; the lowest number for an empty segment."""
    sums: Tensor = _LogSums.apply(values, segment, segments)
    return sums


class _LogSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, segment: Tensor, segments: int) -> Tensor:
        # With −∞ in place of the lowest number, `logaddexp` of two empty segments would have a NaN
        # gradient.
        lowest = torch.finfo(values.dtype).min
        top = values.new_full((segments,), lowest).scatter_reduce_(0, segment, values, "amax")
        powers = (values - top[segment]).exp_()
        total = values.new_zeros(segments).index_add_(0, segment, powers)
        sums = total.log_().add_(top).clamp_(min=lowest)
        ctx.save_for_backward(values, segment, sums)
        return sums

    @staticmethod
    def backward(ctx: Any, of_sums: Tensor) -> tuple[Tensor | None, ...]:
        values, segment, sums = ctx.saved_tensors
        shares = torch.exp(values - sums[segment])
        return of_sums[segment] * shares, None, None


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
