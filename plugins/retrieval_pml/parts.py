"""The exchangeable parts of a loss: distances, reducers and regularisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pytorch_metric_learning import distances, reducers, regularizers
from retrieval.plugin import Part
from torch import Tensor, nn

from retrieval_pml.adapters import (
    Distance,
    NonNegative,
    Positive,
    Reducer,
    Several,
    forwards,
    require_similarity,
)
from retrieval_pml.pair_matrix import ENTRIES


@forwards(distances.CosineSimilarity)
def cosine_similarity(p: Positive = 2, power: Positive = 1) -> distances.CosineSimilarity:
    """Cosine similarity, from −1 to 1; larger is closer.

    Args:
        p: norm that scales embeddings to length 1; only 2 results in cosines.
        power: exponent of the similarity; an even one loses the sign.
    """


@forwards(distances.DotProductSimilarity)
def dot_product_similarity(
    normalize_embeddings: bool = True, p: Positive = 2, power: Positive = 1
) -> distances.DotProductSimilarity:
    """Dot product; larger is closer.

    Args:
        normalize_embeddings: whether to scale embeddings to length 1 first.
        p: norm that measures this length.
        power: exponent of the similarity; an even one loses the sign.
    """


@forwards(distances.LpDistance)
def lp_distance(
    normalize_embeddings: bool = True, p: Positive = 2, power: Positive = 1
) -> distances.LpDistance:
    """The p-norm of the difference, Euclidean by default; on unit vectors from 0 to 2.

    Args:
        normalize_embeddings: whether to scale embeddings to length 1 first.
        p: the norm.
        power: exponent of the distance; 2 with p = 2 is the squared Euclidean distance.
    """


class SNRDistance(distances.SNRDistance):
    """Upstream's distance, computed by a matrix product instead of each pair's difference."""

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return var(query − reference) / var(query), (N, M)."""
        centred = [x - x.mean(1, keepdim=True) for x in (query_emb, ref_emb)]
        apart: Tensor = _SquaredDistances.apply(*centred)
        return apart / centred[0].square().sum(1, keepdim=True)


class _SquaredDistances(torch.autograd.Function):
    """‖xᵢ − yⱼ‖², (N, M); of vectors that are almost the same, by their difference."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        lengths = x.square().sum(1, keepdim=True), y.square().sum(1)
        squares = torch.addmm(lengths[1], x, y.T, alpha=-2).add_(lengths[0])
        row, column = torch.where(squares < 1e-2 * lengths[0])
        step = max(1, ENTRIES // x.shape[1])
        for part in (slice(k, k + step) for k in range(0, len(row), step)):
            squares[row[part], column[part]] = (x[row[part]] - y[column[part]]).square().sum(1)
        return squares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        of_x = gradient.sum(1, keepdim=True) * x - gradient @ y
        of_y = gradient.sum(0).unsqueeze(1) * y - gradient.T @ x
        return 2 * of_x, 2 * of_y


@forwards(SNRDistance)
def snr(
    normalize_embeddings: bool = True, p: Positive = 2, power: Positive = 1
) -> distances.SNRDistance:
    """The variance of the difference over that of the first embedding; not symmetric.

    Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric
    Learning, CVPR 2019.

    Args:
        normalize_embeddings: whether to scale embeddings to length 1 first.
        p: norm that measures this length.
        power: exponent of the distance.
    """


DISTANCES: Mapping[str, Callable[..., Any]] = {
    "cosine_similarity": cosine_similarity,
    "dot_product_similarity": dot_product_similarity,
    "lp": lp_distance,
    "snr": snr,
}


class ClassWeightedReducer(reducers.ClassWeightedReducer):
    """Upstream's reducer, which also works for losses in a column (N, 1).

    Upstream multiplies a column with a row of weights, and so each loss with every weight.
    """

    def element_reduction_helper(self, losses: Tensor, indices: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of the losses, each times the weight of its (anchor's) class."""
        return super().element_reduction_helper(losses.flatten(), indices, labels)  # type: ignore[no-any-return]


class DivisorReducer(reducers.DivisorReducer):
    """Upstream's reducer, with a clear error for losses without a divisor."""

    def unpack_loss_info(self, loss_info: dict[str, Any]) -> Any:
        """Return the losses, their indices, their kind and the divisor."""
        if loss_info["reduction_type"] != "already_reduced" and "divisor" not in loss_info:
            raise ValueError(
                "pml.divisor serves losses that say what to divide by (pml.margin,"
                " pml.proxy_anchor, and the regulariser pml.sparse_centers); use pml.mean or"
                " pml.sum here"
            )
        return super().unpack_loss_info(loss_info)


class PerAnchorReducer(reducers.PerAnchorReducer):
    """Upstream's mean of each anchor's losses, also with a reference set and for triplets.

    Upstream fails where pairs reach into a reference set larger than the batch, on losses that come
    as a column (N, 1), and on triplets.
    """

    def tuple_reduction_helper(
        self, losses: Tensor, loss_indices: Sequence[Tensor], embeddings: Tensor, labels: Tensor
    ) -> Any:
        """Return the inner reducer's number of the anchors' mean losses."""
        anchors, zeros = loss_indices[0], losses.new_zeros(len(embeddings))
        total = zeros.index_add(0, anchors, losses.flatten())
        count = zeros.index_add(0, anchors, torch.ones_like(losses.flatten()))
        return self.element_reduction(
            total / count.clamp(min=1),
            torch.arange(len(embeddings), device=embeddings.device),
            embeddings,
            labels,
        )

    def triplet_reduction(self, *args: Any) -> Any:
        """Return the inner reducer's number of the anchors' mean losses."""
        return self.tuple_reduction_helper(*args)


def avg_non_zero() -> reducers.AvgNonZeroReducer:
    """The mean of the losses above 0."""
    return reducers.AvgNonZeroReducer()


def class_weighted(
    weights: list[NonNegative], classes: int | None = None
) -> reducers.ClassWeightedReducer:
    """The mean of the losses, each times the weight of its item's or anchor's class.

    Args:
        weights: one for each training class, in the order of the class numbers.
    """
    if classes is not None and len(weights) != classes:
        raise ValueError(f"there are {len(weights)} weights and {classes} training classes")
    return ClassWeightedReducer(torch.tensor(weights, dtype=torch.float32))


def divisor() -> reducers.DivisorReducer:
    """The sum of the losses divided by a number that the loss defines.

    For `pml.margin`, `pml.proxy_anchor` and the regulariser `pml.sparse_centers`, whose default it
    is.
    """
    return DivisorReducer()


def mean() -> reducers.MeanReducer:
    """The mean of the losses."""
    return reducers.MeanReducer()


def multiple(
    reducers: Annotated[list[nn.Module], Part("reducers")],
    names: list[str],
    default_reducer: Reducer = None,
) -> nn.Module:
    """A reducer for each part of a loss that has several, whose numbers are added.

    Args:
        reducers: one for each name.
        names: the parts, such as "pos_loss" and "neg_loss" (`pml.contrastive`, `pml.proxy_anchor`),
            "margin_loss", "embedding_reg_loss", "weight_reg_loss"; "loss" where there is only one.
        default_reducer: for the parts not named; the mean by default.
    """
    if len(set(names)) != len(reducers) or len(names) != len(reducers):
        raise ValueError(
            f"each of the {len(reducers)} reducers needs one name of its own, not {names}"
        )
    from pytorch_metric_learning.reducers import MultipleReducers

    return MultipleReducers(  # type: ignore[no-any-return]
        dict(zip(names, reducers, strict=True)), default_reducer=default_reducer
    )


@forwards(PerAnchorReducer)
def per_anchor(reducer: Reducer = None) -> reducers.PerAnchorReducer:
    """The mean over each anchor's pairs or triplets first, then another reducer over the anchors.

    Args:
        reducer: over the anchors; the mean by default.
    """


def sum_() -> reducers.SumReducer:
    """The sum of the losses."""
    return reducers.SumReducer()


@forwards(reducers.ThresholdReducer)
def threshold(low: float | None = None, high: float | None = None) -> reducers.ThresholdReducer:
    """The mean of the losses between two bounds, of which at least one must be set.

    Args:
        low: losses must be above this.
        high: losses must be below this.
    """


REDUCERS: Mapping[str, Callable[..., Any]] = {
    "avg_non_zero": avg_non_zero,
    "class_weighted": class_weighted,
    "divisor": divisor,
    "mean": mean,
    "multiple": multiple,
    "per_anchor": per_anchor,
    "sum": sum_,
    "threshold": threshold,
}


@forwards(regularizers.CenterInvariantRegularizer)
def center_invariant(reducer: Reducer = None) -> regularizers.CenterInvariantRegularizer:
    """Pulls the lengths of class weights towards their mean: (‖w‖² − mean ‖w‖²)² / 4.

    Wu, Liu, Li, Wu & Xia, Deep Face Recognition with Center Invariant Loss, ACM MM Workshops 2017.

    Args:
        reducer: reduces the rows' penalties to one number; the mean by default.
    """


@forwards(regularizers.LpRegularizer)
def lp_regularizer(
    p: Positive = 2.0, power: Positive = 1.0, reducer: Reducer = None
) -> regularizers.LpRegularizer:
    """The length of each row, by the p-norm, to a power.

    Args:
        p: the norm.
        power: lengths are raised to it; 2 with p = 2 is the usual weight decay.
        reducer: reduces the rows' penalties to one number; the mean by default.
    """


@forwards(regularizers.RegularFaceRegularizer)
def regular_face(
    distance: Distance = None, reducer: Reducer = None
) -> regularizers.RegularFaceRegularizer:
    """Pushes class weights apart, by each row's similarity to its nearest other row.

    Zhao, Xu & Cheng, RegularFace: Deep Face Recognition via Exclusive Regularization, CVPR 2019.

    Args:
        distance: how two rows are compared, a similarity; cosine by default.
        reducer: reduces the rows' penalties to one number; the mean by default.
    """
    require_similarity(distance, "pml.regular_face")


@forwards(regularizers.SparseCentersRegularizer)
def sparse_centers(
    classes: int, centers_per_class: Several, reducer: Reducer = None
) -> regularizers.SparseCentersRegularizer:
    """Merges centres of the same class, by √(2 − 2 cos) between each two of them.

    Qian, Shang, Sun, Hu, Li & Jin, SoftTriple Loss, ICCV 2019; the weight regulariser of
    `pml.soft_triple`.

    Args:
        centers_per_class: as in the loss, at least 2.
        reducer: reduces the pairs' penalties to one number; by default their sum over twice the
            number of pairs.
    """


@forwards(regularizers.ZeroMeanRegularizer)
def zero_mean(reducer: Reducer = None) -> regularizers.ZeroMeanRegularizer:
    """The absolute sum of each row's dimensions.

    It belongs to `pml.signal_to_noise_ratio_contrastive`.

    Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric
    Learning, CVPR 2019.

    Args:
        reducer: reduces the rows' penalties to one number; the mean by default.
    """


REGULARIZERS: Mapping[str, Callable[..., Any]] = {
    "center_invariant": center_invariant,
    "lp": lp_regularizer,
    "regular_face": regular_face,
    "sparse_centers": sparse_centers,
    "zero_mean": zero_mean,
}
