"""Handlers of /v1, one per operation in `openapi.OPERATIONS`; docstrings become its summaries."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import unquote

from pydantic_core import to_json
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from retrieval.errors import DataError
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.http import answers, models
from retrieval.serving.http.access import Caller
from retrieval.serving.http.answers import Picture, answer
from retrieval.serving.http.audit import Change
from retrieval.serving.http.bodies import Body, BodyMemory, Kind
from retrieval.serving.http.models import OPTIONS, NewItem, Query
from retrieval.serving.http.openapi import OPERATIONS, document
from retrieval.serving.http.problems import RequestError, no_item
from retrieval.serving.http.served import Served
from retrieval.serving.http.settings import BATCH_BYTES, JSON_BYTES, Settings
from retrieval.serving.index.hits import Hit
from retrieval.serving.index.index import Index
from retrieval.serving.stages import stage
from retrieval.serving.store.items import check_id

T = TypeVar("T")

_JSON: Mapping[Kind, int] = {"json": JSON_BYTES}
_SEVERAL: Mapping[Kind, int] = {"form": BATCH_BYTES, "json": BATCH_BYTES}
_PARSED_AT_ONCE_BYTES = 16_384
"""Larger form and JSON bodies are parsed in a thread."""


class Routes:
    """Handlers of the routes below /v1, for the indexes of a server by name."""

    def __init__(self, indexes: Mapping[str, Served], settings: Settings) -> None:
        self.indexes, self._settings, self._memory = indexes, settings, BodyMemory()

    def all(self) -> list[BaseRoute]:
        """Return the routes; those of an index exist with and without its name in the path."""
        routes: list[BaseRoute] = []
        for operation in OPERATIONS:
            for prefix in ("/v1", "/v1/indexes/{index}")[: 1 + operation.of_index]:
                path = prefix + operation.path.replace("{id}", "{id:any}")
                handler = getattr(self, operation.handler)
                routes.append(NamedRoute(path, handler, methods=[operation.method.upper()]))
        return routes

    # Search

    async def search(self, request: Request) -> Response:
        """Search with an image, a vector or an item of the index."""
        max_bytes = self._settings.max_bytes
        limits: dict[Kind, int] = {"form": max_bytes, "json": JSON_BYTES, "image": max_bytes}
        kind = request.headers.get("content-type", "")
        image_alone = kind.startswith(("image/", "application/octet-stream"))
        parameters = parameters_of(request, *(OPTIONS if image_alone else ()))

        def read(body: Body) -> Query:
            return models.query_of(body, parameters, max_bytes)

        return await self._search(request, limits, models.SEARCH_TYPES, read, batch=False)

    async def search_batch(self, request: Request) -> Response:
        """Search with several images, vectors or items."""
        parameters_of(request)
        read = partial(
            models.batch_of, most=self._settings.batch, max_bytes=self._settings.max_bytes
        )
        return await self._search(request, _SEVERAL, models.BATCH_TYPES, read, batch=True)

    async def _search(
        self,
        request: Request,
        limits: Mapping[Kind, int],
        types: str,
        read: Callable[[Body], Query],
        batch: bool,
    ) -> Response:
        served, prefix, began = self._served(request), _prefix_of(request), perf_counter()
        served.workers.searches.require_room()  # before the body is read

        def finish(query: Query, hits_by_query: list[list[Hit]], index: Index) -> bytes:
            names = query.options.fields
            results = [
                {"results": [answers.hit_json(hit, served, prefix, names) for hit in hits]}
                for hits in hits_by_query
            ]
            content: dict[str, Any] = {"answers": results} if batch else results[0]
            content["took_ms"] = round(1000 * (perf_counter() - began), 2)
            if query.options.explain:
                content["explain"] = answers.explanation(query, index)
            return to_json(content, inf_nan_mode="null")

        async with self._body(request, limits, types) as body:
            if batch or body.kind == "json":
                return answer(await served.search(await _parsed(served, body, read), finish))
            return answer(await served.search(partial(read, body), finish))

    # Items

    async def get_item(self, request: Request) -> Response:
        """Get an item."""
        served, prefix, id = self._served(request), _prefix_of(request), _id_of(request, "vector")
        with_vector = models.truth(request.query_params.get("vector", "false"))
        if not isinstance(with_vector, bool):
            raise RequestError(400, '"vector" must be true or false.')

        def work(index: Index) -> dict[str, Any]:
            item = index.get([id], arrays=with_vector).get(id)
            if item is None:
                raise no_item()
            vector = item.arrays.get("vector")
            own = {"vector": None if vector is None else vector.tolist()} if with_vector else {}
            return answers.item_json(served, item, prefix) | own

        async with self._deadline(request):
            return answer(await served.read(work))

    async def put_item(self, request: Request) -> Response:
        """Add an item, or replace the one with this id."""
        limits: dict[Kind, int] = {"form": self._settings.max_bytes, "json": JSON_BYTES}
        read = partial(models.put_item, max_bytes=self._settings.max_bytes)
        return await self._put_one(request, limits, models.PUT_TYPES, "put", read)

    async def patch_item(self, request: Request) -> Response:
        """Change an item's label or metadata; members that are left out keep their value."""
        return await self._put_one(
            request, _JSON, models.PATCH_TYPES, "change", models.changed_item
        )

    async def _put_one(
        self,
        request: Request,
        limits: Mapping[Kind, int],
        types: str,
        what: str,
        read: Callable[[str, Body], NewItem],
    ) -> Response:
        served, id = self._served(request), _usable(_id_of(request))
        async with self._body(request, limits, types) as body:
            item = await _parsed(served, body, partial(read, id))
            replaced = await served.put([item], _change(request, served, what, [id]))
            return answer({"id": id, "replaced": bool(replaced)})

    async def delete_item(self, request: Request) -> Response:
        """Delete an item."""
        served = self._served(request)
        change = _change(request, served, "delete", [_id_of(request)])
        async with self._deadline(request):
            if not await served.delete(change):
                raise no_item()
            return answer({"deleted": 1})

    async def add_items(self, request: Request) -> Response:
        """Add, replace or change several items atomically."""
        served, settings = self._served(request), self._settings
        parameters_of(request)
        read = partial(models.items_of, most=settings.batch, max_bytes=settings.max_bytes)
        async with self._body(request, _SEVERAL, models.ADD_TYPES) as body:
            items = await _parsed(served, body, read)
            change = _change(request, served, "put", [_usable(item.id) for item in items])
            replaced = await served.put(items, change)
            return answer({"added": len(items) - replaced, "replaced": replaced})

    async def list_items(self, request: Request) -> Response:
        """List items, page by page."""
        served, prefix = self._served(request), _prefix_of(request)
        page = models.ListParameters.of_texts(
            parameters_of(request, *models.ListParameters.model_fields)
        )
        where = models.filter_of(page.filter)
        after = answers.after_cursor(page.cursor, where)

        def work(index: Index) -> dict[str, Any]:
            items = index.scan(where, after=after, limit=page.limit + 1)
            shown = [
                answers.item_json(served, item, prefix, page.fields) for item in items[: page.limit]
            ]
            more = len(items) > page.limit
            return {
                "items": shown,
                "cursor": answers.cursor_after(shown[-1]["id"], where) if more else None,
            }

        async with self._deadline(request):
            return answer(await served.read(work))

    async def delete_items(self, request: Request) -> Response:
        """Delete items by id or filter, or all items."""
        served = self._served(request)
        parameters_of(request)

        def read(body: Body) -> models.DeleteBody:
            return models.DeleteBody.of(models.loads(body.content))

        async with self._body(request, _JSON, "Send application/json.") as body:
            what = await _parsed(served, body, read)
            where = as_filter({"exists": "id"}) if what.all else models.filter_of(what.filter)
            change = _change(request, served, "delete", what.ids or (), where)
            return answer({"deleted": await served.delete(change)})

    # Pictures

    async def get_image(self, request: Request) -> Response:
        """Get an item's original in a format that browsers show."""
        return await self._picture(request, small=False)

    async def get_thumbnail(self, request: Request) -> Response:
        """Get a small JPEG of an item's original."""
        return await self._picture(request, small=True)

    async def _picture(self, request: Request, *, small: bool) -> Response:
        served, id = self._served(request), _id_of(request)
        async with self._deadline(request):
            content = await served.picture(id, small)
            kind = "image/jpeg" if small else answers.media_type(content)
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

    # The index

    async def get_index(self, request: Request) -> Response:
        """Describe the index."""
        served, settings = self._served(request), self._settings
        parameters_of(request)
        own = {
            "role": _caller_of(request).role,
            "limits": {
                "bytes": settings.max_bytes,
                "pixels": settings.max_pixels,
                "batch": settings.batch,
                "batch_bytes": BATCH_BYTES,
            },
        }
        async with self._deadline(request):
            return answer(
                await served.read(lambda index: answers.description(served.name, index) | own)
            )

    async def snapshot(self, request: Request) -> Response:
        """Write a consistent copy of the index to the operator's folder."""
        served, folder = self._served(request), self._settings.snapshots
        parameters_of(request)
        if folder is None:
            sentence = (
                "This server writes no snapshots. Its operator can name a folder: --snapshots"
                " FOLDER."
            )
            raise RequestError(403, sentence)
        name = (
            f"{served.name}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{secrets.token_hex(4)}"
        )
        await served.snapshot(folder / name, _change(request, served, "snapshot"))
        return answer({"snapshot": name}, 201)

    async def list_indexes(self, request: Request) -> Response:
        """List the names of the server's indexes."""
        parameters_of(request)
        return answer({"indexes": sorted(filter(_caller_of(request).may_use, self.indexes))})

    async def openapi(self, request: Request) -> Response:
        """Get this document."""
        return answer(document(Routes))

    # Shared by the handlers

    def _served(self, request: Request) -> Served:
        """Return the index that a request names, or the only one.

        Raises:
            RequestError: 403 if the sender may not use the index; 404 if it does not exist, or if
                the request names none and the server has several.
        """
        caller, name = _caller_of(request), request.path_params.get("index")
        if name is None and len(self.indexes) == 1:
            name = next(iter(self.indexes))
        if name is not None and not caller.may_use(name):
            raise RequestError(403, "This key is for other indexes.")
        if name is not None and name in self.indexes:
            return self.indexes[name]
        sentence = "This server has no index of this name."
        if name is None:
            sentence = (
                "This server has several indexes: name one in the address, as in"
                " /v1/indexes/NAME/search."
            )
        raise RequestError(
            404, sentence, members={"indexes": sorted(filter(caller.may_use, self.indexes))}
        )

    @asynccontextmanager
    async def _body(
        self, request: Request, limits: Mapping[Kind, int], types: str
    ) -> AsyncIterator[Body]:
        """Context manager that yields a request's body, and bounds time and memory."""
        with stage("read", 0):
            body = await self._memory.read(request, limits, types)
        try:
            async with self._deadline(request):
                yield body
        finally:
            self._memory.release(body)

    @asynccontextmanager
    async def _deadline(self, request: Request) -> AsyncIterator[None]:
        """Context manager that raises a RequestError 503 after the deadline."""
        try:
            async with asyncio.timeout(self._settings.deadline):
                yield
        except TimeoutError:
            sentence = (
                f"There was no answer within {self._settings.deadline:g} seconds. Try again in a"
                " moment."
            )
            if request.method not in ("GET", "HEAD") and "/search" not in request.url.path:
                sentence += (
                    " What was to be written may have been written or not: sent again, it changes"
                    " nothing more."
                )
            raise RequestError(503, sentence, "deadline") from None


async def _parsed(served: Served, body: Body, read: Callable[[Body], T]) -> T:
    """Return `read(body)`, run in a thread if the body is large."""
    if len(body.content) <= _PARSED_AT_ONCE_BYTES:
        return read(body)
    return await served.workers.searches.run(partial(read, body))


# URLs


class _AnyText(StringConvertor):
    """An item's id in a path: any characters, including slashes and line breaks."""

    regex = "(?s:.+)"


register_url_convertor("any", _AnyText())


class NamedRoute(Route):
    """A route that records its pattern for metrics and the log.

    A pattern with an item's id matches the path before decoding, so that `%2F` belongs to the id.
    """

    def matches(self, scope: Any) -> tuple[Match, Any]:
        """Match the path, and add the pattern to the scope."""
        if "{id" in self.path and "raw_path" in scope:
            path = scope["raw_path"].partition(b"?")[0].decode("latin-1")
            scope = {**scope, "path": path, "root_path": ""}
        match, child = super().matches(scope)
        return match, {**child, "retrieval.route": self.path.replace(":any", "")}


def parameters_of(request: Request, *known: str) -> dict[str, str]:
    """Return the URL parameters; raise a RequestError 400 if one is unknown or repeated."""
    if not request.scope["query_string"]:
        return {}
    pairs = request.query_params.multi_items()
    if pairs and not known:
        raise RequestError(
            400, "The address takes no query string (?…); fields go into the request's body."
        )
    parameters = dict(pairs)
    if unknown := [name for name in parameters if name not in known]:
        sentence = (
            f"The address takes no parameter {unknown[0][:40]!a}. It takes: {', '.join(known)}."
        )
        raise RequestError(400, sentence)
    if len(parameters) < len(pairs):
        raise RequestError(400, "The address gives a parameter twice.")
    return parameters


def _id_of(request: Request, *options: str) -> str:
    """Return the id of a request's item, from its path or from `?id=`.

    Args:
        request: the request.
        options: names of further allowed parameters.
    """
    if "id" in request.path_params:
        parameters_of(request, *options)
        return unquote(request.path_params["id"], errors="surrogateescape")
    id = parameters_of(request, "id", *options).get("id")
    if not id:
        raise RequestError(400, "The address names no item: add ?id=, and the id percent-encoded.")
    return id


def _usable(id: str) -> str:
    if fault := check_id(id):
        raise RequestError(400, f"The item {fault}.")
    return id


def _caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["retrieval.caller"]
    return caller


def _prefix_of(request: Request) -> str:
    """Return the path prefix of the request's index."""
    name = request.path_params.get("index")
    return "/v1" if name is None else f"/v1/indexes/{name}"


def _change(
    request: Request,
    served: Served,
    what: str,
    ids: Sequence[str] = (),
    where: Filter | None = None,
) -> Change:
    id = request.scope["retrieval.request_id"]
    return Change(what, served.name, _caller_of(request), id, ids, where)
