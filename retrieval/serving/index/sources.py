"""Collect items from files, folders, tables and addresses, and read their originals."""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, TypeVar

import numpy as np

from retrieval.errors import DataError, listed
from retrieval.host.walk import own_name
from retrieval.serving.files.csv_table import CsvTable, is_missing_text, typed
from retrieval.serving.image_files import find_images
from retrieval.serving.index.locations import (
    Floats,
    Location,
    Origin,
    Original,
    Source,
    Sources,
    file_system,
    is_table,
    readable,
    shown,
)
from retrieval.serving.index.parquet import ITEM_CHARACTERS, MAX_WIDTH, Table, TableImages
from retrieval.serving.sessions import ahead

T = TypeVar("T")

_STAMPS_AT_A_TIME = 16
_CSV_BYTES = 1 << 30


def collect(sources: Sequence[str | os.PathLike[str]], kind: str) -> Sources:
    """Return the items of files, folders, tables and addresses.

    - A folder is searched for images. An item's label is the name of its top-level subfolder, or
      the folder's own name for images directly in it.
    - A `.csv` has a column `path` (relative to the CSV), optionally `label` and `key` or `id`.
      Other columns become metadata (see `retrieval.serving.files.csv_table`).
    - A Parquet table of images has a column `path`, or a column `image` of bytes or of structs
      with `bytes` and `path`. A table of features has a list column `features` or `vector`. Both
      may have `label` and `key` or `id`. Other columns become metadata: NaN and infinity as null,
      times and decimal numbers as text.
    - An `.npz` has `features` (or `vectors`) and optionally `labels` and `keys`.
    - An address that fsspec opens (`s3://bucket/photos`) may be any of these except `.npz`. A
      manifest at an address may only name files below its own folder.

    Args:
        sources: paths, and addresses as text.
        kind: input of the bundle, "image" or "features".

    Raises:
        DataError: a source does not exist or does not fit the bundle.
    """
    if not sources:
        raise DataError(
            "There is nothing to index: name image files, folders, a CSV manifest or an .npz of"
            " features."
        )
    locations = [Location.of(source) for source in sources]
    for location in locations:
        _refuse_other_kind(location, kind)
    if kind == "features":
        return _features(locations)
    folders = {location for location in locations if location.is_folder()}
    items: list[Source] = []
    left_out: list[str] = []
    for location in locations:
        notes: list[str] = []
        if location in folders:
            part, notes = _folder(location, prefix=len(folders) > 1)
        elif location.file_name.lower().endswith(".csv"):
            part = _csv(location)
        elif is_table(location.file_name):
            part, notes = _table(location.absolute())
        else:
            part = [_file(location.name, location, location.stamp())]
        items += part
        left_out += notes
    unique: dict[Path | Origin | None, Source] = {}
    for item in items:
        unique.setdefault(item.path or item.origin, item)
    return Sources(list(unique.values()), None, len(items) - len(unique), tuple(left_out))


def _refuse_other_kind(location: Location, kind: str) -> None:
    """Check that a source exists and fits the bundle's input.

    Raises:
        DataError: it does not exist or does not fit.
    """
    if location.remote:
        with readable(location.text):
            file_system(location.text)[0].invalidate_cache()  # list the current content
    elif not location.path.exists():
        raise DataError(f"{location} does not exist.")
    npz = not location.remote and location.file_name.lower().endswith(".npz")
    if kind == "features" and not npz and not is_table(location.file_name):
        possible = "Parquet table" if location.remote else ".npz file or Parquet table"
        raise DataError(f"{location} is no {possible}; this bundle takes features, not images.")
    if kind != "features" and npz:
        raise DataError(f"{location} holds features; this bundle takes images.")


def _file(
    key: str,
    location: Location,
    stamp: str = "",
    label: str | None = None,
    metadata: dict[str, object] | None = None,
) -> Source:
    """Return a file as one item. A file at an address takes its `stamp`, if that is known."""
    if location.remote:
        return Source(key, label, None, metadata or {}, origin=Origin(location, None, stamp))
    return Source(key, label, location.path, metadata or {})


def _folder(folder: Location, prefix: bool) -> tuple[list[Source], list[str]]:
    """Return the images of a folder as items, and notes on other files."""
    files: list[tuple[str, Path | None, Origin | None]]
    if folder.remote:
        root_name = Location(folder.text.rstrip("/")).file_name or "images"
        images, notes = folder.images()
        root_text = folder.text.rstrip("/")
        files = [
            (inside, None, Origin(Location(f"{root_text}/{inside}"), None, stamp))
            for inside, stamp in images
        ]
    else:
        root = Path(folder.text)
        local, root_name = find_images(root), shown(own_name(root))
        notes = local.notes(root)
        # Broken links stay in the list; the reader reports or skips them.
        paths = sorted([*local.images, *local.nowhere])
        files = [(shown(path.relative_to(root)), path.absolute(), None) for path in paths]
    items = []
    for inside, path, origin in files:
        label = inside.partition("/")[0] if "/" in inside else root_name
        key = f"{root_name}/{inside}" if prefix else inside
        items.append(Source(key, label, path, origin=origin))
    return items, notes


def _with_stamps(items: list[Source]) -> list[Source]:
    """Fill in missing stamps of files at addresses, several at a time."""

    def stamped(item: Source) -> Source:
        if item.origin is None or item.origin.file_stamp:
            return item
        return replace(item, origin=replace(item.origin, file_stamp=item.origin.location.stamp()))

    if all(item.origin is None for item in items):
        return items
    return list(ahead(stamped, items, workers=_STAMPS_AT_A_TIME, most=4 * _STAMPS_AT_A_TIME))


def _csv(manifest: Location) -> list[Source]:
    """Return the items of a CSV manifest.

    Raises:
        DataError: it cannot be read, lacks the column `path`, or has lines that do not fit its
            header; the message lists them.
    """

    def opened() -> BinaryIO:
        return io.BytesIO(manifest.read(_CSV_BYTES)) if manifest.remote else manifest.open()

    table = CsvTable(manifest.name, ("path",), opened)
    table.files(None if manifest.remote else manifest.path.parent)
    problems = table.problems
    id = next((name for name in ("key", "id") if name in table.columns), None)
    rows: list[tuple[int, dict[str, str]]] = []
    for line, row in table.rows:
        if not row["path"] or "\0" in row["path"]:
            problems.append((line, "'path' is empty or is not a path."))
        elif sum(map(len, row.values())) > ITEM_CHARACTERS:
            problems.append((line, f"has more than {ITEM_CHARACTERS:,} characters."))
        else:
            rows.append((line, row))
    locations = [manifest.beside(row["path"]) for _, row in rows]
    if problems:
        # Missing files are only listed beside other problems: alone, they are unusable images,
        # which may be skipped.
        problems += [
            (line, f"{location} does not exist.")
            for (line, _), location in zip(rows, locations, strict=True)
            if not location.remote and not location.path.exists()
        ]
        lines = [f"line {line}: {problem}" for line, problem in sorted(problems)]
        raise DataError(listed(manifest.name, lines))
    if not rows:
        raise DataError(f"{manifest} lists no item.")
    reserved = {"path", "label", id}
    further = typed([{name: row[name] for name in row if name not in reserved} for _, row in rows])
    return _with_stamps(
        [
            _file(
                (row[id] if id else "") or row["path"],
                location,
                label=None if is_missing_text(row.get("label", "")) else row["label"],
                metadata=metadata,
            )
            for (_, row), location, metadata in zip(rows, locations, further, strict=True)
        ]
    )


def _table(location: Location) -> tuple[list[Source], list[str]]:
    """Return the items of a Parquet table of images, and notes on columns left out."""
    stamp = location.stamp()
    items: list[Source] = []
    with Table(location, "image") as table:
        for row in table.rows():
            if row.path is not None:
                items.append(_file(row.key, location.beside(row.path), "", row.label, row.metadata))
                continue
            origin = Origin(location, str(row.number), stamp)
            items.append(Source(row.key, row.label, None, row.metadata, origin=origin))
    if not items:
        raise DataError(f"{location} lists no item.")
    return _with_stamps(items), table.left_out


class _Spool:
    """Features (N, F) of any number of files, kept on disk until they are encoded."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.width, self.count = file, 0, 0

    def add(self, place: Location, features: Floats) -> None:
        """Append features (n, F).

        Raises:
            DataError: their width differs from earlier features.
        """
        width = features.shape[1]
        if not 0 < width <= MAX_WIDTH:
            raise DataError(
                f"{place}: a vector of {width:,} numbers; 1 to {MAX_WIDTH:,} are allowed."
            )
        if self.width not in (0, width):
            raise DataError(
                f"{place} holds vectors of {width:,} numbers, others of {self.width:,}: one index"
                " takes one width."
            )
        self.width = width
        self._file.write(np.ascontiguousarray(features, "<f4").tobytes())
        self.count += len(features)

    def array(self) -> Floats:
        """Return all features as a memory-mapped array."""
        self._file.flush()
        return np.memmap(self._file, "<f4", "r", shape=(self.count, self.width))


def _features(places: list[Location]) -> Sources:
    """Return the items of Parquet tables and `.npz` files of features."""
    items: list[Source] = []
    left_out: list[str] = []
    unique = dict.fromkeys(place.absolute() for place in places)
    with tempfile.TemporaryFile() as file:
        spool = _Spool(file)
        for place in unique:
            if not is_table(place.file_name):
                items += _npz(place, spool)
                continue
            start, stamp = spool.count, place.stamp()
            with Table(place, "features") as table:
                for row in table.rows(partial(spool.add, place)):
                    origin = Origin(place, str(row.number), stamp)
                    items.append(
                        Source(row.key, row.label, None, row.metadata, start + row.number, origin)
                    )
            left_out += table.left_out
        if not items:
            raise DataError(f"{places[0]} lists no item.")
        return Sources(items, spool.array(), len(places) - len(unique), tuple(left_out))


def _npz(place: Location, spool: _Spool) -> list[Source]:
    """Return the items of an `.npz` file of features."""
    path, start = place.path, spool.count
    features, labels, keys = read_features(path)
    spool.add(place, features)
    return [
        Source(
            keys[row] if keys else f"{path.stem}/{row}",
            None if not labels or is_missing_text(labels[row]) else labels[row],
            path,
            row=start + row,
        )
        for row in range(len(features))
    ]


def read_features(path: Path) -> tuple[Floats, list[str], list[str]]:
    """Return features (N, F), labels and keys of an `.npz` file, without unpickling.

    Labels or keys that the file lacks are empty lists.

    Raises:
        DataError: the file cannot be read, or an array has a wrong shape or type.
    """
    try:
        # Opened here, because np.load does not close a damaged file.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            if not hasattr(file, "files"):
                raise DataError(
                    f"{path} is a single array; save it with np.savez(path, features=array)."
                )
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
        raise DataError(
            f"{path} is damaged, or not an .npz file of plain arrays: {fault}."
        ) from None
    if features.ndim != 2 or features.dtype.kind not in "fiu" or not features.size:
        raise DataError(
            f"{path}: '{name}' must be numbers of shape (N, F), not {features.dtype}"
            f" {features.shape}."
        )
    for key, values in columns.items():
        if values.shape != (len(features),) or values.dtype.kind not in "iuUb":
            raise DataError(
                f"{path}: '{key}' must be {len(features)} texts or whole numbers, not"
                f" {values.dtype} {values.shape}."
            )
    texts = {key: [str(value) for value in values] for key, values in columns.items()}
    with np.errstate(over="ignore"):
        return (
            features.astype(np.float32, copy=False),
            texts.get("labels", []),
            texts.get("keys", []),
        )


class Readers:
    """Reads originals one by one and keeps the last table open.

    Fastest if items are grouped by file. Not thread-safe.
    """

    def __init__(self) -> None:
        self._open: tuple[Location, TableImages] | None = None

    def read(self, origin: Origin, most: int) -> bytes:
        """Return an original of at most `most` bytes.

        Raises:
            DataError: its table has changed since it was collected, its file cannot be read or is
                damaged, or the original is too large.
        """
        location = origin.location
        if origin.part is None:
            return location.read(most)
        if self._open is None or self._open[0] != location:
            self.close()
            if location.stamp() != origin.file_stamp:
                raise DataError(
                    f"{location} is gone, or has changed since its items were found. Add it again."
                )
            if not is_table(location.file_name):
                raise DataError(f"{location} is not a table that holds images.")
            self._open = location, TableImages(location)
        return self._open[1].read(origin.part, most)

    def close(self) -> None:
        """Close the open table."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def contents(
    items: Iterable[tuple[T, Origin | None]], most: int
) -> Iterator[tuple[T, bytes | DataError | None]]:
    """Yield items with their originals, or the error that prevents reading one.

    The original is `None` for an item that is a file of its own.
    """
    with closing(Readers()) as readers:
        for item, origin in items:
            content: bytes | DataError | None = None
            if origin is not None and origin.part is not None:
                try:
                    content = readers.read(origin, most)
                except DataError as fault:
                    content = fault
            yield item, content


def originals(
    items: Iterable[Source], features: Floats | None, most: int
) -> Iterator[tuple[Source, str, Original]]:
    """Yield items with their names and originals, for `retrieval.serving.index.adding.embed`.

    Args:
        items: the items, fastest if grouped by file.
        features: features (N, F), indexed by `Source.row`. `None` for images.
        most: most bytes of one original.
    """
    if features is not None:
        for item in items:
            row = features[item.row]
            if np.isfinite(row).all():
                yield item, item.key, row
                continue
            fault = (
                f"{item.name}: vector {item.key} holds NaN, infinity or a number beyond float32."
            )
            yield item, item.key, DataError(fault)
        return
    for item, content in contents(((item, item.origin) for item in items), most):
        original = content if content is not None else item.path or item.origin
        assert original is not None  # an item has a path or an origin
        yield item, item.name, original
