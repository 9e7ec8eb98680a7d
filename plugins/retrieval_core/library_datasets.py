"""Data sets that torchvision and Hugging Face's `datasets` read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrieval.errors import DataError, did_you_mean, first_line, needing
from retrieval.helpers import as_dataset, refuse, usable_dataset
from retrieval.plugin import Dataset

_FOLDERS = "Export its images into one folder per class, and use core.image_folder"
# A pickle can run any code, so no file of a user is unpickled.
_PICKLED = {
    "CIFAR10": "Use core.cifar10",
    "CIFAR100": "Use sets.cifar100",
    "LSUN": _FOLDERS,
    "LSUNClass": _FOLDERS,
}


def torchvision_dataset(
    dataset: str,
    folder: Path,
    download: bool = False,
    options: dict[str, Any] | None = None,
) -> Dataset:
    """Load a data set of labelled images through torchvision, with its training and test side.

    Labels are class names if torchvision knows them, otherwise its class numbers. Data sets that
    torchvision reads by unpickling a file are not allowed. CIFAR-10 and CIFAR-100 have other
    readers: `core.cifar10` and `sets.cifar100`.

    Args:
        dataset: name of the Python class in `torchvision.datasets`, such as "Flowers102" or
            "OxfordIIITPet".
        folder: the folder of the data, which the Python class gets as `root`.
        download: whether torchvision may download the data.
        options: further arguments of the Python class, for both sides.

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
            f"[data] options: torchvision's {dataset} has no parameter {', '.join(wrong)}. It has"
            f" {', '.join(takes) or 'none'}."
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
        parts = {side: make(folder, **arguments, **choice) for side, choice in sides.items()}
    except Exception as error:  # each class raises its own errors
        raise DataError(
            f"torchvision's {dataset} cannot be read from {folder}: {first_line(error)}. "
            + (
                ""
                if download
                else "Set [data] download = true, or set folder to the folder of the data."
            )
        ) from error
    if len(parts) > 1:
        data = parts
    else:
        data = parts[""]
    return as_dataset(data, name=f"torchvision's {dataset}")


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
    with needing("core.huggingface needs Hugging Face's datasets", "huggingface"):
        import datasets
    try:
        if Path(source).is_dir():
            loaded: Any = datasets.load_from_disk(source)
        else:
            loaded = datasets.load_dataset(source, config)
    except Exception as error:
        raise DataError(
            f"Hugging Face's datasets cannot load {source!r}: {first_line(error)}."
        ) from error
    if isinstance(loaded, Mapping):
        splits = loaded
    else:
        splits = {train: loaded}
    if test is None or not isinstance(loaded, Mapping):
        chosen = [train]
    else:
        chosen = [train, test]
    problems = [
        f"there is no split '{side}', only {', '.join(splits)}.{did_you_mean(side, splits)}"
        for side in chosen
        if side not in splits
    ]
    for side in chosen:
        for column in (image, label):
            if side in splits and column not in splits[side].column_names:
                columns = splits[side].column_names
                problems.append(
                    f"split '{side}' has no column '{column}', only"
                    f" {', '.join(columns)}.{did_you_mean(column, columns)}"
                )
    if problems:
        refuse(source, problems)
    if len(chosen) > 1:
        sides = {"train": splits[train], "test": splits[test]}
    else:
        sides = splits[train]
    return usable_dataset(as_dataset(sides, image=image, label=label, name=source), source)
