"""Hard negatives without a network: disturbed copies of a real negative, the nearest of several
drawings.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from retrieval.model.precision import full_precision
from retrieval.plugin import Generator
from torch import Tensor, nn


class DisturbedNegative(Generator):
    """Disturbs a negative several times, and keeps the copy that the metric puts nearest to the
    anchor.

    Not of the paper. For a triplet (a, p, n), with d drawn anew for each of `tries` copies,

        x̃ = ‖n‖ · unit(n + step · d)

    where d is, with `by = "noise"`, Gaussian noise of about the length of n; with `by =
    "classmates"`, a' − p' of another triplet of the batch: an item and its positive differ by what
    does not matter, and so does n from itself with that added. The copy is kept whose code is
    nearest to the anchor's: Euclidean, by the head as it is now; with a combiner, of its codes.

    The metric is fooled as by a trained generator, but by a search among copies of n that know
    nothing of the anchor, so that their label stays as right as the disturbance is blind to
    classes. There are no parameters; a gradient passes through x̃ to n, with d as a constant. It is
    meant for the hardest real negatives (`daml.semi_hard` with `pick = "hardest"`), and helps most
    where training classes are few; where they are many, with the real negatives beside it (`[train]
    real_weight = 1`).

    Args:
        by: "noise" or "classmates".
        step: how much is added, in lengths of n or of the difference; 0 leaves the real negative.
        tries: how many copies are drawn of each negative, each a pass of the head; 1 looks at no
            distance.
    """

    def __init__(
        self,
        by: Literal["noise", "classmates"] = "noise",
        step: Annotated[float, Field(ge=0)] = 1.0,
        tries: Annotated[int, Field(ge=1)] = 16,
    ) -> None:
        super().__init__()
        if by not in ("noise", "classmates"):
            raise ValueError(f'by is {by!r} and must be "noise" or "classmates"')
        if not 0 <= step < float("inf"):
            raise ValueError(f"step is {step:g} and must be a finite number of at least 0")
        if tries < 1:
            raise ValueError(f"tries is {tries} and must be at least 1")
        self.by = by
        self.step = step
        self.tries = tries
        self._head: tuple[nn.Module, ...] = ()

    def bind(self, head: nn.Module) -> None:
        """Take note of the head by which the nearest copy is found."""
        self._head = (head,)

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return synthetic negatives (T, F).

        Raises:
            ValueError: no head was bound, and there is more than one try.
        """
        made = self._copy(anchor, positive, negative)
        if self.tries == 1 or len(anchor) == 0:
            return made
        code = self._codes(anchor)
        nearest = (self._codes(made) - code).square().sum(1)
        for _ in range(self.tries - 1):
            other = self._copy(anchor, positive, negative)
            apart = (self._codes(other) - code).square().sum(1)
            made = torch.where((apart < nearest)[:, None], other, made)
            nearest = torch.minimum(apart, nearest)
        return made

    def _copy(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        length = negative.norm(dim=1, keepdim=True)
        if self.by == "noise":
            added = torch.randn_like(negative) * length.detach() / negative.shape[1] ** 0.5
        else:
            other = torch.randperm(len(anchor), device=anchor.device)
            added = (anchor[other] - positive[other]).detach()
        made: Tensor = nn.functional.normalize(negative + self.step * added) * length
        return made

    @torch.no_grad()
    def _codes(self, features: Tensor) -> Tensor:
        if not self._head:
            raise ValueError(
                "daml.disturbed_negative compares its copies by a head, and no head is known: call"
                " bind(head) first, or set tries = 1"
            )
        head = self._head[0]
        modes = [(each, each.training) for each in head.modules()]
        head.eval()  # no batch statistics are moved, no random number is drawn
        try:
            codes: Tensor = full_precision(head(features))
        finally:
            for each, mode in modes:
                each.training = mode
        return codes
