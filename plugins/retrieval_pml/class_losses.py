"""Losses with trainable class weights or proxies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import loss_and_miner_utils
from retrieval.helpers import item_losses, reduced_loss
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.pair_sums import (
    Pairs,
    against_others,
    compared,
    log_sums,
    nearness,
    scaled,
)
from retrieval_pml.upstream_factories import FIXED, cosines_within, offer

Degrees = Annotated[float, Field(ge=0, lt=180)]


class _FiniteAngles(losses.LargeMarginSoftmaxLoss):
    """Softmax with a margin in the target's angle, whose gradient is finite at an angle of 0."""

    def get_angles(self, cosine_of_target_classes: Tensor) -> Tensor:
        """Return the angles of cosines, in radians."""
        angles: Tensor = super().get_angles(cosines_within(cosine_of_target_classes))
        return angles


class _MultipleAngle(_FiniteAngles):
    """Computes the coefficients of cos(mθ) without SciPy calls that NumPy deprecates."""

    margin: int

    def init_margin(self) -> None:
        """Set the coefficients of equation 7 of large-margin softmax."""
        self.margin = int(self.margin)
        self.max_n = self.margin // 2
        steps = range(self.max_n + 1)
        self.n_range = torch.tensor(steps)
        self.margin_choose_n = torch.tensor([float(math.comb(self.margin, 2 * n)) for n in steps])
        self.cos_powers = torch.tensor([self.margin - 2 * n for n in steps])
        self.alternating = torch.tensor([(-1) ** n for n in steps])


class LargeMarginSoftmaxLoss(_MultipleAngle):
    """Large-margin softmax: the angle of the target class counts m times.

    Liu, Wen, Yu & Yang, Large-Margin Softmax Loss for Convolutional Neural Networks, ICML 2016.
    Logits keep the lengths of embeddings and weights.

    Args:
        margin: m, factor of the target's angle.
        scale: number by which logits are multiplied.
    """


class SphereFaceLoss(_MultipleAngle, losses.SphereFaceLoss):
    """SphereFace: large-margin softmax with class weights of length 1.

    Liu, Wen, Yu, Li, Raj & Song, SphereFace: Deep Hypersphere Embedding for Face Recognition, CVPR
    2017. Logits keep the lengths of embeddings.

    Args:
        margin: m, factor of the target's angle.
        scale: number by which logits are multiplied.
    """


class _ScaledCosines(_FiniteAngles):
    """Softmax over scaled cosines: the item's class against the sum over all other classes."""

    sub_centers = 1

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the losses by name, in the format of pytorch-metric-learning's reducers."""
        self.cast_types(embeddings.dtype, embeddings.device)
        items = torch.arange(len(labels), device=labels.device)
        pairs = Pairs(items, labels, (items, labels), centers=self.sub_centers)
        weights = self.W
        if self.sub_centers > 1:
            weights = weights.view(len(weights), self.num_classes, self.sub_centers).mT.flatten(1)
        mat = compared(self.distance, embeddings, weights.t())
        push, cosines = against_others(mat, scaled(self.scale), pairs)
        loss = F.softplus(push - self.scale * self.modify_cosine_of_target_classes(cosines))
        if indices_tuple is not None:
            loss = loss * loss_and_miner_utils.convert_to_weights(
                indices_tuple, labels, dtype=loss.dtype
            )
        parts = item_losses(loss)
        self.add_weight_regularization_to_loss_dict(parts, self.W.t())
        return parts


class ArcFaceLoss(_ScaledCosines, losses.ArcFaceLoss):
    """ArcFace: softmax over cosines, with a margin added to the target class's angle.

    Deng, Guo, Xue & Zafeiriou, ArcFace: Additive Angular Margin Loss for Deep Face Recognition,
    CVPR 2019.

    Args:
        margin: angle in degrees that is added to the angle of the target class.
        scale: number by which cosines are multiplied.
    """


class CosFaceLoss(_ScaledCosines, losses.CosFaceLoss):
    """CosFace: softmax over cosines, with a margin subtracted from that of the target class.

    Wang et al., CosFace: Large Margin Cosine Loss for Deep Face Recognition, CVPR 2018.

    Args:
        margin: number that is subtracted from the cosine of the target class.
        scale: number by which cosines are multiplied.
    """


class SubCenterArcFaceLoss(_ScaledCosines, losses.SubCenterArcFaceLoss):
    """ArcFace with several centres per class, of which the nearest counts.

    Deng, Guo, Liu, Gong & Zafeiriou, Sub-center ArcFace: Boosting Face Recognition by Large-Scale
    Noisy Web Faces, ECCV 2020. The method `get_outliers(embeddings, labels)` of the loss finds
    items that are far from the dominant centre of their class.

    Args:
        margin: angle in degrees that is added to the angle of the target class.
        scale: number by which cosines are multiplied.
        sub_centers: number of centres per class.
        weight_regularizer: penalty on the centres, added to the loss.
        weight_init_func: initialiser of the centres; standard normal by default.
    """


class ProxyAnchorLoss(losses.ProxyAnchorLoss):
    """Proxy-anchor loss: a proxy against all items of the batch; the hardest weigh most.

    Kim, Kim, Cho & Kwak, Proxy Anchor Loss for Deep Metric Learning, CVPR 2020. The authors give
    the proxies 100 times the learning rate of the network.

    Args:
        margin: δ. The similarities of positives should exceed δ, those of negatives should stay
            below −δ.
        alpha: scale of the exponents.
        distance: distance or similarity of embeddings and proxies; cosine similarity by default.
        reducer: reduces the losses of the proxies to one number. By default the sum of the positive
            part is divided by the number of proxies with positives, and that of the negative part
            by the number of all proxies.
        weight_regularizer: penalty on the proxies, added to the loss.
        weight_init_func: initialiser of the proxies; Kaiming's normal (fan out) by default.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the losses by name, in the format of pytorch-metric-learning's reducers."""
        self.cast_types(embeddings.dtype, embeddings.device)
        # A miner's weights are exponents too, as upstream adds them.
        weights = loss_and_miner_utils.convert_to_weights(
            indices_tuple, labels, dtype=embeddings.dtype
        )
        exponents = (weights - 1).expand(self.num_classes, -1)
        ordered, items = torch.sort(labels, stable=True)
        pairs = Pairs(ordered, items, (ordered, items), exponents)
        # Each proxy is an anchor, and all items are compared with it.
        mat = compared(self.distance, self.proxies, embeddings)
        alpha = nearness(self.distance, self.alpha)
        push, values = against_others(mat, scaled(alpha), pairs)
        own = weights[items] - 1 - alpha * (values - self.margin)
        pull = log_sums(own, ordered, self.num_classes)
        push = push + alpha * self.margin
        parts: dict[str, Any] = {}
        for name, logits in (("pos_loss", pull), ("neg_loss", push)):
            parts[name] = item_losses(F.softplus(logits))["loss"]
        parts["pos_loss"]["divisor"] = len(torch.unique(labels))
        parts["neg_loss"]["divisor"] = self.num_classes
        self.add_weight_regularization_to_loss_dict(parts, self.proxies)
        return parts


class P2SGradLoss(losses.P2SGradLoss):
    """P2SGrad: mean squared error between cosines with class weights and the one-hot label.

    Zhang et al., P2SGrad: Refined Gradients for Optimizing Deep Face Models, CVPR 2019, equation
    11. It needs no scale and no margin. Each call scales the class weights to length 1. The loss is
    finite for an embedding of length 0; that of pytorch-metric-learning is NaN.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the loss by name, in the format of pytorch-metric-learning's reducers."""
        # `renorm` never lengthens a column, so it first shortens all to 1e-5.
        self.weight.data = self.weight.data.renorm(2, 1, 1e-5).mul(1e5)
        cosines = F.normalize(embeddings) @ self.weight.to(embeddings)
        target = F.one_hot(labels, self.num_classes).to(cosines.dtype)
        # Rounding takes some cosines slightly past ±1.
        return reduced_loss(F.mse_loss(cosines.clamp(-1, 1), target))


class ManifoldLoss(losses.ManifoldLoss):
    """Manifold similarity to proxies of meta-classes, by a random walk over batch and proxies.

    Aziere & Todorovic, Ensemble Deep Manifold Similarity Learning Using Hard Proxies, CVPR 2019.
    Each training class belongs to a proxy (meta-class), which is drawn when the loss is built and
    saved with the run. The paper trains an ensemble with a draw per member.
    pytorch-metric-learning draws a proxy for each item, again in each batch. The loss inverts a
    matrix with batch size + K rows.

    Args:
        K: number of proxies. If it exceeds the number of classes, some have no positives.
        lambdaC: weight of the contextual loss against the intrinsic loss.
        alpha: share of similarity that the random walk passes on.
        margin: margin between the similarities to the item's proxy and to other proxies.
        distance: similarity of items and proxies; the cosine by default.
    """

    def __init__(self, classes: int, **parameters: Any) -> None:
        super().__init__(**parameters)
        # A permutation modulo K gives every proxy equally many classes, up to one.
        self.register_buffer("meta_classes", torch.randperm(classes) % self.K)

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the loss by name, with matrices (N + K, N + K)."""
        proxy = self.meta_classes[labels].unsqueeze(1)
        items = len(embeddings)
        walks = self._walks(torch.cat([embeddings, self.proxies]))
        unit = F.normalize(walks, dim=1, eps=1e-8)
        contextual = self._excess(unit[:items] @ unit[items:].T, proxy)
        intrinsic = self._excess(walks[:items, items:], proxy)
        return reduced_loss(intrinsic + self.lambdaC * contextual)

    def _walks(self, points: Tensor) -> Tensor:
        """Return the weights (P, P) of the ends of random walks from items and proxies (P, C)."""
        affinity = torch.exp(2 * self.distance(points).clamp(min=0))
        identity = torch.eye(len(points), dtype=affinity.dtype, device=affinity.device)
        # Each step of the walk leaves its point.
        affinity = affinity.masked_fill(identity.bool(), 0)
        scale = affinity.sum(1).rsqrt()
        ends: Tensor = (1 - self.alpha) * torch.linalg.inv(
            identity - self.alpha * affinity * scale * scale.unsqueeze(1)
        )
        return ends

    def _excess(self, similarity: Tensor, proxy: Tensor) -> Tensor:
        """Return the mean over items of log(1 + Σ exp(excess)) over other proxies.

        The excess is the similarity (N, K) to the other proxy, minus that to the item's `proxy`
        (N, 1), plus the margin; an excess below 0 does not count.
        """
        excess = similarity - similarity.gather(1, proxy) + self.margin
        # The item's own proxy is no competitor, and exp(−∞) is 0.
        excess = excess.masked_fill((excess < 0).scatter(1, proxy, True), -torch.inf)
        return torch.log1p(excess.exp().sum(1)).mean()


# The loss of an item depends on no other item, so that processes can divide the items.
_SOFTMAX: dict[str, Any] = {"ref_emb": False, "rows": "items", "without": FIXED}

FACTORIES: Mapping[str, Callable[..., Any]] = {
    "large_margin_softmax": offer(LargeMarginSoftmaxLoss, **_SOFTMAX, margin=PositiveInt),
    "sphere_face": offer(SphereFaceLoss, **_SOFTMAX, margin=PositiveInt),
    "arc_face": offer(ArcFaceLoss, **_SOFTMAX, margin=Degrees),
    "cos_face": offer(CosFaceLoss, **_SOFTMAX),
    "sub_center_arc_face": offer(SubCenterArcFaceLoss, **_SOFTMAX, margin=Degrees),
    "normalized_softmax": offer(
        losses.NormalizedSoftmaxLoss,
        """Softmax over similarities to class weights of length 1.

        Zhai & Wu, Classification is a Strong Baseline for Deep Metric Learning, BMVC 2019; Wang et
        al., NormFace, ACM MM 2017.

        Args:
            temperature: number by which similarities are divided.
            distance: similarity of embeddings and class weights; by default the dot product of unit
                vectors.
        """,
        ref_emb=False,
        rows="items",
    ),
    "soft_triple": offer(
        losses.SoftTripleLoss,
        """SoftTriple: softmax over classes with several centres each; nearer centres weigh more.

        Qian, Shang, Sun, Hu, Li & Jin, SoftTriple Loss: Deep Metric Learning Without Triplet
        Sampling, ICCV 2019. The paper merges centres with the weight regulariser
        `pml.sparse_centers`.

        Args:
            centers_per_class: number of centres per class.
            la: λ, by which similarities to classes are multiplied.
            gamma: temperature of the choice among the centres of a class.
            margin: δ, which is subtracted from the similarity to the item's class.
            distance: similarity of embeddings and centres; the cosine by default.
            weight_regularizer: penalty on the centres, added to the loss.
            weight_init_func: initialiser of the centres; Kaiming's uniform by default.
        """,
        ref_emb=False,
        rows="items",
        similarity=True,
    ),
    # Without `rows`: the loss of a proxy is the logarithm of a sum over the whole batch.
    "proxy_anchor": offer(ProxyAnchorLoss, ref_emb=False),
    "p2s_grad": offer(P2SGradLoss, ref_emb=False, miner=False, without=("distance", "reducer")),
    "manifold": offer(
        ManifoldLoss,
        ref_emb=False,
        miner=False,
        similarity=True,
        without=("reducer",),
        lambdaC=Annotated[float, Field(ge=0, allow_inf_nan=False)],
        alpha=Annotated[float, Field(gt=0, lt=1)],
        margin=NonNegativeFloat,
    ),
}
