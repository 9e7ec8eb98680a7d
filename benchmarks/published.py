"""The figures that papers print, from `published.toml`."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("published.toml")


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def published(table: str, row: str, column: str) -> float:
    """Return a figure as printed; a KeyError says what the file lacks."""
    made = _tables()[table]
    try:
        return float(made["rows"][row][made["columns"].index(column)])
    except (KeyError, ValueError):
        raise KeyError(f"{FILE.name} has no {table}, {row}, {column}.") from None


def has(table: str, row: str, column: str) -> bool:
    """Return whether a figure is there."""
    made = _tables()[table]
    return row in made["rows"] and column in made["columns"]
