"""Miners, which choose the pairs or triplets that a loss works on.

They return the same pairs and triplets as upstream, in the same order and with the same random
draws, but use masks and blocks of rows instead of lists of all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pytorch_metric_learning import miners
from retrieval.plugin import traits
from torch import Tensor

from retrieval_pml.adapters import (
    Count,
    Distance,
    NonNegative,
    Positive,
    PreciseMiner,
    forwards,
    no_reference,
)
from retrieval_pml.pair_matrix import Pairs, blocks, similarities

Strategy = Literal["hard", "semihard", "easy", "all"]
Triplets = tuple[Tensor, Tensor, Tensor]


class MultiSimilarityMiner(PreciseMiner, miners.MultiSimilarityMiner):
    """Finds upstream's pairs by each row's extremes, without sorting."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.plugin.Miner`."""
        mat = similarities(self.distance, embeddings, ref_emb)
        pairs, highest = Pairs(labels, ref_labels), torch.finfo(mat.dtype).max
        if embeddings is ref_emb:
            pairs.own = 0
        chunks = []
        for rows in blocks(*mat.shape):
            # smaller is closer
            near = -mat[rows] if self.distance.is_inverted else mat[rows].clone()
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
            chunks.append((a1 + rows.start, p, a2 + rows.start, n))
        return tuple(torch.cat(column) for column in zip(*chunks, strict=True))


@forwards(MultiSimilarityMiner)
def multi_similarity(
    epsilon: float = 0.1, distance: Distance = None
) -> miners.MultiSimilarityMiner:
    """Negatives more similar than the farthest positive, positives less than the nearest negative.

    Wang, Han, Huang, Dong & Scott, Multi-Similarity Loss with General Pair Weighting for Deep
    Metric Learning, CVPR 2019.

    Args:
        epsilon: pairs that miss the condition by less than this are chosen too.
        distance: how two embeddings are compared; cosine similarity by default.
    """


class PairMarginMiner(PreciseMiner, miners.PairMarginMiner):
    """Finds upstream's pairs with masks."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.plugin.Miner`."""
        mat = similarities(self.distance, embeddings, ref_emb)
        pairs, chunks = Pairs(labels, ref_labels), []
        for rows in blocks(*mat.shape):
            positive, negative = pairs.of(rows)
            near = mat[rows]
            if self.distance.is_inverted:
                far, close = near < self.pos_margin, near > self.neg_margin
            else:
                far, close = near > self.pos_margin, near < self.neg_margin
            a1, p = torch.where(positive & far)
            a2, n = torch.where(negative & close)
            chunks.append((a1 + rows.start, p, a2 + rows.start, n))
        return tuple(torch.cat(column) for column in zip(*chunks, strict=True))


@forwards(PairMarginMiner)
def pair_margin(
    pos_margin: float = 0.2, neg_margin: float = 0.8, distance: Distance = None
) -> miners.PairMarginMiner:
    """Positive pairs farther than one margin and negative pairs nearer than another.

    Args:
        pos_margin: smallest distance of the positive pairs to choose.
        neg_margin: largest distance of the negative pairs to choose.
    """


class TripletMarginMiner(PreciseMiner, miners.TripletMarginMiner):
    """Finds upstream's triplets in blocks of positive pairs, which saves memory."""

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
                mask: Tensor = gap > self.margin
                return mask
            mask = gap <= self.margin
            if self.type_of_triplets == "hard":
                mask &= gap <= 0
            elif self.type_of_triplets == "semihard":
                mask &= gap > 0
            return mask

        return _triplets(chosen, anchor, positive, labels, ref_labels)


@forwards(TripletMarginMiner)
def triplet_margin(
    margin: NonNegative = 0.2,
    type_of_triplets: Literal["all", "hard", "semihard", "easy"] = "all",
    distance: Distance = None,
) -> miners.TripletMarginMiner:
    """Triplets that violate a margin.

    Schroff, Kalenichenko & Philbin, FaceNet: A Unified Embedding for Face Recognition and
    Clustering, CVPR 2015.

    Args:
        margin: distance by which the negative should be farther than the positive.
        type_of_triplets: "all" that violate the margin, of these the "hard" ones (the negative is
            nearer) or "semihard" ones (it is farther by less than the margin), or the "easy" ones,
            which do not violate it.
    """


class AngularMiner(PreciseMiner, miners.AngularMiner):
    """Upstream's miner on unit vectors, which its equation assumes, in blocks of positive pairs."""

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
            mask: Tensor = torch.atan(sides / (2 * heights)) > self.angle
            return mask

        return _triplets(chosen, anchor, positive, labels, ref_labels)


def _triplets(
    chosen: Any, anchor: Tensor, positive: Tensor, labels: Tensor, ref_labels: Tensor
) -> Triplets:
    """Return the triplets (T,) of positive pairs and the negatives that `chosen` masks (K, M)."""
    chunks: list[tuple[slice, Tensor, Tensor]] = []
    for part in blocks(len(anchor), len(ref_labels)):
        a, p = anchor[part], positive[part]
        kept = chosen(a, p) & (labels[a].unsqueeze(1) != ref_labels.unsqueeze(0))
        pair, negative = torch.where(kept)
        chunks.append((part, pair.int(), negative.int()))
    # triplets take most of the memory, so they are collected without a second copy of the whole
    triplets = torch.empty(
        3, sum(len(pair) for _, pair, _ in chunks), dtype=torch.int64, device=labels.device
    )
    start = 0
    chunks.reverse()
    while chunks:
        part, pair, negative = chunks.pop()
        of_part = triplets[:, start : start + len(pair)]
        torch.index_select(anchor[part], 0, pair, out=of_part[0])
        torch.index_select(positive[part], 0, pair, out=of_part[1])
        of_part[2] = negative
        start += len(pair)
    a, p, n = triplets
    return a, p, n


@forwards(AngularMiner)
def angular(angle: Annotated[float, Field(ge=0, lt=90)] = 20.0) -> miners.AngularMiner:
    """Triplets whose angle at the negative exceeds a bound.

    Wang, Zhou, Wen, Liu & Lin, Deep Metric Learning with Angular Loss, ICCV 2017. The angle is
    measured on unit vectors; upstream uses unscaled embeddings.

    Args:
        angle: the bound, in degrees.
    """


class BatchEasyHardMiner(PreciseMiner, miners.BatchEasyHardMiner):
    """Finds upstream's pairs with masks."""

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
            for chunks, picked, mask in ((of_positives, p, positive), (of_negatives, n, negative)):
                a, other = (
                    torch.where(mask)
                    if picked is None
                    else (torch.where(picked[2])[0], picked[1][picked[2]])
                )
                chunks.append((a + rows.start, other))
        if both:
            a, p, n = (torch.cat(column) for column in zip(*both, strict=True))
            return a, p, a, n
        return tuple(
            torch.cat(column)
            for chunks in (of_positives, of_negatives)
            for column in zip(*chunks, strict=True)
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
        """Return each row's extreme value, its column, and whether the row has one, each (R,).

        `limit` (R,) bounds the values on the side of the extreme.
        """
        if limit is not None:
            mask = mask & (near < limit.unsqueeze(1) if largest else near > limit.unsqueeze(1))
        if allowed is not None:
            mask = mask & (near <= allowed[1]) & (near >= allowed[0])
        edge = torch.finfo(near.dtype)
        candidates = near.masked_fill(~mask, edge.min if largest else edge.max)
        value, place = candidates.max(1) if largest else candidates.min(1)
        return value, place, mask.any(1)


@forwards(BatchEasyHardMiner)
def batch_easy_hard(
    pos_strategy: Strategy = "easy",
    neg_strategy: Strategy = "semihard",
    allowed_pos_range: tuple[float, float] | None = None,
    allowed_neg_range: tuple[float, float] | None = None,
    distance: Distance = None,
) -> miners.BatchEasyHardMiner:
    """For each anchor the easiest, hardest or semi-hard positive and negative.

    Xuan, Stylianou & Pless, Improved Embeddings with Easy Positive Triplet Mining, WACV 2020.

    Args:
        pos_strategy: which positive to choose: the farthest ("hard"), the farthest that is nearer
            than the negative ("semihard"), the nearest ("easy"), or "all".
        neg_strategy: which negative to choose: the nearest ("hard"), the nearest that is farther
            than the positive ("semihard"), the farthest ("easy"), or "all". "semihard" cannot be
            combined with "semihard" or "all".
        allowed_pos_range: smallest and largest distance of positives to choose from.
        allowed_neg_range: smallest and largest distance of negatives to choose from.
    """


class BatchHardMiner(BatchEasyHardMiner, miners.BatchHardMiner):
    """Finds upstream's triplets with masks."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return triplets; see `retrieval.plugin.Miner`."""
        a, p, _, n = BatchEasyHardMiner.mine(self, embeddings, labels, ref_emb, ref_labels)
        return a, p, n


@forwards(BatchHardMiner)
def batch_hard(
    allowed_pos_range: tuple[float, float] | None = None,
    allowed_neg_range: tuple[float, float] | None = None,
    distance: Distance = None,
) -> miners.BatchHardMiner:
    """For each anchor the farthest positive and the nearest negative.

    Hermans, Beyer & Leibe, In Defense of the Triplet Loss for Person Re-Identification, 2017.

    Args:
        allowed_pos_range: the smallest and largest distance of a positive that may be chosen.
        allowed_neg_range: the smallest and largest distance of a negative that may be chosen.
    """


class HDCMiner(PreciseMiner, miners.HDCMiner):
    """Finds upstream's pairs with masks."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.plugin.Miner`."""
        if self.was_set_externally:
            return super().mine(embeddings, labels, ref_emb, ref_labels)
        mat = similarities(self.distance, embeddings, ref_emb)
        picked: list[Tensor] = []
        for name, mask in zip(
            ("pos", "neg"), Pairs(labels, ref_labels).of(slice(None)), strict=True
        ):
            places = mask.flatten().nonzero().squeeze(1)
            near = mat.reshape(-1).index_select(0, places)
            count = math.ceil(self.filter_percentage * len(near))
            best = near.topk(count, largest=self.should_select_largest(name))[1]
            picked += _pairs_at(places.index_select(0, best), mat.shape[1])
        return tuple(picked)


@forwards(HDCMiner)
def hdc(
    filter_percentage: Annotated[float, Field(gt=0, le=1)] = 0.5, distance: Distance = None
) -> miners.HDCMiner:
    """The hardest share of positive and of negative pairs.

    Yuan, Yang & Zhang, Hard-Aware Deeply Cascaded Embedding, ICCV 2017.

    Args:
        filter_percentage: share of the pairs to keep, from 0 to 1.
    """


class UniformHistogramMiner(PreciseMiner, miners.UniformHistogramMiner):
    """Finds upstream's pairs with masks, and looks up each pair's bin once."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.plugin.Miner`."""
        mat = similarities(self.distance, embeddings, ref_emb)
        picked: list[Tensor] = []
        masks = Pairs(labels, ref_labels).of(slice(None))
        for mask, count in zip(masks, (self.pos_per_bin, self.neg_per_bin), strict=True):
            places = mask.flatten().nonzero().squeeze(1)
            if len(places):
                near = mat.reshape(-1).index_select(0, places)
                places = places.index_select(
                    0, self.filter_by_bin(near, self.get_bins(near), count)
                )
            picked += _pairs_at(places, mat.shape[1])
        return tuple(picked)

    def filter_by_bin(self, distances: Tensor, bins: Tensor, num_pairs: int) -> Tensor:
        """Return the positions of the drawn pairs."""
        last = len(bins) - 2
        which = torch.bucketize(distances, bins, right=True, out_int32=True).sub_(1).clamp_(0, last)
        which = which.to(torch.uint8) if last < 256 else which
        # sorting the bins' numbers by counting takes one pass instead of one pass per bin
        order = which.sort(stable=True)[1]
        drawn, start = [], 0
        for count in torch.bincount(which, minlength=last + 1).tolist():
            if count:
                even = torch.ones(count, device=order.device)
                drawn.append(torch.multinomial(even, num_pairs, replacement=True).add_(start))
            start += count
        return order.index_select(0, torch.cat(drawn))


def _pairs_at(place: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of positions in a row-major matrix."""
    row = place.div(columns, rounding_mode="floor")
    return row, place - row * columns


@forwards(UniformHistogramMiner)
def uniform_histogram(
    num_bins: Count = 100,
    pos_per_bin: Count = 10,
    neg_per_bin: Count = 10,
    distance: Distance = None,
) -> miners.UniformHistogramMiner:
    """Random pairs, the same number from each bin between the smallest and the largest distance.

    Args:
        num_bins: number of bins.
        pos_per_bin: number of positive pairs to draw from each nonempty bin.
        neg_per_bin: number of negative pairs to draw from each nonempty bin.
    """


class DistanceWeightedMiner(PreciseMiner, miners.DistanceWeightedMiner):
    """Finds upstream's triplets, with weights computed for one class at a time."""

    def mine(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor
    ) -> Triplets:
        """Return triplets; see `retrieval.plugin.Miner`."""
        mat, width = similarities(self.distance, embeddings, ref_emb), float(embeddings.shape[1])

        def logarithms(rows: Any) -> tuple[Tensor, Tensor, Tensor]:
            """Return clipped distances, the logarithms of their weights, and which are finite."""
            near = mat[rows].clamp(min=self.cutoff)
            logs = (2.0 - width) * torch.log(near) - ((width - 3) / 2) * torch.log(
                1.0 - 0.25 * near**2.0
            )
            finite = torch.isfinite(logs)
            other = labels[rows].unsqueeze(1) != ref_labels.unsqueeze(0)
            return near, logs * other, finite

        tops = []
        for rows in blocks(*mat.shape):
            _, logs, finite = logarithms(rows)
            tops.append(logs.masked_fill(~finite, -torch.inf).max())
        top = torch.stack(tops).max()
        drawn = []
        for label in torch.unique(labels):
            anchors = torch.where(labels == label)[0]
            members = torch.where(ref_labels == label)[0]
            negatives = torch.where(ref_labels != label)[0]
            own = ref_labels is labels
            if len(members) < (2 if own else 1) or len(negatives) < 1:
                continue
            near, logs, finite = logarithms(anchors)
            weights = torch.exp(logs - top) * (near < self.nonzero_loss_cutoff)
            weights = weights.masked_fill_(~finite, 0)
            weights = (weights / weights.sum(1, keepdim=True))[:, negatives]
            drawn.append(_draw(anchors, members, negatives, weights, own))
        empty = torch.zeros(0, dtype=torch.int64, device=labels.device)
        a, p, n = (
            (torch.cat([empty, *column]) for column in zip(*drawn, strict=True))
            if drawn
            else (empty,) * 3
        )
        return a, p, n


def _draw(
    anchors: Tensor, members: Tensor, negatives: Tensor, weights: Tensor, own: bool
) -> Triplets:
    """Return as many random triplets per anchor as its class has items.

    `weights` (A, M) are proportional to the negatives' probabilities; `own` tells whether anchors
    are among the members.
    """
    count = len(members)
    choices = members.expand(len(anchors), count)
    if own:
        choices = choices[~torch.eye(count, dtype=torch.bool, device=members.device)].view(
            count, count - 1
        )
    p = torch.randint(0, choices.shape[1], (len(anchors) * count,)).to(members.device)
    a = torch.arange(len(anchors), device=members.device).repeat_interleave(count)
    kept = weights.sum(1)[a] > 0
    a, p = a[kept], p[kept]
    if not len(a):
        return a, a, a
    n = torch.multinomial(weights[a], 1, replacement=True).flatten()
    return anchors[a], choices[a, p], negatives[n]


@forwards(DistanceWeightedMiner)
def distance_weighted(
    cutoff: Positive = 0.5, nonzero_loss_cutoff: Positive = 1.4
) -> miners.DistanceWeightedMiner:
    """Random negatives, with probability inverse to how common their distance is on a sphere.

    Wu, Manmatha, Smola & Krähenbühl, Sampling Matters in Deep Embedding Learning, ICCV 2017.

    Args:
        cutoff: lower bound of the distances of unit vectors, which bounds the weights.
        nonzero_loss_cutoff: largest distance of negatives to choose from.
    """


class EmbeddingsAlreadyPackagedAsTriplets(PreciseMiner, miners.EmbeddingsAlreadyPackagedAsTriplets):
    """Upstream's miner on the embeddings' device, with checks of the batch."""

    def mine(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return triplets; see `retrieval.plugin.Miner`."""
        no_reference(
            "EmbeddingsAlreadyPackagedAsTriplets", None if ref_emb is embeddings else ref_emb
        )
        if len(embeddings) % 3:
            raise ValueError(
                "a batch of anchor, positive, negative, anchor, … needs a multiple of three items,"
                f" not {len(embeddings)}"
            )
        anchor = torch.arange(0, len(embeddings), 3, device=embeddings.device)
        return anchor, anchor + 1, anchor + 2


@traits(ref_emb=False)
def embeddings_already_packaged_as_triplets() -> miners.EmbeddingsAlreadyPackagedAsTriplets:
    """The triplets that the batch is made of: anchor, positive, negative, anchor, and so on."""
    return EmbeddingsAlreadyPackagedAsTriplets()


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make
    for make in (
        angular,
        batch_easy_hard,
        batch_hard,
        distance_weighted,
        embeddings_already_packaged_as_triplets,
        hdc,
        multi_similarity,
        pair_margin,
        triplet_margin,
        uniform_histogram,
    )
}
