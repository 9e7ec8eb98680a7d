"""Items to index: collected from files, folders and tables, with their originals to embed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
import zipfile
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import NoneType
from typing import IO, Any, TypeAlias, overload

import numpy as np

from retrieval.base.arrays import Array, Floats32
from retrieval.base.csv_table import CsvTable, is_missing_text, typed
from retrieval.base.folder_kinds import StrPath
from retrieval.base.photo_files import (
    address_of,
    exists,
    is_folder,
    own_name,
    path_in,
    path_text,
    remote_state,
    whole_path,
)
from retrieval.errors import DataError, listed
from retrieval.images.image_files import find_images
from retrieval.index.parquet import ITEM_CHARACTERS, MAX_WIDTH, Table, refuse_many
from retrieval.store.filters import column_texts, metadata_text, metadata_texts
from retrieval.store.filters.tree import has_surrogate, is_long
from retrieval.store.items import ID_CHARACTERS, Floats, Item, ItemColumns, Keep, check_id

PLAN = "embedding.json"
"""File that marks a folder of embeddings and describes it; see `embedded.EmbeddingPlan`."""
_ARRAY_BYTES = 1 << 30
_MAX_COMPRESSION = 16
"""An array of more than 1 GiB may be at most this many times as large as its `.npz` file."""
_MAX_PROBLEMS = 100


def paths_of(paths: StrPath | Iterable[StrPath]) -> list[StrPath]:
    """Return one or more paths as a list."""
    if isinstance(paths, str | os.PathLike):
        return [paths]
    return list(paths)


def is_table(name: str) -> bool:
    """Return whether a file's name is that of a Parquet table."""
    return name.lower().endswith((".parquet", ".pq"))


def is_embedding(place: object) -> bool:
    """Return whether a path is a folder written by `retrieval embed`."""
    return isinstance(place, str | os.PathLike) and (Path(place) / PLAN).is_file()


def state_of(path: Path) -> str:
    """Return text that changes when a file changes, or "missing".

    The text begins with the size. Programs can set a file's modification time, but neither its
    change time (ctime) nor its inode.
    """
    if address_of(path):
        return remote_state(path)
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def digest_of(content: bytes | memoryview) -> str:
    """Return the SHA-256 of an original, with which its item's stamp begins."""
    return hashlib.sha256(content).hexdigest()


def digests_of(rows: Floats32) -> list[str]:
    """Return `digest_of` each of the rows (n, F) of features."""
    return [hashlib.sha256(row).hexdigest() for row in np.ascontiguousarray(rows)]


Original: TypeAlias = "Path | bytes | DataError"
"""What an image is embedded from: its file's path, or its bytes.

A `DataError` says why the content is missing.
"""


@dataclass(slots=True)  # with `frozen`, an object takes seven times as long
class Source:
    """One item to encode: an image, or a row of the collected features.

    Attributes:
        id: id of the item.
        label: label of the item, or `None`.
        path: path of the image, or of the file that holds the features. `None` for an item of a
            folder of embeddings that has no file of its own.
        metadata: further columns of a CSV manifest or a Parquet table.
        row: row of the item in `Sources.features`. `None` for an image.
        recorded: stamp that a folder of embeddings stores; see `Item.stamp`. `None` for an image
            or a row of features.
        has_id: whether a table gives the id in a column of its own.
    """

    # Files call it `key`: a column `id` of somebody's table may be metadata beside it.
    id: str
    label: str | None
    path: Path | None
    metadata: dict[str, Any] = field(default_factory=dict)
    row: int | None = None
    recorded: str | None = None
    has_id: bool = False

    @property
    def name(self) -> str:
        """Path of the item's file, for messages."""
        return path_text(str(self.path))

    def item(self, keep: Keep = "reference") -> Item:
        """Return the item to store, without its arrays and the sizes of its original.

        The stamp of an image lacks the hash of its content, which has yet to be read.
        """
        stamp = self.recorded
        if stamp is None and self.row is None:
            assert self.path is not None  # only embedded items lack a path
            stamp = state_of(self.path)
        if keep == "nothing" or self.row is not None:
            path = None
        else:
            path = self.path
        return Item(self.id, self.label, self.metadata, path=path, stamp=stamp, keep=keep)


@dataclass(frozen=True, eq=False)
class SourceColumns(Sequence[Source]):
    """Items to encode, by column, so that a million take no million objects.

    As a sequence, it makes a `Source` when one is asked for.

    Attributes:
        ids, labels, paths, rows, recorded, has_id: these attributes of each item; see `Source`.
        texts: metadata of each item as JSON.
        fields: names of all metadata.
    """

    ids: Sequence[str]
    labels: Sequence[str | None]
    texts: Sequence[str]
    paths: Sequence[Path | None]
    rows: Sequence[int | None]
    recorded: Sequence[str | None]
    has_id: Sequence[bool]
    fields: frozenset[str]

    @classmethod
    def of(cls, sources: Sequence[Source]) -> SourceColumns:
        """Return items by column."""
        return cls(
            [source.id for source in sources],
            [source.label for source in sources],
            metadata_texts([source.metadata for source in sources]),
            [source.path for source in sources],
            [source.row for source in sources],
            [source.recorded for source in sources],
            [source.has_id for source in sources],
            frozenset(chain.from_iterable(source.metadata for source in sources)),
        )

    @classmethod
    def joined(cls, parts: Iterable[SourceColumns]) -> SourceColumns:
        """Return the items of all parts, with their metadata in a file."""
        columns: dict[str, Any] = {name: [] for name in _COLUMNS}
        fields: set[str] = set()
        del columns["texts"]
        with tempfile.TemporaryFile() as file:
            lengths = array("q")
            for part in parts:
                for name, column in columns.items():
                    column.extend(getattr(part, name))
                texts = [text.encode() for text in part.texts]
                lengths.extend(map(len, texts))
                file.write(b"".join(texts))
                fields |= part.fields
            return cls(**columns, texts=_TextFile(file, lengths), fields=frozenset(fields))

    def take(self, rows: Sequence[int]) -> SourceColumns:
        """Return the items of some rows."""
        return replace(self, **{name: rows_at(getattr(self, name), rows) for name in _COLUMNS})

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Source: ...
    @overload
    def __getitem__(self, index: slice) -> list[Source]: ...
    def __getitem__(self, index: int | slice) -> Source | list[Source]:
        if isinstance(index, slice):
            return list(self.take(range(len(self))[index]))
        return _source(*(getattr(self, name)[index] for name in _COLUMNS))

    def __iter__(self) -> Iterator[Source]:
        return map(_source, *(getattr(self, name) for name in _COLUMNS))

    def items(
        self,
        keep: Keep,
        stamps: Sequence[str | None],
        arrays: Mapping[str, Floats],
        sizes: Sequence[tuple[int | None, int | None, int | None]] | None = None,
    ) -> ItemColumns:
        """Return the items to store, with their arrays; see `ItemColumns`."""
        nothing = [None] * len(self)
        paths = self.paths
        if keep == "nothing" or set(self.rows) != {None}:
            paths = nothing
        return ItemColumns(
            self.ids,
            self.labels,
            self.texts,
            paths,
            stamps,
            [keep] * len(self),
            nothing,
            sizes or [(None, None, None)] * len(self),
            arrays,
            self.fields,
        )


@dataclass(frozen=True)
class Batch:
    """Some items that were embedded.

    Attributes:
        items: the items that can be stored, with their arrays.
        faults: why others cannot be used, by id.
        count: number of items that were tried. After a fault that ends the work, the others have
            no arrays, and are not among `items`.
    """

    items: ItemColumns
    faults: Mapping[str, str]
    count: int

    def __len__(self) -> int:
        return self.count


class _TextFile(Sequence[str]):
    """Texts in a mapped file without a name, where each takes eight bytes of memory.

    A table of a few bytes may say the same long text of each of a million items.
    """

    def __init__(self, file: IO[bytes], lengths: Sequence[int]) -> None:
        file.flush()
        self._ends = np.cumsum([0, *lengths])
        # A file of no bytes cannot be mapped.
        self._content: Any = lengths and mmap(file.fileno(), 0, access=ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        rows = range(len(self))[index]
        if isinstance(rows, int):
            return self[rows : rows + 1][0]
        ends = self._ends[rows.start : rows.stop + 1].tolist()
        return [self._content[start:stop].decode() for start, stop in pairwise(ends)][:: rows.step]


_COLUMNS = ("ids", "labels", "texts", "paths", "rows", "recorded", "has_id")


def _source(
    id: str,
    label: str | None,
    text: str,
    path: Path | None,
    row: int | None,
    recorded: str | None,
    has_id: bool,
) -> Source:
    return Source(id, label, path, json.loads(text), row, recorded, has_id)


def rows_at(values: Any, rows: Sequence[int]) -> Any:
    """Return some rows of a list or an array; those of a range of steps of 1 are not copied."""
    if isinstance(rows, range) and rows.step == 1:
        return values[rows.start : rows.stop]
    if isinstance(values, np.ndarray):
        return values[np.array(rows, np.int64)]
    return [values[row] for row in rows]


@dataclass(frozen=True)
class Sources:
    """The items to encode, in order.

    Attributes:
        items: the items.
        features: features (N, F), or `None` for images.
        repeated: number of repeated items in the sources: the same file, and no other id.
        left_out: one sentence per reason why files or columns were left out.
    """

    items: SourceColumns
    features: Floats | None = None
    repeated: int = 0
    left_out: tuple[str, ...] = ()


def collect(sources: Sequence[str | os.PathLike[str]], kind: str) -> Sources:
    """Return the items of files, folders and tables.

    - A folder is searched for images. An image in a subfolder gets the name of the top-level
      subfolder as its label; an image directly in the folder gets the folder's name.
    - A CSV file must have a column `path` (relative to the CSV file). It may have `label`, and
      `key` or `id`. Other columns become metadata (see `retrieval.base.csv_table`).
    - A Parquet table of images must have a column `path`; a table of features must have a list
      column `features` or `vector`. Both may have `label`, and `key` or `id`. Other columns become
      metadata: NaN and infinity become null, times and decimal numbers become text.
    - An `.npz` file must have an array `features` (or `vectors`). It may have `labels` and `keys`.

    `kind` is the input of the bundle, "image" or "features".

    Raises:
        DataError: a source does not exist or does not fit the bundle.
    """
    if not sources:
        raise DataError(
            "There is nothing to index: name image files, folders, a CSV file, a Parquet table or"
            " an .npz file of features."
        )
    places = [_place(source, kind) for source in sources]
    if kind == "features":
        return _features([place.absolute() for place in places])
    left_out: list[str] = []
    items = SourceColumns.joined(_images(sources, places, left_out))
    unique: list[int] = []
    seen: set[object] = set()
    for row, identity in enumerate(zip(items.paths, items.ids, strict=True)):
        # A table may name a file under several ids, and each is an item. A file that folders or
        # tables without ids name again is the same item.
        if (identity if items.has_id[row] else identity[0]) not in seen:
            unique.append(row)
        seen.update((identity[0], identity))
    repeated = len(items) - len(unique)
    if repeated:
        items = items.take(unique)
    return Sources(items, None, repeated, tuple(left_out))


def _images(
    sources: Sequence[StrPath], places: Sequence[Path], left_out: list[str]
) -> Iterator[SourceColumns]:
    """Yield the images of files, folders and tables in blocks; extend `left_out`."""
    folders = {place for place in places if is_folder(place)}
    for source, place in zip(sources, places, strict=True):
        if place in folders:
            images, notes = _folder(place, prefix=len(folders) > 1)
            left_out += notes
            yield SourceColumns.of(images)
        elif place.name.lower().endswith(".csv"):
            images = _csv(place)
            if not images:
                raise _nothing_in(place)
            yield SourceColumns.of(images)
        elif is_table(place.name):
            with Table(place.absolute(), "image") as table:
                if not table.count:
                    raise _nothing_in(place)
                left_out += table.left_out
                for block, _ in _table_items(table):
                    yield block
        else:
            yield SourceColumns.of([Source(path_text(source), None, whole_path(place))])


def _place(source: object, kind: str) -> Path:
    """Return the path of a source that exists and fits the bundle's input."""
    if not isinstance(source, str | os.PathLike):
        raise DataError(
            "A source to index is the path of a file or a folder, not an object of type"
            f" {type(source).__name__}."
        )
    text = os.fsdecode(source)
    place = Path(os.fsdecode(source))
    if not exists(place):
        raise DataError(f"{path_text(text)} does not exist.")
    lists_items = is_table(place.name) or place.name.lower().endswith((".csv", ".npz"))
    if address_of(place) and lists_items:
        raise DataError(
            f"{path_text(text)} is a table at an address, where only photos are read. Copy it; its"
            " column 'path' may name addresses."
        )
    npz = place.name.lower().endswith(".npz")
    if kind == "features" and not npz and not is_table(place.name):
        raise DataError(
            f"{path_text(text)} is not an .npz file or a Parquet table; this bundle takes"
            " features, not images."
        )
    if kind != "features" and npz:
        raise DataError(f"{path_text(text)} holds features; this bundle takes images.")
    return place


def _folder(folder: Path, prefix: bool) -> tuple[list[Source], list[str]]:
    """Return the images of a folder as items, and notes on other files.

    If `prefix` is True, ids begin with the folder's name.
    """
    files = find_images(folder)
    root_name = path_text(own_name(folder))
    items = []
    # Broken links (`nowhere`) stay in, so that they are reported when they are read.
    for path in sorted([*files.images, *files.nowhere]):
        inside = path_text(path.relative_to(folder))
        if "/" in inside:
            label = inside.partition("/")[0]
        else:
            label = root_name
        if prefix:
            id = f"{root_name}/{inside}"
        else:
            id = inside
        items.append(Source(id, label, whole_path(path)))
    return items, files.notes(folder)


def _csv(manifest: Path) -> list[Source]:
    name = path_text(manifest)
    folder = manifest.absolute().parent
    table = CsvTable(name, ("path",), lambda: manifest.open("rb"))
    table.files(folder)
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
    paths = [whole_path(path_in(folder, row["path"])) for _, row in rows]
    if problems:
        # Without other problems, missing files are not an error here: they are unusable images,
        # which `skip_bad` may skip.
        problems += [
            (line, f"{path_text(path)} does not exist.")
            for (line, _), path in zip(rows, paths, strict=True)
            if not address_of(path) and not path.exists()
        ]
        lines = [f"line {line}: {problem}" for line, problem in sorted(problems)]
        raise DataError(listed(name, lines))
    reserved = {"path", "label", id}
    further = typed([{name: row[name] for name in row if name not in reserved} for _, row in rows])
    return [
        Source(
            (row[id] if id else "") or row["path"],
            None if is_missing_text(row.get("label", "")) else row["label"],
            path,
            metadata,
            has_id=bool(id and row[id]),
        )
        for (_, row), path, metadata in zip(rows, paths, further, strict=True)
    ]


def _table_items(table: Table) -> Iterator[tuple[SourceColumns, Floats32]]:
    """Yield the rows of a Parquet table in blocks: their items, and their features (n, F).

    Raises:
        DataError: some rows cannot be used. The message lists the first ten.
    """
    problems: list[str] = []
    name = path_text(table.path.name)
    stem = name.partition(".")[0] or name
    for number, columns, features in table.blocks():
        count = len(features)
        nothing = [None] * count
        paths = columns.get(table.content, nothing)
        keys = columns.get(table.key or "", paths)
        labels = columns.get(table.label or "", nothing)
        files = [table.path] * count
        if table.has_vectors and not table.key:
            keys = [f"{stem}/{number + row}" for row in range(count)]
        further = [_json_values(columns[name]) for name in table.metadata]
        if _is_plain(table, columns):
            texts = column_texts(table.metadata, further, count)
        else:
            metadata = [
                dict(zip(table.metadata, row, strict=True))
                for _, *row in zip(range(count), *further, strict=True)
            ]
            cells = zip(paths, keys, labels, metadata, strict=True)
            faults = [_row_problem(table, *row) for row in cells]
            problems += [
                f"row {number + row}: {fault}." for row, fault in enumerate(faults) if fault
            ]
            # A table of millions of rows may have as many problems, of which few are listed.
            if len(problems) >= _MAX_PROBLEMS:
                break
            if problems:
                continue
            texts = metadata_texts(metadata)
        if not table.has_vectors:
            files = [whole_path(path_in(table.path.parent, path)) for path in paths]
        has_id = [table.key is not None and not table.has_vectors] * count
        facts = (list(map(str, keys)), label_texts(labels), texts, files, nothing, nothing, has_id)
        yield SourceColumns(*facts, frozenset(table.metadata)), features
    if problems:
        raise DataError(listed(table.name, problems[:_MAX_PROBLEMS]))


def _is_plain(table: Table, columns: Mapping[str, list[Any]]) -> bool:
    """Return whether `_row_problem` certainly finds nothing in a block of rows.

    That is so if a row that had the longest text of each column would be valid.
    """
    texts = set(columns)
    # JSON writes a character as at most six, and a number as fewer than 30.
    most = 30 * len(columns) + 6 * len("".join(texts))
    for name, column in columns.items():
        kinds = set(map(type, column))
        is_key = name in (table.content, table.key)
        if not is_key and NoneType in kinds:
            kinds.remove(NoneType)
            column = [cell for cell in column if cell is not None]
        if kinds == {str}:
            longest = max(map(len, column))
            most += 6 * longest
            if most > ITEM_CHARACTERS or (
                is_key and (longest > ID_CHARACTERS or not min(map(len, column)))
            ):
                return False
            texts.update(column)
        elif kinds == {int}:
            if is_long(min(column)) or is_long(max(column)):
                return False
        elif name == table.key or not kinds <= {float, bool}:
            return False
    whole = "".join(texts)
    return "\0" not in whole and not has_surrogate(whole)


def _json_values(column: list[Any]) -> list[Any]:
    """Return cells in which NaN and infinity became null."""
    kinds = set(map(type, column))
    if kinds <= {str, int, bool, NoneType} or (
        kinds == {float} and all(map(math.isfinite, column))
    ):
        return column
    return [_json_value(cell) for cell in column]


def _row_problem(
    table: Table, path: Any, key: Any, label: Any, metadata: dict[str, Any]
) -> str | None:
    """Return why a row is no item, or None: the words that follow "row 3: "."""
    if not table.has_vectors and (not isinstance(path, str) or not path or "\0" in path):
        return "'path' is empty or is not a path"
    # A boolean is an integer in Python.
    if isinstance(key, bool) or not isinstance(key, str | int):
        return f"'{table.key}' is {'empty' if key is None else 'neither text nor a whole number'}"
    if not isinstance(label, str | int | float | None):
        return "'label' is neither text nor a number"
    return text_problem(str(key), label_text(label), metadata)


def text_problem(id: str, label: str | None, metadata: dict[str, Any]) -> str | None:
    """Return why an item cannot be stored (the words that follow "row 3: "), or `None`."""
    fault = check_id(id)
    if fault:
        return fault
    try:
        length = len(metadata_text(metadata))
        if label is not None:
            length += len(metadata_text({"": label}))
    except DataError as problem:
        return str(problem).rstrip(".")
    except RecursionError:
        return "has metadata that nest too deeply"
    if length > ITEM_CHARACTERS:
        return f"has more than {ITEM_CHARACTERS:,} characters"
    return None


def label_text(label: str | int | float | None) -> str | None:
    """Return a label as text; booleans as in JSON, and an empty label, NaN or -1 as `None`."""
    if isinstance(label, bool):
        return str(label).lower()
    if label in (None, "", -1) or (isinstance(label, float) and math.isnan(label)):
        return None
    return sys.intern(str(label))  # items share equal labels in memory


def label_texts(labels: Sequence[Any]) -> list[str | None]:
    """Return labels of one type, or None, as `label_text` does; equal ones take no time."""
    texts = {label: label_text(label) for label in set(labels)}
    return [texts[label] for label in labels]


def _json_value(value: Any) -> Any:
    """Return a value that JSON can hold: NaN and infinity become `None`, at any depth."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return None
    if isinstance(value, dict):
        return {name: _json_value(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_json_value(element) for element in value]
    return value


def _nothing_in(path: Path) -> DataError:
    return DataError(f"{path_text(path)} lists no item.")


def _features(places: list[Path]) -> Sources:
    """Return the items of Parquet tables and `.npz` files; their features are a memory map."""
    left_out: list[str] = []
    unique = dict.fromkeys(places)
    # A map of a file takes no memory; the file has no name, so it goes with the array.
    with tempfile.TemporaryFile() as file:
        widths: list[int] = []

        def written() -> Iterator[SourceColumns]:
            for place in unique:
                for items, features in _blocks(place, left_out):
                    width = features.shape[1]
                    if width > MAX_WIDTH:
                        raise DataError(
                            f"{path_text(place)} holds vectors of {width:,} numbers; at most"
                            f" {MAX_WIDTH:,} are allowed."
                        )
                    if widths and width != widths[0]:
                        raise DataError(
                            f"{path_text(place)} holds vectors of {width:,} numbers, and an earlier"
                            f" file of {widths[0]:,}. All vectors of an index have the same width."
                        )
                    widths.append(width)
                    file.write(np.ascontiguousarray(features, "<f4").data)
                    yield items

        items = SourceColumns.joined(written())
        if not items:
            raise _nothing_in(places[0])
        file.flush()
        rows = range(len(items))
        # A row of a plain array costs a hundredth of a row of a `memmap`.
        features = np.asarray(np.memmap(file, "<f4", "r", shape=(len(items), widths[0])))
        items = replace(items, rows=rows)
        return Sources(items, features, len(places) - len(unique), tuple(left_out))


def _blocks(place: Path, left_out: list[str]) -> Iterator[tuple[SourceColumns, Floats32]]:
    """Yield the items of a file and their features (n, F) in blocks; extend `left_out`."""
    if is_table(place.name):
        with Table(place, "features") as table:
            left_out += table.left_out
            yield from _table_items(table)
    else:
        yield _npz(place)


@contextmanager
def npz_file(path: Path, names: Collection[str]) -> Iterator[Mapping[str, Array]]:
    """Context manager that opens an `.npz` file, to read the arrays `names`; nothing is unpickled.

    Raises:
        DataError: the file or an array cannot be read, or would take too much memory.
    """
    try:
        # Open the file here, because np.load does not close a damaged file.
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise DataError(
                    f"{path} is a single array; save it with np.savez(path, features=array)."
                )
            _refuse_huge(path, file.zip, names)
            yield file
    except DataError:
        raise
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}.") from None
    except Exception as fault:  # zipfile, zlib and NumPy raise errors of many classes
        reason = " ".join(str(fault).split()).rstrip(".") or type(fault).__name__
        if "allow_pickle" in reason:
            reason = "Python objects are never read; write text as np.array(…, dtype=str)"
        raise DataError(
            f"{path} is damaged, or not an .npz file of plain arrays: {reason}."
        ) from None


def _npz(path: Path) -> tuple[SourceColumns, Floats32]:
    """Return the items and features (N, F) of an `.npz` file."""
    with npz_file(path, ("features", "vectors", "labels", "keys")) as file:
        name = next((name for name in ("features", "vectors") if name in file), None)
        if name is None:
            raise DataError(
                f"{path} needs an array 'features' (it has: {', '.join(file) or 'none'})."
            )
        features = np.asarray(file[name])  # of an entry that is no array, NumPy returns the bytes
        columns = {key: np.asarray(file[key]) for key in ("labels", "keys") if key in file}
    if features.ndim != 2 or features.dtype.kind not in "fiu" or not features.size:
        raise DataError(
            f"{path}: '{name}' must be numbers of shape (N, F), not {features.dtype}"
            f" {features.shape}."
        )
    count = len(features)
    refuse_many(path, count)
    for key, values in columns.items():
        if values.shape != (count,) or values.dtype.kind not in "iuUb":
            raise DataError(
                f"{path}: '{key}' must be {count} strings or whole numbers, not {values.dtype}"
                f" {values.shape}."
            )
    if "keys" in columns:
        keys = list(map(str, columns["keys"].tolist()))
    else:
        keys = [f"{path.stem}/{row}" for row in range(count)]
    labels = columns.get("labels", np.full(count, "")).tolist()
    missing = {label for label in set(labels) if is_missing_text(str(label))}
    texts = label_texts([None if label in missing else label for label in labels])
    nothing = [None] * count
    facts = (keys, texts, ["{}"] * count, [path] * count, nothing, nothing, [False] * count)
    items = SourceColumns(*facts, frozenset())
    # A number beyond float32 becomes infinite, and `embed_rows` refuses its item alone.
    with np.errstate(over="ignore"):
        return items, features.astype(np.float32, copy=False)


def _refuse_huge(path: Path, archive: zipfile.ZipFile, names: Collection[str]) -> None:
    """Raise a `DataError` if an array is large and compressed so well that it may be an attack."""
    largest = max(_ARRAY_BYTES, _MAX_COMPRESSION * path.stat().st_size)
    for entry in archive.infolist():
        if entry.filename.removesuffix(".npy") in names and entry.file_size > largest:
            raise DataError(
                f"{path}: '{entry.filename}' would take {entry.file_size:,} bytes of memory, more"
                f" than {_MAX_COMPRESSION} times the file's size. Save it with np.savez, which does"
                " not compress."
            )


def originals(
    sources: Iterable[Source], keep: Keep = "reference"
) -> Iterator[tuple[Item, str, Original]]:
    """Yield images with their names and originals, for `retrieval.index.adding.embed`."""
    for source in sources:
        assert source.path is not None  # only items of a folder of embeddings lack a path
        # Take the state of a file before its content is read, so that a change meanwhile is
        # noticed.
        yield source.item(keep), source.name, source.path
