"""Read CSV files that list items, as pandas, Excel and Windows write them.

Training and indexing share this reader. It returns strings; `typed` converts whole columns.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from retrieval.base.photo_files import address_of, unreadable
from retrieval.errors import DataError, listed, quantity

Row = dict[str, str]

KNOWN = ("path", "label", "split", "role", "key", "id")
"""Columns with a meaning. Their names may have capitals: `Path` is `path`."""

# Numbers with a leading zero ("007") stay text. So do numbers of more than 15 digits, which a
# reader of JSON may round.
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,14})")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_FORMULA = re.compile("'*[-=+@\t\r\n＝＋－＠]")
"""The beginning of a formula, or of a cell that `csv_text` has made harmless."""
_TRUTH = {"true": True, "false": False}
_MISSING = ("nan", "nat", "<na>")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


class CsvTable:
    """The rows of a CSV file with a header line.

    The file is UTF-8, with or without a byte order mark. Blanks around values are stripped, and so
    is the apostrophe that `csv_text` writes.

    Args:
        name: name of the file in error messages.
        required: columns that the file must have.
        open_file: opens the file for reading bytes.

    Attributes:
        columns: names of the columns; those in `KNOWN` are spelled as there.
        rows: pairs of the number of a row's first line, and the row.
        problems: pairs of a line number and why the row in this line cannot be used.

    Raises:
        DataError: the file cannot be read, is not CSV in UTF-8, or its header is wrong.
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
                    self._add_row(line, values)
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

    def _add_row(self, line: int, values: list[str]) -> None:
        if len(values) == len(self.columns):
            self.rows.append((line, dict(zip(self.columns, map(_plain, values), strict=True))))
            return
        ends = len(values) > len(self.columns) and not values[-1].strip()
        if ends:
            comma = "ends with a comma, so that it "
        else:
            comma = ""
        count = quantity(len(values), "value")
        columns = quantity(len(self.columns), "column")
        self.problems.append((line, f"it {comma}has {count}; the header names {columns}."))

    def files(self, root: Path | None, column: str = "path") -> None:
        """Convert backslashes in paths, and move rows whose path cannot be read to `problems`.

        A path with a Windows drive cannot be read, nor an address whose scheme fsspec does not
        read. All addresses with a scheme share one problem, and so do all paths with a drive.
        Relative paths start from `root`; without `root`,
        backslashes stay.
        """
        strange: dict[str, list[int]] = {}
        whole_rows = []
        for line, row in self.rows:
            if cause := _unreadable_path(row[column]):
                strange.setdefault(cause, []).append(line)
            else:
                if root is not None and not address_of(row[column]):
                    row[column] = _slashes(row[column], root)
                whole_rows.append((line, row))
        self.rows = whole_rows
        for cause, lines in strange.items():
            if len(lines) > 1:
                also = f" (and {len(lines) - 1:,} more lines)"
            else:
                also = ""
            self.problems.append((lines[0], f"{cause}{also}"))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV in which spreadsheets see no formula.

    A text that begins like a formula, such as `=1+1` or `@x`, gets an apostrophe (OWASP, "CSV
    Injection").
    """
    text = io.StringIO()
    # with "\n" as its line terminator, `csv` would not quote a carriage return
    csv.writer(text).writerows(map(_harmless, row) for row in rows)
    return text.getvalue()


def _harmless(cell: Any) -> Any:
    if isinstance(cell, str) and _FORMULA.match(cell) and not _DECIMAL.fullmatch(cell):
        return f"'{cell}"
    return cell


def _plain(cell: str) -> str:
    """Return a cell without the blanks around it and the apostrophe of `csv_text`."""
    cell = cell.strip()
    if cell.startswith("'") and _FORMULA.match(cell):
        return cell[1:]
    return cell


def _unreadable_path(path: str) -> str:
    """Return why a path names no file that can be read, or "" if it may name one."""
    if address := address_of(path):
        return unreadable(address.partition(":")[0])
    if _DRIVE.match(path):
        return (
            "path begins with a Windows drive, which this machine lacks. Write paths relative to"
            " the CSV file."
        )
    return ""


def _slashes(path: str, root: Path) -> str:
    """Return a path with slashes for backslashes, unless a file exists at the path as given."""
    converts = "\\" in path and not os.path.exists(root / path)  # noqa: PTH110
    if converts:
        return path.replace("\\", "/")
    return path


def _lines(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line of each non-empty row, and the row."""
    line = reader.line_num + 1
    for values in reader:
        if values:
            yield line, values
        line = reader.line_num + 1


def _header(name: str, required: Sequence[str], written: list[str]) -> list[str]:
    """Return the names of the columns, or raise one `DataError` that lists all their problems."""
    names = [
        text.lower() if text.lower() in KNOWN and text.lower() not in written else text
        for text in written
    ]
    problems = []
    present = ", ".join(text for text in written if text) or "none"
    for column in required:
        if column not in names:
            close = difflib.get_close_matches(column, names, n=1)
            if close:
                rename = f" Rename '{close[0]}'."
            else:
                rename = ""
            problems.append(f"the header has no column '{column}' (it has: {present}).{rename}")
    problems += [
        f"the header names '{column}' twice."
        for column in sorted({n for n in names if n and names.count(n) > 1})
    ]
    if written and not all(written):
        problems.append(
            "the header has a column without a name. Name or remove it. pandas writes row numbers"
            " into such a column, unless you use to_csv(…, index=False). Another cause is a comma"
            " at the line's end."
        )
    if problems and len(written) == 1 and any(mark in written[0] for mark in ";\t|"):
        problems = ["its columns must be separated by commas."]
    if problems:
        raise DataError(listed(f"{name}, line 1", problems))
    return names


def is_missing_text(text: str) -> bool:
    """Return whether a label's text is blank or denotes a missing value."""
    return not text.strip() or text.strip().lower() in _MISSING


def typed(rows: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Return rows in which each column has the type that all its values share.

    The types are whole numbers, decimal numbers, and true or false; any other column stays text. In
    a converted column, an empty value becomes `None`.
    """
    types = {name: _type_of([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    return [{name: types[name](value) for name, value in row.items()} for row in rows]


def _type_of(values: list[str]) -> Any:
    """Return the function that converts the values of a column."""
    filled = [value for value in values if value]
    if not filled:
        return str
    # Excel writes TRUE, pandas writes True.
    if all(value.lower() in _TRUTH for value in filled):
        return lambda value: _TRUTH[value.lower()] if value else None
    if all(_WHOLE.fullmatch(value) for value in filled):
        return lambda value: int(value) if value else None
    if all(_DECIMAL.fullmatch(value) and math.isfinite(float(value)) for value in filled):
        return lambda value: float(value) if value else None
    return str
