"""Backbones, datasets, learners and losses that every user needs, and the package's own parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval import hookimpl
from retrieval.model.built_in import retrieval_metrics as retrieval_metrics
from retrieval.plugin_tools import Factories, lazy
from retrieval.serving.index.backends import retrieval_indexes as retrieval_indexes
from retrieval.serving.store.built_in import retrieval_stores as retrieval_stores

if TYPE_CHECKING:
    from retrieval_core.convnet import ConvNet as ConvNet
    from retrieval_core.convnet import Features as Features
    from retrieval_core.convnet import Pixels as Pixels
    from retrieval_core.folders import image_folder as image_folder
    from retrieval_core.folders import manifest as manifest
    from retrieval_core.learners import LDA as LDA
    from retrieval_core.learners import NCA as NCA
    from retrieval_core.learners import PCA as PCA
    from retrieval_core.lfw import lfw_people as lfw_people
    from retrieval_core.matryoshka_loss import matryoshka as matryoshka
    from retrieval_core.other_libraries import huggingface as huggingface
    from retrieval_core.other_libraries import shards as shards
    from retrieval_core.other_libraries import torchvision_dataset as torchvision_dataset
    from retrieval_core.partial_fc import PartialFC as PartialFC
    from retrieval_core.pretrained import efficientnet_lite0 as efficientnet_lite0
    from retrieval_core.pretrained import timm_model as timm_model
    from retrieval_core.pretrained import torchvision_model as torchvision_model
    from retrieval_core.small_images import cifar10 as cifar10
    from retrieval_core.small_images import digits as digits
    from retrieval_core.small_images import emnist as emnist
    from retrieval_core.small_images import fashion_mnist as fashion_mnist
    from retrieval_core.vectors import features as features
    from retrieval_core.vectors import parquet as parquet

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval_core.convnet": ["ConvNet", "Features", "Pixels"],
        "retrieval_core.folders": ["image_folder", "manifest"],
        "retrieval_core.learners": ["LDA", "NCA", "PCA"],
        "retrieval_core.lfw": ["lfw_people"],
        "retrieval_core.matryoshka_loss": ["matryoshka"],
        "retrieval_core.other_libraries": ["huggingface", "shards", "torchvision_dataset"],
        "retrieval_core.partial_fc": ["PartialFC"],
        "retrieval_core.pretrained": ["efficientnet_lite0", "timm_model", "torchvision_model"],
        "retrieval_core.small_images": ["cifar10", "digits", "emnist", "fashion_mnist"],
        "retrieval_core.vectors": ["features", "parquet"],
    },
)


@hookimpl
def retrieval_backbones() -> Factories:
    """Small nets, torchvision's and timm's models, EfficientNet-Lite0, pixels and vectors."""
    from retrieval_core import (
        ConvNet,
        Features,
        Pixels,
        efficientnet_lite0,
        timm_model,
        torchvision_model,
    )

    return {
        "convnet": ConvNet,
        "efficientnet_lite0": efficientnet_lite0,
        "features": Features,
        "pixels": Pixels,
        "timm": timm_model,
        "torchvision": torchvision_model,
    }


@hookimpl
def retrieval_datasets() -> Factories:
    """Small public sets, what other libraries read, and the user's own images and vectors."""
    import retrieval_core as own

    return {
        "cifar10": own.cifar10,
        "csv": own.manifest,
        "digits": own.digits,
        "emnist": own.emnist,
        "fashion_mnist": own.fashion_mnist,
        "features": own.features,
        "huggingface": own.huggingface,
        "image_folder": own.image_folder,
        "lfw": own.lfw_people,
        "parquet": own.parquet,
        "shards": own.shards,
        "torchvision": own.torchvision_dataset,
    }


@hookimpl
def retrieval_learners() -> Factories:
    """Linear maps from scikit-learn."""
    from retrieval_core import LDA, NCA, PCA

    return {"lda": LDA, "nca": NCA, "pca": PCA}


@hookimpl
def retrieval_losses() -> Factories:
    """Softmax over very many classes, and a wrapper after which embeddings can be cut short."""
    from retrieval_core import PartialFC, matryoshka

    return {"matryoshka": matryoshka, "partial_fc": PartialFC}


@hookimpl
def retrieval_augmentations() -> Factories:
    """torchvision's random transforms of images."""
    from retrieval_core.augmentations import every

    return every()
