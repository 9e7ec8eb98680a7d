"""Find what is to be indexed, or searched with, and read it: files, folders, CSV manifests, Parquet tables, tar shards, `.npz` features."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, listed
from retrieval.host.walk import own_name
from retrieval.serving.files.csv_table import CsvTable, is_missing_text, typed
from retrieval.serving.image_files import find_images
from retrieval.serving.index.locations import Location, is_address, is_shard, is_table, shown
from retrieval.serving.index.origins import ROW_CHARACTERS, Origin, Source, Sources
from retrieval.serving.index.shards import ShardImages, read_shard
from retrieval.serving.index.tables import Row, Spooled, Table, TableImages
from retrieval.serving.threads import ahead

T = TypeVar("T")

_STAMPS_AT_A_TIME = 16


def collect(sources: Sequence[str | os.PathLike[str]], kind: str) -> Sources:
    """Return what the given files and folders hold.

    A folder is searched for images; an item's label is the first folder below it, or the given folder's own name for
    images directly in it. A `.csv` has the columns `path` (relative to the CSV), optionally `label` and `key` or `id`,
    and any others, kept as metadata (see `retrieval.serving.files.csv_table`). A Parquet table has a column `path`, or `image` with
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
    places = [_place(source) for source in sources]
    for place in places:
        _refuse_other_kind(place, kind)
    if kind == "features":
        return _features(places)
    folders = {place for place in places if _is_folder(place)}
    items: list[Source] = []
    left_out: list[str] = []
    for place in places:
        name = _name(place)
        notes: Sequence[str] = ()
        if place in folders:
            found, notes = _folder(place, prefix=len(folders) > 1)
        elif name.lower().endswith(".csv"):
            found = read_csv(place)
        elif is_table(name):
            found, notes = _read_table(_location(place))
        elif is_shard(name):
            found, notes = read_shard(_location(place))
        elif isinstance(place, Location):
            found = [Source(place.name, None, None, origin=Origin(place, None, place.stamp()))]
        else:
            found = [Source(shown(place), None, place.absolute())]
        items += found
        left_out += notes
    once: dict[Path | Origin | None, Source] = {}
    for item in items:
        once.setdefault(item.path or item.origin, item)
    return Sources(list(once.values()), repeated=len(items) - len(once), left_out=tuple(left_out))


def _place(source: object) -> Path | Location:
    if not isinstance(source, str | os.PathLike):
        raise DataError(
            f"What is indexed is named by its path: a file or a folder, not an object of type {type(source).__name__}."
        )
    if str(source).startswith("file://"):
        return Path(str(source).removeprefix("file://"))
    return Location(str(source)) if is_address(source) else Path(source)


def _location(place: Path | Location) -> Location:
    return place if isinstance(place, Location) else Location(os.fspath(place.absolute()))


def _name(place: Path | Location) -> str:
    return place.file_name if isinstance(place, Location) else place.name


def _refuse_other_kind(place: Path | Location, kind: str) -> None:
    """Refuse a place where nothing is, or that holds what the bundle does not take.

    Raises:
        DataError: saying which.
    """
    if isinstance(place, Location):
        place.refresh()
        if kind == "features" and not is_table(place.file_name):
            raise DataError(f"{place} is no Parquet table; at an address this bundle takes no other.")
        return
    if not place.exists():
        raise DataError(f"{shown(place)} does not exist.")
    is_npz = place.suffix.lower() == ".npz"
    if kind == "features" and not is_npz and not is_table(place.name):
        raise DataError(
            f"{shown(place)} is no .npz file or Parquet table; this bundle takes features, not images."
        )
    if kind != "features" and is_npz:
        raise DataError(f"{shown(place)} holds features; this bundle takes images.")


def _is_folder(place: Path | Location) -> bool:
    if isinstance(place, Path):
        return place.is_dir()
    name = place.file_name
    if name.lower().endswith(".csv") or is_table(name) or is_shard(name):
        return False  # known without asking the file system
    return place.is_folder()


def _folder(folder: Path | Location, prefix: bool) -> tuple[list[Source], list[str]]:
    """Return the images of a folder as items, and notes on other files."""
    items = []
    if isinstance(folder, Location):
        own = Location(folder.text.rstrip("/")).file_name or "images"
        images, notes = folder.images()
        for inside, stamp in images:
            label = inside.partition("/")[0] if "/" in inside else own
            key = f"{own}/{inside}" if prefix else inside
            items.append(Source(key, label, None, origin=Origin(folder.below(inside), None, stamp)))
        return items, notes
    found, own = find_images(folder), own_name(folder)
    # a link that leads nowhere is an item that cannot be read: the reader names it, or skips it
    for path in sorted([*found.images, *found.nowhere]):
        below = path.relative_to(folder)
        label = below.parts[0] if len(below.parts) > 1 else own
        key = shown(Path(own) / below if prefix else below)
        items.append(Source(key, shown(Path(label)), path.absolute()))
    return items, found.notes(folder)


def _named_by(manifest: Path | Location, name: str) -> tuple[Path | None, Origin | None]:
    """Return the file that a manifest names, relative to itself; at an address its stamp is still to be asked for."""
    if isinstance(manifest, Path):
        return (manifest.parent / name).absolute(), None
    return None, Origin(manifest.beside(name), None, "")


def _with_stamps(items: list[Source]) -> list[Source]:
    """Return items with the stamps of their files, where these are at addresses; several are asked for at a time."""

    def stamped(item: Source) -> Source:
        if item.origin is None or item.origin.file_stamp:
            return item
        return replace(item, origin=replace(item.origin, file_stamp=item.origin.location.stamp()))

    if all(item.origin is None for item in items):
        return items
    return list(ahead(stamped, items, workers=_STAMPS_AT_A_TIME, most=4 * _STAMPS_AT_A_TIME))


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
        if not row["path"] or "\0" in row["path"]:
            problems.append((line, "'path' is empty or is not a path."))
        elif sum(map(len, row.values())) > ROW_CHARACTERS:
            problems.append((line, f"has more than {ROW_CHARACTERS:,} characters."))
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
    return _with_stamps(
        [replace(item, metadata=metadata) for (_, item), metadata in zip(items, further, strict=True)]
    )


def _csv_item(path: Path | Location, row: dict[str, str], id: str | None) -> Source:
    name, label = row["path"], row.get("label", "")
    metadata = {column: value for column, value in row.items() if column not in ("path", "label", id)}
    local, origin = _named_by(path, name)
    key = (row[id] if id else "") or name
    return Source(key, None if is_missing_text(label) else label, local, metadata, origin=origin)


def _read_table(location: Location) -> tuple[list[Source], Sequence[str]]:
    """Return the items of a Parquet table of images, and notes on columns that are left out."""
    stamp = location.stamp()
    manifest = location if location.remote else Path(location.text)

    def source(row: Row) -> Source:
        if row.path is None:
            origin: Origin | None = Origin(location, str(row.number), stamp)
            return Source(row.key, row.label, None, row.metadata, origin=origin)
        local, origin = _named_by(manifest, row.path)
        return Source(row.key, row.label, local, row.metadata, origin=origin)

    with Table(location, "image") as table:
        items = [source(row) for row in table.rows()]
    if not items:
        raise DataError(f"{location.name} lists no item.")
    return _with_stamps(items), table.left_out


def _features(places: list[Path | Location]) -> Sources:
    """Return the vectors of Parquet tables and `.npz` files, kept in a file until they are encoded."""
    items: list[Source] = []
    left_out: list[str] = []
    with tempfile.TemporaryFile() as file:
        spooled = Spooled(file)
        for place in dict.fromkeys(places):
            if isinstance(place, Location) or is_table(place.name):
                found, notes = _table_of_features(_location(place), spooled)
                left_out += notes
            else:
                found = _npz(place, spooled)
            items += found
        if not items:
            raise DataError(f"{_location(places[0])} lists no item.")
        return Sources(items, spooled.array(), len(places) - len(set(places)), tuple(left_out))


def _table_of_features(location: Location, spooled: Spooled) -> tuple[list[Source], Sequence[str]]:
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


def _npz(path: Path, spooled: Spooled) -> list[Source]:
    """Return the items of an `.npz` file of features."""
    features, labels, keys = read_features(path)
    start, whole = spooled.count, path.absolute()
    spooled.add(Location(os.fspath(path)), features)
    return [
        Source(
            keys[row] if keys else f"{path.stem}/{row}",
            None if not labels or is_missing_text(labels[row]) else labels[row],
            whole,
            row=start + row,
        )
        for row in range(len(features))
    ]


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


class Readers:
    """Reads originals, one after another, fastest in the order of the file that holds them: it stays open for the next. Not for several threads."""

    def __init__(self) -> None:
        self._open: tuple[Location, TableImages | ShardImages] | None = None

    def read(self, origin: Origin, most: int) -> bytes:
        """Return an original of `most` bytes at most.

        Raises:
            DataError: its file has changed since it was found, cannot be read or is damaged; or the original is too large.
        """
        if origin.part is None:
            return origin.read(most)
        if self._open is None or self._open[0] != origin.location:
            self.close()
            if origin.location.stamp() != origin.file_stamp:
                raise DataError(
                    f"{origin.location.name} is gone, or has changed since its items were found. Add it again."
                )
            self._open = origin.location, _container(origin.location)
        return self._open[1].read(origin.part, most)

    def close(self) -> None:
        """Close what is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _container(location: Location) -> TableImages | ShardImages:
    if is_table(location.file_name):
        return TableImages(location)
    if is_shard(location.file_name):
        return ShardImages(location)
    raise DataError(f"{location.name} is no file that holds images.")


def contents(
    items: Iterable[tuple[T, Origin | None]], most: int
) -> Iterator[tuple[T, bytes | DataError | None]]:
    """Give items with their originals, or why there is none; None for what is a file of its own, which others read.

    Args:
        items: each with its origin; those of one file one after another.
        most: bytes of one original.
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
