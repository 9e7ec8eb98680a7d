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
"""What an index keeps of an original: its path, all its bytes, a small picture, or nothing."""

VECTOR, CODE, FEATURES = "vector", "code", "features"

ID_CHARACTERS = 1000
TEXT_BYTES = 1_000_000
ORIGINAL_BYTES = 100_000_000

_KEEPS = get_args(Keep)
_EXACT = 1 << 53  # whole numbers that float64 holds
_SIZE = 1 << 63
_SHOWN = 20  # fields
_NOTHING = (None,) * 6
_NESTED = (dict, list)
_TOGETHER = 8192  # arrays that are looked at together


_STOP: ContextVar[float] = ContextVar("stop", default=inf)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Bound the time that a store takes for all calls in this block and thread; then: `TooSlow`."""
    token = _STOP.set(min(stop_at(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _STOP.reset(token)


def stop_at() -> float:
    """Return the time (`time.monotonic`) at which a store gives up; infinity without `patience`."""
    return _STOP.get()


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of an index: an id, an optional label and metadata, and its vectors.

    Attributes:
        id: unique in the index: any text of 1 to 1,000 characters.
        label: None when it has none.
        metadata: a JSON object.
        path: its original file, absolute; None for bytes or features, or with a `source`.
        stamp: what changes when that file does.
        keep: what the index keeps of the original.
        original: the bytes to keep, when an item is written; `Store.original` reads them.
        bytes: size of the original.
        width: of the original image, in pixels, upright.
        height: see `width`.
        arrays: float32, by name: "vector" (P,), "code" (C,) where the bundle rescores, "features"
            (F,) where they are kept.
        source: where its original is that is no local file of its own, such as
            `/data/table.parquet#12`. Only the index's owner opens it, to embed again: never what
            a client sends.
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
        """The vector (P,), of an item that was read with its arrays."""
        return self.arrays[VECTOR]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a store proposes for one query.

    The store may reuse the items for other answers: who gives one away copies its metadata.

    Attributes:
        items: in the order of their ids; with `distances` nearest first, equal distances by id.
        arrays: (n, width) by name, of these items; may be read when first asked for.
        distances: (n,) Euclidean, float64, within the only sub-space, exactly as
            `serving.merging.merged` computes them; None: the store has not measured.
    """

    items: Sequence[Item]
    arrays: Mapping[str, Floats]
    distances: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Generation:
    """All items of an index under one bundle.

    Attributes:
        number: counts up.
        bundle: SHA-256 of the bundle's manifest.
        variant: which variant of its encoder ran.
        widths: numbers of each array of an item, by name.
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


@dataclass(frozen=True)
class Stats:
    """What a store holds.

    Attributes:
        count: items.
        generations: oldest first.
        bytes: on the disk, where the store knows.
        details: what only this kind of store has, such as its structure.
    """

    count: int
    generations: tuple[Generation, ...]
    bytes: int | None
    details: Mapping[str, Any]


def widths_of(bundle: Bundle, *, features: int | None = None) -> dict[str, int]:
    """Return the width of each array that an index keeps of an item under a bundle, by name.

    Args:
        bundle: the one that embeds.
        features: width of the backbone's features, where they are kept for the next head.
    """
    manifest = bundle.manifest
    codes = {CODE: manifest.code} if bundle.has_code and manifest.code else {}
    return {VECTOR: manifest.vector, **codes, **({FEATURES: features} if features else {})}


def spans_of(bundle: Bundle) -> tuple[tuple[int, int], ...]:
    """Return the column range of each sub-space of a bundle's vectors; of no sub-spaces, all."""
    manifest = bundle.manifest
    spans = tuple((space.start, space.stop) for space in manifest.subspaces)
    return spans or ((0, manifest.vector),)


def checked(items: Sequence[Item], widths: Mapping[str, int]) -> list[str]:
    """Return the metadata of items as JSON, after looking for all that cannot be kept.

    Raises:
        DataError: naming every item that cannot.
    """
    problems, texts, seen = [], [], set()
    arrays = {name for name, width in widths.items() if _sound(items, name, width)}
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


def _sound(items: Sequence[Item], name: str, width: int) -> bool:
    """Whether one array of all items is as it should be; if not, each is looked at."""
    for start in range(0, len(items), _TOGETHER):
        try:
            rows = [item.arrays[name] for item in items[start : start + _TOGETHER]]
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
    """Return a JSON value as the caller's own: what is done to it reaches nobody else's."""
    if isinstance(value, dict):
        copy = dict(value)  # most are flat
        for name, entry in value.items():
            if isinstance(entry, _NESTED):
                copy[name] = own(entry)
        return copy
    return [own(entry) for entry in value] if isinstance(value, list) else value


def check_id(id: object) -> str | None:
    """Return what is wrong with an id, as the end of a sentence; None for nothing."""
    if not isinstance(id, str) or not id:
        return "has no id: an id is a text of at least one character"
    if len(id) > ID_CHARACTERS:
        return f"has an id of {len(id):,} characters; {ID_CHARACTERS:,} are allowed"
    return f"has an id that {fault}" if (fault := _unusable(id)) else None


def usable(ids: Iterable[object]) -> list[str]:
    """Return those ids that an item can have: SQLite would cut one at NUL."""
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
            metadata_text(item.metadata)  # says where, if that is no backslash of the text's own
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
    """Return what is wrong with what an item says of its original."""
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
        if size is not None and not (isinstance(size, int) and 0 <= size < _SIZE):
            faults.append(f"has a number of {name} that is not a whole number from 0 to 2⁶³ - 1")
    return faults


def _text(metadata: Mapping[str, Any]) -> str:
    """Return metadata as JSON; flat texts and numbers, which most are, by a much faster way."""
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
    """Refuse queries that are not vectors of a generation.

    Raises:
        DataError: they have another width, or hold NaN or infinity.
    """
    width = generation.widths[VECTOR]
    if queries.ndim != 2 or queries.shape[1] != width:
        raise DataError(f"Queries of this index are (Q, {width}), not {queries.shape}.")
    if not np.isfinite(queries).all():
        raise DataError("A query vector holds NaN, infinity or a number beyond float32.")


def refuse_fields(where: Filter | None, known: Iterable[str]) -> None:
    """Refuse a filter on what no item has.

    Args:
        where: the filter.
        known: the names in the metadata of all items, outermost ones.

    Raises:
        DataError: naming the field.
    """
    names = set(known)
    for name in sorted(fields(where)) if where is not None else ():
        if name not in names:
            raise no_field(name, sorted(names))


def no_field(name: str, known: Sequence[str]) -> DataError:
    """Return the error for a filter on a field that no item has, with those that there are."""
    names = ["id", "label", *known]
    return DataError(
        f"No item of this index has a field '{name}' (there are: {', '.join(names[:_SHOWN])})."
        + did_you_mean(name, names)
    )


COLUMNS = "n, id, label, metadata, path, stamp, keep, bytes, width, height, source"

"""Of an item in the record, in the order in which `to_row` gives them."""

Row = tuple[Any, ...]
_NONE = "{}"


def to_row(number: int, item: Item, metadata: str) -> Row:
    """Return an item as the record keeps it."""
    path = None if item.path is None else os.fsencode(item.path)  # not every file name is text
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
    """Return a row, and its arrays, as an item.

    Raises:
        StoreError: it is not one that this package writes.
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
