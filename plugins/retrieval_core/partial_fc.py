"""Softmax over very many classes, with the class weights divided among processes."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from retrieval.helpers import as_given, full_precision
from retrieval.model.loss_division import Shard, world_of
from retrieval.plugin import traits
from torch import Tensor, distributed, nn
from torch.nn import functional as F

_ROWS = 4096
"""Number of classes whose initial weights are drawn at a time."""


@traits(ref_emb=False, miner=False)
class PartialFC(nn.Module):
    """Softmax over cosines with a margin, with the class weights divided among processes.

    An et al., Killing Two Birds with One Stone: Efficient and Robust Training of Face Recognition
    CNNs by Partial FC, CVPR 2022. For each item, the processes exchange the largest logit, the sum
    of exponentials and the target's logit. The loss and gradients therefore equal those of one
    process with all classes. A step can use only a share `sample` of all classes: the classes of
    the batch and random others. The paper draws the others in each process. Here they are drawn
    from all classes at once, so that they do not depend on the number of processes.

    The margin is ArcFace's (in the angle), CosFace's (in the cosine), or both: s (cos(θ + m) − c).

    Attributes:
        weight: (classes of this process, C) the class centres.
        drawn: number of steps that have drawn classes; part of the checkpoint.
    """

    rows = "classes"
    drawn: Tensor

    def __init__(
        self,
        embedding_size: int,
        classes: int,
        margin: Annotated[float, Field(ge=0, lt=90)] = 28.6,
        cosine_margin: Annotated[float, Field(ge=0, lt=2)] = 0.0,
        scale: PositiveFloat = 64.0,
        sample: Annotated[float, Field(gt=0, le=1)] = 1.0,
        seed: NonNegativeInt = 0,
    ) -> None:
        """Build the loss.

        Args:
            margin: m, added to the target class's angle, in degrees.
            cosine_margin: c, subtracted from the target class's cosine.
            scale: s, factor of the cosines.
            sample: share of the classes that take part in a step; the batch's classes always do.
            seed: seed of the drawn classes.
        """
        super().__init__()
        rank, world = world_of()
        if classes < world:
            raise ValueError(f"{classes} classes cannot be divided among {world} processes")
        self.shards = {"weight": Shard.of(classes, rank, world)}
        self.classes = classes
        self.margin = math.radians(margin)
        self.cosine_margin = cosine_margin
        self.scale = scale
        self.sample = sample
        self.seed = seed
        self.weight = nn.Parameter(_initial(self._shard, embedding_size))
        self.register_buffer("drawn", torch.zeros((), dtype=torch.int64))

    @property
    def _shard(self) -> Shard:
        return self.shards["weight"]

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a scalar: the mean cross-entropy of the batch.

        Args:
            embeddings: (B, C) the whole batch, the same on every process.
            labels: (B,) class numbers, the same on every process.
            indices_tuple: must be None.
            ref_emb: must be None.
            ref_labels: must be None.

        Returns:
            The loss, the same on every process. Its gradient contains only the part of this
            process's classes. The gradient of the embeddings is the sum over all processes.

        Raises:
            ValueError: a label is not a class number, or a miner's indices or a reference set are
                passed.
        """
        if indices_tuple is not None or ref_emb is not None or ref_labels is not None:
            raise ValueError(
                "partial_fc compares items with classes: it accepts neither a miner's indices nor a"
                " reference set"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            raise ValueError(
                f"labels must be from 0 to {self.classes - 1}, not from {int(labels.min())} to"
                f" {int(labels.max())}"
            )
        codes = F.normalize(full_precision(embeddings), dim=1)
        with torch.autocast(device_type=embeddings.device.type, enabled=False):
            weight, column = self._part(labels)
            cosines = codes @ F.normalize(weight.to(codes.dtype), dim=1).T
            (row,) = torch.where(column >= 0)
            targets = self._with_margin(cosines[row, column[row]])
            loss = _CrossEntropy.apply(cosines, targets, row, column[row], self.scale)
        return as_given(loss, embeddings)

    def _with_margin(self, cosines: Tensor) -> Tensor:
        """Return the targets' logits (T,) with the margin; beyond 180° − m they are linear."""
        if self.margin:
            # At ±1 the derivative of the angle is infinite.
            edge = 1 - 4 * torch.finfo(cosines.dtype).eps
            angles = torch.acos(cosines.clamp(-edge, edge))
            moved = torch.cos(angles + self.margin)
            beyond = torch.cos(angles) - self.margin * math.sin(self.margin)
            cosines = torch.where(angles <= math.pi - self.margin, moved, beyond)
        return self.scale * (cosines - self.cosine_margin)

    def _part(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (K, C) of this step, and the row (B,) of each item's class in them.

        The row is −1 if the class belongs to another process.
        """
        shard = self._shard
        place = labels - shard.start
        local = (place >= 0) & (place < shard.stop - shard.start)
        if self.sample == 1 or not self.training:
            return self.weight, torch.where(local, place, -1)
        # Seed and step alone decide what is drawn, so that all processes, and a resumed run, agree.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + int(self.drawn)) % 2**63)
        self.drawn += 1
        order = torch.rand(self.classes, generator=generator)
        batch = torch.unique(labels).cpu()
        # The batch's classes come first: 2 is above all random numbers.
        order[batch] = 2.0
        chosen = (
            order.topk(max(len(batch), round(self.sample * self.classes))).indices.sort().values
        )
        chosen = chosen[(chosen >= shard.start) & (chosen < shard.stop)]
        chosen = chosen.to(labels.device) - shard.start
        # `chosen` ascends, as the search requires. Items of other processes are masked below.
        column = torch.searchsorted(chosen, place.clamp(min=0))
        return self.weight[chosen], torch.where(local, column, -1)


class _CrossEntropy(torch.autograd.Function):
    """Mean of −log softmax at the target, with the columns of logits divided among processes."""

    @staticmethod
    def forward(
        ctx: Any, cosines: Tensor, target: Tensor, row: Tensor, column: Tensor, scale: float
    ) -> Tensor:
        """Return the mean over all items, the same on every process.

        Args:
            ctx: stores the probabilities, the only (B, K) matrix that is allocated.
            cosines: (B, K) cosines of this process's classes.
            target: (T,) logits of the targets among these classes.
            row: (T,) rows of the targets in `cosines`.
            column: (T,) columns of the targets in `cosines`.
            scale: factor of the cosines.
        """
        logits = cosines * scale
        logits[row, column] = target
        top = logits.new_full(logits.shape[:1], -math.inf)
        if logits.shape[1]:
            top = logits.amax(1)
        _reduce(top, distributed.ReduceOp.MAX)
        # In place: with very many classes, a second matrix of logits would not fit into memory.
        logits.sub_(top.unsqueeze(1)).exp_()
        total = logits.sum(1)
        of_targets = torch.zeros_like(total).index_put((row,), target)
        _reduce(total, distributed.ReduceOp.SUM)
        _reduce(of_targets, distributed.ReduceOp.SUM)
        logits.div_(total.unsqueeze(1))
        ctx.save_for_backward(logits, row, column)
        ctx.scale = scale
        return (total.log() + top - of_targets).mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of this process's cosines and targets."""
        probability, row, column = ctx.saved_tensors
        scale = gradient / max(1, len(probability))
        of_target = (probability[row, column] - 1) * scale
        of_cosines = probability * (scale * ctx.scale)
        # The targets' gradient passes through their own logits, which have the margin.
        of_cosines[row, column] = 0
        return of_cosines, of_target, None, None, None


def _reduce(x: Tensor, operation: Any) -> None:
    """Reduce a tensor in place over all processes."""
    if world_of()[1] > 1:
        distributed.all_reduce(x, operation)


def _initial(shard: Shard, width: int) -> Tensor:
    """Return a process's initial weights: its part of one normal sequence over all classes."""
    weight = torch.empty(shard.stop - shard.start, width)
    for start in range(0, shard.whole, _ROWS):
        # Every process draws all classes, so the weights do not depend on the number of processes.
        # 0.01 is the deviation in the authors' code.
        drawn = torch.randn(min(_ROWS, shard.whole - start), width) * 0.01
        low = max(start, shard.start)
        high = min(start + len(drawn), shard.stop)
        if low < high:
            weight[low - shard.start : high - shard.start] = drawn[low - start : high - start]
    return weight
