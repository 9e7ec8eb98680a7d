"""The user's own images: one folder per class, or a CSV file that lists them."""

from __future__ import annotations

import logging
from pathlib import Path

from retrieval.errors import DataError, did_you_mean
from retrieval.plugin import (
    ADVICE,
    ROLES,
    SIDES,
    SPLITS,
    CsvTable,
    Dataset,
    FileDataset,
    find_images,
    is_missing_text,
    refuse,
    report_left_out,
    sides,
    skip_unreadable,
    some,
    typed,
)

Row = dict[str, str]
log = logging.getLogger(__name__)
REQUIRED = ("path", "label")
OPTIONAL = ("split", "role")


def image_folder(folder: Path, skip_bad: bool = False) -> Dataset:
    """Read a folder that has one folder of images per class: `folder/CLASS/*.jpg`.

    If all folders in it are called `train`, `validation` (or `val`), `test`, `query` or `gallery`
    and hold the class folders (`folder/train/CLASS/*.jpg`), they define the split. An item's key is
    its path below `folder`.

    Args:
        folder: the folder; a relative path starts at the working directory.
        skip_bad: whether to skip and report unreadable images; otherwise the first one is an error.

    Raises:
        DataError: the folder does not exist, holds no image, or holds images outside the class
            folders.
    """
    if not folder.is_dir():
        raise DataError(
            f"[data] folder: {folder} is not a folder. Relative paths start at {Path.cwd()}."
        )
    top = _folders(folder)
    split = bool(top) and all(place.name.lower() in SIDES and _folders(place) for place in top)
    depth = 2 if split else 1  # number of folders above an image; the last one is its class
    images = find_images(folder)
    files, notes = images.images, report_left_out(images, folder, skip_bad)
    keys = [file.relative_to(folder) for file in files]
    stray = [key for key in keys if len(key.parts) <= depth]
    if stray:
        plural = len(stray) > 1
        raise DataError(
            f"{folder}: {len(stray):,} image{'s lie' if plural else ' lies'} in no class's folder,"
            f" so there is no label: {some(stray)}. Move {'them' if plural else 'it'}."
        )
    classes = [inner for place in top for inner in _folders(place)] if split else top
    filled = {folder.joinpath(*key.parts[:depth]) for key in keys}
    empty = [place.relative_to(folder) for place in classes if place not in filled]
    if empty:
        log.warning("%s: no image in %s.", folder, some(empty))
    if skip_bad:
        kept, unread = skip_unreadable(files, str(folder))
        notes += unread
        files, keys = [files[i] for i in kept], [keys[i] for i in kept]
    sides = [SIDES[key.parts[0].lower()] for key in keys] if split else None
    roles = [role for _, role in sides] if sides else []
    return FileDataset(
        files,
        [key.parts[depth - 1] for key in keys],
        [key.as_posix() for key in keys],
        splits=[side for side, _ in sides] if sides else None,
        roles=roles if any(roles) else None,
        advice=ADVICE,
        notes=notes,
    )


def _folders(folder: Path) -> list[Path]:
    """Return the sorted subfolders of a folder, without hidden ones."""
    try:
        return sorted(
            place for place in folder.iterdir() if place.is_dir() and not place.name.startswith(".")
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}.") from error


def manifest(manifest: Path, root: Path | None = None, skip_bad: bool = False) -> Dataset:
    r"""Read a CSV file with a header line: `path,label[,split][,role]` and further columns.

    `split` is train, validation (or val) or test; `role` is query, gallery or empty. The names of
    these columns and the values of `split` and `role` may be in capitals. The file is UTF-8 and
    separated by commas; quote a value that contains a comma. Windows paths (`a\b.png`) work too.

    Args:
        manifest: the CSV file; a relative path starts at the working directory.
        root: folder that relative image paths start from; by default the CSV file's folder.
        skip_bad: whether to skip and report unreadable images; otherwise the first one is an error.

    Raises:
        DataError: the file has problems; the message lists each with its line.
    """
    root = manifest.parent if root is None else root
    rows: list[Row] = []
    table = _read_table(manifest, root)
    problems = table.problems
    seen: dict[str, int] = {}
    for line, row in table.rows:
        problem = _row_problem(row, root)
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


def _row_problem(row: Row, root: Path) -> str:
    """Return the row's first problem as a sentence, or "" if the row is valid."""
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


def _read_table(path: Path, root: Path) -> CsvTable:
    """Return the file's table, with normalised values of `split` and `role`."""
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
