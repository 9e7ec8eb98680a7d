"""Miners of pytorch-metric-learning, which choose the pairs or triplets that a loss works on.

`MultiSimilarityMiner` and `TripletMarginMiner` choose the same pairs and triplets as their base
classes. `AngularMiner`, unlike its base class, scales embeddings to unit length. All three need
less memory and time than their base classes: they build no list of all triplets, and do not sort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from pytorch_metric_learning import miners
from torch import Tensor

from retrieval_pml.pair_sums import matrix_of
from retrieval_pml.upstream_factories import FIXED, offer

Strategy = Literal["hard", "semihard", "easy", "all"]
Range = tuple[float, float] | None
ENTRIES = 2**17
"""Number of combinations of a positive pair and a reference that are in memory at a time."""


class MultiSimilarityMiner(miners.MultiSimilarityMiner):
    """Negatives nearer than the farthest positive, and positives farther than the nearest negative.

    Wang, Han, Huang, Dong & Scott, Multi-Similarity Loss with General Pair Weighting for Deep
    Metric Learning, CVPR 2019.

    Args:
        epsilon: tolerance. Pairs that miss the condition by less than `epsilon` are chosen too.
        distance: distance or similarity of two embeddings; cosine similarity by default.
    """

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return pairs; see `retrieval.plugin.Miner`."""
        matrix = matrix_of(self.distance, embeddings, ref_emb)
        if self.distance.is_inverted:
            distances = -matrix
        else:
            distances = matrix
        positive = labels.unsqueeze(1) == ref_labels.unsqueeze(0)
        negative = ~positive
        if ref_emb is embeddings:
            positive.fill_diagonal_(False)
        # An anchor without positives or without negatives yields no pair: nothing is beyond ±∞.
        farthest = distances.masked_fill(~positive, -torch.inf).amax(1, keepdim=True)
        nearest = distances.masked_fill(~negative, torch.inf).amin(1, keepdim=True)
        a1, p = torch.where(positive & (distances + self.epsilon > nearest))
        a2, n = torch.where(negative & (distances - self.epsilon < farthest))
        return a1, p, a2, n


class TripletMarginMiner(miners.TripletMarginMiner):
    """Triplets that violate a margin.

    Schroff, Kalenichenko & Philbin, FaceNet: A Unified Embedding for Face Recognition and
    Clustering, CVPR 2015.

    Args:
        margin: distance by which the negative should be farther than the positive.
        type_of_triplets: "all" chooses the triplets that violate the margin. "hard" chooses those
            whose negative is nearer than the positive. "semihard" chooses those whose negative is
            farther than the positive, but not by more than the margin. "easy" chooses the triplets
            that do not violate the margin.
    """

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return triplets; see `retrieval.plugin.Miner`."""
        matrix = matrix_of(self.distance, embeddings, ref_emb)
        if self.distance.is_inverted:
            distances = -matrix
        else:
            distances = matrix

        def mask(a: Tensor, p: Tensor) -> Tensor:
            # Similarities were negated, so a gap means the same for them as for distances.
            gap: Tensor = distances[a] - distances[a, p].unsqueeze(1)
            if self.type_of_triplets == "easy":
                return gap.gt(self.margin)
            violating = gap.le(self.margin)
            if self.type_of_triplets == "hard":
                return violating & (gap <= 0)
            if self.type_of_triplets == "semihard":
                return violating & (gap > 0)
            return violating

        return _triplets(mask, labels, ref_labels, ref_emb is embeddings)


class AngularMiner(miners.AngularMiner):
    """Triplets whose angle at the negative exceeds a bound.

    Wang, Zhou, Wen, Liu & Lin, Deep Metric Learning with Angular Loss, ICCV 2017. The embeddings
    are scaled to unit length first; pytorch-metric-learning does not scale them.

    Args:
        angle: the bound, in degrees.
    """

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return triplets; see `retrieval.plugin.Miner`."""
        unit = self.distance.normalize(embeddings)
        reference = self.distance.normalize(ref_emb)

        def mask(a: Tensor, p: Tensor) -> Tensor:
            sides = self.distance.pairwise_distance(unit[a], reference[p]).unsqueeze(1)
            # The shift is what torch's pairwise distance adds to each difference.
            heights = torch.cdist((unit[a] + reference[p]) / 2 - 1e-6, reference)
            angles: Tensor = torch.atan(sides / (2 * heights))
            return angles.gt(self.angle)

        return _triplets(mask, labels, ref_labels, ref_emb is embeddings)


def _triplets(
    mask: Callable[[Tensor, Tensor], Tensor], labels: Tensor, ref_labels: Tensor, same_items: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices (T,) of the anchors, positives and negatives of the chosen triplets.

    `mask` takes the anchors and positives (K,) of positive pairs, and returns which of the M
    references may be their negatives, (K, M).
    """
    same = labels.unsqueeze(1) == ref_labels.unsqueeze(0)
    negative = ~same
    if same_items:
        same.fill_diagonal_(False)
    anchor, positive = torch.where(same)
    chunks = []
    # The mask of a block has at most ENTRIES numbers, however large the batch is.
    step = max(1, ENTRIES // len(ref_labels))
    for a, p in zip(torch.split(anchor, step), torch.split(positive, step), strict=True):
        pair, n = torch.where(mask(a, p) & negative[a])
        chunks.append(torch.stack([a[pair], p[pair], n]))
    a, p, n = torch.cat([torch.zeros(3, 0, dtype=torch.int64, device=labels.device), *chunks], 1)
    return a, p, n


class EmbeddingsAlreadyPackagedAsTriplets(miners.EmbeddingsAlreadyPackagedAsTriplets):
    """The triplets that the batch is made of: anchor, positive, negative, anchor, and so on."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Any:
        """Return triplets; see `retrieval.plugin.Miner`."""
        if len(embeddings) % 3:
            raise ValueError(
                "a batch of anchor, positive, negative, anchor, … must have a multiple of three"
                f" items, not {len(embeddings)}"
            )
        anchor = torch.arange(0, len(embeddings), 3, device=embeddings.device)
        return anchor, anchor + 1, anchor + 2


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "angular": offer(AngularMiner, without=FIXED, angle=Annotated[float, Field(ge=0, lt=90)]),
    "batch_easy_hard": offer(
        miners.BatchEasyHardMiner,
        """For each anchor, the easiest, hardest or semi-hard positive and negative.

        Xuan, Stylianou & Pless, Improved Embeddings with Easy Positive Triplet Mining, WACV 2020.

        Args:
            pos_strategy: which positive to choose: the farthest ("hard"), the farthest that is
                nearer than the negative ("semihard"), the nearest ("easy"), or "all".
            neg_strategy: which negative to choose: the nearest ("hard"), the nearest that is
                farther than the positive ("semihard"), the farthest ("easy"), or "all".
                If one strategy is "semihard", the other must be "hard" or "easy".
            allowed_pos_range: smallest and largest distance of positives to choose from.
            allowed_neg_range: smallest and largest distance of negatives to choose from.
        """,
        pos_strategy=Strategy,
        neg_strategy=Strategy,
        allowed_pos_range=Range,
        allowed_neg_range=Range,
    ),
    "batch_hard": offer(
        miners.BatchHardMiner,
        """For each anchor, the farthest positive and the nearest negative.

        Hermans, Beyer & Leibe, In Defense of the Triplet Loss for Person Re-Identification, 2017.

        Args:
            allowed_pos_range: the smallest and largest distance of a positive that may be chosen.
            allowed_neg_range: the smallest and largest distance of a negative that may be chosen.
        """,
        without=("pos_strategy", "neg_strategy"),
        allowed_pos_range=Range,
        allowed_neg_range=Range,
    ),
    "distance_weighted": offer(
        miners.DistanceWeightedMiner,
        """Random negatives: the rarer their distance is on a sphere, the likelier they are drawn.

        Wu, Manmatha, Smola & Krähenbühl, Sampling Matters in Deep Embedding Learning, ICCV 2017.

        Args:
            cutoff: smaller distances count as this distance, which bounds the weights.
            nonzero_loss_cutoff: largest distance of the negatives to choose from.
        """,
        without=FIXED,
        cutoff=PositiveFloat,
        nonzero_loss_cutoff=PositiveFloat,
    ),
    "embeddings_already_packaged_as_triplets": offer(
        EmbeddingsAlreadyPackagedAsTriplets, ref_emb=False, without=FIXED
    ),
    "hdc": offer(
        miners.HDCMiner,
        """The hardest share of positive and of negative pairs.

        Yuan, Yang & Zhang, Hard-Aware Deeply Cascaded Embedding, ICCV 2017.

        Args:
            filter_percentage: share of the pairs to keep, from 0 to 1.
        """,
        filter_percentage=Annotated[float, Field(gt=0, le=1)],
    ),
    "multi_similarity": offer(MultiSimilarityMiner),
    "pair_margin": offer(
        miners.PairMarginMiner,
        """Positive pairs farther than one margin and negative pairs nearer than another.

        Args:
            pos_margin: smallest distance of the positive pairs to choose.
            neg_margin: largest distance of the negative pairs to choose.
        """,
    ),
    "triplet_margin": offer(
        TripletMarginMiner,
        margin=NonNegativeFloat,
        type_of_triplets=Literal["all", "hard", "semihard", "easy"],
    ),
    "uniform_histogram": offer(
        miners.UniformHistogramMiner,
        """Random pairs: the same number from each bin of equal width of their distances.

        Args:
            num_bins: number of bins.
            pos_per_bin: number of positive pairs to draw from each nonempty bin.
            neg_per_bin: number of negative pairs to draw from each nonempty bin.
        """,
    ),
}
