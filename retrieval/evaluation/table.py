"""Figures side by side, as text."""

from __future__ import annotations

from collections.abc import Mapping


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
