"""CUB-200-2011 and Cars-196: fine-grained classes with one box per image."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.base.arrays import Array
from retrieval.errors import DataError
from retrieval.helpers import Box, Count, Counts
from retrieval.plugin import Dataset

from retrieval_sets.published import (
    Published,
    Row,
    annotation_bytes,
    documented,
    numbers,
    read_lines,
)

_MAX_BYTES = 64 << 20  # of a MATLAB file
# A small packed file can unpack to more than the memory.
_MAX_UNPACKED_BYTES = 256 << 20
_HEADER = 128  # bytes, in MATLAB's file format 5
_COMPRESSED = 15  # type of a packed element in that format
SPECIES = 200
_HOLDS = (
    "images/, images.txt, image_class_labels.txt, classes.txt and bounding_boxes.txt, as"
    " CUB_200_2011.tgz unpacks them"
)
_HOME = "Caltech (Caltech-UCSD Birds-200-2011, www.vision.caltech.edu/datasets/cub_200_2011)"
CUB = Published(
    "CUB-200-2011", _HOME, _HOLDS, {"train": [Count(5_864, 100)], "test": [Count(5_924, 100)]}
)
_CUB_FILES = ("images", "images.txt", "image_class_labels.txt", "classes.txt", "bounding_boxes.txt")
MODELS = 196
_CARS_HOME = "Stanford (ai.stanford.edu/~jkrause/cars/car_dataset.html) or a mirror of it"
_CARS_HOLDS = (
    "car_ims/ and cars_annos.mat, or cars_train/, cars_test/ and devkit/ with cars_train_annos.mat"
    " and cars_test_annos_withlabels.mat"
)
CARS = Published(
    "Cars-196", _CARS_HOME, _CARS_HOLDS, {"train": [Count(8_054, 98)], "test": [Count(8_131, 98)]}
)
_CARS_BOX = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")


def read_matlab(path: Path, fields: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Return `fields` of each row of a MATLAB file's structure array `annotations`.

    A value is a number, text, or None.

    Raises:
        DataError: the file cannot be read, is damaged or too large, or lacks fields.
    """
    from scipy.io import loadmat

    content = annotation_bytes(path, _MAX_BYTES)
    # SciPy unpacks without bounds.
    _check_sizes(path, content)
    try:
        # SciPy returns objects of MATLAB as bytes.
        variables = loadmat(
            io.BytesIO(content),
            variable_names=["annotations"],
            squeeze_me=True,
            chars_as_strings=True,
        )
    except Exception as error:  # SciPy's reader raises various errors for a damaged file
        raise DataError(
            f"{path} is not a MATLAB file of format 5, or is damaged: {error}."
        ) from error
    table = variables.get("annotations")
    if not isinstance(table, np.ndarray) or table.dtype.names is None:
        raise DataError(f"{path} has no structure array 'annotations'.")
    if missing := [name for name in fields if name not in table.dtype.names]:
        raise DataError(
            f"{path}: the array 'annotations' has no field {', '.join(missing)}. Its fields are"
            f" {', '.join(table.dtype.names)}."
        )
    return [tuple(_scalar(row[name]) for name in fields) for row in np.atleast_1d(table)]


def _scalar(value: Any) -> Any:
    """Return the number or text that a cell holds, or None for other content."""
    array: Array = np.asarray(value)
    # MATLAB wraps each value in an array, and SciPy keeps some of these.
    if array.dtype == object and array.size == 1:
        array = np.asarray(array.ravel()[0])
    if array.size == 1 and array.dtype.kind in "iufU":
        return array.ravel()[0].item()
    return None


def _check_sizes(path: Path, data: bytes) -> None:
    """Raise a `DataError` if a MATLAB file is too large when unpacked, or was cut short."""
    order = {b"IM": "<", b"MI": ">"}.get(data[126:_HEADER])
    if order is None:
        raise DataError(f"{path} is not a MATLAB file of format 5.")
    offset = _HEADER
    total = 0
    while offset + 8 <= len(data) and total <= _MAX_UNPACKED_BYTES:
        kind, length = struct.unpack_from(f"{order}II", data, offset)
        element = data[offset + 8 : offset + 8 + length]
        if len(element) < length:
            raise DataError(f"{path} was cut short: its {len(data):,} bytes end in an element.")
        if kind == _COMPRESSED:
            try:
                length = len(zlib.decompressobj().decompress(element, _MAX_UNPACKED_BYTES + 1))
            except zlib.error as error:
                raise DataError(f"{path} is damaged: {error}.") from error
        # Elements that are not packed count with their own length.
        total += length
        offset += 8 + len(element)
    if total > _MAX_UNPACKED_BYTES:
        raise DataError(
            f"{path} unpacks to more than {_MAX_UNPACKED_BYTES:,} bytes, the most that is allowed."
        )


@documented
def cub200(
    folder: Path,
    crop: bool = False,
    counts: Counts = "published",
    skip_bad: bool = False,
) -> Dataset:
    """Load CUB-200-2011: 11,788 photographs of 200 species of birds, with a box each.

    Wah, Branson, Welinder, Perona & Belongie, "The Caltech-UCSD Birds-200-2011 Dataset", Caltech,
    CNS-TR-2011-001. Nothing is downloaded. The photographs of the first 100 species are for
    training (5,864 images), those of the other species for testing (5,924). This split is from Oh
    Song, Xiang, Jegelka & Savarese, "Deep Metric Learning via Lifted Structured Feature Embedding",
    CVPR 2016, which does not use the boxes.

    Args:
        folder: the folder `CUB_200_2011`, or its parent.
        crop: whether to crop images to the birds' boxes.
    """
    listing = CUB.listing(folder, *_CUB_FILES, inside=["CUB_200_2011"])
    root = listing.root
    problems = listing.problems
    names = {}
    for line, (text, name) in read_lines(root / "classes.txt", 2, problems):
        if species := numbers(root / "classes.txt", line, [text], problems, 1, SPECIES):
            names[species[0]] = name
    labels = {}
    class_list = root / "image_class_labels.txt"
    for line, (key, text) in read_lines(class_list, 2, problems):
        if species := numbers(class_list, line, [text], problems, 1, SPECIES):
            labels[key] = species[0]
    boxes = _boxes(root / "bounding_boxes.txt", problems)
    for _, (key, path) in read_lines(root / "images.txt", 2, problems):
        number = labels.get(key)
        if number is None or number not in names:
            problems.append(f"{path} has no class in image_class_labels.txt and classes.txt.")
            continue
        if crop and key not in boxes:
            problems.append(f"{path} has no box in bounding_boxes.txt.")
        if number <= SPECIES // 2:
            side = "train"
        else:
            side = "test"
        listing.rows.append(Row(path, names[number], side, box=boxes.get(key)))
    return listing.dataset(counts, skip_bad, images="images", crop=crop)


def _boxes(path: Path, problems: list[str]) -> dict[str, Box]:
    """Return the boxes by image, from a file of lines "image left top width height"."""
    boxes: dict[str, Box] = {}
    for line, (key, *words) in read_lines(path, 5, problems):
        try:
            left, top, width, height = map(float, words)
        except ValueError:
            problems.append(f"{path.name}, line {line}: {' '.join(words)} are not four numbers.")
            continue
        boxes[key] = (left, top, left + width, top + height)
    return boxes


@documented
def cars196(
    folder: Path,
    crop: bool = False,
    counts: Counts = "published",
    skip_bad: bool = False,
) -> Dataset:
    """Load Cars-196: 16,185 photographs of 196 models of cars, with a box each.

    Krause, Stark, Deng & Fei-Fei, "3D Object Representations for Fine-Grained Categorization", 3dRR
    2013. Nothing is downloaded. Both published layouts are read: `car_ims/` with `cars_annos.mat`,
    and `cars_train/`, `cars_test/` and `devkit/` with two files of annotations. The photographs of
    the first 98 models are for training (8,054 images), those of the other models for testing
    (8,131). This split is from Oh Song et al., CVPR 2016, who do not use the boxes.

    Args:
        folder: the folder that holds one of these layouts.
        crop: whether to crop images to the cars' boxes.
    """
    listing = CARS.listing(folder)
    if (folder / "cars_annos.mat").is_file():
        fields = ("relative_im_path", "class", *_CARS_BOX)
        annotations = read_matlab(folder / "cars_annos.mat", fields)
    else:
        annotations = _two_folders(folder)
    for path, number, left, top, right, bottom in annotations:
        box = left, top, right, bottom
        if (
            not isinstance(path, str)
            or not isinstance(number, int | float)
            or not 1 <= number <= MODELS
        ):
            listing.problems.append(
                f"{path} has the class {number}, which is not from 1 to {MODELS}."
            )
            continue
        if crop and any(not isinstance(edge, int | float) for edge in box):
            listing.problems.append(f"{path} has no box in the annotations.")
        if number <= MODELS // 2:
            side = "train"
        else:
            side = "test"
        listing.rows.append(Row(path, f"{int(number):03d}", side, box=box))
    return listing.dataset(counts, skip_bad, crop=crop)


def _two_folders(folder: Path) -> list[tuple[Any, ...]]:
    """Return path, class and box of each image in the layout of two folders."""
    annotations: list[tuple[Any, ...]] = []
    for side, name in (
        ("train", "cars_train_annos.mat"),
        ("test", "cars_test_annos_withlabels.mat"),
    ):
        path = CARS.file(folder, f"devkit/{name}", name)
        rows = read_matlab(path, ("fname", "class", *_CARS_BOX))
        annotations += [(f"cars_{side}/{row[0]}", *row[1:]) for row in rows]
    return annotations
