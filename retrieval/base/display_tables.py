"""Results as tables: hits in a terminal or a notebook, others in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import isnan
from typing import Any

from retrieval.errors import one_line, printable

MAX_PICTURES = 50
"""Largest number of pictures in a table of hits."""


def text_table(hits: Sequence[Any]) -> str:
    """Return hits as lines with distance, score (if there are scores), label and id."""
    if not hits:
        return "no hits"
    rows = [_head(hits), *map(_row, hits)]
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for *cells, label, id in rows:
        numbers = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)]
        lines.append("  ".join([*numbers, f"{label:{widths[-1]}}", id]))
    return "\n".join(lines)


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
        f"<tr><td>{picture(hit) if picture and number < MAX_PICTURES else ''}</td>"
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in _row(hit))}</tr>"
        for number, hit in enumerate(hits)
    )
    head = "".join(f"<th>{name}</th>" for name in ("", *_head(hits)))
    return f"<table><tr>{head}</tr>{rows}</table>"


def _head(hits: Sequence[Any]) -> list[str]:
    if hits and hits[0].score is not None:
        return ["distance", "score", "label", "id"]
    return ["distance", "label", "id"]


def _row(hit: Any) -> list[str]:
    """Return a hit's cells, each on one line."""
    # NaN stands for hits whose vectors were not compared.
    distance = "" if isnan(hit.distance) else f"{hit.distance:.4f}"
    cells = [distance, hit.label or "", hit.id]
    if hit.score is not None:
        cells.insert(1, f"{hit.score:.4f}")
    return [one_line(cell) for cell in cells]
