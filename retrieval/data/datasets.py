"""Datasets: their contract, those in an array or in files, and the checks that all must pass.

A factory's dataset is wrapped by `check_dataset`, which checks the columns at once and each item
when it is read. `usable_dataset` then refuses missing labels, equal keys and infinite numbers.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from PIL.Image import Image
from torch import Tensor

from retrieval.base.arrays import Array, Ints
from retrieval.errors import DataError, PluginError, refuse, some, valid_text
from retrieval.host.factory import calling
from retrieval.images.decoding import decode, full_size
from retrieval.images.preprocessing import check_range, from_array
from retrieval.model import labels
from retrieval.model.contracts import breach, in_words

Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge of a box, in pixels from the image's upper left corner."""

_COLUMNS = ("labels", "keys", "splits", "roles", "metadata", "arrays", "files")
# Number of vectors checked at a time: a memory-mapped array may not fit into memory.
_ROWS = 65_536


class Dataset(ABC):
    """Labelled items: images, or precomputed feature vectors.

    A dataset holds all labels and keys, but may read each item when it is needed. With `arrays` or
    `files`, a frozen backbone's features are cached across runs.

    Attributes:
        kind: "image" or "features".
        labels: one label per item, as text. Whole numbers and booleans, also from NumPy or in a
            tensor, become text; other types raise an error.
        keys: one unique, stable name per item (a path, or "digits/17").
        splits: "train", "validation" or "test" per item, or `None` if the data have no split.
        roles: "query", "gallery" or "" per item, or `None` if the data have no retrieval protocol.
        metadata: additional columns, one mapping per item, or `None`.
        arrays: all images as uint8 (N, H, W) or (N, H, W, 3), or all vectors as float32 (N, F), in
            memory or memory-mapped; batches are slices of this array. `None` if there is no array.
        files: one path per item if items are files, otherwise `None`.
        notes: sentences for the user on how the data were read, such as which items were left out;
            `run.json` holds them.
        origin: name of the class that `as_dataset` read, or "".
    """

    kind: Literal["image", "features"] = "image"
    labels: Sequence[str]
    keys: Sequence[str]
    splits: Sequence[str] | None = None
    roles: Sequence[str] | None = None
    metadata: Sequence[Mapping[str, Any]] | None = None
    arrays: Array | None = None
    files: Sequence[Path] | None = None
    notes: Sequence[str] = ()
    origin: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[Image | Array]:
        return (self[index] for index in range(len(self)))

    @abstractmethod
    def __getitem__(self, index: int) -> Image | Array:
        """Return item `index` without its label; may be called from any thread.

        Returns:
            A Pillow image, or an array like a row of `arrays`. For anything else, the host raises a
            `PluginError` that names the item.

        Raises:
            DataError: the item cannot be read; the message names it.
        """


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
            # Pillow knows grey images as (H, W) only.
            arrays = arrays[:, :, :, 0]
        self.kind = kind
        self.arrays: Array = arrays
        self.labels = labels
        self.keys = list(map(str, range(len(arrays)))) if keys is None else keys
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
        box = None if self.boxes is None else self.boxes[index]
        if box is None:
            return image
        return _cut(image, box, self.keys[index])


def _cut(image: Image, box: Box, key: str) -> Image:
    """Crop an image to a box, including every pixel that the box touches."""
    # A very large JPEG is decoded at a smaller size, but the box counts pixels of the file.
    scale = image.width / full_size(image)[0]
    edges = [edge * scale for edge in box]
    left = max(0, math.floor(edges[0]))
    top = max(0, math.floor(edges[1]))
    right = min(image.width, math.ceil(edges[2]))
    bottom = min(image.height, math.ceil(edges[3]))
    if left >= right or top >= bottom:
        numbers = ", ".join(f"{edge:g}" for edge in edges)
        raise DataError(
            f"{key}: its box ({numbers}) covers no pixel of the image, which has {image.width} ×"
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


def check_dataset(dataset: Any, name: str) -> Dataset:
    """Check a dataset's columns and return a dataset that checks each item when it is read."""
    if not isinstance(dataset, Dataset):
        raise PluginError(
            f"{name} gave {in_words(dataset)}; a dataset factory must give a"
            " retrieval.plugin.Dataset. retrieval.as_dataset(…) turns most objects into one."
        )
    with calling(f"The dataset {name}"):
        return CheckedDataset(dataset, name)


class CheckedDataset(Dataset):
    """Wrapper of a plugin's dataset that turns columns into lists and checks each item.

    Labels and keys that are whole numbers or booleans become text. Other types raise an error,
    because a float or an array makes a poor name. Any other attribute is the wrapped dataset's.

    Raises:
        PluginError: the columns break the contract; the message lists every fault.
    """

    def __init__(self, dataset: Dataset, name: str) -> None:
        self._dataset = dataset
        self._name = name
        # Width of the first vector; without `arrays`, it alone says how wide the others must be.
        self._width: int | None = None
        self.kind = dataset.kind
        self.notes = dataset.notes
        self.origin = dataset.origin or type(dataset).__name__
        # All faults are collected, so that an author corrects them in one go.
        faults: list[str] = []
        if self.kind not in ("image", "features"):
            faults.append(f'kind is {self.kind!r}, and must be "image" or "features"')
        columns = _columns(dataset, faults)
        self.labels = _texts(columns["labels"] or [], "labels", "a label", faults)
        self.keys = _texts(columns["keys"] or [], "keys", "a key", faults)
        self.splits = columns["splits"]
        self.roles = columns["roles"]
        self.metadata = columns["metadata"]
        self.files = columns["files"]
        self.arrays = columns["arrays"]
        for field, kind, must in (
            ("metadata", Mapping, "a mapping from columns to values"),
            ("files", os.PathLike, "a pathlib.Path"),
        ):
            # Only the first is named: thousands of items may have the same fault.
            for item, entry in enumerate(columns[field] or ()):
                if not isinstance(entry, kind):
                    faults.append(
                        f"{field} has {in_words(entry)} for item {item}, and must have {must}"
                    )
                    break
        _check_arrays(self.arrays, self.kind, faults)
        if isinstance(self.notes, str) or not all(isinstance(note, str) for note in self.notes):
            faults.append(f"notes is {in_words(self.notes)}, and must be a list of sentences")
        if faults:
            raise PluginError(f"The dataset {name} breaks its contract: {'; '.join(faults)}.")

    def __getattr__(self, name: str) -> Any:
        # While unpickling, `_dataset` does not exist yet, and asking for it would never end.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: int) -> Image | Array:
        """Return an item: a Pillow image, or a vector (F,).

        Raises:
            DataError: the item cannot be read, or a vector is not finite.
            PluginError: the dataset fails, or returns something else.
        """
        what = f"The dataset {self._name}, asked for item {index} ({self.keys[index]}),"
        try:
            with calling(what):
                item: Any = self._dataset[index]
                if isinstance(item, Image):
                    # Pillow reads pixels late. A damaged image must fail here, where it is named.
                    item.load()
        except OSError as error:
            raise DataError(f"{what} cannot read it: {error.strerror or error}.") from error
        if self.kind == "features":
            return self._vector(item, what)
        return _image(item, what)

    def _vector(self, item: Any, what: str) -> Array:
        if self._width is None and self.arrays is not None:
            self._width = self.arrays.shape[1]
        if self._width is None and isinstance(item, np.ndarray) and item.ndim == 1:
            self._width = len(item)
        right_shape = isinstance(item, np.ndarray) and item.shape == (self._width,)
        if not right_shape or item.dtype.kind not in "fiu":
            shape = f"({self._width or 'F'},)"
            raise breach(what, item, f"a vector: a numpy array of numbers of shape {shape}.")
        if not np.isfinite(item).all():
            raise DataError(f"{what} gave NaN or infinity; leave the item out, or repair it.")
        vector: Array = item
        return vector


def _image(item: Any, what: str) -> Image:
    """Return an item as a Pillow image."""
    if isinstance(item, Image) and min(item.size) > 0:
        check_range(item, f"{what} gave an image that")
        return item
    if isinstance(item, Image):
        raise PluginError(f"{what} gave an empty image of {item.width} × {item.height} pixels.")
    with suppress(DataError):
        if isinstance(item, np.ndarray):
            return from_array(item)
    raise breach(
        what,
        item,
        "a Pillow image, or uint8 pixels (H, W) or (H, W, 3) from 0 to 255. Return the image alone;"
        " its label belongs in `labels`. torchvision's to_pil_image turns a tensor into an image.",
    )


def _columns(dataset: Dataset, faults: list[str]) -> dict[str, Any]:
    """Return a dataset's columns by name, as lists; add what is wrong with them to `faults`.

    A missing or wrong column is None. `arrays` stays unchanged, because as a list it would take
    seconds and hundreds of megabytes.
    """
    columns: dict[str, Any] = dict.fromkeys(_COLUMNS)
    lengths: dict[str, int] = {}
    for field in _COLUMNS:
        column = getattr(dataset, field, None)
        if column is None:
            if field in ("labels", "keys"):
                faults.append(f"it has no {field}, and must have one entry per item")
        elif isinstance(column, str | bytes | Mapping | Set) or not hasattr(column, "__len__"):
            faults.append(
                f"{field} is {in_words(column)}, and must hold one entry per item, in order"
            )
        else:
            lengths[field] = len(column)
            if field == "arrays":
                columns[field] = column
            elif isinstance(column, np.ndarray | Tensor):
                columns[field] = column.tolist()
            else:  # a list, because pandas columns are indexed differently
                columns[field] = list(column)
    if "labels" in lengths and len(dataset) != lengths["labels"]:
        lengths["by len()"] = len(dataset)
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{length} {field}" for field, length in lengths.items())
        faults.append(f"its columns differ in length: {counts}")
    return columns


def _texts(
    column: Sequence[Any],
    field: str,
    what: str,
    faults: list[str],
) -> list[str]:
    """Return a column as text; add to `faults` if entries are neither text nor whole numbers."""
    texts = [_text(value) for value in column]
    rows = [number for number, text in enumerate(texts) if text is None]
    if rows:
        first = column[rows[0]]
        described = in_words(first)
        if isinstance(first, bytes):
            described = f"text as bytes ({first!r:.40})"
        more = ""
        if len(rows) > 1:
            more = f" (and {len(rows) - 1:,} more such entries)"
        faults.append(
            f"{field} has {described} for item {rows[0]}{more}, but {what} is text or a whole"
            " number"
        )
    return [text or "" for text in texts]


def _text(value: Any) -> str | None:
    """Return a label or key as text: "" for None, and None for a value of another type."""
    value = labels.python_scalar(value)
    if isinstance(value, str | bool | int):
        return valid_text(str(value))
    if value is None:
        return ""
    return None


def _check_arrays(arrays: Any, kind: str, faults: list[str]) -> None:
    """Add to `faults` what is wrong with `arrays`, which holds all items of the dataset."""
    if arrays is None:
        return
    if not isinstance(arrays, np.ndarray):
        faults.append(f"arrays is {in_words(arrays)}, and must be a numpy array")
    elif kind == "features":
        if arrays.ndim != 2 or not arrays.shape[1] or arrays.dtype.kind not in "fiu":
            faults.append(f"arrays is {in_words(arrays)}, and must be float32 of shape (N, F)")
    elif arrays.ndim not in (3, 4) or (arrays.ndim == 4 and arrays.shape[3] not in (1, 3)):
        faults.append(f"arrays has the shape {arrays.shape}, and must be (N, H, W) or (N, H, W, 3)")
    elif arrays.dtype != np.uint8:
        faults.append(
            f"arrays has the type {arrays.dtype}, and pixels must be uint8, from 0 to 255"
        )


D = TypeVar("D", bound=Dataset)


def usable_dataset(dataset: D, where: str) -> D:
    """Return a dataset after checking that its items can be used; `where` begins error messages.

    Raises:
        DataError: a vector is not finite, an item has no label or no key, or two keys are equal.
            The message lists every problem.
    """
    problems = []
    rows = _rows_not_finite(dataset)
    if rows:
        problems.append(
            f"features hold NaN, infinity or numbers too large for 32 bits in {len(rows):,}"
            f" rows: {some(rows, 10)}. Remove or correct them."
        )
    unlabelled = [i for i, label in enumerate(dataset.labels) if is_missing_label(label)]
    if unlabelled:
        problems.append(
            f"{len(unlabelled):,} of {len(dataset.labels):,} items have no label:"
            f" {some([dataset.keys[i] for i in unlabelled])}. Label them, or leave them out."
        )
    blank = [i for i, key in enumerate(dataset.keys) if not key]
    if blank:
        problems.append(f"{len(blank):,} items have no key: {some(blank)}. Give each item its own.")
    problems += [
        f"'{key}' is the key of {count:,} items. Give each item its own key."
        for key, count in Counter(dataset.keys).items()
        if count > 1 and key
    ]
    if problems:
        refuse(where, problems)
    return dataset


def _rows_not_finite(dataset: Dataset) -> list[int]:
    rows: list[int] = []
    if dataset.kind == "features" and dataset.arrays is not None:
        for start in range(0, len(dataset.arrays), _ROWS):
            vectors = dataset.arrays[start : start + _ROWS]
            finite = np.isfinite(vectors).all(axis=1)
            rows += (start + np.flatnonzero(~finite)).tolist()
    return rows


def is_missing_label(label: Any) -> bool:
    """Return whether a value means a missing label: None, blank text, NaN, or pandas' NaT or NA."""
    if isinstance(label, str):
        return not label.strip()
    return labels.is_missing(label)
