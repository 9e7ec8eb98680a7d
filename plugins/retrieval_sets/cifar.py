"""CIFAR-100."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from retrieval.data.counts import Count, Counts, differing
from retrieval.data.datasets import ArrayDataset
from retrieval.data.error_lists import refuse
from retrieval.data.records import read_records
from retrieval.errors import DataError
from retrieval.plugin import Dataset

from retrieval_sets.published import Published

_LISTS = {"fine": ("fine_label_names.txt", 100), "coarse": ("coarse_label_names.txt", 20)}


def cifar100(
    folder: Path,
    labels: Literal["fine", "coarse"] = "fine",
    grey: bool = False,
    counts: Counts = "published",
) -> Dataset:
    """Load CIFAR-100: 60,000 colour images of 32 × 32 pixels, with their train and test split.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, in its *binary
    version*: the version for Python is made of pickles, which are never read. Each of 20 coarse
    classes has five fine ones; an item's metadata has both names.

    Args:
        folder: the folder `cifar-100-binary` with `train.bin`, `test.bin`, `fine_label_names.txt`
            and `coarse_label_names.txt`.
        labels: which classes are the labels: 100 fine ones, or 20 coarse ones.
        grey: whether to make grey images, 0.299 R + 0.587 G + 0.114 B, as OpenCV does.
        counts: "published" refuses files with other numbers than the published ones; "any" takes
            what is there.

    Raises:
        DataError: a file is missing, is not of whole records, holds a label that is too large, or
            other numbers than published.
    """
    count = _LISTS[labels][1]
    published = Published(
        "CIFAR-100",
        "Toronto, in its binary version (www.cs.toronto.edu/~kriz/cifar.html)",
        "train.bin, test.bin, fine_label_names.txt and coarse_label_names.txt",
        {"train": [Count(50_000, count)], "test": [Count(10_000, count)]},
    )
    root = published.root(
        folder,
        "train.bin",
        "test.bin",
        *(n for n, _ in _LISTS.values()),
        inside=["cifar-100-binary"],
    )
    names = {kind: _names(root / name, classes) for kind, (name, classes) in _LISTS.items()}
    images, metadata, splits, keys = [], [], [], []
    for side in ("train", "test"):
        pixels, codes = read_records(root / f"{side}.bin", (20, 100), "CIFAR-100", grey)
        images.append(pixels)
        metadata += [
            {"coarse": names["coarse"][c], "fine": names["fine"][f]} for c, f in codes.tolist()
        ]
        splits += [side] * len(pixels)
        keys += [f"{side}/{i}" for i in range(len(pixels))]
    found = [row[labels] for row in metadata]
    sides = {
        side: [x for x, s in zip(found, splits, strict=True) if s == side]
        for side in ("train", "test")
    }
    if counts == "published" and (problems := differing(published.counts, sides)):
        refuse(f"{folder} ({published.title})", [*problems, published.advice])
    return ArrayDataset(np.concatenate(images), found, keys, splits=splits, metadata=metadata)


def _names(path: Path, count: int) -> list[str]:
    try:
        names = path.read_text(encoding="ascii").split()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    if len(names) != count:
        raise DataError(f"{path} has {len(names):,} names; it should have {count}.")
    return names
