"""The exchangeable parts of a loss: distances, reducers and regularisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat
from pytorch_metric_learning import distances, reducers, regularizers
from retrieval.plugin import Part, Reducer
from torch import Tensor, nn

from retrieval_pml.upstream_factories import FIXED, offer

DISTANCES: Mapping[str, Callable[..., Any]] = {
    "cosine_similarity": offer(
        distances.CosineSimilarity,
        """Cosine similarity, from −1 to 1; larger is closer.

        Args:
            p: norm by which embeddings are scaled to length 1. Only 2 gives cosines.
            power: exponent of the similarity. An even exponent loses the sign.
        """,
        without=("normalize_embeddings",),
    ),
    "dot_product_similarity": offer(
        distances.DotProductSimilarity,
        """Dot product; larger is closer.

        Args:
            normalize_embeddings: whether to scale embeddings to length 1 first.
            p: norm that measures this length.
            power: exponent of the similarity. An even exponent loses the sign.
        """,
    ),
    "lp": offer(
        distances.LpDistance,
        """The p-norm of the difference: by default the Euclidean distance, 0 to 2 for unit vectors.

        Args:
            normalize_embeddings: whether to scale embeddings to length 1 first.
            p: the norm.
            power: exponent of the distance. 2 with p = 2 gives the squared Euclidean distance.
        """,
    ),
    "snr": offer(
        distances.SNRDistance,
        """The variance of the difference over that of the first embedding, which is not symmetric.

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

    Use it for `pml.margin`, `pml.proxy_anchor` and the regulariser `pml.sparse_centers`, for which
    it is the default; other losses define none.
    """

    def unpack_loss_info(self, loss_info: dict[str, Any]) -> Any:
        """Return the losses, their indices, their kind and the divisor."""
        if loss_info["reduction_type"] != "already_reduced" and "divisor" not in loss_info:
            raise ValueError(
                "this loss defines no divisor for pml.divisor; use pml.mean or pml.sum"
            )
        return super().unpack_loss_info(loss_info)


class PerAnchorReducer(reducers.PerAnchorReducer):
    """The mean over an anchor's pairs or triplets, then another reducer over the anchors.

    The reducer of pytorch-metric-learning fails for triplets, and for pairs with a reference set
    that is larger than the batch.

    Args:
        reducer: reduces the anchors' means to one number; the mean by default.
    """

    def tuple_reduction_helper(
        self, losses: Tensor, loss_indices: Sequence[Tensor], embeddings: Tensor, labels: Tensor
    ) -> Any:
        """Return the mean losses of the anchors, reduced by the inner reducer."""
        anchors = loss_indices[0]
        zeros = losses.new_zeros(len(embeddings))
        total = zeros.index_add(0, anchors, losses)
        count = zeros.index_add(0, anchors, torch.ones_like(losses))
        return self.element_reduction(
            total / count.clamp(min=1),
            torch.arange(len(embeddings), device=embeddings.device),
            embeddings,
            labels,
        )

    def triplet_reduction(self, *args: Any) -> Any:
        """Return the mean losses of the anchors, reduced by the inner reducer."""
        return self.tuple_reduction_helper(*args)


def class_weighted(
    weights: list[NonNegativeFloat], classes: int | None = None
) -> reducers.ClassWeightedReducer:
    """The mean of the losses, each multiplied by the weight of its item's or anchor's class.

    Args:
        weights: one weight per training class, in the order of the class numbers.
    """
    if classes is not None and len(weights) != classes:
        raise ValueError(f"there are {len(weights)} weights, but {classes} training classes")
    return reducers.ClassWeightedReducer(torch.tensor(weights, dtype=torch.float32))


def multiple(
    reducers: Annotated[list[nn.Module], Part("reducers")],
    names: list[str],
    default_reducer: Reducer = None,
) -> nn.Module:
    """Different reducers for the parts of a loss. The reduced parts are added.

    Args:
        reducers: one reducer per name.
        names: names of parts, such as "pos_loss" and "neg_loss" (`pml.contrastive`,
            `pml.proxy_anchor`), "margin_loss", "embedding_reg_loss" and "weight_reg_loss". The only
            part of other losses is "loss".
        default_reducer: reducer of all other parts; the mean by default.
    """
    if len(set(names)) != len(reducers) or len(names) != len(reducers):
        raise ValueError(f"the {len(reducers)} reducers need as many different names, not {names}")
    # The parameter `reducers` hides the module of this name.
    from pytorch_metric_learning.reducers import MultipleReducers

    return MultipleReducers(  # type: ignore[no-any-return]
        dict(zip(names, reducers, strict=True)), default_reducer=default_reducer
    )


REDUCERS: Mapping[str, Callable[..., Any]] = {
    # Upstream's class is the threshold reducer with low = 0.
    "avg_non_zero": offer(
        reducers.AvgNonZeroReducer, "The mean of the losses above 0.", without=("low", "high")
    ),
    "class_weighted": class_weighted,
    "divisor": offer(DivisorReducer),
    "mean": offer(reducers.MeanReducer, "The mean of the losses."),
    "multiple": multiple,
    "per_anchor": offer(PerAnchorReducer),
    "sum": offer(reducers.SumReducer, "The sum of the losses."),
    "threshold": offer(
        reducers.ThresholdReducer,
        """The mean of the losses between two bounds, at least one of which must be set.

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
        f"""The p-norm of each row, raised to a power.

        Args:
            p: the norm.
            power: exponent of the norms. 2 with p = 2 gives the usual weight decay.
            {_PENALTIES}
        """,
        without=FIXED,
    ),
    "regular_face": offer(
        regularizers.RegularFaceRegularizer,
        f"""Pushes class weights apart by penalising a row's similarity to the nearest other row.

        Zhao, Xu & Cheng, RegularFace: Deep Face Recognition via Exclusive Regularization, CVPR
        2019.

        Args:
            distance: similarity of two rows; the cosine by default.
            {_PENALTIES}
        """,
        similarity=True,
    ),
    "sparse_centers": offer(
        regularizers.SparseCentersRegularizer,
        """Merges centres of a class by penalising √(2 − 2 cos) between any two of them.

        Qian, Shang, Sun, Hu, Li & Jin, SoftTriple Loss, ICCV 2019; the weight regulariser of
        `pml.soft_triple`.

        Args:
            centers_per_class: number of centres per class in the loss, at least 2.
            reducer: reduces the pairs' penalties to one number. By default it divides their sum by
                twice the number of pairs.
        """,
        without=FIXED,
        centers_per_class=Annotated[int, Field(ge=2)],
    ),
    "zero_mean": offer(
        regularizers.ZeroMeanRegularizer,
        f"""The absolute value of the sum of each row's dimensions.

        Use it with `pml.signal_to_noise_ratio_contrastive`.

        Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep
        Metric Learning, CVPR 2019.

        Args:
            {_PENALTIES}
        """,
        without=FIXED,
    ),
}
