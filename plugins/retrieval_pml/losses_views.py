"""Losses of two views of the same things. Items that share a label are views of one thing, paired in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_metric_learning import losses
from retrieval import traits
from torch import Tensor, nn

from retrieval_pml.common import AnyLoss, NonNegative, Positive, PreciseLoss, Reducer, no_indices, on_labels
from retrieval_pml.forward import forwards
from retrieval_pml.wrappers import check_reference


def pair_views(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Pair the items of each label in their order: first with second, third with fourth.

    Args:
        labels: (N,).

    Returns:
        The positions of first and of second views, each (P,); an item left over is in neither.
    """
    order = torch.argsort(labels, stable=True)
    grouped = labels[order]
    begins = torch.searchsorted(grouped, grouped)
    place = torch.arange(len(labels), device=labels.device) - begins
    first = torch.where((place[:-1] % 2 == 0) & (grouped[1:] == grouped[:-1]))[0]
    return order[first], order[first + 1]


def two_views(
    embeddings: Tensor, labels: Tensor | None, ref_emb: Tensor | None, ref_labels: Tensor | None, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return first views, second views (P, C each) and their labels (P,).

    Raises:
        ValueError: there are labels and a reference set, or neither.
    """
    if labels is None and ref_emb is not None:
        return embeddings, ref_emb, torch.arange(len(embeddings), device=embeddings.device)
    if ref_emb is not None or ref_labels is not None:
        raise ValueError(f"{name} takes the second views from the batch: it takes no ref_emb beside labels")
    labels = on_labels(labels, embeddings, name)
    first, second = pair_views(labels)
    return embeddings[first], embeddings[second], labels[first]


class VICRegLoss(PreciseLoss, losses.VICRegLoss):
    """Upstream's, which finds the two views by their label when it is called like any other loss."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return the loss, a scalar.

        Args:
            embeddings: (N, C) both views; without labels, the first views.
            labels: (N,) items of one label are views of one thing; None when `ref_emb` holds the second views.
            indices_tuple: must be None.
            ref_emb: (N, C) the second views, when there are no labels.
            ref_labels: must be None.

        Raises:
            ValueError: there are indices, or labels and a reference set.
        """
        no_indices("VICRegLoss", indices_tuple)
        first, second, _ = two_views(embeddings, labels, ref_emb, ref_labels, "VICRegLoss")
        if len(first) < 2:  # a single pair has no variance
            return embeddings.sum() * 0
        return super().forward(first, ref_emb=second)


class SelfSupervisedLoss(losses.SelfSupervisedLoss):
    """Upstream's, which finds the two views by their label when it is called like any other loss."""

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
        """Return the loss, a scalar; for the arguments see `VICRegLoss.forward`."""
        no_indices("SelfSupervisedLoss", indices_tuple)
        first, second, labels = two_views(embeddings, labels, ref_emb, ref_labels, "SelfSupervisedLoss")
        if len(first) == 0:
            return embeddings.sum() * 0
        if self.symmetric:
            return self.loss(torch.cat([first, second]), torch.cat([labels, labels]))
        return self.loss(first, labels, ref_emb=second, ref_labels=labels.clone())


@traits(ref_emb=False, miner=False)
@forwards(VICRegLoss)
def vic_reg(
    invariance_lambda: NonNegative = 25.0,
    variance_mu: NonNegative = 25.0,
    covariance_v: NonNegative = 1.0,
    eps: Positive = 1e-4,
    reducer: Reducer = None,
) -> losses.VICRegLoss:
    """VICReg: two views of a thing alike, each dimension spread out, no two dimensions correlated.

    Bardes, Ponce & LeCun, VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning, ICLR
    2022. Items that share a label are taken for views of one thing, in pairs, in the batch's order; fewer than two
    pairs cost nothing.

    Args:
        invariance_lambda: the weight of the distance between views (λ).
        variance_mu: the weight of the hinge on each dimension's standard deviation (μ).
        covariance_v: the weight of the squared covariances (ν).
        eps: added to the variance before its root.
        reducer: how each term's losses become one number; the mean by default.
    """


@traits(ref_emb=False, miner=False)
def self_supervised(loss: AnyLoss, symmetric: bool = True) -> losses.SelfSupervisedLoss:
    """Another loss on pairs of views: items that share a label are views of one thing, paired in order.

    Chen, Kornblith, Norouzi & Hinton, SimCLR, ICML 2020, with `pml.nt_xent` inside. For a dataset whose labels say
    which image a view was made of; with class labels it is the inner loss on pairs of a class.

    Args:
        loss: the loss, which must take a reference set.
        symmetric: both views serve as anchors, against all others; otherwise the first against the second views.
    """
    return SelfSupervisedLoss(loss, symmetric)


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "vic_reg": vic_reg,
    "self_supervised": self_supervised,
}
