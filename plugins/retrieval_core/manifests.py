"""A CSV file that names images and their labels."""

from __future__ import annotations

from pathlib import Path

from retrieval.data.datasets import FileDataset
from retrieval.data.error_lists import refuse
from retrieval.data.readable import ADVICE, skip_unreadable
from retrieval.data.splits import ROLES, SPLITS, sides
from retrieval.errors import DataError, did_you_mean
from retrieval.plugin import Dataset
from retrieval.serving.files.csv_table import CsvTable, Row, is_missing_text, typed

REQUIRED = ("path", "label")
OPTIONAL = ("split", "role")


def manifest(manifest: Path, root: Path | None = None, skip_bad: bool = False) -> Dataset:
    """Read a CSV file with a header line: `path,label[,split][,role]` and any further columns, kept
    as metadata: numbers and true or false as such where all of a column is, text otherwise.

    `split` is train, validation (or val) or test; `role` is query, gallery or empty. The names of
    these columns, and what `split` and `role` hold, may be in capitals. The file is UTF-8, with
    commas, and quotes where a value holds a comma. Paths that Windows wrote (`a\\b.png`) are read.

    Args:
        manifest: the CSV file; a relative path starts where the command runs.
        root: folder that relative image paths start from; by default the CSV file's own.
        skip_bad: whether images that cannot be read are named and left out; otherwise the first one
            ends the run.

    Raises:
        DataError: with every problem of the file, by line.
    """
    root = manifest.parent if root is None else root
    rows: list[Row] = []
    table = _read(manifest, root)
    problems = table.problems
    seen: dict[str, int] = {}
    for line, row in table.rows:
        problem = _problem(row, root)
        if not problem:
            first = seen.setdefault(row["path"], line)
            if first == line:
                rows.append(row)
                continue
            problem = f"{row['path']} is listed in line {first} already."
        problems.append((line, problem))
    if problems:
        refuse(str(manifest), [f"line {line}: {problem}" for line, problem in sorted(problems)])
    if not rows:
        refuse(str(manifest), ["it lists no image."])
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
        metadata=typed([{name: row[name] for name in further} for row in rows])
        if further
        else None,
        advice=ADVICE,
        notes=notes,
    )


def _problem(row: Row, root: Path) -> str:
    """Return what is wrong with a row, as one sentence; "" for nothing."""
    if not row["path"]:
        return "path is empty."
    if is_missing_text(row["label"]):
        written = f": '{row['label']}' stands for a missing one" if row["label"] else ""
        return f"{row['path']} has no label{written}."
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


def _read(path: Path, root: Path) -> CsvTable:
    """Return the file's rows, with sides and roles as the framework calls them.

    Raises:
        DataError: the file cannot be read, or its header is wrong.
    """
    if not path.exists():
        raise DataError(
            f"[data] manifest: {path} does not exist. Relative paths start at {Path.cwd()}."
        )
    table = CsvTable(str(path), REQUIRED, lambda: path.open("rb"))
    table.files(root)
    if "split" in table.columns:
        known = sides([row["split"] for _, row in table.rows]) or []
        for (_, row), side in zip(table.rows, known, strict=True):
            row["split"] = side
    if "role" in table.columns:
        for _, row in table.rows:
            row["role"] = row["role"].lower()
    return table
