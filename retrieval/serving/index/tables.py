"""Parquet tables, read row group by row group: their rows as items, the images in them, and their vectors."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, MissingDependency, did_you_mean, listed
from retrieval.serving.index.locations import Location
from retrieval.serving.index.origins import ROW_CHARACTERS, label_text, plain, text_problem

_GROUP_BYTES = 1 << 30
_GROUP_VALUES = 1 << 28
_WIDTH = 1_000_000
_ROWS = 512
_IMAGES = 4
"""Images that are in memory together."""
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
            "Parquet tables need pyarrow. Install it with: pip install 'embedding-retrieval[parquet]'"
        ) from None
    return pyarrow


@contextmanager
def sentences(location: Location) -> Iterator[None]:
    """Turn what pyarrow says of a table into a sentence."""
    try:
        yield
    except (pyarrow().ArrowException, OSError, ValueError, OverflowError, MemoryError) as fault:
        said = " ".join(str(fault).split())[:300].rstrip(".")
        raise DataError(
            f"{location.name} is damaged, or not a Parquet table that can be read: {said}."
        ) from None


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
        with ExitStack() as stack:
            self._raw = stack.enter_context(location.open())
            with sentences(location):
                plain = arrow.parquet.ParquetFile(self._raw)
                self.schema = plain.schema_arrow
                texts = [
                    one.name
                    for one in self.schema
                    if arrow.types.is_string(one.type) or arrow.types.is_large_string(one.type)
                ]
                # a text that many rows share stays one text in memory
                self._file = arrow.parquet.ParquetFile(
                    self._raw, metadata=plain.metadata, read_dictionary=texts
                )
            self._choose(kind)
            self._closing = stack.pop_all()

    def close(self) -> None:
        """Close the file."""
        self._closing.close()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def _choose(self, kind: str) -> None:
        types = pyarrow().types
        names: list[str] = self.schema.names
        if len(set(names)) != len(names):
            raise DataError(f"{self.location.name} has two columns of the same name.")
        self.vector = next((one for one in _VECTORS if one in names), None) if kind == "features" else None
        self.content = self.path = None
        used = {self.vector}
        if kind == "features":
            if self.vector is None:
                raise self._lacks("'features' (a list of numbers); this bundle takes features", "features")
            if not _is_list(self.schema.field(self.vector).type):
                raise DataError(
                    f"{self.location.name}: '{self.vector}' must be a list of numbers, not {self.schema.field(self.vector).type}."
                )
        elif "image" in names and _is_binary(types, self.schema.field("image").type):
            self.content = "image"
        elif "image" in names and self._is_pair(types, self.schema.field("image").type):
            self.content, self.path = "image.bytes", "image.path"
            if self._all_null("image.bytes"):
                self.content = None  # images that are files beside the table
        elif "path" in names:
            self.path = "path"
        else:
            raise self._lacks("'path', or 'image' (bytes, or a struct of bytes and path)", "path")
        used |= {"image"} if self.content or self.path == "image.path" else {self.path}
        self.key = next((one for one in ("key", "id") if one in names and one not in used), None)
        self.label = "label" if "label" in names else None
        others = [one for one in self.schema if one.name not in {*used, self.key, self.label}]
        kept = [one for one in others if not _holds_binary(types, one.type)]
        self.metadata: list[str] = [one.name for one in kept]
        self.left_out = tuple(
            f"{self.location.name}: the column '{one.name}' is left out, being {one.type}, which is no JSON."
            for one in others
            if one not in kept
        )

    def _lacks(self, wanted: str, name: str) -> DataError:
        names = self.schema.names
        has = ", ".join(names[:20]) or "none"
        return DataError(
            f"{self.location.name} needs a column {wanted} (it has: {has}).{did_you_mean(name, names)}"
        )

    @staticmethod
    def _is_pair(types: Any, kind: Any) -> bool:
        if not types.is_struct(kind):
            return False
        parts = {kind.field(at).name: kind.field(at).type for at in range(kind.num_fields)}
        return (
            {"bytes", "path"} <= set(parts)
            and _is_binary(types, parts["bytes"])
            and types.is_string(parts["path"])
        )

    def _all_null(self, column: str) -> bool:
        """Whether the table says of itself that a column holds nothing."""
        said = self._file.metadata
        for group in range(said.num_row_groups):
            for one in self._columns(group, [column]):
                found = one.statistics
                if found is None or not found.has_null_count or found.null_count != one.num_values:
                    return False
        return True

    def _columns(self, group: int, columns: Sequence[str]) -> Iterator[Any]:
        said = self._file.metadata.row_group(group)
        for at in range(said.num_columns):
            one = said.column(at)
            if any(
                one.path_in_schema == name or one.path_in_schema.startswith(f"{name}.") for name in columns
            ):
                yield one

    def batches(self, columns: Sequence[str], rows: int, group: int, *, check: bool = True) -> Iterator[Any]:
        """Give a row group's columns, a few rows at a time.

        Raises:
            DataError: it is damaged, or larger than may be read.
        """
        for one in self._columns(group, columns) if check else ():
            if one.total_uncompressed_size > _GROUP_BYTES or one.num_values > _GROUP_VALUES:
                raise DataError(
                    f"{self.location.name}: row group {group} has {one.total_uncompressed_size:,} bytes and {one.num_values:,} values in "
                    f"'{one.path_in_schema}'; {_GROUP_BYTES:,} and {_GROUP_VALUES:,} are read. Write it with smaller row groups."
                )
        with sentences(self.location):
            yield from self._file.iter_batches(
                rows, row_groups=[group], columns=list(columns), use_threads=False
            )

    def starts(self) -> list[int]:
        """Return the first row of each row group, and the number of rows."""
        said = self._file.metadata
        found = [0]
        for group in range(said.num_row_groups):
            found.append(found[-1] + said.row_group(group).num_rows)
        return found

    def rows(self, vectors: Spooled | None = None) -> Iterator[Row]:
        """Give all rows.

        Args:
            vectors: takes the features, of a table that has them.

        Raises:
            DataError: rows that cannot be used; the first thousand are looked for.
        """
        wanted = [one for one in (self.key, self.label, self.path, *self.metadata, self.vector) if one]
        problems: list[str] = []
        count = 0
        for group, start in enumerate(self.starts()[:-1]):
            if not wanted:  # nothing but images: their number is all there is to know
                for number in range(start, self.starts()[group + 1]):
                    yield Row(number, self._default(number), None, None, {})
                continue
            for batch in self.batches(wanted, _ROWS, group):
                with sentences(self.location):
                    columns = {name: self._values(batch, name) for name in wanted if name != self.vector}
                if vectors is not None and self.vector:
                    vectors.take(self.location, count, batch.column(self.vector))
                for at in range(batch.num_rows):
                    row = self._row(count + at, {name: values[at] for name, values in columns.items()})
                    if isinstance(row, str):
                        problems.append(f"row {count + at}: {row}.")
                    else:
                        yield row
                count += batch.num_rows
                if len(problems) > _PROBLEMS:
                    break
        if problems:
            raise DataError(listed(self.location.name, problems))

    def _default(self, number: int) -> str:
        return f"{self.location.stem}/{number}"

    def _values(self, batch: Any, name: str) -> list[Any]:
        """Return a column of a batch as Python's own values."""
        column = batch.column(batch.schema.names.index(name.partition(".")[0]))
        if name == "image.path":
            return [None if one is None else one["path"] for one in column.to_pylist()]
        arrow = pyarrow()
        if arrow.types.is_dictionary(column.type):
            texts = column.dictionary
            longest = arrow.compute.max(arrow.compute.binary_length(texts)).as_py() if len(texts) else 0
            if (longest or 0) > 4 * ROW_CHARACTERS:
                raise DataError(
                    f"{self.location.name}: a text in '{name}' has more than {ROW_CHARACTERS:,} characters."
                )
        wanted = _portable(arrow, column.type)
        values: list[Any] = (column if wanted == column.type else column.cast(wanted, safe=False)).to_pylist()
        return values

    def _row(self, number: int, values: dict[str, Any]) -> Row | str:
        """Return a row, or what is wrong with it as the end of a sentence."""
        given = values.get(self.key) if self.key else self._default(number)
        if isinstance(given, bool) or not isinstance(given, str | int):
            return f"'{self.key}' is {'empty' if given is None else 'neither text nor a whole number'}"
        label = values.get(self.label) if self.label else None
        if not isinstance(label, str | int | float | None):
            return "'label' is neither text nor a number"
        path = values.get(self.path) if self.path else None
        if self.content is None and self.vector is None and (not path or "\0" in path):
            return f"'{self.path}' is empty or is not a path"
        metadata = {name: plain(values[name]) for name in self.metadata}
        if fault := text_problem(str(given), label := label_text(label), metadata):
            return fault
        shown = None if self.content or self.vector else str(path)
        key = str(given)
        if self.key is None and self.path and path:
            key = path
        return Row(number, key, label, shown, metadata)


class TableImages:
    """The images of a table; a part is the number of a row.

    Args:
        location: of the table.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._table = Table(location, "image")
        self._starts = self._table.starts()
        self._group = -1
        self._batches: Iterator[Any] = iter(())
        self._first = 0
        self._batch: Any = None

    def read(self, part: str, most: int) -> bytes:
        """Return the image of a row; see `retrieval.serving.index.sources.Readers`."""
        if not part.isascii() or not part.isdigit() or not int(part) < self._starts[-1]:
            raise DataError(f"{self._location.name} has no row '{part[:40]}'.")
        row = int(part)
        name = f"{self._location.name}, row {row},"
        self._go_to(row)
        column = self._batch.column(0)
        with sentences(self._location):
            if self._table.content == "image.bytes":
                column = column.field("bytes") if column[row - self._first].is_valid else column
            value = column[row - self._first]
            if not value.is_valid:
                raise DataError(f"{name} holds no image.")
            content = value.as_buffer()
            if content.size > most:
                raise DataError(
                    f"{name} has {content.size:,} bytes; the limit is {most:,}. Save it smaller, or raise the limit."
                )
            return bytes(content)

    def _go_to(self, row: int) -> None:
        """Have the batch that holds a row."""
        group = bisect.bisect_right(self._starts, row) - 1
        if group != self._group or row < self._first:
            assert self._table.content is not None
            self._group, self._batch = group, None
            self._first = self._starts[group]
            self._batches = self._table.batches([self._table.content], _IMAGES, group)
        while self._batch is None or row >= self._first + self._batch.num_rows:
            self._first += 0 if self._batch is None else self._batch.num_rows
            self._batch = next(self._batches, None)
            if self._batch is None:
                self._group = -1
                raise DataError(f"{self._location.name} is damaged: it ends before row {row}.")

    def close(self) -> None:
        """Close the table."""
        self._batch, self._batches = None, iter(())
        self._table.close()


class Spooled:
    """Vectors (N, F) of any number of tables, in a file until they are encoded.

    Args:
        file: an empty one, open for reading and writing.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._first: Location | None = None
        self._width = 0
        self.count = 0

    def take(self, location: Location, row: int, column: Any) -> None:
        """Take a column of lists of numbers, the first of which is of a row.

        Raises:
            DataError: a row has no list, or one of another length than all before.
        """
        count = len(column)
        with sentences(location):
            if column.null_count:
                empty = next(at for at in range(count) if not column[at].is_valid)
                raise DataError(f"{location.name}: row {row + empty} has no vector.")
            values = column.flatten()
            lengths = list_lengths(column)
        if not count:
            return
        if not self._width:
            self._first, self._width = location, int(lengths[0])
            if not 0 < self._width <= _WIDTH:
                raise DataError(
                    f"{location.name}: a vector of {self._width:,} numbers; 1 to {_WIDTH:,} are read."
                )
        if (lengths != self._width).any():
            at = int(np.argmax(lengths != self._width))
            first = "" if location == self._first or self._first is None else f" of {self._first.name}"
            raise DataError(
                f"{location.name}: row {row + at} has a vector of {int(lengths[at]):,} numbers, the first{first} has {self._width:,}: "
                "one index takes one width."
            )
        with np.errstate(over="ignore"):
            self._file.write(values.to_numpy(zero_copy_only=False).astype("<f4").tobytes())
        self.count += count

    def add(self, location: Location, vectors: NDArray[np.float32]) -> None:
        """Take the vectors (N, F) of a file that is no table; see `take`."""
        if self._width and vectors.shape[1] != self._width:
            raise DataError(
                f"{location.name} holds vectors of {vectors.shape[1]} numbers, others of {self._width}: one index takes one width."
            )
        self._first, self._width = self._first or location, vectors.shape[1]
        self._file.write(np.ascontiguousarray(vectors, "<f4").tobytes())
        self.count += len(vectors)

    def array(self) -> NDArray[np.float32]:
        """Return all vectors, read from the file as they are needed."""
        self._file.flush()
        return np.memmap(self._file, "<f4", "r", shape=(self.count, self._width))


def list_lengths(column: Any) -> NDArray[np.int64]:
    """Return how many numbers each list of a column has."""
    lengths = pyarrow().compute.list_value_length(column)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    inner = kind.value_type
    return bool(types.is_floating(inner) or types.is_integer(inner))


def _is_binary(types: Any, kind: Any) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _holds_binary(types: Any, kind: Any) -> bool:
    """Whether a column has bytes in it, or a type of someone's own."""
    if types.is_struct(kind):
        return any(_holds_binary(types, kind.field(at).type) for at in range(kind.num_fields))
    if types.is_map(kind):
        return _holds_binary(types, kind.key_type) or _holds_binary(types, kind.item_type)
    if hasattr(kind, "value_type"):  # lists and dictionaries
        return _holds_binary(types, kind.value_type)
    own = isinstance(kind, pyarrow().BaseExtensionType)
    return own or _is_binary(types, kind) or types.is_fixed_size_binary(kind)


def _portable(arrow: Any, kind: Any) -> Any:
    """Return the type whose values Python has: times in microseconds, and in UTC where they have a zone."""
    types = arrow.types
    if types.is_timestamp(kind):
        return arrow.timestamp("us", "UTC" if kind.tz else None)
    if types.is_duration(kind):
        return arrow.duration("us")
    if types.is_time64(kind):
        return arrow.time64("us")
    if types.is_struct(kind):
        return arrow.struct([one.with_type(_portable(arrow, one.type)) for one in kind])
    if types.is_fixed_size_list(kind):
        return arrow.list_(_portable(arrow, kind.value_type), kind.list_size)
    if types.is_large_list(kind):
        return arrow.large_list(kind.value_field.with_type(_portable(arrow, kind.value_type)))
    if types.is_list(kind):
        return arrow.list_(kind.value_field.with_type(_portable(arrow, kind.value_type)))
    return kind
