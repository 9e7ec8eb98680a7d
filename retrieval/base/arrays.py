"""Types of NumPy arrays, by the type of their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Pixels = NDArray[np.uint8]
Floats32 = NDArray[np.float32]
Floats64 = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]
"""Numbers of either precision."""


def as_rows(features: Any) -> Floats32:
    """Return one vector (F,) or several (N, F), from an array, list or tensor, as rows (N, F)."""
    if hasattr(features, "detach"):
        rows = features.detach().cpu().numpy()
    else:
        rows = features
    return np.atleast_2d(np.asarray(rows, dtype=np.float32))


def unit_rows(vectors: Array) -> Floats32:
    """Return vectors (N, D) of length 1, whose Euclidean distance orders as the cosine does."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows: Floats32 = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return rows
