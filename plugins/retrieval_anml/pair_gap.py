"""The gap between the positive and the negative neighbourhood of an anchor.

For similarities s (larger is closer) and an anchor with positives S and negatives D, the gap is

    x = 1/γ₁ · log( [e^{−γ₁ p} + Σ_S e^{−γ₁ s}] / (|S| + 1) )
      + 1/γ₂ · log( [e^{γ₂ q} + Σ_D e^{γ₂ s}] / (|D| + 1) )

with thresholds p and q (Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning", equation 22
in similarities; γ₁ is the absolute value of the paper's negative γ₁). The first term is a soft form
of minus the smallest similarity of the positives. The second term is a soft form of the largest
similarity of the negatives. A threshold can be left out, together with the 1 that it adds to the
count. Sums can replace the means (equation 25).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from retrieval.helpers import listed_pairs
from torch import Tensor

Pairs = tuple[Tensor, Tensor]
"""Masks (B, R) of the positives and of the negatives of anchors."""
SMALL_GAMMA = 0.5
"""Below this γ, the logarithm of a mean of exponentials is computed with expm1, since dividing by γ
would magnify its rounding error."""


def pairs_of_labels(labels: Tensor, ref_labels: Tensor | None) -> Pairs:
    """Return all pairs except those of an item with itself; equal labels make a positive pair.

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
    """Return the pairs of a miner. Duplicates count once.

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
        gamma1: γ₁ ≥ 0 of the positives: 0 takes their mean, infinity the least similar one.
        gamma2: γ₂ ≥ 0 of the negatives: 0 takes their mean, infinity the most similar one.
        positive_threshold: p, a similarity added to the positives, or `None`.
        negative_threshold: q, a similarity added to the negatives, or `None`.
        average: `True` takes means of exponentials, `False` sums, which need γ > 0.
        epsilon: margin ε of the Multi-Similarity miner, which selects the pairs. `None` keeps all.
    """

    gamma1: float
    gamma2: float
    positive_threshold: float | None
    negative_threshold: float | None
    average: bool = True
    epsilon: float | None = None


def gaps(similarity: Tensor, pairs: Pairs, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the gaps (B,) of anchors, 0 where undefined, and the mask (B,) of defined gaps.

    A gap is defined if the anchor has a pair, has a positive or p, and has a negative or q.

    Args:
        similarity: (B, R).
        pairs: the masks of positives and negatives.
        rule: parameters of the gap, including the thresholds p and q.
    """
    positive, negative = pairs
    p = rule.positive_threshold
    if rule.epsilon is not None:
        positive, negative = _mined(similarity.detach(), positive, negative, rule.epsilon)
    sides = (
        (-similarity, positive, rule.gamma1, p if p is None else -p),
        (similarity, negative, rule.gamma2, rule.negative_threshold),
    )
    total = similarity.sum(1) * 0
    defined = (positive | negative).any(1)
    for values, mask, gamma, threshold in sides:
        if threshold is not None:
            values = torch.nn.functional.pad(values, (0, 1), value=threshold)
            mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        has_pair = mask.any(1)
        total = total + soft_maximum(values, mask, gamma, rule.average).masked_fill(~has_pair, 0)
        defined = defined & has_pair
    return total.masked_fill(~defined, 0), defined


def soft_maximum(values: Tensor, mask: Tensor, gamma: float, average: bool) -> Tensor:
    """Return 1/γ · log(mean or sum of e^{γ a}) over the masked values of each row (B,).

    This is equation 12 with the signs of a and b reversed. Its limits are the mean at γ = 0 and the
    maximum at γ = ∞. The result of a row without values is finite, but meaningless.
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
        differences = torch.expm1(((values - top) * gamma).masked_fill(~mask, 0))
        return top.squeeze(1) + torch.log1p(differences.sum(1) / count) / gamma
    logarithm = torch.logsumexp((values * gamma).masked_fill(~mask, lowest), 1)
    return ((logarithm - count.log()) if average else logarithm) / gamma


def _mined(
    similarity: Tensor, positive: Tensor, negative: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the pairs that the Multi-Similarity miner keeps.

    A positive is kept if its similarity minus ε is below that of the most similar negative. A
    negative is kept if its similarity plus ε is above that of the least similar positive.
    """
    if similarity.shape[1] == 0:
        return positive, negative
    least = similarity.masked_fill(~positive, math.inf).amin(1, keepdim=True)
    most = similarity.masked_fill(~negative, -math.inf).amax(1, keepdim=True)
    return positive & (similarity < most + epsilon), negative & (similarity > least - epsilon)
