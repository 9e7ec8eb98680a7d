"""Values of tables and archives as an index keeps them: JSON and text, bounded."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from retrieval.errors import DataError
from retrieval.serving.filters import metadata_text
from retrieval.serving.store.items import check_id

ROW_CHARACTERS = 1_000_000
"""Of one item's texts; an index gives no longer ones back."""


def label_text(label: str | int | float | None) -> str | None:
    """Return a label as text: true and false as JSON writes them, None for an empty one or NaN."""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and math.isnan(label):
        return None
    return None if label is None or label == "" else str(label)


def text_problem(key: str, label: str | None, metadata: dict[str, Any]) -> str | None:
    """Return why an item cannot be kept, as the end of a sentence; None for nothing."""
    if fault := check_id(key):
        return fault
    try:
        length = len(metadata_text(metadata)) + len(metadata_text({"": label}))
    except DataError as fault:
        return str(fault).rstrip(".")
    except RecursionError:
        return "its metadata nest too deeply"
    return f"has more than {ROW_CHARACTERS:,} characters" if length > ROW_CHARACTERS else None


def plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN and infinity as null, times and decimal numbers as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value
