"""Hits of a search as a table, in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from retrieval.errors import printable

MOST_PICTURES = 50
"""Largest number of pictures in a table of hits."""


def text_table(hits: Sequence[Any]) -> str:
    """Return hits as lines with distance, label and id."""
    if not hits:
        return "no hits"
    rows = [["distance", "label", "id"], *map(_row, hits)]
    distance, label = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{row[0]:>{distance}}  {row[1]:{label}}  {row[2]}" for row in rows)


def html_table(hits: Sequence[Any], picture: Callable[[Any], str] | None = None) -> str:
    """Return hits as an HTML table; `picture` returns the HTML of a hit's picture, or ""."""
    rows = "".join(
        f"<tr><td>{picture(hit) if picture and number < MOST_PICTURES else ''}</td>"
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in _row(hit))}</tr>"
        for number, hit in enumerate(hits)
    )
    head = "<tr><th></th><th>distance</th><th>label</th><th>id</th></tr>"
    return f"<table>{head}{rows}</table>"


def _row(hit: Any) -> list[str]:
    """Return a hit's cells, each on one line."""
    cells = (f"{hit.distance:.4f}", hit.label or "", hit.id)
    return [printable(cell).replace("\n", "\\n") for cell in cells]
