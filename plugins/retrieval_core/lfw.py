"""Labeled Faces in the Wild, or any data in its layout."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt
from retrieval.errors import DataError
from retrieval.helpers import ADVICE, refuse, report_left_out, skip_unreadable, some
from retrieval.plugin import Dataset, FileDataset, find_images


def lfw_people(
    folder: Path,
    view: Literal["dev", "folds", "none"] = "dev",
    fold: PositiveInt = 1,
    lists: Path | None = None,
    skip_bad: bool = False,
) -> Dataset:
    """Read images of people, and lists of them, in the layout of Labeled Faces in the Wild.

    Huang, Ramesh, Berg & Learned-Miller, "Labeled Faces in the Wild: A Database for Studying Face
    Recognition in Unconstrained Environments", University of Massachusetts, TR 07-49, 2007. Nothing
    is downloaded. An item's label is the person, and its key is the path relative to `folder`. Use
    the lists of pairs with `retrieval evaluate --protocol verification --pairs`: `pairsDevTest.txt`
    with view "dev", and `pairs.txt` with "folds", where only the test fold's pairs are held out.

    Args:
        folder: folder with one folder per person. A relative path starts at the working directory.
        view: which split to use. "dev" is View 1, for model selection: the people in
            `peopleDevTrain.txt` are for training, those in `peopleDevTest.txt` for testing. "folds"
            is View 2, for reporting: one fold of `people.txt` is for testing and the others are for
            training, with one run per fold. "none" loads all images without a split.
        fold: number of the test fold for view "folds", from 1.
        lists: the folder of the lists; by default `folder` or its parent.
        skip_bad: whether to skip and report unreadable images; otherwise the first one is an error.

    Raises:
        DataError: an image is missing or wrongly named, a list is missing or contradicts its own
            counts, or a person is on both sides. The message lists all problems.
    """
    if not folder.is_dir():
        raise DataError(
            f"[data] folder: {folder} is not a folder. Relative paths start at {Path.cwd()}."
        )
    images = find_images(folder)
    # The archive also holds lists, which are no fault of the user.
    images.left_out.pop("not an image", None)
    files = images.images
    notes = report_left_out(images, folder, skip_bad)
    keys = [file.relative_to(folder).as_posix() for file in files]
    problems = _name_problems(keys)
    sides = dict.fromkeys(range(len(files)), "")
    if view != "none":
        # If the folder is a link, its parent and the parent of its target are searched.
        around = dict.fromkeys([folder, folder.absolute().parent, folder.resolve().parent])
        if lists is None:
            folders = list(around)
        else:
            folders = [lists]
        sides = _sides(folders, view, fold, keys, problems)
    if problems:
        refuse(str(folder), problems)
    rows = sorted(sides)
    if skip_bad:
        readable, unread = skip_unreadable([files[i] for i in rows], str(folder))
        notes += unread
        rows = [rows[i] for i in readable]
    return FileDataset(
        [files[i] for i in rows],
        [keys[i].split("/")[0] for i in rows],
        [keys[i] for i in rows],
        splits=None if view == "none" else [sides[i] for i in rows],
        advice=ADVICE,
        notes=notes,
    )


def _name_problems(keys: list[str]) -> list[str]:
    """Return sentences on images not named like LFW's, and on names that several files share."""
    # The lists name an image by person and number, so file names must consist of them.
    misnamed = [key for key in keys if not re.fullmatch(r"([^/]+)/\1_\d{4,}\.[^./]+", key)]
    problems = []
    if misnamed:
        problems.append(
            f"{len(misnamed):,} image{'s are' if len(misnamed) > 1 else ' is'} not named like"
            f" NAME/NAME_0001.jpg: {some(misnamed)}."
        )
    stems = Counter(key.rpartition(".")[0] for key in keys)
    twice = sorted(name for name, count in stems.items() if count > 1)
    if twice:
        problems.append(f"there are several files of {some(twice)}. Keep only one.")
    return problems


def _sides(
    places: list[Path], view: str, fold: int, keys: list[str], problems: list[str]
) -> dict[int, str]:
    """Return the side of each item of a view; add the problems of the lists to `problems`."""
    if view == "folds":
        names = ["people.txt"]
    else:
        names = ["peopleDevTrain.txt", "peopleDevTest.txt"]
    groups: list[set[int]] = []
    for name in names:
        path = next((place / name for place in places if (place / name).is_file()), None)
        if path is None:
            problems.append(
                f"{name} is in none of {some(places)}: view = '{view}' needs it. Set lists to its"
                " folder."
            )
            continue
        try:
            groups += _groups(path, view == "folds", keys, problems)
        except (DataError, OSError, UnicodeDecodeError) as error:
            problems.append(f"{name}: {error}")
    if problems:
        return {}
    if view == "folds" and (len(groups) < 2 or fold > len(groups)):
        problems.append(
            f"fold = {fold}: people.txt has {len(groups)} folds; one tests and the others train."
        )
        return {}
    if view == "folds":
        tested = groups[fold - 1]
    else:
        tested = groups[1]
    trained = set().union(*(group for group in groups if group is not tested))
    people = [{keys[i].split("/")[0] for i in side} for side in (trained, tested)]
    if both := sorted(people[0] & people[1]):
        problems.append(
            f"{' and '.join(names)} put people on both sides, training and test: {some(both)}."
        )
    return {**dict.fromkeys(trained, "train"), **dict.fromkeys(tested, "test")}


def _groups(path: Path, folds: bool, keys: list[str], problems: list[str]) -> list[set[int]]:
    """Return the items of the people of each fold; add missing images to `problems`.

    A list with folds has their number, then for each fold the number of people and a line `NAME
    images` per person. A list without folds is like one fold.

    Raises:
        DataError: a line is not what the counts before it say.
    """
    texts = enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1)
    lines = iter([(line, text.split()) for line, text in texts if text.strip()])

    def read(expected: str, words: int) -> tuple[int, str, int]:
        line, row = next(lines, (0, []))
        if len(row) != words or not re.fullmatch("[1-9][0-9]{0,8}", row[-1]):
            if row:
                actual = f"line {line} is '{' '.join(row)[:60]}'"
            else:
                actual = "the file ends"
            raise DataError(f"{actual} where {expected} is expected.")
        return line, row[0], int(row[-1])

    index_of = {key.rpartition(".")[0]: i for i, key in enumerate(keys)}
    listed: dict[str, int] = {}
    groups = []
    for fold in range(1, (read("the number of folds", 1)[2] if folds else 1) + 1):
        people = read(f"the number of people of fold {fold}", 1)[2]
        group: set[int] = set()
        for number in range(1, people + 1):
            line, name, images = read(f"'NAME images' of person {number} of {people:,}", 2)
            if (first := listed.setdefault(name, line)) != line:
                problems.append(f"{path.name}: line {line}: {name} is already in line {first}.")
            stems = [f"{name}/{name}_{n:04d}" for n in range(1, images + 1)]
            if missing := [image for image in stems if image not in index_of]:
                problems.append(
                    f"{path.name}: line {line}: {len(missing):,} of the {images:,} images of {name}"
                    f" are missing: {some(missing)}."
                )
            group.update(index_of[image] for image in stems if image in index_of)
        groups.append(group)
    if further := next(lines, None):
        raise DataError(f"line {further[0]} is after the last person that the list counts.")
    return groups
