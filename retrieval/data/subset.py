"""Some items of a dataset as a dataset of their own: the others are out of reach of whoever is
given it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.model.contracts import Dataset

if TYPE_CHECKING:
    from PIL.Image import Image


class Subset(Dataset):
    """Some items of a dataset, without its split and roles.

    Args:
        dataset: all items.
        items: (N,) which ones, by number.
    """

    def __init__(self, dataset: Dataset, items: NDArray[np.int64]) -> None:
        self._dataset, self._items = dataset, items
        self.kind = dataset.kind
        self.labels = [dataset.labels[i] for i in items]
        self.keys = [dataset.keys[i] for i in items]
        self.metadata = None if dataset.metadata is None else [dataset.metadata[i] for i in items]
        self.arrays = None if dataset.arrays is None else dataset.arrays[items]
        self.files = None if dataset.files is None else [dataset.files[i] for i in items]

    def __getitem__(self, index: int) -> Image | NDArray[Any]:
        return self._dataset[int(self._items[index])]
