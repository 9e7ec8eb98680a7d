"""The adversarial negative in closed form, under the head's current metric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
from pydantic import Field
from retrieval.plugin import Generator, Normalize, full_precision
from torch import Tensor, nn

# Where the two halves of a point on the sphere cancel to less than this part of their length, no
# direction is left.
CANCELLED = 1e-3


class Confusion(Generator):
    """The negative near the real one that misleads the current metric most, in closed form.

    Chen et al., "Adversarial Metric Learning" (IJCAI 2018), Eq 9 for a dissimilar pair, anchor a
    and negative n. Its two points move together to the pair π, π′ with the difference β/(2 + β) ·
    (n − a), under any metric M = WᵀW + εI: M cancels. Moved so that π lies on the anchor, which
    changes no distance, the adversarial negative is

        z = (2a + βn) / (2 + β),    the minimiser of D(a, z)² + β/2 · D(n, z)².

    It depends on the head as soon as that scales codes to unit length (the default). The metric is
    then no longer the same everywhere, and the minimiser on the sphere is the code (2u + βv)/‖·‖, u
    and v the codes of a and n. With the lengths |a|, |n| of their codes before scaling, a feature
    with that code is

        z = (2|n| a + β|a| n) / (2|n| + β|a|),

    exactly for a linear head, to first order for others (hidden layers). It has no parameters. The
    loss at z's code reaches the head, and through z the features of a and n, with their shares in
    it as constants. Set `[train] real_weight` to train on the real negatives too: 1 is the paper's
    α = 1 (Eq 4), for real_weight = 1/α.

    Args:
        beta: β > 0, the weight of staying near the real negative: towards 0 it ends on the anchor,
            towards infinity it stays.
    """

    def __init__(self, beta: Annotated[float, Field(gt=0)] = 1.0) -> None:
        super().__init__()
        if not 0 < beta < float("inf"):
            raise ValueError(f"beta is {beta:g} and must be a number above 0")
        self.beta = beta
        self._head: tuple[nn.Module, ...] = ()

    def bind(self, head: nn.Module) -> None:
        """Take note of the head whose metric is to be misled."""
        self._head = (head,)

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return the adversarial negatives (T, F); `positive` is not used."""
        if anchor.ndim != 2 or anchor.shape != negative.shape:
            raise ValueError(
                "anchors and negatives must have one shape, a row of features for each triplet,"
                f" and have the shapes {tuple(anchor.shape)} and {tuple(negative.shape)}"
            )
        if not self._head:
            raise ValueError(
                "aml.confusion misleads the metric of a head, and no head is known: call bind(head)"
                " first"
            )
        # the dissimilar pair's Eq 9, by the share that the anchor has in it
        share = anchor.new_full((len(anchor), 1), 2 / (2 + self.beta))
        body = _before_scaling(self._head[0])
        if body is not None and len(anchor):
            with torch.no_grad(), _undisturbed(body):
                u, v = (full_precision(body(x)) for x in (anchor, negative))
                share = self._on_sphere(u, v).to(anchor.dtype)
        return negative + share * (anchor - negative)

    def _on_sphere(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the anchor's share (T, 1), from codes (T, C) before they are scaled."""
        tiny = torch.finfo(u.dtype).tiny
        lu, lv = (x.norm(dim=1, keepdim=True).clamp_min(tiny**0.5) for x in (u, v))
        both = 2 * u / lu + self.beta * v / lv
        share = 2 / (2 + self.beta * lu / lv)
        # opposite codes of equal weight: every point of the sphere is as good, and the real
        # negative is one
        return torch.where(both.norm(dim=1, keepdim=True) < CANCELLED * (2 + self.beta), 0.0, share)


def _before_scaling(head: nn.Module) -> nn.Sequential | None:
    """Return a head without its last layer, which scales to unit length; None without one."""
    if isinstance(head, Normalize):
        return nn.Sequential()
    if isinstance(head, nn.Sequential) and len(head) and isinstance(head[-1], Normalize):
        return head[:-1]
    return None


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Keep a module in evaluation mode inside: no batch statistic moves, nothing is drawn."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
