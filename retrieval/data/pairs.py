"""Lists of pairs that are "same" or not: CSV files, or the layout of Labeled Faces in the Wild.

Huang, Ramesh, Berg & Learned-Miller, "Labeled Faces in the Wild: A Database for Studying Face
Recognition in Unconstrained Environments", University of Massachusetts, TR 07-49, 2007.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieval.data.error_lists import natural, refuse
from retrieval.errors import DataError, did_you_mean

COLUMNS = ("first", "second", "same")


@dataclass(frozen=True)
class LabelledPairs:
    """P pairs of a dataset's items.

    Attributes:
        first: index (P,) of the first item.
        second: index (P,) of the second item.
        same: (P,), true for a "same" pair.
        fold: index (P,) into `folds`, or `None` if the list has no folds.
        folds: names of the folds, in natural order; empty without folds.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    same: NDArray[np.bool_]
    fold: NDArray[np.int64] | None = None
    folds: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.same)


class Row(NamedTuple):
    """One pair of a list: line number, both names, "same" or not, and fold ("" without folds)."""

    line: int
    first: str
    second: str
    same: bool
    fold: str


def read_pairs(file: Path, keys: Sequence[str]) -> LabelledPairs:
    """Read a list of pairs of a dataset's items.

    The first line determines which of two layouts the file has:

    - CSV with the header `first,second,same[,fold]`: two keys, 1 or 0, and the fold's name. Further
      columns are ignored.
    - LFW's `pairs.txt` and `pairsDevTest.txt`. The first line is `10 300` (number of folds, and of
      pairs of each kind per fold) or `500` (without folds). Further lines are `NAME n1 n2` for two
      images of one person, or `NAME1 n1 NAME2 n2` for two people. `NAME 7` is the item whose key
      ends in `NAME/NAME_0007.jpg` (or another image extension).

    Args:
        file: the list; UTF-8 text.
        keys: the dataset's keys.

    Raises:
        DataError: the file cannot be read; a line is malformed, names an unknown item, pairs an
            item with itself or contradicts another line; counts differ from the first line; all
            pairs are same, or all different; or there is a single fold. The message lists every
            problem.
    """
    pairs, problems = find_pairs(file, keys)
    if problems:
        refuse(str(file), problems)
    return pairs


def find_pairs(file: Path, keys: Sequence[str]) -> tuple[LabelledPairs, list[str]]:
    """Return pairs and problems like `read_pairs`, for callers that add problems of their own."""
    lines = _lines(file)
    start = next((line for line in lines if line.strip()), "")
    lfw = re.fullmatch(r"\s*\d+(\s+\d+)?\s*", start) is not None
    rows, problems = _lfw(lines) if lfw else _csv(lines)
    items: defaultdict[str, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        items[_lfw_name(key) if lfw else key].append(i)
    indices = np.zeros((len(rows), 2), np.int64)
    seen: dict[tuple[int, int], Row] = {}
    example = f" (the data have keys such as {keys[0]!r})" if len(keys) else ""
    for i, row in enumerate(rows):
        places = [items.get(name, ()) for name in (row.first, row.second)]
        shown = [f"the image {name}" if lfw else repr(name) for name in (row.first, row.second)]
        for name, place in zip(shown, places, strict=True):
            if not place:
                problems.append(f"line {row.line}: {name}: there is no such item{example}.")
                example = ""  # only in the first message
            elif len(place) > 1:
                problems.append(f"line {row.line}: {name}: {len(place)} items have that name.")
        if row.first == row.second:
            problems.append(f"line {row.line}: {shown[0]} is paired with itself.")
        elif len(places[0]) == len(places[1]) == 1:
            indices[i] = places[0][0], places[1][0]
            earlier = seen.setdefault((int(indices[i].min()), int(indices[i].max())), row)
            if earlier.same != row.same:
                says = ["different", "the same"]
                problems.append(
                    f"line {row.line}: {row.first} and {row.second} are {says[row.same]} here and"
                    f" {says[earlier.same]} in line {earlier.line}."
                )
    same = np.array([row.same for row in rows], np.bool_)
    if len(same) and (same.all() or not same.any()):
        what = f"all {len(same):,} pairs are" if len(same) > 1 else "the only pair is"
        word = "the same" if same.all() else "different"
        problems.append(f"{what} {word}: both kinds are needed.")
    elif not rows and not problems:
        problems.append("it lists no pair.")
    names = sorted({row.fold for row in rows} - {""}, key=natural)
    numbers = {name: i for i, name in enumerate(names)}
    fold = np.array([numbers[row.fold] for row in rows], np.int64) if names else None
    if fold is not None and not problems:
        problems += fold_problems(same, fold, names)
    return LabelledPairs(indices[:, 0], indices[:, 1], same, fold, tuple(names)), problems


def fold_problems(
    same: NDArray[np.bool_], fold: NDArray[np.int64], names: Sequence[str]
) -> list[str]:
    """Return the problems that prevent choosing each fold's threshold on the other folds."""
    if len(names) < 2:
        return [
            f"all pairs are in one fold ('{names[0]}'): the threshold of a fold is chosen on the"
            " others, so at least two are needed. If the file has no folds, they are made."
        ]
    counts = [np.bincount(fold[same == kind], minlength=len(names)) for kind in (True, False)]
    return [
        f"outside the fold '{name}' all pairs are {word}: no threshold can be chosen for it."
        for word, lacking in (("different", counts[0]), ("the same", counts[1]))
        for k, name in enumerate(names)
        if lacking.sum() and lacking.sum() == lacking[k]
    ]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise DataError(f"{file} does not exist. Relative paths start at {Path.cwd()}.") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text (byte {error.start}). Save it as UTF-8."
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{file} cannot be read: {reason}.") from error


def _lfw_name(key: str) -> str:
    """Return a key's last folder and its file name without extension, as LFW's lists name it."""
    path = PurePosixPath(key)
    return f"{path.parent.name}/{path.stem}"


def stem(person: str, number: int) -> str:
    """Return folder and name of a person's image in LFW, without the extension."""
    return f"{person}/{person}_{number:04d}"


# --- CSV


def _csv(lines: list[str]) -> tuple[list[Row], list[str]]:
    reader = csv.reader(lines, strict=True)
    rows: list[Row] = []
    problems: list[str] = []
    try:
        header = [name.strip() for name in next(reader, [])]
        problems += _header(header)
        if problems:
            return rows, problems
        for values in reader:
            if not values:
                continue
            if len(values) != len(header):
                problems.append(
                    f"line {reader.line_num}: it has {len(values)} values; the header names"
                    f" {len(header)} columns."
                )
                continue
            row = dict(zip(header, (value.strip() for value in values), strict=True))
            first, second, same, fold = (row.get(name, "") for name in (*COLUMNS, "fold"))
            if fault := _value_fault(row):
                problems.append(f"line {reader.line_num}: {fault}")
            else:
                rows.append(Row(reader.line_num, first, second, same == "1", fold))
    except csv.Error as error:
        problems.append(f"line {reader.line_num}: it is not valid CSV: {error}.")
    return rows, problems


def _header(header: list[str]) -> list[str]:
    columns = ", ".join(header) or "nothing"
    problems = [
        f"the first line has no column '{name}' (it has: {columns}).{did_you_mean(name, header)}"
        for name in COLUMNS
        if name not in header
    ]
    problems += [
        f"the first line names '{n}' twice."
        for n in dict.fromkeys(header)
        if n and header.count(n) > 1
    ]
    if len(problems) == len(COLUMNS):
        return [
            "it is not a list of pairs: its first line must be 'first,second,same' or"
            " 'first,second,same,fold', or LFW's counts ('10 300' or '500'), not"
            f" '{columns[:60]}'."
        ]
    return problems


def _value_fault(row: dict[str, str]) -> str:
    if not row["first"] or not row["second"]:
        return "a pair needs two items; one is empty."
    if row["same"] not in ("0", "1"):
        return f"same must be 1 or 0, not '{row['same']}'."
    if row.get("fold") == "":
        return "its fold is empty: name the fold of each pair, or remove the column 'fold'."
    return ""


# --- Labeled Faces in the Wild


def _lfw(lines: list[str]) -> tuple[list[Row], list[str]]:
    numbered = [(i, line.split()) for i, line in enumerate(lines, 1) if line.strip()]
    (start, head), *body = numbered
    counts = [int(word) for word in head]
    folds, per_kind = counts if len(counts) == 2 else (1, counts[0])
    fold_lines = 2 * per_kind
    problems: list[str] = []
    if not folds or not per_kind:
        return [], [
            f"line {start}: '{' '.join(head)}' states {folds} folds of {per_kind} pairs: neither"
            " may be 0."
        ]
    if len(body) != folds * fold_lines:
        problems.append(
            f"line {start} states {folds:,} × {per_kind:,} same and as many different pairs,"
            f" {folds * fold_lines:,} lines; {len(body):,} follow."
        )
    rows: list[Row] = []
    kinds: list[bool | None] = []
    for i, (line, words) in enumerate(body):
        named = _names(words)
        if isinstance(named, str):
            problems.append(f"line {line}: {named}")
            kinds.append(None)
        else:
            rows.append(Row(line, *named, str(i // fold_lines + 1) if len(counts) == 2 else ""))
            kinds.append(named[2])
    for k in range(folds if len(body) == folds * fold_lines else 0):
        part = kinds[k * fold_lines : (k + 1) * fold_lines]
        if None not in part and part.count(True) != per_kind:
            first, last = body[k * fold_lines][0], body[(k + 1) * fold_lines - 1][0]
            where = f"fold {k + 1} (lines {first} to {last})" if len(counts) == 2 else "it"
            problems.append(
                f"{where} has {part.count(True):,} same and {part.count(False):,} different pairs;"
                f" line {start} states {per_kind:,} of each."
            )
    return rows, problems


def _names(words: list[str]) -> tuple[str, str, bool] | str:
    """Return both images' names and whether they show one person, or the problem as text."""
    if len(words) not in (3, 4):
        return (
            f"'NAME n1 n2' or 'NAME1 n1 NAME2 n2' is expected, not {len(words)} words"
            f" ('{' '.join(words)[:60]}')."
        )
    numbers = words[1:] if len(words) == 3 else words[1::2]
    if not all(map(_is_count, numbers)):
        return f"images are numbered from 1, and '{' '.join(numbers)[:60]}' holds another value."
    first, second = words[0], words[0] if len(words) == 3 else words[2]
    if len(words) == 4 and first == second:
        return f"it is for a pair of two people, but names {first} twice."
    return stem(first, int(numbers[0])), stem(second, int(numbers[1])), len(words) == 3


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdigit() and int(word) > 0


def read_people(file: Path, folds: bool) -> tuple[list[list[tuple[int, str, int]]], list[str]]:
    """Read LFW's list of people: `people.txt`, or a list of its development view.

    A list with folds has their number, then for each fold the number of people and a line `NAME
    images` per person. A list without folds is like one fold. Return (line number, name, number of
    images) of each person by fold, and the problems.

    Raises:
        DataError: the file cannot be read.
    """
    numbered = enumerate((text.split() for text in _lines(file)), 1)
    lines = iter([(line, words) for line, words in numbered if words])
    problems: list[str] = []
    read: list[list[tuple[int, str, int]]] = []

    def described(line: int, words: list[str]) -> str:
        return f"line {line} is '{' '.join(words)[:60]}'" if words else "the file ends"

    def count(what: str) -> int | None:
        line, words = next(lines, (0, []))
        if len(words) == 1 and _is_count(words[0]):
            return int(words[0])
        problems.append(f"{described(line, words)} where {what} is expected.")
        return None

    sets = count("the number of folds") if folds else 1
    for k in range(sets or 0):
        size = count(f"fold {k + 1}'s number of people" if folds else "the number of people")
        if size is None:
            return read, problems
        people: list[tuple[int, str, int]] = []
        read.append(people)
        while len(people) < size:
            line, words = next(lines, (0, []))
            if len(words) == 2 and _is_count(words[1]):
                people.append((line, words[0], int(words[1])))
                continue
            where = f"fold {k + 1}" if folds else "the list"
            instead = described(line, words) + (", not 'NAME images'" if words else "")
            problems.append(
                f"{where} should have {size:,} people; after {len(people):,} {instead}."
            )
            return read, problems
    if extra := list(lines):
        problems.append(
            f"line {extra[0][0]} is after the last person that the list counts ({len(extra):,} too"
            " many in all)."
        )
    return read, problems
