"""Collect the items that `check_data` checks: of files, folders and tables, or of a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from retrieval.base.arrays import Array
from retrieval.data.cache import checksum
from retrieval.data.splits import SIDES, Splits
from retrieval.images.decoding import Limits, decode, read_image
from retrieval.images.preprocessing import from_array
from retrieval.index.sources import Source, Sources

from retrieval_lab.findings import Subject

if TYPE_CHECKING:
    from PIL.Image import Image
    from retrieval.data.datasets import Dataset

Item = tuple["bytes | None", "Image | Array"]
"""The hash of an item's bytes, or `None` without any, and its decoded image or its vector."""


@dataclass(frozen=True)
class Subjects:
    """Items to be checked, each with a name, a label and a side.

    Attributes:
        items: the items' names, labels and sides.
        kind: "image" or "features".
        notes: sentences on what was left out.
        open: thread-safe function that returns an item by its number, or raises a `DataError`.
    """

    items: Sequence[Subject]
    kind: Literal["image", "features"]
    notes: Sequence[str]
    open: Callable[[int], Item]


def of_sources(sources: Sequence[Sources], named: Sequence[str]) -> Subjects:
    """Return the items of files, folders and tables, collected as for an index.

    The columns `split` and `role` name the side of a table's item. The subfolder names the side of
    a folder's item, if all subfolders with images have names such as `train`, `validation`, `test`,
    `query` or `gallery`; the item's label is then the name of the next folder below.

    Args:
        sources: the result of `collect` for each named file, folder or table.
        named: the name of each entry of `sources`. If there are several, each name is a side.
    """
    items = [item for source in sources for item in source.items]
    vectors = [
        source.features[item.row]
        for source in sources
        if source.features is not None
        for item in source.items
    ]
    limits = Limits()

    def open_item(row: int) -> Item:
        if vectors:
            return None, vectors[row]
        item = items[row]
        assert item.path is not None  # only items of a folder of embeddings lack a path
        content = read_image(item.path, limits, item.name)
        return checksum(content), decode(content, limits, item.name)

    subjects: list[Subject] = []
    notes: list[str] = []
    for source, name in zip(sources, named, strict=True):
        subjects += _subjects(source, Path(name), name if len(named) > 1 else "")
        notes += source.left_out
    return Subjects(subjects, "features" if vectors else "image", notes, open_item)


def of_dataset(dataset: Dataset, splits: Splits) -> Subjects:
    """Return the items of a dataset, with their sides."""
    sides = [""] * len(dataset)
    items_by_side = {"train": splits.train, "validation": splits.validation}
    if splits.gallery is None:
        items_by_side["test"] = splits.query
    else:
        items_by_side |= {"query": splits.query, "gallery": splits.gallery}
    for side, items in items_by_side.items():
        for item in items.tolist():
            sides[item] = side
    # If several items share a file, its bytes do not identify an item.
    has_boxes = getattr(dataset, "boxes", None) is not None
    if has_boxes:
        files = None
    else:
        files = dataset.files

    def open_item(row: int) -> Item:
        item = dataset[row]
        if dataset.kind == "image" and isinstance(item, np.ndarray):
            item = from_array(item)
        if files is None:
            return None, item
        return checksum(read_image(files[row], Limits(), os.fspath(files[row]))), item

    rows = zip(dataset.keys, splits.labels.tolist(), sides, strict=True)
    subjects = [Subject(key, splits.classes[label], side) for key, label, side in rows]
    return Subjects(subjects, dataset.kind, [*splits.notes, *dataset.notes], open_item)


def _subjects(sources: Sources, named: Path, side: str) -> Iterator[Subject]:
    inside = [_inside(item, named) for item in sources.items]
    by_folder = not side and all(len(p) > 2 and p[0].lower() in SIDES for p in inside)
    for item, parts in zip(sources.items, inside, strict=True):
        # a row of a table of vectors has no file, so its id names it
        if item.row is None:
            name = item.name
        else:
            name = item.id
        if parts:
            name = str(named.joinpath(*parts))
        if by_folder:
            split, role = SIDES[parts[0].lower()]
            yield Subject(name, parts[1], role or split)
        else:
            split = str(item.metadata.get("split") or "").lower()
            role = str(item.metadata.get("role") or "").lower()
            # a word such as "query" in the column of splits names a role too
            split_side, split_role = SIDES.get(split, (split, ""))
            yield Subject(name, item.label, side or role or split_role or split_side)


def _inside(item: Source, folder: Path) -> tuple[str, ...]:
    """Return the parts of an image's path below a folder, or `()` for any other item."""
    above = folder.absolute()
    if item.path is None or item.row is not None or not item.path.is_relative_to(above):
        return ()
    return item.path.relative_to(above).parts
