"""Miners: they choose the pairs or triplets that a loss works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pytorch_metric_learning import miners
from retrieval.plugin import traits
from torch import Tensor

from retrieval_pml import masked_miners
from retrieval_pml.common import (
    Count,
    Distance,
    NonNegative,
    Positive,
    PreciseMiner,
    no_reference,
)
from retrieval_pml.forward import forwards

Strategy = Literal["hard", "semihard", "easy", "all"]


class EmbeddingsAlreadyPackagedAsTriplets(PreciseMiner, miners.EmbeddingsAlreadyPackagedAsTriplets):
    """Upstream's, on the embeddings' device, with its conditions checked."""

    def mine(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return triplets; see `retrieval.plugin.Miner`.

        Raises:
            ValueError: the batch is not a multiple of three, or there is a reference set.
        """
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


@forwards(masked_miners.AngularMiner)
def angular(angle: Annotated[float, Field(ge=0, lt=90)] = 20.0) -> miners.AngularMiner:
    """Triplets whose angle at the negative exceeds a bound.

    Wang, Zhou, Wen, Liu & Lin, Deep Metric Learning with Angular Loss, ICCV 2017. On unit vectors;
    upstream measures embeddings at their own length.

    Args:
        angle: the bound, in degrees.
    """


@forwards(masked_miners.BatchEasyHardMiner)
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
        pos_strategy: which positive: the farthest (hard), the farthest still nearer than the
            negative (semihard), the nearest (easy), or all.
        neg_strategy: which negative: the nearest (hard), the nearest still farther than the
            positive (semihard), the farthest (easy), or all. Not semihard on both sides, and not
            semihard beside all.
        allowed_pos_range: the smallest and largest distance of a positive that may be chosen.
        allowed_neg_range: the smallest and largest distance of a negative that may be chosen.
    """


@forwards(masked_miners.BatchHardMiner)
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


@forwards(masked_miners.DistanceWeightedMiner)
def distance_weighted(
    cutoff: Positive = 0.5, nonzero_loss_cutoff: Positive = 1.4
) -> miners.DistanceWeightedMiner:
    """Random negatives, each as likely as its distance is rare among random points on a sphere.

    Wu, Manmatha, Smola & Krähenbühl, Sampling Matters in Deep Embedding Learning, ICCV 2017.

    Args:
        cutoff: smaller distances, on unit vectors, count as this, which bounds the weights.
        nonzero_loss_cutoff: negatives farther than this are never chosen.
    """


@traits(ref_emb=False)
def embeddings_already_packaged_as_triplets() -> miners.EmbeddingsAlreadyPackagedAsTriplets:
    """The triplets that the batch is made of: anchor, positive, negative, anchor, and so on,
    whatever the labels.
    """
    return EmbeddingsAlreadyPackagedAsTriplets()


@forwards(masked_miners.HDCMiner)
def hdc(
    filter_percentage: Annotated[float, Field(gt=0, le=1)] = 0.5, distance: Distance = None
) -> miners.HDCMiner:
    """The hardest share of positive and of negative pairs.

    Yuan, Yang & Zhang, Hard-Aware Deeply Cascaded Embedding, ICCV 2017.

    Args:
        filter_percentage: the share that is kept, from 0 to 1.
    """


@forwards(masked_miners.MultiSimilarityMiner)
def multi_similarity(
    epsilon: float = 0.1, distance: Distance = None
) -> miners.MultiSimilarityMiner:
    """Negatives more similar than the least similar positive, positives less similar than the most
    similar negative.

    Wang, Han, Huang, Dong & Scott, Multi-Similarity Loss with General Pair Weighting for Deep
    Metric Learning, CVPR 2019.

    Args:
        epsilon: pairs also count when they miss that by less than this.
        distance: how two embeddings are compared; cosine similarity by default.
    """


@forwards(masked_miners.PairMarginMiner)
def pair_margin(
    pos_margin: float = 0.2, neg_margin: float = 0.8, distance: Distance = None
) -> miners.PairMarginMiner:
    """Positive pairs farther than one margin and negative pairs nearer than another.

    Args:
        pos_margin: positive pairs nearer than this are left out.
        neg_margin: negative pairs farther than this are left out.
    """


@forwards(masked_miners.TripletMarginMiner)
def triplet_margin(
    margin: NonNegative = 0.2,
    type_of_triplets: Literal["all", "hard", "semihard", "easy"] = "all",
    distance: Distance = None,
) -> miners.TripletMarginMiner:
    """Triplets that violate a margin.

    Schroff, Kalenichenko & Philbin, FaceNet: A Unified Embedding for Face Recognition and
    Clustering, CVPR 2015.

    Args:
        margin: by how much the negative should be farther than the positive.
        type_of_triplets: all that violate the margin; of those hard (the negative is nearer) or
            semihard (it is farther, by less than the margin); or easy, those that do not violate
            it.
    """


@forwards(masked_miners.UniformHistogramMiner)
def uniform_histogram(
    num_bins: Count = 100,
    pos_per_bin: Count = 10,
    neg_per_bin: Count = 10,
    distance: Distance = None,
) -> miners.UniformHistogramMiner:
    """Random pairs, equally many from each bin of distances between the smallest and the largest.

    Args:
        num_bins: how many bins.
        pos_per_bin: positive pairs drawn from each bin that has any.
        neg_per_bin: negative pairs drawn from each bin that has any.
    """


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
