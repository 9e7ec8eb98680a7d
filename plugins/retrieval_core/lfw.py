"""Labeled Faces in the Wild, or any data in its layout."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from retrieval.data.pairs import find_pairs, read_people
from retrieval.errors import DataError
from retrieval.plugin import (
    ADVICE,
    Dataset,
    FileDataset,
    find_images,
    refuse,
    report_left_out,
    skip_unreadable,
    some,
)

Sides = dict[int, str]
"""Side ("train", "test" or "") of an item, by its index; items without an entry are left out."""


def lfw_people(
    folder: Path,
    view: Literal["dev", "folds", "none"] = "dev",
    fold: Annotated[int, Field(ge=1)] = 1,
    restricted: bool = False,
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
        restricted: whether to load only images that LFW's pairs name (those of `pairsDevTrain.txt`
            and `pairsDevTest.txt`, or of `pairs.txt`), as in the image-restricted protocol. The
            protocol forbids training on other *pairs*. A loss over labels forms other pairs, so
            report its result as unrestricted.
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
    images.left_out.pop("not an image", None)  # the lists and other files of the archive
    files, notes = images.images, report_left_out(images, folder, skip_bad)
    keys = [file.relative_to(folder).as_posix() for file in files]
    problems = _name_problems(keys)
    if view == "none":
        sides: Sides = dict.fromkeys(range(len(files)), "")
        if restricted:
            problems.append("restricted = true needs a view with lists, but view = 'none'.")
    else:
        # If the folder is a link, its parent and the parent of its target are searched.
        around = [folder, folder.absolute().parent, folder.resolve().parent]
        places = list(dict.fromkeys(around)) if lists is None else [lists]
        sides = _sides(places, view, fold, restricted, keys, problems)
    if problems:
        refuse(str(folder), problems)
    kept = sorted(sides)
    if skip_bad:
        readable, unread = skip_unreadable([files[i] for i in kept], str(folder))
        notes += unread
        kept = [kept[i] for i in readable]
    return FileDataset(
        [files[i] for i in kept],
        [keys[i].split("/")[0] for i in kept],
        [keys[i] for i in kept],
        splits=None if view == "none" else [sides[i] for i in kept],
        advice=ADVICE,
        notes=notes,
    )


def _name_problems(keys: list[str]) -> list[str]:
    """Return sentences on images not named like LFW's, and on names that several files share."""
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
    places: list[Path], view: str, fold: int, restricted: bool, keys: list[str], problems: list[str]
) -> Sides:
    """Return the side of each item of a view; add the problems of the lists to `problems`."""
    word = "pairs" if restricted else "people"
    names = [f"{word}.txt"] if view == "folds" else [f"{word}DevTrain.txt", f"{word}DevTest.txt"]
    lists_by_name = {
        name: next((p / name for p in places if (p / name).is_file()), None) for name in names
    }
    missing = [name for name, path in lists_by_name.items() if path is None]
    if missing:
        problems.append(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} in none of"
            f" {some(places)}: view = '{view}' needs {'them' if len(missing) > 1 else 'it'}. Set"
            f" lists to {'their' if len(missing) > 1 else 'its'} folder."
        )
        return {}
    groups: list[set[int]] = []
    for path in lists_by_name.values():
        assert path is not None
        read = _groups_of_pairs if restricted else _groups_of_people
        these, faults = read(path, keys, view == "folds")
        problems += [f"{path.name}: {fault}" for fault in faults]
        groups += these
    if problems:
        return {}
    if view == "folds" and fold > len(groups):
        problems.append(f"fold = {fold}: {next(iter(lists_by_name))} has {len(groups)} folds.")
        return {}
    tested = groups[fold - 1] if view == "folds" else groups[1]
    trained = set().union(*(group for group in groups if group is not tested))
    people = [{keys[i].split("/")[0] for i in side} for side in (trained, tested)]
    if both := sorted(people[0] & people[1]):
        problems.append(
            f"{' and '.join(lists_by_name)} put people on both sides, training and test:"
            f" {some(both)}."
        )
    return {**dict.fromkeys(trained, "train"), **dict.fromkeys(tested, "test")}


def _groups_of_pairs(path: Path, keys: list[str], folds: bool) -> tuple[list[set[int]], list[str]]:
    """Return the items in the pairs of each fold, and problems."""
    pairs, problems = find_pairs(path, keys)
    if problems:
        return [], problems
    if folds != (pairs.fold is not None):
        return [], [
            "line 1 must state the numbers of folds and of pairs, such as 10 300."
            if folds
            else "line 1 must state only the number of pairs, such as 500."
        ]
    if pairs.fold is None:
        return [{*pairs.first.tolist(), *pairs.second.tolist()}], []
    return [
        {*pairs.first[pairs.fold == k].tolist(), *pairs.second[pairs.fold == k].tolist()}
        for k in range(len(pairs.folds))
    ], []


def _groups_of_people(path: Path, keys: list[str], folds: bool) -> tuple[list[set[int]], list[str]]:
    """Return the items of the people of each fold, and problems."""
    read, problems = read_people(path, folds)
    index_of = {key.rpartition(".")[0]: i for i, key in enumerate(keys)}
    listed: dict[str, int] = {}
    groups: list[set[int]] = []
    for people in read:
        group: set[int] = set()
        for line, name, images in people:
            if (first := listed.setdefault(name, line)) != line:
                problems.append(f"line {line}: {name} is already in line {first}.")
            rows = [index_of.get(_image_name(name, n)) for n in range(1, images + 1)]
            missing = [_image_name(name, n) for n, item in enumerate(rows, 1) if item is None]
            if missing:
                problems.append(
                    f"line {line}: {len(missing):,} of the {images:,} images of {name} are missing:"
                    f" {some(missing)}."
                )
            group.update(item for item in rows if item is not None)
        groups.append(group)
    if folds and len(read) < 2 and not problems:
        problems.append(
            "there must be at least two folds: one for testing, the others for training."
        )
    return groups, problems


def _image_name(person: str, number: int) -> str:
    """Return the relative path of a person's image in LFW, without the extension."""
    return f"{person}/{person}_{number:04d}"
