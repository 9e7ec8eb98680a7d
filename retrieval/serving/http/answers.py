"""Build the JSON and image responses of the routes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from pydantic_core import to_json
from starlette.responses import Response

from retrieval.serving.files.strict_json import strict_loads
from retrieval.serving.filters import Filter, filter_to_json
from retrieval.serving.http.bodies import BodyMemory
from retrieval.serving.http.models import Query
from retrieval.serving.http.problems import RequestError, busy
from retrieval.serving.http.served import Served
from retrieval.serving.http.settings import BODY_MEMORY, SEND_SECONDS
from retrieval.serving.index.hits import Hit
from retrieval.serving.index.index import Index
from retrieval.serving.stages import TRAIL
from retrieval.serving.store.contract import Item

_MAX_CURSOR = 8192
_NO_CURSOR = "The cursor is not one that this server gave for this list. Begin again without one."
_SHOWN_BY_BROWSERS = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


class Picture(Response):
    """An image response; its memory counts towards the limit until it is sent."""

    def __init__(
        self, content: bytes, memory: BodyMemory, headers: Mapping[str, str], media_type: str
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._memory = memory
        if memory.held + len(content) > BODY_MEMORY:
            raise busy("pictures take all its memory", "memory")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the image within a time limit."""
        self._memory.held += len(self.body)
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await super().__call__(scope, receive, send)
        finally:
            self._memory.held -= len(self.body)


def answer(content: bytes | object, status: int = 200) -> Response:
    """Return a JSON response; `content` is encoded JSON or a value to encode."""
    body = content if isinstance(content, bytes) else to_json(content, inf_nan_mode="null")
    return Response(body, status, media_type="application/json")


def _chosen(metadata: Mapping[str, Any], names: list[str] | None) -> Mapping[str, Any]:
    if names is None:
        return metadata
    return {name: value for name, value in metadata.items() if name in names}


def _urls(served: Served, prefix: str, id: str, keep: str, path: Any) -> dict[str, str | None]:
    url = f"{prefix}/items/{quote(id, safe='')}" if served.shows(keep, path) else None
    return {"image_url": url and f"{url}/image", "thumbnail_url": url and f"{url}/thumbnail"}


def hit_json(hit: Hit, served: Served, prefix: str, names: list[str] | None) -> dict[str, Any]:
    """Return a hit as JSON, with the metadata fields `names` or, for None, all."""
    return {
        "id": hit.id,
        "key": hit.id,
        "label": hit.label,
        "distance": hit.distance,
        "metadata": _chosen(hit.metadata, names),
        **_urls(served, prefix, str(hit.id), hit.keep, hit.path),
    }


def item_json(
    served: Served, item: Item, prefix: str, names: list[str] | None = None
) -> dict[str, Any]:
    """Return an item as JSON, with the metadata fields `names` or, for None, all."""
    return {
        "id": item.id,
        "key": item.id,
        "label": item.label,
        "metadata": _chosen(item.metadata, names),
        "bytes": item.bytes,
        "width": item.width,
        "height": item.height,
        "keep": item.keep,
        **_urls(served, prefix, item.id, item.keep, item.path),
    }


def explanation(query: Query, index: Index) -> dict[str, Any]:
    """Return the `explain` member of a search: times of its stages, and facts about the index."""
    trail, stats = TRAIL.get(), index.stats()
    seconds = {} if trail is None else trail.seconds
    return {
        "stages_ms": {name: round(1000 * duration, 3) for name, duration in seconds.items()},
        "searched": {
            "items": len(index),
            "bundle": index.bundle.sha256,
            "candidates": query.options.candidates,
            "filtered": query.where is not None,
            "generation": index.generation.number,
            **{
                name: stats.details[name]
                for name in ("rows", "deleted", "covered")
                if name in stats.details
            },
        },
    }


def description(name: str, index: Index) -> dict[str, Any]:
    """Return the description of an index."""
    bundle, stats = index.follow(), index.stats()
    manifest = bundle.manifest
    return {
        "index": name,
        "name": manifest.name,
        "items": len(index),
        "bundle": bundle.sha256,
        "input": {"kind": manifest.input.kind, "shape": list(manifest.input.shape)},
        "vector": manifest.vector,
        "distance": manifest.distance.name,
        "rescores": manifest.rescorer is not None,
        "format": 3,
        "generation": index.generation.number,
        "generations": [
            {"number": entry.number, "state": entry.state, "bundle": entry.bundle}
            for entry in stats.generations
        ],
        "bytes": stats.bytes,
        "deleted": stats.details.get("deleted"),
        **index.store.settings(),
    }


def media_type(content: bytes) -> str | None:
    """Return an image's media type by its first bytes, or None if browsers cannot show it."""
    for start, media_type in _SHOWN_BY_BROWSERS.items():
        if content.startswith(start):
            return media_type
    return "image/webp" if content[:4] == b"RIFF" and content[8:12] == b"WEBP" else None


def cursor_after(after: str, where: Filter | None) -> str:
    """Return the cursor of the page after an id, in the list of one filter."""
    return base64.urlsafe_b64encode(json.dumps([after, _digest(where)]).encode()).decode()


def after_cursor(cursor: str | None, where: Filter | None) -> str | None:
    """Return the id that a page comes after; raise RequestError 400 for another list's cursor."""
    if cursor is None:
        return None
    try:
        if len(cursor) > _MAX_CURSOR:
            raise ValueError
        after, digest = strict_loads(base64.b64decode(cursor.encode("ascii"), b"-_", validate=True))
        if not isinstance(after, str) or digest != _digest(where):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise RequestError(400, _NO_CURSOR) from None
    return after


def _digest(where: Filter | None) -> str:
    """Return a digest that identifies the list of one filter."""
    text = "" if where is None else json.dumps(filter_to_json(where))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
