"""Losses with proxies of their own, which join the optimiser. None takes a reference set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from pytorch_metric_learning import losses
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.plugin import traits
from torch import Tensor
from torch.nn import functional

from retrieval_pml.adapters import (
    REGULARIZED,
    WEIGHTED,
    Count,
    Distance,
    NonNegative,
    Positive,
    PreciseLoss,
    Reducer,
    element,
    forwards,
    no_indices,
    no_reference,
    on_labels,
    reduced,
    require_similarity,
)
from retrieval_pml.classifier_losses import ClassWeights, at_length, cross_entropy, is_product
from retrieval_pml.pair_matrix import blocks, derivatives, exp_, lengths_of, similarities, unit
from retrieval_pml.softmax_losses import LogNCA


class ProxyAnchorLoss(PreciseLoss, losses.ProxyAnchorLoss):
    """Upstream's, by one matrix of products; see `_proxy_anchor`."""

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
        common_functions.labels_required(labels)
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        assert labels is not None
        if self.collect_stats or not is_product(self.distance):
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.cast_types(embeddings.dtype, embeddings.device)
        weights = None
        if indices_tuple is not None:
            weights = (
                loss_and_miner_utils.convert_to_weights(indices_tuple, labels, embeddings.dtype) - 1
            )
        both = _proxy_anchor(
            at_length(self.distance, self.proxies, 1, self.alpha),
            at_length(self.distance, embeddings, 1),
            labels,
            self.alpha * self.margin,
            weights,
        )
        parts = {**element(both[0], "pos_loss"), **element(both[1], "neg_loss")}
        parts["pos_loss"]["divisor"] = len(torch.unique(labels))
        parts["neg_loss"]["divisor"] = self.num_classes
        self.add_weight_regularization_to_loss_dict(parts, self.proxies)
        return parts


def _proxy_anchor(
    proxies: Tensor, items: Tensor, labels: Tensor, margin: float, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each proxy's log(1 + Σ exp) of its own items' exponents and of all others'.

    Args:
        proxies: (K, C) of length α.
        items: (N, C) of length 1.
        labels: (N,) int64.
        margin: α δ.
        weights: (N,) added to the exponents of each item; None for 0.
    """
    if weights is None:
        weights = items.new_zeros(())
    pull, push = _ProxyAnchor.apply(proxies, items, labels, margin, weights)
    return pull, push


class _ProxyAnchor(torch.autograd.Function):
    """See `_proxy_anchor`."""

    @staticmethod
    def forward(
        ctx: Any, proxies: Tensor, items: Tensor, labels: Tensor, margin: float, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        slopes = proxies @ items.T
        own = labels, torch.arange(len(items), device=items.device)
        pull = weights + margin - slopes[own]
        slopes[own] = -torch.inf
        push = torch.empty_like(slopes[:, 0])
        for part in blocks(*slopes.shape):
            exponents = slopes[part].add_(weights + margin)
            top = exponents.amax(1, keepdim=True).clamp_(min=0)  # with the 1 of log(1 + Σ exp)
            exp_(exponents.sub_(top))
            sums = exponents.sum(1, keepdim=True) + torch.exp(-top)
            push[part] = (top + sums.log()).squeeze(1)
            exponents.div_(sums)
        highest = torch.zeros_like(push).scatter_reduce_(0, labels, pull, "amax")
        pull.sub_(highest[labels]).exp_()
        total = torch.exp(-highest).index_add_(0, labels, pull)
        ctx.save_for_backward(proxies, items, labels, weights, slopes, pull.div_(total[labels]))
        ctx.margin = margin
        return highest + total.log(), push

    @staticmethod
    def backward(ctx: Any, of_pull: Tensor, of_push: Tensor) -> tuple[Tensor | None, ...]:
        proxies, items, labels, weights, slopes, pull = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated
            p, x = derivatives(
                lambda p, x: _plain_proxy_anchor(p, x, labels, ctx.margin, weights),
                (proxies, items),
                (of_pull, of_push),
            )
            return p, x, None, None, None
        pulled = (pull * of_pull[labels]).unsqueeze(1)
        p = x = None
        if ctx.needs_input_grad[0]:
            p = (
                (slopes @ items)
                .mul_(of_push.unsqueeze(1))
                .index_add_(0, labels, items * pulled, alpha=-1)
            )
        if ctx.needs_input_grad[1]:
            x = slopes.T @ (proxies * of_push.unsqueeze(1)) - proxies[labels] * pulled
        return p, x, None, None, None


def _plain_proxy_anchor(
    proxies: Tensor, items: Tensor, labels: Tensor, margin: float, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `_proxy_anchor` returns, as a formula."""
    near = proxies @ items.T
    own = functional.one_hot(labels, len(proxies)).T.bool()
    both = []
    for exponents, mask in ((margin - near, own), (near + margin, ~own)):
        kept = (exponents + weights).masked_fill(~mask, -torch.inf)
        both.append(torch.logsumexp(functional.pad(kept, (0, 1)), 1))
    return both[0], both[1]


@traits(ref_emb=False)
@forwards(ProxyAnchorLoss, WEIGHTED)
def proxy_anchor(
    embedding_size: int,
    classes: int,
    margin: float = 0.1,
    alpha: Positive = 32.0,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.ProxyAnchorLoss:
    """Proxy-anchor loss: each proxy against all items of the batch, the hardest weighing most.

    Kim, Kim, Cho & Kwak, Proxy Anchor Loss for Deep Metric Learning, CVPR 2020. The authors give
    the proxies 100 times the learning rate of the network.

    Args:
        margin: δ: positives should be this much nearer than the distance's zero, negatives this
            much farther.
        alpha: the exponent's scale.
        distance: how embeddings are compared with proxies; cosine similarity by default.
        reducer: reduces the proxies' losses to one number; by default their sum over the number of
            proxies with positives, and of all.
        weight_regularizer: a penalty on the proxies, added to the loss.
        weight_init_func: how the proxies begin; Kaiming's normal (fan out) by default.
    """


class ProxyNCALoss(ClassWeights, LogNCA, losses.ProxyNCALoss):
    """Upstream's, computed by logarithms; it refuses a reference set."""

    def written_for(self, labels: Tensor) -> bool:
        """Return whether `of_items` measures as the distance does and each item has a proxy."""
        distance = self.distance
        squared = type(distance) is LpDistance and (distance.p, distance.power) == (2, 2)
        if not (is_product(distance) or (squared and not distance.collect_stats)):
            return False
        return bool(((labels >= 0) & (labels < len(self.proxies))).all())

    def of_items(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the items' losses (N,)."""
        scale, bias = self.softmax_scale, None
        weights = at_length(self.distance, self.proxies.T, 0)
        if not self.distance.is_inverted:
            # −‖x − w‖² is 2 x w − ‖w‖², and a number of the item's own
            bias = weights.square().sum(0) * -scale
            bias = bias.detach() if self.distance.normalize_embeddings else bias
            scale = 2 * scale
        items = at_length(self.distance, embeddings, 1, scale)
        return cross_entropy(items, weights, labels, torch.clone, bias=bias)

    def class_weights(self) -> Tensor:
        """Return the class weights as rows, for their regulariser."""
        return self.proxies  # type: ignore[no-any-return]

    def weights_of(self, indices_tuple: Any, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the items' weights (N,) by a miner's indices, as anchors."""
        weights: Tensor = loss_and_miner_utils.convert_to_weights(
            indices_tuple, labels, dtype, using_ref=True
        )
        return weights


@traits(ref_emb=False)
@forwards(ProxyNCALoss, WEIGHTED)
def proxy_nca(
    embedding_size: int,
    classes: int,
    softmax_scale: Positive = 1.0,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.ProxyNCALoss:
    """Proxy-NCA: neighbourhood components analysis with one proxy per class in place of neighbours.

    Movshovitz-Attias, Toshev, Leung, Ioffe & Singh, No Fuss Distance Metric Learning Using Proxies,
    ICCV 2017. As upstream's, and unlike the paper's, the denominator includes the item's own proxy
    (Teh, DeVries & Taylor, ProxyNCA++, ECCV 2020): a proper softmax.

    Args:
        softmax_scale: distances are multiplied by it.
        distance: how embeddings are compared with proxies; squared Euclidean on unit vectors by
            default.
        weight_regularizer: a penalty on the proxies, added to the loss.
        weight_init_func: how the proxies begin; standard normal by default.
    """


class P2SGradLoss(PreciseLoss, losses.P2SGradLoss):
    """Upstream's, by one matrix of products; see `_proxy_anchor`.

    A cosine that rounds to more than 1 stays as it is.
    """

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        no_indices("P2SGradLoss", indices_tuple)
        labels = on_labels(labels, embeddings, "P2SGradLoss")
        weight = common_functions.to_device(
            self.weight.data, tensor=embeddings, dtype=embeddings.dtype
        )
        lengths = lengths_of(weight, 0)
        assert bool((lengths > 1e-5).all()), (
            "a class weight of P2SGradLoss is 0 or no number: it has no direction"
        )
        self.weight.data = weight / (lengths + 1e-7)  # as torch's renorm
        return reduced(_squared_errors(unit(embeddings, 1), self.weight, labels))


def _squared_errors(items: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    """Return the mean squared error of items' products with class weights and the one-hot label."""
    error: Tensor = _SquaredErrors.apply(items, weights, labels)
    return error


class _SquaredErrors(torch.autograd.Function):
    """See `_squared_errors`."""

    @staticmethod
    def forward(ctx: Any, items: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        errors = items @ weights
        errors[torch.arange(len(items), device=items.device), labels] -= 1
        ctx.save_for_backward(items, weights, labels, errors)
        total = torch.stack([errors[part].square().sum() for part in blocks(*errors.shape)]).sum()
        return total / errors.numel()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        items, weights, labels, errors = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated
            errors = items @ weights - functional.one_hot(labels, weights.shape[1])
        share = gradient * (2 / errors.numel())
        x = (errors @ weights.T) * share if ctx.needs_input_grad[0] else None
        w = (items * share).T @ errors if ctx.needs_input_grad[1] else None
        return x, w, None


@traits(ref_emb=False, miner=False)
@forwards(P2SGradLoss, REGULARIZED, embedding_size="descriptors_dim")
def p2s_grad(
    embedding_size: int,
    classes: int,
) -> losses.P2SGradLoss:
    """P2SGrad: mean squared error between cosines to class weights and the one-hot label.

    Zhang et al., P2SGrad: Refined Gradients for Optimizing Deep Face Models, CVPR 2019, equation
    11. Needs no scale and no margin. The class weights are put back to length 1 at each call.
    """


class ManifoldLoss(PreciseLoss, losses.ManifoldLoss):
    """Upstream's with matrices of (N + K)², and classes assigned to proxies once, at random.

    Upstream takes no labels and assigns *items* at random, anew in every batch, unless the caller
    passes meta-classes; it needs as many items as proxies, and K matrices to compare random walks.
    The assignment is a buffer, so a resumed run keeps it.
    """

    def __init__(self, classes: int, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.register_buffer("meta_classes", torch.randperm(classes) % self.K)

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, in the format of upstream's reducers."""
        no_indices("ManifoldLoss", indices_tuple)
        no_reference("ManifoldLoss", None if ref_emb is embeddings else ref_emb)
        own = self.meta_classes[on_labels(labels, embeddings, "ManifoldLoss")].unsqueeze(1)
        items = len(embeddings)
        walks = self._walks(torch.cat([embeddings, self.proxies]))
        unit = functional.normalize(walks, dim=1, eps=1e-8)
        contextual = self._apart(unit[:items] @ unit[items:].T, own)
        loss = self._apart(walks[:items, items:], own) + self.lambdaC * contextual
        return reduced(loss)

    def _walks(self, points: Tensor) -> Tensor:
        """Return where random walks from each of the items and proxies (P, C) end, (P, P)."""
        near = torch.exp(2 * similarities(self.distance, points, points).clamp(min=0))
        identity = torch.eye(len(points), dtype=near.dtype, device=near.device)
        near = near.masked_fill(identity.bool(), 0)
        scale = near.sum(1).rsqrt()
        ends: Tensor = (1 - self.alpha) * torch.linalg.inv(
            identity - self.alpha * near * scale * scale.unsqueeze(1)
        )
        return ends

    def _apart(self, near: Tensor, own: Tensor) -> Tensor:
        """Return the mean over items of log(1 + Σ exp) of how much nearer (N, K) other proxies are
        than the own (N, 1), and the margin.
        """
        excess = near - near.gather(1, own) + self.margin
        excess = excess.masked_fill((excess < 0).scatter(1, own, True), -torch.inf)
        return torch.log1p(excess.exp().sum(1)).mean()


@traits(ref_emb=False, miner=False)
@forwards(ManifoldLoss, REGULARIZED, embedding_size="l", classes="classes")
def manifold(
    embedding_size: int,
    classes: int,
    K: Count = 50,
    lambdaC: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0,
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.8,
    margin: NonNegative = 5e-4,
    distance: Distance = None,
) -> losses.ManifoldLoss:
    """Manifold similarity to proxies of meta-classes, by a random walk over batch and proxies.

    Aziere & Todorovic, Ensemble Deep Manifold Similarity Learning Using Hard Proxies, CVPR 2019.
    Each training class belongs to one proxy, drawn when the loss is made (the paper trains an
    ensemble, each member with a draw of its own); upstream draws for each *item*, anew in each
    batch. Inverts a matrix of batch + K.

    Args:
        K: how many proxies (meta-classes); more than there are classes leaves some without
            positives.
        lambdaC: the weight of the contextual loss against the intrinsic one.
        alpha: the share of similarity that the random walk passes on.
        margin: between the similarity to the own proxy and to others.
        distance: how items and proxies are compared, a similarity; cosine by default.
    """
    require_similarity(distance, "pml.manifold")


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make for make in (proxy_anchor, proxy_nca, p2s_grad, manifold)
}
