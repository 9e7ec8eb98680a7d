"""Which pairs of a batch are positive and which negative, as masks of some rows or as lists."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from pytorch_metric_learning.utils import loss_and_miner_utils
from retrieval.model.rows import first_row
from torch import Tensor

_FEW = 32
"""A list of pairs is quicker than a mask where one pair of so many is in it."""


class Pairs:
    """Which pairs (N, M) are positive and which negative: by labels, or as a miner says; an item
    and itself are neither.

    Args:
        labels: (N,).
        ref_labels: (M,); `labels` itself where the batch is compared with itself.
    """

    def __init__(self, labels: Tensor, ref_labels: Tensor) -> None:
        self.labels, self.ref_labels = labels, ref_labels
        # the place of each row's item among the others; the rows may be a part of the reference set
        self.own = 0 if ref_labels is labels else first_row()
        self.listed: tuple[Tensor, Tensor] | None = None
        # the rows that were asked for last, and their pairs of one label
        self._last: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None

    @classmethod
    def mined(cls, indices: Any, shape: tuple[int, int], labels: Any, ref_labels: Any) -> Pairs:
        """Return the pairs of a miner's indices.

        Raises:
            AssertionError: a pair is both, as upstream says.
        """
        a1, p, a2, n = loss_and_miner_utils.convert_to_pairs(indices, labels, ref_labels)
        positive = torch.zeros(shape, dtype=torch.bool, device=a1.device)
        negative = torch.zeros_like(positive)
        positive[a1, p] = True
        negative[a2, n] = True
        assert not negative[a1, p].any(), "Each pair should be either be positive or negative"
        found = cls(positive[:, 0], positive[0])
        found.listed = positive, negative
        return found

    def of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return some rows' masks, both bool."""
        if self.listed is not None:
            return self.listed[0][rows], self.listed[1][rows]
        same = self.labels[rows].unsqueeze(1) == self.ref_labels.unsqueeze(0)
        other = ~same
        if self.own is not None:
            same.diagonal(self.own + (rows.start or 0)).fill_(False)
        return same, other

    def positives(self, rows: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return the positive pairs (P,), row by row: of all rows, or of some, which are counted
        from the first of these.
        """
        if self.listed is not None:
            row, column = torch.where(self.listed[0][slice(None) if rows is None else rows])
            return row, column
        row, column = self._alike(rows)
        if self.own is None:
            return row, column
        others = column - row != self.own + (rows.start or 0 if rows else 0)
        return row[others], column[others]

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return how many positives and how many negatives each row has, each (N,)."""
        if self.listed is not None:
            return self.listed[0].sum(1), self.listed[1].sum(1)
        counts = self._runs[2]
        positives = counts
        if self.own is not None:
            positives = (
                counts - (self.labels == self.ref_labels[self.own : self.own + len(counts)]).long()
            )
        return positives, len(self.ref_labels) - counts

    def leave_negatives(self, values: Tensor, rows: slice, value: float) -> None:
        """Overwrite those of some rows' values (R, M) that belong to no negative pair."""
        if self.listed is not None or self._ends[-1] * _FEW > len(self.labels) * len(
            self.ref_labels
        ):
            values.masked_fill_(~self.of(rows)[1], value)
        else:
            values[self._alike(rows)] = value

    def _alike(self, rows: slice | None = None) -> tuple[Tensor, Tensor]:
        """Return the pairs (P,) of one label, an item and itself among them, row by row."""
        start, stop, _ = (rows or slice(None)).indices(len(self.labels))
        if self._last is not None and self._last[0] == (start, stop):
            return self._last[1]
        order, first, counts = self._runs
        first, counts = first[start:stop], counts[start:stop]
        total = self._ends[stop] - self._ends[start]
        row = torch.repeat_interleave(counts, output_size=total)
        begins = (first - counts.cumsum(0)).add_(counts).index_select(0, row)
        found = row, order.index_select(0, begins.add_(torch.arange(total, device=row.device)))
        self._last = (start, stop), found
        return found

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The reference items in the order of their labels (M,); where each row's label begins
        there (N,), and how often it comes (N,).
        """
        known, order = self.ref_labels.sort(stable=True)
        first = torch.searchsorted(known, self.labels)
        return order, first, torch.searchsorted(known, self.labels, right=True) - first

    @cached_property
    def _ends(self) -> list[int]:
        """How many pairs of one label the rows before each row have, and all together."""
        return [0, *self._runs[2].cumsum(0).tolist()]
