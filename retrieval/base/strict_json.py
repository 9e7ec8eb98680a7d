"""Read untrusted JSON: no duplicate keys, limited depth, and errors that list every problem."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from retrieval.errors import RetrievalError

_MAX_DEPTH = 64
# Matches a string (perhaps unterminated) or a bracket; brackets within strings do not nest.
# Possessive quantifiers prevent backtracking.
_STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)


def parse_json(
    text: bytes, where: Path, what: str, error: type[RetrievalError], formats: frozenset[int]
) -> dict[str, Any]:
    """Return the JSON object in a file that describes a bundle or an index.

    Args:
        text: content of the file.
        where: path of the file, for error messages.
        what: what the file describes, for error messages, such as "bundle".
        error: class of the error to raise.
        formats: supported values of the object's `format`.
    """
    try:
        # NaN passes here, because the caller's pydantic model refuses it and names the key.
        content = strict_loads(text, finite=False)
    except ValueError as fault:
        raise error(
            f"{where} is damaged: not JSON ({fault}). Create the {what} again, or copy it again."
        ) from None
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise error(f"{where} does not describe this {what}: it has no 'format' number.")
    if content["format"] not in formats:
        raise error(
            f"{where} has format {content['format']}; this version of retrieval reads format"
            f" {', '.join(map(str, sorted(formats)))}. Upgrade retrieval, or create the {what}"
            " again."
        )
    return content


def strict_loads(text: bytes | str, *, finite: bool = True) -> Any:
    """Parse JSON that has no duplicate keys, at most 64 levels, and only finite float64 numbers.

    Args:
        text: JSON text; bytes are UTF-8, UTF-16 or UTF-32.
        finite: False also accepts NaN, infinity and numbers beyond float64.

    Raises:
        ValueError: the text is not JSON, or breaks one of these rules.
    """
    if isinstance(text, bytes):
        if not finite and (content := _fast_object(text)) is not None:
            return content
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if _nests_too_deeply(text):
        raise ValueError("nested too deeply")
    return (_FINITE_ONLY if finite else _WITH_NAN).decode(text)


def _fast_object(text: bytes) -> dict[str, Any] | None:
    """Parse an object of numbers, strings and lists with pydantic, which is faster than `json`.

    Returns `None` for anything else and for invalid JSON. If the text has as many colons as the
    object has keys, then no key is duplicated and no object is nested.
    """
    # With fewer "[" than levels allowed, lists within the object cannot nest too deeply. Escapes
    # are left to `json`, because older versions of pydantic misread halves of surrogate pairs.
    if text.count(b"[") >= _MAX_DEPTH or b"\\u" in text:
        return None
    try:
        content = from_json(text)
    except ValueError:
        return None
    if isinstance(content, dict) and text.count(b":") == len(content):
        return content
    return None


def _nests_too_deeply(text: str) -> bool:
    """Return whether lists and objects nest deeper than `_MAX_DEPTH`, without recursion."""
    if text.count("[") + text.count("{") <= _MAX_DEPTH:
        return False
    depth = 0
    for match in _STRINGS_AND_BRACKETS.finditer(text):
        bracket = text[match.start()]
        if bracket in "[{":
            depth += 1
            if depth > _MAX_DEPTH:
                return True
        elif bracket in "]}":
            depth -= 1
    return False


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0][:80]!r} appears twice")
    return content


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def _finite_float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:20]} is beyond the range of float64")
    return number


def problems_of(fault: ValidationError) -> str:
    """Return every problem that pydantic reports, one per line."""
    lines = []
    for problem in fault.errors(include_url=False, include_context=False):
        location = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"  - {location + ': ' if location else ''}{message}")
    return "\n".join(lines)


# `json.loads` with hooks creates a decoder per call, which takes longer than decoding short text.
_FINITE_ONLY = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float
)
_WITH_NAN = json.JSONDecoder(object_pairs_hook=_unique_keys)
