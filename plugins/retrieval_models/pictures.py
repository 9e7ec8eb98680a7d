"""The items of a dataset as pictures, which every encoder of images needs."""

from __future__ import annotations

from collections.abc import Iterator

from PIL import Image
from retrieval.base.arrays import Ints
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
