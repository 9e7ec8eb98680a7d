"""Checks of folders against published data sets, and readers of text files that list images."""

from __future__ import annotations

import csv
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from retrieval.errors import DataError, quantity
from retrieval.helpers import ADVICE, Box, Count, Counts, differing, refuse, skip_unreadable, some
from retrieval.plugin import Dataset, FileDataset, find_images

F = TypeVar("F", bound=Callable[..., Dataset])
_MAX_BYTES = 2 << 30  # of a list file
SPLIT_AND_ROLE = {
    "train": ("train", ""),
    "query": ("test", "query"),
    "gallery": ("test", "gallery"),
}
"""The split and the role of the images of each part of a data set with queries and a gallery."""
_MAX_LINE = 1 << 20  # characters; a longer line is read as several, to limit memory
MEANINGS = {
    "counts": '"published" requires the published numbers of images and classes; "any" accepts'
    " any.",
    "skip_bad": "whether to skip and report unreadable images; otherwise the first is an error.",
}
"""Descriptions of the parameters that every data set has."""


def read_lines(
    path: Path, words: int, problems: list[str], *, skip: int = 0, comma: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the words of each line of a text file that has `words` words.

    Args:
        path: the file.
        words: number of words per line.
        problems: after the last line, gets a sentence that names the lines with other numbers of
            words.
        skip: number of header lines.
        comma: whether words are separated by commas, as in CSV, instead of blanks.

    Raises:
        DataError: the file is missing, too large, or not UTF-8 text.
    """
    # Wrong lines are collected, so that one error names all of them.
    wrong: list[int] = []
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise DataError(f"{path} has {size:,} bytes. A list may have at most {_MAX_BYTES:,}.")
        with path.open(encoding="utf-8-sig", newline="" if comma else None) as file:
            # Not `for line in file`: a damaged file may be a single line of gigabytes.
            lines = iter(partial(file.readline, _MAX_LINE), "")
            split: Iterator[list[str]] = (line.split() for line in lines)
            if comma:
                split = csv.reader(lines)
            for number, row in enumerate(split, 1):
                # A header, or an empty line.
                if number <= skip or not row:
                    continue
                if len(row) == words:
                    yield number, row
                else:
                    wrong.append(number)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    except csv.Error as error:
        raise DataError(f"{path} is not valid CSV: {error}.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    if wrong:
        problems.append(
            f"{path.name}: {len(wrong):,} line{'s do' if len(wrong) > 1 else ' does'} not"
            f" have {words} values: {some(wrong)}."
        )


def annotation_bytes(path: Path, most: int) -> bytes:
    """Return the content of a file of annotations.

    Raises:
        DataError: the file has more than `most` bytes, or cannot be read.
    """
    try:
        if (size := path.stat().st_size) > most:
            raise DataError(
                f"{path} has {size:,} bytes. A file of annotations may have at most {most:,}."
            )
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def numbers(
    path: Path, line: int, words: Sequence[str], problems: list[str], first: int, last: int
) -> list[int] | None:
    """Return the words of a line as integers from `first` to `last`.

    If a word is no such integer, add a problem and return `None`.
    """
    values = []
    for word in words:
        if not (
            # int() also accepts signs, spaces, underscores and the digits of other scripts.
            word.isascii() and word.isdigit() and len(word) < 12 and first <= int(word) <= last
        ):
            problems.append(
                f"{path.name}, line {line}: {word!r} is not a number from {first} to {last:,}."
            )
            return None
        values.append(int(word))
    return values


def gallery_images(root: Path, folder: str, label: str = "") -> list[Row]:
    """Return the images of a folder in `root` as a gallery.

    All have the label or, by default, each has its own path as its label.
    """
    keys = [path.relative_to(root).as_posix() for path in find_images(root / folder).images]
    return [Row(key, label or key, "test", "gallery") for key in keys]


def documented(function: F) -> F:
    """Add the shared parameters (`MEANINGS`) and errors to a factory's docstring."""
    names = [name for name in inspect.signature(function).parameters if name in MEANINGS]
    lines = [inspect.getdoc(function) or "", *(f"    {name}: {MEANINGS[name]}" for name in names)]
    raises = "DataError: files are missing or damaged, lines are wrong, or counts differ."
    function.__doc__ = "\n".join([*lines, "", "Raises:", f"    {raises}"])
    return function


@dataclass(frozen=True)
class Published:
    """Facts about a published data set.

    Attributes:
        title: its name.
        home: its source; the text follows "Get TITLE from" in messages.
        holds: required content of its folder; the text follows "The folder must hold".
        counts: numbers of images and classes, by side ("train", "validation", "test", "query",
            "gallery"). If releases or the paper differ, a side has several; any of them is
            accepted.
        apart: plural noun for its labels in messages, such as "products", if no label may be in
            both training and test.
        unknown: whether the gallery may lack classes of queries.
    """

    title: str
    home: str
    holds: str
    counts: Mapping[str, Sequence[Count]] = field(default_factory=dict)
    apart: str | None = None
    unknown: bool = False

    @property
    def advice(self) -> str:
        """Two sentences on how to get the data set."""
        return f"The folder must hold {self.holds}. Get {self.title} from {self.home}."

    def root(self, folder: Path, *names: str, inside: Sequence[str] = ()) -> Path:
        """Return the folder that holds all `names`: `folder` or one of its subfolders `inside`.

        Raises:
            DataError: no folder holds all `names`.
        """
        if not folder.is_dir():
            raise DataError(
                f"[data] folder: {folder} is not a folder. Relative paths start at {Path.cwd()}."
                f" {self.advice}"
            )
        # Users name the folder itself or the one into which they unpacked the archive.
        for candidate in (folder, *(folder / name for name in inside)):
            if all((candidate / name).exists() for name in names):
                return candidate
        missing = [name for name in names if not (folder / name).exists()]
        raise DataError(f"{folder} is not {self.title}: {some(missing)} is missing. {self.advice}")

    def listing(self, folder: Path, *names: str, inside: Sequence[str] = ()) -> Listing:
        """Return an empty listing of the data set; see `root`."""
        return Listing(self, folder, self.root(folder, *names, inside=inside))

    def file(self, folder: Path, *candidates: str) -> Path:
        """Return the first of the candidates, paths in `folder`, that is a file.

        Raises:
            DataError: no such file exists.
        """
        for candidate in candidates:
            if (folder / candidate).is_file():
                return folder / candidate
        missing = f"{Path(candidates[0]).name} is missing"
        raise DataError(f"{folder} is not {self.title}: {missing}. {self.advice}")


class Row(NamedTuple):
    """One image of a list.

    Attributes:
        path: path relative to the folder of the images, with "/".
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


@dataclass
class Listing:
    """The images that the lists of a data set name, and what is wrong with these lists.

    Attributes:
        published: the published data set.
        where: the user's folder, for error messages.
        root: the folder that holds the lists.
        rows: the images of the lists.
        problems: problems of the lists.
        notes: see `Dataset`.
    """

    published: Published
    where: Path
    root: Path
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def dataset(
        self, counts: Counts, skip_bad: bool, *, images: str = "", crop: bool = False
    ) -> Dataset:
        """Return the data set, after checking it against the published one.

        Args:
            counts: "published" requires the published counts, and a gallery with every query's
                class.
            skip_bad: whether to skip unreadable images; the counts include them.
            images: subfolder of `root` to which the paths of the rows are relative.
            crop: whether to crop images to their boxes.

        Raises:
            DataError: lists are wrong, images are missing, counts differ, the gallery is empty, or
                it lacks classes of queries. The message lists all problems.
        """
        published = self.published
        folder = self.root / images
        rows = self.rows
        problems = [*self.problems]
        if not rows and not problems:
            problems.append("its lists name no image.")
        if published.apart:
            sides = ({row.label for row in rows if row.split == side} for side in ("train", "test"))
            if both := set.intersection(*sides):
                problems.append(
                    f"{len(both):,} {published.apart} are on both sides, training and test."
                )
        problems += _path_problems(folder, rows)
        problems += _role_problems(rows, counts == "published", published.unknown)
        if counts == "published":
            problems += count_problems(published, rows)
        if problems:
            refuse(f"{self.where} ({published.title})", [*problems, published.advice])
        notes = [*self.notes]
        if skip_bad:
            paths = [folder / row.path for row in rows]
            readable, unread = skip_unreadable(paths, str(self.where))
            rows = [rows[i] for i in readable]
            notes += unread
        return FileDataset(
            [folder / row.path for row in rows],
            [row.label for row in rows],
            [row.path for row in rows],
            splits=[row.split for row in rows] if any(row.split for row in rows) else None,
            roles=[row.role for row in rows] if any(row.role for row in rows) else None,
            metadata=[row.metadata for row in rows] if any(row.metadata for row in rows) else None,
            boxes=[row.box for row in rows] if crop else None,
            advice=ADVICE,
            notes=notes,
        )


def count_problems(published: Published, rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each side whose counts differ from the published ones."""
    sides: dict[str, list[str]] = {}
    for row in rows:
        # Query and gallery are counted apart; both belong to the test side.
        sides.setdefault(row.role or row.split, []).append(row.label)
    return differing(published.counts, sides)


def inside(path: str) -> bool:
    """Return whether a path in a list stays within the folder of the images."""
    pure = PurePosixPath(path)
    # A list from elsewhere must not make the data set read other files of the user.
    return bool(path) and "\0" not in path and not pure.is_absolute() and ".." not in pure.parts


def _path_problems(images: Path, rows: Sequence[Row]) -> list[str]:
    """Return the problems of paths: outside the folder, listed twice, or missing."""
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
        verb = "is" if len(missing) == 1 else "are"
        problems.append(
            f"{len(missing):,} of {len(seen):,} images {verb} missing in {images}: {some(missing)}."
        )
    return problems


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _role_problems(rows: Sequence[Row], strict: bool, unknown: bool) -> list[str]:
    """Return the problems of the queries and the gallery."""
    query = {row.label for row in rows if row.role == "query"}
    gallery = {row.label for row in rows if row.role == "gallery"}
    if query and not gallery:
        return ["there are queries, but no image is in the gallery."]
    if gallery and not query:
        return ["there is a gallery, but no image is a query."]
    absent = sorted(query - gallery)
    # With counts = "any", a part of the data set may lack some classes, but not all.
    if absent and not unknown and (strict or len(absent) == len(query)):
        classes = quantity(len(absent), "class of queries has", "classes of queries have")
        return [f"{classes} no image in the gallery: {some(absent)}."]
    return []
