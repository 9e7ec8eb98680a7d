"""The gap between an anchor's positive and negative neighbourhoods, and its derivative.

With similarities s, larger is closer, positives S and negatives D of an anchor:

    x = 1/γ₁ · log( [e^{−γ₁ p} + Σ_S e^{−γ₁ s}] / (|S| + 1) )
      + 1/γ₂ · log( [e^{γ₂ q} + Σ_D e^{γ₂ s}] / (|D| + 1) )

(Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 22 in similarities; γ₁ is
the size of the paper's negative γ₁.) The first term is, softly, minus the least similarity of the
positives, the second the greatest of the negatives. A threshold may be left out, with its 1 in the
count; sums may replace the means (equation 25).

The derivative of x is a row of softmax weights. It is made together with x and in the place of the
similarities: autograd would keep some ten matrices of the batch's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from retrieval.plugin import listed_pairs
from torch import Tensor
from torch.autograd.function import once_differentiable

# similarities worked on at a time: what a processor's cache holds
BLOCK = 1 << 18
# what F.normalize divides by at the least
SHORTEST = 1e-12
# below, the logarithm of a mean of exponentials comes from exponentials less 1: dividing its
# rounding by γ would show
SMALL_GAMMA = 0.5


@dataclass
class Columns:
    """Some references of each anchor.

    Attributes:
        values: (P,) indices of references, anchor after anchor; anchors of one label share theirs.
        start: (B,) where an anchor's begin in it.
        count: (B,) how many they are.
    """

    values: Tensor
    start: Tensor
    count: Tensor

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return these anchors' columns (last − first, M), padded, and False for padding."""
        start, count = self.start[first:last, None], self.count[first:last, None]
        step = torch.arange(int(count.max()) if count.numel() else 0, device=count.device)
        member = step < count
        return self.values[torch.where(member, start + step, 0)], member


class LabelPairs:
    """Every pair: the same label is positive, another label negative.

    Args:
        labels: (B,) of the anchors.
        ref_labels: (R,) of what they are compared with; None: the batch itself, where no item is
            its own positive.
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
    """The pairs that a miner listed, each counted once however often it is listed.

    Args:
        indices: three or four index tensors, see `retrieval.plugin.Miner`.
        shape: B and R.
        device: where the embeddings are.

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
    """What turns an anchor's similarities into its gap.

    Attributes:
        gamma1: ≥ 0, of the positives: 0 is their mean, infinity the least similar.
        gamma2: ≥ 0, of the negatives: 0 is their mean, infinity the most similar.
        positive_threshold: p, a similarity that joins the positives, or None.
        negative_threshold: q, a similarity that joins the negatives, or None.
        average: means of exponentials; otherwise sums, which take 0 < γ.
        epsilon: keep only the pairs of the Multi-Similarity miner with this margin; None keeps all.
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
    """Return 1/γ · log(mean of e^{γ a}) of each row, or of the sum, and its derivative.

    That is equation 12 with the signs of a and b turned; at γ = 0 its limit, the mean, at infinity
    the maximum.

    Args:
        values: (B, M), −∞ where it does not count; is overwritten by the derivative.
        count: (B,), how many count.
        gamma: ≥ 0.
        threshold: counts as one more value of each row; or None.
        average: mean or sum of the exponentials.

    Returns:
        (B,), −∞ for a row where nothing counts, and (B,): multiply the derivative by this.
    """
    number = (count if threshold is None else count + 1).to(values.dtype).clamp(min=1)
    if values.shape[1] == 0:
        constant = -math.inf if threshold is None else threshold
        # one exponential: its sum is its mean
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

    # softmax of nothing is NaN; these weights are multiplied by 0
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
    """Return the gap of each anchor of a block, and overwrite its similarities by the derivative.

    Args:
        block: (n, R), similarities of the anchors from `first` on.
        pairs: which count.
        first: index of the first anchor.
        rule: how.

    Returns:
        The gaps (n,), 0 where undefined, and bool (n,) where they are defined: where the anchor has
            a pair, and one on
        either side that has no threshold.
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

    Positives, which come with their sign turned, are kept where the most similar negative is nearer
    than ε beyond them; negatives where the least similar positive is less than ε beyond them.
    """
    none = positive.new_full((len(positive),), -math.inf)
    least = -(positive.amax(1) if positive.shape[1] else none)
    most = negative.amax(1) if negative.shape[1] else none
    positive.masked_fill_(-positive >= (most + epsilon)[:, None], -math.inf)
    # a subtraction and a scalar threshold: comparing and filling by a mask takes four times as long
    border = (least - epsilon)[:, None]
    torch.threshold_(negative.sub_(border), 0.0, -math.inf)
    kept = (torch.sign(negative).sum(1) + negative.shape[1]) / 2
    negative.add_(border.masked_fill(border == math.inf, 0.0))
    return (positive > -math.inf).sum(1), kept


def _negated(threshold: float | None) -> float | None:
    return None if threshold is None else -threshold


def _blocks(shape: tuple[int, int]) -> list[tuple[int, int]]:
    step = max(1, BLOCK // max(shape[1], 1))
    # one empty block where there is no anchor at all
    return [(first, min(first + step, shape[0])) for first in range(0, max(shape[0], 1), step)]


class _GapOfSimilarities(torch.autograd.Function):
    """(B, R) similarities → (B,) gaps, (B,) defined."""

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
    """Cosines of (B, C) with (R, C), or of a batch with itself → (B,) gaps, (B,) defined."""

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
    """Return rows of length 1, as F.normalize does, and their lengths (B, 1)."""
    lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(SHORTEST)
    return x / lengths, lengths


def _through_unit(gradient: Tensor, unit: Tensor, lengths: Tensor) -> Tensor:
    """Overwrite a unit vector's gradient by its vector's, in blocks."""
    for i, j in _blocks((len(unit), unit.shape[1])):
        along = torch.einsum("bc,bc->b", gradient[i:j], unit[i:j])[:, None]
        # a row that is too short was divided by a constant
        gradient[i:j].addcmul_(
            unit[i:j], along.masked_fill_(lengths[i:j] <= SHORTEST, 0.0), value=-1
        )
    return gradient.div_(lengths)


def gap_of_similarities(similarity: Tensor, pairs: Pairs, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return each anchor's gap and where it is defined, from similarities.

    Gaps are 0 where undefined; differentiable once.
    """
    gaps: tuple[Tensor, Tensor] = _GapOfSimilarities.apply(similarity, pairs, rule)
    return gaps


def gap_of_cosines(
    query: Tensor, reference: Tensor | None, pairs: Pairs, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Return the same from cosines, in memory of one B × R matrix and the unit vectors.

    `reference` is None for the batch itself.
    """
    gaps: tuple[Tensor, Tensor] = _GapOfCosines.apply(query, reference, pairs, rule)
    return gaps
