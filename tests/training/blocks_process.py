"""One process of a group: the divided loss, whole and in blocks, against the loss of one process.

All processes have all rows, so each computes what one process would.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from retrieval import create
from retrieval.model.loss_division import row_sums
from retrieval.training import distributed
from retrieval.training.distributed import Devices
from torch import Tensor, nn

accelerator = Accelerator(cpu=True)
WORLD, RANK = accelerator.num_processes, accelerator.process_index
ORDER = torch.randperm(40, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8).repeat_interleave(5)[ORDER]


def in_blocks(loss: Any, codes: Tensor, indices: Any, entries: int) -> tuple[Tensor, list[int]]:
    """Give `codes` a gradient in blocks of at most `entries`; return the loss and block sizes."""
    share, sizes = slice(RANK * 40 // WORLD, (RANK + 1) * 40 // WORLD), []

    def counted(*arguments: Any) -> Any:
        sizes.append(len(arguments[2]))
        return row_sums(*arguments)

    with (
        patch.object(distributed, "PLAIN", entries),
        patch.object(distributed, "row_sums", counted),
    ):
        group = Devices(accelerator)
        value = distributed.divided_loss(
            loss, "anchors", codes[share], LABELS[share], indices, group
        )
        value.backward()
    return value.detach(), sizes


generator = torch.Generator().manual_seed(2)
codes = nn.functional.normalize(torch.randn(40, 6, generator=generator, dtype=torch.float64))
share = 40 // WORLD
for name, miner in (
    ("pml.contrastive", None),
    ("pml.multi_similarity", None),
    ("pml.triplet_margin", "pml.triplet_margin"),
):
    loss, indices = create("losses", name).double(), None
    if miner is not None:
        indices = create("miners", miner, margin=0.5)(codes, LABELS)
    expected = codes.clone().requires_grad_()
    whole = loss(expected, LABELS, indices)
    whole.backward()
    row = max(40, len(indices[0]) // 40 if indices else 0)
    least = -(-share // WORLD)
    for entries, first in ((share * row, share), (3 * row, max(3, least)), (0, least)):
        actual = codes.clone().requires_grad_()
        value, sizes = in_blocks(loss, actual, indices, entries)
        rows = share * (1 if first == share else 2)  # blocks are computed twice
        assert (sizes[0], sum(sizes)) == (first, rows), (sizes, entries)
        torch.testing.assert_close(value, whole.detach(), rtol=1e-9, atol=1e-12)
        # the mean over the processes counts each process's part once
        total = accelerator.reduce(actual.grad, reduction="mean")
        message = f"{name}, {entries}"
        torch.testing.assert_close(total, expected.grad, rtol=1e-7, atol=1e-11, msg=message)
