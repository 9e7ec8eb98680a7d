"""Cars-196: cars, in both of its layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from retrieval.data.counts import Count, Counts
from retrieval.errors import DataError
from retrieval.plugin import Dataset

from retrieval_sets.mat import read_annotations
from retrieval_sets.published import Published, Row, assemble

_CLASSES = 196
_HOME = "Stanford (ai.stanford.edu/~jkrause/cars/car_dataset.html) or a mirror of it"
_HOLDS = (
    "car_ims/ and cars_annos.mat, or cars_train/, cars_test/ and devkit/ with cars_train_annos.mat"
    " and cars_test_annos_withlabels.mat"
)
CARS = Published(
    "Cars-196", _HOME, _HOLDS, {"train": [Count(8_054, 98)], "test": [Count(8_131, 98)]}
)
CARS_OFFICIAL = Published(
    "Cars-196", _HOME, _HOLDS, {"train": [Count(8_144, 196)], "test": [Count(8_041, 196)]}
)
_BOX = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")


def cars196(
    folder: Path,
    protocol: Literal["classes", "official"] = "classes",
    crop: bool = False,
    counts: Counts = "published",
    skip_bad: bool = False,
) -> Dataset:
    """Load Cars-196: 16,185 photographs of 196 models of cars, with a box each.

    Krause, Stark, Deng & Fei-Fei, "3D Object Representations for Fine-Grained Categorization", 3dRR
    2013. Nothing is downloaded. Both layouts are read: `car_ims/` with `cars_annos.mat`, and
    `cars_train/`, `cars_test/` with the two files of annotations of `devkit/`. The first 98 models
    train (8,054 images) and the others test (8,131): Oh Song et al., CVPR 2016, without the boxes.

    Args:
        folder: the folder that holds them.
        protocol: "classes" is that split by model; "official" the makers' own, with all models on
            both sides.
        crop: whether images are cut to the cars' boxes.
        counts: "published" refuses a folder with other numbers than the published ones; "any" takes
            what is there.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one
            ends the run.

    Raises:
        DataError: with every problem: missing files, annotations that are damaged, other numbers
            than the published ones.
    """
    published = CARS_OFFICIAL if protocol == "official" else CARS
    published.root(folder)
    problems: list[str] = []
    found = _whole(folder) if (folder / "cars_annos.mat").is_file() else _divided(published, folder)
    rows = []
    for path, number, trained, box in found:
        if (
            not isinstance(path, str)
            or not isinstance(number, int | float)
            or not 1 <= number <= _CLASSES
        ):
            problems.append(f"{path} has the class {number}; classes go from 1 to {_CLASSES}.")
            continue
        if crop and any(not isinstance(edge, int | float) for edge in box):
            problems.append(f"{path} has no box.")
            box = None
        side = trained if protocol == "official" else number <= _CLASSES // 2
        rows.append(Row(path, f"{int(number):03d}", "train" if side else "test", box=box))
    return assemble(
        published, folder, rows, problems, counts, where=folder, crop=crop, skip_bad=skip_bad
    )


def _whole(folder: Path) -> list[tuple[Any, Any, bool, Any]]:
    """Return path, class, whether it trains, and box of each image of the layout in one folder."""
    rows = read_annotations(folder / "cars_annos.mat", ("relative_im_path", "class", "test", *_BOX))
    return [(path, number, not test, box) for path, number, test, *box in rows]


def _divided(published: Published, folder: Path) -> list[tuple[Any, Any, bool, Any]]:
    """Do as `_whole`, of the layout in two folders."""
    found: list[tuple[Any, Any, bool, Any]] = []
    for side, name in (
        ("train", "cars_train_annos.mat"),
        ("test", "cars_test_annos_withlabels.mat"),
    ):
        path = next((p for p in (folder / "devkit" / name, folder / name) if p.is_file()), None)
        if path is None:
            unlabelled = (folder / "devkit" / "cars_test_annos.mat").is_file() and side == "test"
            more = " (cars_test_annos.mat has no classes; it is another file)" if unlabelled else ""
            raise DataError(
                f"{folder} is not {published.title}: {name} is not there{more}. {published.advice}"
            )
        rows = read_annotations(path, ("fname", "class", *_BOX))
        found += [
            (f"cars_{side}/{name}", number, side == "train", box) for name, number, *box in rows
        ]
    return found
