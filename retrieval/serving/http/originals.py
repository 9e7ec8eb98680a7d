"""Items' originals: read in threads of their own, since their storage may hang."""

from __future__ import annotations

import threading

from retrieval.errors import DataError, StoreError
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.guard import store_failed
from retrieval.serving.http.pictures import KEPT, Picture
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.index.index import Index
from retrieval.serving.store.contract import patience


class Originals:
    """Reads the originals of one index's items.

    Args:
        searcher: of the index.
    """

    def __init__(self, searcher: Searcher) -> None:
        self._searcher = searcher
        self._settings = searcher.settings
        self._machinery = searcher.machinery
        self._reading = (
            threading.Lock()
        )  # of kept originals: one at a time is in memory that nobody has counted yet

    async def picture(self, id: str, client: str = "") -> Picture:
        """Return the beginning of an item's original: what the index keeps of it, or the file that it was indexed from.

        Raises:
            RequestError: 404, no such item, or its file may not be shown, is gone or another one; 503, too many are waiting.
        """

        def work() -> Picture:
            with self._searcher.current.use() as index, patience(self._settings.deadline):
                return self._picture(index, id)

        try:
            return await self._machinery.pictures.run(lambda job: work(), client)
        except StoreError as fault:
            said = "The item cannot be read. The server's log says more."
            raise store_failed(fault, said, "index", self._settings.debug) from None

    def _picture(self, index: Index, id: str) -> Picture:
        """Return what is kept of an item's original, or its file; a thumbnail where the file is not to be had."""
        item = index.get(id).get(id)
        if item is None:
            raise RequestError(404, "There is no such item.")
        if item.keep == "copy" and (kept := self._kept(index, id)):
            return kept
        try:
            path = None if item.path is None else self._searcher.gallery.original(item.path)
            if item.path is not None and path is None:
                raise RequestError(404, f"The image of item {id} is in no folder that may be shown.")
            return Picture.of(id, path, item.bytes)
        except RequestError:
            if item.keep in KEPT and (kept := self._kept(index, id)):
                return kept
            raise

    def _kept(self, index: Index, id: str) -> Picture | None:
        with self._reading:
            content = index.store.original(id)
        return None if content is None else Picture.kept(id, content)

    async def piece(self, picture: Picture, offset: int, client: str = "") -> bytes:
        """Return the file's next bytes."""
        return await self._machinery.pictures.run(lambda job: picture.piece(offset), client)

    async def shown(self, picture: Picture, client: str = "", *, small: bool = False) -> bytes:
        """Return a PNG of a picture that browsers cannot show, or a small JPEG of any.

        Raises:
            RequestError: 404, it cannot be shown; 503, too many are waiting.
        """
        content = await self._machinery.pictures.run(
            lambda job: picture.whole(self._settings.max_bytes), client
        )
        start = self._machinery.decoders.thumbnail if small else self._machinery.decoders.png
        try:
            made: bytes = await self._machinery.decoded(start, content, client, lambda made, job: made)
        except DataError:
            raise RequestError(404, f"The image of item {picture.id} cannot be shown.") from None
        return made
