"""CSV files that name items, as pandas, Excel and Windows write them.

Training and indexing read them alike.

All values are text in the file; `typed` gives each column its type.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from retrieval.errors import DataError, listed

Row = dict[str, str]

KNOWN = ("path", "label", "split", "role", "key", "id")
"""Columns that mean something. They are known in capitals too, as `Path`."""

# a leading zero makes a code of a number ("007"), and beyond 15 digits a reader of JSON may round
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,14})")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_TRUTH = {"true": True, "false": False}
_MISSING = ("nan", "nat", "<na>")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


class CsvTable:
    """The rows of a CSV file with a header line.

    The file is UTF-8 (Excel's mark at its beginning is skipped). Blanks around values do not count.

    Args:
        name: what errors call the file.
        required: columns that there must be.
        open_file: opens the file for reading bytes.

    Attributes:
        columns: the names of the columns, those of `KNOWN` as they are written there.
        rows: each row with the number of its first line.
        problems: what is wrong with other rows: the line, and a sentence.

    Raises:
        DataError: the file cannot be read, is no CSV in UTF-8, or its header is wrong.
    """

    def __init__(
        self, name: str, required: Sequence[str], open_file: Callable[[], BinaryIO]
    ) -> None:
        self.columns: list[str] = []
        self.rows: list[tuple[int, Row]] = []
        self.problems: list[tuple[int, str]] = []
        reader: Any = None
        try:
            with io.TextIOWrapper(open_file(), encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, strict=True)
                self.columns = _header(name, required, [text.strip() for text in next(reader, [])])
                for line, values in _lines(reader):
                    self._take(line, values)
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name} is not UTF-8 text (byte {error.start}). Save it as UTF-8."
            ) from error
        except csv.Error as error:
            raise DataError(
                f"{name} is not valid CSV, near line {reader.line_num}: {error}."
            ) from error

    def _take(self, line: int, values: list[str]) -> None:
        if len(values) == len(self.columns):
            self.rows.append((line, dict(zip(self.columns, map(str.strip, values), strict=True))))
            return
        comma = "ends with a comma, so that it " if not values[-1].strip() else ""
        count = f"{len(values)} value{'s' if len(values) > 1 else ''}"
        self.problems.append(
            (line, f"it {comma}has {count}; the header names {len(self.columns)} columns.")
        )

    def files(self, root: Path | None) -> None:
        """Give paths the slashes of this machine, and take out rows whose path is elsewhere.

        Addresses and Windows drives are problems, one for all rows.

        Args:
            root: the folder that relative paths start from; None where paths are not of this
                machine.
        """
        strange: dict[str, list[int]] = {}
        kept = []
        for line, row in self.rows:
            if cause := _elsewhere(row["path"]):
                strange.setdefault(cause, []).append(line)
            else:
                if root is not None:
                    row["path"] = _slashes(row["path"], root)
                kept.append((line, row))
        self.rows = kept
        for cause, lines in strange.items():
            also = f" (and {len(lines) - 1:,} more lines)" if len(lines) > 1 else ""
            self.problems.append((lines[0], f"{cause}{also}"))


def _elsewhere(path: str) -> str:
    """Return why a path is no file of this machine, as a sentence; "" where it may be one."""
    if _ADDRESS.match(path):
        return (
            "path is an address, and images are read from files. Download them and name the files."
        )
    if os.name != "nt" and _DRIVE.match(path):
        return (
            "path begins with a Windows drive, which this machine lacks. Write paths relative to"
            " the CSV file."
        )
    return ""


def _slashes(path: str, root: Path) -> str:
    windows = "\\" in path and os.sep == "/"
    return path.replace("\\", "/") if windows and not os.path.exists(root / path) else path  # noqa: PTH110


def _lines(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not empty, with the number of its first line."""
    line = reader.line_num + 1
    for values in reader:
        if values:
            yield line, values
        line = reader.line_num + 1


def _header(name: str, required: Sequence[str], written: list[str]) -> list[str]:
    """Return the names of the columns, or refuse all that is wrong with them."""
    names = [
        text.lower() if text.lower() in KNOWN and text.lower() not in written else text
        for text in written
    ]
    problems = []
    present = ", ".join(text for text in written if text) or "none"
    for column in required:
        if column not in names:
            close = difflib.get_close_matches(column, names, n=1)
            rename = f" Rename '{close[0]}'." if close else ""
            problems.append(f"the header has no column '{column}' (it has: {present}).{rename}")
    problems += [
        f"the header names '{column}' twice."
        for column in sorted({n for n in names if n and names.count(n) > 1})
    ]
    if written and not all(written):
        where = "first" if not written[0] else "last" if not written[-1] else "middle"
        problems.append(
            {
                "first": (
                    "the header has a column without a name, the first: pandas writes row numbers"
                    " so. Write the file with to_csv(…, index=False)."
                ),
                "last": (
                    "the header has a column without a name, the last: the line ends with a comma."
                    " Remove it (of pandas' row numbers: to_csv(…, index=False))."
                ),
                "middle": "the header has a column without a name. Name or remove it.",
            }[where]
        )
    if problems and len(written) == 1 and any(mark in written[0] for mark in ";\t|"):
        problems = ["its columns must be separated by commas."]
    if problems:
        raise DataError(listed(f"{name}, line 1", problems))
    return names


def is_missing_text(text: str) -> bool:
    """Return whether a label's text says that there is none: blank, or a missing value."""
    return not text.strip() or text.strip().lower() in _MISSING


def typed(rows: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Return rows with the values of each column in the one type that all of them have.

    Whole numbers, decimal numbers, true or false; a column with anything else stays text. In a
    column of another type than text an empty value is None.
    """
    types = {name: _type_of([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    return [{name: types[name](value) for name, value in row.items()} for row in rows]


def _type_of(values: list[str]) -> Any:
    filled = [value for value in values if value]
    if not filled:
        return str
    if all(value.lower() in _TRUTH for value in filled):  # Excel writes TRUE, pandas True
        return lambda value: _TRUTH[value.lower()] if value else None
    if all(_WHOLE.fullmatch(value) for value in filled):
        return lambda value: int(value) if value else None
    if all(_DECIMAL.fullmatch(value) and math.isfinite(float(value)) for value in filled):
        return lambda value: float(value) if value else None
    return str
