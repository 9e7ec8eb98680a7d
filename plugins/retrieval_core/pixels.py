"""Pixels as features, for linear methods and for methods that learn from scratch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from retrieval.plugin import Backbone, Preprocessing
from torch import Tensor


class Pixels(Backbone):
    """An image's pixels, 0 to 1, row by row: no weights.

    For learners on small images, and as the floor that any network should be above. Its features
    are size × size × channels.

    Args:
        size: height and width, in pixels; images are stretched to it.
        channels: 1 for grey, 3 for RGB.
    """

    def __init__(self, size: Annotated[int, Field(ge=1)] = 28, channels: Literal[1, 3] = 1) -> None:
        super().__init__()
        self.preprocessing = Preprocessing(
            (size, size), channels, (0.0,) * channels, (1.0,) * channels
        )
        self.features = channels * size * size

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, channels × size × size) of images (B, channels, size, size)."""
        return x.flatten(1)
