"""What is to be indexed, or searched with: files, folders, CSV manifests and `.npz` features."""

from __future__ import annotations

import csv
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, did_you_mean, listed
from retrieval.serving.files.columns import typed
from retrieval.serving.image_files import find_images

_ROW_CHARACTERS = 1_000_000  # an index gives no longer ones back


@dataclass(frozen=True, slots=True)
class Source:
    """One item to encode: an image file, or a row of the collected features.

    Attributes:
        key: its name.
        label: None when none was given.
        path: the image, or the `.npz` file.
        metadata: further columns of a CSV manifest, numbers as numbers.
        row: of `Sources.features`; None for an image.
    """

    key: str
    label: str | None
    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    row: int | None = None

    def stamp(self) -> str:
        """Return what changes when the item does: path, row, size and time of its file."""
        try:
            status = self.path.stat()
        except OSError:
            return f"{os.fsencode(self.path)!r} {self.row} missing"
        return f"{os.fsencode(self.path)!r} {self.row} {status.st_size} {status.st_mtime_ns}"


@dataclass(frozen=True)
class Sources:
    """Everything to encode, in order.

    Attributes:
        items: one an item.
        features: (N, F) for a bundle of features, else None.
        repeated: how many files were named more than once; each is taken once.
        left_out: a sentence on the files of folders that are not images, for each reason.
    """

    items: list[Source]
    features: NDArray[np.float32] | None = None
    repeated: int = 0
    left_out: tuple[str, ...] = ()


def collect(sources: Sequence[str | os.PathLike[str]], kind: str) -> Sources:
    """Return what the given files and folders hold.

    A folder is searched for images; an item's label is the first folder below it, or the given folder's own name for
    images directly in it. A `.csv` has the columns `path` (relative to the CSV), optionally `label` and `key`, and
    any others, kept as metadata (see `retrieval.serving.files.columns`). An `.npz` has `features` (or `vectors`) and optionally `labels` and `keys`.

    Args:
        sources: what the user named.
        kind: "image" or "features", what the bundle takes.

    Raises:
        DataError: nothing there, or not what the bundle takes.
    """
    if not sources:
        raise DataError(
            "There is nothing to index: name image files, folders, a CSV manifest or an .npz of features."
        )
    for source in sources:
        if not isinstance(source, str | os.PathLike):
            raise DataError(
                f"What is indexed is named by its path: a file or a folder, not an object of type {type(source).__name__}."
            )
    paths = [Path(source) for source in sources]
    for path in paths:
        if not path.exists():
            raise DataError(f"{_text(path)} does not exist.")
        if (path.suffix.lower() == ".npz") != (kind == "features"):
            if kind == "features":
                raise DataError(f"{_text(path)} is no .npz file; this bundle takes features, not images.")
            raise DataError(f"{_text(path)} holds features; this bundle takes images.")
    if kind == "features":
        return _features(paths)
    folders = [path for path in paths if path.is_dir()]
    items: list[Source] = []
    left_out: list[str] = []
    for path in paths:
        if path.is_dir():
            found = find_images(path)
            left_out += found.notes(path)
            items += _folder(path, found.images, prefix=len(folders) > 1)
        elif path.suffix.lower() == ".csv":
            items += read_csv(path)
        else:
            items.append(Source(_text(path), None, path.absolute()))
    once: dict[Path, Source] = {}
    for item in items:
        once.setdefault(item.path, item)
    return Sources(list(once.values()), repeated=len(items) - len(once), left_out=tuple(left_out))


def _folder(folder: Path, images: list[Path], prefix: bool) -> list[Source]:
    own = folder.resolve()
    items = []
    for path in images:
        inside = path.relative_to(folder)
        label = inside.parts[0] if len(inside.parts) > 1 else own.name
        key = _text(Path(own.name) / inside if prefix else inside)
        items.append(Source(key, _text(Path(label)), path.absolute()))
    return items


def read_csv(path: Path) -> list[Source]:
    """Return the items of a CSV manifest.

    Raises:
        DataError: it cannot be read, lacks the column `path`, or has lines that do not fit its header, all of them named.
    """
    problems: list[tuple[int, str]] = []
    items: list[tuple[int, Source]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            columns = list(reader.fieldnames or [])
            if "path" not in columns:
                found = ", ".join(columns) or "none"
                raise DataError(
                    f"{path} needs a column 'path' (it has: {found}).{did_you_mean('path', columns)}"
                )
            if len(set(columns)) != len(columns):
                raise DataError(f"{path} has two columns of the same name.")
            for row in reader:
                if problem := _csv_problem(row):
                    problems.append((reader.line_num, problem))
                else:
                    items.append((reader.line_num, _csv_item(path, row)))
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}.") from None
    except UnicodeDecodeError as fault:
        raise DataError(f"{path} is not UTF-8 text: {fault.reason} at byte {fault.start}.") from None
    except csv.Error as fault:
        raise DataError(f"{path} is not a CSV file: {fault} (line {reader.line_num}).") from None
    if problems:
        # a missing file alone is an image that cannot be used, and may be skipped
        problems += [(line, f"{item.path} does not exist.") for line, item in items if not item.path.exists()]
        raise DataError(listed(f"{path}", [f"line {line}: {problem}" for line, problem in sorted(problems)]))
    if not items:
        raise DataError(f"{path} lists no item.")
    further = typed([item.metadata for _, item in items])
    return [replace(item, metadata=metadata) for (_, item), metadata in zip(items, further, strict=True)]


def _csv_problem(row: dict[Any, Any]) -> str:
    """Return what is wrong with a line, as one sentence; "" for nothing."""
    if None in row or None in row.values():
        return "has more or fewer fields than the header."
    if not row["path"] or "\0" in row["path"]:
        return "'path' is empty or is not a path."
    if sum(map(len, row.values())) > _ROW_CHARACTERS:
        return f"has more than {_ROW_CHARACTERS:,} characters."
    return ""


def _csv_item(path: Path, row: dict[str, str]) -> Source:
    name = row["path"]
    metadata = {column: value for column, value in row.items() if column not in ("path", "label", "key")}
    return Source(row.get("key") or name, row.get("label") or None, (path.parent / name).absolute(), metadata)


def _features(paths: list[Path]) -> Sources:
    items: list[Source] = []
    arrays: list[NDArray[np.float32]] = []
    for path in dict.fromkeys(paths):
        features, labels, keys = read_features(path)
        start = sum(map(len, arrays))
        if arrays and arrays[0].shape[1] != features.shape[1]:
            raise DataError(
                f"{path} holds vectors of {features.shape[1]} numbers, {paths[0]} of {arrays[0].shape[1]}: "
                "one index takes one width."
            )
        arrays.append(features)
        whole = path.absolute()
        items += [
            Source(
                keys[row] if keys else f"{path.stem}/{row}",
                labels[row] if labels else None,
                whole,
                row=start + row,
            )
            for row in range(len(features))
        ]
    return Sources(items, np.concatenate(arrays), repeated=len(paths) - len(set(paths)))


def read_features(path: Path) -> tuple[NDArray[np.float32], list[str], list[str]]:
    """Return features (N, F), labels and keys (empty when there are none) of an `.npz` file. Nothing is unpickled.

    Raises:
        DataError: it cannot be read, or its arrays have other shapes or types.
    """
    try:
        # opened here, since np.load leaves a damaged file open
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            if not hasattr(file, "files"):
                raise DataError(f"{path} is a single array; save it with np.savez(path, features=array).")
            name = next((name for name in ("features", "vectors") if name in file.files), None)
            if name is None:
                raise DataError(
                    f"{path} needs an array 'features' (it has: {', '.join(file.files) or 'none'})."
                )
            features = file[name]
            columns = {key: file[key] for key in ("labels", "keys") if key in file.files}
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}.") from None
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, NotImplementedError) as fault:
        raise DataError(f"{path} is damaged, or not an .npz file of plain arrays: {fault}.") from None
    if features.ndim != 2 or features.dtype.kind not in "fiu" or not features.size:
        raise DataError(
            f"{path}: '{name}' must be numbers of shape (N, F), not {features.dtype} {features.shape}."
        )
    for key, values in columns.items():
        if values.shape != (len(features),) or values.dtype.kind not in "iuUb":
            raise DataError(
                f"{path}: '{key}' must be {len(features)} texts or whole numbers, not {values.dtype} {values.shape}."
            )
    texts = {key: [str(value) for value in values] for key, values in columns.items()}
    with np.errstate(over="ignore"):
        return features.astype(np.float32, copy=False), texts.get("labels", []), texts.get("keys", [])


def _text(path: Path) -> str:
    """Return a path as text that any file can hold: a name that is not UTF-8 shows its bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
