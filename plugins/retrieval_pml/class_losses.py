"""Losses with class weights or proxies of their own, which join the optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from pytorch_metric_learning import losses
from torch import Tensor
from torch.nn import functional as F

from retrieval_pml.offers import FIXED, Count, NonNegative, cosines_within, offer, reduced

Degrees = Annotated[float, Field(ge=0, lt=180)]


class _FiniteAngles(losses.LargeMarginSoftmaxLoss):
    """Softmax with a margin at the target's angle, whose gradient is finite at an angle of 0."""

    def get_angles(self, cosine_of_target_classes: Tensor) -> Tensor:
        """Return the angles, in radians, of cosines."""
        angles: Tensor = super().get_angles(cosines_within(cosine_of_target_classes))
        return angles


class _MultipleAngle(_FiniteAngles):
    """Makes the coefficients of cos(mθ) without SciPy calls that NumPy deprecates."""

    margin: int

    def init_margin(self) -> None:
        """Set the coefficients; see equation 7 of large-margin softmax."""
        self.margin = int(self.margin)
        self.max_n = self.margin // 2
        steps = range(self.max_n + 1)
        self.n_range = torch.tensor(steps)
        self.margin_choose_n = torch.tensor([float(math.comb(self.margin, 2 * n)) for n in steps])
        self.cos_powers = torch.tensor([self.margin - 2 * n for n in steps])
        self.alternating = torch.tensor([(-1) ** n for n in steps])


class LargeMarginSoftmaxLoss(_MultipleAngle):
    """Large-margin softmax: the target class's angle counts m times.

    Liu, Wen, Yu & Yang, Large-Margin Softmax Loss for Convolutional Neural Networks, ICML 2016.
    Logits keep the lengths of embeddings and weights.

    Args:
        margin: the factor m of the target's angle.
        scale: logits are multiplied by it.
    """


class SphereFaceLoss(_MultipleAngle, losses.SphereFaceLoss):
    """SphereFace: large-margin softmax with class weights of length 1.

    Liu, Wen, Yu, Li, Raj & Song, SphereFace: Deep Hypersphere Embedding for Face Recognition, CVPR
    2017. Logits keep the embeddings' lengths.

    Args:
        margin: the factor m of the target's angle.
        scale: logits are multiplied by it.
    """


class ArcFaceLoss(_FiniteAngles, losses.ArcFaceLoss):
    """ArcFace: softmax over cosines, with a margin added to the target class's angle.

    Deng, Guo, Xue & Zafeiriou, ArcFace: Additive Angular Margin Loss for Deep Face Recognition,
    CVPR 2019.

    Args:
        margin: added to the target class's angle, in degrees.
        scale: cosines are multiplied by it.
    """


class SubCenterArcFaceLoss(_FiniteAngles, losses.SubCenterArcFaceLoss):
    """ArcFace with several centres per class, of which the nearest counts.

    Deng, Guo, Liu, Gong & Zafeiriou, Sub-center ArcFace: Boosting Face Recognition by Large-Scale
    Noisy Web Faces, ECCV 2020. The loss's `get_outliers(embeddings, labels)` finds the items far
    from their class's dominant centre.

    Args:
        margin: added to the target class's angle, in degrees.
        scale: cosines are multiplied by it.
        sub_centers: centres of each class.
        weight_regularizer: a penalty on the centres, added to the loss.
        weight_init_func: how the centres begin; standard normal by default.
    """


class P2SGradLoss(losses.P2SGradLoss):
    """P2SGrad: mean squared error between cosines to class weights and the one-hot label.

    Zhang et al., P2SGrad: Refined Gradients for Optimizing Deep Face Models, CVPR 2019, equation
    11. Needs no scale and no margin. The class weights are put back to length 1 at each call.
    Finite for an embedding of length 0, where upstream's is NaN.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the loss by name, in the format of upstream's reducers."""
        self.weight.data = self.weight.data.renorm(2, 1, 1e-5).mul(1e5)
        cosines = F.normalize(embeddings) @ self.weight.to(embeddings)
        target = F.one_hot(labels, self.num_classes).to(cosines.dtype)
        return reduced(F.mse_loss(cosines.clamp(-1, 1), target))


class ManifoldLoss(losses.ManifoldLoss):
    """Manifold similarity to proxies of meta-classes, by a random walk over batch and proxies.

    Aziere & Todorovic, Ensemble Deep Manifold Similarity Learning Using Hard Proxies, CVPR 2019.
    Each training class belongs to one proxy, drawn when the loss is made and saved with the run
    (the paper trains an ensemble, each member with a draw of its own); upstream draws for each
    *item*, anew in each batch. Inverts a matrix of batch + K.

    Args:
        K: how many proxies (meta-classes); more than there are classes leaves some without
            positives.
        lambdaC: the weight of the contextual loss against the intrinsic one.
        alpha: the share of similarity that the random walk passes on.
        margin: between the similarity to the own proxy and to others.
        distance: how items and proxies are compared, a similarity; cosine by default.
    """

    def __init__(self, classes: int, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.register_buffer("meta_classes", torch.randperm(classes) % self.K)

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the loss by name, in matrices of (N + K)²; upstream makes K of them."""
        own, items = self.meta_classes[labels].unsqueeze(1), len(embeddings)
        walks = self._walks(torch.cat([embeddings, self.proxies]))
        unit = F.normalize(walks, dim=1, eps=1e-8)
        contextual = self._apart(unit[:items] @ unit[items:].T, own)
        return reduced(self._apart(walks[:items, items:], own) + self.lambdaC * contextual)

    def _walks(self, points: Tensor) -> Tensor:
        """Return where random walks from each of the items and proxies (P, C) end, (P, P)."""
        near = torch.exp(2 * self.distance(points).clamp(min=0))
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


_SOFTMAX: dict[str, Any] = {"ref_emb": False, "rows": "items", "without": FIXED}

FACTORIES: Mapping[str, Callable[..., Any]] = {
    "large_margin_softmax": offer(LargeMarginSoftmaxLoss, **_SOFTMAX, margin=Count),
    "sphere_face": offer(SphereFaceLoss, **_SOFTMAX, margin=Count),
    "arc_face": offer(ArcFaceLoss, **_SOFTMAX, margin=Degrees),
    "cos_face": offer(
        losses.CosFaceLoss,
        """CosFace: softmax over cosines, with a margin subtracted from the target class's.

        Wang et al., CosFace: Large Margin Cosine Loss for Deep Face Recognition, CVPR 2018.

        Args:
            margin: subtracted from the target class's cosine.
            scale: cosines are multiplied by it.
        """,
        **_SOFTMAX,
    ),
    "sub_center_arc_face": offer(SubCenterArcFaceLoss, **_SOFTMAX, margin=Degrees),
    "normalized_softmax": offer(
        losses.NormalizedSoftmaxLoss,
        """Softmax over similarities to class weights of length 1.

        Zhai & Wu, Classification is a Strong Baseline for Deep Metric Learning, BMVC 2019; Wang et
        al., NormFace, ACM MM 2017.

        Args:
            temperature: similarities are divided by it.
            distance: how embeddings are compared with class weights; the dot product of unit
                vectors by default.
        """,
        ref_emb=False,
        rows="items",
    ),
    "soft_triple": offer(
        losses.SoftTripleLoss,
        """SoftTriple: softmax over classes with several centres each; nearer ones weigh more.

        Qian, Shang, Sun, Hu, Li & Jin, SoftTriple Loss: Deep Metric Learning Without Triplet
        Sampling, ICCV 2019; the paper merges centres with the weight regulariser
        `pml.sparse_centers`.

        Args:
            centers_per_class: centres of each class.
            la: λ: similarities to classes are multiplied by it.
            gamma: the temperature that chooses among a class's centres.
            margin: δ: subtracted from the similarity to the item's own class.
            distance: how embeddings are compared with centres, a similarity; cosine by default.
            weight_regularizer: a penalty on the centres, added to the loss.
            weight_init_func: how the centres begin; Kaiming's uniform by default.
        """,
        ref_emb=False,
        rows="items",
        similarity=True,
    ),
    "proxy_anchor": offer(
        losses.ProxyAnchorLoss,
        """Proxy-anchor loss: each proxy against all items of the batch, the hardest weighing most.

        Kim, Kim, Cho & Kwak, Proxy Anchor Loss for Deep Metric Learning, CVPR 2020. The authors
        give the proxies 100 times the learning rate of the network.

        Args:
            margin: δ: positives should be this much nearer than the distance's zero, negatives
                this much farther.
            alpha: the exponent's scale.
            distance: how embeddings are compared with proxies; cosine similarity by default.
            reducer: reduces the proxies' losses to one number; by default their sum over the
                number of proxies with positives, and of all.
            weight_regularizer: a penalty on the proxies, added to the loss.
            weight_init_func: how the proxies begin; Kaiming's normal (fan out) by default.
        """,
        ref_emb=False,
    ),
    "p2s_grad": offer(P2SGradLoss, ref_emb=False, miner=False, without=("distance", "reducer")),
    "manifold": offer(
        ManifoldLoss,
        ref_emb=False,
        miner=False,
        similarity=True,
        without=("reducer",),
        lambdaC=Annotated[float, Field(ge=0, allow_inf_nan=False)],
        alpha=Annotated[float, Field(gt=0, lt=1)],
        margin=NonNegative,
    ),
}
