"""The filter language: which items a search or a deletion is about. `docs/indexes.md` explains it.

An item has an id, a label or none, and metadata, a JSON object. A filter is a tree (`tree`), written as text
(`price < 20 and label in ('shoe', 'boot')`) or as JSON (`{"price": {"<": 20}, "label": {"in": ["shoe", "boot"]}}`).

Each condition is true or false of an item; there is no third value.

- A field is `id`, `label`, or a path through the metadata's objects. A path does not enter a list.
- A comparison with a field that an item lacks is false, `!=` too. An item without a label lacks the field `label`.
- `=`, `<`, `<=`, `>`, `>=` and `in` are false of a value of another type: number, text, boolean and null are four types. Objects
  equal nothing.
- `!=` is "exists and is not equal", so it is true of a value of another type. `not x = 1` is also true where there is no `x`.
- A list matches where one of its elements does; so `tags != 'a'` asks for an element other than 'a', and `not tags = 'a'` for a
  list without it. Lists within a list are elements that equal nothing.
- Numbers compare by their exact values, 1 equals 1.0; an integer beyond 64 bits counts as the closest float64. Text compares by code
  point. null equals null, and a field that is null exists. Only numbers and text have an order.
- `not`, `and` and `or` are plain logic.

`matches` decides this in Python, `to_sql` in SQLite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrieval.errors import DataError
from retrieval.serving.filters.deciding import matches, metadata_text, to_sql
from retrieval.serving.filters.json_form import filter_from_json, filter_to_json
from retrieval.serving.filters.tree import And, Compare, Exists, Filter, In, Not, Or, fields, filter_to_text

__all__ = [
    "And",
    "Compare",
    "Exists",
    "Filter",
    "In",
    "Not",
    "Or",
    "as_filter",
    "fields",
    "filter_from_json",
    "filter_to_json",
    "filter_to_text",
    "matches",
    "metadata_text",
    "parse_filter",
    "to_sql",
]


def parse_filter(text: str) -> Filter:
    """Return the filter that a text means: `price < 20 and label in ('shoe', 'boot')`.

    Raises:
        DataError: the text is no filter, or is too large; the message points at the place.
    """
    from retrieval.serving.filters.text import parse  # lark is loaded by the first text

    return parse(text)


def as_filter(value: str | Mapping[str, Any] | Filter | None) -> Filter | None:
    """Return a filter from its text, its JSON form or itself; None stays None.

    Raises:
        DataError: the value is none of these.
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
