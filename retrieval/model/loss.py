"""Losses: a base class that checks its input, helpers for pairs, and checks of the results.

The host checks what any plugin's loss, miner or objective returns, on every call. Checking shapes,
types and devices costs almost nothing. Checking the range of a miner's indices costs one transfer
from the GPU per batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

import torch
from pytorch_metric_learning.losses.base_metric_loss_function import BaseMetricLossFunction
from torch import Tensor, nn

from retrieval.errors import DataError, PluginError
from retrieval.host.factory import Part
from retrieval.model.contracts import TripletIndices, breach, in_words
from retrieval.model.model import full_precision

Distance = Annotated[nn.Module | None, Part("distances")]
"""Type of a loss's parameter `distance: Distance = None`, which a recipe sets by name."""
Reducer = Annotated[nn.Module | None, Part("reducers")]
"""Type of a loss's parameter `reducer: Reducer = None`, which a recipe sets by name."""
Pairs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Indices, int64: anchors and their positives, anchors and their negatives."""
Losses = dict[str, dict[str, Any]]
"""Losses by name, in the format that reducers take; see `losses_of`."""


class CheckedLoss(BaseMetricLossFunction):
    """A loss that checks its input and computes in at least float32, even under autocast.

    A subclass defines pytorch-metric-learning's `compute_loss(embeddings, labels, indices_tuple,
    ref_emb, ref_labels)`. Without a reference set, `ref_emb is embeddings`. A subclass that is
    marked with `traits(ref_emb=False)` or `traits(miner=False)` refuses that argument.

    Args:
        distance: the distance between embeddings.
        reducer: reduces the losses to one number; the default is the mean.

    Attributes:
        known_classes: number of classes that the loss has weights for, or `None`.
    """

    known_classes: int | None = None
    zero_losses: Callable[[], Losses]

    def __init__(self, distance: Distance = None, reducer: Reducer = None) -> None:
        super().__init__(distance=distance, reducer=reducer)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a scalar; see `retrieval.plugin.Loss`.

        The loss has the embeddings' type, or float32 under autocast.

        Raises:
            ValueError: shapes, labels or indices do not fit, or an argument is not accepted.
            DataError: an embedding on a CPU is NaN or infinite.
        """
        takes = getattr(type(self), "__retrieval_traits__", {})
        if indices_tuple is not None and not takes.get("miner", True):
            raise ValueError(f"{type(self).__name__} takes no miner's indices: remove the miner")
        query = _checked_embeddings(embeddings, "embeddings")
        # With a miner's indices, a loss needs no labels.
        needs_labels = indices_tuple is None
        if labels is not None or needs_labels:
            labels = _checked_labels(labels, query, "labels")
            self._check_class_ids(labels)
        if ref_emb is None or ref_emb is embeddings:
            reference = None
            ref_labels = None
        else:
            if not takes.get("ref_emb", True):
                raise ValueError(
                    f"{type(self).__name__} looks only at its batch and takes no ref_emb"
                )
            reference = _checked_embeddings(ref_emb, "ref_emb")
            if ref_labels is not None or needs_labels:
                ref_labels = _checked_labels(ref_labels, reference, "ref_labels")
        with torch.autocast(device_type=query.device.type, enabled=False):
            total: Tensor = super().forward(query, labels, indices_tuple, reference, ref_labels)
        return as_given(total, embeddings)

    def _check_class_ids(self, labels: Tensor) -> None:
        """Raise a ValueError if labels on a CPU are not class ids that the loss has weights for."""
        count = self.known_classes
        if count and reads_at_once(labels.device) and len(labels):
            low = int(labels.min())
            high = int(labels.max())
            if low < 0 or high >= count:
                raise ValueError(
                    f"labels go from {low} to {high}, but the loss has classes 0 to {count - 1}"
                )


def as_given(loss: Tensor, embeddings: Tensor) -> Tensor:
    """Return a loss in the embeddings' type, or unchanged (float32) under autocast.

    Under autocast, a gradient scaler multiplies the loss by 65,536, which would overflow float16.
    """
    if torch.is_autocast_enabled(embeddings.device.type):
        return loss
    return loss.to(embeddings.dtype)


def pair_views(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Pair the items of each label in order: the first with the second, the third with the fourth.

    Args:
        labels: (N,).

    Returns:
        The positions of the first and of the second items of the P pairs, each (P,). If a label has
        an odd number of items, its last item is in no pair.
    """
    ordered, order = torch.sort(labels, stable=True)
    rank = _rank_in_run(ordered)
    same_as_next = ordered[1:] == ordered[:-1]
    is_even = rank[:-1] % 2 == 0
    (first,) = torch.where(is_even & same_as_next)
    return order[first], order[first + 1]


def _rank_in_run(ordered: Tensor) -> Tensor:
    """Return how many equal labels precede each of N grouped labels (N,)."""
    positions = torch.arange(len(ordered), device=ordered.device)
    return positions - torch.searchsorted(ordered, ordered)


def pairs_by_round(labels: Tensor, ref_labels: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return anchors, positives and rounds of pairs, at most one per class and round.

    Without `ref_labels`, `pair_views` pairs the items. The r-th pair of a class is in round r.
    """
    if ref_labels is None:
        anchor, positive = pair_views(labels)
    else:
        ordered, order = torch.sort(labels, stable=True)
        references, reference_order = torch.sort(ref_labels, stable=True)
        # The r-th item of a class is paired with the r-th reference of the class.
        position = torch.searchsorted(references, ordered) + _rank_in_run(ordered)
        has_partner = position < torch.searchsorted(references, ordered, right=True)
        anchor = order[has_partner]
        positive = reference_order[position[has_partner]]
    return anchor, positive, _rank_in_run(labels[anchor])


def losses_of(
    losses: Tensor,
    indices: Any,
    kind: str,
    name: str = "loss",
) -> Losses:
    """Return the losses of items, pairs or triplets, in the format that reducers take.

    Args:
        losses: (K,).
        indices: the rows (K,) of the items, or a tuple of such tensors for pairs and triplets.
        kind: "element", "pos_pair", "neg_pair" or "triplet".
        name: name of the losses.
    """
    return {name: {"losses": losses, "indices": indices, "reduction_type": kind}}


def item_losses(losses: Tensor) -> Losses:
    """Return one loss per item of the batch (B,), in the format that reducers take."""
    rows = torch.arange(len(losses), device=losses.device)
    return losses_of(losses, rows, "element")


def reduced_loss(loss: Tensor, name: str = "loss") -> Losses:
    """Return a scalar loss, in the format that reducers take."""
    return losses_of(loss, None, "already_reduced", name)


def reads_at_once(device: torch.device) -> bool:
    """Return whether the values of a tensor on a device can be read without waiting for a GPU."""
    return device.type == "cpu"


def _checked_embeddings(x: Any, name: str) -> Tensor:
    """Return embeddings (B, C) in full precision, after checking them."""
    if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
        raise ValueError(
            f"{name} must be a two-dimensional tensor of floating-point numbers, one row per item,"
            f" not {in_words(x)}"
        )
    # On a GPU, the check would make each batch wait for the one before. If the sum is finite, which
    # is quick to see, so are all numbers.
    if reads_at_once(x.device) and not math.isfinite(x.detach().sum()):
        finite = torch.isfinite(x).all(1)
        if not finite.all():
            wrong = int((~finite).sum())
            raise DataError(f"{name} hold NaN or infinite numbers: {wrong} of {len(x)} items")
    return full_precision(x)


def _checked_labels(labels: Any, items: Tensor, name: str) -> Tensor:
    """Return labels (B,) on the embeddings' device, after checking them."""
    if not isinstance(labels, Tensor) or labels.shape != items.shape[:1]:
        raise ValueError(
            f"{name} must be a tensor of {len(items)} class ids, one per item (text labels as whole"
            f" numbers), not {in_words(labels)}"
        )
    return labels.to(items.device)


def listed_pairs(
    indices: Any,
    shape: tuple[int, int],
    device: torch.device,
) -> Pairs:
    """Return a miner's three or four tensors as anchors, positives, anchors, negatives.

    `shape` are the numbers of embeddings and of references.

    Raises:
        ValueError: the indices are not three or four tensors of matching length, or an index is
            out of range.
    """
    if len(indices) not in (3, 4):
        raise ValueError(
            "a miner gives (anchor, positive, negative) or (anchor, positive, anchor, negative),"
            f" not {len(indices)} tensors"
        )
    tensors = [torch.as_tensor(indices_of, device=device).long() for indices_of in indices]
    if len(tensors) == 3:  # the anchor of a triplet belongs to both of its pairs
        tensors.insert(2, tensors[0])
    pairs = (tensors[0], tensors[1], tensors[2], tensors[3])
    for anchors, partners in (pairs[:2], pairs[2:]):
        if anchors.shape != partners.shape or anchors.ndim != 1:
            raise ValueError(
                "a miner must give as many anchors as partners, in one dimension, not"
                f" {tuple(anchors.shape)} and {tuple(partners.shape)}"
            )
        for tensor, size in zip((anchors, partners), shape, strict=True):
            if not tensor.numel():
                continue
            low = int(tensor.min())
            high = int(tensor.max())
            if low < 0 or high >= size:
                raise ValueError(
                    f"a miner's indices go from {low} to {high}, but there are {size} items: did"
                    " the miner get the same batch and reference set?"
                )
    return pairs


def checked_scalar(
    value: Any,
    what: str,
    inputs: Tensor,
    owner: nn.Module | None = None,
) -> Tensor:
    """Return the result of a loss or objective if it is a valid scalar.

    The scalar must be differentiable in `inputs` or in the parameters of `owner`. `what` names the
    part at the beginning of an error: "The loss acme.margin".

    Raises:
        PluginError: the result is not a scalar, is on another device, or has no gradient.
    """
    scalar = (
        "a scalar: a tensor of one floating-point number, through which the gradient reaches the"
        " embeddings"
    )
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    if not is_float or value.numel() != 1:
        hint = ""
        if isinstance(value, Mapping):
            hint = (
                " A reducer turns pytorch-metric-learning's dictionary into a scalar: subclass"
                " BaseMetricLossFunction and define compute_loss."
            )
        elif isinstance(value, int | float):
            hint = (
                " Do not call item() or float(); if there are no pairs, return embeddings.sum()"
                " * 0."
            )
        elif is_float and value.numel() > 1:
            hint = " Take its mean."
        raise breach(what, value, f"{scalar}.{hint}")
    if value.device != inputs.device:
        raise PluginError(
            f"{what} gave {in_words(value)} on {value.device}; its input is on {inputs.device}."
        )
    trains = inputs.requires_grad
    if owner is not None:
        trains |= any(p.requires_grad for p in owner.parameters())
    # A loss may return a constant zero for a batch without pairs.
    if trains and not value.requires_grad and torch.is_grad_enabled() and float(value) != 0:
        raise PluginError(
            f"{what} gave {float(value):.4g} without a gradient; it must give {scalar}. Was it"
            " detached, taken through numpy, or computed under torch.no_grad()?"
        )
    return cast(Tensor, value).reshape(())


def checked_indices(
    picked: Any,
    what: str,
    sizes: tuple[int, int],
    device: torch.device,
) -> TripletIndices:
    """Return a miner's result as int64 tensors; `sizes` are the numbers of anchors and others.

    Raises:
        PluginError: the types, lengths, device or range of the indices are wrong.
    """
    must = (
        "(anchor, positive, negative) or (anchor1, positive, anchor2, negative): int64 tensors with"
        " one index per triplet or pair, on the device of the codes"
    )
    if not isinstance(picked, list | tuple) or len(picked) not in (3, 4):
        raise breach(what, picked, f"{must}.")
    devices = {str(x.device) for x in picked if isinstance(x, Tensor)} - {str(device)}
    if devices:
        names = ", ".join(sorted(devices))
        raise breach(what, picked, f"{must}.", f" on {names} (the codes are on {device})")
    for x in picked:
        is_integer = isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)
        if not is_integer or x.ndim != 1:
            raise breach(what, picked, f"{must}.")
    groups = [picked] if len(picked) == 3 else [picked[:2], picked[2:]]
    if any(len({len(x) for x in group}) > 1 for group in groups):
        raise breach(what, picked, f"{must}, of equal length.")
    indices = [x.long() for x in picked]
    anchors, partners = sizes
    limits = [anchors, partners, partners]
    if len(picked) == 4:
        limits = [anchors, partners, anchors, partners]
    nonempty = [(x, size) for x, size in zip(indices, limits, strict=True) if len(x)]
    if nonempty:
        # One stacked tensor costs one transfer from the GPU, not one per limit.
        ranges = [torch.stack(torch.aminmax(x)) for x, _ in nonempty]
        ends = torch.stack(ranges).tolist()
        for (low, high), (_, size) in zip(ends, nonempty, strict=True):
            # On a GPU, a wrong index would fail at some later line, without a reason.
            if low < 0 or high >= size:
                raise PluginError(
                    f"{what} gave indices from {low} to {high}, but the {size} items are numbered"
                    " from 0."
                )
    return cast(TripletIndices, tuple(indices))


def count_indices(indices: TripletIndices | None) -> int:
    """Return the number of a miner's triplets, or of its positive and negative pairs."""
    if indices is None:
        return 0
    if len(indices) == 3:
        return indices[0].numel()
    return indices[0].numel() + indices[2].numel()


def checked_objective(
    value: Any, what: str, codes: Tensor
) -> tuple[Tensor | None, Mapping[str, Any]]:
    """Return the result of a combiner's `objective` if valid: a scalar or None, and metrics."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], Mapping):
        raise breach(what, value, "a scalar (or None), and metrics by name.", " from objective")
    loss, metrics = value
    for name, number in metrics.items():
        is_scalar = isinstance(number, Tensor) and number.numel() == 1
        if not is_scalar and (not isinstance(number, int | float) or isinstance(number, bool)):
            raise PluginError(
                f"{what} gave {in_words(number)} for the metric '{name}' of objective; it must be"
                " one number."
            )
    # A metric with a gradient would keep the graph of its batch in memory until the epoch's end.
    metrics = {k: v.detach() if isinstance(v, Tensor) else v for k, v in metrics.items()}
    if loss is not None:
        loss = checked_scalar(loss, f"{what}'s objective", codes)
    return loss, metrics
