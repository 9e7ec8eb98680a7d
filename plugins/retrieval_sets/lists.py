"""Text files that list images: a line each, words apart by blanks or commas.

Every wrong line is told, none ends the reading.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from retrieval.data.error_lists import some
from retrieval.errors import DataError

_MOST_BYTES = (
    2 << 30
)  # the longest list that is published, Google Landmarks' train.csv, has half a gigabyte
_MOST_LINE = 1 << 20


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
                for number, found in enumerate(split, 1):
                    if number <= self.skip or not found:  # a header, or an empty line
                        continue
                    if len(found) == self.words:
                        yield number, found
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
    found = []
    for word in words:
        if not (
            word.isascii() and word.isdigit() and len(word) < 12 and first <= int(word) <= last
        ):
            where = path.name if line is None else f"{path.name}, line {line}"
            problems.append(f"{where}: {word!r} is not a number from {first} to {last:,}.")
            return None
        found.append(int(word))
    return found
