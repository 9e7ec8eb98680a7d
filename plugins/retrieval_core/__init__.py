"""Backbones, data sets, learners and losses of general use, and the built-in parts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from retrieval.helpers import lazy
from retrieval.plugin import Factories, hookimpl

if TYPE_CHECKING:
    from retrieval_core.learners import LDA as LDA, NCA as NCA, PCA as PCA


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
        "huggingface": "retrieval_core.library_datasets:huggingface",
        "image_folder": "retrieval_core.folders:image_folder",
        "lfw": "retrieval_core.lfw:lfw_people",
        "parquet": "retrieval_core.vectors:parquet",
        "torchvision": "retrieval_core.library_datasets:torchvision_dataset",
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
    """Losses of rankings, neighbours, mixtures, views, texts, a teacher, or very many classes."""
    return {
        "barlow_twins": "retrieval_core.barlow_twins:BarlowTwins",
        "contextual": "retrieval_core.contextual_loss:Contextual",
        "distillation": "retrieval_core.distillation_loss:distillation",
        "info_nce": "retrieval_core.text_losses:InfoNCE",
        "matryoshka": "retrieval_core.matryoshka_loss:matryoshka",
        "metrix": "retrieval_core.metrix_loss:Metrix",
        "metrix_multi_similarity": "retrieval_core.metrix_loss:MetrixMultiSimilarity",
        "metrix_proxy_anchor": "retrieval_core.metrix_loss:MetrixProxyAnchor",
        "partial_fc": "retrieval_core.partial_fc:PartialFC",
        "recall_at_k": "retrieval_core.recall_loss:RecallAtK",
        "sigmoid_loss": "retrieval_core.text_losses:SigmoidLoss",
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
    from retrieval.data.loading import retrieval_samplers as built_in

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
        from retrieval_core.tensorboard_tracker import Board

        return {"tensorboard": Board}


@hookimpl
def retrieval_text_encoders() -> Factories:
    """A small encoder of English sentences."""
    return {"sentence_encoder": "retrieval_core.sentence_encoder:sentence_encoder"}


@hookimpl
def retrieval_metrics() -> Factories:
    """The built-in metrics."""
    from retrieval.metrics.recall_map_ndcg import retrieval_metrics as built_in

    return built_in()


@hookimpl
def retrieval_indexes() -> Factories:
    """The built-in index back ends."""
    from retrieval.store.backends import retrieval_indexes as built_in

    return built_in()


@hookimpl
def retrieval_stores() -> Factories:
    """The built-in store, a local folder."""
    from retrieval.store.find_store import retrieval_stores as built_in

    return built_in()


# The package also exports the factories themselves, and imports each on first use.
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
