"""One process of several: a loss by rows, all at once and in blocks, against one process's of the
whole batch.

Run by `test_devices.py`; every process has all the rows, so each can say itself what one process
would have given.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from retrieval import create
from retrieval.model.rows import row_sums
from retrieval.training import devices
from retrieval.training.devices import Devices
from torch import Tensor, nn

accelerator = Accelerator(cpu=True)
WORLD, RANK = accelerator.num_processes, accelerator.process_index
ORDER = torch.randperm(40, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8).repeat_interleave(5)[ORDER]


def rows_at_a_time(loss: Any, codes: Tensor, indices: Any, plain: int) -> tuple[Tensor, list[int]]:
    """Give `codes` a gradient, of `plain` numbers at once; return the loss, and how many rows each
    call had.
    """
    own, calls = slice(RANK * 40 // WORLD, (RANK + 1) * 40 // WORLD), []

    def counted(*given: Any) -> Any:
        calls.append(len(given[2]))
        return row_sums(*given)

    with patch.object(devices, "PLAIN", plain), patch.object(devices, "row_sums", counted):
        own_codes, group = codes[own], Devices(accelerator)
        value = devices.divided_loss(loss, "anchors", own_codes, LABELS[own], indices, group)
        value.backward()
    return value.detach(), calls


def main() -> None:
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
        of_row = max(40, len(indices[0]) // 40 if indices else 0)
        few = -(-share // WORLD)
        for plain, first in ((share * of_row, share), (3 * of_row, max(3, few)), (0, few)):
            mine = codes.clone().requires_grad_()
            value, calls = rows_at_a_time(loss, mine, indices, plain)
            whole_share = share * (1 if first == share else 2)
            assert (calls[0], sum(calls)) == (first, whole_share), (calls, plain)
            torch.testing.assert_close(value, whole.detach(), rtol=1e-9, atol=1e-12)
            # each process's counts once in the mean
            total = accelerator.reduce(mine.grad, reduction="mean")
            says = f"{name}, {plain}"
            torch.testing.assert_close(total, expected.grad, rtol=1e-7, atol=1e-11, msg=says)


if __name__ == "__main__":
    main()
