"""What is done at each address of /v1."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from retrieval.errors import DataError
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.http import models
from retrieval.serving.http.addresses import (
    ItemRoute,
    caller_of,
    id_of,
    parameters_of,
    prefix_of,
    usable_id,
)
from retrieval.serving.http.answers import (
    Picture,
    after_cursor,
    answer,
    cursor_after,
    description,
    explanation,
    hit_json,
    item_json,
    media_type,
)
from retrieval.serving.http.audit import Change
from retrieval.serving.http.bodies import Body, BodyMemory, Kind
from retrieval.serving.http.models import OPTIONS, NewItem, Query
from retrieval.serving.http.openapi import document
from retrieval.serving.http.problems import RequestError, no_item, request_id_of
from retrieval.serving.http.served import Served
from retrieval.serving.http.settings import BATCH_BYTES, JSON_BYTES, Settings
from retrieval.serving.http.turns import HAS_LEFT
from retrieval.serving.index.index import Hit, Index
from retrieval.serving.stages import current

T = TypeVar("T")

PAGE, MAX_PAGE = 100, 1000


class Routes:
    """The addresses of /v1.

    Args:
        indexes: of the server, by name.
        settings: limits.
    """

    def __init__(self, indexes: Mapping[str, Served], settings: Settings) -> None:
        self.indexes, self._settings, self._memory = indexes, settings, BodyMemory()

    def all(self) -> list[BaseRoute]:
        """Return the routes; those of an index come with its name in the address, and without."""
        found: list[BaseRoute] = [
            Route("/v1/indexes", self.list_indexes),
            Route("/v1/openapi.json", self.openapi),
        ]
        for prefix in ("/v1", "/v1/indexes/{index}"):
            item, one = f"{prefix}/item", f"{prefix}/items/{{id:any}}"
            found += [
                Route(f"{prefix}/search", self.search, methods=["POST"]),
                Route(f"{prefix}/search/batch", self.search_batch, methods=["POST"]),
                Route(f"{prefix}/index", self.index),
                Route(f"{prefix}/items", self.list_items),
                Route(f"{prefix}/items", self.add_items, methods=["POST"]),
                Route(f"{prefix}/delete", self.delete_items, methods=["POST"]),
                Route(f"{prefix}/snapshots", self.snapshot, methods=["POST"]),
            ]
            for kind, path in ((Route, item), (ItemRoute, one)):
                found += [
                    kind(f"{path}/image", self.image),
                    kind(f"{path}/thumbnail", self.thumbnail),
                    kind(path, self.get_item),
                    kind(path, self.put_item, methods=["PUT"]),
                    kind(path, self.patch_item, methods=["PATCH"]),
                    kind(path, self.delete_item, methods=["DELETE"]),
                ]
        return found

    # Search

    async def search(self, request: Request) -> Response:
        """Answer one search."""
        most = self._settings.max_bytes
        limits: dict[Kind, int] = {"form": most, "json": JSON_BYTES, "image": most}
        image_alone = request.headers.get("content-type", "").startswith(
            ("image/", "application/octet-stream")
        )
        parameters = parameters_of(request, *(OPTIONS if image_alone else ()))

        def read(body: Body) -> Query:
            return models.query_of(body, parameters, most)

        return await self._searched(request, limits, models.SEARCH_TYPES, read, lambda answers: answers[0])

    async def search_batch(self, request: Request) -> Response:
        """Answer several searches."""
        limits: dict[Kind, int] = {"form": BATCH_BYTES, "json": BATCH_BYTES}
        parameters_of(request)

        def read(body: Body) -> Query:
            return models.batch_of(body, self._settings.batch, self._settings.max_bytes)

        return await self._searched(
            request, limits, models.BATCH_TYPES, read, lambda answers: {"answers": answers}
        )

    async def _searched(
        self,
        request: Request,
        limits: Mapping[Kind, int],
        types: str,
        read: Callable[[Body], Query],
        shape: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> Response:
        served, prefix, began = self._served(request), prefix_of(request), perf_counter()
        served.workers.searches.require_room()  # before the body is read

        async def work(body: Body) -> bytes:
            query = await self._understood(served, body, read)

            def finish(found: list[list[Hit]], index: Index) -> bytes:
                answers = [
                    {"results": [hit_json(hit, served, prefix, query) for hit in hits]} for hits in found
                ]
                content = {**shape(answers), "took_ms": round(1000 * (perf_counter() - began), 2)}
                if query.options.explain:
                    content["explain"] = explanation(query, index)
                return to_json(content, inf_nan_mode="null")

            return await served.search(query, finish)

        return answer(await self._with_body(request, limits, types, work))

    # Items

    async def get_item(self, request: Request) -> Response:
        """Give an item, and its vector when asked for it."""
        served, prefix, id = self._served(request), prefix_of(request), id_of(request, "vector")
        wanted = models.truth_form(request.query_params.get("vector", "false"))
        if not isinstance(wanted, bool):
            raise RequestError(400, '"vector" must be true or false.')

        def work(index: Index) -> dict[str, Any]:
            item = index.get([id], arrays=wanted).get(id)
            if item is None:
                raise no_item()
            numbers = item.arrays.get("vector")
            own = {"vector": None if numbers is None else numbers.tolist()} if wanted else {}
            return item_json(served, item, prefix) | own

        return answer(await self._in_time(request, served.read(work)))

    async def put_item(self, request: Request) -> Response:
        """Add an item, or replace the one that has its id."""
        limits: dict[Kind, int] = {"form": self._settings.max_bytes, "json": JSON_BYTES}
        id = usable_id(id_of(request))
        read = partial(models.put_item, id, max_bytes=self._settings.max_bytes)
        return await self._put_one(request, limits, models.PUT_TYPES, "put", id, read)

    async def patch_item(self, request: Request) -> Response:
        """Change an item's label or metadata."""
        id = usable_id(id_of(request))
        read = partial(models.changed_item, id)
        return await self._put_one(request, {"json": JSON_BYTES}, models.PATCH_TYPES, "change", id, read)

    async def _put_one(
        self,
        request: Request,
        limits: Mapping[Kind, int],
        types: str,
        what: str,
        id: str,
        read: Callable[[Body], NewItem],
    ) -> Response:
        served = self._served(request)

        async def work(body: Body) -> dict[str, Any]:
            item = await self._understood(served, body, read)
            replaced = await served.put([item], _change(request, served, what, ids=[id]))
            return {"id": id, "replaced": bool(replaced)}

        return answer(await self._with_body(request, limits, types, work))

    async def delete_item(self, request: Request) -> Response:
        """Delete an item."""
        served, id = self._served(request), id_of(request)
        change = _change(request, served, "delete", ids=[id])
        if not await self._in_time(request, served.delete(change)):
            raise no_item()
        return answer({"deleted": 1})

    async def add_items(self, request: Request) -> Response:
        """Add, replace or change several items: all of them, or none."""
        served = self._served(request)
        parameters_of(request)
        limits: dict[Kind, int] = {"form": BATCH_BYTES, "json": BATCH_BYTES}

        def read(body: Body) -> list[NewItem]:
            items = models.several_items(body, self._settings.batch, self._settings.max_bytes)
            for item in items:
                usable_id(item.id)
            return items

        async def work(body: Body) -> dict[str, int]:
            items = await self._understood(served, body, read)
            change = _change(request, served, "put", ids=[item.id for item in items])
            replaced = await served.put(items, change)
            return {"added": len(items) - replaced, "replaced": replaced}

        return answer(await self._with_body(request, limits, models.ADD_TYPES, work))

    async def list_items(self, request: Request) -> Response:
        """Give a page of items, in the order of their ids."""
        served, prefix = self._served(request), prefix_of(request)
        said = parameters_of(request, "cursor", "limit", "filter", "fields")
        limit = models.number_form(said.get("limit", str(PAGE)))
        if not isinstance(limit, int) or not 1 <= limit <= MAX_PAGE:
            raise RequestError(400, f'"limit" must be a whole number from 1 to {MAX_PAGE}.')
        where = models.filter_of(models.filter_form(said["filter"]) if "filter" in said else None)
        names = models.options_of({"fields": said.get("fields")}.get).fields
        after = after_cursor(said.get("cursor"), where)

        def work(index: Index) -> dict[str, Any]:
            found = index.scan(where, after=after, limit=limit + 1)
            items = [item_json(served, item, prefix, names) for item in found[:limit]]
            more = len(found) > limit
            return {"items": items, "cursor": cursor_after(found[limit - 1].id, where) if more else None}

        return answer(await self._in_time(request, served.read(work)))

    async def delete_items(self, request: Request) -> Response:
        """Delete items by id, all that match a filter, or all."""
        served = self._served(request)
        parameters_of(request)

        async def work(body: Body) -> dict[str, int]:
            said = models.DeleteBody.of(models.json_of(body))
            if sum(one is not None for one in (said.ids, said.filter, said.all)) != 1:
                raise RequestError(400, models.DeleteBody.shape)
            where = as_filter({"exists": "id"}) if said.all else models.filter_of(said.filter)
            change = _change(request, served, "delete", ids=said.ids or (), where=where)
            return {"deleted": await served.delete(change)}

        return answer(await self._with_body(request, {"json": JSON_BYTES}, "Send application/json.", work))

    # Pictures

    async def image(self, request: Request) -> Response:
        """Give an item's original, or a PNG of it where browsers do not show its format."""
        return await self._picture(request, small=False)

    async def thumbnail(self, request: Request) -> Response:
        """Give a small JPEG of an item's original."""
        return await self._picture(request, small=True)

    async def _picture(self, request: Request, *, small: bool) -> Response:
        served, id = self._served(request), id_of(request)

        async def work() -> Response:
            content = await served.picture(id, small)
            kind = "image/jpeg" if small else media_type(content)
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}{"-small" if small else ""}"'
            headers = {"Cache-Control": "no-cache", "ETag": tag}
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            if small or kind is None:
                if len(content) > self._settings.max_bytes:
                    raise RequestError(404, f"The image of item {id} is too large to be shown.")
                try:
                    content = await served.workers.decoded("thumbnail" if small else "png", content)
                except DataError:
                    raise RequestError(404, f"The image of item {id} cannot be shown.") from None
            return Picture(content, self._memory, headers, kind or "image/png")

        return await self._in_time(request, work())

    # The index

    async def index(self, request: Request) -> Response:
        """Describe an index."""
        served, role = self._served(request), caller_of(request).role
        parameters_of(request)
        limits = {
            "bytes": self._settings.max_bytes,
            "pixels": self._settings.max_pixels,
            "batch": self._settings.batch,
            "batch_bytes": BATCH_BYTES,
        }

        def work(index: Index) -> dict[str, Any]:
            return description(served.name, index) | {"role": role, "limits": limits}

        return answer(await self._in_time(request, served.read(work)))

    async def snapshot(self, request: Request) -> Response:
        """Write a copy of one moment below the operator's folder; answers when it is whole."""
        served, folder = self._served(request), self._settings.snapshots
        parameters_of(request)
        if folder is None:
            sentence = "This server writes no snapshots. Its operator can name a folder: --snapshots FOLDER."
            raise RequestError(403, sentence)
        name = f"{served.name}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{secrets.token_hex(4)}"
        await served.snapshot(folder / name, _change(request, served, "snapshot"))
        return answer({"snapshot": name}, 201)

    async def list_indexes(self, request: Request) -> Response:
        """Name the indexes that the caller may use."""
        parameters_of(request)
        return answer({"indexes": sorted(filter(caller_of(request).may_use, self.indexes))})

    async def openapi(self, request: Request) -> Response:
        """Give the OpenAPI document."""
        return answer(document())

    # What they share

    def _served(self, request: Request) -> Served:
        """Return the index that a request names.

        Raises:
            RequestError: 403, its sender may not use it; 404, there is none of this name, or several could be meant.
        """
        caller = caller_of(request)
        name = request.path_params.get("index")
        if name is None and len(self.indexes) == 1:
            name = next(iter(self.indexes))
        if name is not None and not caller.may_use(name):
            raise RequestError(403, "This key is for other indexes.")
        if name is not None and name in self.indexes:
            return self.indexes[name]
        sentence = "This server has no index of this name."
        if name is None:
            sentence = (
                "This server has several indexes: name one in the address, as in /v1/indexes/NAME/search."
            )
        raise RequestError(404, sentence, members={"indexes": sorted(filter(caller.may_use, self.indexes))})

    async def _with_body(
        self,
        request: Request,
        limits: Mapping[Kind, int],
        types: str,
        work: Callable[[Body], Awaitable[T]],
    ) -> T:
        """Return what some work makes of a request's body, within the deadline."""
        began = perf_counter()
        body = await self._memory.read(request, limits, types)
        if (trail := current()) is not None:
            trail.note("read", began, perf_counter())
        try:
            return await self._in_time(request, work(body))
        finally:
            self._memory.release(body)

    @staticmethod
    async def _understood(served: Served, body: Body, read: Callable[[Body], T]) -> T:
        """Return what a body says: read at once where that is quick, else in a thread."""
        if len(body.content) <= 16_384:
            return read(body)
        return await served.workers.searches.run(lambda: read(body))

    async def _in_time(self, request: Request, work: Awaitable[T]) -> T:
        """Return what some work gives within the deadline.

        Raises:
            RequestError: 503, it takes too long.
        """
        HAS_LEFT.set(request.is_disconnected)
        try:
            async with asyncio.timeout(self._settings.deadline):
                return await work
        except TimeoutError:
            sentence = (
                f"There was no answer within {self._settings.deadline:g} seconds. Try again in a moment."
            )
            if request.method not in ("GET", "HEAD") and "/search" not in request.url.path:
                sentence += " What was to be written may have been written or not: sent again, it changes nothing more."
            raise RequestError(503, sentence, "deadline") from None


def _change(
    request: Request, served: Served, what: str, ids: Any = (), where: Filter | None = None
) -> Change:
    return Change(what, served.name, caller_of(request), request_id_of(request.scope), ids, where)
