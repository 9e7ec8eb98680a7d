"""Sets of classes in folders: Food-101, DTD, Caltech-101 and Caltech-256."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field
from retrieval.data.counts import Count, Counts
from retrieval.plugin import Dataset
from retrieval.serving.image_files import find_images

from retrieval_sets.lists import Lines
from retrieval_sets.published import Published, Row, assemble

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


def food101(folder: Path, counts: Counts = "published", skip_bad: bool = False) -> Dataset:
    """Load Food-101: 101,000 photographs of 101 dishes, with their train and test split.

    Bossard, Guillaumin & Van Gool, "Food-101: Mining Discriminative Components with Random
    Forests", ECCV 2014. Nothing is downloaded.

    Args:
        folder: the folder `food-101`, or the one that holds it.
        counts: "published" refuses a folder with other numbers than the published ones; "any" takes
            what is there.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one
            ends the run.

    Raises:
        DataError: with every problem: missing files, wrong lines, other numbers than the published
            ones.
    """
    root = FOOD.root(folder, "images", "meta/train.txt", "meta/test.txt", inside=["food-101"])
    problems: list[str] = []
    lists = {side: root / "meta" / f"{side}.txt" for side in ("train", "test")}
    rows = [row for side, path in lists.items() for row in _listed(path, side, ".jpg", problems)]
    return assemble(FOOD, root / "images", rows, problems, counts, where=folder, skip_bad=skip_bad)


def dtd(
    folder: Path,
    partition: Annotated[int, Field(ge=1, le=10)] = 1,
    counts: Counts = "published",
    skip_bad: bool = False,
) -> Dataset:
    """Load the Describable Textures Dataset: 5,640 photographs of 47 textures, with one of its ten
    splits.

    Cimpoi, Maji, Kokkinos, Mohamed & Vedaldi, "Describing Textures in the Wild", CVPR 2014. Nothing
    is downloaded. Each of train, validation and test has 40 images of each texture.

    Args:
        folder: the folder `dtd`, or the one that holds it.
        partition: which of the ten splits.
        counts: "published" refuses a folder with other numbers than the published ones; "any" takes
            what is there.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one
            ends the run.

    Raises:
        DataError: with every problem: missing files, wrong lines, other numbers than the published
            ones.
    """
    names = {
        "train": f"train{partition}",
        "validation": f"val{partition}",
        "test": f"test{partition}",
    }
    root = DTD.root(
        folder, "images", *(f"labels/{name}.txt" for name in names.values()), inside=["dtd"]
    )
    problems: list[str] = []
    rows = [
        row
        for side, name in names.items()
        for row in _listed(root / "labels" / f"{name}.txt", side, "", problems)
    ]
    return assemble(DTD, root / "images", rows, problems, counts, where=folder, skip_bad=skip_bad)


def caltech101(folder: Path, counts: Counts = "published", skip_bad: bool = False) -> Dataset:
    """Load Caltech-101: 8,677 photographs of 101 kinds of things; the class of background pictures
    is left out.

    Fei-Fei, Fergus & Perona, "Learning Generative Visual Models from Few Training Examples", CVPR
    workshop 2004. Nothing is downloaded. It has no split of its own: `[split] by = "class"` or
    `"item"`.

    Args:
        folder: the folder `101_ObjectCategories`, or the one that holds it.
        counts: "published" refuses a folder with other numbers than the published ones; "any" takes
            what is there.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one
            ends the run.

    Raises:
        DataError: with every problem: missing files, other numbers than the published ones.
    """
    return _folders(
        CALTECH101, "101_ObjectCategories", "BACKGROUND_Google", folder, counts, skip_bad
    )


def caltech256(folder: Path, counts: Counts = "published", skip_bad: bool = False) -> Dataset:
    """Load Caltech-256: 29,780 photographs of 256 kinds of things; the class of clutter is left
    out.

    Griffin, Holub & Perona, "Caltech-256 Object Category Dataset", Caltech, CNS-TR-2007-001.
    Nothing is downloaded. It has no split of its own: `[split] by = "class"` or `"item"`.

    Args:
        folder: the folder `256_ObjectCategories`, or the one that holds it.
        counts: "published" refuses a folder with other numbers than the published ones; "any" takes
            what is there.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one
            ends the run.

    Raises:
        DataError: with every problem: missing files, other numbers than the published ones.
    """
    return _folders(CALTECH256, "256_ObjectCategories", "257.clutter", folder, counts, skip_bad)


def _listed(path: Path, side: str, ending: str, problems: list[str]) -> list[Row]:
    """Return the images of a list of CLASS/NAME."""
    lines = Lines(path, 1)
    rows = [Row(f"{word}{ending}", word.split("/")[0], side) for _, (word,) in lines]
    problems += lines.problems
    return rows


def _folders(
    published: Published, name: str, left_out: str, folder: Path, counts: Counts, skip_bad: bool
) -> Dataset:
    """Return the images of a folder with a folder for each class, all but one of these."""
    root = (
        folder
        if folder.name == name and folder.is_dir()
        else published.root(folder, name, inside=[]) / name
    )
    found = find_images(root)
    keys = [path.relative_to(root) for path in found.images]
    dangling = [found.dangling(root)] if found.nowhere else []
    rows = [
        Row(key.as_posix(), key.parts[0], "")
        for key in keys
        if len(key.parts) == 2 and key.parts[0] != left_out
    ]
    problems, notes = ([], dangling) if skip_bad else (dangling, [])
    return assemble(
        published, root, rows, problems, counts, where=folder, skip_bad=skip_bad, notes=notes
    )
