"""Losses with proxies of their own, which join the optimiser. None takes a reference set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field
from pytorch_metric_learning import losses
from retrieval.plugin import traits

from retrieval_pml import corrected_proxies as corrected
from retrieval_pml.common import (
    Count,
    Distance,
    Init,
    NonNegative,
    Positive,
    Reducer,
    Regularizer,
    require_similarity,
)
from retrieval_pml.forward import forwards


@traits(ref_emb=False)
@forwards(corrected.NormalizedSoftmaxLoss)
def normalized_softmax(
    embedding_size: int,
    classes: int,
    temperature: Positive = 0.05,
    distance: Distance = None,
    reducer: Reducer = None,
    weight_regularizer: Regularizer = None,
    weight_reg_weight: float = 1.0,
    weight_init_func: Init = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.NormalizedSoftmaxLoss:
    """Softmax over similarities to class weights of length 1.

    Zhai & Wu, Classification is a Strong Baseline for Deep Metric Learning, BMVC 2019; Wang et al.,
    NormFace, ACM MM 2017.

    Args:
        temperature: similarities are divided by it.
        distance: how embeddings are compared with class weights; the dot product of unit vectors by
            default.
    """


@traits(ref_emb=False)
@forwards(corrected.ProxyAnchorLoss)
def proxy_anchor(
    embedding_size: int,
    classes: int,
    margin: float = 0.1,
    alpha: Positive = 32.0,
    distance: Distance = None,
    reducer: Reducer = None,
    weight_regularizer: Regularizer = None,
    weight_reg_weight: float = 1.0,
    weight_init_func: Init = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.ProxyAnchorLoss:
    """Proxy-anchor loss: each class's proxy against all items of the batch, the hardest weighing
    most.

    Kim, Kim, Cho & Kwak, Proxy Anchor Loss for Deep Metric Learning, CVPR 2020. The authors give
    the proxies 100 times the learning rate of the network.

    Args:
        margin: δ: positives should be this much nearer than the distance's zero, negatives this
            much farther.
        alpha: the exponent's scale.
        distance: how embeddings are compared with proxies; cosine similarity by default.
        reducer: how the proxies' losses become one number; by default their sum over the number of
            proxies with positives, and of all.
        weight_regularizer: a penalty on the proxies, added to the loss.
        weight_init_func: how the proxies begin; Kaiming's normal (fan out) by default.
    """


@traits(ref_emb=False)
@forwards(corrected.ProxyNCALoss)
def proxy_nca(
    embedding_size: int,
    classes: int,
    softmax_scale: Positive = 1.0,
    distance: Distance = None,
    reducer: Reducer = None,
    weight_regularizer: Regularizer = None,
    weight_reg_weight: float = 1.0,
    weight_init_func: Init = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.ProxyNCALoss:
    """Proxy-NCA: neighbourhood components analysis with one proxy per class in place of neighbours.

    Movshovitz-Attias, Toshev, Leung, Ioffe & Singh, No Fuss Distance Metric Learning Using Proxies,
    ICCV 2017. As upstream's, and unlike the paper's, the denominator includes the item's own proxy
    (Teh, DeVries & Taylor, ProxyNCA++, ECCV 2020): a proper softmax.

    Args:
        softmax_scale: distances are multiplied by it.
        distance: how embeddings are compared with proxies; squared Euclidean on unit vectors by
            default.
        weight_regularizer: a penalty on the proxies, added to the loss.
        weight_init_func: how the proxies begin; standard normal by default.
    """


@traits(ref_emb=False)
@forwards(corrected.SoftTripleLoss)
def soft_triple(
    embedding_size: int,
    classes: int,
    centers_per_class: Count = 10,
    la: Positive = 20.0,
    gamma: Positive = 0.1,
    margin: float = 0.01,
    distance: Distance = None,
    reducer: Reducer = None,
    weight_regularizer: Regularizer = None,
    weight_reg_weight: float = 1.0,
    weight_init_func: Init = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.SoftTripleLoss:
    """SoftTriple: softmax over classes with several centres each, softly the nearest.

    Qian, Shang, Sun, Hu, Li & Jin, SoftTriple Loss: Deep Metric Learning Without Triplet Sampling,
    ICCV 2019; the paper merges centres with the weight regulariser `pml.sparse_centers`.

    Args:
        centers_per_class: centres of each class.
        la: λ: similarities to classes are multiplied by it.
        gamma: the temperature that chooses among a class's centres.
        margin: δ: subtracted from the similarity to the item's own class.
        distance: how embeddings are compared with centres, a similarity; cosine by default.
        weight_regularizer: a penalty on the centres, added to the loss.
        weight_init_func: how the centres begin; Kaiming's uniform by default.
    """
    require_similarity(distance, "pml.soft_triple")


@traits(ref_emb=False, miner=False)
@forwards(corrected.P2SGradLoss, embedding_size="descriptors_dim")
def p2s_grad(
    embedding_size: int,
    classes: int,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.P2SGradLoss:
    """P2SGrad: mean squared error between cosines to class weights and the one-hot label.

    Zhang et al., P2SGrad: Refined Gradients for Optimizing Deep Face Models, CVPR 2019, equation
    11. Needs no scale and no margin. The class weights are put back to length 1 at each call.
    """


@traits(ref_emb=False, miner=False)
@forwards(corrected.ManifoldLoss, embedding_size="l", classes="classes")
def manifold(
    embedding_size: int,
    classes: int,
    K: Count = 50,
    lambdaC: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0,
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.8,
    margin: NonNegative = 5e-4,
    distance: Distance = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.ManifoldLoss:
    """Manifold similarity to proxies of meta-classes, measured by a random walk over the batch and
    the proxies.

    Aziere & Todorovic, Ensemble Deep Manifold Similarity Learning Using Hard Proxies, CVPR 2019.
    Each training class belongs to one proxy, drawn when the loss is made (the paper trains an
    ensemble, each member with a draw of its own); upstream draws for each *item*, anew in each
    batch. Inverts a matrix of batch + K.

    Args:
        K: how many proxies (meta-classes); more than there are classes leaves some without
            positives.
        lambdaC: the weight of the contextual loss against the intrinsic one.
        alpha: the share of similarity that the random walk passes on.
        margin: between the similarity to the own proxy and to others.
        distance: how items and proxies are compared, a similarity; cosine by default.
    """
    require_similarity(distance, "pml.manifold")


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make
    for make in (
        normalized_softmax,
        proxy_anchor,
        proxy_nca,
        soft_triple,
        p2s_grad,
        manifold,
    )
}
