"""The columns of a CSV file, all text in the file, as what they are: numbers, true or false, or text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

# a leading zero makes a code of a number ("007"), and beyond 15 digits a reader of JSON may round
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,14})")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_TRUTH = {"true": True, "false": False}
_MISSING = ("nan", "nat", "<na>")


def is_missing_text(text: str) -> bool:
    """Return whether a label's text says that there is none: blank, or as pandas and numpy write a missing value."""
    return not text.strip() or text.strip().lower() in _MISSING


def typed(rows: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Return rows with the values of each column in the one type that all of them have.

    Whole numbers, decimal numbers, true or false; a column with anything else stays text. In a column of another type
    than text an empty value is None.

    Args:
        rows: the rows, each with the same columns.
    """
    types = {name: _type_of([row[name] for row in rows]) for name in (rows[0] if rows else ())}
    return [{name: types[name](value) for name, value in row.items()} for row in rows]


def _type_of(values: list[str]) -> Any:
    given = [value for value in values if value]
    if not given:
        return str
    if all(value.lower() in _TRUTH for value in given):  # Excel writes TRUE, pandas True
        return lambda value: _TRUTH[value.lower()] if value else None
    if all(_WHOLE.fullmatch(value) for value in given):
        return lambda value: int(value) if value else None
    if all(_DECIMAL.fullmatch(value) and math.isfinite(float(value)) for value in given):
        return lambda value: float(value) if value else None
    return str
