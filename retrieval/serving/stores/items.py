"""What every store refuses of items and filters, in the same words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring
from math import isfinite
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from retrieval.errors import DataError, did_you_mean, listed, printable
from retrieval.serving.filters import Filter, fields, metadata_text
from retrieval.serving.stores.contract import VECTOR, Floats, Generation, Item, Keep

ID_CHARACTERS = 1000
TEXT_BYTES = 1_000_000
ORIGINAL_BYTES = 100_000_000

_KEEPS = get_args(Keep)
_WORDS = {None: "null", True: "true", False: "false"}
_EXACT = 1 << 53
_SIZE = 1 << 63
_SHOWN = 20  # fields
_NOTHING = (None,) * 6
_NESTED = (dict, list)
_TOGETHER = 8192  # arrays that are looked at together


def checked(items: Sequence[Item], widths: Mapping[str, int]) -> list[str]:
    """Return the metadata of items as JSON, after looking for all that cannot be kept.

    Raises:
        DataError: naming every item that cannot.
    """
    texts = _plain(items, widths)
    if texts is not None:
        return texts
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
            name = f"item {number}" + (f" ({printable(item.id)[:80]!r})" if isinstance(item.id, str) else "")
            problems += [f"{name} {fault}." for fault in faults]
        texts.append(text)
    if problems:
        raise DataError(listed("What is to be added", problems))
    return texts


def _plain(items: Sequence[Item], widths: Mapping[str, int]) -> list[str] | None:
    """Return the metadata of items as JSON where all of them together are seen to be as they should be; None: each is to be looked at.

    What is asked of a text is asked of all texts joined, so that many items cost a few passes and not many calls each.
    """
    ids, labels = [item.id for item in items], [item.label for item in items if item.label is not None]
    if not (_texts(ids, ID_CHARACTERS) and all(ids) and len(set(ids)) == len(ids)):
        return None
    if not _texts(labels, TEXT_BYTES // 16):
        return None
    for item in items:
        if (item.path, item.stamp, item.original, item.bytes, item.width, item.height) != _NOTHING:
            return None
    try:
        if not {item.keep for item in items} <= set(_KEEPS):
            return None
        texts = [_text(item.metadata) for item in items]
    except (DataError, TypeError, ValueError, AttributeError):
        return None
    if not _texts(texts, TEXT_BYTES // 16) or "\\u0000" in "".join(texts):
        return None
    return texts if all(_sound(items, name, width) for name, width in widths.items()) else None


def _texts(values: Sequence[object], most: int) -> bool:
    """Whether all of these are texts that a store can keep, of so many characters at most."""
    if not set(map(type, values)) <= {str}:
        return False
    texts = cast(Sequence[str], values)
    return max(map(len, texts), default=0) <= most and not _unusable("".join(texts))


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
        for name, one in value.items():
            if isinstance(one, _NESTED):
                copy[name] = own(one)
        return copy
    return [own(one) for one in value] if isinstance(value, list) else value


def check_id(id: object) -> str | None:
    """Return what is wrong with an id, as the end of a sentence; None for nothing."""
    if not isinstance(id, str) or not id:
        return "has no id: an id is a text of at least one character"
    if len(id) > ID_CHARACTERS:
        return f"has an id of {len(id):,} characters; {ID_CHARACTERS:,} are allowed"
    return f"has an id that {fault}" if (fault := _unusable(id)) else None


def usable(ids: Iterable[object]) -> list[str]:
    """Return those ids that an item can have; the record is not asked for others, since SQLite would cut one at NUL."""
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
        if "\\u0000" in text:
            metadata_text(item.metadata)  # says where, if that is NUL and no backslash of the text's own
        if fault := _unusable(text):
            faults.append(f"has metadata whose text {fault}")
    except (DataError, TypeError, ValueError, AttributeError) as fault:
        faults.append(f"has metadata that cannot be kept: {str(fault).rstrip('.')}")
    if (
        4 * (len(text) + len(str(item.label))) > TEXT_BYTES
        and len(f"{text}{item.label}".encode("utf-8", "replace")) > TEXT_BYTES
    ):
        faults.append(f"has more than {TEXT_BYTES:,} bytes of label and metadata")
    if item.keep not in _KEEPS:
        faults.append(f"keeps '{item.keep}', which is none of {', '.join(_KEEPS)}")
    faults += _file_problems(item)
    for name, width in widths.items():
        array = item.arrays.get(name)
        if array is None:
            faults.append(f"has no {name}")
        elif getattr(array, "shape", None) != (width,) or array.dtype.kind not in "fiu":
            faults.append(f"has a {name} of shape {getattr(array, 'shape', '?')} instead of {width} numbers")
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
    """Return metadata as JSON: by hand what most are, texts and numbers by name."""
    parts = []
    for name, one in metadata.items():
        kind = type(one)
        if type(name) is not str:
            return metadata_text(metadata)
        if kind is str:
            text = encode_basestring(one)
        elif (kind is int and -_EXACT < one < _EXACT) or (kind is float and isfinite(one)):
            text = repr(one)
        elif one is None or kind is bool:
            text = _WORDS[one]
        else:
            return metadata_text(metadata)
        parts.append(f"{encode_basestring(name)}: {text}")
    return f"{{{', '.join(parts)}}}"


def _unusable(text: str) -> str | None:
    if "\0" in text:
        return "holds the character NUL"
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
        raise DataError("A query vector holds NaN or infinity.")


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
