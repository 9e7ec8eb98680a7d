"""Read items, images and vectors from Parquet tables, one row group at a time."""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, MissingDependency, RetrievalError, did_you_mean, listed
from retrieval.serving.filters import metadata_text
from retrieval.serving.store.items import check_id

if TYPE_CHECKING:
    from retrieval.serving.index.locations import Location

ITEM_CHARACTERS = 1_000_000
"""Most characters of all texts of one item; an index cannot return longer ones."""
MAX_WIDTH = 1_000_000
"""Most numbers per vector."""
_GROUP_BYTES = 1 << 30
_GROUP_VALUES = 1 << 28
_ROWS_AT_A_TIME = 512
_IMAGES_AT_A_TIME = 4
_MOST_PROBLEMS = 100
_VECTORS = ("features", "vector")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table as an item.

    Attributes:
        number: row number in the table, from 0.
        key: id of the item.
        label: its label, or `None`.
        path: path of its image as written in the table. `None` for a row with image bytes or
            features.
        metadata: all other columns.
    """

    number: int
    key: str
    label: str | None
    path: str | None
    metadata: dict[str, Any]


def pyarrow() -> Any:
    """Return the module `pyarrow`.

    Raises:
        MissingDependency: it is not installed.
    """
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
def sentences(location: Location) -> Iterator[None]:
    """Context manager that turns errors of pyarrow or the file system into a `DataError`."""
    try:
        yield
    except RetrievalError:
        raise
    except Exception as fault:
        reason = " ".join(str(fault).split())[:300].rstrip(".")
        raise DataError(
            f"{location} is damaged, or not a Parquet table that can be read: {reason}."
        ) from None


def holds_vectors(location: Location) -> bool:
    """Return whether a Parquet table has a column of vectors and none of images.

    Raises:
        DataError: it cannot be read.
    """
    arrow = pyarrow()
    with location.open() as raw, sentences(location):
        names = arrow.parquet.ParquetFile(raw).schema_arrow.names
    return any(name in names for name in _VECTORS) and not {"image", "path"} & {*names}


def vectors_of(
    location: Location, column: Any, number: int, width: int | None = None
) -> NDArray[np.float32]:
    """Return a column of lists of numbers as an array (n, width).

    Args:
        location: location of the table.
        column: the lists.
        number: row number of the first list, for error messages.
        width: required length of each list. `None` requires the first list's length.

    Raises:
        DataError: a row has no list or a list of another length.
    """
    with sentences(location):
        valid = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), bool)
        if not valid.all():
            raise DataError(f"{location}: row {number + int(np.argmin(valid))} has no vector.")
        lengths = np.asarray(
            pyarrow().compute.list_value_length(column).to_numpy(zero_copy_only=False)
        )
        width = width or (int(lengths[0]) if len(lengths) else 0)
        if (lengths != width).any():
            row = int(np.argmax(lengths != width))
            raise DataError(
                f"{location}: row {number + row} has a vector of {int(lengths[row]):,} numbers"
                f" instead of {width:,}: one index takes one width."
            )
        with np.errstate(over="ignore"):
            values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return np.asarray(values).reshape(len(lengths), width)


class Table:
    """An opened Parquet table and the roles of its columns.

    Attributes:
        schema: pyarrow's schema.
        starts: first row of each row group, followed by the number of rows.
        vector: name of the column of features. `None` for a table of images.
        content: name of the column of image bytes, "image" or "image.bytes". `None` if the table
            has paths.
        path: name of the column of image paths, "path" or "image.path". `None` if the table has
            bytes.
        left_out: one sentence per column that cannot be kept.

    Raises:
        DataError: the table cannot be read or lacks a required column.
        MissingDependency: pyarrow is not installed.
    """

    def __init__(self, location: Location, kind: str) -> None:
        self.location = location
        arrow = pyarrow()
        self._raw = location.open()
        try:
            with sentences(location):
                plain = arrow.parquet.ParquetFile(self._raw)
                self.schema, metadata = plain.schema_arrow, plain.metadata
                # Read texts as dictionaries, so that rows share equal texts in memory.
                texts = [field.name for field in self.schema if _is_text(field.type)]
                self._file = arrow.parquet.ParquetFile(
                    self._raw, metadata=metadata, read_dictionary=texts
                )
                groups = range(metadata.num_row_groups)
                counts = [metadata.row_group(group).num_rows for group in groups]
            self.starts: list[int] = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
            self._choose(kind)
        except BaseException:
            self._raw.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose(self, kind: str) -> None:
        """Set the role of each column."""
        names: list[str] = self.schema.names
        types = dict(zip(names, self.schema.types, strict=True))
        if len(types) != len(names):
            raise DataError(f"{self.location} has two columns of the same name.")
        self.vector = self.content = self.path = None
        if kind == "features":
            self.vector = next((name for name in _VECTORS if name in types), None)
            if self.vector is None:
                raise self._missing_column(
                    "'features' (a list of numbers); this bundle takes features", "features"
                )
            if not _is_list_of_numbers(types[self.vector]):
                raise DataError(
                    f"{self.location}: '{self.vector}' must be a list of numbers, not"
                    f" {types[self.vector]}."
                )
        elif "image" in types and _is_binary(types["image"]):
            self.content = "image"
        elif "image" in types and _is_image_struct(types["image"]):
            self.path = "image.path"
            if not self._is_empty("image.bytes"):  # otherwise the images are files
                self.content = "image.bytes"
        elif "path" in types:
            self.path = "path"
        else:
            raise self._missing_column(
                "'path', or 'image' (bytes, or a struct of bytes and path)", "path"
            )
        used = {self.vector or (self.content or self.path or "").partition(".")[0]}
        self.key = next(
            (name for name in ("key", "id") if name in types and name not in used), None
        )
        self.label = "label" if "label" in types else None
        further = [name for name in names if name not in {*used, self.key, self.label}]
        self.metadata = [name for name in further if not _holds_binary(types[name])]
        self.left_out = [
            f"{self.location}: the column '{name}' is left out, being {types[name]}, which is no"
            " JSON."
            for name in further
            if name not in self.metadata
        ]

    def _missing_column(self, columns: str, name: str) -> DataError:
        names = self.schema.names
        present = ", ".join(names[:20]) or "none"
        return DataError(
            f"{self.location} needs a column {columns} (it has: {present})."
            + did_you_mean(name, names)
        )

    def _is_empty(self, column: str) -> bool:
        """Return whether a column is empty according to the table's statistics."""
        return all(
            chunk.statistics
            and chunk.statistics.has_null_count
            and chunk.statistics.null_count == chunk.num_values
            for group in range(len(self.starts) - 1)
            for chunk in self._chunks(group, [column])
        )

    def _chunks(self, group: int, columns: Sequence[str]) -> Iterator[Any]:
        """Yield a row group's metadata of the stored columns that make up `columns`."""
        row_group = self._file.metadata.row_group(group)
        for number in range(row_group.num_columns):
            chunk = row_group.column(number)
            if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns):
                yield chunk

    def batches(self, columns: Sequence[str], rows: int, group: int) -> Iterator[Any]:
        """Yield columns of a row group, `rows` rows at a time.

        Raises:
            DataError: the row group is damaged or too large.
        """
        for chunk in self._chunks(group, columns):
            if chunk.total_uncompressed_size > _GROUP_BYTES or chunk.num_values > _GROUP_VALUES:
                raise DataError(
                    f"{self.location}: row group {group} has {chunk.total_uncompressed_size:,}"
                    f" bytes and {chunk.num_values:,} values in '{chunk.path_in_schema}';"
                    f" the limits are {_GROUP_BYTES:,} and {_GROUP_VALUES:,}. Write it with smaller"
                    " row groups."
                )
        with sentences(self.location):
            yield from self._file.iter_batches(
                rows, row_groups=[group], columns=list(columns), use_threads=False
            )

    def rows(self, take: Callable[[NDArray[np.float32]], object] | None = None) -> Iterator[Row]:
        """Yield all rows; `take` is called with each batch of features.

        Raises:
            DataError: some rows cannot be used; reading stops at the hundredth such row.
        """
        names = [name for name in (self.key, self.label, self.path, *self.metadata) if name]
        columns = [*names, *([self.vector] if self.vector else [])]
        problems: list[str] = []
        if not columns:  # the table has only images, so the number of rows is enough
            yield from (
                Row(n, self._default_key(n), None, None, {}) for n in range(self.starts[-1])
            )
            return
        for group, number in enumerate(self.starts[:-1]):
            for batch in self.batches(columns, _ROWS_AT_A_TIME, group):
                with sentences(self.location):
                    values = [self._values(batch, name) for name in names]
                if take is not None and self.vector:
                    take(vectors_of(self.location, batch.column(self.vector), number))
                for position in range(batch.num_rows):
                    cells = {
                        name: column[position] for name, column in zip(names, values, strict=True)
                    }
                    row = self._row(number + position, cells)
                    if isinstance(row, Row):
                        yield row
                    else:
                        problems.append(f"row {number + position}: {row}.")
                    if len(problems) >= _MOST_PROBLEMS:
                        raise DataError(listed(self.location.name, problems))
                number += batch.num_rows
        if problems:
            raise DataError(listed(self.location.name, problems))

    def _values(self, batch: Any, name: str) -> list[Any]:
        """Return a column as Python values, with times in microseconds and UTC."""
        arrow, types = pyarrow(), pyarrow().types
        column = batch.column(batch.schema.names.index(name.partition(".")[0]))
        if name == "image.path":
            return [None if image is None else image["path"] for image in column.to_pylist()]
        if types.is_dictionary(column.type) and _is_text(column.type.value_type):
            longest = arrow.compute.max(arrow.compute.binary_length(column.dictionary)).as_py()
            if (longest or 0) > 4 * ITEM_CHARACTERS:
                raise DataError(
                    f"{self.location}: a text in '{name}' has more than {ITEM_CHARACTERS:,}"
                    " characters."
                )
        if types.is_timestamp(column.type):
            zone = "UTC" if column.type.tz else None
            column = column.cast(arrow.timestamp("us", zone), safe=False)
        elif types.is_duration(column.type):
            column = column.cast(arrow.duration("us"), safe=False)
        elif types.is_time64(column.type):
            column = column.cast(arrow.time64("us"), safe=False)
        values: list[Any] = column.to_pylist()
        return values

    def _default_key(self, number: int) -> str:
        return f"{self.location.stem}/{number}"

    def _row(self, number: int, cells: dict[str, Any]) -> Row | str:
        """Return a row, or the end of a sentence that says what is wrong with it."""
        path = cells.get(self.path) if self.path else None
        key = cells.get(self.key) if self.key else path or self._default_key(number)
        label = cells.get(self.label) if self.label else None
        if isinstance(key, bool) or not isinstance(key, str | int):
            return (
                f"'{self.key}' is {'empty' if key is None else 'neither text nor a whole number'}"
            )
        if not isinstance(label, str | int | float | None):
            return "'label' is neither text nor a number"
        is_file = self.content is None and self.vector is None
        if is_file and (not isinstance(path, str) or not path or "\0" in path):
            return f"'{self.path}' is empty or is not a path"
        label = label_text(label)
        metadata = {name: _json_value(cells[name]) for name in self.metadata}
        problem = text_problem(str(key), label, metadata)
        return problem or Row(number, str(key), label, str(path) if is_file else None, metadata)


class TableImages:
    """Reads images of a table by row number."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._table = Table(location, "image")
        self._next_row = self._table.starts[-1]
        self._images: Iterator[Any] = iter(())

    def read(self, part: str, most: int) -> bytes:
        """Return the image of row `part`, a number as text.

        See `retrieval.serving.index.sources.Readers`.
        """
        starts = self._table.starts
        if not part.isascii() or not part.isdigit() or not int(part) < starts[-1]:
            raise DataError(f"{self._location} has no row '{part[:40]}'.")
        row = int(part)
        group = bisect.bisect_right(starts, row) - 1
        if not starts[group] <= self._next_row <= row:
            self._next_row, self._images = starts[group], self._from_group(group)
        with sentences(self._location):
            # After an error the generator has ended, so rows after a damaged one fail, too.
            image = next(islice(self._images, row - self._next_row, None), None)
            self._next_row = row + 1
            if image is None:
                raise DataError(f"{self._location} is damaged: it ends before row {row}.")
            name = f"{self._location}, row {row},"
            if not image.is_valid:
                raise DataError(f"{name} holds no image.")
            content = image.as_buffer()
            if content.size > most:
                raise DataError(
                    f"{name} has {content.size:,} bytes; the limit is {most:,}. Save it smaller, or"
                    " raise the limit."
                )
            return bytes(content)

    def _from_group(self, group: int) -> Iterator[Any]:
        """Yield the images from a row group on, as pyarrow scalars."""
        content = self._table.content
        assert content is not None
        for number in range(group, len(self._table.starts) - 1):
            for batch in self._table.batches([content], _IMAGES_AT_A_TIME, number):
                for value in batch.column(0):
                    yield value["bytes"] if content == "image.bytes" and value.is_valid else value

    def close(self) -> None:
        """Close the table."""
        self._images = iter(())
        self._table.close()


def text_problem(key: str, label: str | None, metadata: dict[str, Any]) -> str | None:
    """Return why an item cannot be stored, as the end of a sentence, or `None` if it can."""
    if fault := check_id(key):
        return fault
    try:
        length = len(metadata_text(metadata)) + len(metadata_text({"": label}))
    except DataError as problem:
        return str(problem).rstrip(".")
    except RecursionError:
        return "its metadata nest too deeply"
    return f"has more than {ITEM_CHARACTERS:,} characters" if length > ITEM_CHARACTERS else None


def label_text(label: str | int | float | None) -> str | None:
    """Return a label as text: "true" and "false" as in JSON, `None` for empty or NaN."""
    if isinstance(label, bool):
        return str(label).lower()
    if label is None or label == "" or (isinstance(label, float) and math.isnan(label)):
        return None
    return sys.intern(str(label))  # items share equal labels in memory


def _json_value(value: Any) -> Any:
    """Return a value for JSON: NaN and infinity as null, times and decimals as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _json_value(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(element) for element in value]
    return value


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_list_of_numbers(kind: Any) -> bool:
    types = pyarrow().types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return bool(types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def _is_binary(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_image_struct(kind: Any) -> bool:
    """Return whether a type is a struct of `bytes` and `path`, as in Hugging Face's `datasets`."""
    types = pyarrow().types
    fields = {field.name: field.type for field in kind} if types.is_struct(kind) else {}
    return (
        {"bytes", "path"} <= fields.keys()
        and _is_binary(fields["bytes"])
        and bool(types.is_string(fields["path"]))
    )


def _holds_binary(kind: Any) -> bool:
    """Return whether a type contains bytes or is an extension type."""
    types = pyarrow().types
    if types.is_struct(kind):
        return any(_holds_binary(field.type) for field in kind)
    if types.is_map(kind):
        return _holds_binary(kind.key_type) or _holds_binary(kind.item_type)
    if hasattr(kind, "value_type"):  # lists and dictionaries
        return _holds_binary(kind.value_type)
    extension = isinstance(kind, pyarrow().BaseExtensionType)
    return extension or _is_binary(kind) or types.is_fixed_size_binary(kind)
