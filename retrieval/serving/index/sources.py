"""Find what is to be indexed, or searched with: files, folders, CSV manifests, Parquet tables, tar shards and `.npz` features."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, listed
from retrieval.host.walk import own_name
from retrieval.serving.files.columns import is_missing_text, typed
from retrieval.serving.files.csv_table import CsvTable
from retrieval.serving.image_files import find_images
from retrieval.serving.index import remote
from retrieval.serving.index.locations import Location, shown
from retrieval.serving.index.origins import Origin, Source, Sources
from retrieval.serving.index.shards import is_shard, read_shard
from retrieval.serving.index.table_contents import Spooled
from retrieval.serving.index.tables import Row, Table, is_table
from retrieval.serving.threads import ahead

_ASKED = 16  # files at a time
_ROW_CHARACTERS = 1_000_000  # an index gives no longer ones back


def collect(sources: Sequence[str | os.PathLike[str]], kind: str) -> Sources:
    """Return what the given files and folders hold.

    A folder is searched for images; an item's label is the first folder below it, or the given folder's own name for
    images directly in it. A `.csv` has the columns `path` (relative to the CSV), optionally `label` and `key` or `id`,
    and any others, kept as metadata (see `retrieval.serving.files.csv_table` and `columns`). A Parquet table has a column `path`, or `image` with
    the bytes of each (or a struct of `bytes` and `path`), or for features a list `features` or `vector`; optionally `label` and
    `key` or `id`, and any others, kept as metadata: NaN and infinity as null, times and decimal numbers as text. A `.tar`, `.tar.gz` or `.tgz` has the
    layout of WebDataset (see `retrieval.serving.index.shards.read_shard`). An `.npz` has `features` (or `vectors`) and optionally `labels` and `keys`.
    An address that fsspec opens (`s3://bucket/photos`) stands for a folder, an image, a CSV manifest, a table or a shard, as a path does;
    a manifest at an address names files below its own folder only.

    Args:
        sources: what the user named: paths, and addresses as text.
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
    paths = [_place(source) for source in sources]
    for path in paths:
        if isinstance(path, Location):
            remote.forget(path.text)
            if kind == "features" and not is_table(path.file_name):
                raise DataError(f"{path} is no Parquet table; at an address this bundle takes no other.")
            continue
        if not path.exists():
            raise DataError(f"{shown(path)} does not exist.")
        if (path.suffix.lower() == ".npz") != (kind == "features") and not is_table(path.name):
            if kind == "features":
                raise DataError(
                    f"{shown(path)} is no .npz file or Parquet table; this bundle takes features, not images."
                )
            raise DataError(f"{shown(path)} holds features; this bundle takes images.")
    if kind == "features":
        local = [path for path in paths if isinstance(path, Path) and not is_table(path.name)]
        return _features(local) if len(local) == len(paths) else _spooled(paths)
    folders = {path for path in paths if _is_folder(path)}
    items: list[Source] = []
    left_out: list[str] = []
    for path in paths:
        if path in folders:
            found_items, notes = _folder(path, prefix=len(folders) > 1)
        elif _name(path).lower().endswith(".csv"):
            found_items, notes = read_csv(path), []
        elif is_table(_name(path)):
            found_items, notes = _read_table(_location(path))
        elif is_shard(_name(path)):
            found_items, notes = read_shard(_location(path))
        elif isinstance(path, Location):
            found_items, notes = [Source(path.name, None, None, origin=Origin(path, None, path.stamp()))], []
        else:
            found_items, notes = [Source(shown(path), None, path.absolute())], []
        items += found_items
        left_out += notes
    once: dict[Path | Origin | None, Source] = {}
    for item in items:
        once.setdefault(item.path or item.origin, item)
    return Sources(list(once.values()), repeated=len(items) - len(once), left_out=tuple(left_out))


def _place(source: str | os.PathLike[str]) -> Path | Location:
    return Location(str(source)) if remote.is_address(source) else Path(source)


def _location(place: Path | Location) -> Location:
    return place if isinstance(place, Location) else Location(os.fspath(place.absolute()))


def _name(place: Path | Location) -> str:
    return place.file_name if isinstance(place, Location) else place.name


def _is_folder(place: Path | Location) -> bool:
    if isinstance(place, Path):
        return place.is_dir()
    name = _name(place)
    if name.lower().endswith(".csv") or is_table(name) or is_shard(name):
        return False  # without asking
    return remote.is_folder(place.text)


def _named(manifest: Path | Location, name: str) -> tuple[Path | None, Origin | None]:
    """Return the file that a manifest names, relative to itself; at an address its stamp is to be asked for yet."""
    if isinstance(manifest, Path):
        return (manifest.parent / name).absolute(), None
    return None, Origin(manifest.beside(name), None, "")


def _stamped(items: list[Source]) -> list[Source]:
    """Return items with the stamps of their files, where these are at addresses; several are asked for at a time."""

    def one(item: Source) -> Source:
        if item.origin is None or item.origin.file_stamp:
            return item
        return replace(item, origin=replace(item.origin, file_stamp=item.origin.location.stamp()))

    if all(item.origin is None for item in items):
        return items
    return list(ahead(one, items, workers=_ASKED, most=4 * _ASKED))


def _folder(folder: Path | Location, prefix: bool) -> tuple[list[Source], list[str]]:
    """Return the images of a folder as items, and notes on other files."""
    if isinstance(folder, Path):
        found = find_images(folder)
        # a link that leads nowhere is an item that cannot be read: the reader names it, or skips it
        files = sorted([*found.images, *found.nowhere])
        return _local_folder(folder, files, prefix), found.notes(folder)
    images, notes = remote.find_images(folder.text)
    own = remote.file_name(folder.text.rstrip("/")) or "images"
    items = []
    for inside, stamp in images:
        label = inside.partition("/")[0] if "/" in inside else own
        origin = Origin(Location(remote.below(folder.text, inside)), None, stamp)
        items.append(Source(f"{own}/{inside}" if prefix else inside, label, None, origin=origin))
    return items, notes


def _local_folder(folder: Path, images: list[Path], prefix: bool) -> list[Source]:
    own = own_name(folder)
    items = []
    for path in images:
        inside = path.relative_to(folder)
        label = inside.parts[0] if len(inside.parts) > 1 else own
        key = shown(Path(own) / inside if prefix else inside)
        items.append(Source(key, shown(Path(label)), path.absolute()))
    return items


def read_csv(path: Path | Location) -> list[Source]:
    """Return the items of a CSV manifest.

    Raises:
        DataError: it cannot be read, lacks the column `path`, or has lines that do not fit its header, all of them named.
    """
    raw = (lambda: path.open("rb")) if isinstance(path, Path) else path.open
    table = CsvTable(str(path), ("path",), raw)
    table.files(path.parent if isinstance(path, Path) else None)
    problems = table.problems
    id = next((name for name in ("key", "id") if name in table.columns), None)
    items: list[tuple[int, Source]] = []
    for line, row in table.rows:
        if problem := _csv_problem(row):
            problems.append((line, problem))
        else:
            items.append((line, _csv_item(path, row, id)))
    if problems:
        # a missing file alone is an image that cannot be used, and may be skipped
        problems += [
            (line, f"{item.path} does not exist.")
            for line, item in items
            if item.path and not item.path.exists()
        ]
        raise DataError(listed(f"{path}", [f"line {line}: {problem}" for line, problem in sorted(problems)]))
    if not items:
        raise DataError(f"{path} lists no item.")
    further = typed([item.metadata for _, item in items])
    return _stamped(
        [replace(item, metadata=metadata) for (_, item), metadata in zip(items, further, strict=True)]
    )


def _csv_problem(row: dict[str, str]) -> str:
    """Return what is wrong with a line, as one sentence; "" for nothing."""
    if not row["path"] or "\0" in row["path"]:
        return "'path' is empty or is not a path."
    if sum(map(len, row.values())) > _ROW_CHARACTERS:
        return f"has more than {_ROW_CHARACTERS:,} characters."
    return ""


def _csv_item(path: Path | Location, row: dict[str, str], id: str | None) -> Source:
    name, label = row["path"], row.get("label", "")
    metadata = {column: value for column, value in row.items() if column not in ("path", "label", id)}
    local, origin = _named(path, name)
    key = (row[id] if id else "") or name
    return Source(key, None if is_missing_text(label) else label, local, metadata, origin=origin)


def _read_table(location: Location) -> tuple[list[Source], list[str]]:
    """Return the items of a Parquet table of images, and notes on columns that are left out."""
    stamp = location.stamp()
    manifest = location if location.remote else Path(location.text)

    def source(row: Row) -> Source:
        if row.path is not None:
            local, origin = _named(manifest, row.path)
            return Source(row.key, row.label, local, row.metadata, origin=origin)
        return Source(row.key, row.label, None, row.metadata, origin=Origin(location, str(row.number), stamp))

    with Table(location, "image") as table:
        items = [source(row) for row in table.rows()]
    if not items:
        raise DataError(f"{location.name} lists no item.")
    return _stamped(items), list(table.left_out)


def _spooled(paths: list[Path | Location]) -> Sources:
    """Return the features of Parquet tables, perhaps with `.npz` files among them."""
    items: list[Source] = []
    left_out: list[str] = []
    with tempfile.TemporaryFile() as file:
        spooled = Spooled(file)
        for path in dict.fromkeys(paths):
            if isinstance(path, Location) or is_table(path.name):
                found, notes = _feature_rows(_location(path), spooled)
                left_out += notes
            else:
                read = _features([path])
                assert read.features is not None
                found = [replace(item, row=spooled.count + at) for at, item in enumerate(read.items)]
                spooled.add(Location(os.fspath(path)), read.features)
            items += found
        if not items:
            raise DataError(f"{_location(paths[0])} lists no item.")
        return Sources(items, spooled.array(), len(paths) - len(set(paths)), tuple(left_out))


def _feature_rows(location: Location, spooled: Spooled) -> tuple[list[Source], tuple[str, ...]]:
    """Return the items of a Parquet table of features, and notes on columns that are left out."""
    stamp, start = location.stamp(), spooled.count
    with Table(location, "features") as table:
        items = [
            Source(
                row.key,
                row.label,
                None,
                row.metadata,
                start + row.number,
                Origin(location, str(row.number), stamp),
            )
            for row in table.rows(spooled)
        ]
    return items, table.left_out


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
                None if not labels or is_missing_text(labels[row]) else labels[row],
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
