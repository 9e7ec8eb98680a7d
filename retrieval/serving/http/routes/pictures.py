"""Items' images and thumbnails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

from starlette.requests import Request
from starlette.responses import Response

from retrieval.serving.http.originals import Originals
from retrieval.serving.http.pictures import PIECE, Picture
from retrieval.serving.http.routes.ids import id_of
from retrieval.serving.http.sending import Pieces, slices
from retrieval.serving.http.site import Site
from retrieval.serving.http.waiting import client_of, in_time


class Pictures:
    """Pictures of the items of a site's indexes.

    Args:
        site: whose.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._settings = site.settings

    async def image(self, request: Request) -> Response:
        """Give an item's original, or a PNG of it where browsers cannot show its format."""
        return await self._picture(request, small=False)

    async def thumbnail(self, request: Request) -> Response:
        """Give a small JPEG of an item's original."""
        return await self._picture(request, small=True)

    async def _picture(self, request: Request, *, small: bool) -> Response:
        served, client, deadline = self._site.of(request), client_of(request), self._settings.deadline
        id, end = id_of(request), "-small" if small else ""
        originals, budget = served.originals, self._site.budget
        with ExitStack() as stack:
            upload = stack.enter_context(budget.upload())
            upload.arriving = False
            picture = await in_time(request, originals.picture(id, client), deadline)
            tag = picture.tag + end
            if _has(request, tag):
                return Response(status_code=304, headers=_tagged(tag))
            if small or picture.content is not None or picture.media_type is None:
                budget.take(upload, picture.size)  # it is in memory until it is sent
            if small or picture.media_type is None:
                content = await in_time(request, originals.shown(picture, client, small=small), deadline)
                budget.take(upload, len(content))
                kind = "image/jpeg" if small else "image/png"
                return Pieces(slices(content), len(content), kind, _tagged(tag), stack.pop_all())
            if picture.size <= PIECE:
                return Response(picture.first, media_type=picture.media_type, headers=_tagged(tag))
            pieces = self._pieces(originals, picture, client)
            return Pieces(pieces, picture.size, picture.media_type, _tagged(tag), stack.pop_all())

    async def _pieces(self, originals: Originals, picture: Picture, client: str) -> AsyncIterator[bytes]:
        yield picture.first
        sent = len(picture.first)
        while sent < picture.size:
            async with asyncio.timeout(self._settings.deadline):
                piece = await originals.piece(picture, sent, client)
            yield piece
            sent += len(piece)


def _tagged(tag: str) -> dict[str, str]:
    return {"Cache-Control": "no-cache", "ETag": f'"{tag}"'}


def _has(request: Request, tag: str) -> bool:
    return request.headers.get("if-none-match") == f'"{tag}"'
