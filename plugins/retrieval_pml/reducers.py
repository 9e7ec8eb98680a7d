"""Reducers: they make one number of the losses of items, pairs or triplets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pytorch_metric_learning import reducers
from retrieval.plugin import Part
from torch import Tensor, nn

from retrieval_pml.common import NonNegative, Reducer
from retrieval_pml.forward import forwards


class ClassWeightedReducer(reducers.ClassWeightedReducer):
    """Upstream's, except for losses that come as a column (N, 1), as those of
    `pml.multi_similarity` do.

    Upstream multiplies a column with a row of weights, and so each loss with every weight.
    """

    def element_reduction_helper(self, losses: Tensor, indices: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of the losses, each times the weight of its (anchor's) class."""
        return super().element_reduction_helper(losses.flatten(), indices, labels)  # type: ignore[no-any-return]


class DivisorReducer(reducers.DivisorReducer):
    """Upstream's, with a sentence for losses that give no divisor."""

    def unpack_loss_info(self, loss_info: dict[str, Any]) -> Any:
        """Return the losses, their indices, their kind and the divisor.

        Raises:
            ValueError: the loss gives no divisor.
        """
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
        """Return the inner reducer's number of the anchors' mean losses; an anchor without any
        counts as 0.
        """
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
    """The mean of the losses, each times the weight of its item's (pair's or triplet's anchor's)
    class.

    Args:
        weights: one for each training class, in the order of the class numbers.
    """
    if classes is not None and len(weights) != classes:
        raise ValueError(f"there are {len(weights)} weights and {classes} training classes")
    return ClassWeightedReducer(torch.tensor(weights, dtype=torch.float32))


def divisor() -> reducers.DivisorReducer:
    """The sum of the losses over a number that the loss names, such as that of proxies with
    positives.

    Serves `pml.margin`, `pml.proxy_anchor` and the regulariser `pml.sparse_centers`, whose default
    it is.
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


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "avg_non_zero": avg_non_zero,
    "class_weighted": class_weighted,
    "divisor": divisor,
    "mean": mean,
    "multiple": multiple,
    "per_anchor": per_anchor,
    "sum": sum_,
    "threshold": threshold,
}
