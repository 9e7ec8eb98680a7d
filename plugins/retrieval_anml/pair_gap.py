"""The gap between an anchor's positive and negative neighbourhoods, and its derivative.

For similarities s (larger is closer) and an anchor's positives S and negatives D, the gap is

    x = 1/γ₁ · log( [e^{−γ₁ p} + Σ_S e^{−γ₁ s}] / (|S| + 1) )
      + 1/γ₂ · log( [e^{γ₂ q} + Σ_D e^{γ₂ s}] / (|D| + 1) )

(Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 22 in similarities; γ₁ is
the absolute value of the paper's negative γ₁.) The first term is a soft form of minus the smallest
similarity of the positives, the second of the largest similarity of the negatives. A threshold may
be left out, together with its 1 in the count. Sums may replace the means (equation 25).

The derivative of x is a row of softmax weights. It is computed together with x and overwrites the
similarities; autograd would keep about ten matrices of the batch's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from retrieval.plugin import listed_pairs
from torch import Tensor
from torch.autograd.function import once_differentiable

# number of similarities per block, which fit a processor's cache
BLOCK = 1 << 18
# smallest length that F.normalize divides by
SHORTEST = 1e-12
# below this γ, the logarithm of a mean of exponentials is computed with expm1, because its rounding
# error is divided by γ
SMALL_GAMMA = 0.5


@dataclass
class Columns:
    """For each anchor a list of references, such as its positives.

    Attributes:
        values: (P,) indices of references, list after list; anchors of one label share a list.
        start: (B,) start of each anchor's list in `values`.
        count: (B,) length of each anchor's list.
    """

    values: Tensor
    start: Tensor
    count: Tensor

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return these anchors' padded lists (last − first, M), and a mask without padding."""
        start, count = self.start[first:last, None], self.count[first:last, None]
        step = torch.arange(int(count.max()) if count.numel() else 0, device=count.device)
        member = step < count
        return self.values[torch.where(member, start + step, 0)], member


class LabelPairs:
    """All pairs; a pair is positive if the labels are equal, otherwise negative.

    Args:
        labels: (B,) labels of the anchors.
        ref_labels: (R,) labels of the references. `None` compares the batch with itself, where no
            item is its own positive.
    """

    def __init__(self, labels: Tensor, ref_labels: Tensor | None) -> None:
        self.own = ref_labels is None
        reference = labels if ref_labels is None else ref_labels
        self.shape = (len(labels), len(reference))
        ordered, columns = torch.sort(reference, stable=True)
        start = torch.searchsorted(ordered, labels.contiguous())
        stop = torch.searchsorted(ordered, labels.contiguous(), right=True)
        self.same = Columns(columns, start, stop - start)

    def positives(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return these anchors' positives, as `Columns.rows` does."""
        columns, member = self.same.rows(first, last)
        if self.own:
            member = member & (columns != torch.arange(first, last, device=columns.device)[:, None])
        return columns, member


class ListedPairs:
    """The pairs that a miner listed; duplicates count once.

    Args:
        indices: three or four index tensors, see `retrieval.plugin.Miner`.
        shape: B and R, the numbers of anchors and references.
        device: device of the embeddings.

    Raises:
        ValueError: the indices are not three or four tensors, or one is out of range.
    """

    def __init__(self, indices: Any, shape: tuple[int, int], device: torch.device) -> None:
        self.shape = shape
        anchor, positive, other, negative = listed_pairs(indices, shape, device)
        self.positive = _columns(anchor, positive, shape)
        self.negative = _columns(other, negative, shape)

    def positives(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return these anchors' positives, as `Columns.rows` does."""
        return self.positive.rows(first, last)


Pairs = LabelPairs | ListedPairs


def _columns(anchors: Tensor, partners: Tensor, shape: tuple[int, int]) -> Columns:
    keys = torch.unique(anchors * shape[1] + partners)
    count = torch.bincount(keys // max(shape[1], 1), minlength=shape[0])
    return Columns(keys % max(shape[1], 1), count.cumsum(0) - count, count)


@dataclass(frozen=True)
class Rule:
    """Parameters of the gap.

    Attributes:
        gamma1: γ₁ ≥ 0 of the positives: 0 is their mean, infinity the least similar.
        gamma2: γ₂ ≥ 0 of the negatives: 0 is their mean, infinity the most similar.
        positive_threshold: p, a similarity added to the positives, or `None`.
        negative_threshold: q, a similarity added to the negatives, or `None`.
        average: whether to take means of exponentials, otherwise sums, which need γ > 0.
        epsilon: margin of the Multi-Similarity miner, whose pairs are kept; `None` keeps all pairs.
    """

    gamma1: float
    gamma2: float
    positive_threshold: float | None
    negative_threshold: float | None
    average: bool = True
    epsilon: float | None = None


def soft_maximum(
    values: Tensor, count: Tensor, gamma: float, threshold: float | None, average: bool
) -> tuple[Tensor, Tensor]:
    """Compute 1/γ · log(mean of e^{γ a}) per row, or with a sum, and its unscaled derivative.

    This is equation 12 with the signs of a and b reversed; its limits are the mean at γ = 0 and the
    maximum at γ = ∞.

    Args:
        values: (B, M) numbers a, −∞ for those left out; the derivative overwrites them.
        count: (B,) how many values of each row are not left out.
        gamma: γ ≥ 0.
        threshold: one more value for every row, or `None`.
        average: whether to use the mean of the exponentials or their sum.

    Returns:
        The result (B,), −∞ for an empty row, and factors (B,) to multiply the derivative's rows by.
    """
    number = (count if threshold is None else count + 1).to(values.dtype).clamp(min=1)
    if values.shape[1] == 0:
        constant = -math.inf if threshold is None else threshold
        # with one exponential, sum and mean are equal
        return values.new_full(number.shape, constant), torch.zeros_like(number)
    top = values.amax(1)
    empty = top == -math.inf
    limit = math.inf if threshold is None else threshold

    if gamma == 0:
        member = (values > -math.inf).to(values.dtype)
        total = values.masked_fill_(member == 0, 0.0).sum(1)
        mean = (total if threshold is None else total + limit) / number
        values.copy_(member)
        return mean.masked_fill(empty & (threshold is None), -math.inf), 1 / number
    if math.isinf(gamma):
        highest = top if threshold is None else top.clamp(min=limit)
        torch.eq(values, highest[:, None], out=values)
        ties = values.sum(1) if threshold is None else values.sum(1) + (highest == limit)
        return highest, (1 / ties.clamp(min=1)).masked_fill(empty, 0.0)

    shift = top.masked_fill(empty, 0.0)
    if average and gamma < SMALL_GAMMA:
        less = (
            torch.expm1((values - shift[:, None]) * gamma)
            .masked_fill_(values == -math.inf, 0.0)
            .sum(1)
        )
        spread = less if threshold is None else less + torch.expm1((limit - shift) * gamma)
        result = shift + torch.log1p(spread / number) / gamma
        share = torch.exp((shift - result) * gamma) / number
        values.sub_(shift[:, None]).mul_(gamma).exp_()
        return result.masked_fill(empty & (threshold is None), -math.inf), share.masked_fill(
            empty, 0.0
        )

    # softmax of an empty row is NaN; these weights are multiplied by 0
    values[:, 0].masked_fill_(empty, 0.0)
    torch.softmax(values.mul_(gamma), 1, out=values)
    # the largest weight is 1 / Σ e^{γ (a − top)}
    logarithm = (shift * gamma - values.amax(1).log()).masked_fill(empty, -math.inf)
    share = (~empty).to(values.dtype)
    if threshold is not None:
        alone = logarithm
        logarithm = torch.logaddexp(alone, torch.full_like(alone, limit * gamma))
        share = torch.exp(alone - logarithm)
    return ((logarithm - number.log()) if average else logarithm) / gamma, share


def gap_of_rows(block: Tensor, pairs: Pairs, first: int, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the gaps of a block of anchors; the derivative overwrites their similarities.

    Args:
        block: (n, R) similarities of the anchors from `first` on.
        pairs: the positive and negative pairs.
        first: index of the first anchor.
        rule: parameters of the gap.

    Returns:
        The gaps (n,), 0 where undefined, and a mask (n,) of the defined ones. A gap is defined if
        the anchor has a pair, and at least one on each side without a threshold.
    """
    last = first + len(block)
    place, member = pairs.positives(first, last)
    positive = block.gather(1, place).neg_().masked_fill_(~member, -math.inf)
    if isinstance(pairs, LabelPairs):
        same, within = pairs.same.rows(first, last)
        row, step = within.nonzero(as_tuple=True)
        block[row, same[row, step]] = -math.inf
        negative, negatives = block, block.shape[1] - pairs.same.count[first:last]
    else:
        far, real = pairs.negative.rows(first, last)
        negative = block.gather(1, far).masked_fill_(~real, -math.inf)
        negatives = pairs.negative.count[first:last]
    positives = member.sum(1)

    if rule.epsilon is not None:
        positives, negatives = _mine(positive, negative, rule.epsilon)
    near, share = soft_maximum(
        positive, positives, rule.gamma1, _negated(rule.positive_threshold), rule.average
    )
    most, push = soft_maximum(
        negative, negatives, rule.gamma2, rule.negative_threshold, rule.average
    )
    defined = (near > -math.inf) & (most > -math.inf) & (positives + negatives > 0)

    negative.mul_((push * defined)[:, None])
    if negative is not block:
        row, step = real.nonzero(as_tuple=True)
        block.zero_()[row, far[row, step]] = negative[row, step]
    row, step = member.nonzero(as_tuple=True)
    pull = positive[row, step] * (share * defined)[row]
    block.index_put_((row, place[row, step]), -pull, accumulate=True)
    return torch.where(defined, near + most, 0.0), defined


def _mine(positive: Tensor, negative: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Set to −∞ the pairs that the Multi-Similarity miner drops; return how many are left.

    A positive is kept if its similarity minus ε is below that of the most similar negative, a
    negative if its similarity plus ε is above that of the least similar positive. `positive` holds
    negated similarities.
    """
    none = positive.new_full((len(positive),), -math.inf)
    least = -(positive.amax(1) if positive.shape[1] else none)
    most = negative.amax(1) if negative.shape[1] else none
    positive.masked_fill_(-positive >= (most + epsilon)[:, None], -math.inf)
    # subtraction with a scalar threshold is four times as fast as comparing and masking
    border = (least - epsilon)[:, None]
    torch.threshold_(negative.sub_(border), 0.0, -math.inf)
    kept = (torch.sign(negative).sum(1) + negative.shape[1]) / 2
    negative.add_(border.masked_fill(border == math.inf, 0.0))
    return (positive > -math.inf).sum(1), kept


def _negated(threshold: float | None) -> float | None:
    return None if threshold is None else -threshold


def _blocks(shape: tuple[int, int]) -> list[tuple[int, int]]:
    step = max(1, BLOCK // max(shape[1], 1))
    # without anchors there is one empty block
    return [(first, min(first + step, shape[0])) for first in range(0, max(shape[0], 1), step)]


class _GapOfSimilarities(torch.autograd.Function):
    """Similarities (B, R) → gaps (B,) and the mask of defined ones (B,)."""

    @staticmethod
    def forward(ctx: Any, similarity: Tensor, pairs: Pairs, rule: Rule) -> tuple[Tensor, Tensor]:
        weights = similarity.clone(memory_format=torch.contiguous_format)
        parts = [gap_of_rows(weights[i:j], pairs, i, rule) for i, j in _blocks(pairs.shape)]
        ctx.save_for_backward(weights)
        gaps, defined = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(defined)
        return gaps, defined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        return weights * gradient[:, None], None, None


class _GapOfCosines(torch.autograd.Function):
    """Embeddings (B, C) and (R, C), or one batch → gaps of cosines (B,) and their mask (B,)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, reference: Tensor | None, pairs: Pairs, rule: Rule
    ) -> tuple[Tensor, Tensor]:
        query, lengths = _unit(query)
        reference, reference_lengths = (None, None) if reference is None else _unit(reference)
        columns = query if reference is None else reference
        weights = query.new_empty(pairs.shape)
        parts = []
        for i, j in _blocks(pairs.shape):
            torch.mm(query[i:j], columns.T, out=weights[i:j])
            parts.append(gap_of_rows(weights[i:j], pairs, i, rule))
        ctx.save_for_backward(query, lengths, reference, reference_lengths, weights)
        gaps, defined = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(defined)
        return gaps, defined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        query, lengths, reference, reference_lengths, weights = ctx.saved_tensors
        scale = gradient[:, None]
        rows = (weights @ (query if reference is None else reference)).mul_(scale)
        columns = rows if reference is None else torch.zeros_like(reference)
        for i, j in _blocks((len(query), query.shape[1])):
            columns.addmm_(weights[i:j].T, query[i:j] * scale[i:j])
        if reference is None:
            return _through_unit(rows, query, lengths), None, None, None
        return (
            _through_unit(rows, query, lengths),
            _through_unit(columns, reference, reference_lengths),
            None,
            None,
        )


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale rows to length 1 as F.normalize does; return them and their lengths (B, 1)."""
    lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(SHORTEST)
    return x / lengths, lengths


def _through_unit(gradient: Tensor, unit: Tensor, lengths: Tensor) -> Tensor:
    """Turn the gradient by unit vectors into that by the vectors, in place and in blocks."""
    for i, j in _blocks((len(unit), unit.shape[1])):
        along = torch.einsum("bc,bc->b", gradient[i:j], unit[i:j])[:, None]
        # rows shorter than `SHORTEST` were divided by a constant
        gradient[i:j].addcmul_(
            unit[i:j], along.masked_fill_(lengths[i:j] <= SHORTEST, 0.0), value=-1
        )
    return gradient.div_(lengths)


def gap_of_similarities(similarity: Tensor, pairs: Pairs, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return each anchor's gap (B,) and the mask of defined gaps, from similarities (B, R).

    Undefined gaps are 0. The gaps can be differentiated once, not twice.
    """
    gaps: tuple[Tensor, Tensor] = _GapOfSimilarities.apply(similarity, pairs, rule)
    return gaps


def gap_of_cosines(
    query: Tensor, reference: Tensor | None, pairs: Pairs, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Return each anchor's gap and the mask from the embeddings' cosines.

    Memory holds one B × R matrix and the unit vectors. A `reference` of `None` compares the batch
    with itself.
    """
    gaps: tuple[Tensor, Tensor] = _GapOfCosines.apply(query, reference, pairs, rule)
    return gaps
