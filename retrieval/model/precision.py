"""Conversion between half and full precision."""

from __future__ import annotations

import torch
from torch import Tensor


def full_precision(x: Tensor) -> Tensor:
    """Return half-precision tensors as float32, and others unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def as_given(loss: Tensor, embeddings: Tensor) -> Tensor:
    """Return a loss in the embeddings' type, or unchanged under autocast, like torch's own losses.

    A gradient scaler multiplies the loss by 65,536, which overflows float16.
    """
    return loss if torch.is_autocast_enabled(embeddings.device.type) else loss.to(embeddings.dtype)
