"""A filter from whatever a user gives for one. The parser is loaded by the first text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrieval.errors import DataError
from retrieval.serving.filters.json_form import filter_from_json
from retrieval.serving.filters.tree import Filter


def parse_filter(text: str) -> Filter:
    """Return the filter that a text means: `price < 20 and label in ('shoe', 'boot')`.

    Raises:
        DataError: it means none, or is too large; points at the place.
    """
    from retrieval.serving.filters.grammar import parse

    return parse(text)


def as_filter(value: str | Mapping[str, Any] | Filter | None) -> Filter | None:
    """Return a filter from its text, its JSON form or itself; None stays None.

    Raises:
        DataError: it is none.
    """
    if value is None or isinstance(value, Filter):
        return value
    if isinstance(value, str):
        return parse_filter(value)
    if isinstance(value, Mapping):
        return filter_from_json(value)
    raise DataError(
        f"A filter is text or an object such as {{'label': 'shoe'}}, not a {type(value).__name__}."
    )
