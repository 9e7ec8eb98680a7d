"""CUB-200-2011: birds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from retrieval.data.counts import Count, Counts
from retrieval.data.datasets import Box
from retrieval.plugin import Dataset

from retrieval_sets.lists import Lines, numbers
from retrieval_sets.published import Published, Row, assemble

_CLASSES = 200
_HOLDS = (
    "images/, images.txt, image_class_labels.txt, classes.txt and bounding_boxes.txt, as"
    " CUB_200_2011.tgz unpacks them"
)
_HOME = "Caltech (Caltech-UCSD Birds-200-2011, www.vision.caltech.edu/datasets/cub_200_2011)"
CUB = Published(
    "CUB-200-2011", _HOME, _HOLDS, {"train": [Count(5_864, 100)], "test": [Count(5_924, 100)]}
)
CUB_OFFICIAL = Published(
    "CUB-200-2011",
    _HOME,
    f"train_test_split.txt beside {_HOLDS}",
    {"train": [Count(5_994, 200)], "test": [Count(5_794, 200)]},
)
_FILES = ("images", "images.txt", "image_class_labels.txt", "classes.txt", "bounding_boxes.txt")


def cub200(
    folder: Path,
    protocol: Literal["classes", "official"] = "classes",
    crop: bool = False,
    counts: Counts = "published",
    skip_bad: bool = False,
) -> Dataset:
    """Load CUB-200-2011: 11,788 photographs of 200 species of birds, with a box each.

    Wah, Branson, Welinder, Perona & Belongie, "The Caltech-UCSD Birds-200-2011 Dataset", Caltech,
    CNS-TR-2011-001. Nothing is downloaded. The first 100 species train (5,864 images) and the
    others test (5,924): Oh Song, Xiang, Jegelka & Savarese, "Deep Metric Learning via Lifted
    Structured Feature Embedding", CVPR 2016, which does not use the boxes.

    Args:
        folder: the folder `CUB_200_2011`, or the one that holds it.
        protocol: "classes" is that split by species; "official" the makers' `train_test_split.txt`,
            with all species on both sides.
        crop: whether images are cut to the birds' boxes.
        counts: "published" refuses a folder with other numbers than the published ones; "any" takes
            what is there.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one
            ends the run.

    Raises:
        DataError: with every problem: missing files, wrong lines, other numbers than the published
            ones.
    """
    official = protocol == "official"
    published = CUB_OFFICIAL if official else CUB
    files = (*_FILES, "train_test_split.txt") if official else _FILES
    root = published.root(folder, *files, inside=["CUB_200_2011"])
    problems: list[str] = []
    paths = _column(root / "images.txt", problems)
    classes = {
        name: number
        for key, name in _column(root / "classes.txt", problems).items()
        if (number := _number(root / "classes.txt", key, problems, _CLASSES)) is not None
    }
    names = {number: name for name, number in classes.items()}
    labels = {
        key: number
        for key, text in _column(root / "image_class_labels.txt", problems).items()
        if (number := _number(root / "image_class_labels.txt", text, problems, _CLASSES))
        is not None
    }
    boxes = _boxes(root / "bounding_boxes.txt", problems)
    trains = _column(root / "train_test_split.txt", problems) if official else {}
    rows = []
    for key, path in paths.items():
        number = labels.get(key)
        if number is None or number not in names:
            problems.append(f"{path} has no class in image_class_labels.txt and classes.txt.")
            continue
        if crop and key not in boxes:
            problems.append(f"{path} has no box in bounding_boxes.txt.")
        trained = trains.get(key) == "1" if official else number <= _CLASSES // 2
        rows.append(Row(path, names[number], "train" if trained else "test", box=boxes.get(key)))
    return assemble(
        published,
        root / "images",
        rows,
        problems,
        counts,
        where=folder,
        crop=crop,
        skip_bad=skip_bad,
    )


def _column(path: Path, problems: list[str]) -> dict[str, str]:
    """Return the second of a list's two columns by the first."""
    lines = Lines(path, 2)
    found = {words[0]: words[1] for _, words in lines}
    problems += lines.problems
    return found


def _number(path: Path, text: str, problems: list[str], last: int) -> int | None:
    found = numbers(path, None, [text], problems, 1, last)
    return None if found is None else found[0]


def _boxes(path: Path, problems: list[str]) -> dict[str, Box]:
    """Return the boxes, which the file has as left, top, width and height."""
    lines = Lines(path, 5)
    found: dict[str, Box] = {}
    for line, (key, *words) in lines:
        try:
            left, top, width, height = map(float, words)
        except ValueError:
            problems.append(f"{path.name}, line {line}: {' '.join(words)} are not four numbers.")
            continue
        found[key] = (left, top, left + width, top + height)
    problems += lines.problems
    return found
