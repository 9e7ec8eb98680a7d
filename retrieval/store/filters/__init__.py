"""The filter language, which selects items for a search or deletion; see `docs/indexes.md`.

A filter is a tree of conditions on an item's id, label and metadata (module `tree`). It is written
as text (module `text`) or as JSON. The module `deciding` evaluates it: `matches` in Python,
`to_sql` in SQLite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from retrieval.errors import DataError
from retrieval.store.filters.evaluating import (
    column_texts as column_texts,
    flat_texts as flat_texts,
    matches as matches,
    metadata_text as metadata_text,
    metadata_texts as metadata_texts,
    to_sql as to_sql,
)
from retrieval.store.filters.tree import (
    And as And,
    Compare as Compare,
    Exists as Exists,
    Filter as Filter,
    In as In,
    Not as Not,
    Or as Or,
    fields as fields,
    filter_from_json as filter_from_json,
    filter_to_json as filter_to_json,
    filter_to_text as filter_to_text,
)

FilterLike: TypeAlias = "str | Mapping[str, Any] | Filter | None"


def parse_filter(text: str) -> Filter:
    """Parse a filter such as `price < 20 and label in ('shoe', 'boot')`.

    Raises:
        DataError: the text is not a filter or is too large; the message points at the mistake.
    """
    # The import loads lark, which most processes never need.
    from retrieval.store.filters.text import parse

    return parse(text)


def as_filter(value: FilterLike) -> Filter | None:
    """Return a filter from text, JSON or a filter; `None` stays `None`.

    Raises:
        DataError: the value is none of these, or is not a valid filter.
    """
    if value is None or isinstance(value, Filter):
        return value
    if isinstance(value, str):
        return parse_filter(value)
    if isinstance(value, Mapping):
        try:
            return filter_from_json(value)
        except RecursionError:
            raise DataError(
                "The filter nests too many objects and lists. Use fewer levels."
            ) from None
    raise DataError(
        f"A filter is text or an object such as {{'label': 'shoe'}}, not a {type(value).__name__}."
    )
