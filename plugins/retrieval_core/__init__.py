"""Backbones, datasets, learners and metrics that every user needs."""

from __future__ import annotations

import importlib
from typing import Any

from retrieval import hookimpl
from retrieval.hookspecs import Factories

_HOME = {
    "ConvNet": "convnet",
    "Features": "convnet",
    "LDA": "learners",
    "NCA": "learners",
    "PCA": "learners",
    "Pixels": "pixels",
    "cifar10": "more_small",
    "digits": "small",
    "efficientnet_lite0": "timm_models",
    "emnist": "more_small",
    "fashion_mnist": "small",
    "features": "vectors",
    "image_folder": "folders",
    "lfw_people": "lfw",
    "manifest": "manifests",
    "timm_model": "timm_models",
    "torchvision_model": "torchvision_models",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"retrieval_core.{_HOME[name]}"), name)
    raise AttributeError(f"module 'retrieval_core' has no attribute '{name}'")


@hookimpl
def retrieval_backbones() -> Factories:
    """Small convolutional nets, torchvision's and timm's models, EfficientNet-Lite0, and pixels or vectors as they are."""
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
    """Digits, Fashion-MNIST, EMNIST, CIFAR-10, and the user's own folders, manifests, faces and vectors."""
    from retrieval_core.folders import image_folder
    from retrieval_core.lfw import lfw_people
    from retrieval_core.manifests import manifest
    from retrieval_core.more_small import cifar10, emnist
    from retrieval_core.small import digits, fashion_mnist
    from retrieval_core.vectors import features

    return {
        "cifar10": cifar10,
        "csv": manifest,
        "digits": digits,
        "emnist": emnist,
        "fashion_mnist": fashion_mnist,
        "features": features,
        "image_folder": image_folder,
        "lfw": lfw_people,
    }


@hookimpl
def retrieval_learners() -> Factories:
    """Linear maps from scikit-learn."""
    from retrieval_core.learners import LDA, NCA, PCA

    return {"lda": LDA, "nca": NCA, "pca": PCA}


@hookimpl
def retrieval_metrics() -> Factories:
    """The built-in figures, also under their plain names."""
    from retrieval.evaluate import metrics

    return {
        "map": metrics.mean_average_precision,
        "map_at_r": metrics.map_at_r,
        "precision_at": metrics.precision_at,
        "r_precision": metrics.r_precision,
        "recall_at": metrics.recall_at,
    }
