"""Items as the bodies of rows, and texts and bytes that are too long for one, in pieces."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.serving.rows.engine import ALIVE, PIECE, Row
from retrieval.serving.rows.terms import digest_of
from retrieval.serving.store.contract import VECTOR, Generation, Item

PIECE_BYTES = 45_000  # as base64, 60,000 characters
_PLAIN = ("id", "label", "stamp", "keep", "bytes", "width", "height", "source")


def spaces(generation: Generation) -> dict[str, tuple[int, int]]:
    """Return the columns of each vector of a generation's rows, by name."""
    return {f"v{at}": span for at, span in enumerate(generation.spans)}


def widths(generation: Generation) -> dict[str, int]:
    """Return the numbers of each vector of a generation's rows, by name."""
    return {name: stop - start for name, (start, stop) in spaces(generation).items()}


def body_of(item: Item, metadata: str) -> dict[str, Any]:
    """Return an item without its arrays as JSON.

    Args:
        item: see above.
        metadata: its own, as JSON.
    """
    return {
        **{name: getattr(item, name) for name in _PLAIN},
        "metadata": json.loads(metadata),
        "path": None if item.path is None else os.fspath(item.path),
        "original": item.original is not None,
    }


def item_of(body: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> Item:
    """Return what `body_of` was given."""
    path = None if body["path"] is None else Path(body["path"])
    plain = {name: body[name] for name in _PLAIN}
    return Item(**plain, metadata=body["metadata"], path=path, arrays=dict(arrays or {}))


def split(item: Item, generation: Generation) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the vectors of an item's row in a generation, and the arrays that its body takes."""
    vector = np.asarray(item.arrays[VECTOR], np.float32)
    vectors = {name: vector[start:stop] for name, (start, stop) in spaces(generation).items()}
    one = len(generation.spans) == 1 and generation.spans[0] == (0, len(vector))
    return vectors, {
        name: base64.b64encode(np.asarray(item.arrays[name], "<f4").tobytes()).decode()
        for name in generation.widths
        if not (one and name == VECTOR)
    }


def joined(row: Row, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of an item of its row in a generation."""
    arrays = {
        name: np.frombuffer(base64.b64decode(text), "<f4") for name, text in body.get("arrays", {}).items()
    }
    return arrays if VECTOR in arrays or not row.vectors else {VECTOR: row.vectors["v0"], **arrays}


def pieces(what: str, owner: str | int, content: Iterable[bytes]) -> Iterator[Row]:
    """Give rows, without numbers, that hold bytes of an owner in order."""
    at = 0
    for part in content:
        for start in range(0, max(len(part), 1), PIECE_BYTES):
            text = base64.b64encode(part[start : start + PIECE_BYTES]).decode()
            yield Row(0, PIECE, 0, ALIVE, digest_of("piece", what, owner), f"{at:08x}", body=text)
            at += 1


def bytes_of(rows: Sequence[Row]) -> bytes:
    """Return what `pieces` was given."""
    return b"".join(base64.b64decode(row.body) for row in sorted(rows, key=lambda row: row.key))
