"""Divide a loss over processes by rows of the batch, and parameters by their own rows.

pytorch-metric-learning's losses compute one number per anchor, item, pair or triplet; a reducer
then takes the mean or the sum of these numbers. If each process contributes the sum and the count
of its rows' numbers, the loss of the whole batch follows exactly.

A module with divided parameters has an attribute `shards`, which maps the name of each to the rows
that this process holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Self, cast, get_args

import torch
from pytorch_metric_learning import reducers
from pytorch_metric_learning.losses.base_metric_loss_function import BaseMetricLossFunction
from torch import Tensor, distributed, nn

from retrieval.errors import PluginError
from retrieval.model.contracts import TripletIndices

Rows = Literal["items", "anchors", "classes"]
"""How a loss can be divided over processes; the loss's attribute `rows` says so.

- "items": each number depends on one item and the loss's parameters. The loss is called with some
  rows and their labels.
- "anchors": each number depends on one anchor and its pairs or triplets. The loss is called with
  some rows as anchors, the whole batch as `ref_emb`, and the indices of these rows' pairs. Pairs of
  an item with itself are left out. If the loss has `rows_by_labels = True`, it is called without
  indices and must leave out the pair of row i with item `first_row() + i` itself. If the loss has
  `rows_mined = False`, it is divided only if there is no miner.
- "classes": the loss divides its parameters over the processes. Each process calls it with the
  whole batch and gets the whole loss; the gradient is the part that passes through this process's
  parameters.
"""

_KINDS = get_args(Rows)
_REDUCERS = (
    reducers.MeanReducer,
    reducers.SumReducer,
    reducers.AvgNonZeroReducer,
    reducers.ThresholdReducer,
)

_first_row: ContextVar[int | None] = ContextVar("first_row", default=None)


def first_row() -> int | None:
    """Return the batch position of a divided loss's first row; None if the loss is not divided."""
    return _first_row.get()


def rows_of_loss(loss: nn.Module, mined: bool) -> Rows | None:
    """Return how a loss can be divided, or None if every process must compute all of it.

    Args:
        loss: the loss.
        mined: whether there is a miner.

    Raises:
        PluginError: the loss's attribute `rows` is invalid.
    """
    kind = getattr(loss, "rows", None)
    if kind is None:
        return None
    if kind not in _KINDS:
        raise PluginError(
            f"{type(loss).__name__}.rows is {kind!r}; it must be one of {', '.join(_KINDS)}, or"
            " None."
        )
    if kind == "classes":
        return "classes"
    if mined and (kind == "items" or not getattr(loss, "rows_mined", True)):
        return None
    # A regulariser's penalty is no sum of the rows' numbers.
    for name in ("embedding_regularizer", "weight_regularizer"):
        if getattr(loss, name, None) is not None:
            return None
    if not isinstance(loss, BaseMetricLossFunction):
        return None
    for reducer in _reducers(loss.reducer):
        # A subclass may reduce in a way that sums and counts do not give.
        if type(reducer) not in _REDUCERS or reducer.collect_stats:
            return None
    return cast(Rows, kind)


def compares_with_classes(loss: nn.Module) -> bool:
    """Return whether a loss compares items with classes, as MixUp and CutMix require."""
    return getattr(loss, "rows", None) in ("items", "classes")


class Sums(nn.Module):
    """Takes a reducer's place and records the sum and count of each sub-loss's numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}

    def forward(
        self,
        losses: Mapping[str, Mapping[str, Any]],
        embeddings: Tensor,
        labels: Any,
    ) -> Tensor:
        """Return 0 and store sums and counts in `sums`."""
        for name, sub_loss in losses.items():
            reducer = _reducer(self.inner, name)
            self.sums[name] = _summed(name, sub_loss, reducer, embeddings)
        return embeddings.sum() * 0


def summed(total: Tensor, count: Tensor) -> dict[str, Any]:
    """Return a sub-loss in `Sums`' format for a loss that adds up its numbers itself."""
    return {"losses": total, "indices": None, "reduction_type": "summed", "count": count}


def is_mean(loss: Any, name: str) -> bool:
    """Return whether a loss's reducer takes the mean of a sub-loss, not the sum."""
    return not isinstance(_reducer(loss.reducer, name), reducers.SumReducer)


def row_sums(
    loss: Any,
    kind: Rows,
    rows: Tensor,
    labels: Tensor,
    whole: tuple[Tensor, Tensor],
    start: int,
    indices: TripletIndices | None,
) -> tuple[Tensor, Tensor]:
    """Return sums (K,) and counts (K,) of some rows' numbers for the loss's K sub-losses.

    `whole` is the batch: codes (B, C) and labels (B,). `rows` (R, C), with `labels` (R,), are its
    rows from position `start` on. `kind`, from `rows_of_loss`, is "items" or "anchors".
    `indices` are the miner's indices into the batch, or `None`.
    """
    arguments: tuple[Any, ...] = ()
    if kind == "anchors":
        pairs = None
        if indices is not None:
            pairs = _of_rows(indices, start, len(rows))
        elif not getattr(loss, "rows_by_labels", False):
            pairs = _pairs(labels, whole[1], start)
        arguments = (pairs, *whole)
    with _collecting(loss, start) as sums_by_name:
        loss(rows, labels, *arguments)
    none = _no_numbers(rows)
    sums = [sums_by_name.get(name, none) for name in loss.sub_loss_names()]
    totals = torch.stack([total for total, _ in sums])
    counts = torch.stack([count for _, count in sums])
    return totals, counts


def _no_numbers(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sum and a count of 0; the sum depends on the embeddings, as other sums do."""
    count = torch.zeros((), dtype=torch.int64, device=embeddings.device)
    return embeddings.sum() * 0, count


@contextmanager
def _collecting(loss: Any, start: int) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Context manager that replaces a loss's reducer with `Sums` and yields the sums."""
    reducer = loss.reducer
    token = _first_row.set(start)
    loss.reducer = sums = Sums(reducer)
    try:
        yield sums.sums
    finally:
        loss.reducer = reducer
        _first_row.reset(token)


def _reducers(reducer: nn.Module) -> list[Any]:
    if isinstance(reducer, reducers.MultipleReducers):
        return [*reducer.reducers.values(), reducer.default_reducer]
    return [reducer]


def _reducer(reducer: Any, name: str) -> Any:
    if isinstance(reducer, reducers.MultipleReducers):
        return dict(reducer.reducers).get(name, reducer.default_reducer)
    return reducer


def _summed(
    name: str,
    sub_loss: Mapping[str, Any],
    reducer: Any,
    embeddings: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the sum and count of the numbers of a sub-loss that its reducer would combine."""
    losses = sub_loss["losses"]
    none = _no_numbers(embeddings)
    # pytorch-metric-learning writes the number 0 for a sub-loss without pairs.
    if not isinstance(losses, Tensor):
        return none
    if sub_loss["reduction_type"] == "summed":
        return losses, sub_loss["count"]
    if sub_loss["reduction_type"] == "already_reduced":
        if float(losses.detach()):
            raise PluginError(
                f"The loss has an attribute `rows`, but returns its '{name}' as one number, which"
                " cannot be divided by rows. Remove the attribute."
            )
        return none
    losses = losses.flatten()
    counted = torch.ones_like(losses, dtype=torch.bool)
    # AvgNonZeroReducer is a ThresholdReducer with the limit 0.
    if isinstance(reducer, reducers.ThresholdReducer):
        if reducer.low is not None:
            counted &= losses > reducer.low
        if reducer.high is not None:
            counted &= losses < reducer.high
    # Adding the zero gives an empty selection a gradient too.
    return losses[counted].sum() + none[0], counted.sum()


def _of_rows(indices: TripletIndices, start: int, count: int) -> TripletIndices:
    """Return the pairs or triplets of the `count` anchors from `start`, now counted from 0."""
    groups: list[tuple[Tensor, ...]] = [indices]
    if len(indices) == 4:
        groups = [indices[:2], indices[2:]]
    selected: list[Tensor] = []
    for anchors, *partners in groups:
        mask = (anchors >= start) & (anchors < start + count)
        selected.append(anchors[mask] - start)
        selected += [partner[mask] for partner in partners]
    return cast(TripletIndices, tuple(selected))


def _pairs(labels: Tensor, batch_labels: Tensor, start: int) -> TripletIndices:
    """Return all pairs of some rows with the batch, except those of an item with itself."""
    same = labels.unsqueeze(1) == batch_labels.unsqueeze(0)
    a2, n = torch.where(~same)
    row = torch.arange(len(labels), device=labels.device)
    same[row, start + row] = False
    a1, p = torch.where(same)
    return a1, p, a2, n


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `stop` of a parameter with `whole` rows over all processes."""

    start: int
    stop: int
    whole: int

    @classmethod
    def of(cls, whole: int, rank: int, world: int) -> Self:
        """Return the share of process `rank` of `world`."""
        return cls(whole * rank // world, whole * (rank + 1) // world, whole)


def world_of() -> tuple[int, int]:
    """Return this process's rank and the number of processes."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """Return the shards of a module and its submodules, by the parameter's `state_dict` name."""
    by_name: dict[str, Shard] = {}
    for path, submodule in module.named_modules():
        shards = getattr(submodule, "shards", None)
        # Another project's module may have an attribute of that name.
        if isinstance(shards, dict):
            by_name |= {f"{path}.{name}".lstrip("."): shard for name, shard in shards.items()}
    return by_name
