"""What every encoder of images needs: the items as pictures, and vectors of length 1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image
from retrieval.base.arrays import Array, Ints
from retrieval.errors import DataError
from retrieval.helpers import to_mode
from retrieval.plugin import Dataset


def pictures(dataset: Dataset, items: Ints) -> Iterator[Image.Image]:
    """Yield items of a dataset of images as RGB pictures."""
    for item in items.tolist():
        picture = dataset[item]
        if not isinstance(picture, Image.Image):
            raise DataError("The model embeds images, but the data hold vectors.")
        yield to_mode(picture, "RGB")


def unit(vectors: Array) -> Array:
    """Return vectors (N, D) of length 1, whose Euclidean distance orders as the cosine does."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Array = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled
