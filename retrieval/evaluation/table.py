"""Figures side by side, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def grid(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of a table: a row a metric, a column a contestant."""
    names = list(dict.fromkeys(name for column in figures.values() for name in column))
    width = max(map(len, names))
    columns = {title: max(len(title), 8) for title in figures}
    lines = [" ".join([" " * width, *(f"{title:>{w}}" for title, w in columns.items())])]
    for name in names:
        cells = [
            f"{figures[title][name]:>{w}.4f}" if name in figures[title] else " " * w
            for title, w in columns.items()
        ]
        lines.append(" ".join([f"{name:<{width}}", *cells]).rstrip())
    return lines


def table(results: Mapping[str, Any]) -> str:
    """Return what `evaluate_run` gives as a table: a row a metric, a column a contestant."""
    lines = grid(results["figures"])
    note = f"{results['queries']:,} queries among {results['gallery']:,} items ({results['split']})"
    if results["singletons"]:
        note += f"; {results['singletons']:,} left out: no other item of their class"
    lines.append(note)
    if "candidates" in results:
        kept = ", ".join(
            f"{value:.3f} at {count}" for count, value in results["candidates"]["overlap_at_10"].items()
        )
        lines.append(f"first ten shared with the exhaustive ranking, by number of candidates: {kept}")
    return "\n".join(lines)
