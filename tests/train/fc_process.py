"""One process of several: partial FC with its share of the classes, against one with all."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from retrieval.model import shards
from retrieval.training.devices import Devices
from torch import nn

from retrieval_core import partial_fc
from retrieval_core.partial_fc import PartialFC

devices = Devices(Accelerator(cpu=True))
CLASSES, WIDTH, ROWS = 37, 6, 4
partial_fc._ROWS = 5  # several blocks, and their ends within shares


def alone(**options: float) -> PartialFC:
    """The loss of one process."""
    partial_fc.world_of = lambda: (0, 1)
    try:
        return PartialFC(WIDTH, CLASSES, **options)
    finally:
        partial_fc.world_of = shards.world_of


def whole(**options: float) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Two steps of one process's: the last loss, and the gradients of codes and weights."""
    partial_fc.world_of, loss = (lambda: (0, 1)), alone(**options).double()
    try:
        for _ in range(2):
            x = codes().requires_grad_()
            loss.zero_grad()
            value = loss(x, labels())
            value.backward()
    finally:
        partial_fc.world_of = shards.world_of
    assert x.grad is not None and loss.weight.grad is not None
    return value.item(), x.grad, loss.weight.grad


def codes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS * devices.world, WIDTH, dtype=torch.float64, generator=generator)


def labels() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, CLASSES, (ROWS * devices.world,), generator=generator)


def main() -> None:
    seen = set()
    margins = {"cosine_margin": 0.35, "margin": 0.0}
    for options in ({}, margins, {"sample": 0.7, "seed": 3}, {"sample": 0.01}):
        torch.manual_seed(4)
        value, of_codes, of_weight = whole(**options)
        torch.manual_seed(4)
        loss = PartialFC(WIDTH, CLASSES, **options).double()
        own = loss.shards["weight"]
        torch.manual_seed(4)
        assert torch.equal(loss.weight, alone(**options).weight[own.start : own.stop].double())
        share = slice(devices.rank * ROWS, (devices.rank + 1) * ROWS)
        for _ in range(2):
            x = codes()[share].clone().requires_grad_()
            loss.zero_grad()
            found = loss(devices.gather(x), devices.gather(labels()[share]))
            found.backward()
        assert x.grad is not None and loss.weight.grad is not None
        assert abs(found.item() - value) < 1e-12 * max(1, abs(value))
        torch.testing.assert_close(x.grad, of_codes[share], rtol=1e-9, atol=1e-13)
        part = of_weight[own.start : own.stop]
        torch.testing.assert_close(loss.weight.grad, part, rtol=1e-9, atol=1e-13)
        taking_part = int(of_weight.any(1).sum())
        batch = len(labels().unique())
        drawn = max(batch, round(options.get("sample", 1.0) * CLASSES))
        assert taking_part == drawn
        seen.add(round(value, 6))
    assert len(seen) == 4
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    devices.clip(parameters, {id(parameters[1])}, 1.0)
    norm = (3 * 4.0 + devices.world * 2 * 4.0) ** 0.5
    torch.testing.assert_close(parameters[1].grad, torch.full((2,), 2 / norm), rtol=1e-5, atol=0)


main()
