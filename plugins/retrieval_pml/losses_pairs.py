"""Losses of pairs and triplets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field
from pytorch_metric_learning import losses
from retrieval.plugin import traits

from retrieval_pml import corrected_pairs as corrected
from retrieval_pml import corrected_triplets, margins, masked
from retrieval_pml.common import (
    Count,
    Distance,
    NonNegative,
    PerAnchor,
    Positive,
    Reducer,
    Regularizer,
    Share,
)
from retrieval_pml.forward import forwards

Angle = Annotated[float, Field(gt=0, lt=90)]


@forwards(margins.ContrastiveLoss)
def contrastive(
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.ContrastiveLoss:
    """Contrastive loss: positive pairs nearer than one margin, negative pairs farther than another.

    Hadsell, Chopra & LeCun, Dimensionality Reduction by Learning an Invariant Mapping, CVPR 2006
    (here without the square).

    Args:
        pos_margin: a positive pair costs what its distance exceeds this; with a similarity use 1.
        neg_margin: a negative pair costs what its distance falls short of this; with a similarity
            use 0.
        reducer: how the pairs' losses become one number; by default the mean of those above 0.
    """


def signal_to_noise_ratio_contrastive(
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    normalize_embeddings: bool = True,
    p: Positive = 2,
    power: Positive = 1,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.SignalToNoiseRatioContrastiveLoss:
    """Contrastive loss on the signal-to-noise distance var(anchor − other) / var(anchor).

    Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric
    Learning, CVPR
    2019. The paper adds the regulariser `pml.zero_mean`.

    Args:
        pos_margin: a positive pair costs what its distance exceeds this.
        neg_margin: a negative pair costs what its distance falls short of this.
        normalize_embeddings: whether embeddings are scaled to length 1 first.
        p: the norm that measures this length.
        power: the distance is raised to it.
        reducer: how the pairs' losses become one number; by default the mean of those above 0.
        embedding_regularizer: a penalty on the embeddings, added to the loss.
        embedding_reg_weight: the factor of that penalty.
    """
    return margins.SignalToNoiseRatioContrastiveLoss(
        pos_margin=pos_margin,
        neg_margin=neg_margin,
        distance=margins.SNRDistance(normalize_embeddings=normalize_embeddings, p=p, power=power),
        reducer=reducer,
        embedding_regularizer=embedding_regularizer,
        embedding_reg_weight=embedding_reg_weight,
    )


@forwards(masked.TripletMarginLoss)
def triplet_margin(
    margin: float = 0.05,
    swap: bool = False,
    smooth_loss: bool = False,
    triplets_per_anchor: PerAnchor = "all",
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.TripletMarginLoss:
    """Triplet loss: an anchor's positive nearer than its negative, by a margin.

    Schroff, Kalenichenko & Philbin, FaceNet, CVPR 2015; Weinberger & Saul, JMLR 2009. `swap`
    follows Balntas et al., BMVC 2016, and works with a reference set, where upstream mixes up
    indices.

    Args:
        margin: by how much, in the distance's unit.
        swap: compare the positive with the negative instead of the anchor where that violates the
            margin more.
        smooth_loss: log(1 + exp(violation)) instead of max(0, violation).
        triplets_per_anchor: how many random triplets an anchor gets, or all; a miner's take
            precedence.
        reducer: how the triplets' losses become one number; by default the mean of those above 0.
    """


def margin(
    margin: float = 0.2,
    nu: NonNegative = 0.0,
    beta: float = 1.2,
    triplets_per_anchor: PerAnchor = "all",
    learn_beta: bool = False,
    per_class: bool = False,
    classes: int | None = None,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.MarginLoss:
    """Margin loss: positives below, negatives above a boundary distance that may be learned.

    Wu, Manmatha, Smola & Krähenbühl, Sampling Matters in Deep Embedding Learning, ICCV 2017; made
    for the miner `pml.distance_weighted`.

    Args:
        margin: how far from the boundary pairs should be, in the distance's unit.
        nu: the weight of the penalty on a learned boundary.
        beta: the boundary, or where it begins.
        triplets_per_anchor: how many random triplets an anchor gets, or all; a miner's take
            precedence.
        learn_beta: whether the boundary is learned.
        per_class: one boundary for each training class instead of one for all.
        distance: how two embeddings are compared; Euclidean on unit vectors by default.
        reducer: how the triplets' losses become one number; by default their sum over the number of
            pairs above 0.
        embedding_regularizer: a penalty on the embeddings, added to the loss.
        embedding_reg_weight: the factor of that penalty.
    """
    if per_class and not classes:
        raise ValueError("per_class needs the number of training classes, which is not known here")
    made = masked.MarginLoss(
        margin=margin,
        nu=nu,
        beta=beta,
        triplets_per_anchor=triplets_per_anchor,
        learn_beta=learn_beta,
        num_classes=classes if per_class else None,
        distance=distance,
        reducer=reducer,
        embedding_regularizer=embedding_regularizer,
        embedding_reg_weight=embedding_reg_weight,
    )
    if per_class:
        made.known_classes = classes
    return made


@forwards(corrected_triplets.AngularLoss)
def angular(
    alpha: Angle = 40.0,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.AngularLoss:
    """Angular loss: bounds the angle at the negative in the triangle of a triplet.

    Wang, Zhou, Wen, Liu & Lin, Deep Metric Learning with Angular Loss, ICCV 2017, equation 8. All
    three are normalised, as the equation assumes; upstream leaves the negatives at their own
    length.

    Args:
        alpha: the bound, in degrees.
        reducer: how the positive pairs' losses become one number; the mean by default.
    """


@forwards(corrected_triplets.DynamicSoftMarginLoss)
def dynamic_soft_margin(
    min_val: Annotated[float, Field(lt=0)] = -2.0,
    num_bins: Count = 10,
    momentum: Share = 0.01,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.DynamicSoftMarginLoss:
    """Triplet loss without a margin: each triplet weighs as much as the share of triplets easier
    than it.

    Zhang & Rusinkiewicz, Learning Local Descriptors with a CDF-Based Dynamic Soft Margin, ICCV
    2019. The histogram of d(a, p) − d(a, n) is state: it is saved with the run. Upstream keeps it
    out of the checkpoint, and differentiates through it, which fails on the second batch.

    Args:
        min_val: the smallest difference that counts; on unit vectors −2.
        num_bins: how many bins divide the range from min_val to −min_val.
        momentum: the weight of the batch's histogram against the running one.
    """


@forwards(corrected.LiftedStructureLoss)
def lifted_structure(
    neg_margin: float = 1.0,
    pos_margin: float = 0.0,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.LiftedStructureLoss:
    """Lifted structure loss: each positive pair against all negatives of both its items.

    Oh Song, Xiang, Jegelka & Savarese, Deep Metric Learning via Lifted Structured Feature
    Embedding, CVPR 2016. Computed in memory of N², where upstream compares all positive with all
    negative pairs.

    Args:
        neg_margin: negatives nearer than this cost most, in the distance's unit.
        pos_margin: subtracted from the positive's distance.
        reducer: how the positive pairs' losses become one number; the mean by default.
    """


@forwards(masked.GeneralizedLiftedStructureLoss)
def generalized_lifted_structure(
    neg_margin: float = 1.0,
    pos_margin: float = 0.0,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.GeneralizedLiftedStructureLoss:
    """Lifted loss of an anchor: all its positives against all its negatives at once.

    Hermans, Beyer & Leibe, In Defense of the Triplet Loss for Person Re-Identification, 2017,
    equation 8. An anchor that lacks either costs nothing.

    Args:
        neg_margin: negatives nearer than this cost most, in the distance's unit.
        pos_margin: subtracted from the positives' distances.
        reducer: how the anchors' losses become one number; the mean by default.
    """


@forwards(margins.IntraPairVarianceLoss)
def intra_pair_variance(
    pos_eps: NonNegative = 0.01,
    neg_eps: NonNegative = 0.01,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.IntraPairVarianceLoss:
    """Draws positive pairs' similarities towards their mean, and negative pairs' likewise.

    Yu & Tao, Deep Metric Learning with Tuplet Margin Loss, ICCV 2019: meant beside
    `pml.tuplet_margin` in `pml.multiple`.

    Args:
        pos_eps: how far, relatively, a positive pair may fall below the mean at no cost.
        neg_eps: how far, relatively, a negative pair may rise above the mean at no cost.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: how the pairs' losses become one number; the mean by default.
    """


@traits(ref_emb=True)
@forwards(corrected.ThresholdConsistentMarginLoss)
def threshold_consistent_margin(
    lambda_plus: NonNegative = 1.0,
    lambda_minus: NonNegative = 1.0,
    margin_plus: float = 0.9,
    margin_minus: float = 0.5,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.ThresholdConsistentMarginLoss:
    """A regulariser in the form of a loss: makes one similarity threshold fit all classes.

    Zhang et al., Threshold-Consistent Margin Loss for Open-World Deep Metric Learning, ICLR 2024:
    meant beside another loss in `pml.multiple`. Looks positives and negatives up in the reference
    set when there is one; upstream looks in the batch.

    Args:
        lambda_plus: the weight of positive pairs.
        lambda_minus: the weight of negative pairs.
        margin_plus: positive pairs with a cosine below this cost the difference.
        margin_minus: negative pairs with a cosine above this cost the difference.
    """


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make
    for make in (
        contrastive,
        signal_to_noise_ratio_contrastive,
        triplet_margin,
        margin,
        angular,
        dynamic_soft_margin,
        lifted_structure,
        generalized_lifted_structure,
        intra_pair_variance,
        threshold_consistent_margin,
    )
}
