"""Generators that make hard negatives from two embeddings of a class, without trained weights."""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from retrieval.plugin import Generator
from torch import Tensor
from torch.nn import functional


class HardestOfClass(Generator):
    """Base class of generators that replace a negative with the candidate nearest to the anchor.

    Subclasses define the candidate points.
    """

    space = "embeddings"
    classmates = True

    def forward(
        self, anchor: Tensor, positive: Tensor, negative: Tensor, classmate: Tensor | None = None
    ) -> Tensor:
        """Return synthetic negatives (T, C).

        Args:
            anchor: (T, C), the anchors of the triplets.
            positive: (T, C), unused.
            negative: (T, C).
            classmate: (T, C), another item of each negative's class. If it is missing, the
                negatives are returned unchanged.
        """
        candidates = self.points(negative, negative if classmate is None else classmate)
        stacked = torch.stack(candidates)
        squared_distances = (stacked - anchor).square().sum(2)
        triplet = torch.arange(len(anchor), device=anchor.device)
        return stacked[squared_distances.argmin(0), triplet]

    def points(self, negative: Tensor, classmate: Tensor) -> list[Tensor]:
        """Return tensors (T, C) of candidate points; each has a candidate per negative."""
        raise NotImplementedError


class SymmetricalSynthesis(HardestOfClass):
    """Reflects a negative and another item of its class about each other.

    Gu & Ko, "Symmetrical Synthesis for Deep Metric Learning" (AAAI 2020), implemented like the
    authors' code. Let x be the negative and y the other item. The reflection of x about the axis
    through 0 and y is

        x' = α (x·u) u − x,  u = y / ‖y‖,  α = 2

    The reflection x' has the same length as x, and the same similarity to y as x. Of x, y, x' and
    y', the point nearest to the anchor becomes the negative. The paper also reflects the anchor and
    its positive. Here they are left unchanged.
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
    2020), implemented like the authors' code. Let x be the negative and y the other item. The n
    points between them are

        x̄_k = (k x + (n + 1 − k) y) / (n + 1),  k = 1 … n

    scaled to the length of x. Of these points, x and y, the one nearest to the anchor becomes the
    negative. The paper also divides the line between the anchor and its positive. Here they are
    left unchanged.

    Args:
        inner: n, number of points between x and y.
    """

    def __init__(self, inner: PositiveInt = 2) -> None:
        super().__init__()
        self.inner = inner

    def points(self, negative: Tensor, classmate: Tensor) -> list[Tensor]:
        """Return both items and the points between them."""
        length = negative.norm(dim=1, keepdim=True)
        weights = [k / (self.inner + 1) for k in range(1, self.inner + 1)]
        between = [
            functional.normalize(weight * negative + (1 - weight) * classmate) * length
            for weight in weights
        ]
        return [negative, classmate, *between]


def _reflected(x: Tensor, axis: Tensor) -> Tensor:
    """Return the rows of `x`, reflected about the axes through 0 and the rows of `axis`."""
    unit = functional.normalize(axis)
    return 2 * (x * unit).sum(1, keepdim=True) * unit - x
