"""Read items and vectors from Parquet tables, a part of a row group at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from retrieval.base.arrays import Floats32
from retrieval.base.photos import path_in, whole_path
from retrieval.errors import DataError, MissingDependency, RetrievalError, did_you_mean, listed
from retrieval.index.locations import Source, path_text
from retrieval.store.filters import metadata_text
from retrieval.store.items import check_id

ITEM_CHARACTERS = 1_000_000
"""Most characters in all of an item's text; an index refuses items with more."""
MAX_WIDTH = 1_000_000
"""Most numbers per vector."""
_GROUP_BYTES = 1 << 30  # most bytes of a column in one row group; pyarrow may read all at once
_GROUP_VALUES = 1 << 28  # most values of a column in one row group
_ROWS = 1_000_000  # rows that any file may have; a larger file may have more
_ROWS_PER_BYTE = 4
_ROWS_AT_A_TIME = 512
_MAX_PROBLEMS = 100
_VECTORS = ("features", "vector")


def pyarrow() -> Any:
    """Return the module `pyarrow`; raise `MissingDependency` if it is not installed."""
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise MissingDependency(
            "Parquet tables need pyarrow. Install it with: pip install"
            " 'embedding-retrieval[parquet]'"
        ) from None
    return pyarrow


@contextmanager
def table_errors(path: Path) -> Iterator[None]:
    """Context manager that turns errors of pyarrow or the file system into a `DataError`."""
    try:
        yield
    except RetrievalError:
        raise
    except FileNotFoundError as fault:
        raise DataError(f"{path_text(path)} cannot be read: {fault.strerror or fault}.") from None
    except Exception as fault:
        reason = " ".join(str(fault).split())[:300].rstrip(".")
        raise DataError(
            f"{path_text(path)} is damaged, or not a Parquet table that can be read: {reason}."
        ) from None


def holds_vectors(path: Path) -> bool:
    """Return whether a Parquet table has a column of vectors and no column `path`."""
    arrow = pyarrow()
    with table_errors(path):
        names = arrow.parquet.read_schema(path).names
    return any(name in names for name in _VECTORS) and "path" not in names


def refuse_many(path: Path, rows: int) -> None:
    """Raise a `DataError` if a small file declares so many rows that it may be an attack."""
    most = max(_ROWS, _ROWS_PER_BYTE * path.stat().st_size)
    if rows > most:
        raise DataError(
            f"{path_text(path)} has {rows:,} rows; a file of its size may have {most:,}. Write the"
            " items to several files."
        )


def vectors_of(path: Path, column: Any, number: int, width: int | None = None) -> Floats32:
    """Return a column of lists of numbers as an array (n, width).

    `width` is the first list's length by default. Error messages count rows from `number`.

    Raises:
        DataError: a row has no list or a list of another length.
    """
    column = getattr(column, "storage", column)
    with table_errors(path):
        lengths = np.array(pyarrow().compute.list_value_length(column).fill_null(0))
        width = width or (int(lengths[0]) if len(lengths) else 0)
        if (lengths == 0).any():
            raise DataError(
                f"{path_text(path)}: row {number + int(lengths.argmin())} has no vector."
            )
        if (lengths != width).any():
            row = int(np.argmax(lengths != width))
            raise DataError(
                f"{path_text(path)}: row {number + row} has a vector of {int(lengths[row]):,}"
                f" numbers instead of {width:,}. All vectors of an index have the same width."
            )
        with np.errstate(over="ignore"):
            values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return np.asarray(values).reshape(len(lengths), width)


class Table:
    """An opened Parquet table and the roles of its columns.

    Args:
        path: path of the table.
        kind: "image" for a table of images' paths, or "features".

    Attributes:
        name: the path as text.
        schema: pyarrow's schema of the table.
        count: number of rows.
        left_out: one sentence per column that cannot be stored as metadata.

    Raises:
        DataError: the table cannot be read or lacks a required column.
        MissingDependency: pyarrow is not installed.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.name = path_text(path)
        parquet = pyarrow().parquet
        with table_errors(path):
            self.schema = parquet.read_schema(path)
        self._choose(kind, dict(zip(self.schema.names, self.schema.types, strict=True)))
        with table_errors(path):
            # Read text as dictionaries, so that rows share equal strings in memory.
            texts = [field.name for field in self.schema if _is_text(field.type)]
            self._file = parquet.ParquetFile(path, read_dictionary=texts)
            metadata = self._file.metadata
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            self.count: int = sum(group.num_rows for group in groups)
        refuse_many(path, self.count)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose(self, kind: str, kinds: dict[str, Any]) -> None:
        """Choose the columns of content, id, label and metadata."""
        if len(kinds) != len(self.schema):
            raise DataError(f"{self.name} has two columns of the same name.")
        features = kind == "features"
        names = _VECTORS if features else ("path",)
        content = next((name for name in names if name in kinds), None)
        if content is None:
            needs = "'path' of image files"
            if features:
                needs = "'features' (a list of numbers), because this bundle takes features"
            raise DataError(
                f"{self.name} needs a column {needs} (it has:"
                f" {', '.join(self.schema.names[:20]) or 'none'})."
                + did_you_mean(names[0], self.schema.names)
            )
        types = pyarrow().types
        stored = kinds[content]
        if len(getattr(stored, "shape", [1])) == 1:  # not a tensor of several axes
            stored = getattr(stored, "storage_type", stored)
        if _is_extension(stored):
            element = None
        else:
            element = getattr(stored, "value_type", None)
        if features and not (element and (types.is_floating(element) or types.is_integer(element))):
            raise DataError(
                f"{self.name}: '{content}' must be a list of numbers, not {kinds[content]}."
            )
        self._content = content
        self._is_vector = features
        self._key = next((name for name in ("key", "id") if name in kinds), None)
        self._label = "label" if "label" in kinds else None
        further = [name for name in kinds if name not in {content, self._key, self._label}]
        self._metadata = [
            name for name in further if _is_json(kinds[name]) or _becomes_text(kinds[name])
        ]
        self.left_out = [
            f"{self.name}: the column '{name}' is left out, because JSON has no {kinds[name]}."
            for name in further
            if name not in self._metadata
        ]

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the rows in batches, each with the number of its first row.

        Raises:
            DataError: a row group is too large, or the table is damaged.
        """
        row = 0
        for group in range(self._file.metadata.num_row_groups):
            self._refuse_huge(group, columns)
            with table_errors(self.path):
                for batch in self._file.iter_batches(
                    _ROWS_AT_A_TIME, row_groups=[group], columns=list(columns), use_threads=False
                ):
                    yield row, batch
                    row += batch.num_rows

    def _refuse_huge(self, group: int, columns: Sequence[str]) -> None:
        """Raise a `DataError` if a column of a row group would take too much memory."""
        row_group = self._file.metadata.row_group(group)
        for chunk in map(row_group.column, range(row_group.num_columns)):
            column = chunk.path_in_schema
            values = chunk.num_values
            size = chunk.total_uncompressed_size
            used = any(f"{column}.".startswith(f"{name}.") for name in columns)
            if used and (size > _GROUP_BYTES or values > _GROUP_VALUES):
                raise DataError(
                    f"{self.name}: row group {group} has {size:,} bytes and {values:,} values in"
                    f" '{column}'; the limits are {_GROUP_BYTES:,} and {_GROUP_VALUES:,}. Write the"
                    " table with smaller row groups."
                )

    def sources(self, first: int = 0) -> Iterator[tuple[list[Source], Floats32]]:
        """Yield all rows in blocks: their items, and their features (n, F).

        F is 0 in a table of images. In a table of features, `Source.row` counts from `first`.

        Raises:
            DataError: some rows cannot be used. The message lists the first ten.
        """
        problems: list[str] = []
        names = [name for name in (self._key, self._label, *self._metadata) if name]
        if self._is_vector:
            columns = names
        else:
            columns = [self._content, *names]
        for number, batch in self.batches([self._content, *names]):
            features = np.empty((batch.num_rows, 0), np.float32)
            if self._is_vector:
                features = vectors_of(self.path, batch.column(self._content), number)
            with table_errors(self.path):
                values = [self._values(batch.column(name), name) for name in columns]
            items: list[Source] = []
            for row in range(batch.num_rows):
                cells = {name: cell[row] for name, cell in zip(columns, values, strict=True)}
                item = self._source(number + row, cells, first)
                if isinstance(item, Source):
                    items.append(item)
                else:
                    problems.append(f"row {number + row}: {item}.")
            if len(problems) >= _MAX_PROBLEMS:
                break
            yield items, features
        if problems:
            raise DataError(listed(self.name, problems[:_MAX_PROBLEMS]))

    def _values(self, column: Any, name: str) -> list[Any]:
        """Return a column as Python values; times and decimal numbers become text."""
        arrow = pyarrow()
        kind = column.type
        if arrow.types.is_dictionary(kind) and _is_text(kind.value_type):
            longest = arrow.compute.max(arrow.compute.binary_length(column.dictionary)).as_py()
            if (longest or 0) > 4 * ITEM_CHARACTERS:
                raise DataError(
                    f"{self.name}: text in '{name}' has more than {ITEM_CHARACTERS:,} characters."
                )
        if _becomes_text(kind):
            column = column.cast(arrow.string())
        values: list[Any] = column.to_pylist()
        return values

    def _source(self, number: int, cells: dict[str, Any], first: int) -> Source | str:
        """Return a row as an item, or its problem: the words that follow "row 3: "."""
        path = cells.get(self._content)
        stem = path_text(self.path.name).partition(".")[0] or path_text(self.path.name)
        if self._key:
            key = cells[self._key]
        else:
            key = path or f"{stem}/{number}"
        if self._label:
            label = cells[self._label]
        else:
            label = None
        if not self._is_vector and (not isinstance(path, str) or not path or "\0" in path):
            return "'path' is empty or is not a path"
        if isinstance(key, bool) or not isinstance(key, str | int):
            return (
                f"'{self._key}' is {'empty' if key is None else 'neither text nor a whole number'}"
            )
        if not isinstance(label, str | int | float | None):
            return "'label' is neither text nor a number"
        label = label_text(label)
        metadata = {name: _json_value(cells[name]) for name in self._metadata}
        if problem := text_problem(str(key), label, metadata):
            return problem
        if path is not None:
            file = whole_path(path_in(self.path.parent, path))
            return Source(str(key), label, file, metadata, has_id=self._key is not None)
        return Source(str(key), label, self.path, metadata, first + number)


def text_problem(key: str, label: str | None, metadata: dict[str, Any]) -> str | None:
    """Return why an item cannot be stored (the words that follow "row 3: "), or `None`."""
    if fault := check_id(key):
        return fault
    try:
        length = len(metadata_text(metadata)) + len(metadata_text({"": label}))
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


def _is_extension(kind: Any) -> bool:
    return isinstance(kind, pyarrow().BaseExtensionType)


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _becomes_text(kind: Any) -> bool:
    types = pyarrow().types
    is_time = types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind)
    return bool(is_time or types.is_decimal(kind))


def _is_json(kind: Any) -> bool:
    """Return whether JSON can hold the values of a pyarrow type."""
    types = pyarrow().types
    if _is_extension(kind):
        return False
    if types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    if hasattr(kind, "value_type"):  # a list, or text as a dictionary
        return _is_json(kind.value_type)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return bool(is_number or types.is_null(kind) or _is_text(kind))
