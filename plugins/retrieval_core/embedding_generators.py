"""Generators without weights that make hard negatives from two embeddings of a class."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from retrieval.plugin import Generator
from torch import Tensor
from torch.nn import functional


class HardestOfClass(Generator):
    """Base class: replaces each negative by the point nearest to the anchor."""

    space = "embeddings"
    classmates = True

    def forward(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor,
        classmate: Tensor | None = None,
    ) -> Tensor:
        """Return synthetic negatives (T, C); without a classmate, the negatives themselves."""
        points = torch.stack(self.points(negative, negative if classmate is None else classmate))
        apart = (points - anchor).square().sum(2)
        return points[apart.argmin(0), torch.arange(len(anchor), device=anchor.device)]

    def points(self, negative: Tensor, classmate: Tensor) -> list[Tensor]:
        """Return the candidate points for the negatives, each (T, C)."""
        raise NotImplementedError


class SymmetricalSynthesis(HardestOfClass):
    """Reflects a negative and another item of its class about each other.

    Gu & Ko, "Symmetrical Synthesis for Deep Metric Learning" (AAAI 2020), as in the authors' code.
    The reflection of x about the axis through 0 and y is

        x' = α (x·u) u − x,  u = y / ‖y‖,  α = 2

    It has the length of x and the same similarity to y. The nearest to the anchor of x, y, x' and
    y' becomes the negative. The paper also reflects the anchor and its positive; here the anchor
    is a real item.
    """

    def points(self, negative: Tensor, classmate: Tensor) -> list[Tensor]:
        """Return both items and their reflections."""
        return [
            negative,
            classmate,
            _reflected(negative, classmate),
            _reflected(classmate, negative),
        ]


class EmbeddingExpansion(HardestOfClass):
    """Divides the line between a negative and another item of its class into equal parts.

    Ko & Gu, "Embedding Expansion: Augmentation in Embedding Space for Deep Metric Learning" (CVPR
    2020), as in the authors' code. The n points between x and y are

        x̄_k = (k x + (n + 1 − k) y) / (n + 1),  k = 1 … n

    scaled to the length of x. The nearest to the anchor of these, x and y becomes the negative. The
    paper also divides the line between the anchor and its positive; here the anchor is a real item.

    Args:
        inner: n, number of points between x and y.
    """

    def __init__(self, inner: Annotated[int, Field(ge=1)] = 2) -> None:
        super().__init__()
        self.inner = inner

    def points(self, negative: Tensor, classmate: Tensor) -> list[Tensor]:
        """Return both items and the points between them."""
        length = negative.norm(dim=1, keepdim=True)
        parts = [k / (self.inner + 1) for k in range(1, self.inner + 1)]
        between = [
            functional.normalize(part * negative + (1 - part) * classmate) * length
            for part in parts
        ]
        return [negative, classmate, *between]


def _reflected(x: Tensor, axis: Tensor) -> Tensor:
    """Return rows of `x` reflected about the axes through 0 and the rows of `axis`."""
    unit = functional.normalize(axis)
    return 2 * (x * unit).sum(1, keepdim=True) * unit - x
