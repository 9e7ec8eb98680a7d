"""What all factories of this plugin share: the types of parameters, full precision, and a few tensor helpers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pytorch_metric_learning.losses import GenericPairLoss
from pytorch_metric_learning.miners import BaseMiner
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval import Part
from retrieval.model.precision import as_given
from torch import Tensor, nn

Distance = Annotated[nn.Module | None, Part("distances")]
Reducer = Annotated[nn.Module | None, Part("reducers")]
Regularizer = Annotated[nn.Module | None, Part("regularizers")]
AnyLoss = Annotated[nn.Module, Part("losses")]
AnyMiner = Annotated[nn.Module | None, Part("miners")]

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]
PerAnchor = Annotated[int, Field(ge=1)] | Literal["all"]

Init = (
    Literal["normal", "kaiming_normal", "kaiming_uniform", "xavier_normal", "xavier_uniform", "orthogonal"]
    | None
)
"""How proxies or class weights begin; None leaves the choice to the loss."""

# pytorch-metric-learning has no types: what these classes are mixed into has attributes that nn.Module lacks
_Mixin: Any = nn.Module


def _full(x: Tensor | None) -> Tensor | None:
    return x.float() if x is not None and x.dtype in (torch.float16, torch.bfloat16) else x


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(device_type=x.device.type, enabled=False)


class PreciseLoss(_Mixin):
    """Computes a loss in float32 when it is given half-precision embeddings, also under autocast.

    Upstream casts the *parameters* of a loss (proxies, class weights) to the embeddings' type, so one bfloat16
    batch would leave them rounded for good; and exponentials of 64 × a cosine have no place in 8 bits.
    """

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return the loss, a scalar of the embeddings' type, or float32 under autocast; see `retrieval.Loss`."""
        full = _full(embeddings)
        assert full is not None
        reference = full if ref_emb is embeddings else _full(ref_emb)
        with _no_autocast(embeddings):
            loss = self.measured(full, labels, indices_tuple, reference, ref_labels)
        return as_given(loss, embeddings) if isinstance(loss, Tensor) else loss

    def measured(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor | None,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return what upstream's `forward` does of embeddings in full precision."""
        return super().forward(embeddings, labels, indices_tuple, ref_emb, ref_labels)


class PreciseMiner(_Mixin):
    """Mines in float32 when it is given half-precision embeddings, also under autocast."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return index tensors; see `retrieval.Miner`."""
        full = _full(embeddings)
        reference = full if ref_emb is embeddings else _full(ref_emb)
        with _no_autocast(embeddings):
            return super().forward(full, labels, reference, ref_labels)


def segment_logsumexp(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Return log Σ exp of the values of each segment; the lowest finite number where a segment is empty.

    Args:
        values: (N,).
        segment: (N,) the segment that each value belongs to.
        segments: how many segments there are.

    Returns:
        (segments,).
    """
    lowest = torch.finfo(values.dtype).min
    top = values.new_full((segments,), lowest).scatter_reduce(0, segment, values.detach(), "amax")
    total = values.new_zeros(segments).index_add(0, segment, torch.exp(values - top[segment]))
    empty = total == 0
    return torch.where(empty, lowest, top + torch.log(total.masked_fill(empty, 1)))


def require_similarity(distance: nn.Module | None, name: str) -> None:
    """Refuse a distance where only a similarity makes sense.

    Raises:
        ValueError: it is a distance: smaller is closer.
    """
    if distance is not None and not getattr(distance, "is_inverted", False):
        raise ValueError(
            f"{name} needs a similarity (pml.cosine_similarity or pml.dot_product_similarity), "
            f"and {type(distance).__name__} is a distance"
        )


def no_reference(name: str, ref_emb: Tensor | None) -> None:
    """Refuse a reference set.

    Raises:
        ValueError: a reference set is given.
    """
    if ref_emb is not None:
        raise ValueError(f"{name} compares the batch with itself and takes no ref_emb")


def no_indices(name: str, indices_tuple: Any) -> None:
    """Refuse a miner's indices.

    Raises:
        ValueError: indices are given.
    """
    if indices_tuple is not None:
        raise ValueError(f"{name} chooses its own pairs and takes no indices: remove the miner")


def on_labels(labels: Tensor | None, embeddings: Tensor, name: str) -> Tensor:
    """Return the labels on the embeddings' device.

    Raises:
        ValueError: labels is None.
    """
    if labels is None:
        raise ValueError(f"{name} needs labels")
    return labels.to(embeddings.device)


def cosines_within(cosines: Tensor) -> Tensor:
    """Return cosines kept a hair inside ±1, where the angle's derivative is still finite."""
    edge = 1 - 4 * torch.finfo(cosines.dtype).eps
    return cosines.clamp(-edge, edge)


def element(losses: Tensor, name: str = "loss") -> dict[str, dict[str, Any]]:
    """Return one loss per item (N,) as upstream's reducers read it."""
    return {
        name: {
            "losses": losses,
            "indices": common_functions.torch_arange_from_size(losses),
            "reduction_type": "element",
        }
    }


def reduced(loss: Tensor) -> dict[str, dict[str, Any]]:
    """Return a scalar loss as upstream's reducers read it."""
    return {"loss": {"losses": loss, "indices": None, "reduction_type": "already_reduced"}}


class EveryPair(_Mixin):
    """Lets a batch with a single pair count: upstream returns 0 when no list of pairs is longer than one."""

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: Any,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> Any:
        """Return the losses by name, as upstream's reducers read them."""
        common_functions.labels_or_indices_tuple_required(labels, indices_tuple)
        pairs = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        if all(len(indices) == 0 for indices in pairs):
            return self.zero_losses()
        return self.loss_method(self.distance(embeddings, ref_emb), pairs)


@cache
def _subclass(base: Any, mixins: tuple[Any, ...]) -> Any:
    # the name stays, because upstream's wrappers tell losses by their class name
    return type(base.__name__, (*mixins, base), {"__doc__": base.__doc__, "__module__": __name__})


def precise(upstream: Any) -> Any:
    """Return upstream's loss or miner class, computing in float32 and counting every pair.

    See `PreciseLoss`, `PreciseMiner` and `EveryPair`.
    """
    if issubclass(upstream, BaseMiner):
        return _subclass(upstream, (PreciseMiner,))
    if issubclass(upstream, GenericPairLoss):
        return _subclass(upstream, (PreciseLoss, EveryPair))
    return _subclass(upstream, (PreciseLoss,))
