"""Read untrusted JSON: strict, limited in depth, with an error that lists every problem."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from retrieval.errors import RetrievalError

_DEPTH = 64
# Matches a string (perhaps unterminated) or a bracket. Possessive, so that it never backtracks.
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)


def parse_json(
    text: bytes, where: Path, what: str, error: type[RetrievalError], formats: frozenset[int]
) -> dict[str, Any]:
    """Return the JSON object of a manifest after checking its `format`.

    Args:
        text: content of the file.
        where: its path, for errors.
        what: "bundle" or "index", for errors.
        error: class of the error to raise.
        formats: supported format versions.
    """
    try:
        content = strict_loads(text, finite=False)  # the model refuses NaN and names the key
    except ValueError as fault:
        raise error(
            f"{where} is damaged: not JSON ({fault}). Make the {what} again, or copy it again."
        ) from None
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise error(f"{where} is not the description of a {what}: it has no format number.")
    if content["format"] not in formats:
        raise error(
            f"{where} has format {content['format']}; this version of retrieval reads format "
            f"{', '.join(map(str, sorted(formats)))}. Upgrade retrieval, or make the {what} again."
        )
    return content


def strict_loads(text: bytes | str, *, finite: bool = True) -> Any:
    """Return the value of a strict JSON text.

    Strict JSON has no duplicate keys, at most 64 levels, and no NaN, infinity or number beyond
    float64.

    Args:
        text: UTF-8.
        finite: False accepts NaN and infinity.

    Raises:
        ValueError: the text is not strict JSON.
    """
    if isinstance(text, bytes):
        if not finite and (plain := _plain(text)) is not None:
            return plain
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if _nests_too_deeply(text):
        raise ValueError("nested too deeply")
    return (_FINITE if finite else _ANY).decode(text)


def _plain(text: bytes) -> dict[str, Any] | None:
    """Parse a flat object of numbers, texts and lists ten times faster than the standard library.

    Returns `None` for anything else and for invalid JSON. If the text has as many colons as the
    object has keys, then no key is duplicated and no object is nested.
    """
    # The object itself is a level, too. Older pydantic misreads surrogate escapes.
    if text.count(b"[") >= _DEPTH or b"\\u" in text:
        return None
    try:
        content = from_json(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) and text.count(b":") == len(content) else None


def _nests_too_deeply(text: str) -> bool:
    """Return whether brackets nest too deeply, checked without recursion."""
    if text.count("[") + text.count("{") <= _DEPTH:
        return False
    depth = 0
    for match in _BRACKETS.finditer(text):
        bracket = text[match.start()]
        if bracket in "[{":
            depth += 1
            if depth > _DEPTH:
                return True
        elif bracket in "]}":
            depth -= 1
    return False


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return content


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:20]} is beyond the range of float64")
    return number


def problems_of(fault: ValidationError) -> str:
    """Return every problem that pydantic found, one per line."""
    lines = []
    for problem in fault.errors(include_url=False, include_context=False):
        place = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"  - {place + ': ' if place else ''}{message}")
    return "\n".join(lines)


# `json.loads` would create a decoder for every text, which takes longer than decoding a small one.
_FINITE = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_refuse, parse_float=_finite
)
_ANY = json.JSONDecoder(object_pairs_hook=_unique_keys)
