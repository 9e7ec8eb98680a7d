"""Results as tables: hits in a terminal or a notebook, others in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from retrieval.errors import one_line, printable

MOST_PICTURES = 50
"""Largest number of pictures in a table of hits."""


def text_table(hits: Sequence[Any]) -> str:
    """Return hits as lines with distance, label and id."""
    if not hits:
        return "no hits"
    rows = [["distance", "label", "id"], *map(_row, hits)]
    distance, label = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{row[0]:>{distance}}  {row[1]:{label}}  {row[2]}" for row in rows)


def html_table(rows: Sequence[Sequence[str]], below: Sequence[str] = ()) -> str:
    """Return rows as an HTML table, the first as its head, and lines of text below the table."""
    tags = ["th", *["td"] * len(rows)]
    lines = [
        "".join(f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in row)
        for tag, row in zip(tags, rows, strict=False)
    ]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    text = escape(printable("\n".join(below)))
    if below:
        return f"<table>{table}</table><pre>{text}</pre>"
    return f"<table>{table}</table>"


def html_hits(hits: Sequence[Any], picture: Callable[[Any], str] | None = None) -> str:
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
    return [one_line(cell) for cell in cells]
