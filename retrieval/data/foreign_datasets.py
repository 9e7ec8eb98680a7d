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
from retrieval.base.photo_files import address_of
from retrieval.data.datasets import ArrayDataset, Dataset, FileDataset, is_missing_label
from retrieval.data.splits import SIDES, sides
from retrieval.errors import DataError, did_you_mean, first_line, refuse
from retrieval.host.python_parts import DICTIONARY
from retrieval.images.decoding import decode
from retrieval.images.preprocessing import as_list, channels_last, from_pixels
from retrieval.model.labels import python_scalar

if TYPE_CHECKING:
    from PIL.Image import Image

# Attributes in which torchvision's classes list labels, and pairs (file, label). Reading them costs
# nothing, whereas the labels of the items themselves come with decoded images.
_LABELS = ("targets", "labels", "_labels", "y")
_PAIRS = ("samples", "_samples", "imgs")
# Types of values that metadata may hold.
_PLAIN = (str, int, float, bool, np.generic, type(None))
# Held while an item is read, because readers of other libraries may not be thread-safe. The lock is
# reentrant: a joined dataset holds it while one of its parts reads the item.
_READ_LOCK = threading.RLock()
# Largest array of images, in bytes, that is converted at once. Images of a larger array are
# converted when they are read, because a second copy might not fit into memory.
_MAX_FLOAT_BYTES = 1 << 28
# How often item 0 is read again. A random flip goes unnoticed with probability 1/8.
_READINGS = 3


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
        metadata: columns to keep for evaluation and for `[text]`, by default all others that hold
            text, numbers, booleans or lists of texts. For an object without columns, a list with
            one dictionary per item.
        name: name of the data in error messages.

    Raises:
        DataError: the object has none of these types, lacks a column, or gives another image when
            an item is read again.
    """
    if isinstance(obj, Dataset):
        return obj
    name = name or f"The dataset of type {type(obj).__name__}"
    options: dict[str, Any] = {
        "image": image,
        "label": label,
        "split": split,
        "metadata": metadata,
    }
    if isinstance(obj, Mapping):
        parts = {k: as_dataset(v, **options, name=f"{name}, {k}") for k, v in obj.items()}
        dataset = _joined(parts, name)
    elif hasattr(obj, "column_names") or hasattr(obj, "columns"):
        dataset = _of_table(obj, name, **options)
    else:
        dataset = _without_columns(obj, name, **options)
    _refuse_random(dataset, name)
    # A run records the origin as the name of its data, so the built-in types get names that speak.
    if isinstance(obj, Mapping):
        dataset.origin = DICTIONARY
    elif isinstance(obj, tuple):
        dataset.origin = "images_and_labels"
    else:
        dataset.origin = type(obj).__name__
    return dataset


def _refuse_random(dataset: Dataset, name: str) -> None:
    """Raise a `DataError` if an object gives another image when item 0 is read again."""
    if not len(dataset) or dataset.arrays is not None or dataset.files is not None:
        return
    first, *further = [np.asarray(dataset[0]) for _ in range(1 + _READINGS)]
    if not all(np.array_equal(first, again) for again in further):
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
        self.keys = list(map(str, range(len(labels)))) if keys is None else keys

    def __getitem__(self, index: int) -> Image:
        where = f"{self._name} item {self.keys[index]}"
        with _READ_LOCK:
            item = reading(where, self._read, index)
        return _image(item, where)


def reading(
    where: str,
    read: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """Return `read(*arguments)`; errors of other libraries become a `DataError` about `where`."""
    try:
        return read(*arguments)
    except DataError:
        raise
    except Exception as error:  # each reader raises its own errors
        raise DataError(f"{where} cannot be read: {first_line(error)}.") from error


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


def _of_images(
    images: Any,
    labels: list[str],
    name: str,
    **further: Any,
) -> Dataset:
    """Return a dataset of images or vectors in a list, an array or a tensor."""
    if hasattr(images, "detach"):
        images = images.detach().cpu().numpy()
        if images.ndim == 4:  # torch puts channels first
            images = images.transpose(0, 2, 3, 1)
    is_array = isinstance(images, np.ndarray)
    items = reading(f"{name}, images", list if is_array else as_list, images)
    if len(items) != len(labels):
        raise DataError(f"{name} has {len(items):,} images and {len(labels):,} labels.")
    if items and all(isinstance(image, str | Path) for image in items):
        return _of_files([Path(image) for image in items], labels, name, **further)
    if not is_array and items and getattr(items[0], "ndim", 0) == 1:
        images = np.stack([np.asarray(row) for row in items])
        is_array = True
    if not is_array:
        return ItemDataset(items.__getitem__, labels, name=name, **further)
    if len(images) and not images[0].size:
        raise DataError(f"{name}: its items hold no numbers; their shape is {images.shape[1:]}.")
    if images.ndim == 2:
        return ArrayDataset(images.astype(np.float32), labels, kind="features", **further)
    if images.dtype == np.uint8 or not len(images):
        if len(images):  # refuse a wrong shape now, not in the middle of training
            _image(images[0], f"{name} item 0")
        return ArrayDataset(np.ascontiguousarray(images), labels, **further)
    if images.nbytes <= _MAX_FLOAT_BYTES:
        pixels = [np.asarray(_image(row, f"{name} item {i}")) for i, row in enumerate(items)]
        return ArrayDataset(np.stack(pixels), labels, **further)
    return ItemDataset(items.__getitem__, labels, name=name, **further)


def _of_files(
    files: list[Path],
    labels: list[str],
    name: str,
    **further: Any,
) -> Dataset:
    """Return a dataset of image files, after checking that the local ones exist."""
    local = [file for file in files if not address_of(file)]
    if missing := [f"{file} is not a file." for file in local if not file.is_file()]:
        refuse(name, missing)
    return FileDataset(files, labels, **further)


def _is_kept(entry: Any) -> bool:
    """Return whether metadata may hold a value: text, a number, or a list of texts."""
    if isinstance(entry, list | tuple):
        return all(isinstance(part, str) for part in entry)
    return isinstance(entry, _PLAIN)


def _of_table(
    table: Any,
    name: str,
    *,
    image: Any,
    label: Any,
    split: Any,
    metadata: Any,
) -> Dataset:
    """Return a dataset of a Hugging Face `Dataset` or a `DataFrame`."""
    columns = list(table.column_names if hasattr(table, "column_names") else table.columns)
    features = getattr(table, "features", {})
    if image is None:
        image = "image"
        if "path" in columns and "image" not in columns:
            image = "path"
    if label is None:
        label = "label"
    if split is None and "split" in columns:
        split = "split"
    named = [image, label]
    if isinstance(split, str):
        named.append(split)
    named += metadata or ()
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
        # pandas reads a list from Parquet as an array
        cells = [c.tolist() if isinstance(c, np.ndarray) else c for c in _listed(table[column])]
        entries = [None if is_missing_label(cell) else cell for cell in cells]
        names: list[str] = getattr(features.get(column), "names", None) or []
        if not names:
            return entries
        by_number: dict[Any, str] = dict(enumerate(names))
        return [by_number.get(entry) for entry in entries]

    def holds_images(column: Any) -> bool:
        """Return whether a Hugging Face column may hold images, which are not read."""
        # a list of texts has the type of its texts
        feature = features.get(column)
        dtype = getattr(getattr(feature, "feature", feature), "dtype", "")
        return bool(features) and dtype in ("", "dict", "PIL.Image.Image")

    if metadata is None:
        unnamed = [column for column in columns if column not in named]
        chosen = [column for column in unnamed if not holds_images(column)]
    else:
        chosen = list(metadata)
    further_columns = {}
    for column in chosen:
        entries = values(column)
        # Columns that nobody named are dropped if evaluation could not use them.
        if metadata is not None or all(map(_is_kept, entries)):
            further_columns[column] = entries
    names = list(further_columns)
    by_row = zip(*further_columns.values(), strict=True)
    rows = [dict(zip(names, row, strict=True)) for row in by_row]
    if isinstance(split, str):
        split = [str(side) for side in values(split)]
    further: dict[str, Any] = {"splits": sides(split), "metadata": rows or None}
    labels = _texts(values(label), (), name)
    if features:
        return ItemDataset(partial(_member, table, image), labels, name=name, **further)
    return _of_images(_listed(table[image]), labels, name, **further)


def _without_columns(
    obj: Any,
    name: str,
    *,
    image: Any,
    label: Any,
    split: Any,
    metadata: Any,
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
    image_key: Any = 0
    label_key: Any = 1
    members = list(range(len(first)))
    if isinstance(first, Mapping):
        image_key = "image"
        label_key = "label"
        members = list(first)
    if image is not None:
        image_key = image
    if label is not None:
        label_key = label
    for key in (image_key, label_key):
        if key not in members:
            raise DataError(f"{name}: an item has no {key!r} (it has: {members}).")

    def read_all(member: Any) -> list[Any]:
        return [reading(f"{name} item {i}", _member, obj, member, i) for i in range(len(obj))]

    values = None
    if label is None:
        values = _listed_labels(obj)
    if values is None:
        values = read_all(label_key)
    # A subset has its labels' numbers from the whole dataset, which knows the names.
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
    if hasattr(first, "getdata") and np.array_equal(array[0], np.asarray(first)):
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
    # `transforms` without `transform` changes images and labels together, so labels may differ.
    has_joint = getattr(obj, "transforms", None) is not None
    if has_joint and getattr(obj, "transform", None) is None:
        return None
    for attribute in (*_LABELS, *_PAIRS):
        values: Any = getattr(obj, attribute, None)
        # A class may keep the labels of another selection than its items.
        if not hasattr(values, "__len__") or len(values) != len(obj):
            continue
        if attribute in _PAIRS:
            return [label for _, label, *_ in values]
        return list(values)
    return None


def _texts(values: Any, classes: Any, name: str) -> list[str]:
    """Return labels as text.

    A number becomes its name in `classes`. A missing label, or -1 as in STL-10, becomes "".
    """
    names: Sequence[Any] = classes if isinstance(classes, list | tuple) else ()
    texts = []
    for value in _listed(values):
        label = python_scalar(value)
        # pandas turns integers into floats if one is missing.
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        if is_missing_label(label) or (isinstance(label, int) and label == -1):
            texts.append("")
            continue
        if isinstance(label, bool) or not isinstance(label, int | str):
            raise DataError(f"{name}: a label must be text or an integer, not {str(label)[:60]}.")
        if names and isinstance(label, int):
            if label >= len(names):
                raise DataError(
                    f"{name}: an item has the label {label}, but `classes` only names the labels 0"
                    f" to {len(names) - 1}."
                )
            if label >= 0:
                label = names[label]
        texts.append(str(label))
    return texts


def _joined(parts: Mapping[str, Dataset], name: str) -> Dataset:
    """Return datasets joined into one, each as one side of the split."""
    if not parts:
        raise DataError(f"{name} holds no items.")
    names = ("labels", "keys", "splits", "roles", "metadata")
    columns: dict[str, Any] = {column: [] for column in names}
    for side, part in parts.items():
        split, role = SIDES.get(str(side).lower(), (str(side), ""))
        # extend, because += would add an array's values to those of the list.
        columns["labels"].extend(part.labels)
        # The sides may number their items alike, but keys must differ.
        columns["keys"] += [f"{side}/{key}" for key in part.keys]
        columns["splits"] += [split] * len(part)
        columns["roles"] += [role] * len(part)
        if part.metadata is not None:
            columns["metadata"].extend(part.metadata)
    if not any(columns["roles"]):
        columns["roles"] = None
    if len(columns["metadata"]) < len(columns["keys"]):
        columns["metadata"] = None
    # One array instead of a list of parts makes the features of a frozen backbone cacheable.
    arrays = [part.arrays for part in parts.values() if part.arrays is not None]
    shapes = {array.shape[1:] for array in arrays}
    if len(arrays) == len(parts) and len(shapes) == 1:
        kind = next(iter(parts.values())).kind
        return ArrayDataset(np.concatenate(arrays), kind=kind, **columns)
    whole: Any = ConcatDataset([*parts.values()])  # type: ignore[list-item]
    return ItemDataset(whole.__getitem__, name=name, **columns)
