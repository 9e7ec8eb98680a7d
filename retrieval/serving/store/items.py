"""Items and generations, the checks that every store makes, and a call's time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, StoreError, did_you_mean, listed, printable
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.filters import Filter, fields, metadata_text

Floats = NDArray[np.float32]

Keep = Literal["reference", "copy", "thumbnail", "nothing"]
"""The part of an original that an index keeps: its path, all bytes, a thumbnail, or nothing."""

VECTOR, CODE, FEATURES = "vector", "code", "features"

ID_CHARACTERS = 1000
TEXT_BYTES = 1_000_000
ORIGINAL_BYTES = 100_000_000

_KEEPS = get_args(Keep)
_EXACT = 1 << 53  # whole numbers that float64 holds
_INT64_LIMIT = 1 << 63
_MAX_SHOWN = 20  # field names in an error message
_NOTHING = (None,) * 6
_NESTED = (dict, list)
_CHECKED_AT_ONCE = 8192  # arrays that are checked in one NumPy call


_STOP: ContextVar[float] = ContextVar("stop", default=inf)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Context manager that limits the time of all store calls in it; they raise `TooSlow`."""
    token = _STOP.set(min(stop_at(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _STOP.reset(token)


def stop_at() -> float:
    """Return the deadline of store calls on the `time.monotonic` clock; infinity without one."""
    return _STOP.get()


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of an index: an id, an optional label and metadata, and its vectors.

    Attributes:
        id: text of 1 to 1,000 characters, unique in the index.
        label: class label, or None.
        metadata: a JSON object.
        path: absolute path of the original file; None for bytes or features, or with a `source`.
        stamp: fingerprint that changes when that file changes.
        keep: the part of the original that the index keeps.
        original: bytes to store when the item is written; read them with `Store.original`.
        bytes: size of the original in bytes.
        width: width of the upright original image in pixels.
        height: height of the upright original image in pixels.
        arrays: float32 arrays by name: "vector" (P,), "code" (C,) if the bundle rescores, and
            "features" (F,) if the index stores them.
        source: location of an original that is not a file of its own, such as
            `/data/table.parquet#12`. Only the index's owner opens it, to embed the item again; a
            client never sets it.
    """

    id: str
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    stamp: str | None = None
    keep: Keep = "reference"
    original: bytes | None = None
    bytes: int | None = None
    width: int | None = None
    height: int | None = None
    arrays: Mapping[str, Floats] = field(default_factory=dict)
    source: str | None = None

    @property
    def vector(self) -> Floats:
        """Vector (P,) of an item that was read with its arrays."""
        return self.arrays[VECTOR]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Items that a store proposes for one query.

    The store may share the items between answers, so copy an item's metadata before passing it on.

    Attributes:
        items: items sorted by id or, if `distances` are set, by distance and then id.
        arrays: arrays (n, width) of these items by name; may be read lazily.
        distances: Euclidean float64 distances (n,) within the only sub-space, exactly as
            `serving.merging.merged` computes them; None if the store has not measured.
    """

    items: Sequence[Item]
    arrays: Mapping[str, Floats]
    distances: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Generation:
    """The arrays of all items of an index under one bundle.

    Attributes:
        number: increasing number of the generation.
        bundle: SHA-256 of the bundle's manifest.
        variant: variant of the bundle's encoder that embeds.
        widths: width of each array of an item, by name.
        spans: half-open column range `(start, stop)` of each sub-space of the vector.
        state: "served" (searched and written to), "building" (items are still being embedded) or
            "kept" (for `rollback`).
    """

    number: int
    bundle: str
    variant: str | None
    widths: Mapping[str, int]
    spans: tuple[tuple[int, int], ...]
    state: Literal["served", "building", "kept"]


def served_of(generations: Iterable[Generation]) -> Generation:
    """Return the generation that is served."""
    return next(generation for generation in generations if generation.state == "served")


@dataclass(frozen=True)
class Stats:
    """Size and state of a store.

    Attributes:
        count: number of items.
        generations: all generations, oldest first.
        bytes: disk space in bytes, or None if the store does not know it.
        details: further facts that depend on the kind of store, such as its structure.
    """

    count: int
    generations: tuple[Generation, ...]
    bytes: int | None
    details: Mapping[str, Any]


def widths_of(bundle: Bundle, *, features: int | None = None) -> dict[str, int]:
    """Return the width of each array that an index stores per item under a bundle, by name.

    Args:
        bundle: the bundle that embeds the items.
        features: width of the backbone's features, if the index stores them for the next head.
    """
    manifest = bundle.manifest
    codes = {CODE: manifest.code} if bundle.has_code and manifest.code else {}
    return {VECTOR: manifest.vector, **codes, **({FEATURES: features} if features else {})}


def spans_of(bundle: Bundle) -> tuple[tuple[int, int], ...]:
    """Return the column range of each sub-space of a bundle's vectors; without any, all columns."""
    manifest = bundle.manifest
    spans = tuple((space.start, space.stop) for space in manifest.subspaces)
    return spans or ((0, manifest.vector),)


def checked(items: Sequence[Item], widths: Mapping[str, int]) -> list[str]:
    """Return the metadata of items as JSON, or raise a `DataError` that names each invalid item."""
    problems, texts, seen = [], [], set()
    arrays = {name for name, width in widths.items() if _are_valid(items, name, width)}
    unsure = {name: width for name, width in widths.items() if name not in arrays}
    for number, item in enumerate(items):
        text, faults = _problems(item, unsure)
        if isinstance(item.id, str):
            if item.id in seen:
                faults.append("has an id that an earlier item of this call has")
            seen.add(item.id)
        if faults:
            name = f"item {number}" + (
                f" ({printable(item.id)[:80]!r})" if isinstance(item.id, str) else ""
            )
            problems += [f"{name} {fault}." for fault in faults]
        texts.append(text)
    if problems:
        raise DataError(listed("What is to be added", problems))
    return texts


def _are_valid(items: Sequence[Item], name: str, width: int) -> bool:
    """Return whether one array is valid in all items; this is faster than one check per item."""
    for start in range(0, len(items), _CHECKED_AT_ONCE):
        try:
            rows = [item.arrays[name] for item in items[start : start + _CHECKED_AT_ONCE]]
            together = np.array(rows)
            if together.shape != (len(rows), width) or together.dtype.kind not in "fiu":
                return False
            with np.errstate(over="ignore"):
                if not np.isfinite(together.astype(np.float32, copy=False)).all():
                    return False
        except (KeyError, ValueError, TypeError, AttributeError):
            return False
    return True


def own(value: Any) -> Any:
    """Return a deep copy of a JSON value."""
    if isinstance(value, dict):
        copy = dict(value)  # most objects are flat
        for name, entry in value.items():
            if isinstance(entry, _NESTED):
                copy[name] = own(entry)
        return copy
    return [own(entry) for entry in value] if isinstance(value, list) else value


def check_id(id: object) -> str | None:
    """Return the problem of an invalid id, as the end of a sentence, or None if it is valid."""
    if not isinstance(id, str) or not id:
        return "has no id: an id is a text of at least one character"
    if len(id) > ID_CHARACTERS:
        return f"has an id of {len(id):,} characters; {ID_CHARACTERS:,} are allowed"
    return f"has an id that {fault}" if (fault := _unusable(id)) else None


def usable(ids: Iterable[object]) -> list[str]:
    """Return the ids that an item can have; SQLite would cut others at NUL."""
    return [id for id in ids if isinstance(id, str) and not _unusable(id)]


def _problems(item: Item, widths: Mapping[str, int]) -> tuple[str, list[str]]:
    faults = [fault] if (fault := check_id(item.id)) else []
    if item.label is not None and not isinstance(item.label, str):
        faults.append(f"has a label that is not text, but {type(item.label).__name__}")
    elif item.label is not None and (fault := _unusable(item.label)):
        faults.append(f"has a label that {fault}")
    text = ""
    try:
        text = _text(item.metadata)
        if "\\u0000" in text or _unusable(text):
            metadata_text(item.metadata)  # raises and says where, unless it is an escaped backslash
    except (DataError, TypeError, ValueError, AttributeError) as fault:
        faults.append(f"has metadata that cannot be kept: {str(fault).rstrip('.')}")
    if (
        4 * (len(text) + len(str(item.label))) > TEXT_BYTES
        and len(f"{text}{item.label}".encode("utf-8", "replace")) > TEXT_BYTES
    ):
        faults.append(f"has more than {TEXT_BYTES:,} bytes of label and metadata")
    if item.keep not in _KEEPS:
        faults.append(f"keeps '{item.keep}', which is none of {', '.join(_KEEPS)}")
    if (item.path, item.stamp, item.original, item.bytes, item.width, item.height) != _NOTHING:
        faults += _file_problems(item)
    for name, width in widths.items():
        array = item.arrays.get(name)
        if array is None:
            faults.append(f"has no {name}")
        elif getattr(array, "shape", None) != (width,) or array.dtype.kind not in "fiu":
            faults.append(
                f"has a {name} of shape {getattr(array, 'shape', '?')} instead of {width} numbers"
            )
        else:
            with np.errstate(over="ignore"):
                finite = np.isfinite(np.asarray(array, np.float32)).all()
            if not finite:
                faults.append(f"has a {name} with NaN, infinity or a number beyond float32")
    return text, faults


def _file_problems(item: Item) -> list[str]:
    """Return the problems of an item's fields that describe its original."""
    faults = []
    if item.original is not None and not isinstance(item.original, bytes):
        faults.append(f"has an original that is not bytes, but {type(item.original).__name__}")
    elif item.original is not None and len(item.original) > ORIGINAL_BYTES:
        faults.append(f"has an original of more than {ORIGINAL_BYTES:,} bytes")
    if item.path is not None and (not isinstance(item.path, Path) or "\0" in str(item.path)):
        faults.append("has a path that no file can have")
    if item.stamp is not None and (not isinstance(item.stamp, str) or _unusable(item.stamp)):
        faults.append("has a stamp that is not text")
    for name, size in (("bytes", item.bytes), ("width", item.width), ("height", item.height)):
        if size is not None and not (isinstance(size, int) and 0 <= size < _INT64_LIMIT):
            faults.append(f"has a number of {name} that is not a whole number from 0 to 2⁶³ - 1")
    return faults


def _text(metadata: Mapping[str, Any]) -> str:
    """Return metadata as JSON, with a fast path for flat texts and numbers."""
    parts = []
    for name, entry in metadata.items():
        kind = type(entry)
        if type(name) is not str:
            return metadata_text(metadata)
        if kind is str:
            text = encode_basestring(entry)
        elif (kind is int and -_EXACT < entry < _EXACT) or (kind is float and isfinite(entry)):
            text = repr(entry)
        else:
            return metadata_text(metadata)
        parts.append(f"{encode_basestring(name)}: {text}")
    return f"{{{', '.join(parts)}}}"


def _unusable(text: str) -> str | None:
    if "\0" in text:
        return "holds the character NUL"
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not Unicode text: it holds half of a surrogate pair"
    return None


def check_queries(queries: Floats, generation: Generation) -> None:
    """Raise a `DataError` if queries (Q, P) do not fit a generation, or hold NaN or infinity."""
    width = generation.widths[VECTOR]
    if queries.ndim != 2 or queries.shape[1] != width:
        raise DataError(f"Queries of this index are (Q, {width}), not {queries.shape}.")
    if not np.isfinite(queries).all():
        raise DataError("A query vector holds NaN, infinity or a number beyond float32.")


def refuse_fields(where: Filter | None, known: Iterable[str]) -> None:
    """Raise a `DataError` if a filter names a metadata field that is not among the `known` ones."""
    names = set(known)
    for name in sorted(fields(where)) if where is not None else ():
        if name not in names:
            raise no_field(name, sorted(names))


def no_field(name: str, known: Sequence[str]) -> DataError:
    """Return the error for a filter on an unknown field, which lists the known ones."""
    names = ["id", "label", *known]
    return DataError(
        f"No item of this index has a field '{name}' (there are: {', '.join(names[:_MAX_SHOWN])})."
        + did_you_mean(name, names)
    )


COLUMNS = "n, id, label, metadata, path, stamp, keep, bytes, width, height, source"
"""Columns of an item in the record, in the order of `to_row`."""

Row = tuple[Any, ...]
_NONE = "{}"


def to_row(number: int, item: Item, metadata: str) -> Row:
    """Return an item as a row of the record."""
    path = None if item.path is None else os.fsencode(item.path)  # file names may not be Unicode
    return (
        number,
        item.id,
        item.label,
        metadata,
        path,
        item.stamp,
        item.keep,
        item.bytes,
        item.width,
        item.height,
        None if item.source is None else os.fsencode(item.source),
    )


def from_row(row: Row, arrays: Mapping[str, Floats] | None = None) -> Item:
    """Return a row of the record, with its arrays, as an item.

    Raises:
        StoreError: this package cannot have written the row.
    """
    _, id, label, metadata, path, stamp, keep, size, width, height, source = row
    try:
        content = {} if metadata == _NONE else strict_loads(metadata)
        where = None if path is None else Path(os.fsdecode(path))
        address = None if source is None else os.fsdecode(source)
    except (ValueError, TypeError) as fault:
        raise StoreError(f"An item of this index is not what an index holds: {fault}.") from fault
    return Item(
        id, label, content, where, stamp, keep, None, size, width, height, arrays or {}, address
    )
