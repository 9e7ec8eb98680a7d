"""Errors that list several problems, short lists of names, and natural sorting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from retrieval.errors import DataError, listed


def refuse(where: str, problems: Iterable[str]) -> NoReturn:
    """Raise a `DataError` on `where`, such as "manifest.csv", that lists the first ten problems."""
    raise DataError(listed(where, list(problems)))


def some(names: Sequence[object], shown: int = 5) -> str:
    """Return the first names; if there are more, also their number: `a, b, … (12 in all)`."""
    text = ", ".join(str(name) for name in names[:shown])
    return text + (f", … ({len(names):,} in all)" if len(names) > shown else "")


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts "class 2" before "class 10"."""
    return tuple(
        (0, int(part), part) if part.isascii() and part.isdigit() else (1, 0, part)
        for part in re.split(r"([0-9]+)", text)
        if part
    )
