"""One process of a group: the divided loss against the loss of one process.

All processes have all rows, so each computes what one process would.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from retrieval import create
from retrieval.training.devices import Devices, divided_loss
from torch import nn

accelerator = Accelerator(cpu=True)
WORLD, RANK = accelerator.num_processes, accelerator.process_index
ORDER = torch.randperm(40, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8).repeat_interleave(5)[ORDER]

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
    actual = codes.clone().requires_grad_()
    rows = slice(RANK * share, (RANK + 1) * share)
    value = divided_loss(loss, "anchors", actual[rows], LABELS[rows], indices, Devices(accelerator))
    value.backward()
    torch.testing.assert_close(value.detach(), whole.detach(), rtol=1e-9, atol=1e-12)
    # the mean over the processes counts each process's part once
    total = accelerator.reduce(actual.grad, reduction="mean")
    torch.testing.assert_close(total, expected.grad, rtol=1e-7, atol=1e-11, msg=name)
