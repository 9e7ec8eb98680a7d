"""Many faults of one thing in one error, and names as people sort them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from retrieval.errors import DataError, listed


def refuse(where: str, problems: Iterable[str]) -> NoReturn:
    """Raise a `DataError` with the problems, the first ten in full.

    Args:
        where: what they are about, as the beginning of a sentence: "manifest.csv".
        problems: one sentence each.

    Raises:
        DataError: always.
    """
    raise DataError(listed(where, list(problems)))


def some(names: Sequence[object], shown: int = 5) -> str:
    """Return the first names, and their number if there are more: `a, b, … (12 in all)`."""
    text = ", ".join(str(name) for name in names[:shown])
    return text + (f", … ({len(names):,} in all)" if len(names) > shown else "")


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts "class 2" before "class 10"."""
    return tuple(
        (0, int(part), part) if part.isascii() and part.isdigit() else (1, 0, part)
        for part in re.split(r"([0-9]+)", text)
        if part
    )
