"""JSON from outside: strict, bounded in depth, and every problem told."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from retrieval.errors import RetrievalError

_DEPTH = 64
# a string, to its end or the text's, or a bracket; possessive, so that no text is read twice
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)


def parse_json(
    text: bytes, where: Path, what: str, error: type[RetrievalError], formats: frozenset[int]
) -> dict[str, Any]:
    """Return the JSON object of a manifest after its `format` was checked.

    Args:
        text: the file's content.
        where: its path, for errors.
        what: "bundle" or "index", for errors.
        error: which error to raise.
        formats: the format versions that can be read.
    """
    try:
        content = strict_loads(text, finite=False)  # a model that names the key refuses them
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
    """Return what a strict JSON text says.

    No key comes twice, nothing nests beyond 64 levels, and no number is NaN, infinity or beyond
    float64.

    Args:
        text: UTF-8.
        finite: False lets NaN and infinity pass.

    Raises:
        ValueError: the text is not such JSON.
    """
    if isinstance(text, bytes):
        if not finite and (plain := _plain(text)) is not None:
            return plain
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    if _deep(text):
        raise ValueError("nested too deeply")
    decoder = _FINITE if finite else _ANY
    with suppress(
        json.JSONDecodeError
    ):  # nothing but JSON, as we write it: no need to look for spaces around it
        content, end = decoder.raw_decode(text)
        if end == len(text):
            return content
    return decoder.decode(text)


def _plain(text: bytes) -> dict[str, Any] | None:
    """Return an object of numbers, texts and lists, ten times as fast as the standard library.

    Returns None for all else, and for what is wrong.

    Every pair has a colon outside of texts: where there are no more colons than names, no name is
    there twice, and no object inside.
    """
    # the object itself is a level too; and older readers take two escapes of one letter for bytes
    if text.count(b"[") >= _DEPTH or b"\\u" in text:
        return None
    try:
        content = from_json(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) and text.count(b":") == len(content) else None


def _deep(text: str) -> bool:
    """Return whether brackets nest too deeply, in one pass and before anything recurses."""
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


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return content


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is not a number of JSON's")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:20]} is not a number that a computer has")
    return number


def problems_of(fault: ValidationError) -> str:
    """Return every problem that pydantic found, one line each."""
    lines = []
    for problem in fault.errors(include_url=False, include_context=False):
        place = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"  - {place + ': ' if place else ''}{message}")
    return "\n".join(lines)


# Made once: `json.loads` makes a decoder for every text, which takes longer than a small one does.
_FINITE = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite)
_ANY = json.JSONDecoder(object_pairs_hook=_once)
