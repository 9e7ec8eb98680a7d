"""Losses of a matrix of pairs, row by row, whose gradient is written down with the value; see `blocks.by_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from retrieval_pml.blocks import Fused


def multi_similarity(alpha: float, beta: float, base: float, sign: int) -> Fused:
    """Return the fused Multi-Similarity loss; see `masked.MultiSimilarityLoss`.

    Args:
        alpha: of positives.
        beta: of negatives.
        base: the similarity from which a pair counts little.
        sign: 1 of similarities, −1 of distances.
    """

    def fused(mat: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        slopes = (mat - base).mul_(beta * sign).masked_fill_(~negative, -torch.inf)
        top = slopes.amax(1, keepdim=True).clamp_(min=0)  # with the 1 of log(1 + Σ exp)
        slopes.sub_(top).exp_()
        sums = slopes.sum(1, keepdim=True) + torch.exp(-top)
        losses = ((top + sums.log()) / beta).squeeze(1)
        slopes.mul_(sign / sums)
        row, column = torch.where(positive)
        pull = (base - mat[row, column]).mul_(alpha * sign)
        highest = mat.new_zeros(len(mat)).scatter_reduce_(0, row, pull, "amax")
        pull.sub_(highest[row]).exp_()
        total = torch.exp(-highest).index_add_(0, row, pull)
        slopes[row, column] -= sign * pull / total[row]
        return losses + (highest + total.log()) / alpha, slopes

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

    def fused(mat: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        weights = (mat - on).relu_().mul_(gamma)
        slopes = (mat - delta_n).mul_(weights).masked_fill_(~negative, -torch.inf)
        some = negative.any(1) & positive.any(1)
        top = slopes.amax(1, keepdim=True).masked_fill_(~some.unsqueeze(1), 0)
        slopes.sub_(top).exp_()
        sums = slopes.sum(1, keepdim=True).masked_fill_(~some.unsqueeze(1), 1)
        row, column = torch.where(positive)
        near = mat[row, column]
        weight = (op - near).relu_().mul_(-gamma)
        pull = weight * (near - delta_p)
        highest = mat.new_full((len(mat),), -torch.inf).scatter_reduce_(0, row, pull, "amax")
        highest.masked_fill_(~some, 0)
        pull.sub_(highest[row]).exp_()
        total = torch.zeros_like(highest).index_add_(0, row, pull).masked_fill_(~some, 1)
        both = top.squeeze(1) + sums.log().squeeze(1) + highest + total.log()
        share = torch.sigmoid(both).masked_fill_(~some, 0)
        slopes.mul_(weights).mul_(share.unsqueeze(1) / sums)
        slopes[row, column] += weight * pull * (share / total)[row]
        return torch.nn.functional.softplus(both).masked_fill_(~some, 0), slopes

    return fused
