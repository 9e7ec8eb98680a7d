"""What all factories of this plugin share: the types of parameters, full precision, and a few
tensor helpers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pytorch_metric_learning.losses import GenericPairLoss
from pytorch_metric_learning.miners import BaseMiner
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.model.precision import as_given
from retrieval.model.rows import Rows, first_row
from retrieval.plugin import Part
from torch import Tensor, nn

from retrieval_pml.matrices import similarities

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
    Literal[
        "normal",
        "kaiming_normal",
        "kaiming_uniform",
        "xavier_normal",
        "xavier_uniform",
        "orthogonal",
    ]
    | None
)
"""How proxies or class weights begin; None leaves the choice to the loss."""

# pytorch-metric-learning has no types: what these classes are mixed into has attributes that
# nn.Module lacks
_Mixin: Any = nn.Module


def _full(x: Tensor | None) -> Tensor | None:
    return x.float() if x is not None and x.dtype in (torch.float16, torch.bfloat16) else x


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(device_type=x.device.type, enabled=False)


class PreciseLoss(_Mixin):
    """Computes a loss in float32 when it is given half-precision embeddings, also under autocast.

    Upstream casts the *parameters* of a loss (proxies, class weights) to the embeddings' type, so
    one bfloat16 batch would leave them rounded for good; and exponentials of 64 × a cosine have no
    place in 8 bits.

    Attributes:
        known_classes: how many classes a loss has weights of; None of a loss that has none.
    """

    known_classes: int | None = None

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return the loss, a scalar of the embeddings' type, or float32 under autocast; see
        `retrieval.plugin.Loss`.

        Raises:
            ValueError: the loss has weights of classes, and a label is not the number of one; on a
                GPU, where reading labels would wait for the device, the device's own assertion
                fails instead.
        """
        if labels is not None and self.known_classes is not None:
            _require_classes(labels, self.known_classes)
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


def _require_classes(labels: Tensor, classes: int) -> None:
    """Refuse labels that number no class: upstream takes -1, which often means "no label", for the
    last class.
    """
    try:
        torch._assert_async(
            ((labels >= 0) & (labels < classes)).all(), "a label is not the number of a class"
        )
    except RuntimeError:
        raise ValueError(
            f"labels go from {int(labels.min())} to {int(labels.max())}, and there are {classes}"
            " classes, from 0"
        ) from None


class PreciseMiner(_Mixin):
    """Mines in float32 when it is given half-precision embeddings, also under autocast."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return index tensors; see `retrieval.plugin.Miner`."""
        full = _full(embeddings)
        reference = full if ref_emb is embeddings else _full(ref_emb)
        with _no_autocast(embeddings):
            return super().forward(full, labels, reference, ref_labels)


def segment_logsumexp(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Return log Σ exp of the values of each segment; the lowest finite number where a segment is
    empty.

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
    """Lets a batch with a single pair count: upstream returns 0 when no list of pairs is longer
    than one.
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
        common_functions.labels_or_indices_tuple_required(labels, indices_tuple)
        pairs = loss_and_miner_utils.convert_to_pairs(indices_tuple, labels, ref_labels)
        # rows without a pair count in a mean over anchors, where other rows of the batch have some
        if all(len(indices) == 0 for indices in pairs) and first_row() is None:
            return self.zero_losses()
        return self.loss_method(similarities(self.distance, embeddings, ref_emb), pairs)


class OfBatch(_Mixin):
    """A loss of a batch with itself, by its labels; a reference set is refused.

    Attributes:
        weighted: whether a miner's indices weigh the items; else they are refused.
    """

    weighted = False

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
            ValueError: there is a reference set, are indices that weigh nothing, or are no labels.
        """
        common_functions.ref_not_supported(embeddings, labels, ref_emb, ref_labels)
        if not self.weighted:
            common_functions.indices_tuple_not_supported(indices_tuple)
        labels = on_labels(labels, embeddings, type(self).__name__)
        return self.of_batch(
            similarities(self.distance, embeddings, embeddings), labels, indices_tuple
        )

    def of_batch(self, mat: Tensor, labels: Tensor, indices_tuple: Any) -> Any:
        """Return the losses by name.

        Args:
            mat: (N, N) distances or similarities of the batch's items.
            labels: (N,).
            indices_tuple: a miner's, or None.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define of_batch(mat, labels, indices_tuple)"
        )

    def weigh(self, losses: Tensor, some: Tensor, labels: Tensor, indices_tuple: Any) -> Any:
        """Return items' losses (N,) by name, those where `some` (N,) is true, times their weights
        by a miner's indices.
        """
        kept = torch.where(some)[0]
        if len(kept) == 0:
            return self.zero_losses()
        weights = loss_and_miner_utils.convert_to_weights(indices_tuple, labels, dtype=losses.dtype)
        return {
            "loss": {
                "losses": (losses * weights)[kept],
                "indices": kept,
                "reduction_type": "element",
            }
        }


@cache
def _subclass(base: Any, mixins: tuple[Any, ...], rows: Rows | None, mined: bool) -> Any:
    # the name stays, because upstream's wrappers tell losses by their class name
    body = {"__doc__": base.__doc__, "__module__": __name__, "rows": rows, "rows_mined": mined}
    return type(base.__name__, (*mixins, base), body)


def precise(upstream: Any, rows: Rows | None = None, mined: bool = True) -> Any:
    """Return upstream's loss or miner class, computing in float32 and counting every pair.

    See `PreciseLoss`, `PreciseMiner` and `EveryPair`.

    Args:
        upstream: the class.
        rows: how the loss can be divided over processes; see `retrieval.model.rows`.
        mined: whether also where a miner picks its pairs.
    """
    if issubclass(upstream, BaseMiner):
        return _subclass(upstream, (PreciseMiner,), None, True)
    if issubclass(upstream, GenericPairLoss):
        return _subclass(upstream, (PreciseLoss, EveryPair), rows, mined)
    return _subclass(upstream, (PreciseLoss,), rows, mined)
