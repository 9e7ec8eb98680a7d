"""Vectors in memory, read as the files of a folder of embeddings are."""

import numpy as np


class ArrayRows:
    """Vectors (N, P) of an array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.width = array, array.shape[1]

    def __len__(self) -> int:
        return len(self.array)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return some rows."""
        return self.array[start:stop]
