"""Backbones, data sets, learners and losses of general use, and the built-in parts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from retrieval.plugin import Factories, hookimpl, lazy

if TYPE_CHECKING:
    from retrieval_core.barlow_twins import BarlowTwins as BarlowTwins
    from retrieval_core.contextual_loss import Contextual as Contextual
    from retrieval_core.convnet import ConvNet as ConvNet
    from retrieval_core.convnet import Features as Features
    from retrieval_core.convnet import Pixels as Pixels
    from retrieval_core.distillation_loss import distillation as distillation
    from retrieval_core.embedding_generators import EmbeddingExpansion as EmbeddingExpansion
    from retrieval_core.embedding_generators import SymmetricalSynthesis as SymmetricalSynthesis
    from retrieval_core.folders import image_folder as image_folder
    from retrieval_core.folders import manifest as manifest
    from retrieval_core.learners import LDA as LDA
    from retrieval_core.learners import NCA as NCA
    from retrieval_core.learners import PCA as PCA
    from retrieval_core.lfw import lfw_people as lfw_people
    from retrieval_core.matryoshka_loss import matryoshka as matryoshka
    from retrieval_core.metrix_loss import Metrix as Metrix
    from retrieval_core.metrix_loss import MetrixMultiSimilarity as MetrixMultiSimilarity
    from retrieval_core.metrix_loss import MetrixProxyAnchor as MetrixProxyAnchor
    from retrieval_core.other_libraries import huggingface as huggingface
    from retrieval_core.other_libraries import torchvision_dataset as torchvision_dataset
    from retrieval_core.partial_fc import PartialFC as PartialFC
    from retrieval_core.pretrained import efficientnet_lite0 as efficientnet_lite0
    from retrieval_core.pretrained import efficientnet_lite1 as efficientnet_lite1
    from retrieval_core.pretrained import efficientnet_lite2 as efficientnet_lite2
    from retrieval_core.pretrained import timm_model as timm_model
    from retrieval_core.pretrained import torchvision_model as torchvision_model
    from retrieval_core.recall_loss import RecallAtK as RecallAtK
    from retrieval_core.samplers import HardClasses as HardClasses
    from retrieval_core.samplers import Hierarchical as Hierarchical
    from retrieval_core.samplers import RandomItems as RandomItems
    from retrieval_core.small_images import cifar10 as cifar10
    from retrieval_core.small_images import digits as digits
    from retrieval_core.small_images import emnist as emnist
    from retrieval_core.small_images import fashion_mnist as fashion_mnist
    from retrieval_core.vectors import features as features
    from retrieval_core.vectors import parquet as parquet


@hookimpl
def retrieval_backbones() -> Factories:
    """Small networks, models of torchvision and timm, EfficientNet-Lite, pixels and vectors."""
    return {
        "convnet": "retrieval_core.convnet:ConvNet",
        "efficientnet_lite0": "retrieval_core.pretrained:efficientnet_lite0",
        "efficientnet_lite1": "retrieval_core.pretrained:efficientnet_lite1",
        "efficientnet_lite2": "retrieval_core.pretrained:efficientnet_lite2",
        "features": "retrieval_core.convnet:Features",
        "pixels": "retrieval_core.convnet:Pixels",
        "timm": "retrieval_core.pretrained:timm_model",
        "torchvision": "retrieval_core.pretrained:torchvision_model",
    }


@hookimpl
def retrieval_datasets() -> Factories:
    """Small public data sets, those of other libraries, and the user's images and vectors."""
    return {
        "cifar10": "retrieval_core.small_images:cifar10",
        "csv": "retrieval_core.folders:manifest",
        "digits": "retrieval_core.small_images:digits",
        "emnist": "retrieval_core.small_images:emnist",
        "fashion_mnist": "retrieval_core.small_images:fashion_mnist",
        "features": "retrieval_core.vectors:features",
        "huggingface": "retrieval_core.other_libraries:huggingface",
        "image_folder": "retrieval_core.folders:image_folder",
        "lfw": "retrieval_core.lfw:lfw_people",
        "parquet": "retrieval_core.vectors:parquet",
        "torchvision": "retrieval_core.other_libraries:torchvision_dataset",
    }


@hookimpl
def retrieval_learners() -> Factories:
    """Linear maps from scikit-learn."""
    return {
        "lda": "retrieval_core.learners:LDA",
        "nca": "retrieval_core.learners:NCA",
        "pca": "retrieval_core.learners:PCA",
    }


@hookimpl
def retrieval_losses() -> Factories:
    """Losses of rankings, neighbourhoods, mixtures, views, a teacher, or very many classes."""
    return {
        "barlow_twins": "retrieval_core.barlow_twins:BarlowTwins",
        "contextual": "retrieval_core.contextual_loss:Contextual",
        "distillation": "retrieval_core.distillation_loss:distillation",
        "matryoshka": "retrieval_core.matryoshka_loss:matryoshka",
        "metrix": "retrieval_core.metrix_loss:Metrix",
        "metrix_multi_similarity": "retrieval_core.metrix_loss:MetrixMultiSimilarity",
        "metrix_proxy_anchor": "retrieval_core.metrix_loss:MetrixProxyAnchor",
        "partial_fc": "retrieval_core.partial_fc:PartialFC",
        "recall_at_k": "retrieval_core.recall_loss:RecallAtK",
    }


@hookimpl
def retrieval_generators() -> Factories:
    """Generators of hard negatives from two embeddings of a class, without trained weights."""
    return {
        "embedding_expansion": "retrieval_core.embedding_generators:EmbeddingExpansion",
        "symmetrical_synthesis": "retrieval_core.embedding_generators:SymmetricalSynthesis",
    }


@hookimpl
def retrieval_samplers() -> Factories:
    """Batches of classes × items, of any items, of classes in a group, or of similar classes."""
    from retrieval.data.samplers import retrieval_samplers as built_in

    return {
        **built_in(),
        "hard_classes": "retrieval_core.samplers:HardClasses",
        "hierarchical": "retrieval_core.samplers:Hierarchical",
        "random": "retrieval_core.samplers:RandomItems",
    }


@hookimpl
def retrieval_augmentations() -> Factories:
    """torchvision's random transforms of images."""
    from retrieval_core.augmentations import every

    return every()


if find_spec("tensorboard") is not None:

    @hookimpl
    def retrieval_trackers() -> Factories:
        """Files for TensorBoard."""
        from retrieval_core.board import Board

        return {"tensorboard": Board}


@hookimpl
def retrieval_metrics() -> Factories:
    """The built-in metrics."""
    from retrieval.model.metrics import retrieval_metrics as built_in

    return built_in()


@hookimpl
def retrieval_indexes() -> Factories:
    """The built-in index back ends."""
    from retrieval.serving.index.backends import retrieval_indexes as built_in

    return built_in()


@hookimpl
def retrieval_stores() -> Factories:
    """The built-in store, a local folder."""
    from retrieval.serving.store.place import retrieval_stores as built_in

    return built_in()


# Factories are names of the package, too, and are imported on first use.
__getattr__, __dir__ = lazy(
    __name__,
    [
        retrieval_backbones(),
        retrieval_datasets(),
        retrieval_learners(),
        retrieval_losses(),
        retrieval_generators(),
        {"retrieval_core.samplers": ["HardClasses", "Hierarchical", "RandomItems"]},
    ],
)
