"""Softmax losses over class weights with a margin at the target. None takes a reference set.

The class weights are the loss's own and join the optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field
from pytorch_metric_learning import losses
from retrieval.plugin import traits

from retrieval_pml import corrected_proxies as corrected
from retrieval_pml.common import Count, Init, Positive, Reducer, Regularizer
from retrieval_pml.forward import forwards

Degrees = Annotated[float, Field(ge=0, lt=180)]


@traits(ref_emb=False)
@forwards(corrected.LargeMarginSoftmaxLoss)
def large_margin_softmax(
    embedding_size: int,
    classes: int,
    margin: Count = 4,
    scale: Positive = 1.0,
    reducer: Reducer = None,
    weight_regularizer: Regularizer = None,
    weight_reg_weight: float = 1.0,
    weight_init_func: Init = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.LargeMarginSoftmaxLoss:
    """Large-margin softmax: the target class's angle counts m times.

    Liu, Wen, Yu & Yang, Large-Margin Softmax Loss for Convolutional Neural Networks, ICML 2016.
    Logits keep the lengths of embeddings and weights.

    Args:
        margin: the factor m of the target's angle.
        scale: logits are multiplied by it.
    """


@traits(ref_emb=False)
@forwards(corrected.SphereFaceLoss)
def sphere_face(
    embedding_size: int,
    classes: int,
    margin: Count = 4,
    scale: Positive = 1.0,
    reducer: Reducer = None,
    weight_regularizer: Regularizer = None,
    weight_reg_weight: float = 1.0,
    weight_init_func: Init = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.SphereFaceLoss:
    """SphereFace: large-margin softmax with class weights of length 1.

    Liu, Wen, Yu, Li, Raj & Song, SphereFace: Deep Hypersphere Embedding for Face Recognition, CVPR
    2017. Logits keep the embeddings' lengths.

    Args:
        margin: the factor m of the target's angle.
        scale: logits are multiplied by it.
    """


@traits(ref_emb=False)
@forwards(corrected.ArcFaceLoss)
def arc_face(
    embedding_size: int,
    classes: int,
    margin: Degrees = 28.6,
    scale: Positive = 64.0,
    reducer: Reducer = None,
    weight_regularizer: Regularizer = None,
    weight_reg_weight: float = 1.0,
    weight_init_func: Init = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.ArcFaceLoss:
    """ArcFace: softmax over cosines, with a margin added to the target class's angle.

    Deng, Guo, Xue & Zafeiriou, ArcFace: Additive Angular Margin Loss for Deep Face Recognition,
    CVPR 2019.

    Args:
        margin: added to the target class's angle, in degrees.
        scale: cosines are multiplied by it.
    """


@traits(ref_emb=False)
@forwards(corrected.CosFaceLoss)
def cos_face(
    embedding_size: int,
    classes: int,
    margin: float = 0.35,
    scale: Positive = 64.0,
    reducer: Reducer = None,
    weight_regularizer: Regularizer = None,
    weight_reg_weight: float = 1.0,
    weight_init_func: Init = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.CosFaceLoss:
    """CosFace: softmax over cosines, with a margin subtracted from the target class's.

    Wang et al., CosFace: Large Margin Cosine Loss for Deep Face Recognition, CVPR 2018.

    Args:
        margin: subtracted from the target class's cosine.
        scale: cosines are multiplied by it.
    """


@traits(ref_emb=False)
@forwards(corrected.SubCenterArcFaceLoss)
def sub_center_arc_face(
    embedding_size: int,
    classes: int,
    margin: Degrees = 28.6,
    scale: Positive = 64.0,
    sub_centers: Count = 3,
    reducer: Reducer = None,
    weight_regularizer: Regularizer = None,
    weight_reg_weight: float = 1.0,
    weight_init_func: Init = None,
    embedding_regularizer: Regularizer = None,
    embedding_reg_weight: float = 1.0,
) -> losses.SubCenterArcFaceLoss:
    """ArcFace with several centres per class, of which the nearest counts: wrong labels gather at a
    centre of their own.

    Deng, Guo, Liu, Gong & Zafeiriou, Sub-center ArcFace: Boosting Face Recognition by Large-Scale
    Noisy Web Faces, ECCV
    2020. The loss's `get_outliers(embeddings, labels)` finds the items far from their class's
          dominant centre.

    Args:
        margin: added to the target class's angle, in degrees.
        scale: cosines are multiplied by it.
        sub_centers: centres of each class.
        weight_regularizer: a penalty on the centres, added to the loss.
        weight_init_func: how the centres begin; standard normal by default.
    """


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make
    for make in (large_margin_softmax, sphere_face, arc_face, cos_face, sub_center_arc_face)
}
