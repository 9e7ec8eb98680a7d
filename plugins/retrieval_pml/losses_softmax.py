"""Losses that weigh an item's positives against its negatives by exponentials, without proxies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytorch_metric_learning import losses
from retrieval.plugin import traits

from retrieval_pml import corrected_pairs as corrected
from retrieval_pml import masked
from retrieval_pml.common import Distance, NonNegative, Positive, Reducer, Regularizer
from retrieval_pml.forward import forwards


@forwards(masked.MultiSimilarityLoss)
def multi_similarity(
    alpha: Positive = 2.0,
    beta: Positive = 50.0,
    base: float = 0.5,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.MultiSimilarityLoss:
    """Multi-similarity loss: soft maxima of an anchor's positives and of its negatives.

    Wang, Han, Huang, Dong & Scott, Multi-Similarity Loss with General Pair Weighting for Deep
    Metric Learning, CVPR 2019; the paper mines with `pml.multi_similarity`.

    Args:
        alpha: the exponent's scale for positives.
        beta: the exponent's scale for negatives.
        base: the similarity (λ in the paper) that both are measured from.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: how the anchors' losses become one number; the mean by default.
    """


@forwards(masked.CircleLoss)
def circle(
    m: float = 0.4,
    gamma: Positive = 80.0,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.CircleLoss:
    """Circle loss: each similarity weighs as much as it is away from its optimum.

    Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR 2020. The
    paper sets m = 0.25, gamma = 256 for faces, 0.25 and 128 for persons, 0.4 and 80 for
    fine-grained retrieval.

    Args:
        m: the relaxation: positives should pass a cosine of 1 − m, negatives stay below m.
        gamma: the exponent's scale.
        reducer: how the anchors' losses become one number; by default the mean of those above 0.
    """


@forwards(corrected.NTXentLoss)
def nt_xent(
    temperature: Positive = 0.07,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.NTXentLoss:
    """Normalised temperature-scaled cross-entropy (InfoNCE): each positive pair against its
    anchor's negatives.

    Sohn, NIPS 2016; van den Oord, Li & Vinyals, 2018; Chen et al., SimCLR, ICML 2020. Computed in
    memory of the pairs, where upstream compares all positive with all negative pairs.

    Args:
        temperature: similarities are divided by it.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: how the positive pairs' losses become one number; the mean by default.
    """


@forwards(masked.SupConLoss)
def sup_con(
    temperature: Positive = 0.1,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.SupConLoss:
    """Supervised contrastive loss: the mean log-probability of an anchor's positives among all
    others.

    Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, equation 2 (the sum outside the
    logarithm).

    Args:
        temperature: similarities are divided by it.
        distance: how two embeddings are compared; cosine similarity by default.
        reducer: how the anchors' losses become one number; by default the mean of those above 0.
    """


@forwards(corrected.TupletMarginLoss)
def tuplet_margin(
    margin: NonNegative = 5.73,
    scale: Positive = 64.0,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.TupletMarginLoss:
    """Tuplet margin loss: a positive against all negatives of its anchor, with slack in the
    positive's angle.

    Yu & Tao, Deep Metric Learning with Tuplet Margin Loss, ICCV 2019; the paper adds
    `pml.intra_pair_variance`. Computed in memory of the pairs, where upstream compares all positive
    with all negative pairs.

    Args:
        margin: the slack β, in degrees.
        scale: cosines are multiplied by it.
        reducer: how the positive pairs' losses become one number; the mean by default.
    """


@forwards(corrected.NCALoss)
def nca(
    softmax_scale: Positive = 1.0,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.NCALoss:
    """Neighbourhood components analysis: −log of the probability that a random neighbour has the
    item's class.

    Goldberger, Roweis, Hinton & Salakhutdinov, Neighbourhood Components Analysis, NIPS 2004 (the
    logarithmic objective). Computed by logarithms; upstream drops items whose probability rounds to
    0.

    Args:
        softmax_scale: distances are multiplied by it.
        distance: how two embeddings are compared; squared Euclidean on unit vectors by default.
    """


@traits(ref_emb=False)
@forwards(corrected.NPairsLoss)
def n_pairs(
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.NPairsLoss:
    """N-pairs loss: one positive pair per class, each anchor against the other classes' positives.

    Sohn, Improved Deep Metric Learning with Multi-class N-pair Loss Objective, NIPS 2016. Only the
    first positive pair of each class counts, so a batch of two items per class wastes nothing. The
    paper does not normalise (set `distance` to `pml.dot_product_similarity` with
    `normalize_embeddings = false`) and adds `pml.lp`.

    Args:
        distance: how two embeddings are compared; the dot product of unit vectors by default.
        reducer: how the pairs' losses become one number; the mean by default.
    """


@traits(ref_emb=False, miner=False)
@forwards(corrected.InstanceLoss)
def instance(
    gamma: Positive = 64.0,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.InstanceLoss:
    """Instance loss: each item is to be told from all others of the batch, by cross-entropy.

    Zheng, Zheng, Garrett, Yang, Xu & Shen, Dual-Path Convolutional Image-Text Embeddings with
    Instance Loss, ACM TOMM
    2020. Items that share a label share their vote: −log Σ over own label / Σ over all, of exp(γ
          cos). Upstream
    takes the rank of a label for the position of an item, which draws items towards other classes.

    Args:
        gamma: cosines are multiplied by it.
    """


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make
    for make in (
        multi_similarity,
        circle,
        nt_xent,
        sup_con,
        tuplet_margin,
        nca,
        n_pairs,
        instance,
    )
}
