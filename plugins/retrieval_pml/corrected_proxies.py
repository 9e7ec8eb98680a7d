"""Proxy and classification losses where upstream departs from the paper or fails on some batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import common_functions
from torch import Tensor
from torch.nn import functional

from retrieval_pml.common import PreciseLoss, cosines_within, no_indices, no_reference, on_labels
from retrieval_pml.corrected_pairs import LogNCA
from retrieval_pml.matrices import similarities


class SafeAngles(PreciseLoss):
    """Keeps the gradient of an angle finite where an embedding points exactly at its class's weights."""

    rows = "items"

    def get_angles(self, cosine_of_target_classes: Tensor) -> Tensor:
        """Return the angles, in radians, of cosines."""
        return super().get_angles(cosines_within(cosine_of_target_classes))  # type: ignore[no-any-return]


class MultipleAngle(SafeAngles):
    """The coefficients of cos(mθ), equation 7 of large-margin softmax, made without SciPy calls that NumPy deprecates."""

    margin: int

    def init_margin(self) -> None:
        """Set the coefficients."""
        self.margin = int(self.margin)
        self.max_n = self.margin // 2
        steps = range(self.max_n + 1)
        self.n_range = torch.tensor(steps)
        self.margin_choose_n = torch.tensor([float(math.comb(self.margin, 2 * n)) for n in steps])
        self.cos_powers = torch.tensor([self.margin - 2 * n for n in steps])
        self.alternating = torch.tensor([(-1) ** n for n in steps])


class LargeMarginSoftmaxLoss(MultipleAngle, losses.LargeMarginSoftmaxLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""


class SphereFaceLoss(MultipleAngle, losses.SphereFaceLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""


class ArcFaceLoss(SafeAngles, losses.ArcFaceLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""


class CosFaceLoss(SafeAngles, losses.CosFaceLoss):
    """Upstream's, in float32."""


class SubCenterArcFaceLoss(SafeAngles, losses.SubCenterArcFaceLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""


class ProxyNCALoss(PreciseLoss, LogNCA, losses.ProxyNCALoss):
    """Upstream's, computed by logarithms; refuses the reference set, which upstream silently ignores."""

    rows = "items"

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, as upstream's reducers read them."""
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)


class ManifoldLoss(PreciseLoss, losses.ManifoldLoss):
    """Upstream's formula with matrices of (N + K)², and with each training class assigned at random, once, to a proxy (the paper's meta-classes).

    Upstream takes no labels and assigns *items* at random, anew in every batch, unless the caller passes
    meta-classes; it needs as many items as proxies, and K matrices to compare random walks. The assignment is a buffer, so a
    resumed run keeps it.
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
        """Return the losses by name, as upstream's reducers read them."""
        no_indices("ManifoldLoss", indices_tuple)
        no_reference("ManifoldLoss", None if ref_emb is embeddings else ref_emb)
        own = self.meta_classes[on_labels(labels, embeddings, "ManifoldLoss")].unsqueeze(1)
        items = len(embeddings)
        walks = self._walks(torch.cat([embeddings, self.proxies]))
        unit = functional.normalize(walks, dim=1, eps=1e-8)
        contextual = self._apart(unit[:items] @ unit[items:].T, own)
        loss = self._apart(walks[:items, items:], own) + self.lambdaC * contextual
        return {"loss": {"losses": loss, "indices": None, "reduction_type": "already_reduced"}}

    def _walks(self, points: Tensor) -> Tensor:
        """Return where random walks from each of the items and proxies (P, C) end, (P, P)."""
        near = torch.exp(2 * similarities(self.distance, points, points).clamp(min=0))
        one = torch.eye(len(points), dtype=near.dtype, device=near.device)
        near = near.masked_fill(one.bool(), 0)
        scale = near.sum(1).rsqrt()
        ends: Tensor = (1 - self.alpha) * torch.linalg.inv(
            one - self.alpha * near * scale * scale.unsqueeze(1)
        )
        return ends

    def _apart(self, near: Tensor, own: Tensor) -> Tensor:
        """Return the mean over items of log(1 + Σ exp) of how much nearer (N, K) other proxies are than the own (N, 1), and the margin."""
        excess = near - near.gather(1, own) + self.margin
        excess = excess.masked_fill((excess < 0).scatter(1, own, True), -torch.inf)
        return torch.log1p(excess.exp().sum(1)).mean()
