"""Check a plugin's dataset: its columns when it is created, each item when it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from retrieval.base.arrays import Array
from retrieval.errors import DataError, PluginError, valid_text
from retrieval.host.factory import calling
from retrieval.images.colour import check_range
from retrieval.images.conversions import from_array
from retrieval.model.contracts import Dataset
from retrieval.model.guard import breach, in_words

_COLUMNS = ("labels", "keys", "splits", "roles", "metadata", "arrays", "files")


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
        self._width: int | None = None
        self.kind = dataset.kind
        self.notes = dataset.notes
        self.origin = dataset.origin or type(dataset).__name__
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
            column = columns[field] or []
            if wrong := [i for i, entry in enumerate(column) if not isinstance(entry, kind)]:
                entry = in_words(column[wrong[0]])
                faults.append(f"{field} has {entry} for item {wrong[0]}, and must have {must}")
        _check_arrays(self.arrays, self.kind, faults)
        if isinstance(self.notes, str) or not all(isinstance(note, str) for note in self.notes):
            faults.append(f"notes is {in_words(self.notes)}, and must be a list of sentences")
        if faults:
            raise PluginError(f"The dataset {name} breaks its contract: {'; '.join(faults)}.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while unpickling, before `_dataset` exists
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: int) -> Image.Image | Array:
        """Return an item: a Pillow image, or a vector (F,).

        Raises:
            DataError: the item cannot be read, or a vector is not finite.
            PluginError: the dataset fails, or returns something else.
        """
        what = f"The dataset {self._name}, asked for item {index} ({self.keys[index]}),"
        try:
            with calling(what):
                item: Any = self._dataset[index]
                if isinstance(item, Image.Image):
                    item.load()  # fails for a damaged image that was only opened
        except OSError as error:
            raise DataError(f"{what} cannot read it: {error.strerror or error}.") from error
        if self.kind == "features":
            return self._vector(item, what)
        return _image(item, what)

    def _vector(self, item: Any, what: str) -> Array:
        if self._width is None and isinstance(item, np.ndarray) and item.ndim == 1:
            self._width = len(item)
        shape = (self._width if self.arrays is None else self.arrays.shape[1],)
        if not isinstance(item, np.ndarray) or item.shape != shape or item.dtype.kind not in "fiu":
            if shape == (None,):
                size = "(F,)"
            else:
                size = f"({shape[0]},)"
            raise breach(what, item, f"a vector: a numpy array of numbers of shape {size}.")
        if not np.isfinite(item).all():
            raise DataError(f"{what} gave NaN or infinity; leave the item out, or repair it.")
        return item


def _image(item: Any, what: str) -> Image.Image:
    """Return an item as a Pillow image."""
    if isinstance(item, Image.Image) and min(item.size) > 0:
        check_range(item, f"{what} gave an image that")
        return item
    if isinstance(item, Image.Image):
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
            else:  # a list, because pandas columns and tensors are indexed differently
                is_array = isinstance(column, np.ndarray | Tensor)
                columns[field] = column.tolist() if is_array else list(column)
    if "labels" in lengths and len(dataset) != lengths["labels"]:
        lengths["by len()"] = len(dataset)
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{length} {field}" for field, length in lengths.items())
        faults.append(f"its columns differ in length: {counts}")
    return columns


def _texts(column: Sequence[Any], field: str, what: str, faults: list[str]) -> list[str]:
    """Return a column as text; add to `faults` if entries are neither text nor whole numbers."""
    texts = [_text(value) for value in column]
    rows = [number for number, text in enumerate(texts) if text is None]
    if rows:
        first = column[rows[0]]
        if isinstance(first, bytes):
            described = f"text as bytes ({first!r:.40})"
        else:
            described = in_words(first)
        if len(rows) > 1:
            more = f" (and {len(rows) - 1:,} more such entries)"
        else:
            more = ""
        faults.append(
            f"{field} has {described} for item {rows[0]}{more}, but {what} is text or a whole"
            " number"
        )
    return [text or "" for text in texts]


def _text(value: Any) -> str | None:
    """Return a label or key as text: "" for None, and None for a value of another type."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
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
    elif kind == "features" and (
        arrays.ndim != 2 or not arrays.shape[1] or arrays.dtype.kind not in "fiu"
    ):
        faults.append(f"arrays is {in_words(arrays)}, and must be float32 of shape (N, F)")
    elif kind == "features":
        return
    elif arrays.ndim not in (3, 4) or (arrays.ndim == 4 and arrays.shape[3] not in (1, 3)):
        faults.append(f"arrays has the shape {arrays.shape}, and must be (N, H, W) or (N, H, W, 3)")
    elif arrays.dtype != np.uint8:
        faults.append(
            f"arrays has the type {arrays.dtype}, and pixels must be uint8, from 0 to 255"
        )
