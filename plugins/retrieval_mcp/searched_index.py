"""The index that the tools search: opened here, or served elsewhere. Both answer alike."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any

from retrieval.client import Client
from retrieval.errors import DataError, some
from retrieval.images.decoding import decode
from retrieval.images.preprocessing import thumbnail
from retrieval.index.index import Index
from retrieval.index.queries_and_hits import Hit, Hits


class LocalIndex:
    """An opened index in a folder or at an address. Every method may raise a `RetrievalError`."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def about(self) -> str:
        """Return what the index is, in a sentence."""
        return f"An index of {len(self._index):,} images."

    def search(self, image: bytes | None, k: int, **options: Any) -> dict[str, Any]:
        """Return the nearest items, and the name of the embedding as `bundle`.

        Args:
            image: bytes of the query image, or None.
            k: largest number of items.
            options: `text`, `like` and `filter` of `Index.search`.
        """
        # The index takes unknown ids for paths of files, which an agent may not name here.
        items = self._index.get(options["like"])
        if missing := [id for id in options["like"] if id not in items]:
            raise DataError(f"The index has no item {some(missing)}.")
        chosen = {name: value for name, value in options.items() if value}
        hits = self._index.search(image, k, **chosen)
        return {"results": _facts(hits), "bundle": self._index.bundle.sha256}

    def identify(self, image: bytes, far: float) -> dict[str, Any]:
        """Return the class that an image shows, or `None` for unknown, and the nearest items."""
        verdict = self._index.identify(image, far)
        return _verdict(verdict, verdict.hits, self._index.bundle.sha256)

    def get(self, id: str) -> dict[str, Any]:
        """Return an item."""
        item = self._index.get(id).get(id)
        if item is None:
            raise DataError(f"The index has no item {id}.")
        return {"id": item.id, "label": item.label, "metadata": dict(item.metadata)}

    def picture(self, id: str) -> bytes:
        """Return a small JPEG of an item's image."""
        item = self._index.get(id)[id]
        hit = Hit(item.id, item.label, 0.0, item.metadata, item.path, item.keep)
        image = Hits([hit], self._index.store.original).image(hit)
        if image is None:
            raise DataError(f"The image of item {id} is not kept, or cannot be read.")
        return thumbnail(image)


class ServedIndex:
    """An index of a search server, with the methods of `LocalIndex`.

    Args:
        client: the client of this index.

    Raises:
        ServerError: the server cannot be reached, or the key may not read this index.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._about = client.index()

    def about(self) -> str:
        """See `LocalIndex`."""
        return f"The index {self._about.name} of {self._about.items:,} images."

    def search(self, image: bytes | None, k: int, **options: Any) -> dict[str, Any]:
        """See `LocalIndex`."""
        answer = self._client.search(image, k=k, **options)
        return {"results": _facts(answer), "bundle": answer.bundle}

    def identify(self, image: bytes, far: float) -> dict[str, Any]:
        """See `LocalIndex`."""
        answer = self._client.identify(image, far)
        return _verdict(answer, answer, answer.bundle)

    def get(self, id: str) -> dict[str, Any]:
        """See `LocalIndex`."""
        item = self._client.get(id)
        return {"id": item.id, "label": item.label, "metadata": item.metadata}

    def picture(self, id: str) -> bytes:
        """See `LocalIndex`."""
        return thumbnail(decode(self._client.thumbnail(id), name=f"The image of item {id}"))


def _verdict(verdict: Any, hits: Sequence[Any], bundle: str | None) -> dict[str, Any]:
    """Return what is known of a photo's class, and its nearest items, as a JSON object."""
    known = {name: getattr(verdict, name) for name in ("label", "rate", "second", "stale")}
    return {**known, "results": _facts(hits), "bundle": bundle}


def _facts(hits: Sequence[Any]) -> list[dict[str, Any]]:
    """Return hits as JSON objects."""
    return [
        {
            "id": hit.id,
            "label": hit.label,
            "distance": None if hit.distance is None or isnan(hit.distance) else hit.distance,
            # Of a search for a text, what orders the hits; it may have no distances.
            **({} if hit.score is None else {"score": hit.score}),
            "metadata": dict(hit.metadata),
        }
        for hit in hits
    ]
