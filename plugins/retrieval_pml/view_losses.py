"""Losses of two views of an object. Items that share a label are its views, paired in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_metric_learning import losses
from retrieval.plugin import pair_views, traits
from torch import Tensor

from retrieval_pml.offers import NonNegative, Positive, offer
from retrieval_pml.wrapper_losses import AnyLoss, check_reference


class VICRegLoss(losses.VICRegLoss):
    """VICReg: makes two views similar, spreads each dimension and decorrelates dimensions.

    Bardes, Ponce & LeCun, VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised
    Learning, ICLR 2022. Items that share a label are views of one object, paired in the
    batch's order. With fewer than two pairs the loss is 0.

    Args:
        invariance_lambda: λ, weight of the distance between views.
        variance_mu: μ, weight of the hinge on the standard deviation of each dimension.
        covariance_v: ν, weight of the squared covariances.
        eps: number added to the variance before its root is taken.
        reducer: reduces the losses of each term to one number; the mean by default.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the losses by name; the labels define the two views."""
        first, second = pair_views(labels)
        if len(first) < 2:  # a single pair has no variance
            return self.zero_losses()
        return super().compute_loss(embeddings[first], None, None, embeddings[second], None)


@traits(ref_emb=False, miner=False)
class SelfSupervisedLoss(losses.SelfSupervisedLoss):
    """Applies another loss to pairs of views, which are items that share a label, in order.

    Chen, Kornblith, Norouzi & Hinton, SimCLR, ICML 2020, if `loss` is `pml.nt_xent`. Use it for
    data whose labels name the image from which a view was made. With class labels, it applies
    `loss` to pairs of a class.

    Args:
        loss: the loss, which must accept a reference set.
        symmetric: whether both views are anchors, compared with all other views. Otherwise the
            first views are compared with the second views.
    """

    def __init__(self, loss: AnyLoss, symmetric: bool = True) -> None:
        check_reference("pml.self_supervised", loss)
        super().__init__(loss=loss, symmetric=symmetric)

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        """Accept every name; `__init__` checks the loss itself."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return the loss, a scalar, of the two views that the labels define."""
        if indices_tuple is not None:
            raise ValueError("SelfSupervisedLoss accepts no miner's indices: remove the miner")
        if labels is None or ref_emb is not None:
            raise ValueError("SelfSupervisedLoss finds views by labels, and accepts no ref_emb")
        first, second = pair_views(labels.to(embeddings.device))
        if len(first) == 0:
            return embeddings.sum() * 0
        if self.symmetric:
            both = torch.cat([first, second])
            return self.loss(embeddings[both], labels[both])
        return self.loss(embeddings[first], labels[first], None, embeddings[second], labels[second])


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
    "self_supervised": SelfSupervisedLoss,
}
