"""Read cells and vectors from Parquet tables, a part of a row group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from retrieval.base.arrays import Floats32
from retrieval.base.photo_files import path_text
from retrieval.errors import DataError, MissingDependency, RetrievalError, did_you_mean

ITEM_CHARACTERS = 1_000_000
"""Most characters in all of an item's text; an index refuses items with more."""
MAX_WIDTH = 1_000_000
"""Most numbers per vector."""
_GROUP_BYTES = 1 << 30  # most bytes of a column in one row group; pyarrow may read all at once
_GROUP_VALUES = 1 << 28  # most values of a column in one row group
_ROWS = 1_000_000  # rows that any file may have; a larger file may have more
_ROWS_PER_BYTE = 4
_ROWS_AT_A_TIME = 4096
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
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise DataError(f"{path_text(path)}: row {number + row} has no vector.")
        lengths = np.from_dlpack(pyarrow().compute.list_value_length(column))
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
            numbers = column.flatten()
            if numbers.null_count:  # they become NaN
                values = numbers.to_numpy(zero_copy_only=False)
            else:
                values = np.from_dlpack(numbers)  # `to_numpy` imports pandas
            values = values.astype(np.float32, copy=False)
    return np.asarray(values).reshape(len(lengths), width)


class Table:
    """An opened Parquet table and the roles of its columns.

    Args:
        path: path of the table.
        kind: "image" for a table of images' paths, or "features".

    Attributes:
        name: the path as text.
        schema: pyarrow's schema of the table.
        content: column of the images' paths or the features.
        has_vectors: whether that column holds features.
        key: column of the ids, or `None`.
        label: column of the labels, or `None`.
        metadata: further columns, which JSON can hold.
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
            footer = parquet.read_metadata(path)
            self.schema = footer.schema.to_arrow_schema()
        self._choose(kind, dict(zip(self.schema.names, self.schema.types, strict=True)))
        with table_errors(path):
            # Read text as dictionaries, so that rows share equal strings in memory.
            texts = [field.name for field in self.schema if _is_text(field.type)]
            self._file = parquet.ParquetFile(path, metadata=footer, read_dictionary=texts)
            groups = map(footer.row_group, range(footer.num_row_groups))
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
        self.content: str = content
        self.has_vectors = features
        self.key = next((name for name in ("key", "id") if name in kinds), None)
        self.label = "label" if "label" in kinds else None
        further = [name for name in kinds if name not in {content, self.key, self.label}]
        self.metadata = [
            name for name in further if _is_json(kinds[name]) or _becomes_text(kinds[name])
        ]
        self.left_out = [
            f"{self.name}: the column '{name}' is left out, because JSON has no {kinds[name]}."
            for name in further
            if name not in self.metadata
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

    def blocks(self) -> Iterator[tuple[int, dict[str, list[Any]], Floats32]]:
        """Yield all rows in blocks: the first row's number, cells by column, and features (n, F).

        F is 0 in a table of images. In a table of features, these are not among the cells.

        Raises:
            DataError: features or text have an unusable shape or size.
        """
        names = [name for name in (self.key, self.label, *self.metadata) if name]
        for number, batch in self.batches([self.content, *names]):
            features = np.empty((batch.num_rows, 0), np.float32)
            columns = names
            if self.has_vectors:
                features = vectors_of(self.path, batch.column(self.content), number)
            else:
                columns = [self.content, *names]
            with table_errors(self.path):
                cells = {name: self.values(batch.column(name), name) for name in columns}
            yield number, cells, features

    def values(self, column: Any, name: str) -> list[Any]:
        """Return a column as Python values; times and decimal numbers become text."""
        arrow = pyarrow()
        kind = column.type
        if arrow.types.is_dictionary(kind) and _is_text(kind.value_type):
            longest = arrow.compute.max(arrow.compute.binary_length(column.dictionary)).as_py()
            if (longest or 0) > 4 * ITEM_CHARACTERS:
                raise DataError(
                    f"{self.name}: text in '{name}' has more than {ITEM_CHARACTERS:,} characters."
                )
            # `to_pylist` would look up and make the text of each row.
            if len(column.dictionary) > len(column):
                column = column.dictionary_decode()
            else:
                words = [*column.dictionary.to_pylist(), None]
                codes = column.indices.to_pylist()
                return [words[-1 if code is None else code] for code in codes]
        if _becomes_text(kind):
            column = column.cast(arrow.string())
        values: list[Any] = column.to_pylist()
        return values


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
