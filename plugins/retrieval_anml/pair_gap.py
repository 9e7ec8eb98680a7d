"""The gap between an anchor's positive and negative neighbourhoods, and its derivative.

For similarities s (larger is closer) and an anchor's positives S and negatives D, the gap is

    x = 1/γ₁ · log( [e^{−γ₁ p} + Σ_S e^{−γ₁ s}] / (|S| + 1) )
      + 1/γ₂ · log( [e^{γ₂ q} + Σ_D e^{γ₂ s}] / (|D| + 1) )

(Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 22 in similarities; γ₁ is
the absolute value of the paper's negative γ₁.) The first term is a soft form of minus the smallest
similarity of the positives, the second of the largest similarity of the negatives. A threshold may
be left out, together with its 1 in the count. Sums may replace the means (equation 25).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from retrieval.plugin import listed_pairs
from torch import Tensor

Pairs = tuple[Tensor, Tensor]
"""Masks (B, R) of anchors' positives and of their negatives."""
SMALL_GAMMA = 0.5
"""Below this γ, the logarithm of a mean of exponentials is computed with expm1, because its
rounding error is divided by γ."""


def pairs_of_labels(labels: Tensor, ref_labels: Tensor | None) -> Pairs:
    """Return all pairs, positive where labels are equal; no item is its own positive.

    Args:
        labels: (B,) labels of the anchors.
        ref_labels: (R,) labels of the references. `None` compares the batch with itself.
    """
    positive = labels[:, None] == (labels if ref_labels is None else ref_labels)
    negative = ~positive
    if ref_labels is None:
        positive.fill_diagonal_(False)
    return positive, negative


def pairs_of_miner(indices: Any, shape: tuple[int, int], device: torch.device) -> Pairs:
    """Return a miner's pairs, in which duplicates count once.

    Raises:
        ValueError: the indices are not three or four tensors, or one is out of range.
    """
    anchor, positive, other, negative = listed_pairs(indices, shape, device)
    masks = torch.zeros(2, *shape, dtype=torch.bool, device=device)
    masks[0, anchor, positive] = True
    masks[1, other, negative] = True
    return masks[0], masks[1]


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


def gaps(similarity: Tensor, pairs: Pairs, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return each anchor's gap (B,), 0 where undefined, and the mask (B,) of defined gaps.

    A gap is defined if the anchor has a pair, and at least one on each side without a threshold.

    Args:
        similarity: (B, R).
        pairs: the masks of positives and negatives.
        rule: parameters of the gap.
    """
    positive, negative = pairs
    if rule.epsilon is not None:
        positive, negative = _mined(similarity.detach(), positive, negative, rule.epsilon)
    sides = (
        (-similarity, positive, rule.gamma1, _negated(rule.positive_threshold)),
        (similarity, negative, rule.gamma2, rule.negative_threshold),
    )
    total, defined = similarity.sum(1) * 0, (positive | negative).any(1)
    for values, mask, gamma, threshold in sides:
        if threshold is not None:
            values = torch.nn.functional.pad(values, (0, 1), value=threshold)
            mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        some = mask.any(1)
        total = total + soft_maximum(values, mask, gamma, rule.average).masked_fill(~some, 0)
        defined = defined & some
    return total.masked_fill(~defined, 0), defined


def soft_maximum(values: Tensor, mask: Tensor, gamma: float, average: bool) -> Tensor:
    """Return 1/γ · log(mean of e^{γ a}) of each row's values in the mask (B,), or with a sum.

    This is equation 12 with the signs of a and b reversed; its limits are the mean at γ = 0 and the
    maximum at γ = ∞. A row without values gives a finite number without a meaning.
    """
    count = mask.sum(1).clamp(min=1).to(values.dtype)
    if values.shape[1] == 0:
        return values.sum(1)
    lowest = torch.finfo(values.dtype).min
    if gamma == 0:
        return (values * mask).sum(1) / count
    if math.isinf(gamma):
        return values.masked_fill(~mask, lowest).amax(1)
    if average and gamma < SMALL_GAMMA:
        top = values.detach().masked_fill(~mask, lowest).amax(1, keepdim=True)
        less = torch.expm1(((values - top) * gamma).masked_fill(~mask, 0))
        return top.squeeze(1) + torch.log1p(less.sum(1) / count) / gamma
    logarithm = torch.logsumexp((values * gamma).masked_fill(~mask, lowest), 1)
    return ((logarithm - count.log()) if average else logarithm) / gamma


def _mined(
    similarity: Tensor, positive: Tensor, negative: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the pairs that the Multi-Similarity miner keeps.

    A positive is kept if its similarity minus ε is below that of the most similar negative, a
    negative if its similarity plus ε is above that of the least similar positive.
    """
    if similarity.shape[1] == 0:
        return positive, negative
    least = similarity.masked_fill(~positive, math.inf).amin(1, keepdim=True)
    most = similarity.masked_fill(~negative, -math.inf).amax(1, keepdim=True)
    return positive & (similarity < most + epsilon), negative & (similarity > least - epsilon)


def _negated(threshold: float | None) -> float | None:
    return None if threshold is None else -threshold
