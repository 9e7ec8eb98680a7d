"""Parquet tables, read row group by row group: their rows as items, the images in them, and their
vectors.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, MissingDependency, did_you_mean, listed
from retrieval.serving.index.locations import (
    ROW_CHARACTERS,
    Location,
    label_text,
    plain,
    text_problem,
)

MAX_WIDTH = 1_000_000
"""Numbers of a vector."""
_GROUP_BYTES = 1 << 30
_GROUP_VALUES = 1 << 28
_ROWS_AT_A_TIME = 512
_IMAGES_AT_A_TIME = 4
_PROBLEMS = 1000
_VECTORS = ("features", "vector")


def holds_vectors(location: Location) -> bool:
    """Whether a Parquet table has a column of vectors and none of images.

    Raises:
        DataError: it cannot be read.
    """
    arrow = pyarrow()
    with location.open() as raw, sentences(location):
        names = arrow.parquet.ParquetFile(raw).schema_arrow.names
    return any(name in names for name in _VECTORS) and not {"image", "path"} & {*names}


@dataclass(frozen=True, slots=True)
class Row:
    """A row as an item.

    Attributes:
        number: of the row in the table, from 0.
        key: its id.
        label: None where the table has none.
        path: of its image, as the table has it; None for a row that holds its image, or features.
        metadata: all other columns.
    """

    number: int
    key: str
    label: str | None
    path: str | None
    metadata: dict[str, Any]


def pyarrow() -> Any:
    """Return pyarrow.

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
    """Turn what pyarrow raises about a table into a sentence."""
    try:
        yield
    except (pyarrow().ArrowException, OSError, ValueError, OverflowError, MemoryError) as fault:
        reason = " ".join(str(fault).split())[:300].rstrip(".")
        raise DataError(
            f"{location} is damaged, or not a Parquet table that can be read: {reason}."
        ) from None


def numbers_of(
    location: Location, column: Any, first: int, width: int | None = None
) -> NDArray[np.float32]:
    """Return a column of lists of numbers as an array (n, width).

    Args:
        location: of the table.
        column: the lists.
        first: number of the column's first row, for sentences.
        width: that each list must have; None takes the first list's.

    Raises:
        DataError: a row has no list, or one of another length.
    """
    with sentences(location):
        valid = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), bool)
        if not valid.all():
            raise DataError(f"{location}: row {first + int(np.argmin(valid))} has no vector.")
        lengths = np.asarray(
            pyarrow().compute.list_value_length(column).to_numpy(zero_copy_only=False)
        )
        width = width or (int(lengths[0]) if len(lengths) else 0)
        if (lengths != width).any():
            at = int(np.argmax(lengths != width))
            raise DataError(
                f"{location}: row {first + at} has a vector of {int(lengths[at]):,} numbers instead"
                f" of {width:,}: one index takes one width."
            )
        with np.errstate(over="ignore"):
            values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return np.asarray(values).reshape(len(lengths), width)


class Table:
    """An opened Parquet table, and what its columns are for.

    Args:
        location: of the file.
        kind: "image" or "features".

    Attributes:
        vector: the column of features; None in a table of images.
        content: the column of image bytes: "image" or "image.bytes"; None where there are paths.
        path: the column of image paths: "path" or "image.path"; None where there are bytes.
        left_out: a sentence for each column that cannot be kept.

    Raises:
        DataError: it cannot be read, or has not the columns that are needed.
        MissingDependency: pyarrow is not installed.
    """

    def __init__(self, location: Location, kind: str) -> None:
        self.location = location
        arrow = pyarrow()
        self._raw = location.open()
        try:
            with sentences(location):
                plain = arrow.parquet.ParquetFile(self._raw)
                self.schema = plain.schema_arrow
                texts = [
                    field.name
                    for field in self.schema
                    if arrow.types.is_string(field.type) or arrow.types.is_large_string(field.type)
                ]
                # a text that many rows share stays one text in memory
                self._file = arrow.parquet.ParquetFile(
                    self._raw, metadata=plain.metadata, read_dictionary=texts
                )
            self._choose(kind)
        except BaseException:
            self._raw.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def _choose(self, kind: str) -> None:
        """Find out what each column is for."""
        names: list[str] = self.schema.names
        types = dict(zip(names, self.schema.types, strict=True))
        if len(types) != len(names):
            raise DataError(f"{self.location} has two columns of the same name.")
        self.vector = self.content = self.path = None
        if kind == "features":
            self.vector = next((name for name in _VECTORS if name in types), None)
            if self.vector is None:
                raise self._lacks(
                    "'features' (a list of numbers); this bundle takes features", "features"
                )
            if not _is_list(types[self.vector]):
                raise DataError(
                    f"{self.location}: '{self.vector}' must be a list of numbers, not"
                    f" {types[self.vector]}."
                )
        elif "image" in types and _is_binary(types["image"]):
            self.content = "image"
        elif "image" in types and _is_image_struct(types["image"]):
            self.path = "image.path"
            if not self._all_null("image.bytes"):  # else the images are files beside the table
                self.content = "image.bytes"
        elif "path" in types:
            self.path = "path"
        else:
            raise self._lacks("'path', or 'image' (bytes, or a struct of bytes and path)", "path")
        used = {self.vector or (self.content or self.path or "").partition(".")[0]}
        self.key = next(
            (name for name in ("key", "id") if name in types and name not in used), None
        )
        self.label = "label" if "label" in types else None
        others = [name for name in names if name not in {*used, self.key, self.label}]
        self.metadata = [name for name in others if not _holds_binary(types[name])]
        self.left_out = [
            f"{self.location}: the column '{name}' is left out, being {types[name]}, which is no"
            " JSON."
            for name in others
            if name not in self.metadata
        ]

    def _lacks(self, wanted: str, name: str) -> DataError:
        names = self.schema.names
        has = ", ".join(names[:20]) or "none"
        return DataError(
            f"{self.location} needs a column {wanted} (it has: {has}).{did_you_mean(name, names)}"
        )

    def _all_null(self, column: str) -> bool:
        """Whether the table says of itself that a column holds nothing."""
        statistics = [
            (chunk.num_values, chunk.statistics)
            for group in range(self._file.metadata.num_row_groups)
            for chunk in self._chunks(group, [column])
        ]
        return all(
            known and known.has_null_count and known.null_count == count
            for count, known in statistics
        )

    def _chunks(self, group: int, columns: Sequence[str]) -> Iterator[Any]:
        """Yield what the table says of the stored columns of a row group."""
        row_group = self._file.metadata.row_group(group)
        for number in range(row_group.num_columns):
            chunk = row_group.column(number)
            if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns):
                yield chunk

    def batches(self, columns: Sequence[str], rows: int, group: int) -> Iterator[Any]:
        """Yield a row group's columns, a few rows at a time.

        Raises:
            DataError: it is damaged, or larger than may be read.
        """
        for chunk in self._chunks(group, columns):
            if chunk.total_uncompressed_size > _GROUP_BYTES or chunk.num_values > _GROUP_VALUES:
                raise DataError(
                    f"{self.location}: row group {group} has {chunk.total_uncompressed_size:,}"
                    f" bytes and {chunk.num_values:,} values in '{chunk.path_in_schema}';"
                    f" {_GROUP_BYTES:,} and {_GROUP_VALUES:,} are read. Write it with smaller row"
                    " groups."
                )
        with sentences(self.location):
            yield from self._file.iter_batches(
                rows, row_groups=[group], columns=list(columns), use_threads=False
            )

    def starts(self) -> list[int]:
        """Return the first row of each row group, and the number of rows."""
        metadata = self._file.metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return [0, *np.cumsum(counts, dtype=np.int64).tolist()]

    def rows(self, take: Callable[[NDArray[np.float32]], object] | None = None) -> Iterator[Row]:
        """Yield all rows.

        Args:
            take: called with the features (n, F) of the next n rows, of a table that has them.

        Raises:
            DataError: rows that cannot be used; the first thousand are looked for.
        """
        names = [name for name in (self.key, self.label, self.path, *self.metadata) if name]
        wanted = [*names, *([self.vector] if self.vector else [])]
        starts = self.starts()
        problems: list[str] = []
        if not wanted:  # nothing but images: their number is all there is to know
            yield from (
                Row(number, self._default(number), None, None, {}) for number in range(starts[-1])
            )
        for group, first in enumerate(starts[:-1] if wanted else ()):
            for batch in self.batches(wanted, _ROWS_AT_A_TIME, group):
                with sentences(self.location):
                    columns = [self._values(batch, name) for name in names]
                if take is not None and self.vector:
                    take(numbers_of(self.location, batch.column(self.vector), first))
                for number in range(batch.num_rows):
                    values = {
                        name: column[number] for name, column in zip(names, columns, strict=True)
                    }
                    row = self._row(first + number, values)
                    if isinstance(row, Row):
                        yield row
                    else:
                        problems.append(f"row {first + number}: {row}.")
                first += batch.num_rows
                if len(problems) > _PROBLEMS:
                    break
        if problems:
            raise DataError(listed(self.location.name, problems))

    def _default(self, number: int) -> str:
        return f"{self.location.stem}/{number}"

    def _values(self, batch: Any, name: str) -> list[Any]:
        """Return a column of a batch as Python's own values."""
        arrow = pyarrow()
        column = batch.column(batch.schema.names.index(name.partition(".")[0]))
        if name == "image.path":
            return [None if image is None else image["path"] for image in column.to_pylist()]
        if arrow.types.is_dictionary(column.type):
            longest = arrow.compute.max(arrow.compute.binary_length(column.dictionary)).as_py()
            if (longest or 0) > 4 * ROW_CHARACTERS:
                raise DataError(
                    f"{self.location}: a text in '{name}' has more than {ROW_CHARACTERS:,}"
                    " characters."
                )
        portable = _portable(column.type)
        values: list[Any] = (
            column if portable == column.type else column.cast(portable, safe=False)
        ).to_pylist()
        return values

    def _row(self, number: int, values: dict[str, Any]) -> Row | str:
        """Return a row, or what is wrong with it as the end of a sentence."""
        path = values.get(self.path) if self.path else None
        key = values.get(self.key) if self.key else path or self._default(number)
        label = values.get(self.label) if self.label else None
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
        metadata = {name: plain(values[name]) for name in self.metadata}
        problem = text_problem(str(key), label, metadata)
        return problem or Row(number, str(key), label, str(path) if is_file else None, metadata)


class TableImages:
    """The images of a table; a part is the number of a row.

    Args:
        location: of the table.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._table = Table(location, "image")
        self._starts = self._table.starts()
        self._next = self._starts[-1]
        self._images: Iterator[Any] = iter(())

    def read(self, part: str, most: int) -> bytes:
        """Return the image of a row; see `retrieval.serving.index.sources.Readers`."""
        if not part.isascii() or not part.isdigit() or not int(part) < self._starts[-1]:
            raise DataError(f"{self._location} has no row '{part[:40]}'.")
        row = int(part)
        group = bisect.bisect_right(self._starts, row) - 1
        if not self._starts[group] <= self._next <= row:
            self._next, self._images = self._starts[group], self._from_group(group)
        with sentences(self._location):
            # a generator that has raised is at its end: a row after a damaged one is damaged, too
            image = next(islice(self._images, row - self._next, None), None)
            self._next = row + 1
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

    def _from_group(self, first: int) -> Iterator[Any]:
        """Yield the images of a row group, and of those behind it, as pyarrow's scalars; a few are
        in memory at a time.
        """
        content = self._table.content
        assert content is not None
        for group in range(first, len(self._starts) - 1):
            for batch in self._table.batches([content], _IMAGES_AT_A_TIME, group):
                for value in batch.column(0):
                    yield value["bytes"] if content == "image.bytes" and value.is_valid else value

    def close(self) -> None:
        """Close the table."""
        self._images = iter(())
        self._table.close()


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return bool(types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def _is_binary(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_image_struct(kind: Any) -> bool:
    """Whether a type is a struct of `bytes` and `path`, as Hugging Face's `datasets` writes images."""
    types = pyarrow().types
    if not types.is_struct(kind):
        return False
    parts = {field.name: field.type for field in kind}
    return (
        {"bytes", "path"} <= parts.keys()
        and _is_binary(parts["bytes"])
        and bool(types.is_string(parts["path"]))
    )


def _holds_binary(kind: Any) -> bool:
    """Whether a column has bytes in it, or a type of someone's own."""
    types = pyarrow().types
    if types.is_struct(kind):
        return any(_holds_binary(field.type) for field in kind)
    if types.is_map(kind):
        return _holds_binary(kind.key_type) or _holds_binary(kind.item_type)
    if hasattr(kind, "value_type"):  # lists and dictionaries
        return _holds_binary(kind.value_type)
    own = isinstance(kind, pyarrow().BaseExtensionType)
    return own or _is_binary(kind) or types.is_fixed_size_binary(kind)


def _portable(kind: Any) -> Any:
    """Return the type whose values Python has: times in microseconds, and in UTC where they have a
    zone.
    """
    arrow, types = pyarrow(), pyarrow().types
    if types.is_timestamp(kind):
        return arrow.timestamp("us", "UTC" if kind.tz else None)
    if types.is_duration(kind):
        return arrow.duration("us")
    if types.is_time64(kind):
        return arrow.time64("us")
    if types.is_struct(kind):
        return arrow.struct([field.with_type(_portable(field.type)) for field in kind])
    if types.is_fixed_size_list(kind):
        return arrow.list_(_portable(kind.value_type), kind.list_size)
    if types.is_large_list(kind) or types.is_list(kind):
        made = arrow.large_list if types.is_large_list(kind) else arrow.list_
        return made(kind.value_field.with_type(_portable(kind.value_type)))
    return kind
