"""Numbers in half precision and what is computed from them."""

from __future__ import annotations

import torch
from torch import Tensor


def full_precision(x: Tensor) -> Tensor:
    """Return half-precision numbers in float32; others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def as_given(loss: Tensor, embeddings: Tensor) -> Tensor:
    """Return a loss in the embeddings' type; under autocast unchanged, as torch's own are.

    A gradient scaler multiplies a loss by 65,536, which float16 cannot hold.
    """
    return loss if torch.is_autocast_enabled(embeddings.device.type) else loss.to(embeddings.dtype)
