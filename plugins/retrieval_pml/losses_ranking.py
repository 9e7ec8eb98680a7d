"""Losses of whole rankings and of the distributions of similarities. None takes a reference set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pytorch_metric_learning import losses
from retrieval.plugin import traits

from retrieval_pml import corrected_ranking as corrected
from retrieval_pml.common import Count, Distance, NonNegative, Positive, Reducer, Regularizer, Share
from retrieval_pml.forward import forwards


@traits(ref_emb=False)
@forwards(corrected.FastAPLoss)
def fast_ap(
    num_bins: Count = 10,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.FastAPLoss:
    """FastAP: 1 − average precision, from soft histograms of squared distances between unit
    vectors.

    Cakir, He, Xia, Kulis & Sclaroff, Deep Metric Learning to Rank, CVPR 2019. Wants large batches.

    Args:
        num_bins: how many bins divide the range of squared distances, 0 to 4.
    """


@traits(ref_emb=False)
@forwards(corrected.SmoothAPLoss)
def smooth_ap(
    temperature: Positive = 0.01,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.SmoothAPLoss:
    """Smooth-AP: 1 − average precision, with a sigmoid in place of each comparison of ranks.

    Brown, Xie, Kalogeiton & Zisserman, Smooth-AP: Smoothing the Path Towards Large-Scale Image
    Retrieval, ECCV 2020. Takes batches in any order and with any class sizes; upstream mixes up the
    number of classes and of items in each, and requires sorted, equal classes.

    Args:
        temperature: of the sigmoid; smaller is closer to the true ranks.
    """


@traits(ref_emb=False, miner=False)
@forwards(corrected.PNPLoss)
def pnp(
    b: Positive = 2.0,
    alpha: Positive = 1.0,
    anneal: Positive = 0.01,
    variant: Literal["Ds", "Dq", "Iu", "Ib", "O"] = "O",
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.PNPLoss:
    """Penalises the negatives that rank before a positive, and nothing else.

    Li, Min, Song, Li, Zhang & Jiang, Rethinking the Optimization of Average Precision: Only
    Penalizing Negative Instances before Positive Ones is Enough, AAAI 2022.

    Args:
        b: the base of variant Ib.
        alpha: the exponent of variant Dq.
        anneal: the temperature of the sigmoid that counts negatives.
        variant: how the count R of negatives costs: O as R, Ds as log(1 + R), Dq as 1 − 1/(1 +
            R)^alpha, Iu as (1 + R) log(1 + R), Ib as (bR − log(1 + bR)) / b².
    """


@traits(ref_emb=False, miner=False)
@forwards(corrected.RankedListLoss)
def ranked_list(
    margin: Positive,
    Tn: NonNegative,
    imbalance: Share = 0.5,
    alpha: Positive | None = None,
    Tp: NonNegative = 0.0,
    distance: Distance = None,
    reducer: Reducer = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.RankedListLoss:
    """Ranked list loss: positives within a sphere around each query, negatives outside a larger
    one.

    Wang, Hua, Kodirov, Hu, Garnier & Robertson, Ranked List Loss for Deep Metric Learning, CVPR
    2019; the paper uses margin = 0.4, alpha = 1.2, Tn = 10. Above 5 a temperature makes exp
    overflow-prone, and upstream warns.

    Args:
        margin: between both spheres, in the distance's unit.
        Tn: the temperature that weighs negatives by how much they violate; 0 weighs them equally.
        imbalance: the weight of negatives against positives.
        alpha: the radius of the outer sphere; by default 1 + margin / 2.
        Tp: the temperature that weighs positives by how much they violate; 0 weighs them equally.
        reducer: how the queries' losses become one number; the mean by default.
    """


@traits(ref_emb=False)
@forwards(corrected.HistogramLoss)
def histogram(
    n_bins: Count | None = None,
    delta: Positive | None = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.HistogramLoss:
    """Histogram loss: the probability that a random negative pair is more similar than a random
    positive one.

    Ustinova & Lempitsky, Learning Deep Embeddings with Histogram Loss, NIPS 2016. Counts every pair
    once; upstream fails when a cosine rounds to 1.

    Args:
        n_bins: how many bins divide the cosines from −1 to 1; 100 when neither is given.
        delta: a bin's width, 2 / n_bins, instead of `n_bins`.
    """


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make for make in (fast_ap, smooth_ap, pnp, ranked_list, histogram)
}
