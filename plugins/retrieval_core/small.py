"""Two small data sets of images that need no preparation."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from retrieval.data.cache import cache_folder
from retrieval.data.datasets import ArrayDataset
from retrieval.data.idx import read_idx
from retrieval.errors import DataError
from retrieval.plugin import Dataset

from retrieval_core.pretrained import fetch

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


def digits() -> Dataset:
    """Load 1,797 handwritten digits of 8 × 8 pixels, which come with scikit-learn: nothing is
    downloaded.

    Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
    1998.
    """
    values, numbers = _digits()
    pixels = np.rint(values.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)  # 17 levels of grey
    labels = [str(int(number)) for number in numbers]
    return ArrayDataset(pixels, labels, [f"digits/{i}" for i in range(len(labels))])


def _digits() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the pixels (N, 64), 0 to 16, and the labels (N,)."""
    found = find_spec("sklearn")
    file = Path(str(found and found.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():  # read as it lies: loading scikit-learn, with SciPy and pandas, takes most of a small run's start
        rows = np.loadtxt(file, delimiter=",")
        return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits

    values, numbers = load_digits(return_X_y=True)
    return values, numbers


def fashion_mnist(folder: Path | None = None, download: bool = False) -> Dataset:
    """Load Fashion-MNIST: 70,000 grey images of 28 × 28 pixels in ten classes, "0" to "9", with its
    train and test split.

    Xiao, Rasul & Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
    Algorithms", 2017. Each item's metadata names its class ("Sneaker").

    Args:
        folder: folder of its four idx files, gzipped or not; by default where Debian's package
            `dataset-fashion-mnist` puts them, or where an earlier download went.
        download: whether to download it (by torchvision, 30 MB) when it is in none of those places.

    Raises:
        DataError: the data set is missing, a file is damaged, or the download failed.
    """
    source = _fashion_folder(folder, download)
    images, numbers, splits = [], [], []
    for split, prefix in (("train", "train"), ("test", "t10k")):
        pixels = read_idx(_file(source, f"{prefix}-images-idx3-ubyte"), 3)
        classes = read_idx(_file(source, f"{prefix}-labels-idx1-ubyte"), 1)
        if len(pixels) != len(classes) or (len(classes) and classes.max() >= len(FASHION)):
            raise DataError(f"The {split} images and labels in {source} do not belong together.")
        images.append(pixels)
        numbers += classes.tolist()
        splits += [split] * len(pixels)
    keys = [
        f"{split}/{i}"
        for split, part in zip(("train", "test"), images, strict=True)
        for i in range(len(part))
    ]
    named = [{"class": name} for name in FASHION]
    return ArrayDataset(
        np.concatenate(images),
        [str(number) for number in numbers],
        keys,
        splits=splits,
        metadata=[named[number] for number in numbers],
    )


def _fashion_folder(folder: Path | None, download: bool) -> Path:
    if folder is not None:
        if not folder.is_dir():
            raise DataError(f"[data] folder: {folder} is not a folder.")
        return folder
    downloads = cache_folder() / "datasets"
    raw = downloads / "FashionMNIST" / "raw"
    for place in (DEBIAN, raw):
        if place.is_dir() and any(place.iterdir()):
            return place
    if not download:
        raise DataError(
            "Fashion-MNIST is not on this machine. Set [data] download = true, or folder to where"
            " its four idx files are; on Debian: apt install dataset-fashion-mnist."
        )
    from torchvision.datasets import FashionMNIST

    fetch(
        "The files of Fashion-MNIST",
        "set [data] folder",
        lambda: FashionMNIST(str(downloads), download=True),
    )
    return raw


def _file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"{folder} holds neither {name} nor {name}.gz.")
