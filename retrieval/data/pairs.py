"""Lists of pairs that are "same" or not: CSV files, or the layout of Labeled Faces in the Wild.

Huang, Ramesh, Berg & Learned-Miller, "Labeled Faces in the Wild: A Database for Studying Face
Recognition in Unconstrained Environments", University of Massachusetts, TR 07-49, 2007.
"""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from retrieval.base.arrays import Bools, Ints
from retrieval.base.csv_table import CsvTable
from retrieval.data.splits import natural
from retrieval.errors import DataError, refuse

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

    first: Ints
    second: Ints
    same: Bools
    fold: Ints | None = None
    folds: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.same)


class Row(NamedTuple):
    """One line of a list: its number, both names, "same" or not, and fold ("" without folds)."""

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
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{file} does not exist. Relative paths start at {Path.cwd()}.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    lines = content.decode("utf-8-sig", "replace").splitlines()
    start = next((line for line in lines if line.strip()), "")
    items: defaultdict[str, list[int]] = defaultdict(list)
    if re.fullmatch(r"\s*\d{1,9}(\s+\d{1,9})?\s*", start):
        rows, problems = _lfw(lines)
        for item, key in enumerate(keys):
            path = PurePosixPath(key)
            items[f"{path.parent.name}/{path.stem}"].append(item)
    else:
        rows, problems = _csv(file, content)
        for item, key in enumerate(keys):
            items[key].append(item)
    example = ""
    if len(keys):
        example = f" (the data have keys such as {keys[0]!r})"
    indices = np.zeros((len(rows), 2), np.int64)
    seen: dict[frozenset[str], Row] = {}
    for i, row in enumerate(rows):
        for side, name in enumerate((row.first, row.second)):
            namesakes = items.get(name, ())
            if len(namesakes) == 1:
                indices[i, side] = namesakes[0]
            elif namesakes:
                count = len(namesakes)
                problems.append(f"line {row.line}: {name!r}: {count} items have that name.")
            else:
                problems.append(f"line {row.line}: {name!r}: there is no such item{example}.")
                example = ""  # one example is enough
        # A pair is the same in either order.
        earlier = seen.setdefault(frozenset((row.first, row.second)), row)
        if row.first == row.second:
            problems.append(f"line {row.line}: {row.first!r} is paired with itself.")
        elif earlier.same != row.same:
            says = ["different", "the same"]
            problems.append(
                f"line {row.line}: {row.first} and {row.second} are {says[row.same]} here and"
                f" {says[earlier.same]} in line {earlier.line}."
            )
    same = np.array([row.same for row in rows], np.bool_)
    if len(same) and (same.all() or not same.any()):
        word = "the same" if same.all() else "different"
        problems.append(f"all {len(same):,} pairs are {word}: both kinds are needed.")
    elif not rows and not problems:
        problems.append("it lists no pair.")
    names = sorted({row.fold for row in rows} - {""}, key=natural)
    numbers = {name: k for k, name in enumerate(names)}
    fold = None
    # While there are other problems, a row may lack its fold.
    if names and not problems:
        fold = np.array([numbers[row.fold] for row in rows], np.int64)
        problems = fold_problems(same, fold, names)
    if problems:
        refuse(str(file), problems)
    return LabelledPairs(indices[:, 0], indices[:, 1], same, fold, tuple(names))


def fold_problems(same: Bools, fold: Ints, names: Sequence[str]) -> list[str]:
    """Return the problems that prevent choosing each fold's threshold on the other folds."""
    if len(names) < 2:
        return [
            f"all pairs are in one fold ('{names[0]}'), but the threshold of a fold is chosen on"
            " the other folds. Name at least two folds, or none: then the pairs are divided into"
            " folds."
        ]
    counts = [np.bincount(fold[same == kind], minlength=len(names)) for kind in (True, False)]
    return [
        f"outside the fold '{name}' all pairs are {word}: no threshold can be chosen for it."
        for word, lacking in (("different", counts[0]), ("the same", counts[1]))
        for k, name in enumerate(names)
        if lacking.sum() and lacking.sum() == lacking[k]
    ]


def _csv(file: Path, content: bytes) -> tuple[list[Row], list[str]]:
    """Return the pairs of a CSV file, and problems."""
    table = CsvTable(str(file), COLUMNS, lambda: io.BytesIO(content))
    problems = [f"line {line}: {problem}" for line, problem in table.problems]
    rows: list[Row] = []
    for line, row in table.rows:
        first, second, same, fold = (row.get(name, "") for name in (*COLUMNS, "fold"))
        if not first or not second:
            problems.append(f"line {line}: a pair needs two items; one is empty.")
        elif same not in ("0", "1"):
            problems.append(f"line {line}: same must be 1 or 0, not '{same}'.")
        elif not fold and "fold" in row:
            problems.append(
                f"line {line}: its fold is empty: name the fold of each pair, or remove the column"
                " 'fold'."
            )
        else:
            rows.append(Row(line, first, second, same == "1", fold))
    return rows, problems


def _lfw(lines: list[str]) -> tuple[list[Row], list[str]]:
    """Return the pairs of a list of Labeled Faces in the Wild, and problems."""
    numbered = [(number, line.split()) for number, line in enumerate(lines, 1)]
    (start, head), *body = [(number, words) for number, words in numbered if words]
    folds = int(head[0]) if len(head) == 2 else 1
    per_kind = int(head[-1])
    problems = []
    if not per_kind or len(body) != folds * 2 * per_kind:
        problems.append(
            f"line {start} states {folds:,} × {per_kind:,} same and as many different pairs,"
            f" {folds * 2 * per_kind:,} lines; {len(body):,} follow."
        )
    rows: list[Row] = []
    for i, (line, words) in enumerate(body):
        match words:
            case [name, n1, n2] if _are_counts(n1, n2):
                images = (name, n1), (name, n2)
            case [name1, n1, name2, n2] if name1 != name2 and _are_counts(n1, n2):
                images = (name1, n1), (name2, n2)
            case _:
                problems.append(
                    f"line {line}: 'NAME n1 n2' or 'NAME1 n1 NAME2 n2' (two people) is expected,"
                    f" with numbers from 1, not '{' '.join(words)[:60]}'."
                )
                continue
        # The images of a person are numbered with four digits.
        first, second = (f"{name}/{name}_{int(number):04d}" for name, number in images)
        fold = ""
        if len(head) == 2:
            fold = str(i // (2 * per_kind or 1) + 1)
        rows.append(Row(line, first, second, len(words) == 3, fold))
    # After a problem, the counts would only repeat it.
    if problems:
        return rows, problems
    counts = Counter((row.fold, row.same) for row in rows)
    for fold in dict.fromkeys(row.fold for row in rows):
        if counts[fold, True] != per_kind:
            problems.append(
                f"{f'fold {fold}' if fold else 'it'} has {counts[fold, True]:,} same and"
                f" {counts[fold, False]:,} different pairs; line {start} states {per_kind:,} of"
                " each."
            )
    return rows, problems


def _are_counts(*words: str) -> bool:
    return all(re.fullmatch("[0-9]{1,9}", word) and int(word) > 0 for word in words)
