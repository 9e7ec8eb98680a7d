"""Features of a frozen backbone, computed once and kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    import torch

    from retrieval.contracts import Dataset
    from retrieval.images import Preprocessing


def frozen_features(
    backbone_features: Callable[[Tensor], Tensor],
    dataset: Dataset,
    preprocessing: Preprocessing | None,
    *,
    fingerprint: str,
    device: torch.device | str,
    batch: int,
    folder: Path | None = None,
    progress: bool = True,
) -> NDArray[np.float32]:
    """Return features (N, F) of every item, memory-mapped, from the cache on disk or computed now.

    Args:
        backbone_features: raw inputs (B, C, H, W) uint8 or (B, F) float32, on `device` → features (B, F).
        dataset: the items.
        preprocessing: the backbone's; None for vectors.
        fingerprint: identifies the backbone and its weights.
        device: where `backbone_features` computes.
        batch: items at a time.
        folder: the cache; by default `RETRIEVAL_CACHE`, or else the user's cache folder.
        progress: whether to show a progress bar on stderr.
    """
    raise NotImplementedError
