"""One process of a group: batch norm of its share of a batch, against one process's whole batch.

All processes have all rows, so each computes what one process would.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from retrieval.training.distributed import WholeBatch
from torch import Tensor, nn

accelerator = Accelerator(cpu=True)
WORLD, RANK = accelerator.num_processes, accelerator.process_index


class Act(nn.BatchNorm2d):
    """A layer like timm's: batch norm by torch's function, and an activation."""

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var, self.weight, self.bias
        y = nn.functional.batch_norm(x, *statistics, self.training, 0.1, self.eps)
        return nn.functional.silu(y)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    layers = (
        nn.BatchNorm2d(2),
        nn.Conv2d(2, 5, 3),
        Act(5),
        nn.BatchNorm2d(5, affine=False),
        nn.Flatten(),
        nn.Linear(80, 6),
        nn.BatchNorm1d(6, momentum=None),
        nn.Linear(6, 3),
        nn.BatchNorm1d(3, track_running_stats=False),
    )
    return nn.Sequential(*layers).double()


def rows() -> Tensor:
    """A batch whose rows grow, so that shares differ, far from zero, where squares would cancel."""
    x = torch.randn(16, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return 1e4 + x * torch.arange(1, 17)[:, None, None, None]


share = slice(RANK * 16 // WORLD, (RANK + 1) * 16 // WORLD)
target = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
whole, own = net(), net()
unsynchronised = 0.0
for _ in range(2):  # the second pass updates running statistics that are no longer 0 and 1
    x, x_own = rows().requires_grad_(), rows()[share].clone().requires_grad_()
    expected = whole(x)
    with WholeBatch():
        actual = own(x_own)
    torch.testing.assert_close(actual, expected[share], rtol=1e-8, atol=1e-9)
    difference = net()(rows()[share]) - expected[share]
    unsynchronised = max(unsynchronised, float(difference.detach().abs().max()))
    (expected * target).sum().backward()
    (actual * target[share]).sum().backward()
    torch.testing.assert_close(x_own.grad, x.grad[share], rtol=1e-6, atol=1e-10)
for (name, parameter), other in zip(whole.named_parameters(), own.parameters(), strict=True):
    total = accelerator.reduce(other.grad, reduction="sum")
    torch.testing.assert_close(total, parameter.grad, rtol=1e-6, atol=1e-9, msg=name)
for (name, buffer), other in zip(whole.named_buffers(), own.buffers(), strict=True):
    torch.testing.assert_close(other, buffer, rtol=1e-9, atol=1e-9, msg=name)
assert unsynchronised > 0.1
whole.eval(), own.eval()
with WholeBatch():
    actual, expected = own[:-1](rows()[share]), whole[:-1](rows()[share])
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)
with WholeBatch(), torch.autocast("cpu", torch.bfloat16):
    half = own.float().train()(rows()[share].float())
assert half.isfinite().all()
