"""Losses that are sums over single pairs, measured in blocks of rows, and the signal-to-noise
distance in memory of N².
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import distances, losses
from retrieval.model.rows import Sums, summed
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.blocks import ENTRIES, blocks, rows_and_pairs
from retrieval_pml.common import EveryPair, PreciseLoss, reduced
from retrieval_pml.masked import Whole, bounds
from retrieval_pml.matrices import similarities
from retrieval_pml.pairs import Pairs

_NAMES = ("pos_loss", "neg_loss")


class SumsOfPairs(Whole):
    """A loss with a part of its positive pairs and one of its negative pairs; the negative ones are
    never listed.
    """

    def whole(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return the losses by name, the negatives' reduced; None where it has to be made of single
        pairs.
        """
        this: Any = self
        limits = bounds(self.reducer_of("neg_loss"))
        if limits is None:
            return None
        pairs = Pairs(labels, ref_labels)
        anchor, positive = pairs.positives()
        if not int(pairs.counts()[1].sum()) and not len(anchor):
            return this.zero_losses()
        mat = similarities(this.distance, embeddings, ref_emb)
        low, high, mean = limits

        def plain(
            mat: Tensor, _: Tensor, negative: Tensor, *still: Tensor
        ) -> tuple[Tensor, Tensor]:
            loss = self.pushed(mat, *(each.unsqueeze(1) for each in still))
            kept = negative
            if low is not None:
                kept = kept & (loss > low)
            if high is not None:
                kept = kept & (loss < high)
            return (loss * kept).sum(1), kept.sum(1)

        def fused(
            mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor, *still: Tensor
        ) -> tuple[Tensor, ...]:
            loss, *of_still = self.pushed_(mat, pairs, rows, slopes, *still)
            if low is None:
                return loss.sum(1), pairs.counts()[1][rows], *of_still
            kept = loss > low
            return loss.sum(1), kept.sum(1), *of_still

        # what the fused form leaves at 0 is not counted, so that another bound needs the masks
        written = high is None and low in (None, 0)
        still = self.still(mat, pairs)
        each, counts, near = rows_and_pairs(
            mat, pairs, (anchor, positive), plain, *still, fused=fused if written else None
        )
        found = {name: this.zero_loss() for name in _NAMES}
        if len(anchor):
            pull = self.pulled(near)
            found["pos_loss"] = {
                "losses": pull,
                "indices": (anchor, positive),
                "reduction_type": "pos_pair",
            }
        total, counted = each.sum(), counts.sum()
        if isinstance(this.reducer, Sums):
            found["neg_loss"] = summed(total, counted)
        else:
            found["neg_loss"] = reduced(total / counted.clamp(min=1) if mean else total)["loss"]
        return found

    def pulled(self, near: Tensor) -> Tensor:
        """Return the losses of positive pairs (P,) by their distances or similarities."""
        raise NotImplementedError(f"{type(self).__name__} must define pulled(near)")

    def pushed(self, near: Tensor, *still: Tensor) -> Tensor:
        """Return the losses of negative pairs, of any shape."""
        raise NotImplementedError(f"{type(self).__name__} must define pushed(near, *still)")

    def pushed_(
        self, mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor, *still: Tensor
    ) -> Any:
        """Return the negative pairs' losses (R, M), 0 of others, and their sums' derivatives by
        each of `still`; see `blocks.by_rows`.

        Args:
            mat: (R, M) some rows.
            pairs: all rows' pairs.
            rows: which rows these are.
            slopes: (R, M) is filled with the losses' derivatives.
            still: these rows of what `still` gives, each (R,).
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define pushed_(mat, pairs, rows, slopes)"
        )

    def still(self, mat: Tensor, pairs: Pairs) -> list[Tensor]:
        """Return what `pushed` needs of all pairs, each (N,)."""
        return []


class ContrastiveLoss(SumsOfPairs, PreciseLoss, EveryPair, losses.ContrastiveLoss):
    """Upstream's, by `SumsOfPairs`."""

    rows, rows_by_labels = "anchors", True

    def pulled(self, near: Tensor) -> Tensor:
        """Return the losses of positive pairs (P,) by their distances or similarities."""
        return self.pos_calc(near, self.pos_margin)  # type: ignore[no-any-return]

    def pushed(self, near: Tensor, *still: Tensor) -> Tensor:
        """Return the losses of negative pairs, of any shape."""
        return self.neg_calc(near, self.neg_margin)  # type: ignore[no-any-return]

    def pushed_(
        self, mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor, *still: Tensor
    ) -> Any:
        """Return the negative pairs' losses (R, M), 0 of others; see `SumsOfPairs`."""
        sign = 1 if self.distance.is_inverted else -1
        over = (mat - self.neg_margin).mul_(sign)
        pairs.leave_negatives(over, rows, 0)
        over.relu_()
        torch.mul(over > 0, sign, out=slopes)
        return (over,)


class SignalToNoiseRatioContrastiveLoss(ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss):
    """Upstream's, by `SumsOfPairs`."""


class IntraPairVarianceLoss(SumsOfPairs, PreciseLoss, EveryPair, losses.IntraPairVarianceLoss):
    """Upstream's, by `SumsOfPairs`."""

    def pulled(self, near: Tensor) -> Tensor:
        """Return the losses of positive pairs (P,) by their distances or similarities."""
        closer = self.distance.is_inverted
        return F.relu(self.variance_with_eps(near, near.mean(), self.pos_eps, closer)) ** 2

    def pushed(self, near: Tensor, *still: Tensor) -> Tensor:
        """Return the losses of negative pairs, of any shape; `still` is the mean of all of them."""
        farther = not self.distance.is_inverted
        return F.relu(self.variance_with_eps(near, still[0], self.neg_eps, farther)) ** 2

    def pushed_(
        self, mat: Tensor, pairs: Pairs, rows: slice, slopes: Tensor, *still: Tensor
    ) -> Any:
        """Return the negative pairs' losses (R, M), 0 of others, and their sums' derivatives by the
        mean (R,); see `SumsOfPairs`.
        """
        sign = 1 if self.distance.is_inverted else -1
        share = 1 + sign * self.neg_eps
        over = (mat - share * still[0].unsqueeze(1)).mul_(sign)
        pairs.leave_negatives(over, rows, 0)
        over.relu_()
        torch.mul(over, 2 * sign, out=slopes)
        return over.square_(), slopes.sum(1).mul_(-share)

    def still(self, mat: Tensor, pairs: Pairs) -> list[Tensor]:
        """Return the mean of all negative pairs, for each row."""
        mean: Tensor = _MeanOfNegatives.apply(mat, pairs)
        return [mean.expand(len(mat))]


class _MeanOfNegatives(torch.autograd.Function):
    """The mean of all negative pairs' numbers; nothing is kept for its gradient."""

    @staticmethod
    def forward(ctx: Any, mat: Tensor, pairs: Pairs) -> Tensor:
        ctx.made = pairs, mat.shape, int(pairs.counts()[1].sum())
        total = mat.new_zeros(())
        for part in blocks(*mat.shape):
            rows = mat[part].clone()
            pairs.leave_negatives(rows, part, 0)
            total += rows.sum()
        return total.div_(max(ctx.made[2], 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        pairs, shape, count = ctx.made
        each = (gradient / max(count, 1)).expand(shape)
        if torch.is_grad_enabled():  # the gradient will be differentiated
            return each * pairs.of(slice(None))[1], None
        found = each.contiguous()
        for part in blocks(*shape):
            pairs.leave_negatives(found[part], part, 0)
        return found, None


class SNRDistance(distances.SNRDistance):
    """Upstream's, by a product of matrices, where upstream keeps the difference of each pair of
    embeddings.
    """

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return var(query − reference) / var(query), (N, M)."""
        centred = [x - x.mean(1, keepdim=True) for x in (query_emb, ref_emb)]
        apart: Tensor = _SquaredDistances.apply(*centred)
        return apart / centred[0].square().sum(1, keepdim=True)


class _SquaredDistances(torch.autograd.Function):
    """‖xᵢ − yⱼ‖², (N, M); of vectors that are almost the same, by their difference."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        lengths = x.square().sum(1, keepdim=True), y.square().sum(1)
        found = torch.addmm(lengths[1], x, y.T, alpha=-2).add_(lengths[0])
        row, column = torch.where(found < 1e-2 * lengths[0])
        step = max(1, ENTRIES // x.shape[1])
        for part in (slice(k, k + step) for k in range(0, len(row), step)):
            found[row[part], column[part]] = (x[row[part]] - y[column[part]]).square().sum(1)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        of_x = gradient.sum(1, keepdim=True) * x - gradient @ y
        of_y = gradient.sum(0).unsqueeze(1) * y - gradient.T @ x
        return 2 * of_x, 2 * of_y
