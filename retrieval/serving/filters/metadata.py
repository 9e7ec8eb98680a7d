"""An item's metadata as a store keeps it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from retrieval.errors import DataError
from retrieval.serving.filters.tree import number

_DEPTH = 64  # as `serving.files.strict_json` reads


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Return metadata as the JSON text on which `to_sql` and `matches` agree in every version of SQLite from 3.40.

    Raises:
        DataError: they are not a JSON object, nest deeper than 64 levels, or hold a number that is not finite, a NUL character or
            a lone surrogate.
    """
    if not isinstance(metadata, Mapping):
        raise DataError(f"Metadata are an object with named entries, not a {type(metadata).__name__}.")
    return json.dumps(_plain(metadata, "metadata", 1), ensure_ascii=False)


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > _DEPTH + 1:
        raise DataError(f"{where[:80]}… nests deeper than {_DEPTH} levels.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int | float):
        if not math.isfinite(found := number(value)):
            raise DataError(f"{where} must be a finite number within the range of float64.")
        return found
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise DataError(f"{where} has an entry whose name is not text, but a {type(name).__name__}.")
            _text(name, f"A name in {where}")
        return {name: _plain(each, f"{where}.{name[:40]}", depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, where, depth + 1) for each in value]
    raise DataError(
        f"{where} is a {type(value).__name__}; JSON has text, numbers, true, false, null, lists, objects."
    )


def _text(value: str, where: str) -> str:
    """Refuse what SQLite cannot hold: its JSON functions cut a text at NUL."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where} has a lone surrogate, which is no character.") from None
    if "\0" in value:
        raise DataError(f"{where} has a NUL character. Leave it out.")
    return value
