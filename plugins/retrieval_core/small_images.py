"""Data sets of small images: digits, Fashion-MNIST, EMNIST and CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from retrieval.base.arrays import Floats64, Pixels
from retrieval.errors import DataError
from retrieval.helpers import Count, Counts, cache_folder, differing, read_idx, read_records, refuse
from retrieval.plugin import ArrayDataset, Dataset

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
CIFAR_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
CIFAR_COUNTS = {"train": [Count(50_000, 10)], "test": [Count(10_000, 10)]}
EMNIST_COUNTS = {
    "balanced": ((112_800, 47), (18_800, 47)),
    "byclass": ((697_932, 62), (116_323, 62)),
    "bymerge": ((697_932, 47), (116_323, 47)),
    "digits": ((240_000, 10), (40_000, 10)),
    "letters": ((124_800, 26), (20_800, 26)),
    "mnist": ((60_000, 10), (10_000, 10)),
}
"""Numbers of images and classes in the train and test splits of each variant.

The paper's table has fewer letters (88,800 and 14,800) than the files.
"""


def digits() -> Dataset:
    """Load scikit-learn's 1,797 handwritten digits of 8 × 8 pixels; nothing is downloaded.

    Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
    1998.
    """
    values, numbers = _digits()
    # The file has 17 levels of grey, 0 to 16.
    pixels = np.rint(values.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = [str(int(number)) for number in numbers]
    return ArrayDataset(pixels, labels, [f"digits/{i}" for i in range(len(labels))])


def _digits() -> tuple[Floats64, Floats64]:
    """Return the pixels (N, 64), 0 to 16, and the labels (N,)."""
    package = find_spec("sklearn")
    file = Path(str(package and package.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    # importing scikit-learn, with SciPy and pandas, takes most of a small run's start time
    if file.is_file():
        rows = np.loadtxt(file, delimiter=",")
        return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits

    values, numbers = load_digits(return_X_y=True)
    return values, numbers


def fashion_mnist(folder: Path | None = None, download: bool = False) -> Dataset:
    """Load Fashion-MNIST: 70,000 grey images of 28 × 28 pixels in ten classes, with its split.

    Xiao, Rasul & Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms", 2017. The metadata of each item give the name of its class, such as "Sneaker".

    Args:
        folder: folder of the four idx files, gzipped or not. By default it is the folder of
            Debian's package `dataset-fashion-mnist`, or the folder of an earlier download.
        download: whether to download the data (30 MB, through torchvision) if they are in neither
            folder.

    Raises:
        DataError: the data set is missing, a file is damaged, or the download failed.
    """
    source = _fashion_folder(folder, download)
    parts = []
    for split, prefix in (("train", "train"), ("test", "t10k")):
        pixels, classes = _idx_pair(source, prefix)
        if len(pixels) != len(classes) or (len(classes) and classes.max() >= len(FASHION)):
            raise DataError(f"The {split} images and labels in {source} do not belong together.")
        parts.append(Part(split, split, pixels, classes.tolist()))
    return _joined(parts, str, [{"class": name} for name in FASHION].__getitem__)


def _fashion_folder(folder: Path | None, download: bool) -> Path:
    if folder is not None:
        if not folder.is_dir():
            raise DataError(f"[data] folder: {folder} is not a folder.")
        return folder
    downloads = cache_folder() / "datasets"
    raw = downloads / "FashionMNIST" / "raw"
    for candidate in (DEBIAN, raw):
        if candidate.is_dir() and any(candidate.iterdir()):
            return candidate
    if not download:
        raise DataError(
            "Fashion-MNIST is not on this machine. Set [data] download = true, or set folder to the"
            " folder of its four idx files. On Debian: apt install dataset-fashion-mnist."
        )
    # Only a download needs these; they import torch and torchvision.
    from retrieval.helpers import fetch
    from torchvision.datasets import FashionMNIST

    fetch(
        "The files of Fashion-MNIST",
        "set [data] folder",
        lambda: FashionMNIST(str(downloads), download=True),
    )
    return raw


def _idx_pair(folder: Path, prefix: str) -> tuple[Pixels, Pixels]:
    """Return images (N, H, W) and labels (N,) from two idx files."""
    images = _file(folder, f"{prefix}-images-idx3-ubyte")
    return read_idx(images, 3), read_idx(_file(folder, f"{prefix}-labels-idx1-ubyte"), 1)


def _file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder} holds neither {name} nor {name}.gz.")


def emnist(
    folder: Path,
    variant: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = "balanced",
    counts: Counts = "published",
) -> Dataset:
    """Load EMNIST: handwritten letters and digits of 28 × 28 pixels, with their split.

    Cohen, Afshar, Tapson & van Schaik, "EMNIST: an extension of MNIST to handwritten letters",
    2017. The files hold transposed images, which are transposed back. Labels are the file's
    numbers.

    Args:
        folder: folder of the four idx files `emnist-VARIANT-train-images-idx3-ubyte` and so on,
            gzipped or not.
        variant: which of EMNIST's splits to load; "balanced" has 47 classes.
        counts: "published" requires the published numbers of images and classes; "any" accepts
            any.

    Raises:
        DataError: a file is missing or damaged, or images and labels do not belong together.
    """
    if not folder.is_dir():
        raise DataError(f"[data] folder: {folder} is not a folder.")
    parts = []
    for split in ("train", "test"):
        pixels, labels = _idx_pair(folder, f"emnist-{variant}-{split}")
        if len(pixels) != len(labels):
            raise DataError(
                f"EMNIST's {split} files in {folder} hold {len(pixels):,} images and"
                f" {len(labels):,} labels; they do not belong together."
            )
        parts.append(Part(split, split, pixels.transpose(0, 2, 1), labels.tolist()))
    if counts == "published":
        sides = zip(("train", "test"), EMNIST_COUNTS[variant], strict=True)
        published = {side: [Count(*count)] for side, count in sides}
        _check_counts(f"{folder} (EMNIST {variant})", published, parts)
    if parts[0].pixels.shape[1:] != parts[1].pixels.shape[1:]:
        raise DataError(f"EMNIST's train and test images in {folder} are of different sizes.")
    return _joined(parts, str)


def cifar10(folder: Path, counts: Counts = "published") -> Dataset:
    """Load CIFAR-10: 60,000 colour images of 32 × 32 pixels in ten classes, with their split.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. This reads the
    *binary version*; the version for Python consists of pickles, which are never read. Labels are
    class names, such as "airplane".

    Args:
        folder: folder of `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.
        counts: "published" requires the published numbers of images and classes; "any" accepts
            any.

    Raises:
        DataError: a file is missing, ends within a record, or holds a label above 9.
    """
    if not folder.is_dir():
        raise DataError(f"[data] folder: {folder} is not a folder.")
    parts = []
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for name in names:
        if not (folder / name).is_file():
            raise DataError(
                f"{folder / name} is missing. CIFAR-10's binary version has data_batch_1.bin to"
                " data_batch_5.bin and test_batch.bin; the version for Python (pickles) is not"
                " read."
            )
        pixels, codes = read_records(folder / name, (len(CIFAR_CLASSES),), "CIFAR-10")
        if name.startswith("test"):
            split = "test"
        else:
            split = "train"
        parts.append(Part(name.removesuffix(".bin"), split, pixels, codes[:, 0].tolist()))
    if counts == "published":
        _check_counts(f"{folder} (CIFAR-10)", CIFAR_COUNTS, parts)
    return _joined(parts, CIFAR_CLASSES.__getitem__)


class Part(NamedTuple):
    """Images of one side with the numbers of their classes; `name` begins their keys."""

    name: str
    split: str
    pixels: Pixels
    numbers: list[int]


def _joined(
    parts: Sequence[Part],
    label: Callable[[int], str],
    metadata: Callable[[int], Mapping[str, Any]] | None = None,
) -> Dataset:
    """Return one data set of all parts; a class's number gives its label and metadata."""
    numbers = [number for part in parts for number in part.numbers]
    return ArrayDataset(
        np.ascontiguousarray(np.concatenate([part.pixels for part in parts])),
        list(map(label, numbers)),
        [f"{part.name}/{i}" for part in parts for i in range(len(part.numbers))],
        splits=[part.split for part in parts for _ in part.numbers],
        metadata=None if metadata is None else list(map(metadata, numbers)),
    )


def _check_counts(
    what: str, published: Mapping[str, Sequence[Count]], parts: Sequence[Part]
) -> None:
    """Raise a `DataError` if the numbers of images or classes differ from the published ones."""
    sides: dict[str, list[str]] = {}
    for part in parts:
        sides.setdefault(part.split, []).extend(map(str, part.numbers))
    if problems := differing(published, sides):
        refuse(what, problems)
