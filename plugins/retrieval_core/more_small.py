"""EMNIST and CIFAR-10 from the files that their makers publish; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from retrieval import DataError, Dataset
from retrieval.data.datasets import ArrayDataset
from retrieval.data.idx import read_idx

Pixels = NDArray[np.uint8]

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SIDE = 32
_RECORD = 1 + 3 * _SIDE * _SIDE
_MOST_RECORDS = 1_000_000


def emnist(
    folder: Path,
    variant: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = "balanced",
) -> Dataset:
    """Load EMNIST: handwritten letters and digits of 28 × 28 pixels, with their train and test split.

    Cohen, Afshar, Tapson & van Schaik, "EMNIST: an extension of MNIST to handwritten letters", 2017. Its files hold images with
    rows and columns exchanged; they are turned back. Labels are the file's numbers; each item's metadata gives the character
    where the file of the mapping is there.

    Args:
        folder: folder of the four idx files `emnist-VARIANT-train-images-idx3-ubyte` and so on, gzipped or not.
        variant: which of its splits: "balanced" has 47 classes.

    Raises:
        DataError: a file is missing or damaged, or images and labels do not belong together.
    """
    if not folder.is_dir():
        raise DataError(f"[data] folder: {folder} is not a folder.")
    images, numbers, splits, keys = [], [], [], []
    for split in ("train", "test"):
        pixels = read_idx(_file(folder, f"emnist-{variant}-{split}-images-idx3-ubyte"), 3)
        labels = read_idx(_file(folder, f"emnist-{variant}-{split}-labels-idx1-ubyte"), 1)
        if len(pixels) != len(labels):
            raise DataError(
                f"EMNIST's {split} files in {folder} hold {len(pixels):,} images and {len(labels):,} labels; they do not belong together."
            )
        images.append(pixels.transpose(0, 2, 1))
        numbers += labels.tolist()
        splits += [split] * len(pixels)
        keys += [f"{split}/{i}" for i in range(len(pixels))]
    if images[0].shape[1:] != images[1].shape[1:]:
        raise DataError(f"EMNIST's train and test images in {folder} are of different sizes.")
    characters = _mapping(folder / f"emnist-{variant}-mapping.txt")
    metadata = None if characters is None else [{"character": characters.get(n, "")} for n in numbers]
    return ArrayDataset(
        np.ascontiguousarray(np.concatenate(images)), [str(n) for n in numbers], keys, splits=splits, metadata=metadata
    )  # fmt: skip


def cifar10(folder: Path, grey: bool = False) -> Dataset:
    """Load CIFAR-10: 60,000 colour images of 32 × 32 pixels in ten classes, with their train and test split.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, in its *binary version*: the version for Python is
    made of pickles, which are never read. Labels are class names ("airplane").

    Args:
        folder: folder of `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.
        grey: whether to make grey images, 0.299 R + 0.587 G + 0.114 B, as OpenCV does.

    Raises:
        DataError: a file is missing, is not of whole records, or holds a label beyond 9.
    """
    if not folder.is_dir():
        raise DataError(f"[data] folder: {folder} is not a folder.")
    images, numbers, splits, keys = [], [], [], []
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for name in names:
        pixels, labels = _batch(folder / name, grey)
        split = "test" if name.startswith("test") else "train"
        images.append(pixels)
        numbers += labels
        splits += [split] * len(labels)
        keys += [f"{name.removesuffix('.bin')}/{i}" for i in range(len(labels))]
    return ArrayDataset(np.concatenate(images), [CIFAR_CLASSES[n] for n in numbers], keys, splits=splits)


def _batch(path: Path, grey: bool) -> tuple[Pixels, list[int]]:
    """Return images (N, 32, 32, 3), or grey (N, 32, 32), and labels of a file: a byte of label, then red, green and blue planes."""
    try:
        size = path.stat().st_size
        if not size or size % _RECORD or size // _RECORD > _MOST_RECORDS:
            raise DataError(
                f"{path} has {size:,} bytes; a file of CIFAR-10's binary version is made of records of {_RECORD:,} bytes."
            )
        records = np.fromfile(path, dtype=np.uint8).reshape(-1, _RECORD)
    except FileNotFoundError:
        raise DataError(
            f"{path} is not there. CIFAR-10's binary version has data_batch_1.bin to data_batch_5.bin and test_batch.bin; the version "
            "for Python (pickles) is not read."
        ) from None
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror}.") from fault
    labels = records[:, 0]
    if labels.max() >= len(CIFAR_CLASSES):
        raise DataError(
            f"{path}: record {int(labels.argmax())} has the label {int(labels.max())}; labels go from 0 to 9."
        )
    pixels = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1))
    if grey:
        pixels = np.rint(pixels @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)
    return pixels, labels.tolist()


def _file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder} holds neither {name} nor {name}.gz.")


def _mapping(path: Path) -> dict[int, str] | None:
    """Return the characters of the labels from "label code [code]" lines, or None where the file is missing."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return {int(words[0]): chr(int(words[1])) for words in map(str.split, lines) if words}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, IndexError, OverflowError) as fault:
        raise DataError(f"{path} should hold lines of a label and a character's code: {fault}.") from fault
