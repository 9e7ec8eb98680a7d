"""What a store keeps (items and generations), checks of items, and the deadline of store calls."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray

from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, did_you_mean, listed, printable
from retrieval.store.filters import Filter, fields, flat_texts, metadata_text
from retrieval.store.filters.tree import has_surrogate

Floats = NDArray[np.float32]

Keep = Literal["reference", "copy", "thumbnail", "nothing"]
"""What an index keeps of an original (the file or bytes that an item was embedded from).

"reference" keeps its path, "copy" all its bytes, "thumbnail" a small JPEG.
"""

VECTOR = "vector"
CODE = "code"
FEATURES = "features"
BASE = "base"
NOT_SEARCHED = frozenset({FEATURES, BASE})
"""Arrays that no search reads."""

CALIBRATION = "calibration"
"""Name of the note that holds an index's calibration; see `Store.note`."""

ID_CHARACTERS = 1000
TEXT_BYTES = 1_000_000
ORIGINAL_BYTES = 100_000_000

_KEEPS = get_args(Keep)
_INT64_LIMIT = 1 << 63
_MAX_SHOWN = 20  # field names in an error message


_DEADLINE: ContextVar[float] = ContextVar("stop", default=inf)


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Context manager in which store calls raise `TooSlow` once `seconds` have passed."""
    token = _DEADLINE.set(min(stop_at(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def stop_at() -> float:
    """Return the deadline of store calls on the `time.monotonic` clock; infinity without one."""
    return _DEADLINE.get()


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of an index: an id, an optional label and metadata, and its vectors.

    Attributes:
        id: text of 1 to 1,000 characters, unique in the index.
        label: class label, or None.
        metadata: a JSON object.
        path: absolute path of the file that the item was embedded from (its original). None if it
            was embedded from bytes or features.
        stamp: SHA-256 of the original that was embedded and, if that is a file, its size, times and
            inode, separated by spaces.
        keep: what the index keeps of the original.
        original: bytes of the original to store with the item. Set only while the item is written;
            `Store.original` reads the bytes.
        bytes: size of the original in bytes.
        width: width of the original image in pixels, after EXIF rotation.
        height: height of the original image in pixels, after EXIF rotation.
        arrays: float32 arrays by name. "vector" (P,) is searched. "code" (C,) is the input of the
            bundle's rescorer, if it has one. "base" is the vector before the bundle's adapter, if
            it has one. "features" (F,) is the backbone's output, if the index stores it.
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

    @property
    def vector(self) -> Floats:
        """Vector (P,) of an item that was read with its arrays."""
        if not self.arrays:
            raise DataError(
                f"The item '{self.id}' was read without its vector. Call index.vector(id), or"
                " index.get(ids, arrays=True)."
            )
        return self.arrays[VECTOR]

    def changed(self, changes: Mapping[str, Any]) -> Item:
        """Return the item with another label, and with a merge patch applied to its metadata."""
        metadata = _merged(self.metadata, changes.get("metadata", {})) or {}
        return replace(self, **{**changes, "metadata": metadata})


def _merged(value: Any, patch: Any) -> Any:
    """Apply a merge patch (RFC 7396): objects are merged, and null removes an entry."""
    if not isinstance(patch, Mapping):
        return patch
    if isinstance(value, Mapping):
        content = dict(value)
    else:
        content = {}
    for name, entry in patch.items():
        if entry is None:
            content.pop(name, None)
        else:
            content[name] = _merged(content.get(name), entry)
    return content


@dataclass(frozen=True, eq=False)
class ItemColumns(Sequence[Item]):
    """Items by column, which is how they are stored: a million take no million objects.

    As a sequence, it makes an `Item` when one is asked for.

    Attributes:
        ids, labels, paths, stamps, keeps, originals: these attributes of each item; see `Item`.
        texts: metadata of each item as JSON.
        sizes: bytes, width and height of each item's original.
        arrays: arrays (n, width) of the items by name; none if the items have no arrays.
        fields: names of all metadata.
    """

    ids: Sequence[str]
    labels: Sequence[str | None]
    texts: Sequence[str]
    paths: Sequence[Path | None]
    stamps: Sequence[str | None]
    keeps: Sequence[Keep]
    originals: Sequence[bytes | None]
    sizes: Sequence[tuple[int | None, int | None, int | None]]
    arrays: Mapping[str, Floats]
    fields: frozenset[str]

    @classmethod
    def of(cls, items: Sequence[Item], texts: Sequence[str], names: Iterable[str]) -> ItemColumns:
        """Return items by column, with the arrays of these names.

        Raises:
            ValueError, KeyError, TypeError or AttributeError: items or arrays are not valid.
        """
        arrays = {name: np.array([item.arrays[name] for item in items]) for name in names}
        return cls(
            [item.id for item in items],
            [item.label for item in items],
            texts,
            [item.path for item in items],
            [item.stamp for item in items],
            [item.keep for item in items],
            [item.original for item in items],
            [(item.bytes, item.width, item.height) for item in items],
            arrays,
            frozenset(chain.from_iterable(item.metadata for item in items)),
        )

    @classmethod
    def joined(cls, parts: Sequence[ItemColumns]) -> ItemColumns:
        """Return the items of all parts, which have the same arrays."""
        columns: dict[str, Any] = {
            name: list(chain.from_iterable(getattr(part, name) for part in parts))
            for name in _COLUMNS
        }
        arrays = {
            name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays
        }
        fields = frozenset(chain.from_iterable(part.fields for part in parts))
        return cls(**columns, arrays=arrays, fields=fields)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays and originals."""
        arrays = sum(array.nbytes for array in self.arrays.values())
        return arrays + sum(map(len, filter(None, self.originals)))

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        arrays = {name: array[index] for name, array in self.arrays.items()}
        return _item(arrays, *(getattr(self, name)[index] for name in _COLUMNS))

    def __iter__(self) -> Iterator[Item]:
        rows: Iterable[Mapping[str, Floats]] = repeat({}, len(self))
        if self.arrays:
            rows = rows_of(self.arrays)
        return map(_item, rows, *(getattr(self, name) for name in _COLUMNS))


_COLUMNS = ("ids", "labels", "texts", "paths", "stamps", "keeps", "originals", "sizes")


def _item(
    arrays: Mapping[str, Floats],
    id: str,
    label: str | None,
    text: str,
    path: Path | None,
    stamp: str | None,
    keep: Keep,
    original: bytes | None,
    sizes: tuple[int | None, int | None, int | None],
) -> Item:
    return Item(id, label, json.loads(text), path, stamp, keep, original, *sizes, arrays)


def rows_of(arrays: Mapping[str, Floats]) -> list[dict[str, Floats]]:
    """Return the rows of arrays (n, width), each with its array by name."""
    names = list(arrays)
    return [
        dict(zip(names, row, strict=True)) for row in zip(*map(list, arrays.values()), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Items that a store proposes for one query.

    The store may share the items between answers, so copy an item's metadata before passing it on.

    Attributes:
        items: items sorted by id or, if `distances` are set, by distance and then id.
        arrays: arrays (n, width) of these items by name; may be read lazily.
        distances: Euclidean distances (n,), float64, exactly as
            `bundle.distances.merged_distances` computes them. None if the store did not measure
            them. A store must not measure vectors that have several sub-spaces.
    """

    items: Sequence[Item]
    arrays: Mapping[str, Floats]
    distances: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Generation:
    """The arrays of all items of an index, computed with one bundle (an exported model).

    Attributes:
        number: number of the generation; each new generation has a higher one.
        bundle: SHA-256 of the bundle's manifest.
        variant: variant of the bundle's encoder that computed the arrays. None for the encoder
            itself.
        widths: width of each array of an item, by name.
        spans: half-open column range `(start, stop)` of each sub-space, a part of the vector that
            is searched on its own.
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
    """Return the width, by name, of each array that an index stores per item.

    Args:
        bundle: the bundle that embeds the items.
        features: width of the backbone's features, which let the index migrate to another head.
            None if the index does not store them.
    """
    manifest = bundle.manifest
    if bundle.has_code and manifest.code:
        outputs = {CODE: manifest.code}
    elif manifest.adapter is not None:
        outputs = {BASE: manifest.adapter.width}
    else:
        outputs = {}
    return {VECTOR: manifest.vector, **outputs, **({FEATURES: features} if features else {})}


def spans_of(bundle: Bundle) -> tuple[tuple[int, int], ...]:
    """Return the column range of each sub-space of a bundle's vectors.

    A bundle without sub-spaces gets one range of all columns.
    """
    manifest = bundle.manifest
    spans = tuple((space.start, space.stop) for space in manifest.subspaces)
    return spans or ((0, manifest.vector),)


def checked(items: Sequence[Item], widths: Mapping[str, int]) -> list[str]:
    """Check items; return the metadata of each as JSON text; see `checked_columns`."""
    return list(checked_columns(items, widths).texts)


def checked_columns(items: Sequence[Item], widths: Mapping[str, int]) -> ItemColumns:
    """Check items; return them by column.

    Args:
        items: items to be stored.
        widths: width of each array that an item must have, by name.

    Raises:
        DataError: some items are invalid; the message names each of them.
    """
    if isinstance(items, ItemColumns):
        columns: ItemColumns | None = items
    else:
        columns = _columns_of(items, widths)
    faulty = dict(widths)
    if columns is not None:
        # One by one, the vectors of 60,000 items make this function 2.1 times as dear.
        for name, width in widths.items():
            array = columns.arrays.get(name)
            if array is not None and array.shape == (len(items), width) and _is_finite(array):
                del faulty[name]
        if not faulty and _are_plain(columns):
            return columns
    items = list(items)
    problems = []
    texts = []
    seen = set()
    for number, item in enumerate(items):
        text, faults = _problems(item, faulty)
        texts.append(text)
        name = f"item {number}"
        if isinstance(item.id, str):
            if item.id in seen:
                faults.append("repeats the id of an earlier item of this call")
            seen.add(item.id)
            if faults:
                name = f"{name} ({printable(item.id)[:80]!r})"
        problems += [f"{name} {fault}." for fault in faults]
    if problems:
        raise DataError(listed("The list of items", problems))
    if columns is None:
        return ItemColumns.of(items, texts, widths)
    return replace(columns, texts=texts)


def check_embedded(
    items: Sequence[Item],
    left_out: Iterable[str],
    pending: Iterable[str],
    widths: Mapping[str, int],
) -> ItemColumns:
    """Return items by column.

    Raises:
        DataError: some are invalid or, with those left out, they are not the pending ones.
    """
    columns = checked_columns(items, widths)
    embedded = set(columns.ids)
    expected = set(pending)
    faults = [f"{id} was not pending." for id in sorted(embedded - expected)]
    missing = expected - embedded - set(left_out)
    faults += [f"{id} is neither embedded nor left out." for id in sorted(missing)]
    if faults:
        raise DataError(listed("The list of embedded items", faults))
    return columns


def check_arrays(arrays: Mapping[str, Floats], count: int, widths: Mapping[str, int]) -> None:
    """Raise a `DataError` unless `arrays` are valid, (count, width) for each of `widths`."""
    for name, width in widths.items():
        array = arrays.get(name)
        if array is None or array.shape != (count, width) or not _is_finite(array):
            shape = getattr(array, "shape", "none")
            raise DataError(
                f"The items' {name} need {width} numbers each, none NaN, infinite or beyond"
                f" float32; their shape is {shape} for {count:,} items."
            )


def _columns_of(items: Sequence[Item], widths: Mapping[str, int]) -> ItemColumns | None:
    """Return items by column, without texts if metadata are not flat; None if arrays are faulty."""
    try:
        texts = flat_texts([item.metadata for item in items]) or ()
        return ItemColumns.of(items, texts, widths)
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _are_plain(items: ItemColumns) -> bool:
    """Return whether `_problems` certainly finds nothing in items with valid arrays.

    That is so if their text, joined, would be valid as one item's.
    """
    stamps = [stamp for stamp in items.stamps if stamp is not None]
    paths = [path for path in items.paths if path is not None]
    originals = [original for original in items.originals if original is not None]
    sizes = [size for size in chain.from_iterable(items.sizes) if size is not None]
    return (
        len(items.texts) == len(items)
        and all(map(_KEEPS.__contains__, items.keeps))
        and set(map(type, stamps)) <= {str}
        and not _text_fault("".join(stamps))
        and all(isinstance(path, Path) for path in paths)
        and "\0" not in "".join(map(str, paths))
        and set(map(type, originals)) <= {bytes}
        and max(map(len, originals), default=0) <= ORIGINAL_BYTES
        and set(map(type, sizes)) <= {int}
        and min(sizes, default=0) >= 0
        and max(sizes, default=0) < _INT64_LIMIT
        and are_plain_texts(items.ids, items.labels, items.texts)
        and len(set(items.ids)) == len(items)
    )


def are_plain_texts(ids: Sequence[str], labels: Sequence[str | None], texts: Sequence[str]) -> bool:
    """Return whether items' ids, labels and metadata (valid JSON) can certainly be stored.

    Joined, the texts of all are tried as one item's.
    """
    named = [label for label in labels if label is not None]
    if not ids or not set(map(type, chain(ids, named))) <= {str}:
        return False
    # A character has at most four bytes, and six characters in JSON.
    longest = max(map(len, texts)) + max(map(len, named), default=0)
    return (
        min(map(len, ids)) > 0
        and max(map(len, ids)) <= ID_CHARACTERS
        and 6 * longest <= TEXT_BYTES
        and not _text_fault("".join(chain(ids, named)))
    )


def _is_finite(array: Any) -> bool:
    """Return whether an array has only real numbers that are finite as float32."""
    with np.errstate(over="ignore"):
        return array.dtype.kind in "fiu" and bool(
            np.isfinite(array.astype(np.float32, copy=False)).all()
        )


def check_id(id: object) -> str | None:
    """Return what is wrong with an id, as the end of "The item …", or None if it is valid."""
    if not isinstance(id, str) or not id:
        return "has no id: an id is text of at least one character"
    if len(id) > ID_CHARACTERS:
        return f"has an id of {len(id):,} characters; {ID_CHARACTERS:,} are allowed"
    if fault := _text_fault(id):
        return f"has an id that {fault}"
    return None


def usable(ids: Iterable[object]) -> list[str]:
    """Return the ids that can be looked up: those without NUL and without half a surrogate pair.

    No item has any of the other ids. SQLite would cut an id at NUL and find another item.
    """
    texts = [id for id in ids if isinstance(id, str)]
    if not _text_fault("".join(texts)):
        return texts
    return [id for id in texts if not _text_fault(id)]


def _problems(item: Item, widths: Mapping[str, int]) -> tuple[str, list[str]]:
    """Return an item's metadata as JSON and its problems, each as the end of "The item …"."""
    if fault := check_id(item.id):
        faults = [fault]
    else:
        faults = []
    for name, entry in (("label", item.label), ("stamp", item.stamp)):
        if entry is not None and not isinstance(entry, str):
            faults.append(f"has a {name} that is not text, but {type(entry).__name__}")
        elif entry is not None and (fault := _text_fault(entry)):
            faults.append(f"has a {name} that {fault}")
    text = ""
    try:
        text = metadata_text(item.metadata)
    except (DataError, TypeError, ValueError, AttributeError) as fault:
        faults.append(f"has metadata that cannot be kept: {str(fault).rstrip('.')}")
    # A character has at most four bytes, so short text need not be encoded.
    if (
        4 * (len(text) + len(str(item.label))) > TEXT_BYTES
        and len(f"{text}{item.label}".encode("utf-8", "replace")) > TEXT_BYTES
    ):
        faults.append(f"has more than {TEXT_BYTES:,} bytes of label and metadata")
    if item.keep not in _KEEPS:
        faults.append(f"has keep = {item.keep!r}; it must be one of {', '.join(_KEEPS)}")
    original = item.original
    if original is not None and not (
        isinstance(original, bytes) and len(original) <= ORIGINAL_BYTES
    ):
        faults.append(f"has an original that is not bytes, or has more than {ORIGINAL_BYTES:,}")
    if item.path is not None and (not isinstance(item.path, Path) or "\0" in str(item.path)):
        faults.append("has a path that no file can have")
    for name, size in (("bytes", item.bytes), ("width", item.width), ("height", item.height)):
        if size is not None and not (isinstance(size, int) and 0 <= size < _INT64_LIMIT):
            faults.append(f"has {name} = {size!r}; it must be a whole number from 0 to 2⁶³ - 1")
    for name, width in widths.items():
        array = item.arrays.get(name)
        if array is None or getattr(array, "shape", None) != (width,) or not _is_finite(array):
            shape = getattr(array, "shape", "none")
            faults.append(
                f"needs as its {name} {width} numbers, none NaN, infinite or beyond float32; its"
                f" shape is {shape}"
            )
    return text, faults


def _text_fault(text: str) -> str | None:
    """Return why SQLite or UTF-8 cannot hold `text`, as the end of a sentence, or None."""
    if "\0" in text:
        return "holds the character NUL"
    if has_surrogate(text):
        return "is not Unicode text: it holds half of a surrogate pair"
    return None


def refuse_fields(filter: Filter | None, known: Iterable[str]) -> None:
    """Raise a `DataError` if a filter names a metadata field that is not among the `known` ones."""
    names = set(known)
    for name in sorted(fields(filter)) if filter is not None else ():
        if name not in names:
            raise no_field(name, sorted(names))


def no_field(name: str, known: Sequence[str]) -> DataError:
    """Return the error for a filter on a field that no item has ever had.

    Args:
        name: the unknown field.
        known: metadata fields that an item has or had; the message lists some of them.
    """
    names = ["id", "label", *known]
    return DataError(
        f"No item of this index has a field '{name}' (fields that items have or had:"
        f" {', '.join(names[:_MAX_SHOWN])}).{did_you_mean(name, names)}"
    )
