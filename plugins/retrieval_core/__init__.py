"""Backbones, datasets, learners and a wrapper of losses that every user needs, and the metrics,
index back ends and store of the package itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval import hookimpl
from retrieval.host.hookspecs import Factories
from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    from retrieval_core.convnet import ConvNet as ConvNet
    from retrieval_core.convnet import Features as Features
    from retrieval_core.elsewhere import huggingface as huggingface
    from retrieval_core.elsewhere import shards as shards
    from retrieval_core.elsewhere import torchvision_dataset as torchvision_dataset
    from retrieval_core.folders import image_folder as image_folder
    from retrieval_core.learners import LDA as LDA
    from retrieval_core.learners import NCA as NCA
    from retrieval_core.learners import PCA as PCA
    from retrieval_core.lfw import lfw_people as lfw_people
    from retrieval_core.manifests import manifest as manifest
    from retrieval_core.more_small import cifar10 as cifar10
    from retrieval_core.more_small import emnist as emnist
    from retrieval_core.nested import matryoshka as matryoshka
    from retrieval_core.partial_fc import PartialFC as PartialFC
    from retrieval_core.pixels import Pixels as Pixels
    from retrieval_core.small import digits as digits
    from retrieval_core.small import fashion_mnist as fashion_mnist
    from retrieval_core.tables import parquet as parquet
    from retrieval_core.timm_models import efficientnet_lite0 as efficientnet_lite0
    from retrieval_core.timm_models import timm_model as timm_model
    from retrieval_core.torchvision_models import torchvision_model as torchvision_model
    from retrieval_core.vectors import features as features

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval_core.convnet": ["ConvNet", "Features"],
        "retrieval_core.learners": ["LDA", "NCA", "PCA"],
        "retrieval_core.nested": ["matryoshka"],
        "retrieval_core.partial_fc": ["PartialFC"],
        "retrieval_core.pixels": ["Pixels"],
        "retrieval_core.more_small": ["cifar10", "emnist"],
        "retrieval_core.small": ["digits", "fashion_mnist"],
        "retrieval_core.tables": ["parquet"],
        "retrieval_core.timm_models": ["efficientnet_lite0", "timm_model"],
        "retrieval_core.vectors": ["features"],
        "retrieval_core.elsewhere": ["huggingface", "shards", "torchvision_dataset"],
        "retrieval_core.folders": ["image_folder"],
        "retrieval_core.lfw": ["lfw_people"],
        "retrieval_core.manifests": ["manifest"],
        "retrieval_core.torchvision_models": ["torchvision_model"],
    },
)


@hookimpl
def retrieval_backbones() -> Factories:
    """Small convolutional nets, torchvision's and timm's models, EfficientNet-Lite0, and pixels or
    vectors as they are.
    """
    return {
        "convnet": "retrieval_core.convnet:ConvNet",
        "efficientnet_lite0": "retrieval_core.timm_models:efficientnet_lite0",
        "features": "retrieval_core.convnet:Features",
        "pixels": "retrieval_core.pixels:Pixels",
        "timm": "retrieval_core.timm_models:timm_model",
        "torchvision": "retrieval_core.torchvision_models:torchvision_model",
    }


@hookimpl
def retrieval_datasets() -> Factories:
    """Digits, Fashion-MNIST, EMNIST, CIFAR-10, what other libraries read, and the user's own
    folders, manifests, shards, faces and vectors.
    """
    return {
        "cifar10": "retrieval_core.more_small:cifar10",
        "csv": "retrieval_core.manifests:manifest",
        "digits": "retrieval_core.small:digits",
        "emnist": "retrieval_core.more_small:emnist",
        "fashion_mnist": "retrieval_core.small:fashion_mnist",
        "features": "retrieval_core.vectors:features",
        "huggingface": "retrieval_core.elsewhere:huggingface",
        "image_folder": "retrieval_core.folders:image_folder",
        "lfw": "retrieval_core.lfw:lfw_people",
        "parquet": "retrieval_core.tables:parquet",
        "shards": "retrieval_core.elsewhere:shards",
        "torchvision": "retrieval_core.elsewhere:torchvision_dataset",
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
    """Softmax over very many classes, divided over processes, and a wrapper of any loss, by which
    embeddings can be cut short.
    """
    return {
        "matryoshka": "retrieval_core.nested:matryoshka",
        "partial_fc": "retrieval_core.partial_fc:PartialFC",
    }


@hookimpl
def retrieval_augmentations() -> Factories:
    """torchvision's random transforms of images."""
    from retrieval_core.augmentations import every

    return every()


@hookimpl
def retrieval_metrics() -> Factories:
    """The package's own metrics."""
    from retrieval.model.metrics import retrieval_metrics as own

    return own()


@hookimpl
def retrieval_indexes() -> Factories:
    """The package's own index back ends."""
    from retrieval.serving.index.backends import retrieval_indexes as own

    return own()


@hookimpl
def retrieval_stores() -> Factories:
    """The package's own store, a folder."""
    from retrieval.serving.store.built_in import retrieval_stores as own

    return own()
