"""Softmax losses with learned class weights. None takes a reference set.

pytorch-metric-learning makes some ten matrices of items × classes: a mask of the targets, copies
with a margin, and what autograd keeps of each. Here the margin's formula is applied to the targets'
logits (N,) alone, and the one matrix of products is overwritten in place by its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from pytorch_metric_learning import distances, losses
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.plugin import traits
from torch import Tensor
from torch.nn import functional

from retrieval_pml.adapters import (
    WEIGHTED,
    Count,
    Distance,
    Positive,
    PreciseLoss,
    Reducer,
    cosines_within,
    element,
    forwards,
    require_similarity,
)
from retrieval_pml.pair_matrix import LEAST, blocks, derivatives, exp_, unit

Target = Callable[..., Tensor]
Degrees = Annotated[float, Field(ge=0, lt=180)]


def is_product(distance: Any) -> bool:
    """Return whether a distance is a plain product of vectors or of unit vectors."""
    if type(distance) not in (distances.CosineSimilarity, distances.DotProductSimilarity):
        return False
    return (distance.p, distance.power) == (2, 1) and not distance.collect_stats


def at_length(distance: Any, vectors: Tensor, dim: int, scale: float = 1.0) -> Tensor:
    """Return vectors, normalised if the distance normalises, times `scale`; see `unit`."""
    if distance.normalize_embeddings:
        return unit(vectors, dim, scale)
    return vectors if scale == 1 else vectors * scale


class Pool:
    """Reduces an item's products with the centres of a class to one number."""

    def plain(self, products: Tensor) -> Tensor:
        """Return products (N, centres, K) reduced to (N, K), differentiably."""
        raise NotImplementedError(f"{type(self).__name__} must define plain(products)")

    def derived_(self, products: Tensor) -> Tensor:
        """Return products (N, centres, K) reduced to (N, K), and overwrite each product by the
        derivative of its class's number with respect to it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define derived_(products)")


class Nearest(Pool):
    """The largest product; of equal ones the first counts."""

    def plain(self, products: Tensor) -> Tensor:
        """Return products (N, centres, K) reduced to (N, K), differentiably."""
        return products.max(1)[0]

    def derived_(self, products: Tensor) -> Tensor:
        """Return products (N, centres, K) reduced to (N, K), and overwrite each product by the
        derivative of its class's number with respect to it.
        """
        best = products.amax(1)
        free = torch.ones_like(best, dtype=torch.bool)
        for product in products.unbind(1):
            mine = (product == best).logical_and_(free)
            free ^= mine
            product.copy_(mine)
        return best


class Softly(Pool):
    """The mean of the products, weighted by their softmax."""

    def plain(self, products: Tensor) -> Tensor:
        """Return products (N, centres, K) reduced to (N, K), differentiably."""
        return (torch.softmax(products, 1) * products).sum(1)

    def derived_(self, products: Tensor) -> Tensor:
        """Return products (N, centres, K) reduced to (N, K), and overwrite each product by the
        derivative of its class's number with respect to it.
        """
        weights = exp_(products - products.amax(1, keepdim=True))
        share = weights.sum(1, keepdim=True).reciprocal_()
        mean = (weights * products).sum(1, keepdim=True).mul_(share)
        products.sub_(mean - 1).mul_(weights.mul_(share))
        return mean.squeeze(1)


def cross_entropy(
    items: Tensor,
    weights: Tensor,
    labels: Tensor,
    target: Target,
    *inputs: Tensor,
    bias: Tensor | None = None,
    pool: Pool | None = None,
    centres: int = 1,
    rate: float = 1.0,
) -> Tensor:
    """Return each item's −log softmax at its label, after `target` has replaced that logit.

    Args:
        items: (N, C).
        weights: (C, centres × K): every class's first centre, then every class's second, ….
        labels: (N,) int64.
        target: a function of the labels' logits (N,) and of `inputs`, which returns the logits (N,)
            to use in their place. It must treat each item separately.
        inputs: further arguments of `target`, each (N,).
        bias: (K,), added to each item's products, or None. Only with one centre per class.
        pool: reduces the products with a class's centres to one number; None with one centre.
        centres: how many each class has.
        rate: the factor that turns a class's number into its logit.
    """
    losses: Tensor = _CrossEntropy.apply(
        items, weights, bias, labels, target, (pool, centres, rate), *inputs
    )
    return losses


class _CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        items: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        target: Target,
        pooled: tuple[Pool | None, int, float],
        *inputs: Tensor,
    ) -> Tensor:
        pool, centres, rate = pooled
        slopes = items @ weights if bias is None else torch.addmm(bias, items, weights)
        by_class = slopes.view(len(items), centres, weights.shape[1] // centres)
        row = torch.arange(len(items), device=items.device)
        own = by_class[row, :, labels]
        near = own.squeeze(1) if pool is None else pool.plain(own.unsqueeze(2)).squeeze(1)
        with torch.enable_grad():
            leaves = [
                (x * f).detach().requires_grad_()
                for x, f in ((near, rate), *((x, 1) for x in inputs))
            ]
            at_label = target(*leaves)
            derived = torch.autograd.grad(at_label.sum(), leaves, materialize_grads=True)
        at_label = at_label.detach()
        excess = torch.empty_like(at_label)  # the derivative of the loss by the label's logit
        losses = torch.empty_like(at_label)
        whole = [slice(0, len(items))]
        for part in blocks(*slopes.shape) if items.device.type == "cpu" else whole:
            logits = by_class[part].squeeze(1) if pool is None else pool.derived_(by_class[part])
            if rate != 1:
                logits.mul_(rate)
            place, mine = (row[: len(logits)], labels[part]), at_label[part]
            logits[place] = mine
            shares = torch.softmax(logits, 1)
            # log Σ exp is the largest logit less the logarithm of its softmax
            losses[part] = logits.amax(1) - shares.amax(1).log_() - mine
            excess[part] = shares[place] - 1
            shares[place] = excess[part] * derived[0][part]
            if rate != 1:
                shares.mul_(rate)
            torch.hardshrink(shares, LEAST, out=logits)
            if pool is not None:
                by_class[part].mul_(logits.unsqueeze(1))
        ctx.save_for_backward(
            items, weights, bias, labels, slopes, *inputs, *(excess * x for x in derived[1:])
        )
        ctx.constants = target, pooled
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        items, weights, bias, labels, slopes, *rest = ctx.saved_tensors
        target, pooled = ctx.constants
        more, of_more = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        if torch.is_grad_enabled():  # the gradient will be differentiated
            inputs = items, weights, bias, *more
            x, w, b, *o = derivatives(
                lambda x, w, b, *o: _plain(x, w, b, labels, target, pooled, *o), inputs, gradient
            )
            return x, w, b, None, None, None, *o
        column = gradient.unsqueeze(1)
        x = (slopes @ weights.T).mul_(column) if ctx.needs_input_grad[0] else None
        w = None
        if ctx.needs_input_grad[1]:
            weighed = items * column
            # in the memory layout of the weights
            w = (slopes.T @ weighed).T if weights.stride(0) == 1 else weighed.T @ slopes
        b = gradient @ slopes if ctx.needs_input_grad[2] else None
        return x, w, b, None, None, None, *(gradient * x for x in of_more)


def _plain(
    items: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    target: Target,
    pooled: tuple[Pool | None, int, float],
    *inputs: Tensor,
) -> Tensor:
    """Return what `cross_entropy` returns, by operations that autograd knows."""
    pool, centres, rate = pooled
    logits = items @ weights if bias is None else torch.addmm(bias, items, weights)
    if pool is not None:
        logits = pool.plain(logits.view(len(items), centres, weights.shape[1] // centres))
    logits = logits * rate
    place = labels.unsqueeze(1)
    mine = target(logits.gather(1, place).squeeze(1), *inputs)
    return functional.cross_entropy(
        logits.scatter(1, place, mine.unsqueeze(1)), labels, reduction="none"
    )


class ClassWeights(PreciseLoss):
    """A loss that compares items with class weights through one matrix of their products.

    A subclass defines `of_items(embeddings, labels)`, which returns the items' losses (N,).

    Upstream's code computes the loss instead if the distance is no product of vectors, or if
    statistics are collected.
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
        """Return the losses by name, in the format of upstream's reducers."""
        common_functions.labels_required(labels)
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        assert labels is not None
        if self.collect_stats or not self.written_for(labels):
            return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        self.cast_types(embeddings.dtype, embeddings.device)
        losses = self.of_items(embeddings, labels)
        if indices_tuple is not None:
            losses = losses * self.weights_of(indices_tuple, labels, losses.dtype)
        parts = element(losses)
        self.add_weight_regularization_to_loss_dict(parts, self.class_weights())
        return parts

    def written_for(self, labels: Tensor) -> bool:
        """Return whether `of_items` computes the loss for this loss's distance."""
        return is_product(self.distance)

    def class_weights(self) -> Tensor:
        """Return the class weights as rows, for their regulariser."""
        return self.W.t()  # type: ignore[no-any-return]

    def weights_of(self, indices_tuple: Any, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the items' weights (N,) by a miner's indices."""
        return loss_and_miner_utils.convert_to_weights(indices_tuple, labels, dtype=dtype)  # type: ignore[no-any-return]


class MarginAtTarget(ClassWeights):
    """Softmax over scaled cosines, with a margin for the label's. The gradient stays finite."""

    def get_angles(self, cosine_of_target_classes: Tensor) -> Tensor:
        """Return the angles, in radians, of cosines."""
        return super().get_angles(cosines_within(cosine_of_target_classes))  # type: ignore[no-any-return]

    def of_items(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the items' losses (N,)."""
        return cross_entropy(
            unit(embeddings, 1, self.scale), unit(self.W, 0), labels, self._at_target
        )

    def _at_target(self, logits: Tensor) -> Tensor:
        logit: Tensor = self.modify_cosine_of_target_classes(logits / self.scale) * self.scale
        return logit


class MultipleAngle(MarginAtTarget):
    """Softmax in which the label's angle counts m times: equation 7 of large-margin softmax.

    The coefficients of cos(mθ) are made without SciPy calls that NumPy deprecates. A subclass
    defines `lengths_of(embeddings, labels)`, which returns the class weights (C, K) of the logits,
    and factors (N,): without a margin, the logit of an item's own class is their cosine × its
    factor × the scale.
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

    def _with_lengths(self, logits: Tensor, lengths: Tensor) -> Tensor:
        cosines = logits / (self.scale * lengths).clamp(min=torch.finfo(lengths.dtype).tiny)
        logit: Tensor = self.modify_cosine_of_target_classes(cosines) * (lengths * self.scale)
        return logit


class LargeMarginSoftmaxLoss(MultipleAngle, losses.LargeMarginSoftmaxLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""

    def lengths_of(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class weights (C, K) of the logits, and factors (N,): without a margin, the
        logit of an item's own class is their cosine × its factor × the scale.
        """
        of_weights = torch.linalg.vector_norm(self.W, dim=0)
        return self.W, torch.linalg.vector_norm(embeddings, dim=1) * of_weights[labels]


@traits(ref_emb=False)
@forwards(LargeMarginSoftmaxLoss, WEIGHTED)
def large_margin_softmax(
    embedding_size: int,
    classes: int,
    margin: Count = 4,
    scale: Positive = 1.0,
    reducer: Reducer = None,
) -> losses.LargeMarginSoftmaxLoss:
    """Large-margin softmax: the target class's angle counts m times.

    Liu, Wen, Yu & Yang, Large-Margin Softmax Loss for Convolutional Neural Networks, ICML 2016.
    Logits keep the lengths of embeddings and weights.

    Args:
        margin: the factor m of the target's angle.
        scale: logits are multiplied by it.
    """


class SphereFaceLoss(MultipleAngle, losses.SphereFaceLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""

    def lengths_of(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class weights (C, K) of the logits, and factors (N,): without a margin, the
        logit of an item's own class is their cosine × its factor × the scale.
        """
        return unit(self.W, 0), torch.linalg.vector_norm(embeddings, dim=1)


@traits(ref_emb=False)
@forwards(SphereFaceLoss, WEIGHTED)
def sphere_face(
    embedding_size: int,
    classes: int,
    margin: Count = 4,
    scale: Positive = 1.0,
    reducer: Reducer = None,
) -> losses.SphereFaceLoss:
    """SphereFace: large-margin softmax with class weights of length 1.

    Liu, Wen, Yu, Li, Raj & Song, SphereFace: Deep Hypersphere Embedding for Face Recognition, CVPR
    2017. Logits keep the embeddings' lengths.

    Args:
        margin: the factor m of the target's angle.
        scale: logits are multiplied by it.
    """


class ArcFaceLoss(MarginAtTarget, losses.ArcFaceLoss):
    """Upstream's, with gradients that stay finite at an angle of 0."""


@traits(ref_emb=False)
@forwards(ArcFaceLoss, WEIGHTED)
def arc_face(
    embedding_size: int,
    classes: int,
    margin: Degrees = 28.6,
    scale: Positive = 64.0,
    reducer: Reducer = None,
) -> losses.ArcFaceLoss:
    """ArcFace: softmax over cosines, with a margin added to the target class's angle.

    Deng, Guo, Xue & Zafeiriou, ArcFace: Additive Angular Margin Loss for Deep Face Recognition,
    CVPR 2019.

    Args:
        margin: added to the target class's angle, in degrees.
        scale: cosines are multiplied by it.
    """


class CosFaceLoss(MarginAtTarget, losses.CosFaceLoss):
    """Upstream's, in float32."""


@traits(ref_emb=False)
@forwards(CosFaceLoss, WEIGHTED)
def cos_face(
    embedding_size: int,
    classes: int,
    margin: float = 0.35,
    scale: Positive = 64.0,
    reducer: Reducer = None,
) -> losses.CosFaceLoss:
    """CosFace: softmax over cosines, with a margin subtracted from the target class's.

    Wang et al., CosFace: Large Margin Cosine Loss for Deep Face Recognition, CVPR 2018.

    Args:
        margin: subtracted from the target class's cosine.
        scale: cosines are multiplied by it.
    """


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


def _by_centre(weights: Tensor, centres: int) -> Tensor:
    """Return class weights (C, K × centres) with all classes' first centres first."""
    if centres == 1:
        return weights
    return weights.view(len(weights), -1, centres).transpose(1, 2).reshape(len(weights), -1)


@traits(ref_emb=False)
@forwards(SubCenterArcFaceLoss, WEIGHTED)
def sub_center_arc_face(
    embedding_size: int,
    classes: int,
    margin: Degrees = 28.6,
    scale: Positive = 64.0,
    sub_centers: Count = 3,
    reducer: Reducer = None,
) -> losses.SubCenterArcFaceLoss:
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


class NormalizedSoftmaxLoss(ClassWeights, losses.NormalizedSoftmaxLoss):
    """Upstream's loss, computed through `ClassWeights`."""

    def of_items(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the items' losses (N,)."""
        items = at_length(self.distance, embeddings, 1, 1 / self.temperature)
        return cross_entropy(items, unit(self.W, 0), labels, torch.clone)


@traits(ref_emb=False)
@forwards(NormalizedSoftmaxLoss, WEIGHTED)
def normalized_softmax(
    embedding_size: int,
    classes: int,
    temperature: Positive = 0.05,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.NormalizedSoftmaxLoss:
    """Softmax over similarities to class weights of length 1.

    Zhai & Wu, Classification is a Strong Baseline for Deep Metric Learning, BMVC 2019; Wang et al.,
    NormFace, ACM MM 2017.

    Args:
        temperature: similarities are divided by it.
        distance: how embeddings are compared with class weights; the dot product of unit vectors by
            default.
    """


class SoftTripleLoss(ClassWeights, losses.SoftTripleLoss):
    """Upstream's loss, computed through `ClassWeights`."""

    def of_items(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the items' losses (N,)."""
        items = at_length(self.distance, embeddings, 1, self.gamma)
        weights = _by_centre(at_length(self.distance, self.fc, 0), self.centers_per_class)
        pooled = {"pool": Softly(), "centres": self.centers_per_class, "rate": self.la / self.gamma}
        return cross_entropy(items, weights, labels, self._at_target, **pooled)

    def _at_target(self, logits: Tensor) -> Tensor:
        logit: Tensor = logits - self.la * self.margin
        return logit

    def class_weights(self) -> Tensor:
        """Return the class weights as rows, for their regulariser."""
        return self.fc.t()  # type: ignore[no-any-return]


@traits(ref_emb=False)
@forwards(SoftTripleLoss, WEIGHTED)
def soft_triple(
    embedding_size: int,
    classes: int,
    centers_per_class: Count = 10,
    la: Positive = 20.0,
    gamma: Positive = 0.1,
    margin: float = 0.01,
    distance: Distance = None,
    reducer: Reducer = None,
) -> losses.SoftTripleLoss:
    """SoftTriple: softmax over classes with several centres each; nearer ones weigh more.

    Qian, Shang, Sun, Hu, Li & Jin, SoftTriple Loss: Deep Metric Learning Without Triplet Sampling,
    ICCV 2019; the paper merges centres with the weight regulariser `pml.sparse_centers`.

    Args:
        centers_per_class: centres of each class.
        la: λ: similarities to classes are multiplied by it.
        gamma: the temperature that chooses among a class's centres.
        margin: δ: subtracted from the similarity to the item's own class.
        distance: how embeddings are compared with centres, a similarity; cosine by default.
        weight_regularizer: a penalty on the centres, added to the loss.
        weight_init_func: how the centres begin; Kaiming's uniform by default.
    """
    require_similarity(distance, "pml.soft_triple")


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make
    for make in (
        large_margin_softmax,
        sphere_face,
        arc_face,
        cos_face,
        sub_center_arc_face,
        normalized_softmax,
        soft_triple,
    )
}
