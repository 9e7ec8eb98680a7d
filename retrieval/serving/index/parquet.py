"""Read items, images and vectors from Parquet tables, one row group at a time."""

from __future__ import annotations

import bisect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, MissingDependency, RetrievalError, did_you_mean, listed
from retrieval.serving.filters import metadata_text
from retrieval.serving.index.locations import Origin, Source, shown, stamp_of
from retrieval.serving.store.items import check_id

ITEM_CHARACTERS = 1_000_000
"""Most characters of all text of one item; an index stores no longer text."""
MAX_WIDTH = 1_000_000
"""Most numbers per vector."""
_GROUP_BYTES = 1 << 30  # most bytes of a column in one row group, which pyarrow reads at once
_GROUP_VALUES = 1 << 28  # most values of a column in one row group
_ROWS_AT_A_TIME = 512
_IMAGES_AT_A_TIME = 4
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
def sentences(path: Path) -> Iterator[None]:
    """Context manager that turns errors of pyarrow or the file system into a `DataError`."""
    try:
        yield
    except RetrievalError:
        raise
    except FileNotFoundError as fault:
        raise DataError(f"{shown(path)} cannot be read: {fault.strerror or fault}.") from None
    except Exception as fault:
        reason = " ".join(str(fault).split())[:300].rstrip(".")
        raise DataError(
            f"{shown(path)} is damaged, or not a Parquet table that can be read: {reason}."
        ) from None


def holds_vectors(path: Path) -> bool:
    """Return whether a Parquet table has a column of vectors and none of images."""
    arrow = pyarrow()
    with sentences(path):
        names = arrow.parquet.read_schema(path).names
    return any(name in names for name in _VECTORS) and not {"image", "path"} & {*names}


def vectors_of(
    path: Path, column: Any, number: int, width: int | None = None
) -> NDArray[np.float32]:
    """Return a column of lists of numbers as an array (n, width).

    Args:
        path: path of the table.
        column: the lists.
        number: row number of the first list, for error messages.
        width: required length of each list. `None` requires the first list's length.

    Raises:
        DataError: a row has no list or a list of another length.
    """
    with sentences(path):
        lengths = np.array(pyarrow().compute.list_value_length(column).fill_null(-1))
        width = width or (int(lengths[0]) if len(lengths) else 0)
        if (lengths < 0).any():
            raise DataError(f"{shown(path)}: row {number + int(lengths.argmin())} has no vector.")
        if (lengths != width).any():
            row = int(np.argmax(lengths != width))
            raise DataError(
                f"{shown(path)}: row {number + row} has a vector of {int(lengths[row]):,} numbers"
                f" instead of {width:,}. All vectors of an index have the same width."
            )
        with np.errstate(over="ignore"):
            values = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return np.asarray(values).reshape(len(lengths), width)


class Table:
    """An opened Parquet table and the roles of its columns.

    Args:
        path: path of the table.
        kind: "image" or "features".

    Attributes:
        name: the path as text.
        columns: names of all columns.
        starts: number of the first row of each row group, followed by the number of rows.
        content: name of the column of image bytes, "image" or "image.bytes". `None` if the table
            has paths or features.
        left_out: one sentence per column that cannot be stored as metadata.

    Raises:
        DataError: the table cannot be read or lacks a required column.
        MissingDependency: pyarrow is not installed.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.name, self._stamp = path, shown(path), stamp_of(path)
        parquet, types = pyarrow().parquet, pyarrow().types
        with sentences(path):
            schema = parquet.read_schema(path)
            # Read text as dictionaries, so that rows share equal strings in memory.
            texts = [field.name for field in schema if _is_text(field.type)]
            self._file = parquet.ParquetFile(path, read_dictionary=texts)
            groups = range(self._file.metadata.num_row_groups)
            counts = [self._file.metadata.row_group(group).num_rows for group in groups]
        self.starts: list[int] = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        self.columns: list[str] = schema.names
        kinds = dict(zip(schema.names, schema.types, strict=True))
        try:
            if len(kinds) != len(self.columns):
                raise DataError(f"{self.name} has two columns of the same name.")
            self._choose(kind, kinds, types)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose(self, kind: str, kinds: dict[str, Any], types: Any) -> None:
        """Choose the columns of content, id, label and metadata."""
        self.content = self._vector = self._path = None
        image: Any = kinds.get("image")
        if kind == "features":
            self._vector = role = next((name for name in _VECTORS if name in kinds), None)
            element = getattr(kinds.get(role or ""), "value_type", None)
            if role and not (element and (types.is_floating(element) or types.is_integer(element))):
                raise DataError(
                    f"{self.name}: '{role}' must be a list of numbers, not {kinds[role]}."
                )
        elif "image" in kinds and (types.is_binary(image) or types.is_large_binary(image)):
            self.content = role = "image"
        elif "image" in kinds and types.is_struct(image) and image.get_field_index("bytes") >= 0:
            self.content, role = "image.bytes", "image"
        else:
            self._path = role = "path" if "path" in kinds else None
        if role is None:
            columns, column = {
                "features": ("'features' (a list of numbers); this bundle takes features", kind),
                "image": ("'path', or 'image' (bytes, or a struct with bytes)", "path"),
            }[kind]
            raise DataError(
                f"{self.name} needs a column {columns} (it has:"
                f" {', '.join(self.columns[:20]) or 'none'})." + did_you_mean(column, self.columns)
            )
        self._key = next((name for name in ("key", "id") if name in kinds), None)
        self._label = "label" if "label" in kinds else None
        further = [name for name in kinds if name not in {role, self._key, self._label}]
        self._metadata = [name for name in further if not _holds_bytes(kinds[name])]
        self.left_out = [
            f"{self.name}: the column '{name}' is left out, because JSON has no {kinds[name]}."
            for name in further
            if name not in self._metadata
        ]

    def batches(self, columns: Sequence[str], rows: int, group: int) -> Iterator[Any]:
        """Yield columns of the row group `group`, `rows` rows at a time.

        Raises:
            DataError: the row group is too large, or the table is damaged.
        """
        row_group = self._file.metadata.row_group(group)
        for chunk in map(row_group.column, range(row_group.num_columns)):
            column, values = chunk.path_in_schema, chunk.num_values
            size = chunk.total_uncompressed_size
            used = any(f"{column}.".startswith(f"{name}.") for name in columns)
            if used and (size > _GROUP_BYTES or values > _GROUP_VALUES):
                raise DataError(
                    f"{self.name}: row group {group} has {size:,} bytes and {values:,} values in"
                    f" '{column}'; the limits are {_GROUP_BYTES:,} and {_GROUP_VALUES:,}. Write the"
                    " table with smaller row groups."
                )
        with sentences(self.path):
            yield from self._file.iter_batches(
                rows, row_groups=[group], columns=list(columns), use_threads=False
            )

    def sources(
        self, take: Callable[[NDArray[np.float32]], object] | None = None, first: int = 0
    ) -> Iterator[Source]:
        """Yield all rows as items.

        Args:
            take: called with each batch of features, an array (n, F).
            first: `Source.row` of the table's first row, if the table has features.

        Raises:
            DataError: some rows cannot be used. The message lists up to a hundred of them.
        """
        problems: list[str] = []
        for number, cells in enumerate(self._cells(take)):
            source = self._source(number, cells, first)
            if isinstance(source, Source):
                yield source
                continue
            problems.append(f"row {number}: {source}.")
            if len(problems) >= _MAX_PROBLEMS:
                break
        if problems:
            raise DataError(listed(self.name, problems))

    def _cells(
        self, take: Callable[[NDArray[np.float32]], object] | None
    ) -> Iterator[dict[str, Any]]:
        """Yield each row as a dict of values by column, without images and features.

        `take` receives the features.
        """
        names = [name for name in (self._key, self._label, self._path, *self._metadata) if name]
        columns = [*names, *([self._vector] if self._vector else [])]
        if not columns:  # the table has only images, so the number of rows is enough
            yield from ({} for _ in range(self.starts[-1]))
            return
        for group, number in enumerate(self.starts[:-1]):
            for batch in self.batches(columns, _ROWS_AT_A_TIME, group):
                with sentences(self.path):
                    values = [self._values(batch.column(name), name) for name in names]
                if take is not None and self._vector:
                    take(vectors_of(self.path, batch.column(self._vector), number))
                for cells in zip(*values, strict=True) if names else [()] * batch.num_rows:
                    yield dict(zip(names, cells, strict=True))
                number += batch.num_rows

    def _values(self, column: Any, name: str) -> list[Any]:
        """Return a column as Python values; convert times to microseconds and UTC."""
        arrow, types = pyarrow(), pyarrow().types
        kind = column.type
        if types.is_dictionary(kind) and _is_text(kind.value_type):
            longest = arrow.compute.max(arrow.compute.binary_length(column.dictionary)).as_py()
            if (longest or 0) > 4 * ITEM_CHARACTERS:
                raise DataError(
                    f"{self.name}: text in '{name}' has more than {ITEM_CHARACTERS:,} characters."
                )
        if types.is_timestamp(kind):
            column = column.cast(arrow.timestamp("us", "UTC" if kind.tz else None), safe=False)
        elif types.is_duration(kind):
            column = column.cast(arrow.duration("us"), safe=False)
        elif types.is_time64(kind):
            column = column.cast(arrow.time64("us"), safe=False)
        values: list[Any] = column.to_pylist()
        return values

    def _source(self, number: int, cells: dict[str, Any], first: int) -> Source | str:
        """Return a row as an item, or what is wrong with the row, to end "row 3: …"."""
        stem = shown(self.path.name).partition(".")[0] or shown(self.path.name)
        path = cells.get(self._path) if self._path else None
        key = cells.get(self._key) if self._key else path or f"{stem}/{number}"
        label = cells.get(self._label) if self._label else None
        if isinstance(key, bool) or not isinstance(key, str | int):
            return (
                f"'{self._key}' is {'empty' if key is None else 'neither text nor a whole number'}"
            )
        if not isinstance(label, str | int | float | None):
            return "'label' is neither text nor a number"
        if self._path and (not isinstance(path, str) or not path or "\0" in path):
            return f"'{self._path}' is empty or is not a path"
        label = label_text(label)
        metadata = {name: _json_value(cells[name]) for name in self._metadata}
        if problem := text_problem(str(key), label, metadata):
            return problem
        if path is not None:
            return Source(str(key), label, (self.path.parent / path).absolute(), metadata)
        row = first + number if self._vector else None
        origin = Origin(self.path, str(number), self._stamp)
        return Source(str(key), label, None, metadata, row, origin)


class TableImages(Table):
    """A table of images that are read by row number."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "image")
        self._next_row, self._images = self.starts[-1], iter(())

    def read(self, part: str, most: int) -> bytes:
        """Return the bytes of an image. Reading rows in ascending order is fastest.

        Args:
            part: number of the row, as text.
            most: most bytes of an image.

        Raises:
            DataError: there is no such row or image, the image is too large, or the table is
                damaged.
        """
        row = int(part) if part.isascii() and part.isdigit() else self.starts[-1]
        if self.content is None or row >= self.starts[-1]:
            raise DataError(f"{self.name} has no image in row '{part[:40]}'.")
        group = bisect.bisect_right(self.starts, row) - 1
        if not self.starts[group] <= self._next_row <= row:
            self._next_row, self._images = self.starts[group], self._from_group(group)
        with sentences(self.path):
            # An error ends the generator, so the rows after a damaged row fail too.
            image = next(islice(self._images, row - self._next_row, None), None)
            self._next_row = row + 1
            if image is None:
                raise DataError(f"{self.name} is damaged: it ends before row {row}.")
            if not image.is_valid:
                raise DataError(f"{self.name}, row {row}, holds no image.")
            content = image.as_buffer()
            if content.size > most:
                raise DataError(
                    f"{self.name}, row {row}, has {content.size:,} bytes; the limit is {most:,}."
                    " Save it smaller, or raise the limit."
                )
            return bytes(content)

    def _from_group(self, group: int) -> Iterator[Any]:
        """Yield the images of the row group `group` and all later ones, as pyarrow scalars."""
        for number in range(group, len(self.starts) - 1):
            for batch in self.batches([str(self.content)], _IMAGES_AT_A_TIME, number):
                for value in batch.column(0):
                    inside = self.content == "image.bytes" and value.is_valid
                    yield value["bytes"] if inside else value


def text_problem(key: str, label: str | None, metadata: dict[str, Any]) -> str | None:
    """Return why an item cannot be stored, to end "row 3: …", or `None` if it can be stored."""
    if fault := check_id(key):
        return fault
    try:
        length = len(metadata_text(metadata)) + len(metadata_text({"": label}))
    except DataError as problem:
        return str(problem).rstrip(".")
    except RecursionError:
        return "has metadata that nest too deeply"
    return f"has more than {ITEM_CHARACTERS:,} characters" if length > ITEM_CHARACTERS else None


def label_text(label: str | int | float | None) -> str | None:
    """Return a label as text; booleans as in JSON, and an empty label or NaN as `None`."""
    if isinstance(label, bool):
        return str(label).lower()
    if label is None or label == "" or (isinstance(label, float) and math.isnan(label)):
        return None
    return sys.intern(str(label))  # items share equal labels in memory


def _json_value(value: Any) -> Any:
    """Return a value that JSON can hold: NaN and infinity as `None`, times and decimals as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, date | time):
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


def _holds_bytes(kind: Any) -> bool:
    """Return whether a pyarrow type contains bytes or is an extension type, judged by its name."""
    return re.search(r"binary(?!\w*:)|extension<", str(kind)) is not None
