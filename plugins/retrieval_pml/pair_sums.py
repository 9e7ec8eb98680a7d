"""Log-sum-exps over the negatives of each anchor, in which most losses of pairs are written.

A batch has few positive pairs, which are listed, and many negative pairs, which are not: a sum over
them goes through the matrix of all pairs, in which the other pairs are set to −∞. The backward pass
computes the exponentials again, so the memory is two matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from retrieval.helpers import first_row
from torch import Tensor

Exponents = Callable[[Tensor], tuple[Tensor, Tensor | float]]
"""Returns the exponents of a matrix of pairs, as a new tensor, and their derivative."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of N anchors with M other items.

    Args:
        anchors: anchors (P,) of the positive pairs.
        positives: the other items (P,) of the positive pairs.
        not_negative: anchors (K,) and other items (K,) of all pairs that are not negative, if
            they are listed.
        weights: logarithms of the weights of pairs as negatives, broadcast to (N, M). A weight is
            −∞ for a pair that is not negative and is not listed.
        any_negative: whether there is a negative pair.
    """

    anchors: Tensor
    positives: Tensor
    not_negative: tuple[Tensor, Tensor] | None = None
    weights: Tensor | None = None
    any_negative: bool = True


def matrix_of(distance: Any, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
    """Return the distances or similarities (N, M) of embeddings (N, C) and references (M, C)."""
    # Embeddings that are compared with each other are scaled to length 1 only once.
    mat: Tensor = distance(embeddings, None if ref_emb is embeddings else ref_emb)
    return mat


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
        not_negative=equal,
        any_negative=len(equal[0]) < len(labels) * len(ref_labels),
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
    counts = torch.zeros_like(mat)
    if not repeated:
        a1, p = torch.where(
            counts.bool().index_put_((a1, p), counts.new_ones((), dtype=torch.bool))
        )
    counts.index_put_((a2, n), counts.new_ones(()), accumulate=repeated)
    return Pairs(a1, p, weights=counts.log_(), any_negative=len(a2) > 0)


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
        powers, _ = _of_negatives(mat, exponents, pairs)
        top = powers.amax(1, keepdim=True).clamp_(min=lowest)
        total = powers.sub_(top).exp_().sum(1)
        sums = total.log_().add_(top.squeeze(1)).clamp_(min=lowest)
        ctx.save_for_backward(mat, sums)
        ctx.exponents = exponents
        ctx.pairs = pairs
        return sums, mat[pairs.anchors, pairs.positives]

    @staticmethod
    def backward(ctx: Any, of_sums: Tensor, of_values: Tensor) -> tuple[Tensor, None, None]:
        mat, sums = ctx.saved_tensors
        powers, slopes = _of_negatives(mat, ctx.exponents, ctx.pairs)
        gradient = powers.sub_(sums.unsqueeze(1)).exp_()
        slopes = of_sums.unsqueeze(1) * slopes
        if torch.is_grad_enabled():
            # A second derivative needs the exponentials. `where` keeps out that of the distance of
            # an item from itself, which is NaN.
            gradient = torch.where(gradient > 0, gradient * slopes, 0)
        else:
            gradient *= slopes
        listed = ctx.pairs.anchors, ctx.pairs.positives
        # A positive pair may be listed twice.
        return gradient.index_put_(listed, of_values, accumulate=True), None, None


def _of_negatives(mat: Tensor, exponents: Exponents, pairs: Pairs) -> tuple[Tensor, Tensor | float]:
    """Return the exponents, −∞ for all pairs that are not negative, and their derivative."""
    powers, slopes = exponents(mat)
    if pairs.weights is not None:
        powers += pairs.weights
    if pairs.not_negative is not None:
        powers.index_put_(pairs.not_negative, powers.new_tensor(-torch.inf))
    return powers, slopes


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
