"""Datasets in an array or in files; most dataset factories return one of these classes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from retrieval.base.arrays import Array, Ints
from retrieval.errors import DataError
from retrieval.images.conversions import from_array
from retrieval.images.decoding import decode, full_size
from retrieval.model.contracts import Dataset

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge of a box, in pixels from the image's upper left corner."""


class ArrayDataset(Dataset):
    """A dataset with all images or all vectors in one array.

    Args:
        arrays: images, uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3), or vectors, float (N, F).
        labels: one label per item; `splits`, `roles` and `metadata` are as in `Dataset`.
        keys: one name per item; the default is the item's number.
        kind: "image" or "features".
    """

    def __init__(
        self,
        arrays: Array,
        labels: Sequence[str],
        keys: Sequence[str] | None = None,
        *,
        kind: Literal["image", "features"] = "image",
        splits: Sequence[str] | None = None,
        roles: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if kind == "features":
            arrays = arrays.astype(np.float32, copy=False)
        elif arrays.ndim == 4 and arrays.shape[3] == 1:
            arrays = arrays[:, :, :, 0]
        self.kind = kind
        self.arrays: Array = arrays
        self.labels = labels
        self.keys = [str(i) for i in range(len(arrays))] if keys is None else keys
        self.splits = splits
        self.roles = roles
        self.metadata = metadata

    def __getitem__(self, index: int) -> Image | Array:
        item: Array = self.arrays[index]
        if self.kind == "features":
            return item
        return from_array(item)


class FileDataset(Dataset):
    """A dataset of image files, each decoded when it is read.

    Args:
        files: one path per item.
        labels: one label per item; `splits`, `roles`, `metadata`, `notes` are as in `Dataset`.
        keys: one name per item; the default is the path.
        boxes: the part of each image that is the item, or `None` if the item is the whole image.
        advice: a sentence on what to do about an unreadable image, appended to the error message.
    """

    kind = "image"
    files: Sequence[Path]

    def __init__(
        self,
        files: Sequence[Path],
        labels: Sequence[str],
        keys: Sequence[str] | None = None,
        *,
        splits: Sequence[str] | None = None,
        roles: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        boxes: Sequence[Box | None] | None = None,
        advice: str = "",
        notes: Sequence[str] = (),
    ) -> None:
        self.files = files
        self.boxes = boxes
        self.notes = notes
        self.advice = advice
        self.labels = labels
        self.keys = [os.fspath(file) for file in files] if keys is None else keys
        self.splits = splits
        self.roles = roles
        self.metadata = metadata

    def __getitem__(self, index: int) -> Image:
        try:
            image = decode(self.files[index])
        except DataError as error:
            raise DataError(f"{error} {self.advice}".rstrip()) from error
        if self.boxes is None:
            box = None
        else:
            box = self.boxes[index]
        if box is None:
            return image
        return _cut(image, box, self.keys[index])


def _cut(image: Image, box: Box, key: str) -> Image:
    """Crop an image to a box, including every pixel that the box touches."""
    scale = image.width / full_size(image)[0]  # a very large JPEG is decoded at a smaller size
    box = (box[0] * scale, box[1] * scale, box[2] * scale, box[3] * scale)
    left = max(0, math.floor(box[0]))
    top = max(0, math.floor(box[1]))
    right = min(image.width, math.ceil(box[2]))
    bottom = min(image.height, math.ceil(box[3]))
    if left >= right or top >= bottom:
        shown = ", ".join(f"{edge:g}" for edge in box)
        raise DataError(
            f"{key}: its box ({shown}) covers no pixel of the image, which has {image.width} ×"
            f" {image.height} pixels."
        )
    return image.crop((left, top, right, bottom))


class Subset(Dataset):
    """Some items of a dataset, without the dataset's split and roles."""

    def __init__(self, dataset: Dataset, items: Ints) -> None:
        self._dataset = dataset
        self._items = items
        self.kind = dataset.kind
        self.labels = [dataset.labels[i] for i in items]
        self.keys = [dataset.keys[i] for i in items]
        self.metadata = None if dataset.metadata is None else [dataset.metadata[i] for i in items]
        self.arrays = None if dataset.arrays is None else dataset.arrays[items]
        self.files = None if dataset.files is None else [dataset.files[i] for i in items]

    def __getitem__(self, index: int) -> Image | Array:
        return self._dataset[int(self._items[index])]
