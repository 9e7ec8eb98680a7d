"""Proxy and classification losses where upstream departs from the paper or fails on some batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from torch import Tensor
from torch.nn import functional

from retrieval_pml.classes import (
    Nearest,
    Softly,
    at_length,
    cross_entropy,
    is_product,
    proxy_anchor,
    squared_errors,
)
from retrieval_pml.common import (
    PreciseLoss,
    cosines_within,
    element,
    no_indices,
    no_reference,
    on_labels,
    reduced,
)
from retrieval_pml.corrected_pairs import LogNCA
from retrieval_pml.matrices import lengths_of, similarities, unit


class ClassWeights(PreciseLoss):
    """A loss of each item against class weights, by one matrix of their products; see
    `retrieval_pml.classes`.

    Upstream's own way is taken for distances that are no product of vectors, and where statistics
    are collected.
    """

    rows = "items"

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, as upstream's reducers read them.

        Raises:
            ValueError: there are no labels, or there is a reference set.
        """
        common_functions.labels_required(labels)
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        assert labels is not None
        if self.collect_stats or not self.written_for(labels):
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.cast_types(embeddings.dtype, embeddings.device)
        losses = self.of_items(embeddings, labels)
        if indices_tuple is not None:
            losses = losses * self.weights_of(indices_tuple, labels, losses.dtype)
        found = element(losses)
        self.add_weight_regularization_to_loss_dict(found, self.class_weights())
        return found

    def written_for(self, labels: Tensor) -> bool:
        """Return whether `of_items` measures as this loss's distance does."""
        return is_product(self.distance)

    def of_items(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the items' losses (N,)."""
        raise NotImplementedError(f"{type(self).__name__} must define of_items(embeddings, labels)")

    def class_weights(self) -> Tensor:
        """Return the class weights as rows, for their regulariser."""
        return self.W.t()  # type: ignore[no-any-return]

    def weights_of(self, indices_tuple: Any, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the items' weights (N,) by a miner's indices."""
        return loss_and_miner_utils.convert_to_weights(indices_tuple, labels, dtype=dtype)  # type: ignore[no-any-return]


class MarginAtTarget(ClassWeights):
    """Softmax over scaled cosines, with another number for the label's; the gradient of an angle
    stays finite at the class's weights.
    """

    def get_angles(self, cosine_of_target_classes: Tensor) -> Tensor:
        """Return the angles, in radians, of cosines."""
        return super().get_angles(cosines_within(cosine_of_target_classes))  # type: ignore[no-any-return]

    def of_items(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the items' losses (N,)."""
        return cross_entropy(
            unit(embeddings, 1, self.scale), unit(self.W, 0), labels, self._at_target
        )

    def _at_target(self, logits: Tensor) -> Tensor:
        found: Tensor = self.modify_cosine_of_target_classes(logits / self.scale) * self.scale
        return found


class MultipleAngle(MarginAtTarget):
    """The coefficients of cos(mθ), equation 7 of large-margin softmax, made without SciPy calls
    that NumPy deprecates.
    """

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

    def of_items(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the items' losses (N,)."""
        weights, lengths = self.lengths_of(embeddings, labels)
        return cross_entropy(embeddings * self.scale, weights, labels, self._with_lengths, lengths)

    def lengths_of(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class weights (C, K) of the logits, and what the items' cosines with their own
        are multiplied by there (N,).
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define lengths_of(embeddings, labels)"
        )

    def _with_lengths(self, logits: Tensor, lengths: Tensor) -> Tensor:
        cosines = logits / (self.scale * lengths).clamp(min=torch.finfo(lengths.dtype).tiny)
        found: Tensor = self.modify_cosine_of_target_classes(cosines) * (lengths * self.scale)
        return found


class LargeMarginSoftmaxLoss(MultipleAngle, losses.LargeMarginSoftmaxLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""

    def lengths_of(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class weights (C, K) of the logits, and what the items' cosines with their own
        are multiplied by there (N,).
        """
        of_weights = torch.linalg.vector_norm(self.W, dim=0)
        return self.W, torch.linalg.vector_norm(embeddings, dim=1) * of_weights[labels]


class SphereFaceLoss(MultipleAngle, losses.SphereFaceLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""

    def lengths_of(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class weights (C, K) of the logits, and what the items' cosines with their own
        are multiplied by there (N,).
        """
        return unit(self.W, 0), torch.linalg.vector_norm(embeddings, dim=1)


class ArcFaceLoss(MarginAtTarget, losses.ArcFaceLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""


class CosFaceLoss(MarginAtTarget, losses.CosFaceLoss):
    """Upstream's, in float32."""


class SubCenterArcFaceLoss(MarginAtTarget, losses.SubCenterArcFaceLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""

    def of_items(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the items' losses (N,)."""
        items, weights = (
            unit(embeddings, 1, self.scale),
            _by_centre(unit(self.W, 0), self.sub_centers),
        )
        pooled = {"pool": Nearest(), "centres": self.sub_centers}
        return cross_entropy(items, weights, labels, self._at_target, **pooled)


class NormalizedSoftmaxLoss(ClassWeights, losses.NormalizedSoftmaxLoss):
    """Upstream's, by `ClassWeights`."""

    def of_items(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the items' losses (N,)."""
        items = at_length(self.distance, embeddings, 1, 1 / self.temperature)
        return cross_entropy(items, unit(self.W, 0), labels, torch.clone)


class SoftTripleLoss(ClassWeights, losses.SoftTripleLoss):
    """Upstream's, by `ClassWeights`."""

    def of_items(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the items' losses (N,)."""
        items = at_length(self.distance, embeddings, 1, self.gamma)
        weights = _by_centre(at_length(self.distance, self.fc, 0), self.centers_per_class)
        pooled = {"pool": Softly(), "centres": self.centers_per_class, "rate": self.la / self.gamma}
        return cross_entropy(items, weights, labels, self._at_target, **pooled)

    def _at_target(self, logits: Tensor) -> Tensor:
        found: Tensor = logits - self.la * self.margin
        return found

    def class_weights(self) -> Tensor:
        """Return the class weights as rows, for their regulariser."""
        return self.fc.t()  # type: ignore[no-any-return]


def _by_centre(weights: Tensor, centres: int) -> Tensor:
    """Return class weights (C, K × centres) with all classes' first centres first."""
    if centres == 1:
        return weights
    return weights.view(len(weights), -1, centres).transpose(1, 2).reshape(len(weights), -1)


class ProxyNCALoss(ClassWeights, LogNCA, losses.ProxyNCALoss):
    """Upstream's, computed by logarithms; refuses the reference set, which upstream silently
    ignores.
    """

    def written_for(self, labels: Tensor) -> bool:
        """Return whether `of_items` measures as this loss's distance does, and each item has a
        proxy.
        """
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
        return loss_and_miner_utils.convert_to_weights(indices_tuple, labels, dtype, using_ref=True)  # type: ignore[no-any-return]


class ProxyAnchorLoss(PreciseLoss, losses.ProxyAnchorLoss):
    """Upstream's, by one matrix of products; see `retrieval_pml.classes`."""

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, as upstream's reducers read them."""
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
        both = proxy_anchor(
            at_length(self.distance, self.proxies, 1, self.alpha),
            at_length(self.distance, embeddings, 1),
            labels,
            self.alpha * self.margin,
            weights,
        )
        found = {**element(both[0], "pos_loss"), **element(both[1], "neg_loss")}
        found["pos_loss"]["divisor"] = len(torch.unique(labels))
        found["neg_loss"]["divisor"] = self.num_classes
        self.add_weight_regularization_to_loss_dict(found, self.proxies)
        return found


class P2SGradLoss(PreciseLoss, losses.P2SGradLoss):
    """Upstream's, by one matrix of products; see `retrieval_pml.classes`.

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
        """Return the losses by name, as upstream's reducers read them."""
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
        return reduced(squared_errors(unit(embeddings, 1), self.weight, labels))


class ManifoldLoss(PreciseLoss, losses.ManifoldLoss):
    """Upstream's formula with matrices of (N + K)², and with each training class assigned at
    random, once, to a proxy (the paper's meta-classes).

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
        """Return the mean over items of log(1 + Σ exp) of how much nearer (N, K) other proxies are
        than the own (N, 1), and the margin.
        """
        excess = near - near.gather(1, own) + self.margin
        excess = excess.masked_fill((excess < 0).scatter(1, own, True), -torch.inf)
        return torch.log1p(excess.exp().sum(1)).mean()
