"""Losses of a matrix of pairs, row by row, whose gradient is written down with the value; see
`blocks.by_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_pml.blocks import Fused
from retrieval_pml.pairs import Pairs

LEAST = 2e-38
"""Smaller numbers become 0: processors take 60 times as long for those below 1e-38."""


def multi_similarity(alpha: float, beta: float, base: float, sign: int) -> Fused:
    """Return the fused Multi-Similarity loss; see `masked.MultiSimilarityLoss`.

    Args:
        alpha: of positives.
        beta: of negatives.
        base: the similarity from which a pair counts little.
        sign: 1 of similarities, −1 of distances.
    """

    def fused(mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor) -> Tensor:
        torch.mul(mat, beta * sign, out=slopes)
        row, column = pairs.positives(rows)
        place = row * mat.shape[1] + column  # lists of places are quicker than pairs of lists
        pull = mat.reshape(-1).index_select(0, place).sub_(base).mul_(-alpha * sign)
        pairs.leave_negatives(slopes, rows, torch.finfo(mat.dtype).min)
        shares, every = _softmax(slopes)
        every -= beta * base * sign
        torch.hardshrink(shares.mul_((torch.sigmoid(every) * sign).unsqueeze(1)), LEAST, out=slopes)
        highest = torch.zeros_like(every).scatter_reduce_(
            0, row, pull, "amax"
        )  # with the 1 of log(1 + Σ exp)
        pull.sub_(highest.index_select(0, row)).exp_()
        total = torch.exp(-highest).index_add_(0, row, pull)
        slopes.view(-1).index_add_(0, place, pull.div_(total.index_select(0, row)), alpha=-sign)
        return (
            torch.logaddexp(every, torch.zeros_like(every)) / beta
            + (highest + total.log_()) / alpha
        )

    return fused


def circle(op: float, on: float, delta_p: float, delta_n: float, gamma: float) -> Fused:
    """Return the fused circle loss of similarities; see `masked.CircleLoss`.

    Args:
        op: O_p of the paper, as the next ones.
        on: O_n.
        delta_p: Δ_p.
        delta_n: Δ_n.
        gamma: γ.
    """

    def fused(mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor) -> Tensor:
        weights = (mat - on).relu_().mul_(gamma)
        torch.sub(mat, delta_n, out=slopes).mul_(weights)
        lowest = torch.finfo(mat.dtype).min
        pairs.leave_negatives(slopes, rows, lowest)
        row, column = pairs.positives(rows)
        place = row * mat.shape[1] + column
        some = torch.zeros(len(mat), dtype=torch.bool, device=mat.device).index_fill_(0, row, True)
        shares, every = _softmax(slopes)
        some &= every > lowest / 2
        near = mat.reshape(-1).index_select(0, place)
        weight = (op - near).relu_().mul_(-gamma)
        pull = weight * near.sub_(delta_p)
        highest = mat.new_full((len(mat),), -torch.inf).scatter_reduce_(0, row, pull, "amax")
        highest.masked_fill_(~some, 0)
        pull.sub_(highest.index_select(0, row)).exp_()
        total = torch.zeros_like(highest).index_add_(0, row, pull).masked_fill_(~some, 1)
        both = every + highest + total.log()
        share = torch.sigmoid(both).masked_fill_(~some, 0)
        torch.hardshrink(shares.mul_(weights).mul_(share.unsqueeze(1)), LEAST, out=slopes)
        slopes.view(-1).index_add_(
            0, place, weight.mul_(pull).mul_((share / total).index_select(0, row))
        )
        return torch.nn.functional.softplus(both).masked_fill_(~some, 0)

    return fused


def votes(rate: float) -> Fused:
    """Return the fused cross-entropy over labels of which each pair votes for one; see
    `corrected_pairs.InstanceLoss` and `LogNCA`.

    Args:
        rate: what a pair's number is multiplied by: γ, or less than 0 for distances.
    """

    def fused(mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor) -> tuple[Tensor, Tensor]:
        torch.mul(mat, rate, out=slopes)
        row, column = pairs.positives(rows)
        flat, place = (
            slopes.view(-1),
            row * mat.shape[1] + column,
        )  # lists of places are quicker than pairs of lists
        own = flat.index_select(0, place)
        if pairs.own is not None:
            slopes.diagonal(pairs.own + (rows.start or 0)).fill_(-torch.inf)
        shares, every = _softmax(slopes)
        highest = mat.new_full((len(mat),), -torch.inf).scatter_reduce_(0, row, own, "amax")
        own.sub_(highest.index_select(0, row)).exp_()
        total = torch.zeros_like(highest).index_add_(0, row, own)
        some = total > 0
        torch.hardshrink(shares.mul_(some.to(mat.dtype).mul_(rate).unsqueeze(1)), LEAST, out=slopes)
        flat.index_add_(0, place, own.div_(total.index_select(0, row)), alpha=-rate)
        return (every - highest - total.log_()).masked_fill_(~some, 0), some

    return fused


def _softmax(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's softmax, and log Σ exp: the largest exponent, and the logarithm of its
    share.
    """
    shares = torch.softmax(exponents, 1)
    return shares, exponents.amax(1) - shares.amax(1).log_()


def exp_(exponents: Tensor) -> Tensor:
    """Exponentiate in place, and return it; what is below e⁻⁸⁷ becomes 0; see `LEAST`."""
    return torch.threshold_(exponents.clamp_(min=-87).exp_(), LEAST, 0.0)
