"""The adversarial negative under the head's current metric, in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pydantic import PositiveFloat
from retrieval.helpers import full_precision
from retrieval.plugin import Generator, Normalise
from torch import Tensor, nn

# If the sum of the two terms of a point on the sphere is shorter than this share of their lengths,
# the direction of the point is undefined.
CANCELLED = 1e-3


class Confusion(Generator):
    """Replaces a negative with the nearby point that misleads the metric most, in closed form.

    Chen et al., "Adversarial Metric Learning" (IJCAI 2018), Eq 9 for a dissimilar pair, anchor a
    and negative n. The adversarial pair π, π′ has the difference π′ − π = β/(2 + β) · (n − a) under
    every metric M = WᵀW + εI, because M cancels. Shifting the pair so that π is the anchor does not
    change the distance. It gives the adversarial negative

        z = (2a + βn) / (2 + β),

    which minimises D(a, z)² + β/2 · D(n, z)².

    A head that scales embeddings to unit length (the default) has no single metric M. The minimiser
    on the sphere is then the embedding (2u + βv)/‖·‖, where u and v are the unit embeddings of a
    and n. If |a| and |n| are the lengths of their embeddings before scaling, a feature with that
    embedding is

        z = (2|n| a + β|a| n) / (2|n| + β|a|).

    This is exact for a linear head, and holds to first order for a head with hidden layers.

    The generator has no parameters. Gradients of the loss pass through z to the features of a and
    n, with the weights of a and n in z as constants. Set `[train] real_weight` to train on the real
    negatives too; real_weight = 1/α corresponds to the paper's α (Eq 4).

    Args:
        beta: β > 0, weight of staying near the real negative. z approaches the anchor as β → 0, and
            the real negative as β → ∞.
    """

    def __init__(self, beta: PositiveFloat = 1.0) -> None:
        super().__init__()
        if not 0 < beta < float("inf"):
            raise ValueError(f"beta is {beta:g} and must be a number above 0")
        self.beta = beta
        self._head: tuple[nn.Module, ...] = ()

    def bind(self, head: nn.Module) -> None:
        """Store the head whose metric the negatives mislead."""
        self._head = (head,)

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return the adversarial negatives (T, F); `positive` is not used."""
        if anchor.ndim != 2 or anchor.shape != negative.shape:
            raise ValueError(
                "anchors and negatives must have the same shape (triplets, features), not"
                f" {tuple(anchor.shape)} and {tuple(negative.shape)}"
            )
        if not self._head:
            raise ValueError(
                "aml.confusion needs the head whose metric it misleads: call bind(head) first"
            )
        # Eq 9 for the dissimilar pair, as the share of the anchor in z
        share = anchor.new_full((len(anchor), 1), 2 / (2 + self.beta))
        body = _before_scaling(self._head[0])
        if body is not None and len(anchor):
            with torch.no_grad(), _undisturbed(body):
                u, v = (full_precision(body(x)) for x in (anchor, negative))
                share = self._on_sphere(u, v).to(anchor.dtype)
        return negative + share * (anchor - negative)

    def _on_sphere(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the anchor's share (T, 1) in z, from embeddings (T, C) before scaling."""
        tiny = torch.finfo(u.dtype).tiny
        lu, lv = (x.norm(dim=1, keepdim=True).clamp_min(tiny**0.5) for x in (u, v))
        point = 2 * u / lu + self.beta * v / lv
        share = 2 / (2 + self.beta * lu / lv)
        # For opposite embeddings of equal weight, all points of the sphere are minimisers: keep the
        # real negative.
        return torch.where(
            point.norm(dim=1, keepdim=True) < CANCELLED * (2 + self.beta), 0.0, share
        )


def _before_scaling(head: nn.Module) -> nn.Sequential | None:
    """Return the head without its last layer if that layer scales to unit length, else None."""
    if isinstance(head, Normalise):
        return nn.Sequential()
    if isinstance(head, nn.Sequential) and len(head) and isinstance(head[-1], Normalise):
        return head[:-1]
    return None


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Context manager that puts a module into evaluation mode, where it updates no statistics."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
