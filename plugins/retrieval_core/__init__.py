"""Backbones, datasets, learners and a wrapper of losses that every user needs, and the metrics,
index back ends and store of the package itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval import hookimpl
from retrieval.host.hookspecs import Factories
from retrieval.host.lazy import lazy
from retrieval.model.built_in import retrieval_metrics as retrieval_metrics
from retrieval.serving.index.backends import retrieval_indexes as retrieval_indexes
from retrieval.serving.store.built_in import retrieval_stores as retrieval_stores

if TYPE_CHECKING:
    from retrieval_core.convnet import ConvNet as ConvNet
    from retrieval_core.convnet import Features as Features
    from retrieval_core.elsewhere import huggingface as huggingface
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
        "retrieval_core.elsewhere": ["huggingface", "torchvision_dataset"],
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
    from retrieval_core.convnet import ConvNet, Features
    from retrieval_core.pixels import Pixels
    from retrieval_core.timm_models import efficientnet_lite0, timm_model
    from retrieval_core.torchvision_models import torchvision_model

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
    """Digits, Fashion-MNIST, EMNIST, CIFAR-10, what other libraries read, and the user's own
    folders, manifests, faces and vectors.
    """
    from retrieval_core.elsewhere import huggingface, torchvision_dataset
    from retrieval_core.folders import image_folder
    from retrieval_core.lfw import lfw_people
    from retrieval_core.manifests import manifest
    from retrieval_core.more_small import cifar10, emnist
    from retrieval_core.small import digits, fashion_mnist
    from retrieval_core.tables import parquet
    from retrieval_core.vectors import features

    return {
        "cifar10": cifar10,
        "csv": manifest,
        "digits": digits,
        "emnist": emnist,
        "fashion_mnist": fashion_mnist,
        "features": features,
        "huggingface": huggingface,
        "image_folder": image_folder,
        "lfw": lfw_people,
        "parquet": parquet,
        "torchvision": torchvision_dataset,
    }


@hookimpl
def retrieval_learners() -> Factories:
    """Linear maps from scikit-learn."""
    from retrieval_core.learners import LDA, NCA, PCA

    return {"lda": LDA, "nca": NCA, "pca": PCA}


@hookimpl
def retrieval_losses() -> Factories:
    """Softmax over very many classes, divided over processes, and a wrapper of any loss, by which
    embeddings can be cut short.
    """
    from retrieval_core.nested import matryoshka
    from retrieval_core.partial_fc import PartialFC

    return {"matryoshka": matryoshka, "partial_fc": PartialFC}


@hookimpl
def retrieval_augmentations() -> Factories:
    """torchvision's random transforms of images."""
    from retrieval_core.augmentations import every

    return every()
