"""Losses of two views of an object; items that share a label are its views, paired in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_metric_learning import losses
from retrieval.plugin import pair_views, traits
from torch import Tensor, nn

from retrieval_pml.adapters import (
    AnyLoss,
    NonNegative,
    Positive,
    PreciseLoss,
    Reducer,
    element,
    forwards,
    no_indices,
    on_labels,
    reduced,
)
from retrieval_pml.pair_matrix import derivatives
from retrieval_pml.wrapper_losses import check_reference


def places_of_views(
    embeddings: Tensor,
    labels: Tensor | None,
    ref_emb: Tensor | None,
    ref_labels: Tensor | None,
    name: str,
) -> tuple[Tensor, Tensor]:
    """Return where first and where second views are in the batch, each (P,)."""
    if ref_emb is not None or ref_labels is not None:
        raise ValueError(
            f"{name} takes the second views from the batch: it takes no ref_emb beside labels"
        )
    return pair_views(on_labels(labels, embeddings, name))


def two_views(
    embeddings: Tensor,
    labels: Tensor | None,
    ref_emb: Tensor | None,
    ref_labels: Tensor | None,
    name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return first views, second views (P, C each) and their labels (P,)."""
    if labels is None and ref_emb is not None:
        return embeddings, ref_emb, torch.arange(len(embeddings), device=embeddings.device)
    first, second = places_of_views(embeddings, labels, ref_emb, ref_labels, name)
    assert labels is not None
    return embeddings[first], embeddings[second], labels.to(embeddings.device)[first]


class VICRegLoss(PreciseLoss, losses.VICRegLoss):
    """Upstream's with a written-down gradient, which finds the two views by their label.

    Without labels the embeddings are the first views, and `ref_emb` holds the second ones.
    """

    def measured(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the loss, a scalar.

        Items of one label are views of one thing; without labels `ref_emb` holds the second views.
        """
        no_indices("VICRegLoss", indices_tuple)
        if labels is None and ref_emb is not None:
            views = torch.stack([embeddings, ref_emb])
        else:
            places = torch.cat(
                places_of_views(embeddings, labels, ref_emb, ref_labels, "VICRegLoss")
            )
            views = embeddings.index_select(0, places).view(
                2, len(places) // 2, embeddings.shape[1]
            )
        if views.shape[1] < 2:  # a single pair has no variance
            return embeddings.sum() * 0
        self.reset_stats()
        apart, spread, covariance = _VICReg.apply(views, self.eps)
        parts = {
            **element(self.invariance_lambda * apart, "invariance_loss"),
            **element(self.variance_mu * spread[0], "variance_loss1"),
            **element(self.variance_mu * spread[1], "variance_loss2"),
            "covariance_loss": reduced(self.covariance_v * covariance)["loss"],
        }
        return self.reducer(parts, views[0], None)


class _VICReg(torch.autograd.Function):
    """The distances of two views, their dimensions' lack of spread, and their covariances.

    One product for the covariances and one for all of the gradient, where autograd takes three for
    the covariances alone.
    """

    @staticmethod
    def forward(ctx: Any, views: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        apart = views[0] - views[1]
        centred = views - views.mean(1, keepdim=True)
        covariances = centred.mT @ centred / (views.shape[1] - 1)
        diagonal = covariances.diagonal(dim1=1, dim2=2)
        deviations = (diagonal + eps).sqrt_()
        diagonal.zero_()
        ctx.save_for_backward(views, apart, centred, covariances, deviations)
        ctx.eps = eps
        return (
            apart.square().mean(1),
            (1 - deviations).relu_() / 2,
            covariances.square().sum() / views.shape[2],
        )

    @staticmethod
    def backward(ctx: Any, of_apart: Tensor, of_spread: Tensor, of_covariance: Tensor) -> Any:
        views, apart, centred, covariances, deviations = ctx.saved_tensors
        _, things, width = views.shape
        if torch.is_grad_enabled():  # the gradient will be differentiated
            gradients = of_apart, of_spread, of_covariance
            return (
                *derivatives(lambda stacked: _plain_vic_reg(stacked, ctx.eps), [views], gradients),
                None,
            )
        slopes = covariances * (of_covariance * (4 / width / (things - 1)))
        kept = of_spread * (deviations < 1)
        # a dimension's variance is on the diagonal, which the covariances leave free
        slopes.diagonal(dim1=1, dim2=2).copy_(kept.div_(deviations).mul_(-0.5 / (things - 1)))
        gradient = centred @ slopes
        drawn = apart * (of_apart * (2 / width)).unsqueeze(1)
        gradient[0] += drawn
        gradient[1] -= drawn
        return gradient, None


def _plain_vic_reg(views: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_VICReg` returns, as a formula."""
    centred = views - views.mean(1, keepdim=True)
    covariances = centred.mT @ centred / (views.shape[1] - 1)
    diagonal = covariances.diagonal(dim1=1, dim2=2)
    return (
        (views[0] - views[1]).square().mean(1),
        torch.relu(1 - torch.sqrt(diagonal + eps)) / 2,
        (covariances - torch.diag_embed(diagonal)).square().sum() / views.shape[2],
    )


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
        """Return the loss, a scalar; for the arguments see `VICRegLoss.forward`."""
        no_indices("SelfSupervisedLoss", indices_tuple)
        first, second, labels = two_views(
            embeddings, labels, ref_emb, ref_labels, "SelfSupervisedLoss"
        )
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
    "vic_reg": vic_reg,
    "self_supervised": self_supervised,
}
