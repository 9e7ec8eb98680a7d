"""What a data set was published as, whether a folder is that, and text files that list images."""

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
# the longest list that is published, Google Landmarks' train.csv, has half a gigabyte
_MOST_BYTES = 2 << 30
_MOST_LINE = 1 << 20
MEANINGS = {
    "counts": '"published" refuses files with other numbers than the published ones; "any" takes'
    " what is there.",
    "skip_bad": "whether images that cannot be read are named and left out; otherwise the first one"
    " ends the run.",
}
"""What the parameters that every data set has mean."""


class Lines:
    """A list's lines as words.

    Args:
        path: the file.
        words: how many words a line has.
        skip: lines of a header.
        comma: whether words are apart by commas, as in CSV, and not by blanks.

    Attributes:
        problems: what is wrong, one sentence for all lines of a kind.

    Raises:
        DataError: while it is read: the file is missing, too large, or not UTF-8 text.
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
    """Yield lines; a file without line ends is no list."""
    while line := file.readline(_MOST_LINE):
        if len(line) >= _MOST_LINE:
            raise DataError(f"{path} has a line of over {_MOST_LINE:,} characters: it is no list.")
        yield line


def numbers(
    path: Path, line: int | None, words: Sequence[str], problems: list[str], first: int, last: int
) -> list[int] | None:
    """Return words as whole numbers from `first` to `last`, or None and a problem."""
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
    """Add to a factory's docstring what its parameters of `MEANINGS` mean, and what it raises."""
    names = [name for name in inspect.signature(function).parameters if name in MEANINGS]
    lines = [inspect.getdoc(function) or "", *(f"    {name}: {MEANINGS[name]}" for name in names)]
    raises = "DataError: with every problem: missing or damaged files, wrong lines, other numbers."
    function.__doc__ = "\n".join([*lines, "", "Raises:", f"    {raises}"])
    return function


@dataclass(frozen=True)
class Published:
    """A data set as its makers published it.

    Attributes:
        title: what it is called.
        home: where to get it, as the object of "get it from".
        holds: what its folder must hold, as the object of "the folder must hold".
        counts: by side ("train", "validation", "test", "query", "gallery"), each count that a
            release or its paper has.
    """

    title: str
    home: str
    holds: str
    counts: Mapping[str, Sequence[Count]] = field(default_factory=dict)

    @property
    def advice(self) -> str:
        """How to come by it, in two sentences."""
        return f"The folder must hold {self.holds}. Get {self.title} from {self.home}."

    def root(self, folder: Path, *names: str, inside: Sequence[str] = ()) -> Path:
        """Return the folder, or one of its folders `inside`, that holds all `names`.

        Raises:
            DataError: none does; the sentence names what is missing, what the folder must hold and
                where to get it.
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
        path: below the folder of the images, with "/".
        label: its class.
        split: "train", "validation" or "test"; "" where the data have no split.
        role: "query", "gallery" or "".
        box: left, top, right, bottom in pixels, where it has one.
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
    """Return the data set that a folder's lists name, or refuse it with all that is wrong.

    Args:
        published: what it should be.
        images: the folder that the rows' paths start from.
        rows: the lists' images.
        problems: what reading the lists found.
        counts: "published" compares the numbers, and refuses queries that nothing in the gallery
            answers.
        where: what to name in errors: the folder that the user gave.
        crop: whether images are cut to their boxes.
        skip_bad: whether images that cannot be read are left out; they are counted before.
        notes: see `Dataset`.

    Raises:
        DataError: with every problem: lists, missing images, counts, an empty gallery, query
            classes that it lacks.
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
    """Return a sentence for each side whose numbers are not the published ones, naming both."""
    sides: dict[str, list[str]] = {}
    for row in rows:
        sides.setdefault(row.role or row.split, []).append(row.label)
    return differing(published.counts, sides)


def inside(path: str) -> bool:
    """Return whether a list's path stays below its folder."""
    pure = PurePosixPath(path)
    return bool(path) and "\0" not in path and not pure.is_absolute() and ".." not in pure.parts


def _files(images: Path, rows: Sequence[Row]) -> list[str]:
    """Return what is wrong with the rows' paths: outside, listed twice, missing; all at once."""
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
    """Return what is wrong with query and gallery."""
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
