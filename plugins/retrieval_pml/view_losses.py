"""Losses of two views of an object; items that share a label are its views, paired in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_metric_learning import losses
from retrieval.plugin import pair_views, traits
from torch import Tensor, nn

from retrieval_pml.offers import NonNegative, Positive, offer
from retrieval_pml.wrapper_losses import AnyLoss, check_reference


class VICRegLoss(losses.VICRegLoss):
    """VICReg: makes two views similar, spreads each dimension and decorrelates dimensions.

    Bardes, Ponce & LeCun, VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised
    Learning, ICLR 2022. Items that share a label are views of one object, paired in the
    batch's order. With fewer than two pairs the loss is 0.

    Args:
        invariance_lambda: the weight of the distance between views (λ).
        variance_mu: the weight of the hinge on each dimension's standard deviation (μ).
        covariance_v: the weight of the squared covariances (ν).
        eps: added to the variance before its root.
        reducer: how each term's losses become one number; the mean by default.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return upstream's losses by name, of the two views that labels tell."""
        first, second = pair_views(labels)
        if len(first) < 2:  # a single pair has no variance
            return self.zero_losses()
        return super().compute_loss(embeddings[first], None, None, embeddings[second], None)


@traits(ref_emb=False, miner=False)
class SelfSupervisedLoss(losses.SelfSupervisedLoss):
    """Upstream's, which finds the two views by their label when called like any other loss."""

    def __init__(self, loss: nn.Module, symmetric: bool = True) -> None:
        check_reference("pml.self_supervised", loss)
        super().__init__(loss=loss, symmetric=symmetric)

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        """Accept every name: `__init__` has looked at the loss itself."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return the loss, a scalar, of the two views that labels tell."""
        if indices_tuple is not None:
            raise ValueError("SelfSupervisedLoss takes no miner's indices: remove the miner")
        if labels is None or ref_emb is not None:
            raise ValueError("SelfSupervisedLoss finds both views by labels and takes no ref_emb")
        first, second = pair_views(labels.to(embeddings.device))
        if len(first) == 0:
            return embeddings.sum() * 0
        if self.symmetric:
            both = torch.cat([first, second])
            return self.loss(embeddings[both], labels[both])
        return self.loss(embeddings[first], labels[first], None, embeddings[second], labels[second])


@traits(ref_emb=False, miner=False)
def self_supervised(loss: AnyLoss, symmetric: bool = True) -> losses.SelfSupervisedLoss:
    """Applies another loss to pairs of views, which are items that share a label, in order.

    Chen, Kornblith, Norouzi & Hinton, SimCLR, ICML 2020, with `pml.nt_xent` inside. For a dataset
    whose labels say which image a view was made of; with class labels it is the inner loss on pairs
    of a class.

    Args:
        loss: the loss, which must take a reference set.
        symmetric: whether both views serve as anchors against all others; otherwise the first views
            are compared with the second ones.
    """
    return SelfSupervisedLoss(loss, symmetric)


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "vic_reg": offer(
        VICRegLoss,
        ref_emb=False,
        miner=False,
        without=("distance", "embedding_regularizer", "embedding_reg_weight"),
        invariance_lambda=NonNegative,
        variance_mu=NonNegative,
        covariance_v=NonNegative,
        eps=Positive,
    ),
    "self_supervised": self_supervised,
}
