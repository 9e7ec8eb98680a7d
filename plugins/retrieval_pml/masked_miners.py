"""Miners on masks and in blocks of rows: upstream's pairs and triplets, in upstream's order and of
upstream's draws, without lists of all of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pytorch_metric_learning import miners
from torch import Tensor

from retrieval_pml.blocks import blocks
from retrieval_pml.common import PreciseMiner
from retrieval_pml.matrices import similarities
from retrieval_pml.pairs import Pairs

Triplets = tuple[Tensor, Tensor, Tensor]


class MultiSimilarityMiner(PreciseMiner, miners.MultiSimilarityMiner):
    """Upstream's pairs by each row's extremes, where upstream sorts all rows; they come in the
    order of their columns.
    """

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.plugin.Miner`."""
        mat = similarities(self.distance, embeddings, ref_emb)
        pairs, highest = Pairs(labels, ref_labels), torch.finfo(mat.dtype).max
        if embeddings is ref_emb:
            pairs.own = 0
        found = []
        for rows in blocks(*mat.shape):
            near = (
                -mat[rows] if self.distance.is_inverted else mat[rows].clone()
            )  # smaller is closer
            row, p = pairs.positives(rows)
            of_positives = near[row, p]
            farthest = near.new_full((len(near),), -highest).scatter_reduce_(
                0, row, of_positives, "amax"
            )
            pairs.leave_negatives(near, rows, highest)
            if pairs.own is not None:
                near.diagonal(pairs.own + rows.start).fill_(highest)
            kept = of_positives + self.epsilon > near.amin(1)[row]
            a1, p = row[kept], p[kept]
            a2, n = torch.where(near - self.epsilon < farthest.unsqueeze(1))
            found.append((a1 + rows.start, p, a2 + rows.start, n))
        return tuple(torch.cat(each) for each in zip(*found, strict=True))


class PairMarginMiner(PreciseMiner, miners.PairMarginMiner):
    """Upstream's pairs, found by masks."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.plugin.Miner`."""
        mat = similarities(self.distance, embeddings, ref_emb)
        pairs, found = Pairs(labels, ref_labels), []
        for rows in blocks(*mat.shape):
            positive, negative = pairs.of(rows)
            near = mat[rows]
            if self.distance.is_inverted:
                far, close = near < self.pos_margin, near > self.neg_margin
            else:
                far, close = near > self.pos_margin, near < self.neg_margin
            a1, p = torch.where(positive & far)
            a2, n = torch.where(negative & close)
            found.append((a1 + rows.start, p, a2 + rows.start, n))
        return tuple(torch.cat(each) for each in zip(*found, strict=True))


class TripletMarginMiner(PreciseMiner, miners.TripletMarginMiner):
    """Upstream's triplets, found in blocks of positive pairs: memory of those that are found."""

    def mine(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor
    ) -> Triplets:
        """Return triplets; see `retrieval.plugin.Miner`."""
        mat = similarities(self.distance, embeddings, ref_emb)
        pairs = Pairs(labels, ref_labels)
        anchor, positive = pairs.positives()

        def chosen(a: Tensor, p: Tensor) -> Tensor:
            near = mat[a, p].unsqueeze(1)
            gap: Tensor = near - mat[a] if self.distance.is_inverted else mat[a] - near
            if self.type_of_triplets == "easy":
                found: Tensor = gap > self.margin
                return found
            found = gap <= self.margin
            if self.type_of_triplets == "hard":
                found &= gap <= 0
            elif self.type_of_triplets == "semihard":
                found &= gap > 0
            return found

        return _triplets(chosen, anchor, positive, labels, ref_labels)


class AngularMiner(PreciseMiner, miners.AngularMiner):
    """Upstream's, which requires a normalising distance and then measures embeddings at their own
    length; in blocks of positive pairs.
    """

    def mine(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor
    ) -> Triplets:
        """Return triplets; see `retrieval.plugin.Miner`."""
        unit = self.distance.normalize(embeddings)
        reference = unit if ref_emb is embeddings else self.distance.normalize(ref_emb)
        anchor, positive = Pairs(labels, ref_labels).positives()

        def chosen(a: Tensor, p: Tensor) -> Tensor:
            sides = self.distance.pairwise_distance(unit[a], reference[p]).unsqueeze(1)
            # torch adds this to each difference of a pairwise distance
            heights = torch.cdist((unit[a] + reference[p]) / 2 - 1e-6, reference)
            found: Tensor = torch.atan(sides / (2 * heights)) > self.angle
            return found

        return _triplets(chosen, anchor, positive, labels, ref_labels)


def _triplets(
    chosen: Any, anchor: Tensor, positive: Tensor, labels: Tensor, ref_labels: Tensor
) -> Triplets:
    """Return the triplets (T,) of positive pairs (P,) and those of their negatives that `chosen`
    says, of some pairs, as a mask (K, M).
    """
    found: list[tuple[slice, Tensor, Tensor]] = []
    for part in blocks(len(anchor), len(ref_labels)):
        a, p = anchor[part], positive[part]
        kept = chosen(a, p) & (labels[a].unsqueeze(1) != ref_labels.unsqueeze(0))
        pair, negative = torch.where(kept)
        found.append((part, pair.int(), negative.int()))
    # they are the most of the memory: half of it while they are collected, and no copy of the whole
    made = torch.empty(
        3, sum(len(pair) for _, pair, _ in found), dtype=torch.int64, device=labels.device
    )
    start = 0
    found.reverse()
    while found:
        part, pair, negative = found.pop()
        of_part = made[:, start : start + len(pair)]
        torch.index_select(anchor[part], 0, pair, out=of_part[0])
        torch.index_select(positive[part], 0, pair, out=of_part[1])
        of_part[2] = negative
        start += len(pair)
    a, p, n = made
    return a, p, n


class BatchEasyHardMiner(PreciseMiner, miners.BatchEasyHardMiner):
    """Upstream's pairs, found by masks."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.plugin.Miner`."""
        mat = similarities(self.distance, embeddings, ref_emb)
        pairs, whole = Pairs(labels, ref_labels), self.ALL
        of_positives: list[tuple[Tensor, Tensor]] = []
        of_negatives: list[tuple[Tensor, Tensor]] = []
        both: list[tuple[Tensor, Tensor, Tensor]] = []
        for rows in blocks(*mat.shape):
            near, (positive, negative) = mat[rows], pairs.of(rows)
            p: Any = None
            n: Any = None
            if self.pos_strategy == self.SEMIHARD:
                n = self._negatives(near, negative)
                p = self._positives(near, positive, n[0])
            elif self.pos_strategy != whole:
                p = self._positives(near, positive)
            if n is None and self.neg_strategy != whole:
                n = self._negatives(
                    near, negative, p[0] if self.neg_strategy == self.SEMIHARD else None
                )
            if p is not None and n is not None:
                kept = torch.where(p[2] & n[2])[0]
                both.append((kept + rows.start, p[1][kept], n[1][kept]))
                continue
            for found, picked, mask in ((of_positives, p, positive), (of_negatives, n, negative)):
                a, other = (
                    torch.where(mask)
                    if picked is None
                    else (torch.where(picked[2])[0], picked[1][picked[2]])
                )
                found.append((a + rows.start, other))
        if both:
            a, p, n = (torch.cat(each) for each in zip(*both, strict=True))
            return a, p, a, n
        return tuple(
            torch.cat(each)
            for found in (of_positives, of_negatives)
            for each in zip(*found, strict=True)
        )

    def _positives(
        self, near: Tensor, mask: Tensor, limit: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        hard = self.pos_strategy != self.EASY
        return self._extremes(
            near, mask, hard != self.distance.is_inverted, self.allowed_pos_range, limit
        )

    def _negatives(
        self, near: Tensor, mask: Tensor, limit: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        easy = self.neg_strategy == self.EASY
        return self._extremes(
            near, mask, easy != self.distance.is_inverted, self.allowed_neg_range, limit
        )

    @staticmethod
    def _extremes(
        near: Tensor, mask: Tensor, largest: bool, allowed: Any, limit: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's extreme, its place, and whether it has any, each (R,).

        Args:
            near: (R, M).
            mask: (R, M) which count.
            largest: whether the largest is wanted; else the smallest.
            allowed: the smallest and largest that count, or None.
            limit: (R,) only what is smaller (or larger, where the smallest is wanted) counts.
        """
        if limit is not None:
            mask = mask & (near < limit.unsqueeze(1) if largest else near > limit.unsqueeze(1))
        if allowed is not None:
            mask = mask & (near <= allowed[1]) & (near >= allowed[0])
        edge = torch.finfo(near.dtype)
        found = near.masked_fill(~mask, edge.min if largest else edge.max)
        value, place = found.max(1) if largest else found.min(1)
        return value, place, mask.any(1)


class BatchHardMiner(BatchEasyHardMiner, miners.BatchHardMiner):
    """Upstream's triplets, found by masks."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return triplets; see `retrieval.plugin.Miner`."""
        a, p, _, n = BatchEasyHardMiner.mine(self, embeddings, labels, ref_emb, ref_labels)
        return a, p, n


class HDCMiner(PreciseMiner, miners.HDCMiner):
    """Upstream's pairs, found by masks."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.plugin.Miner`."""
        if self.was_set_externally:
            return super().mine(embeddings, labels, ref_emb, ref_labels)
        mat = similarities(self.distance, embeddings, ref_emb)
        found: list[Tensor] = []
        for name, mask in zip(
            ("pos", "neg"), Pairs(labels, ref_labels).of(slice(None)), strict=True
        ):
            at = mask.flatten().nonzero().squeeze(1)
            near = mat.reshape(-1).index_select(0, at)
            count = math.ceil(self.filter_percentage * len(near))
            place = near.topk(count, largest=self.should_select_largest(name))[1]
            found += _pairs_at(at.index_select(0, place), mat.shape[1])
        return tuple(found)


class UniformHistogramMiner(PreciseMiner, miners.UniformHistogramMiner):
    """Upstream's pairs, found by masks: each pair's bin is looked up once, and bins are sorted."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.plugin.Miner`."""
        mat = similarities(self.distance, embeddings, ref_emb)
        found: list[Tensor] = []
        masks = Pairs(labels, ref_labels).of(slice(None))
        for mask, wanted in zip(masks, (self.pos_per_bin, self.neg_per_bin), strict=True):
            at = mask.flatten().nonzero().squeeze(1)
            if len(at):
                near = mat.reshape(-1).index_select(0, at)
                at = at.index_select(0, self.filter_by_bin(near, self.get_bins(near), wanted))
            found += _pairs_at(at, mat.shape[1])
        return tuple(found)

    def filter_by_bin(self, distances: Tensor, bins: Tensor, num_pairs: int) -> Tensor:
        """Return the places of the pairs that are drawn."""
        last = len(bins) - 2
        which = torch.bucketize(distances, bins, right=True, out_int32=True).sub_(1).clamp_(0, last)
        which = which.to(torch.uint8) if last < 256 else which
        # small whole numbers are sorted by counting, in one pass where each bin would take one
        order = which.sort(stable=True)[1]
        drawn, start = [], 0
        for count in torch.bincount(which, minlength=last + 1).tolist():
            if count:
                even = torch.ones(count, device=order.device)
                drawn.append(torch.multinomial(even, num_pairs, replacement=True).add_(start))
            start += count
        return order.index_select(0, torch.cat(drawn))


def _pairs_at(at: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of places in a matrix, counted row by row."""
    row = at.div(columns, rounding_mode="floor")
    return row, at - row * columns


class DistanceWeightedMiner(PreciseMiner, miners.DistanceWeightedMiner):
    """Upstream's triplets, whose weights are made for one class at a time."""

    def mine(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor
    ) -> Triplets:
        """Return triplets; see `retrieval.plugin.Miner`."""
        mat, width = similarities(self.distance, embeddings, ref_emb), float(embeddings.shape[1])

        def logarithms(rows: Any) -> tuple[Tensor, Tensor, Tensor]:
            """Return some rows' clipped distances, the logarithms of their weights, and which of
            these are numbers.
            """
            near = mat[rows].clamp(min=self.cutoff)
            found = (2.0 - width) * torch.log(near) - ((width - 3) / 2) * torch.log(
                1.0 - 0.25 * near**2.0
            )
            finite = torch.isfinite(found)
            other = labels[rows].unsqueeze(1) != ref_labels.unsqueeze(0)
            return near, found * other, finite

        tops = []
        for rows in blocks(*mat.shape):
            _, found, finite = logarithms(rows)
            tops.append(found.masked_fill(~finite, -torch.inf).max())
        top = torch.stack(tops).max()
        drawn = []
        for label in torch.unique(labels):
            anchors = torch.where(labels == label)[0]
            others = torch.where(ref_labels == label)[0]
            negatives = torch.where(ref_labels != label)[0]
            own = ref_labels is labels
            if len(others) < (2 if own else 1) or len(negatives) < 1:
                continue
            near, found, finite = logarithms(anchors)
            weights = torch.exp(found - top) * (near < self.nonzero_loss_cutoff)
            weights = weights.masked_fill_(~finite, 0)
            weights = (weights / weights.sum(1, keepdim=True))[:, negatives]
            drawn.append(_draw(anchors, others, negatives, weights, own))
        empty = torch.zeros(0, dtype=torch.int64, device=labels.device)
        a, p, n = (
            (torch.cat([empty, *each]) for each in zip(*drawn, strict=True))
            if drawn
            else (empty,) * 3
        )
        return a, p, n


def _draw(
    anchors: Tensor, others: Tensor, negatives: Tensor, weights: Tensor, own: bool
) -> Triplets:
    """Return as many random triplets of each anchor as its class has items.

    Args:
        anchors: (A,) items of a class.
        others: (P,) items of the class, among which the positives are.
        negatives: (M,) the items of other classes.
        weights: (A, M) how likely each of them is; NaN where an anchor has none.
        own: whether anchors are among the others, and so no positives of their own.
    """
    count = len(others)
    choices = others.expand(len(anchors), count)
    if own:
        choices = choices[~torch.eye(count, dtype=torch.bool, device=others.device)].view(
            count, count - 1
        )
    p = torch.randint(0, choices.shape[1], (len(anchors) * count,)).to(others.device)
    a = torch.arange(len(anchors), device=others.device).repeat_interleave(count)
    kept = weights.sum(1)[a] > 0
    a, p = a[kept], p[kept]
    if not len(a):
        return a, a, a
    n = torch.multinomial(weights[a], 1, replacement=True).flatten()
    return anchors[a], choices[a, p], negatives[n]
