"""Which pairs of a batch count: by label, or those that a miner listed.

Either is kept as a list of columns for each anchor. An anchor has few positives, so what is done
with them costs little, and no B × R mask is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from retrieval.model.loss import listed_pairs
from torch import Tensor


@dataclass
class Columns:
    """Some references of each anchor.

    Attributes:
        values: (P,) indices of references, anchor after anchor; anchors of one label share theirs.
        start: (B,) where an anchor's begin in it.
        count: (B,) how many they are.
    """

    values: Tensor
    start: Tensor
    count: Tensor

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return these anchors' columns (last − first, M), padded, and bool of that shape: False
        for padding.
        """
        start, count = self.start[first:last, None], self.count[first:last, None]
        step = torch.arange(int(count.max()) if count.numel() else 0, device=count.device)
        member = step < count
        return self.values[torch.where(member, start + step, 0)], member


class LabelPairs:
    """Every pair: the same label is positive, another label negative.

    Args:
        labels: (B,) of the anchors.
        ref_labels: (R,) of what they are compared with; None: the batch itself, where no item is
            its own positive.
    """

    def __init__(self, labels: Tensor, ref_labels: Tensor | None) -> None:
        self.own = ref_labels is None
        reference = labels if ref_labels is None else ref_labels
        self.shape = (len(labels), len(reference))
        ordered, columns = torch.sort(reference, stable=True)
        start = torch.searchsorted(ordered, labels.contiguous())
        stop = torch.searchsorted(ordered, labels.contiguous(), right=True)
        self.same = Columns(columns, start, stop - start)

    def positives(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return these anchors' positives, as `Columns.rows` does."""
        columns, member = self.same.rows(first, last)
        if self.own:
            member = member & (columns != torch.arange(first, last, device=columns.device)[:, None])
        return columns, member


class ListedPairs:
    """The pairs that a miner listed, each counted once however often it is listed.

    Args:
        indices: three or four index tensors, see `retrieval.plugin.Miner`.
        shape: B and R.
        device: where the embeddings are.

    Raises:
        ValueError: the indices are not three or four tensors, or one is out of range.
    """

    def __init__(self, indices: Any, shape: tuple[int, int], device: torch.device) -> None:
        self.shape = shape
        anchor, positive, other, negative = listed_pairs(indices, shape, device)
        self.positive = _columns(anchor, positive, shape)
        self.negative = _columns(other, negative, shape)

    def positives(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return these anchors' positives, as `Columns.rows` does."""
        return self.positive.rows(first, last)


Pairs = LabelPairs | ListedPairs


def _columns(anchors: Tensor, others: Tensor, shape: tuple[int, int]) -> Columns:
    keys = torch.unique(anchors * shape[1] + others)
    count = torch.bincount(keys // max(shape[1], 1), minlength=shape[0])
    return Columns(keys % max(shape[1], 1), count.cumsum(0) - count, count)
