"""`as_dataset` turns objects of other libraries into datasets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import ConcatDataset

from retrieval.base.arrays import Pixels
from retrieval.base.photos import address_of
from retrieval.data.datasets import ArrayDataset, Dataset, FileDataset, is_missing_label
from retrieval.data.splits import SIDES, sides
from retrieval.errors import DataError, did_you_mean, refuse
from retrieval.host.python_parts import DICTIONARY
from retrieval.images.decoding import decode
from retrieval.images.preprocessing import as_list, channels_last, from_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

_LABELS = ("targets", "labels", "_labels", "y")
"""Attributes in which torchvision's classes list labels."""
_PAIRS = ("samples", "_samples", "imgs")
"""Attributes in which torchvision's classes list pairs (file, label)."""
_PLAIN = (str, int, float, bool, np.generic, type(None))
"""Types of values that metadata may hold."""
_READ_LOCK = threading.RLock()
"""Held while an item is read, because readers of other libraries may not be thread-safe.

The lock is reentrant: a joined dataset holds it while one of its parts reads the item.
"""
_MAX_FLOAT_BYTES = 1 << 28
"""Largest array of images, in bytes, that is converted at once; a larger one, image by image."""
_READINGS = 3
"""How often item 0 is read again. A random flip goes unnoticed with probability 1/8."""


def as_dataset(
    obj: Any,
    *,
    image: str | int | None = None,
    label: str | int | None = None,
    split: str | Sequence[str] | None = None,
    metadata: Sequence[str] | Sequence[Mapping[str, Any]] | None = None,
    name: str = "",
) -> Dataset:
    """Return an object of another library as a dataset.

    An image is a path, the bytes of an image file, a Pillow image, an array (H, W) or (H, W, 3) of
    uint8 or of floats from 0 to 1, or a tensor of such pixels with channels first. If items are
    vectors (F,) instead, the result is a dataset of features. Items are read when they are used, so
    the object's own transforms run. The transforms must neither be random nor normalise pixels.

    Args:
        obj: a PyTorch dataset with a length and items (image, label) or {"image": …, "label": …};
            a Hugging Face `Dataset`; a pandas `DataFrame`; a pair `(images, labels)`; or a
            dictionary of these, whose keys "train", "validation", "test", "query" and "gallery" are
            the sides of the split (for `[split] by = "given"`, the default).
        image: column, key or position of the image, by default "image" or 0.
        label: column, key or position of the label, by default "label" or 1.
        split: column of the sides ("train", "validation" or "test"), by default "split" if it
            exists. For an object without columns, a list with one side per item.
        metadata: columns to keep for evaluation, by default all others that hold text, numbers or
            booleans. For an object without columns, a list with one dictionary per item.
        name: name of the data in error messages.

    Raises:
        DataError: the object has none of these types, lacks a column, or gives another image when
            an item is read again.
    """
    if isinstance(obj, Dataset):
        return obj
    name = name or f"The dataset of type {type(obj).__name__}"
    options: dict[str, Any] = {"image": image, "label": label, "split": split, "metadata": metadata}
    if isinstance(obj, Mapping):
        parts = {k: as_dataset(v, **options, name=f"{name}, {k}") for k, v in obj.items()}
        dataset = _joined(parts, name)
    elif hasattr(obj, "column_names") or hasattr(obj, "columns"):
        dataset = _of_table(obj, name, **options)
    else:
        dataset = _without_columns(obj, name, **options)
    _refuse_random(dataset, name)
    dataset.origin = type(obj).__name__
    if isinstance(obj, Mapping | tuple):
        dataset.origin = DICTIONARY if isinstance(obj, Mapping) else "images_and_labels"
    return dataset


def _refuse_random(dataset: Dataset, name: str) -> None:
    """Raise a `DataError` if an object gives another image when item 0 is read again."""
    if not len(dataset) or dataset.arrays is not None or dataset.files is not None:
        return
    first = np.asarray(dataset[0])
    if not all(np.array_equal(first, np.asarray(dataset[0])) for _ in range(_READINGS)):
        raise DataError(
            f"{name}: item 0 differs when it is read again, so the dataset's own transforms are"
            " random. Remove them, because evaluation needs the same image each time. The recipe's"
            " [augmentation] changes training images."
        )


class ItemDataset(Dataset):
    """A dataset of images that a function reads one at a time.

    Args:
        read: returns the image with an index, in any form that `as_dataset` accepts.
        labels: one label per item; `splits`, `roles` and `metadata` are as in `Dataset`.
        keys: one name per item; the default is the item's number.
        name: name of the data in error messages.
    """

    def __init__(
        self,
        read: Callable[[int], Any],
        labels: Sequence[str],
        keys: Sequence[str] | None = None,
        *,
        name: str,
        splits: Sequence[str] | None = None,
        roles: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._read = read
        self._name = name
        self.labels = labels
        self.splits = splits
        self.roles = roles
        self.metadata = metadata
        self.keys = [str(i) for i in range(len(labels))] if keys is None else keys

    def __getitem__(self, index: int) -> Image:
        where = f"{self._name} item {self.keys[index]}"
        with _READ_LOCK:
            item = reading(where, self._read, index)
        return _image(item, where)


def reading(where: str, read: Callable[..., Any], *arguments: Any) -> Any:
    """Return `read(*arguments)`; errors of other libraries become a `DataError` about `where`."""
    try:
        return read(*arguments)
    except DataError:
        raise
    except Exception as error:  # each reader raises its own errors
        reason = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
        raise DataError(f"{where} cannot be read: {reason}.") from error


def _image(item: Any, where: str) -> Image:
    """Return an image of any form as a Pillow image."""
    if isinstance(item, Mapping):  # from `datasets.Image(decode=False)`
        item = item.get("bytes") or item.get("path")
    item = channels_last(item)
    try:
        if isinstance(item, np.ndarray):
            return from_pixels(item)
        if isinstance(item, str | bytes | Path):
            return decode(item)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not hasattr(item, "getdata"):
        raise DataError(
            f"{where} is an object of type {type(item).__name__}, not an image. Pass an image as a"
            " path, bytes, a Pillow image, an array or a tensor, and a vector as an array."
        )
    image: Image = item
    return image


def _of_images(images: Any, labels: list[str], name: str, **further: Any) -> Dataset:
    """Return a dataset of images or vectors in a list, an array or a tensor."""
    if hasattr(images, "detach"):
        images = images.detach().cpu().numpy()
        if images.ndim == 4:
            images = images.transpose(0, 2, 3, 1)
    if isinstance(images, np.ndarray):
        array = images
    else:
        array = None
    listed = reading(f"{name}, images", as_list if array is None else list, images)
    if len(listed) != len(labels):
        raise DataError(f"{name} has {len(listed):,} images and {len(labels):,} labels.")
    if array is None and listed and getattr(listed[0], "ndim", 0) == 1:
        array = np.stack([np.asarray(row) for row in listed])
    if array is not None and len(array) and not array[0].size:
        raise DataError(f"{name}: its items hold no numbers; their shape is {array.shape[1:]}.")
    if array is not None and array.ndim == 2:
        return ArrayDataset(array.astype(np.float32), labels, kind="features", **further)
    if array is not None and (array.dtype == np.uint8 or not len(array)):
        if len(array):
            _image(array[0], f"{name} item 0")
        return ArrayDataset(np.ascontiguousarray(array), labels, **further)
    if listed and all(isinstance(image, str | Path) for image in listed):
        files = [Path(image) for image in listed]
        local = [file for file in files if not address_of(file)]
        if missing := [f"{file} is not a file." for file in local if not file.is_file()]:
            refuse(name, missing)
        keys = [str(file) for file in files]
        return FileDataset(files, labels, keys if len({*keys}) == len(keys) else None, **further)
    if array is not None and array.nbytes <= _MAX_FLOAT_BYTES:
        pixels = [np.asarray(_image(row, f"{name} item {i}")) for i, row in enumerate(listed)]
        return ArrayDataset(np.stack(pixels), labels, **further)
    return ItemDataset(listed.__getitem__, labels, name=name, **further)


def _of_table(
    table: Any, name: str, *, image: Any, label: Any, split: Any, metadata: Any
) -> Dataset:
    """Return a dataset of a Hugging Face `Dataset` or a `DataFrame`."""
    columns = [*getattr(table, "column_names", getattr(table, "columns", ()))]
    features = getattr(table, "features", {})
    if "path" in columns and "image" not in columns:
        default = "path"
    else:
        default = "image"
    image = default if image is None else image
    label = "label" if label is None else label
    if split is None and "split" in columns:
        split = "split"
    named = [image, label, *([split] if isinstance(split, str) else []), *(metadata or ())]
    problems = [
        f"it has no column {column!r} (it has: {', '.join(map(str, columns))})."
        f"{did_you_mean(str(column), map(str, columns))}"
        for column in named
        if column not in columns
    ]
    if problems:
        refuse(name, problems)

    def values(column: Any) -> list[Any]:
        """Return a column's values; a Hugging Face `ClassLabel` column gives class names."""
        listed = [None if is_missing_label(value) else value for value in _listed(table[column])]
        names: list[str] = getattr(features.get(column), "names", None) or []
        by_number: dict[Any, str] = dict(enumerate(names))
        if names:
            return [by_number.get(value) for value in listed]
        return listed

    def holds_images(column: Any) -> bool:
        """Return whether a Hugging Face column may hold images, which are not read."""
        dtype = getattr(features.get(column), "dtype", "")
        return bool(features) and dtype in ("", "dict", "PIL.Image.Image")

    if metadata is None:
        further_columns = [c for c in columns if c not in named and not holds_images(c)]
        kept = {column: values(column) for column in further_columns}
        kept = {c: v for c, v in kept.items() if all(isinstance(value, _PLAIN) for value in v)}
    else:
        kept = {column: values(column) for column in metadata}
    rows = [dict(zip(kept, row, strict=True)) for row in zip(*kept.values(), strict=True)]
    if isinstance(split, str):
        split = [str(side) for side in values(split)]
    further: dict[str, Any] = {"splits": sides(split), "metadata": rows or None}
    labels = _texts(values(label), (), name)
    if features:
        return ItemDataset(partial(_member, table, image), labels, name=name, **further)
    return _of_images(_listed(table[image]), labels, name, **further)


def _without_columns(
    obj: Any, name: str, *, image: Any, label: Any, split: Any, metadata: Any
) -> Dataset:
    """Return a dataset of a pair (images, labels), or of an object with a length and items."""
    if isinstance(split, str):
        raise DataError(f"{name} has no columns: pass split as a list with one side per item.")
    further: dict[str, Any] = {"splits": sides(split), "metadata": metadata}
    if isinstance(obj, tuple) and len(obj) == 2 and hasattr(obj[1], "__len__"):
        return _of_images(obj[0], _texts(obj[1], (), name), name, **further)
    has_items = hasattr(obj, "__len__") and hasattr(obj, "__getitem__")
    if isinstance(obj, str | bytes) or not has_items:
        raise DataError(
            f"{name} cannot be read: pass a PyTorch dataset with a length and items (image, label),"
            " a Hugging Face Dataset, a DataFrame, or a pair (images, labels)."
        )
    if not len(obj):
        raise DataError(f"{name} holds no items.")
    first = reading(f"{name} item 0", obj.__getitem__, 0)
    if not isinstance(first, tuple | list | Mapping) or len(first) < 2:
        raise DataError(
            f"Item 0 of {name} is an object of type {type(first).__name__}. It must be a tuple"
            ' (image, label) or a dictionary {"image": …, "label": …}.'
        )
    keyed = isinstance(first, Mapping)
    image_key: Any = image if image is not None else "image" if keyed else 0
    label_key: Any = label if label is not None else "label" if keyed else 1
    if keyed:
        members = list(first)
    else:
        members = [*range(len(first))]
    for chosen in (image_key, label_key):
        if chosen not in members:
            raise DataError(f"{name}: an item has no {chosen!r} (it has: {members}).")

    def read_all(member: Any) -> list[Any]:
        return [reading(f"{name} item {i}", _member, obj, member, i) for i in range(len(obj))]

    if label is None:
        values = _listed_labels(obj)
    else:
        values = None
    if values is None:
        values = read_all(label_key)
    whole = obj
    while _is_subset(whole):
        whole = whole.dataset
    labels = _texts(values, getattr(whole, "classes", None), name)
    if getattr(first[image_key], "ndim", 0) == 1:
        return _of_images(read_all(image_key), labels, name, **further)
    if (pixels := _pixels(obj, first[image_key])) is not None:
        return ArrayDataset(pixels, labels, **further)
    return ItemDataset(partial(_member, obj, image_key), labels, name=name, **further)


def _member(obj: Any, key: Any, index: int) -> Any:
    return obj[index][key]


def _listed(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _is_subset(obj: Any) -> bool:
    """Return whether an object is torch's `Subset`, or like it."""
    return hasattr(obj, "indices") and hasattr(obj, "dataset")


def _of_torchvision(obj: Any) -> bool:
    """Return whether an object's class is torchvision's own, so that its lists match its items."""
    return type(obj).__module__.startswith("torchvision.")


def _pixels(obj: Any, first: Any) -> Pixels | None:
    """Return the array `data` of a torchvision dataset if its rows are the items, else `None`.

    With an array, the features of a frozen backbone can be cached.
    """
    if not _of_torchvision(obj) or getattr(obj, "transforms", None) is not None:
        return None
    array = np.asarray(getattr(obj, "data", None))
    if array.dtype != np.uint8 or array.shape[:1] != (len(obj),):
        return None
    # The array may be laid out differently from the images, such as with channels first.
    same = hasattr(first, "getdata") and np.array_equal(array[0], np.asarray(first))
    if same:
        return array
    return None


def _listed_labels(obj: Any) -> list[Any] | None:
    """Return the labels that one of torchvision's classes lists without reading images, or None."""
    if _is_subset(obj):
        whole = _listed_labels(obj.dataset)
        if whole is None:
            return None
        return [whole[i] for i in obj.indices]
    if not _of_torchvision(obj) or getattr(obj, "target_transform", None) is not None:
        return None
    joint = getattr(obj, "transforms", None) is not None
    if joint and getattr(obj, "transform", None) is None:  # changes images and labels together
        return None
    for attribute in (*_LABELS, *_PAIRS):
        values: Any = getattr(obj, attribute, None)
        if hasattr(values, "__len__") and len(values) == len(obj):
            if attribute in _PAIRS:
                return [value[1] for value in values]
            return list(values)
    return None


def _texts(values: Any, classes: Any, name: str) -> list[str]:
    """Return labels as text.

    A number becomes its name in `classes`. A missing label, or -1 as in STL-10, becomes "".
    """
    if isinstance(classes, list | tuple):
        names = list(classes)
    else:
        names = []
    texts = []
    for value in _listed(values):
        if hasattr(value, "item") and not getattr(value, "ndim", 0):
            plain = value.item()
        else:
            plain = value
        if isinstance(plain, float) and plain.is_integer():
            plain = int(plain)  # pandas turns integers into floats if one is missing
        if is_missing_label(plain) or (isinstance(plain, int) and plain == -1):
            texts.append("")
        elif isinstance(plain, bool) or not isinstance(plain, int | str):
            raise DataError(f"{name}: a label must be text or an integer, not {str(plain)[:60]}.")
        elif names and isinstance(plain, int) and plain >= len(names):
            raise DataError(
                f"{name}: an item has the label {plain}, but `classes` only names the labels 0 to"
                f" {len(names) - 1}."
            )
        else:
            named = names and isinstance(plain, int) and plain >= 0
            texts.append(str(names[int(plain)] if named else plain))
    return texts


def _joined(parts: Mapping[str, Dataset], name: str) -> Dataset:
    """Return datasets joined into one, each as one side of the split."""
    if not parts:
        raise DataError(f"{name} holds no items.")
    columns: dict[str, Any] = {"labels": [], "keys": [], "splits": [], "roles": [], "metadata": []}
    for side, part in parts.items():
        split, role = SIDES.get(str(side).lower(), (str(side), ""))
        columns["labels"].extend(part.labels)  # += would add an array's values
        columns["keys"] += [f"{side}/{key}" for key in part.keys]
        columns["splits"] += [split] * len(part)
        columns["roles"] += [role] * len(part)
        columns["metadata"].extend(() if part.metadata is None else part.metadata)
    if not any(columns["roles"]):
        columns["roles"] = None
    if any(part.metadata is None for part in parts.values()):
        columns["metadata"] = None
    arrays = [part.arrays for part in parts.values() if part.arrays is not None]
    if len(arrays) == len(parts) and len({array.shape[1:] for array in arrays}) == 1:
        kind = next(iter(parts.values())).kind
        return ArrayDataset(np.concatenate(arrays), kind=kind, **columns)
    whole: Any = ConcatDataset([*parts.values()])  # type: ignore[list-item]
    return ItemDataset(whole.__getitem__, name=name, **columns)
