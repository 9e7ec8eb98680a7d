"""The exchangeable parts of a loss: distances, reducers and regularisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from pytorch_metric_learning import distances, reducers, regularizers
from retrieval.plugin import Part, Reducer
from torch import Tensor, nn

from retrieval_pml.offers import FIXED, NonNegative, offer

DISTANCES: Mapping[str, Callable[..., Any]] = {
    "cosine_similarity": offer(
        distances.CosineSimilarity,
        """Cosine similarity, from −1 to 1; larger is closer.

        Args:
            p: norm that scales embeddings to length 1; only 2 results in cosines.
            power: exponent of the similarity; an even one loses the sign.
        """,
    ),
    "dot_product_similarity": offer(
        distances.DotProductSimilarity,
        """Dot product; larger is closer.

        Args:
            normalize_embeddings: whether to scale embeddings to length 1 first.
            p: norm that measures this length.
            power: exponent of the similarity; an even one loses the sign.
        """,
    ),
    "lp": offer(
        distances.LpDistance,
        """The p-norm of the difference, Euclidean by default; on unit vectors from 0 to 2.

        Args:
            normalize_embeddings: whether to scale embeddings to length 1 first.
            p: the norm.
            power: exponent of the distance; 2 with p = 2 is the squared Euclidean distance.
        """,
    ),
    "snr": offer(
        distances.SNRDistance,
        """The variance of the difference over that of the first embedding; not symmetric.

        Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep
        Metric Learning, CVPR 2019.

        Args:
            normalize_embeddings: whether to scale embeddings to length 1 first.
            p: norm that measures this length.
            power: exponent of the distance.
        """,
    ),
}


class DivisorReducer(reducers.DivisorReducer):
    """The sum of the losses divided by a number that the loss defines.

    For `pml.margin`, `pml.proxy_anchor` and the regulariser `pml.sparse_centers`, whose default it
    is.
    """

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
    """The mean over each anchor's pairs or triplets first, then another reducer over the anchors.

    Upstream's fails where pairs reach into a reference set larger than the batch, and on triplets.

    Args:
        reducer: over the anchors; the mean by default.
    """

    def tuple_reduction_helper(
        self, losses: Tensor, loss_indices: Sequence[Tensor], embeddings: Tensor, labels: Tensor
    ) -> Any:
        """Return the inner reducer's number of the anchors' mean losses."""
        anchors, zeros = loss_indices[0], losses.new_zeros(len(embeddings))
        total = zeros.index_add(0, anchors, losses)
        count = zeros.index_add(0, anchors, torch.ones_like(losses))
        return self.element_reduction(
            total / count.clamp(min=1),
            torch.arange(len(embeddings), device=embeddings.device),
            embeddings,
            labels,
        )

    def triplet_reduction(self, *args: Any) -> Any:
        """Return the inner reducer's number of the anchors' mean losses."""
        return self.tuple_reduction_helper(*args)


def class_weighted(
    weights: list[NonNegative], classes: int | None = None
) -> reducers.ClassWeightedReducer:
    """The mean of the losses, each times the weight of its item's or anchor's class.

    Args:
        weights: one for each training class, in the order of the class numbers.
    """
    if classes is not None and len(weights) != classes:
        raise ValueError(f"there are {len(weights)} weights and {classes} training classes")
    return reducers.ClassWeightedReducer(torch.tensor(weights, dtype=torch.float32))


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


REDUCERS: Mapping[str, Callable[..., Any]] = {
    "avg_non_zero": offer(reducers.AvgNonZeroReducer, "The mean of the losses above 0."),
    "class_weighted": class_weighted,
    "divisor": offer(DivisorReducer),
    "mean": offer(reducers.MeanReducer, "The mean of the losses."),
    "multiple": multiple,
    "per_anchor": offer(PerAnchorReducer),
    "sum": offer(reducers.SumReducer, "The sum of the losses."),
    "threshold": offer(
        reducers.ThresholdReducer,
        """The mean of the losses between two bounds, of which at least one must be set.

        Args:
            low: losses must be above this.
            high: losses must be below this.
        """,
        low=float | None,
        high=float | None,
    ),
}


_PENALTIES = "reducer: reduces the rows' penalties to one number; the mean by default."

REGULARIZERS: Mapping[str, Callable[..., Any]] = {
    "center_invariant": offer(
        regularizers.CenterInvariantRegularizer,
        f"""Pulls the lengths of class weights towards their mean: (‖w‖² − mean ‖w‖²)² / 4.

        Wu, Liu, Li, Wu & Xia, Deep Face Recognition with Center Invariant Loss, ACM MM Workshops
        2017.

        Args:
            {_PENALTIES}
        """,
        without=FIXED,
    ),
    "lp": offer(
        regularizers.LpRegularizer,
        f"""The length of each row, by the p-norm, to a power.

        Args:
            p: the norm.
            power: lengths are raised to it; 2 with p = 2 is the usual weight decay.
            {_PENALTIES}
        """,
        without=FIXED,
    ),
    "regular_face": offer(
        regularizers.RegularFaceRegularizer,
        f"""Pushes class weights apart, by each row's similarity to its nearest other row.

        Zhao, Xu & Cheng, RegularFace: Deep Face Recognition via Exclusive Regularization, CVPR
        2019.

        Args:
            distance: how two rows are compared, a similarity; cosine by default.
            {_PENALTIES}
        """,
        similarity=True,
    ),
    "sparse_centers": offer(
        regularizers.SparseCentersRegularizer,
        """Merges centres of the same class, by √(2 − 2 cos) between each two of them.

        Qian, Shang, Sun, Hu, Li & Jin, SoftTriple Loss, ICCV 2019; the weight regulariser of
        `pml.soft_triple`.

        Args:
            centers_per_class: as in the loss, at least 2.
            reducer: reduces the pairs' penalties to one number; by default their sum over twice
                the number of pairs.
        """,
        without=FIXED,
        centers_per_class=Annotated[int, Field(ge=2)],
    ),
    "zero_mean": offer(
        regularizers.ZeroMeanRegularizer,
        f"""The absolute sum of each row's dimensions.

        It belongs to `pml.signal_to_noise_ratio_contrastive`.

        Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep
        Metric Learning, CVPR 2019.

        Args:
            {_PENALTIES}
        """,
        without=FIXED,
    ),
}
