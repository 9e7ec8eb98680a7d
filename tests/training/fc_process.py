"""One process of a group: partial FC with its share of the classes, against all classes in one."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from retrieval.model import loss_division
from retrieval.training.distributed import Devices
from torch import Tensor, nn

from retrieval_core import partial_fc
from retrieval_core.partial_fc import PartialFC

devices = Devices(Accelerator(cpu=True))
CLASSES, WIDTH, ROWS = 10_001, 6, 4  # weights are drawn in blocks that end within shares
generator = torch.Generator().manual_seed(1)
CODES = torch.randn(ROWS * devices.world, WIDTH, dtype=torch.float64, generator=generator)
generator = torch.Generator().manual_seed(2)
LABELS = torch.randint(0, CLASSES, (ROWS * devices.world,), generator=generator)


def alone(**options: float) -> tuple[Tensor, float, Tensor, Tensor]:
    """Two steps of one process: first weights, last loss, gradients of codes and of weights."""
    partial_fc.world_of = lambda: (0, 1)
    try:
        torch.manual_seed(4)
        loss = PartialFC(WIDTH, CLASSES, **options).double()
        weights = loss.weight.detach().clone()
        for _ in range(2):
            x = CODES.clone().requires_grad_()
            loss.zero_grad()
            value = loss(x, LABELS)
            value.backward()
    finally:
        partial_fc.world_of = loss_division.world_of
    assert x.grad is not None and loss.weight.grad is not None
    return weights, value.item(), x.grad, loss.weight.grad


values = set()
margins = {"cosine_margin": 0.35, "margin": 0.0}
share = slice(devices.rank * ROWS, (devices.rank + 1) * ROWS)
for options in ({}, margins, {"sample": 0.7, "seed": 3}, {"sample": 0.01}):
    weights, expected, of_codes, of_weight = alone(**options)
    torch.manual_seed(4)
    loss = PartialFC(WIDTH, CLASSES, **options).double()
    own = loss.shards["weight"]
    assert torch.equal(loss.weight, weights[own.start : own.stop])
    for _ in range(2):
        x = CODES[share].clone().requires_grad_()
        loss.zero_grad()
        value = loss(devices.gather(x), devices.gather(LABELS[share]))
        value.backward()
    assert x.grad is not None and loss.weight.grad is not None
    assert abs(value.item() - expected) < 1e-12 * max(1, abs(expected))
    torch.testing.assert_close(x.grad, of_codes[share], rtol=1e-9, atol=1e-13)
    part = of_weight[own.start : own.stop]
    torch.testing.assert_close(loss.weight.grad, part, rtol=1e-9, atol=1e-13)
    drawn = max(len(LABELS.unique()), round(options.get("sample", 1.0) * CLASSES))
    assert int(of_weight.any(1).sum()) == drawn
    values.add(round(expected, 6))
assert len(values) == 4
parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
for parameter in parameters:
    parameter.grad = torch.full_like(parameter, 2.0)
devices.clip(parameters, {id(parameters[1])}, 1.0)
norm = (3 * 4.0 + devices.world * 2 * 4.0) ** 0.5
torch.testing.assert_close(parameters[1].grad, torch.full((2,), 2 / norm), rtol=1e-5, atol=0)
