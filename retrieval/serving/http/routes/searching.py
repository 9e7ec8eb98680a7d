"""Searches: one, or several in one request."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from retrieval.serving.http.asking import Found
from retrieval.serving.http.body import JSON_BYTES, Body
from retrieval.serving.http.queries import OPTIONS, Query, read_batch, read_quickly, read_search
from retrieval.serving.http.sending import answer, as_json
from retrieval.serving.http.site import Served, Site, parameters_of, prefix_of
from retrieval.serving.http.waiting import arrived, client_of, in_time
from retrieval.serving.index.index import Hit
from retrieval.serving.stages import current

_ONE = 'Send multipart/form-data with a field "image", the image itself as image/… or application/octet-stream, or application/json with {"vector": [...]}.'
_SEVERAL = (
    'Send multipart/form-data with files in the field "image", or application/json with {"queries": [...]}.'
)


class Searching:
    """Searches of a site's indexes.

    Args:
        site: whose.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._settings = site.settings

    async def search(self, request: Request) -> Response:
        """Answer one search."""
        served, limit = self._site.of(request), self._settings.max_bytes
        body = Body(request.headers, {"form": limit, "json": JSON_BYTES, "image": limit}, _ONE)
        parameters = parameters_of(request, *(OPTIONS if body.kind == "image" else ()))
        return await self._answered(
            request,
            served,
            body,
            lambda: read_quickly(body, parameters, limit),
            lambda: read_search(body, parameters, limit),
            _one,
        )

    async def batch(self, request: Request) -> Response:
        """Answer several."""
        served, limit = self._site.of(request), self._settings.batch_bytes
        parameters_of(request)
        body = Body(request.headers, {"form": limit, "json": limit}, _SEVERAL)

        def batch() -> Query:
            return read_batch(body, self._settings.batch, self._settings.max_bytes)

        return await self._answered(
            request,
            served,
            body,
            lambda: None if body.large or body.kind == "form" else batch(),
            batch,
            _several,
        )

    async def _answered(
        self,
        request: Request,
        served: Served,
        body: Body,
        quickly: Callable[[], Query | None],
        read: Callable[[], Query],
        shape: Callable[[list[list[dict[str, Any]]]], dict[str, Any]],
    ) -> Response:
        began, client, settings = perf_counter(), client_of(request), self._settings
        prefix, searcher = prefix_of(request), served.searcher
        searcher.require_room(client, images=body.kind != "json")

        async def work() -> bytes:
            query = quickly()
            if query is None:
                query = await searcher.machinery.searches.run(lambda job: read(), client)

            def finish(found: Found) -> bytes:
                hits = [[_hit(hit, served, prefix, query) for hit in one] for one in found.hits]
                content = {**shape(hits), "took_ms": round(1000 * (perf_counter() - began), 2)}
                trail = current()
                if query.explain and trail is not None:
                    took = {name: round(1000 * each, 3) for name, each in trail.seconds().items()}
                    content["explain"] = {"stages_ms": took, "searched": found.searched}
                return as_json(content)

            return await searcher.search(query, finish, client)

        with self._site.budget.upload() as upload:
            await body.read(
                request.receive, self._site.budget, upload, settings.body_seconds, there=arrived(request)
            )
            return answer(await in_time(request, work(), settings.deadline))


def _one(hits: list[list[dict[str, Any]]]) -> dict[str, Any]:
    return {"results": hits[0]}


def _several(hits: list[list[dict[str, Any]]]) -> dict[str, Any]:
    return {"answers": [{"results": one} for one in hits]}


def _hit(hit: Hit, served: Served, prefix: str, query: Query) -> dict[str, Any]:
    metadata = dict(hit.metadata)
    if query.fields is not None:
        metadata = {name: metadata[name] for name in query.fields if name in metadata}
    here = (
        f"{prefix}/items/{quote(hit.id, safe='')}"
        if served.searcher.gallery.offers(hit.path, hit.keep)
        else None
    )
    return {
        "id": hit.id,
        "key": hit.id,
        "label": hit.label,
        "distance": hit.distance,
        "metadata": metadata,
        "image_url": None if here is None else f"{here}/image",
        "thumbnail_url": None if here is None else f"{here}/thumbnail",
    }
