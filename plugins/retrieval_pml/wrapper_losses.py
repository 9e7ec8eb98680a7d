"""Losses that wrap other losses: a sum of several, a queue of past batches, and two views.

Two views of an object are items that share a label, paired in the batch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils import common_functions, loss_and_miner_utils
from retrieval.helpers import as_given, full_precision, pair_views
from retrieval.plugin import Part, traits
from torch import Tensor, nn

from retrieval_pml.upstream_factories import offer

AnyLoss = Annotated[nn.Module, Part("losses")]
AnyMiner = Annotated[nn.Module | None, Part("miners")]


def check_reference(name: str, loss: nn.Module) -> None:
    """Raise an error if a loss does not accept a reference set."""
    if not getattr(type(loss), "__retrieval_traits__", {}).get("ref_emb", True):
        raise ValueError(
            f"{name} needs a loss that accepts a reference set, but {type(loss).__name__} does not."
            " Use pml.multi_similarity, pml.contrastive or pml.triplet_margin"
        )


class MultipleLosses(losses.MultipleLosses):
    """A weighted sum of losses, each of which may have its own miner.

    Args:
        losses: the losses.
        miners: one miner per loss, in the same order, or fewer with `miner_for`.
        weights: one weight per loss; 1 by default.
        miner_for: for each miner, the position, from 0, of its loss. It is needed if some losses
            have no miner.
    """

    def __init__(
        self,
        losses: Annotated[list[nn.Module], Part("losses")],
        miners: Annotated[list[nn.Module] | None, Part("miners")] = None,
        weights: list[float] | None = None,
        miner_for: list[int] | None = None,
    ) -> None:
        super().__init__(list(losses))
        if weights is not None and len(weights) != len(losses):
            raise ValueError(f"there are {len(losses)} losses, but {len(weights)} weights")
        if miner_for is not None and miners is None:
            raise ValueError("miner_for names the losses of the miners, but there are no miners")
        if miner_for is not None:
            positions = list(miner_for)
        else:
            positions = list(range(len(losses)))
        if miners is not None and (
            len(miners) != len(positions)
            or len(set(positions)) < len(positions)
            or not all(0 <= i < len(losses) for i in positions)
        ):
            raise ValueError(
                f"the {len(miners)} miners need different losses: give a miner for each of the"
                f" {len(losses)} losses, or set miner_for to the positions, from 0, of the losses"
            )
        self.weights = [1.0] * len(losses) if weights is None else list(weights)
        self.miners = nn.ModuleList(miners or [])
        self.miner_of = {loss: miner for miner, loss in enumerate(positions)} if miners else {}

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return the weighted sum of the losses; see `retrieval.plugin.Loss`.

        Raises:
            ValueError: indices are passed although a loss has a miner, or a loss does not accept a
                reference set.
        """
        if indices_tuple is not None and self.miner_of:
            raise ValueError(
                "losses have miners: remove either their miners or the miner of the recipe"
            )
        reference: dict[str, Any] = (
            {} if ref_emb is None else {"ref_emb": ref_emb, "ref_labels": ref_labels}
        )
        total = embeddings.sum() * 0
        for i, loss in enumerate(self.losses):
            if reference:
                check_reference("a reference set", loss)
            indices = indices_tuple
            if i in self.miner_of:
                indices = self.miners[self.miner_of[i]](embeddings, labels, **reference)
            total = total + self.weights[i] * loss(embeddings, labels, indices, **reference)
        return total


@traits(ref_emb=False)
class CrossBatchMemory(losses.CrossBatchMemory):
    """Computes another loss between the batch and a queue of embeddings of past batches.

    Wang, Zhang, Huang & Scott, Cross-Batch Memory for Embedding Learning, CVPR 2020. Unlike in
    pytorch-metric-learning, the queue and its position are saved with the run, a batch of one item
    is not compared with itself, indices from an outer miner are translated to the batch's places in
    the queue, and every loss that accepts a reference set is allowed.

    Args:
        loss: the loss, which must accept a reference set.
        memory_size: number of embeddings in the queue, at least the batch size.
        miner: chooses pairs or triplets between the batch and the queue. By default all are used.
    """

    # The position, and whether the queue is filled: as a buffer, both are saved with the run.
    queue_state: Tensor

    def __init__(
        self,
        loss: AnyLoss,
        embedding_size: int,
        memory_size: PositiveInt = 1024,
        miner: AnyMiner = None,
    ) -> None:
        check_reference("pml.cross_batch_memory", loss)
        super().__init__(
            loss=loss, embedding_size=embedding_size, memory_size=memory_size, miner=miner
        )

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        """Accept every name; `__init__` checks the loss itself."""

    @property
    def queue_idx(self) -> int:
        """Position in the queue at which the next batch starts."""
        return int(self.queue_state[0])

    @queue_idx.setter
    def queue_idx(self, value: int) -> None:
        self.queue_state[0] = value

    @property
    def has_been_filled(self) -> bool:
        """Whether every place of the queue has an item."""
        return bool(self.queue_state[1])

    @has_been_filled.setter
    def has_been_filled(self, value: bool) -> None:
        self.queue_state[1] = int(value)

    def reset_queue(self) -> None:
        """Empty the queue."""
        # Upstream's `__init__` calls this method, before which no buffer can exist.
        if "queue_state" not in self._buffers:
            self.register_buffer("queue_state", torch.zeros(2, dtype=torch.long))
        super().reset_queue()

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Put the batch into the queue, and return the loss of the batch against the queue.

        Args:
            embeddings: (B, C) embeddings.
            labels: (B,) labels.
            indices_tuple: indices within the batch, used in addition to those of the queue.
            ref_emb: must be None, because the queue is the reference set.
            ref_labels: must be None.

        Raises:
            ValueError: the batch is larger than the queue, a reference set is passed, or labels are
                missing.
        """
        if labels is None or ref_emb is not None:
            raise ValueError(
                "CrossBatchMemory needs labels and accepts no ref_emb: its queue is the reference"
                " set"
            )
        labels = labels.to(embeddings.device)
        if len(embeddings) > self.memory_size:
            raise ValueError(
                f"memory_size ({self.memory_size}) must be at least the batch size"
                f" ({len(embeddings)})"
            )
        with torch.autocast(device_type=embeddings.device.type, enabled=False):
            loss = super().forward(full_precision(embeddings), labels, indices_tuple)
        return as_given(loss, embeddings)

    def add_to_memory(self, embeddings: Tensor, labels: Tensor, batch_size: int) -> None:
        """Put items into the queue in place of the oldest ones."""
        if batch_size:
            super().add_to_memory(embeddings, labels, batch_size)
        else:
            self.curr_batch_idx = torch.zeros(0, dtype=torch.long, device=labels.device)

    def create_indices_tuple(
        self,
        embeddings: Tensor,
        labels: Tensor,
        E_mem: Tensor,
        L_mem: Tensor,
        input_indices_tuple: Any,
        do_remove_self_comparisons: bool,
    ) -> Any:
        """Return indices of pairs or triplets: anchors in the batch, other items in the queue."""
        # The batch is already in the queue, so an item meets itself there.
        places = self.curr_batch_idx
        if self.miner:
            indices = self.miner(embeddings, labels, E_mem, L_mem)
        else:
            indices = loss_and_miner_utils.get_all_pairs_indices(labels, L_mem)
        if do_remove_self_comparisons:
            kept = places[indices[0]] != indices[1]
            if len(indices) == 3:
                indices = tuple(x[kept] for x in indices)
            else:
                indices = (indices[0][kept], indices[1][kept], *indices[2:])
        if input_indices_tuple is not None:
            convert = loss_and_miner_utils
            if len(indices) == 3:
                to_kind = convert.convert_to_triplets
            else:
                to_kind = convert.convert_to_pairs
            extra = to_kind(input_indices_tuple, labels)
            if len(extra) == 3:
                extra = (extra[0], places[extra[1]], places[extra[2]])
            else:
                extra = (extra[0], places[extra[1]], extra[2], places[extra[3]])
            indices = common_functions.concatenate_indices_tuples(indices, extra)
        return indices


class VICRegLoss(losses.VICRegLoss):
    """VICReg: makes two views similar, spreads each dimension and decorrelates dimensions.

    Bardes, Ponce & LeCun, VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised
    Learning, ICLR 2022. Items that share a label are views of one object, paired in the batch's
    order. With fewer than two pairs the loss is 0.

    Args:
        invariance_lambda: λ, weight of the distance between views.
        variance_mu: μ, weight of the hinge on the standard deviation of each dimension.
        covariance_v: ν, weight of the squared covariances.
        eps: number added to the variance before its root is taken.
        reducer: reduces the losses of each term to one number; the mean by default.
    """

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Any, ref_labels: Any
    ) -> Any:
        """Return the losses by name; the labels define the two views."""
        first, second = pair_views(labels)
        # A single pair has no variance.
        if len(first) < 2:
            return self.zero_losses()
        return super().compute_loss(embeddings[first], None, None, embeddings[second], None)


@traits(ref_emb=False, miner=False)
class SelfSupervisedLoss(losses.SelfSupervisedLoss):
    """Applies another loss to pairs of views: items that share a label, in the batch's order.

    Chen, Kornblith, Norouzi & Hinton, SimCLR, ICML 2020, if `loss` is `pml.nt_xent`. Use it if the
    labels name the image from which a view was made. With class labels, items of one class count as
    views.

    Args:
        loss: the loss, which must accept a reference set.
        symmetric: whether both views are anchors, compared with all other views. Otherwise the
            first views are compared with the second views.
    """

    def __init__(self, loss: AnyLoss, symmetric: bool = True) -> None:
        check_reference("pml.self_supervised", loss)
        super().__init__(loss=loss, symmetric=symmetric)

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        """Accept every name; `__init__` checks the loss itself."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """Return the loss, a scalar, of the two views that the labels define.

        Raises:
            ValueError: a miner's indices or a reference set are passed, or labels are missing.
        """
        if indices_tuple is not None:
            raise ValueError("SelfSupervisedLoss accepts no miner's indices: remove the miner")
        if labels is None or ref_emb is not None:
            raise ValueError("SelfSupervisedLoss finds views by labels, and accepts no ref_emb")
        first, second = pair_views(labels.to(embeddings.device))
        if len(first) == 0:
            return embeddings.sum() * 0
        if self.symmetric:
            both = torch.cat([first, second])
            return self.loss(embeddings[both], labels[both])
        return self.loss(embeddings[first], labels[first], None, embeddings[second], labels[second])


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "multiple": MultipleLosses,
    "cross_batch_memory": CrossBatchMemory,
    "self_supervised": SelfSupervisedLoss,
    "vic_reg": offer(
        VICRegLoss,
        ref_emb=False,
        miner=False,
        without=("distance", "embedding_regularizer", "embedding_reg_weight"),
        invariance_lambda=NonNegativeFloat,
        variance_mu=NonNegativeFloat,
        covariance_v=NonNegativeFloat,
        eps=PositiveFloat,
    ),
}
