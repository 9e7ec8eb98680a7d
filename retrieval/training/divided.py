"""The loss of a batch that several processes compute together, each the part of its own rows or
classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retrieval.model.contracts import TripletIndices
from retrieval.model.rows import Rows, is_mean, row_sums
from retrieval.training.devices import Devices

PLAIN = 2**20
"""Numbers of a process's rows with the batch, up to which nothing is computed twice: a loss keeps
up to some ten such matrices, 40 MB.

In blocks, each computed twice, the same takes more than one and a half times the processor time.
"""


def divided_loss(
    loss: Any,
    kind: Rows,
    codes: Tensor,
    labels: Tensor,
    indices: TripletIndices | None,
    devices: Devices,
) -> Tensor:
    """Return the loss of the whole batch; its gradient is this process's part, as `Devices` counts
    it.

    Of anchors, a process compares its rows with the batch all at once where that takes `PLAIN`
    numbers or fewer. Above, it compares them in blocks and computes each once more when its
    gradient is due: so the matrices in memory have `PLAIN` numbers at most, or as many as one
    process's with its share alone, however many processes there are.

    Args:
        loss: the loss.
        kind: how it can be divided.
        codes: this process's rows (R, C).
        labels: theirs (R,).
        indices: what the miner picked in the whole batch, if there is one.
        devices: the processes.
    """
    if kind == "classes":
        whole = devices.gather(codes), devices.gather(labels)
        value: Tensor = loss(*whole)
        return devices.part(value.detach(), value)
    if kind == "items":
        sums, counts = row_sums(loss, kind, codes, labels, (codes, labels), 0, None)
    else:
        sums, counts = _by_blocks(loss, codes, labels, indices, devices)
    counts = devices.total(counts)
    names = loss.sub_loss_names()
    means = torch.tensor([is_mean(loss, name) for name in names], device=codes.device)
    over = torch.where(means, counts.clamp(min=1), 1).to(sums.dtype)
    part = (sums / over).sum()
    return devices.part(devices.total(part.detach()), part)


def _by_blocks(
    loss: Any, codes: Tensor, labels: Tensor, indices: TripletIndices | None, devices: Devices
) -> tuple[Tensor, Tensor]:
    """Return the sums and counts of this process's anchors."""
    whole = devices.gather(codes), devices.gather(labels)
    first, rows = devices.rank * len(codes), len(codes)
    size = min(rows, max(-(-rows // devices.world), PLAIN // _numbers_of_row(whole[0], indices)))

    def block(codes: Tensor, every: Tensor, labels: Tensor, at: int) -> tuple[Tensor, Tensor]:
        return row_sums(loss, "anchors", codes, labels, (every, whole[1]), at, indices)

    if size == rows:
        return block(codes, whole[0], labels, first)
    found = [
        checkpoint(
            block,
            codes[at : at + size],
            whole[0],
            labels[at : at + size],
            first + at,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing here is drawn
        )
        for at in range(0, rows, size)
    ]
    sums, counts = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
    return sums, counts


def _numbers_of_row(every: Tensor, indices: TripletIndices | None) -> int:
    """Return how many numbers one row is compared by: the batch's items, or the triplets that a
    miner picked for it on average.
    """
    picked = 0 if indices is None else len(indices[0]) // len(every)
    return max(len(every), picked)
