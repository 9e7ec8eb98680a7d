"""Sets of labelled classes: Food-101, DTD, Caltech-101, Caltech-256 and CIFAR-100."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from retrieval.errors import DataError
from retrieval.helpers import Count, Counts, differing, read_records, refuse
from retrieval.plugin import ArrayDataset, Dataset, find_images

from retrieval_sets.published import Listing, Published, Row, documented, read_lines

FOOD = Published(
    "Food-101",
    "ETH Zürich (data.vision.ee.ethz.ch/cvl/datasets_extra/food-101)",
    "images/, meta/train.txt and meta/test.txt",
    {"train": [Count(75_750, 101)], "test": [Count(25_250, 101)]},
)
DTD = Published(
    "DTD",
    "Oxford (www.robots.ox.ac.uk/~vgg/data/dtd)",
    "images/ and labels/ with train1.txt, val1.txt and test1.txt to train10.txt, val10.txt and"
    " test10.txt",
    {side: [Count(1_880, 47)] for side in ("train", "validation", "test")},
)
CALTECH101 = Published(
    "Caltech-101",
    "Caltech (data.caltech.edu/records/mzrjq-6wc02)",
    "101_ObjectCategories/ with a folder for each class",
    {"": [Count(8_677, 101)]},
)
CALTECH256 = Published(
    "Caltech-256",
    "Caltech (data.caltech.edu/records/nyy15-4j048)",
    "256_ObjectCategories/ with a folder for each class",
    {"": [Count(29_780, 256)]},
)
# The files do not number the classes: the position of a name is its code.
_LISTS = {"fine": ("fine_label_names.txt", 100), "coarse": ("coarse_label_names.txt", 20)}


@documented
def food101(folder: Path, counts: Counts = "published", skip_bad: bool = False) -> Dataset:
    """Load Food-101: 101,000 photographs of 101 dishes, with their train and test split.

    Bossard, Guillaumin & Van Gool, "Food-101: Mining Discriminative Components with Random
    Forests", ECCV 2014. Nothing is downloaded.

    Args:
        folder: the folder `food-101`, or its parent.
    """
    names = {side: f"meta/{side}.txt" for side in ("train", "test")}
    listing = FOOD.listing(folder, "images", *names.values(), inside=["food-101"])
    _add_rows(listing, names, ".jpg")
    return listing.dataset(counts, skip_bad, images="images")


@documented
def dtd(
    folder: Path,
    partition: Annotated[int, Field(ge=1, le=10)] = 1,
    counts: Counts = "published",
    skip_bad: bool = False,
) -> Dataset:
    """Load the Describable Textures Dataset: 5,640 photographs of 47 textures.

    Cimpoi, Maji, Kokkinos, Mohamed & Vedaldi, "Describing Textures in the Wild", CVPR 2014. Nothing
    is downloaded. The training, validation and test sides have 40 images of each texture each.

    Args:
        folder: the folder `dtd`, or its parent.
        partition: number of the split, 1 to 10.
    """
    names = {
        "train": f"labels/train{partition}.txt",
        "validation": f"labels/val{partition}.txt",
        "test": f"labels/test{partition}.txt",
    }
    listing = DTD.listing(folder, "images", *names.values(), inside=["dtd"])
    _add_rows(listing, names, "")
    return listing.dataset(counts, skip_bad, images="images")


@documented
def caltech101(folder: Path, counts: Counts = "published", skip_bad: bool = False) -> Dataset:
    """Load Caltech-101: 8,677 photographs of 101 kinds of things, without the background class.

    Fei-Fei, Fergus & Perona, "Learning Generative Visual Models from Few Training Examples", CVPR
    workshop 2004. Nothing is downloaded. The data set has no split of its own; set
    `[split] by = "class"` or `"item"`.

    Args:
        folder: the folder `101_ObjectCategories`, or its parent.
    """
    return _folders(
        CALTECH101, "101_ObjectCategories", "BACKGROUND_Google", folder, counts, skip_bad
    )


@documented
def caltech256(folder: Path, counts: Counts = "published", skip_bad: bool = False) -> Dataset:
    """Load Caltech-256: 29,780 photographs of 256 kinds of things, without the clutter class.

    Griffin, Holub & Perona, "Caltech-256 Object Category Dataset", Caltech, CNS-TR-2007-001.
    Nothing is downloaded. The data set has no split of its own; set `[split] by = "class"` or
    `"item"`.

    Args:
        folder: the folder `256_ObjectCategories`, or its parent.
    """
    return _folders(CALTECH256, "256_ObjectCategories", "257.clutter", folder, counts, skip_bad)


def _add_rows(listing: Listing, names: Mapping[str, str], ending: str) -> None:
    """Add the images in the list of each side, whose lines are CLASS/NAME."""
    for side, name in names.items():
        for _, (word,) in read_lines(listing.root / name, 1, listing.problems):
            listing.rows.append(Row(f"{word}{ending}", word.split("/")[0], side))


def _folders(
    published: Published, name: str, left_out: str, folder: Path, counts: Counts, skip_bad: bool
) -> Dataset:
    """Return the data set of a folder with a subfolder per class, without the class `left_out`."""
    if folder.name == name and folder.is_dir():
        root = folder
    else:
        root = published.root(folder, name, inside=[]) / name
    listing = Listing(published, folder, root)
    images = find_images(root)
    if images.nowhere:
        # A dangling link is a fault, unless the user asked to skip what cannot be read.
        faults = listing.notes if skip_bad else listing.problems
        faults.append(images.dangling(root))
    for path in images.images:
        key = path.relative_to(root)
        if len(key.parts) == 2 and key.parts[0] != left_out:
            listing.rows.append(Row(key.as_posix(), key.parts[0], ""))
    return listing.dataset(counts, skip_bad)


@documented
def cifar100(
    folder: Path,
    labels: Literal["fine", "coarse"] = "fine",
    counts: Counts = "published",
) -> Dataset:
    """Load CIFAR-100: 60,000 colour images of 32 × 32 pixels, with their train and test split.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. This reads the
    *binary version*; the version for Python consists of pickles, which are never read. A coarse
    class has five fine classes. The metadata of an item have the names of both.

    Args:
        folder: the folder `cifar-100-binary` with `train.bin`, `test.bin`, `fine_label_names.txt`
            and `coarse_label_names.txt`.
        labels: whether the labels are the 100 fine or the 20 coarse classes.
    """
    count = _LISTS[labels][1]
    published = Published(
        "CIFAR-100",
        "the University of Toronto, in its binary version (www.cs.toronto.edu/~kriz/cifar.html)",
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
    images = []
    metadata = []
    splits = []
    keys = []
    for side in ("train", "test"):
        pixels, codes = read_records(root / f"{side}.bin", (20, 100), "CIFAR-100")
        images.append(pixels)
        metadata += [
            {"coarse": names["coarse"][c], "fine": names["fine"][f]} for c, f in codes.tolist()
        ]
        splits += [side] * len(pixels)
        keys += [f"{side}/{i}" for i in range(len(pixels))]
    label_texts = [row[labels] for row in metadata]
    sides = {
        side: [x for x, s in zip(label_texts, splits, strict=True) if s == side]
        for side in ("train", "test")
    }
    if counts == "published" and (problems := differing(published.counts, sides)):
        refuse(f"{folder} ({published.title})", [*problems, published.advice])
    return ArrayDataset(np.concatenate(images), label_texts, keys, splits=splits, metadata=metadata)


def _names(path: Path, count: int) -> list[str]:
    """Return the `count` class names of a text file."""
    try:
        names = path.read_text(encoding="ascii").split()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    # A code beyond the list of names would fail much later, and without the file's name.
    if len(names) != count:
        raise DataError(f"{path} has {len(names):,} names instead of {count}.")
    return names
