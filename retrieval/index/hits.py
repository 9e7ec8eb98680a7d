"""The hits of a search, and how they are printed."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from PIL.Image import Image

from retrieval.base.tables import html_hits, text_table
from retrieval.errors import RetrievalError
from retrieval.images.decoding import decode
from retrieval.images.preprocessing import to_mode

PICTURE_PIXELS = 96
"""Longer side of a picture in a notebook's table, in pixels."""


class Hit(NamedTuple):
    """One result of a search: an item and its distance to the query.

    Attributes:
        id: id of the item.
        label: label of the item, or `None`.
        distance: distance to the query; smaller is closer.
        metadata: metadata of the item.
        path: path of the indexed file. `None` if the item is not a file of its own.
        keep: what the index keeps of the original; see `retrieval.store.contract.Keep`.
    """

    id: str
    label: str | None
    distance: float
    metadata: Mapping[str, Any]
    path: Path | None = None
    keep: str = "reference"

    def __repr__(self) -> str:
        if self.label is None:
            label = ""
        else:
            label = f", label={self.label!r}"
        return f"Hit(id={self.id!r}{label}, distance={self.distance:.4f})"


class Hits(list[Hit]):
    """The hits of one query, nearest first.

    They print as a table; in a notebook, the table has pictures. Pickled hits lose the function
    `original`, and show only pictures that are still at their path.

    Args:
        hits: the hits.
        original: function that takes an item's id, and returns the bytes that the index keeps of
            its original, or `None`.
    """

    def __init__(
        self, hits: Iterable[Hit] = (), original: Callable[[str], bytes | None] | None = None
    ) -> None:
        super().__init__(hits)
        self._original = original

    def __getstate__(self) -> dict[str, Any]:
        return {"_original": None}  # the open store cannot be pickled

    def __repr__(self) -> str:
        return text_table(self)

    def _repr_html_(self) -> str:
        return html_hits(self, self._picture)

    def image(self, hit: Hit) -> Image | None:
        """Return a hit's original as an image, or `None` if it is not kept or cannot be read."""
        try:
            source: Path | bytes | None = self._original(hit.id) if self._original else None
            if source is None and hit.keep == "reference":
                source = hit.path
            if source is None:
                return None
            return decode(source)
        except RetrievalError:
            return None

    def _picture(self, hit: Hit) -> str:
        """Return an HTML element with a hit's picture, or "" if the hit has no image."""
        image = self.image(hit)
        if image is None:
            return ""
        small = to_mode(image, "RGB").copy()
        small.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
        content = io.BytesIO()
        small.save(content, "png")
        data = base64.b64encode(content.getvalue()).decode()
        return f'<img src="data:image/png;base64,{data}">'
