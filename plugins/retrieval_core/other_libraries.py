"""Data sets that torchvision and Hugging Face's `datasets` read."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from retrieval.errors import DataError, MissingDependency, did_you_mean
from retrieval.plugin import ArrayDataset, Dataset, is_missing, refuse, usable

_FOLDERS = "Export its images into one folder a class, and use core.folder"
_PICKLED = {
    "CIFAR10": "Use core.cifar10",
    "CIFAR100": "Use sets.cifar100",
    "LSUN": _FOLDERS,
    "LSUNClass": _FOLDERS,
}
_TARGETS = ("targets", "labels", "_labels", "y")


class _Parts(Dataset):
    """Another library's data sets, one for each side, joined end to end.

    Args:
        name: the name in error messages.
        parts: each side's data set, whose items are tuples that begin with the image.
        labels: each side's labels.
    """

    kind = "image"

    def __init__(
        self, name: str, parts: Mapping[str, Any], labels: Mapping[str, Sequence[str]]
    ) -> None:
        self._name, self._parts, self._lock = name, list(parts.values()), threading.Lock()
        self._starts = np.cumsum([0, *(len(labels[side]) for side in parts)])
        self.labels = [label for side in parts for label in labels[side]]
        self.keys = [f"{side or 'all'}/{i}" for side in parts for i in range(len(labels[side]))]
        self.splits = [side for side in parts for _ in labels[side]] if any(parts) else None

    def __getitem__(self, index: int) -> Image.Image:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._lock:  # readers of other libraries may not be thread-safe
            image = _first(self._parts[part], index - int(self._starts[part]), self.keys[index])
        if not isinstance(image, Image.Image):
            raise DataError(
                f"{self._name}, {self.keys[index]}, is no image but a {type(image).__name__}."
            )
        return image

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def _first(part: Any, index: int, key: str) -> Any:
    try:
        return part[index][0]
    except Exception as error:  # each reader raises its own errors
        raise DataError(f"{key} cannot be read: {_reason(error)}.") from error


def torchvision_dataset(
    dataset: str,
    folder: Path,
    download: bool = False,
    options: dict[str, Any] | None = None,
) -> Dataset:
    """Load a data set of labelled images through torchvision, with training and test side if any.

    Labels are class names if torchvision knows them, otherwise its numbers. Classes that unpickle a
    file are not allowed: CIFAR-10 and CIFAR-100 have their own readers here, and LSUN unpickles a
    file in the working directory.

    Args:
        dataset: name of the class in `torchvision.datasets`, such as "Flowers102" or
            "OxfordIIITPet".
        folder: the class's `root`.
        download: whether torchvision may download the data.
        options: further arguments of the class, for both sides.

    Raises:
        DataError: there is no such class, it does not accept these options, the data are missing or
            damaged, or items are not images.
    """
    from torchvision import datasets

    known = [name for name in datasets.__all__ if inspect.isclass(getattr(datasets, name))]
    if dataset in _PICKLED:
        raise DataError(
            f"[data] dataset: torchvision unpickles a file for {dataset}, which may run any code."
            f" {_PICKLED[dataset]}."
        )
    if dataset not in known:
        raise DataError(
            f"[data] dataset: torchvision has no '{dataset}'.{did_you_mean(dataset, known)}"
        )
    make = getattr(datasets, dataset)
    takes = inspect.signature(make).parameters
    arguments = dict(options or {})
    if wrong := sorted({*arguments} - {*takes}):
        raise DataError(
            f"[data] options: torchvision's {dataset} takes no {', '.join(wrong)} (it takes"
            f" {', '.join(takes)})."
        )
    if "download" in takes:
        arguments["download"] = download
    sides: dict[str, dict[str, Any]] = {"": {}}
    if "train" in takes and "train" not in arguments:
        sides = {"train": {"train": True}, "test": {"train": False}}
    elif (
        "split" in takes
        and "split" not in arguments
        and str(takes["split"].default) in ("train", "trainval")
    ):
        sides = {"train": {"split": takes["split"].default}, "test": {"split": "test"}}
    try:
        parts = {side: make(folder, **arguments, **own) for side, own in sides.items()}
    except Exception as error:  # each class raises its own errors
        raise DataError(
            f"torchvision's {dataset} cannot be read from {folder}: {_reason(error)}. "
            + ("" if download else "Set [data] download = true, or folder to where it lies.")
        ) from error
    labels = {side: _labels(part, dataset) for side, part in parts.items()}
    return _in_memory(parts, labels) or _Parts(f"torchvision's {dataset}", parts, labels)


def _in_memory(parts: Mapping[str, Any], labels: Mapping[str, Sequence[str]]) -> Dataset | None:
    """Return a data set of arrays if torchvision's `data` holds the images' pixels, else None."""
    arrays = []
    for part in parts.values():
        data = getattr(part, "data", None)
        array = None if data is None or not len(part) else np.asarray(data)
        if array is None or array.dtype != np.uint8 or len(array) != len(part):
            return None
        # the array is laid out differently from the images, such as channels first
        if not np.array_equal(array[0], np.asarray(part[0][0])):
            return None
        arrays.append(array)
    return ArrayDataset(
        np.concatenate(arrays),
        [label for side in parts for label in labels[side]],
        [f"{side or 'all'}/{i}" for side in parts for i in range(len(labels[side]))],
        splits=[side for side in parts for _ in labels[side]] if any(parts) else None,
    )


def _labels(part: Any, name: str) -> list[str]:
    """Return the labels as text, without decoding images if the class lists its labels."""
    values: Any = next(
        (v for t in _TARGETS if _is_list(v := getattr(part, t, None), len(part))), None
    )
    for listed in ("samples", "_samples", "imgs"):
        if values is None and _is_list(pairs := getattr(part, listed, None), len(part)):
            values = [pair[1] for pair in pairs or ()]
    if values is None:
        try:
            values = [part[i][1] for i in range(len(part))]
        except Exception as error:
            raise DataError(f"torchvision's {name} cannot be read: {_reason(error)}.") from error
    classes = getattr(part, "classes", None)
    names = list(classes) if isinstance(classes, list | tuple) else []
    return [_text(value, names, name) for value in values]


def _text(value: Any, classes: Sequence[Any], name: str) -> str:
    """Return a label as text, as its class's name if that is known."""
    plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if isinstance(plain, bool) or not isinstance(plain, int | str):
        raise DataError(
            f"torchvision's {name} has no class for each image, but {str(plain)[:60]!r}."
        )
    named = classes[plain] if isinstance(plain, int) and 0 <= plain < len(classes) else plain
    return named if isinstance(named, str) else str(plain)


def _is_list(value: Any, length: int) -> bool:
    return value is not None and hasattr(value, "__len__") and len(value) == length


def huggingface(
    source: str,
    image: str = "image",
    label: str = "label",
    config: str | None = None,
    train: str = "train",
    test: str | None = "test",
) -> Dataset:
    """Load images and labels through Hugging Face's `datasets`, from a saved folder or the hub.

    Code that comes with the data is not run.

    Args:
        source: a folder that `save_to_disk` wrote, or a name on the hub such as "ethz/food101",
            which is read from the user's cache if possible.
        image: name of the column of images.
        label: name of the column of labels, which are text, numbers or named classes.
        config: configuration of a data set on the hub.
        train: name of the training split.
        test: name of the test split. `None` means that the data have no split.

    Raises:
        MissingDependency: `datasets` is not installed.
        DataError: the data cannot be loaded, or have no such split or column.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency(
            "core.huggingface needs Hugging Face's datasets: pip install"
            " 'embedding-retrieval[huggingface]'"
        ) from error
    try:
        if Path(source).is_dir():
            loaded: Any = datasets.load_from_disk(source)
        else:
            loaded = datasets.load_dataset(source, config)
    except Exception as error:
        raise DataError(
            f"Hugging Face's datasets cannot load {source!r}: {_reason(error)}."
        ) from error
    whole = loaded if isinstance(loaded, Mapping) else {train: loaded}
    chosen = [train] if test is None or not isinstance(loaded, Mapping) else [train, test]
    problems = [
        f"it has no split '{side}' (it has: {', '.join(whole)}).{did_you_mean(side, whole)}"
        for side in chosen
        if side not in whole
    ]
    for side in chosen:
        for column in (image, label):
            if side in whole and column not in whole[side].column_names:
                columns = whole[side].column_names
                problems.append(
                    f"split '{side}' has no column '{column}' (it has:"
                    f" {', '.join(columns)}).{did_you_mean(column, columns)}"
                )
    if problems:
        refuse(source, problems)
    names = ("train", "test") if len(chosen) > 1 else ("",)
    parts, labels = {}, {}
    for name, side in zip(names, chosen, strict=True):
        feature = whole[side].features[label]
        texts = getattr(feature, "names", None)
        values = whole[side][label]
        labels[name] = [_named(value, texts) for value in values]
        parts[name] = _Column(whole[side], image)
    return usable(_Parts(source, parts, labels), source)


def _named(value: Any, names: Sequence[str] | None) -> str:
    """Return a label as text, or "" if it is missing (−1 for named classes)."""
    if is_missing(value) or (names and value == -1):
        return ""
    named = names and isinstance(value, int) and 0 <= value < len(names)
    return str(names[value]) if names and named else str(value)


class _Column:
    """A table's column of images, each as a tuple of the image alone."""

    def __init__(self, table: Any, name: str) -> None:
        self._table, self._name = table, name

    def __getitem__(self, index: int) -> tuple[Any]:
        return (self._table[index][self._name],)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
