"""A CSV file that names images and their labels."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrieval import DataError, Dataset
from retrieval.data.datasets import FileDataset
from retrieval.data.error_lists import refuse
from retrieval.data.readable import ADVICE, skip_unreadable
from retrieval.data.splits import ROLES, SPLITS
from retrieval.errors import did_you_mean
from retrieval.serving.files.columns import typed

REQUIRED = ("path", "label")
OPTIONAL = ("split", "role")


def manifest(manifest: Path, root: Path | None = None, skip_bad: bool = False) -> Dataset:
    """Read a CSV file with a header line: `path,label[,split][,role]` and any further columns, kept as metadata: numbers and
    true or false as such where all of a column is, text otherwise.

    `split` is train, validation or test; `role` is query, gallery or empty. The file is UTF-8, with commas, and
    quotes where a value holds a comma.

    Args:
        manifest: the CSV file; a relative path starts where the command runs.
        root: folder that relative image paths start from; by default the CSV file's own.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one ends the run.

    Raises:
        DataError: with every problem of the file, by line.
    """
    root = manifest.parent if root is None else root
    rows: list[dict[str, str]] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for line, row in _rows(manifest):
        problem = row if isinstance(row, str) else _problem(row, root)
        if not problem and isinstance(row, dict):
            first = seen.setdefault(row["path"], line)
            if first == line:
                rows.append(row)
                continue
            problem = f"{row['path']} is listed in line {first} already."
        problems.append(f"line {line}: {problem}")
    if not rows and not problems:
        problems.append("it lists no image.")
    if problems:
        refuse(str(manifest), problems)
    notes: list[str] = []
    if skip_bad:
        kept, notes = skip_unreadable([root / row["path"] for row in rows], str(manifest))
        rows = [rows[i] for i in kept]
    columns = list(rows[0])
    further = [name for name in columns if name not in (*REQUIRED, *OPTIONAL)]
    return FileDataset(
        [root / row["path"] for row in rows],
        [row["label"] for row in rows],
        [row["path"] for row in rows],
        splits=[row["split"] for row in rows] if "split" in columns else None,
        roles=[row["role"] for row in rows] if "role" in columns else None,
        metadata=typed([{name: row[name] for name in further} for row in rows]) if further else None,
        advice=ADVICE,
        notes=notes,
    )


def _problem(row: dict[str, str], root: Path) -> str:
    """Return what is wrong with a row, as one sentence; "" for nothing."""
    if not row["path"]:
        return "path is empty."
    if not row["label"]:
        return f"{row['path']} has no label."
    split, role = row.get("split"), row.get("role")
    if split is not None and split not in SPLITS and not (split == "" and role):
        return f"split must be {', '.join(SPLITS)}, not '{split}'.{did_you_mean(split, SPLITS)}"
    if role is not None and role not in ROLES:
        return f"role must be query, gallery or empty, not '{role}'.{did_you_mean(role, ROLES)}"
    try:
        if not (root / row["path"]).is_file():
            return f"{root / row['path']} is not a file."
    except (OSError, ValueError) as error:  # a null character, or a name that is too long
        return f"{row['path']!r} is not a path: {error}."
    return ""


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yield each row with its line number, or what is wrong with it.

    Raises:
        DataError: the file cannot be read, is not UTF-8 text, or its header is wrong.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader: Any = csv.reader(file, strict=True)
            names = [name.strip() for name in next(reader, [])]
            _check_header(path, names)
            while True:
                line = reader.line_num + 1
                try:
                    values = next(reader)
                except StopIteration:
                    return
                if not values:
                    continue
                if len(values) == len(names):
                    yield line, dict(zip(names, (value.strip() for value in values), strict=True))
                else:
                    yield line, f"it has {len(values)} values; the header names {len(names)} columns."
    except FileNotFoundError:
        raise DataError(
            f"[data] manifest: {path} does not exist. Relative paths start at {Path.cwd()}."
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    except csv.Error as error:
        raise DataError(f"{path} is not valid CSV, near line {reader.line_num}: {error}.") from error


def _check_header(path: Path, names: list[str]) -> None:
    problems = []
    for name in REQUIRED:
        if name not in names:
            there = ", ".join(names) or "none"
            problems.append(
                f"the header has no column '{name}' (it has: {there}).{did_you_mean(name, names)}"
            )
    problems += [
        f"the header names '{name}' twice." for name in sorted({n for n in names if names.count(n) > 1})
    ]
    if any(not name for name in names):
        problems.append("the header has a column without a name.")
    if problems and len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
        problems = ["its columns must be separated by commas."]
    if problems:
        refuse(f"{path}, line 1", problems)
