"""The torch half of a linear learner: subtract the mean, multiply."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class Shift(nn.Module):
    """Subtract a vector.

    Kept apart from the linear map: folded into its bias, large means would cost precision.

    Args:
        offset: (F,) what is subtracted.
    """

    def __init__(self, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("offset", offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (B, F) less the offset."""
        return x - self.get_buffer("offset")


def linear_head(
    components: NDArray[np.floating[Any]], mean: NDArray[np.floating[Any]]
) -> nn.Sequential:
    """Return the float32 module x ↦ components · (x − mean), features (B, F) to codes (B, C).

    Args:
        components: (C, F).
        mean: (F,).
    """
    width, features = components.shape
    linear = nn.Linear(features, width, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(np.array(components, dtype=np.float32)))
    return nn.Sequential(Shift(torch.from_numpy(np.array(mean, dtype=np.float32))), linear)
