"""The user's own images: one folder per class, or a CSV file that lists them."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from retrieval.errors import DataError, did_you_mean, quantity
from retrieval.helpers import (
    ADVICE,
    ROLES,
    SIDES,
    SPLITS,
    Box,
    CsvTable,
    address_of,
    is_missing_text,
    path_in,
    refuse,
    report_left_out,
    sides,
    skip_unreadable,
    some,
    typed,
)
from retrieval.plugin import Dataset, FileDataset, find_images

Row = dict[str, str]
log = logging.getLogger(__name__)
OPTIONAL = ("split", "role")
FLAGS = ("is_query", "is_gallery")
BOX = ("x_1", "x_2", "y_1", "y_2")
_TRUE = ("true", "1", "1.0")


def image_folder(
    folder: Path,
    levels: list[str] | None = None,
    label: str | None = None,
    skip_bad: bool = False,
) -> Dataset:
    """Read a folder that has one subfolder of images per class: `folder/CLASS/*.jpg`.

    If all its subfolders are named `train`, `validation` (or `val`), `test`, `query` or `gallery`
    and contain the class folders (`folder/train/CLASS/*.jpg`), they define the split. An item's key
    is its path relative to `folder`.

    Args:
        folder: the folder, or an address such as s3://bucket/photos. A relative path starts at the
            working directory.
        levels: names of nested levels of folders, the outermost first, such as ["brand", "model"]
            for `folder/BRAND/MODEL/*.jpg`. All levels except the label's become metadata.
        label: the level whose folder name is an item's label; by default the last of `levels`.
        skip_bad: whether to skip and report unreadable images; otherwise the first one is an error.

    Raises:
        DataError: the folder does not exist, has no image, or has images outside the class
            folders; or `levels` are empty or repeated, or `label` is not one of them.
    """
    if not address_of(folder) and not folder.is_dir():
        raise DataError(
            f"[data] folder: {folder} is not a folder. Relative paths start at {Path.cwd()}."
        )
    names = _levels(levels, label)
    chosen = label or names[-1]
    top = _folders(folder)
    # A single folder with another name makes all of them classes, such as a class 'test'.
    split = bool(top) and all(child.name.lower() in SIDES and _folders(child) for child in top)
    # The folders of the sides are above the levels.
    above = int(split)
    images = find_images(folder)
    files = images.images
    notes = report_left_out(images, folder, skip_bad)
    keys = [file.relative_to(folder) for file in files]
    _refuse_shallow(folder, keys, above + len(names), levels is None)
    if split:
        classes = [inner for child in top for inner in _folders(child)]
    else:
        classes = top
    filled = {folder.joinpath(*key.parts[: above + 1]) for key in keys}
    if empty := [child.relative_to(folder) for child in classes if child not in filled]:
        log.warning("%s: no image in %s.", folder, some(empty))
    if skip_bad:
        readable, unread = skip_unreadable(files, str(folder))
        notes += unread
        files = [files[i] for i in readable]
        keys = [keys[i] for i in readable]
    deepest = max((len(key.parts) - 1 for key in keys), default=0) - above
    if levels is not None or deepest > len(names):
        notes = [*notes, _level_note(folder, names, chosen, deepest)]
    rows = [dict(zip(names, key.parts[above:], strict=False)) for key in keys]
    sides = [SIDES[key.parts[0].lower()] if split else ("", "") for key in keys]
    further = [name for name in names if name != chosen]
    return FileDataset(
        files,
        [row[chosen] for row in rows],
        [key.as_posix() for key in keys],
        splits=[side for side, _ in sides] if split else None,
        roles=[role for _, role in sides] if any(role for _, role in sides) else None,
        metadata=[{name: row[name] for name in further} for row in rows] if further else None,
        advice=ADVICE,
        notes=notes,
    )


def _refuse_shallow(folder: Path, keys: list[Path], depth: int, plain: bool) -> None:
    """Raise a `DataError` for images in fewer than `depth` folders; `plain` means no `levels`."""
    shallow = [key for key in keys if len(key.parts) <= depth]
    if shallow:
        if plain:
            where = "no class folder"
        else:
            where = f"fewer than {depth} folders"
        raise DataError(
            f"{folder}: {quantity(len(shallow), 'image is', 'images are')} in {where}, so there is"
            f" no label: {some(shallow)}. Move {'it' if len(shallow) == 1 else 'them'}."
        )


def _level_note(folder: Path, names: list[str], chosen: str, deepest: int) -> str:
    """Return a note on the levels of folders that are read, and on deeper folders."""
    levels = f"{quantity(len(names), 'level')} of folders ({'/'.join(names)})"
    note = f"{folder}: The dataset reads {levels}, and the label is the {chosen}."
    if deepest <= len(names):
        return note
    return (
        f"{note} Some images are up to {deepest} levels deep. Set levels = [...] to read more"
        " levels."
    )


def _levels(levels: list[str] | None, label: str | None) -> list[str]:
    """Return the checked names of the levels of folders.

    Raises:
        DataError: names are missing or equal, or the label is not one of them.
    """
    if levels is None and label is None:
        return ["class"]
    names = levels or []
    if not all(name.strip() for name in names) or len({*names}) < max(1, len(names)):
        raise DataError(
            "[data] levels: name each level of folders once, the outermost first, such as"
            ' levels = ["brand", "model"].'
        )
    if label is not None and label not in names:
        raise DataError(
            f"[data] label: '{label}' is not in levels = {names}.{did_you_mean(label, names)}"
        )
    return names


def _folders(folder: Path) -> list[Path]:
    """Return the subfolders of a folder, sorted, without hidden ones.

    Those of an address are the ones with an image, since a storage has no empty folders.
    """
    if address_of(folder):
        inside = [file.relative_to(folder) for file in find_images(folder).images]
        return sorted({folder / file.parts[0] for file in inside if len(file.parts) > 1})
    try:
        return sorted(
            child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}.") from error


def manifest(
    manifest: Path,
    root: Path | None = None,
    path: str = "path",
    label: str = "label",
    skip_bad: bool = False,
) -> Dataset:
    r"""Read a CSV file with a header line: `path,label[,split][,role]` and further columns.

    `split` is train, validation (or val) or test; `role` is query, gallery or empty. The names of
    these four columns and the values of `split` and `role` may be in capitals. The file is UTF-8
    and separated by commas; quote a value that contains a comma. Windows paths (`a\b.png`) work
    too.

    Files of OML (open-metric-learning) are read unchanged. If they have the columns `is_query` and
    `is_gallery`, their validation rows become the test side. Either all test rows must be both
    query and gallery, or each must be only one of the two. `x_1`, `x_2`, `y_1` and `y_2` are the
    left, right, top and bottom of an item's box.

    Args:
        manifest: the CSV file. A relative path starts at the working directory.
        root: folder to which image paths are relative; by default the CSV file's folder.
        path: the column of image paths, or of addresses such as s3://bucket/photo.jpg.
        label: the column of labels.
        skip_bad: whether to skip and report unreadable images; otherwise the first one is an error.

    Raises:
        DataError: the file has problems. The message lists them with their lines.
    """
    if root is None:
        root = manifest.parent
    rows: list[Row] = []
    table = _read_table(manifest, root, path, label)
    problems = table.problems
    boxed = all(name in table.columns for name in BOX)
    boxes: list[Box | None] = []
    seen: dict[tuple[str, Box | None], int] = {}
    for line, row in table.rows:
        problem = _row_problem(row, root, path, label)
        box = None
        if boxed and not problem:
            box, problem = _box(row)
        if not problem:
            # One image may be listed several times with different boxes, each of which is an item.
            first = seen.setdefault((row[path], box), line)
            if first == line:
                rows.append(row)
                boxes.append(box)
                continue
            problem = f"{row[path]} is already listed in line {first}."
        problems.append((line, problem))
    if problems:
        refuse(str(manifest), [f"line {line}: {problem}" for line, problem in sorted(problems)])
    if not rows:
        refuse(str(manifest), ["it lists no image."])
    notes: list[str] = []
    if skip_bad:
        readable, notes = skip_unreadable([path_in(root, row[path]) for row in rows], str(manifest))
        rows = [rows[i] for i in readable]
        boxes = [boxes[i] for i in readable]
    columns = list(rows[0])
    reserved = (path, label, *OPTIONAL, *FLAGS, *(BOX if boxed else ()))
    further = [name for name in columns if name not in reserved]
    return FileDataset(
        [path_in(root, row[path]) for row in rows],
        [row[label] for row in rows],
        [
            row[path] if box is None else f"{row[path]} {','.join(f'{edge:.15g}' for edge in box)}"
            for row, box in zip(rows, boxes, strict=True)
        ],
        splits=[row["split"] for row in rows] if "split" in columns else None,
        roles=[row["role"] for row in rows] if "role" in columns else None,
        metadata=typed([{name: row[name] for name in further} for row in rows])
        if further
        else None,
        boxes=boxes if boxed else None,
        advice=ADVICE,
        notes=notes,
    )


def _row_problem(row: Row, root: Path, path: str, label: str) -> str:
    """Return the row's first problem as a sentence, or "" if the row is valid."""
    if not row[path]:
        return f"{path} is empty."
    if is_missing_text(row[label]):
        if row[label]:
            hint = f": '{row[label]}' stands for a missing value"
        else:
            hint = ""
        return f"{row[path]} has no {label}{hint}."
    split = row.get("split")
    role = row.get("role")
    if split is not None and split not in SPLITS and not (split == "" and role):
        return f"split must be {', '.join(SPLITS)}, not '{split}'.{did_you_mean(split, SPLITS)}"
    if role is not None and role not in ROLES:
        return f"role must be query, gallery or empty, not '{role}'.{did_you_mean(role, ROLES)}"
    try:
        file = path_in(root, row[path])
        # To ask a storage for each photo would take about as long as to read them.
        if not address_of(file) and not file.is_file():
            return f"{file} is not a file."
    except (OSError, ValueError) as error:  # a null character, or a name that is too long
        return f"{row[path]!r} is not a path: {error}."
    return ""


def _box(row: Row) -> tuple[Box | None, str]:
    """Return an OML row's box, or `None` for the whole image, and what is wrong with it or ""."""
    edges = [row[name] for name in BOX]
    if all(is_missing_text(edge) for edge in edges):
        return None, ""
    try:
        left, right, top, bottom = numbers = [float(edge) for edge in edges]
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        return None, f"{', '.join(BOX)} must be finite numbers, not {', '.join(map(repr, edges))}."
    if not (left < right and top < bottom):
        return None, (
            f"its box is empty: x_1 must be less than x_2, and y_1 less than y_2, not {edges}."
        )
    return (left, top, right, bottom), ""


def _read_table(file: Path, root: Path, path: str, label: str) -> CsvTable:
    """Return the file's table with `split` and `role` in canonical form."""
    if not file.exists():
        raise DataError(
            f"[data] manifest: {file} does not exist. Relative paths start at {Path.cwd()}."
        )
    table = CsvTable(str(file), (path, label), lambda: file.open("rb"))
    table.files(root, path)
    if "split" in table.columns:
        known = sides([row["split"] for _, row in table.rows]) or []
        for (_, row), side in zip(table.rows, known, strict=True):
            row["split"] = side
    if "role" in table.columns:
        for _, row in table.rows:
            row["role"] = row["role"].lower()
    elif all(flag in table.columns for flag in FLAGS):
        _flags_to_roles(table)
    return table


def _flags_to_roles(table: CsvTable) -> None:
    """Convert OML's `is_query` and `is_gallery` to roles, and its validation to the test side."""
    ambiguous = []
    single = False
    for line, row in table.rows:
        row["role"] = ""
        if row.get("split") == "train":
            continue
        if row.get("split") == "validation":
            row["split"] = "test"
        # OML has no third side: what it validates on is the test side here.
        query, gallery = (row[flag].lower() in _TRUE for flag in FLAGS)
        if query and gallery:
            ambiguous.append(line)
        elif query or gallery:
            single = True
            row["role"] = "query" if query else "gallery"
        elif row.get("split"):
            table.problems.append((line, "is_query or is_gallery must be true outside train."))
    if ambiguous and single:
        if len(ambiguous) > 1:
            also = f" (and in {len(ambiguous) - 1:,} more lines)"
        else:
            also = ""
        problem = (
            f"is_query and is_gallery are both true{also}, but in other rows only one is true."
            " Either all rows of the test side must have both roles, or each must have one."
        )
        table.problems.append((ambiguous[0], problem))
