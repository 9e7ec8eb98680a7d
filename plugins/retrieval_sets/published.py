"""Checks of folders against published data sets, and readers of text files that list images."""

from __future__ import annotations

import csv
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TextIO, TypeVar

from retrieval.errors import DataError
from retrieval.plugin import (
    ADVICE,
    Box,
    Count,
    Counts,
    Dataset,
    FileDataset,
    differing,
    refuse,
    skip_unreadable,
    some,
)

F = TypeVar("F", bound=Callable[..., Dataset])
# the longest published list, Google Landmarks' train.csv, has half a gigabyte
_MOST_BYTES = 2 << 30
_MOST_LINE = 1 << 20
MEANINGS = {
    "counts": '"published" requires the published numbers of images and classes; "any" accepts'
    " any.",
    "skip_bad": "whether to skip and report unreadable images; otherwise the first is an error.",
}
"""Descriptions of the parameters that every data set has."""


class Lines:
    """Iterable over the numbered lines of a text file, each split into words.

    Args:
        path: the file.
        words: number of words per line.
        skip: number of header lines.
        comma: whether words are separated by commas, as in CSV, instead of blanks.

    Attributes:
        problems: the file's problems, one sentence per kind.

    Raises:
        DataError: during iteration, if the file is missing, too large, or not UTF-8 text.
    """

    def __init__(self, path: Path, words: int, *, skip: int = 0, comma: bool = False) -> None:
        self.path, self.words, self.skip, self.comma = path, words, skip, comma
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        wrong: list[int] = []
        try:
            if (size := self.path.stat().st_size) > _MOST_BYTES:
                raise DataError(
                    f"{self.path} has {size:,} bytes; a list has {_MOST_BYTES:,} at most."
                )
            with self.path.open(encoding="utf-8-sig", newline="" if self.comma else None) as file:
                bounded = _bounded(file, self.path)
                split = csv.reader(bounded) if self.comma else (line.split() for line in bounded)
                for number, row in enumerate(split, 1):
                    if number <= self.skip or not row:  # a header, or an empty line
                        continue
                    if len(row) == self.words:
                        yield number, row
                    else:
                        wrong.append(number)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path} is not UTF-8 text (byte {error.start}).") from error
        except csv.Error as error:
            raise DataError(f"{self.path} is not valid CSV: {error}.") from error
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        if wrong:
            self.problems.append(
                f"{self.path.name}: {len(wrong):,} line{'s have' if len(wrong) > 1 else ' has'} not"
                f" the {self.words} values that a line should: {some(wrong)}."
            )


def _bounded(file: TextIO, path: Path) -> Iterator[str]:
    """Yield lines; raise DataError if a line is too long, as in a file that is no list."""
    while line := file.readline(_MOST_LINE):
        if len(line) >= _MOST_LINE:
            raise DataError(f"{path} has a line of over {_MOST_LINE:,} characters: it is no list.")
        yield line


def numbers(
    path: Path, line: int | None, words: Sequence[str], problems: list[str], first: int, last: int
) -> list[int] | None:
    """Return words as integers from `first` to `last`, or None after adding a problem."""
    values = []
    for word in words:
        if not (
            word.isascii() and word.isdigit() and len(word) < 12 and first <= int(word) <= last
        ):
            where = path.name if line is None else f"{path.name}, line {line}"
            problems.append(f"{where}: {word!r} is not a number from {first} to {last:,}.")
            return None
        values.append(int(word))
    return values


def documented(function: F) -> F:
    """Add the shared parameters (`MEANINGS`) and errors to a factory's docstring."""
    names = [name for name in inspect.signature(function).parameters if name in MEANINGS]
    lines = [inspect.getdoc(function) or "", *(f"    {name}: {MEANINGS[name]}" for name in names)]
    raises = "DataError: with every problem: missing or damaged files, wrong lines, other numbers."
    function.__doc__ = "\n".join([*lines, "", "Raises:", f"    {raises}"])
    return function


@dataclass(frozen=True)
class Published:
    """Facts about a published data set.

    Attributes:
        title: its name.
        home: its source, as the object of "get it from".
        holds: required content of its folder, as the object of "the folder must hold".
        counts: for each side ("train", "validation", "test", "query", "gallery") the counts found
            in its releases or paper.
    """

    title: str
    home: str
    holds: str
    counts: Mapping[str, Sequence[Count]] = field(default_factory=dict)

    @property
    def advice(self) -> str:
        """Two sentences on how to get the data set."""
        return f"The folder must hold {self.holds}. Get {self.title} from {self.home}."

    def root(self, folder: Path, *names: str, inside: Sequence[str] = ()) -> Path:
        """Return the folder, or one of its folders `inside`, that holds all `names`.

        Raises:
            DataError: there is no such folder; the message says what is missing and where to get
                it.
        """
        if not folder.is_dir():
            raise DataError(
                f"[data] folder: {folder} is not a folder. Relative paths start at {Path.cwd()}."
                f" {self.advice}"
            )
        for place in (folder, *(folder / name for name in inside)):
            if all((place / name).exists() for name in names):
                return place
        missing = [name for name in names if not (folder / name).exists()]
        raise DataError(
            f"{folder} is not {self.title}: {some(missing)} is not there. {self.advice}"
        )


class Row(NamedTuple):
    """One image of a list.

    Attributes:
        path: path below the folder of the images, with "/".
        label: class of the image.
        split: "train", "validation" or "test", or "" if the data have no split.
        role: "query", "gallery" or "".
        box: left, top, right, bottom in pixels, or `None`.
        metadata: further columns.
    """

    path: str
    label: str
    split: str
    role: str = ""
    box: Box | None = None
    metadata: Mapping[str, Any] = {}


def assemble(
    published: Published,
    images: Path,
    rows: Sequence[Row],
    problems: list[str],
    counts: Counts,
    *,
    where: Path,
    crop: bool = False,
    skip_bad: bool = False,
    notes: Sequence[str] = (),
) -> Dataset:
    """Return the data set listed by `rows`, after checking it against the published one.

    Args:
        published: the published data set.
        images: the folder that the rows' paths start from.
        rows: the images of the lists.
        problems: problems found while reading the lists.
        counts: "published" requires the published numbers, and an answer in the gallery for every
            query.
        where: the user's folder, for error messages.
        crop: whether to crop images to their boxes.
        skip_bad: whether to skip unreadable images; they are included in the counts.
        notes: see `Dataset`.

    Raises:
        DataError: there are problems, all of which the message lists: wrong lists, missing images,
            wrong counts, an empty gallery, or query classes that are not in the gallery.
    """
    if not rows and not problems:
        problems.append("it lists no image.")
    problems += _files(images, rows)
    problems += _sides(rows, strict=counts == "published")
    if counts == "published":
        problems += count_problems(published, rows)
    if problems:
        refuse(f"{where} ({published.title})", [*problems, published.advice])
    notices = list(notes)
    if skip_bad:
        kept, unread = skip_unreadable([images / row.path for row in rows], str(where))
        rows, notices = [rows[i] for i in kept], [*notices, *unread]
    return FileDataset(
        [images / row.path for row in rows],
        [row.label for row in rows],
        [row.path for row in rows],
        splits=[row.split for row in rows] if any(row.split for row in rows) else None,
        roles=[row.role for row in rows] if any(row.role for row in rows) else None,
        metadata=[row.metadata for row in rows] if any(row.metadata for row in rows) else None,
        boxes=[row.box for row in rows] if crop else None,
        advice=ADVICE,
        notes=notices,
    )


def count_problems(published: Published, rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each side whose counts differ from the published ones."""
    sides: dict[str, list[str]] = {}
    for row in rows:
        sides.setdefault(row.role or row.split, []).append(row.label)
    return differing(published.counts, sides)


def inside(path: str) -> bool:
    """Return whether a list's path stays below its folder."""
    pure = PurePosixPath(path)
    return bool(path) and "\0" not in path and not pure.is_absolute() and ".." not in pure.parts


def _files(images: Path, rows: Sequence[Row]) -> list[str]:
    """Return all problems of the rows' paths: outside the folder, listed twice, or missing."""
    problems = []
    if outside := [row.path for row in rows if not inside(row.path)]:
        problems.append(
            f"{len(outside):,} paths lead out of the folder: {some([repr(p) for p in outside])}."
        )
    seen: set[str] = set()
    twice = [row.path for row in rows if row.path in seen or seen.add(row.path)]  # type: ignore[func-returns-value]
    if twice:
        problems.append(f"{len(twice):,} images are listed twice: {some(twice)}.")
    missing = [path for path in sorted(seen) if inside(path) and not _is_file(images / path)]
    if missing:
        plural = len(missing) > 1
        problems.append(
            f"{len(missing):,} of {len(seen):,} images {'are' if plural else 'is'} missing in"
            f" {images}: {some(missing)}."
        )
    return problems


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _sides(rows: Sequence[Row], strict: bool) -> list[str]:
    """Return the problems of queries and gallery."""
    query = {row.label for row in rows if row.role == "query"}
    gallery = {row.label for row in rows if row.role == "gallery"}
    if query and not gallery:
        return ["there are queries, and no image is in the gallery."]
    if gallery and not query:
        return ["there is a gallery, and no image is a query."]
    absent = sorted(query - gallery)
    if absent and (strict or len(absent) == len(query)):
        plural = len(absent) > 1
        return [
            f"{len(absent):,} {'classes' if plural else 'class'} of queries"
            f" {'have' if plural else 'has'} no image in the gallery: {some(absent)}."
        ]
    return []
