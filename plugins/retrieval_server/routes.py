"""Handlers of /v1, one per operation in `openapi.OPERATIONS`.

A handler's docstring is the summary of its operation in the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from pydantic_core import to_json
from retrieval.base.timing import TRAIL, Trail, stage
from retrieval.bundle.bundle import Encoded
from retrieval.errors import DataError
from retrieval.images.decoding import format_of
from retrieval.index.change_log import Change
from retrieval.index.identify import Verdict
from retrieval.index.index import Index
from retrieval.index.queries_and_hits import Hit, Hits
from retrieval.store.contract import Item
from retrieval.store.filters import Filter
from retrieval.store.folder import INDEX_FORMAT
from retrieval.store.items import check_id
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from retrieval_server import request_bodies
from retrieval_server.access import Caller, needed_role
from retrieval_server.decoder_processes import Kind as PictureKind
from retrieval_server.feedback import FeedbackBody, NotedHits, voter_of
from retrieval_server.forms import Body, BodyMemory, Kind
from retrieval_server.openapi import OPERATIONS, document
from retrieval_server.problems import RequestError, busy, no_item, refuse_other_bundle
from retrieval_server.request_bodies import Query
from retrieval_server.served_index import Served
from retrieval_server.settings import (
    BATCH_BYTES,
    BODY_MEMORY,
    JSON_BATCH_BYTES,
    JSON_BYTES,
    SEND_SECONDS,
    Settings,
)

T = TypeVar("T")

_JSON_LIMITS: Mapping[Kind, int] = {"json": JSON_BYTES}
_BATCH_LIMITS: Mapping[Kind, int] = {"form": BATCH_BYTES, "json": JSON_BATCH_BYTES}
"""Maximum bytes of a body by its kind, for one operation on several items or queries."""
_PARSED_AT_ONCE_BYTES = 16_384
"""Larger form and JSON bodies are parsed in a thread."""
_BROWSERS = {name: f"image/{name.lower()}" for name in ("JPEG", "PNG", "GIF", "BMP", "WEBP")}
"""Media types of the formats that browsers show."""


_CALIBRATION = ("classes", "items", "least_rate", "created", "label", "distinct")


class Routes:
    """Handlers of the routes below /v1; `indexes` holds the server's indexes by name."""

    def __init__(self, indexes: Mapping[str, Served], settings: Settings) -> None:
        self.indexes = indexes
        self._settings = settings
        self._memory = BodyMemory()
        self._single_limits: Mapping[Kind, int] = {"form": settings.max_bytes, "json": JSON_BYTES}

    def all(self) -> list[BaseRoute]:
        """Return the routes; those of an index exist with and without its name in the path."""
        routes: list[BaseRoute] = []
        for operation in OPERATIONS:
            for prefix in operation.prefixes:
                path = prefix + operation.path.replace("{id}", "{id:any}")
                handler = getattr(self, operation.handler)
                routes.append(NamedRoute(path, handler, methods=[operation.method.upper()]))
        return routes

    # Search

    async def search(self, request: Request) -> Response:
        """Search with an image, a vector, an item of the index or a text."""
        return await self._search_one(request, request_bodies.SearchBody, self._settings.max_bytes)

    async def identify(self, request: Request) -> Response:
        """Say which class of the index photos of one thing show, or that it is unknown."""
        return await self._search_one(request, request_bodies.IdentifyBody, BATCH_BYTES)

    async def search_batch(self, request: Request) -> Response:
        """Search with several images, vectors, items or texts."""
        settings = self._settings
        parameters_of(request)
        read = partial(request_bodies.batch_of, most=settings.batch, max_bytes=settings.max_bytes)
        return await self._search(request, _BATCH_LIMITS, read, batch=True)

    async def _search_one(
        self,
        request: Request,
        model: type[request_bodies.SearchBody | request_bodies.IdentifyBody],
        form_bytes: int,
    ) -> Response:
        settings = self._settings
        limits = {**self._single_limits, "form": form_bytes, "image": settings.max_bytes}
        kind = request.headers.get("content-type", "").lower()
        image_alone = kind.startswith(("image/", "application/octet-stream"))
        read = partial(
            request_bodies.query_of,
            parameters=parameters_of(request, *(model.options.model_fields if image_alone else ())),
            model=model,
            most=settings.batch,
            max_bytes=settings.max_bytes,
        )
        return await self._search(request, limits, read)

    async def _search(
        self,
        request: Request,
        limits: Mapping[Kind, int],
        read: Callable[[Body], Query],
        batch: bool = False,
    ) -> Response:
        served = self._served(request)
        prefix = _prefix_of(request)
        began = perf_counter()
        # A full queue refuses a request before its body takes memory.
        served.workers.searches.require_room()
        key = _caller_of(request).name

        def parse(body: Body) -> Query:
            query = read(body)
            if served.feedback is None:
                return query
            return query._replace(voter=voter_of(key, getattr(query.options, "user", None)))

        def finish(query: Query, answers: Sequence[Any], index: Index) -> bytes:
            refuse_other_bundle(query.options.bundle, index.bundle.sha256)
            if _shows_drift(query, answers):
                served.drift.note(index.bundle.sha256, answers)
            options = query.options
            results = [_result_json(answer, options, served, prefix) for answer in answers]
            content: dict[str, Any] = {"answers": results} if batch else results[0]
            content["bundle"] = index.bundle.sha256
            content["took_ms"] = round(1000 * (perf_counter() - began), 2)
            if getattr(options, "explain", False):
                content["explain"] = _explanation()
            return to_json(content, inf_nan_mode="null")

        async with self._body(request, limits) as body:
            # A query of one image is parsed, decoded, encoded and searched by one thread: a hop to
            # another thread costs as much as a small search; see `Turns`.
            if batch or body.kind == "json":
                return _answer(await served.search(await _parsed(served, body, parse), finish))
            return _answer(await served.search_image(partial(parse, body), finish))

    async def feedback(self, request: Request) -> Response:
        """Mark hits of a search as liked, disliked or clicked."""
        served = self._served(request)
        caller = _caller_of(request)
        parameters_of(request)
        if served.feedback is None:
            raise RequestError(
                403, "This server takes no feedback. Its operator can turn it on: --feedback."
            )

        def read(body: Body) -> FeedbackBody:
            return FeedbackBody.of(request_bodies.loads(body.content))

        async with self._body(request, _JSON_LIMITS) as body:
            content = await _parsed(served, body, read)
            voter = voter_of(caller.name, content.user)
            # The record of changes does not name what somebody liked: see `forget`.
            change = _change(request, served, "feedback")
            counted = await served.mark(content.search_id, voter, content.marks(), change)
            return _answer({"counted": counted})

    # Encoding

    async def encode(self, request: Request) -> Response:
        """Encode images or texts into vectors; nothing is stored."""
        served = self._served(request)
        settings = self._settings
        parameters_of(request)
        served.workers.searches.require_room()
        limits = {**_BATCH_LIMITS, "image": settings.max_bytes}

        def read(body: Body) -> tuple[list[bytes], list[str]]:
            if body.kind == "json":
                return [], request_bodies.texts_of(body, settings.batch)
            return request_bodies.images_of(body, settings.batch, settings.max_bytes), []

        def finish(encoded: Encoded) -> bytes:
            content = {"vectors": encoded.vector.tolist(), "bundle": encoded.bundle}
            if encoded.query is not encoded.vector:
                content["query_vectors"] = encoded.query.tolist()
            return to_json(content, inf_nan_mode="null")

        async with self._body(request, limits) as body:
            images, texts = await _parsed(served, body, read)
            return _answer(await served.encode(images, texts, finish))

    async def embeddings(self, request: Request) -> Response:
        """Encode images in the shape of OpenAI's API; nothing is stored."""
        served = self._served(request)
        settings = self._settings
        parameters_of(request)
        served.workers.searches.require_room()
        read = partial(
            request_bodies.embeddings_of, most=settings.batch, max_bytes=settings.max_bytes
        )
        async with self._body(request, {"json": JSON_BATCH_BYTES}) as body:
            options, images = await _parsed(served, body, read)

            def finish(encoded: Encoded) -> bytes:
                if options.model not in (served.name, encoded.bundle):
                    raise RequestError(
                        404,
                        f'The model of this index is "{served.name}" or "{encoded.bundle}", the'
                        " SHA-256 of its bundle.",
                    )
                vectors: list[Any] = encoded.vector.tolist()
                if options.encoding_format == "base64":
                    vectors = [
                        base64.b64encode(vector.astype("<f4").tobytes()).decode()
                        for vector in encoded.vector
                    ]
                data = [
                    {"object": "embedding", "index": index, "embedding": vector}
                    for index, vector in enumerate(vectors)
                ]
                content = {
                    "object": "list",
                    "data": data,
                    "model": encoded.bundle,
                    "usage": {"prompt_tokens": 0, "total_tokens": 0},
                }
                return to_json(content, inf_nan_mode="null")

            return _answer(await served.encode(images, (), finish))

    # Items

    async def get_item(self, request: Request) -> Response:
        """Get an item."""
        served = self._served(request)
        prefix = _prefix_of(request)
        id = _id_of(request, "vector")
        with_vector = request_bodies.truth(request.query_params.get("vector", "false"))
        if not isinstance(with_vector, bool):
            raise RequestError(400, '"vector" must be true or false.')

        def work(index: Index) -> dict[str, Any]:
            bundle = index.follow()
            item = index.get([id], arrays=with_vector).get(id)
            # After a migration, the vector may belong to the new bundle.
            while with_vector and index.follow() is not bundle:
                bundle = index.follow()
                item = index.get([id], arrays=True).get(id)
            if item is None:
                raise no_item()
            members = _item_json(served, item, prefix)
            if with_vector:
                vector = item.arrays.get("vector")
                members["vector"] = None if vector is None else vector.tolist()
                members["bundle"] = bundle.sha256
            return members

        async with self._deadline(request):
            return _answer(await served.read(work))

    async def put_item(self, request: Request) -> Response:
        """Add an item, or replace the one with this id."""
        served = self._served(request)
        # The id is checked here, because the body may be large.
        id = _usable(_id_of(request))
        read = partial(request_bodies.put_item, id, max_bytes=self._settings.max_bytes)
        async with self._body(request, self._single_limits) as body:
            item = await _parsed(served, body, read)
            replaced = await served.put([item], _change(request, served, "put", [id]))
            return _answer({"id": id, "replaced": bool(replaced)})

    async def patch_item(self, request: Request) -> Response:
        """Change an item's label or some of its metadata; what is left out keeps its value."""
        served = self._served(request)
        id = _id_of(request)
        async with self._body(request, _JSON_LIMITS) as body:
            changes = await _parsed(served, body, request_bodies.changes_of)
            await served.patch(changes, _change(request, served, "change", [id]))
            return _answer({"id": id, "replaced": True})

    async def delete_item(self, request: Request) -> Response:
        """Delete an item."""
        served = self._served(request)
        change = _change(request, served, "delete", [_id_of(request)])
        async with self._deadline(request):
            if not await served.delete(change):
                raise no_item()
            return _answer({"deleted": 1})

    async def add_items(self, request: Request) -> Response:
        """Add or replace several items atomically."""
        served = self._served(request)
        settings = self._settings
        parameters_of(request)
        read = partial(request_bodies.items_of, most=settings.batch, max_bytes=settings.max_bytes)
        async with self._body(request, _BATCH_LIMITS) as body:
            items = await _parsed(served, body, read)
            change = _change(request, served, "put", [_usable(item.id) for item in items])
            replaced = await served.put(items, change)
            return _answer({"added": len(items) - replaced, "replaced": replaced})

    async def patch_items(self, request: Request) -> Response:
        """Change the label or some of the metadata of all items that match a filter."""
        served = self._served(request)
        parameters_of(request)
        async with self._body(request, _JSON_LIMITS) as body:
            filter, changes = await _parsed(served, body, request_bodies.filtered_changes_of)
            change = _change(request, served, "change", filter=filter)
            return _answer({"changed": await served.patch(changes, change)})

    async def list_items(self, request: Request) -> Response:
        """List items, page by page."""
        served = self._served(request)
        prefix = _prefix_of(request)
        parameters = parameters_of(request, *request_bodies.ListParameters.model_fields)
        page = request_bodies.ListParameters.of_texts(parameters)
        filter = request_bodies.filter_of(page.filter)
        newest = page.order == "newest"
        after: Any = None
        if page.cursor is not None:
            after = _decoded_cursor(page.cursor, newest)

        def work(index: Index) -> dict[str, Any]:
            # One item beyond the page tells that another page follows.
            limit = page.limit + 1
            pairs: list[tuple[Any, Item]]
            if newest:
                pairs = index.store.newest(filter, before=after, limit=limit)
            else:
                pairs = [(item.id, item) for item in index.scan(filter, after=after, limit=limit)]
            members = [
                _item_json(served, item, prefix, page.fields) for _, item in pairs[: page.limit]
            ]
            cursor = None
            if len(pairs) > page.limit:
                cursor = _encoded_cursor(str(pairs[page.limit - 1][0]))
            return {"items": members, "cursor": cursor}

        async with self._deadline(request):
            return _answer(await served.read(work))

    async def delete_items(self, request: Request) -> Response:
        """Delete the items that match a filter."""
        served = self._served(request)
        parameters_of(request)

        def read(body: Body) -> request_bodies.DeleteBody:
            return request_bodies.DeleteBody.of(request_bodies.loads(body.content))

        async with self._body(request, _JSON_LIMITS) as body:
            filter = request_bodies.filter_of((await _parsed(served, body, read)).filter)
            change = _change(request, served, "delete", filter=filter)
            return _answer({"deleted": await served.delete(change)})

    # Pictures

    async def get_image(self, request: Request) -> Response:
        """Get an item's original in a format that browsers show."""
        return await self._picture(request, small=False)

    async def get_thumbnail(self, request: Request) -> Response:
        """Get a small JPEG of an item's original."""
        return await self._picture(request, small=True)

    async def _picture(self, request: Request, *, small: bool) -> Response:
        served = self._served(request)
        id = _id_of(request)
        async with self._deadline(request):
            content = await served.picture(id, small)
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}{"-small" if small else ""}"'
            # An item may get another image at any time, so a browser asks again, with the tag.
            headers = {"Cache-Control": "no-cache", "ETag": tag}
            sent = ",".join(request.headers.getlist("if-none-match"))
            if {"*", tag} & {word.strip().removeprefix("W/") for word in sent.split(",")}:
                return Response(status_code=304, headers=headers)
            media_type = _BROWSERS.get(format_of(content) or "")
            if small or media_type is None:
                kind: PictureKind = "png"
                media_type = "image/png"
                if small:
                    kind = "thumbnail"
                    media_type = "image/jpeg"
                if len(content) > self._settings.max_bytes:
                    raise RequestError(404, f"The image of item {id} is too large to be shown.")
                try:
                    content = await served.workers.decoded(kind, content)
                except DataError:
                    raise RequestError(404, f"The image of item {id} cannot be shown.") from None
            return _Picture(content, self._memory, headers, media_type)

    # The index

    async def get_index(self, request: Request) -> Response:
        """Describe the index."""
        served = self._served(request)
        settings = self._settings
        parameters_of(request)
        of_server = {
            "role": _caller_of(request).role,
            "feedback": served.feedback is not None,
            "limits": {
                "bytes": settings.max_bytes,
                "pixels": settings.max_pixels,
                "batch": settings.batch,
                "batch_bytes": BATCH_BYTES,
            },
        }
        async with self._deadline(request):
            describe = partial(_description, served)
            return _answer(await served.read(describe) | of_server)

    async def snapshot(self, request: Request) -> Response:
        """Write a consistent copy of the index to the operator's folder."""
        served = self._served(request)
        folder = self._settings.snapshots
        parameters_of(request)
        if folder is None:
            raise RequestError(
                403,
                "This server writes no snapshots. Its operator can set a folder for them:"
                " --snapshots FOLDER.",
            )
        # The name has no part of the request, so a client cannot choose a path.
        name = f"{served.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        await served.snapshot(folder / name, _change(request, served, "snapshot"))
        return _answer({"snapshot": name}, 201)

    async def list_indexes(self, request: Request) -> Response:
        """List the names of the server's indexes."""
        parameters_of(request)
        return _answer(self._index_names(_caller_of(request)))

    async def openapi(self, request: Request) -> Response:
        """Get this document."""
        return _answer(document(Routes))

    # Shared by the handlers

    def _served(self, request: Request) -> Served:
        """Return the index that a request names, or the only one."""
        caller = _caller_of(request)
        name = request.path_params.get("index")
        if name is None and len(self.indexes) == 1:
            (name,) = self.indexes
        # Before the index is looked up, so that a key does not learn which others exist.
        if name is not None and not caller.may_use(name):
            raise RequestError(403, "This key does not permit the use of this index.")
        if name is not None and name in self.indexes:
            return self.indexes[name]
        sentence = "This server has no index with this name."
        if name is None:
            sentence = (
                "This server has several indexes: name one in the address, as in"
                " /v1/indexes/NAME/search."
            )
        raise RequestError(404, sentence, members=self._index_names(caller))

    def _index_names(self, caller: Caller) -> dict[str, list[str]]:
        return {"indexes": sorted(filter(caller.may_use, self.indexes))}

    @asynccontextmanager
    async def _body(self, request: Request, limits: Mapping[Kind, int]) -> AsyncIterator[Body]:
        """Context manager that yields a request's body; the deadline begins after its receipt."""
        with stage("read", 0):
            body = await self._memory.read(request, limits)
        try:
            async with self._deadline(request):
                yield body
        finally:
            self._memory.release(len(body.content))

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
            # The thread of a change runs on, because a write cannot be stopped half-way.
            if needed_role(request.method, request.url.path, keyed=True) != "read":
                sentence += (
                    " The change may or may not have been made; it is safe to send the request"
                    " again."
                )
            raise RequestError(503, sentence, "deadline") from None


async def _parsed(served: Served, body: Body, read: Callable[[Body], T]) -> T:
    """Return `read(body)`, which runs in a thread if the body is large."""
    if len(body.content) <= _PARSED_AT_ONCE_BYTES:
        return read(body)
    return await served.workers.searches.run(partial(read, body))


# URLs


class _AnyText(StringConvertor):
    """The type `any` of a path parameter: an id of any characters, slashes and line breaks too."""

    regex = "(?s:.+)"


register_url_convertor("any", _AnyText())


class NamedRoute(Route):
    """A route that records its pattern for metrics and the log.

    A pattern with an item's id is matched against the path before percent-decoding, so that `%2F`
    can be part of the id.
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
        sentence = "This address takes no query string (?…); send fields in the request's body."
        raise RequestError(400, sentence)
    parameters = dict(pairs)
    if unknown := [name for name in parameters if name not in known]:
        name = f"{unknown[0][:40]!a}"
        sentence = f"This address takes no parameter {name}. It takes: {', '.join(known)}."
        raise RequestError(400, sentence)
    if len(parameters) < len(pairs):
        raise RequestError(400, "The address contains a parameter twice.")
    return parameters


def _id_of(request: Request, *options: str) -> str:
    """Return the id of a request's item, from its path or from `?id=`."""
    if "id" in request.path_params:
        parameters_of(request, *options)
        return unquote(request.path_params["id"], errors="surrogateescape")
    id = parameters_of(request, "id", *options).get("id")
    if not id:
        raise RequestError(400, "The address names no item: add ?id= and the id, percent-encoded.")
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
    if name is None:
        return "/v1"
    return f"/v1/indexes/{name}"


def _change(
    request: Request,
    served: Served,
    what: str,
    ids: Sequence[str] = (),
    filter: Filter | None = None,
) -> Change:
    caller = _caller_of(request)
    return Change(
        what,
        served.name,
        request=request.scope["retrieval.request_id"],
        key=caller.name,
        role=caller.role,
        address=caller.address,
        ids=ids,
        filter=filter,
    )


# Responses


class _Picture(Response):
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


def _answer(content: bytes | object, status: int = 200) -> Response:
    """Return a JSON response; `content` is encoded JSON or a value to encode."""
    if not isinstance(content, bytes):
        content = to_json(content, inf_nan_mode="null")
    return Response(content, status, media_type="application/json")


def _chosen(metadata: Mapping[str, Any], names: list[str] | None) -> Mapping[str, Any]:
    if names is None:
        return metadata
    return {name: value for name, value in metadata.items() if name in names}


def _urls(served: Served, prefix: str, id: str, keep: str, path: Any) -> dict[str, str | None]:
    if not served.shows(keep, path):
        return {"image_url": None, "thumbnail_url": None}
    url = f"{prefix}/items/{quote(id, safe='')}"
    return {"image_url": f"{url}/image", "thumbnail_url": f"{url}/thumbnail"}


def _hit_json(hit: Hit, served: Served, prefix: str, names: list[str] | None) -> dict[str, Any]:
    """Return a hit as JSON, with the metadata fields in `names`, or all if it is `None`."""
    return {
        "id": hit.id,
        "key": hit.id,
        "label": hit.label,
        "distance": hit.distance,
        "score": hit.score,
        "metadata": _chosen(hit.metadata, names),
        **_urls(served, prefix, str(hit.id), hit.keep, hit.path),
    }


def _shows_drift(query: Query, answers: Sequence[Any]) -> bool:
    """Return whether the first hits are the items nearest to images, among all items."""
    question = query.question
    if question is not None and not replace(question, scores=False, facets=()).is_plain:
        return False
    if query.filter is not None or any(query.examples.values()) or isinstance(answers[0], Verdict):
        return False
    return any(input.image is not None for input in query.inputs)


def _result_json(
    answer: list[Hit] | Verdict, options: Any, served: Served, prefix: str
) -> dict[str, Any]:
    """Return the hits of a query, with facets if the options ask for some, or a verdict."""
    result: dict[str, Any] = {}
    hits: Sequence[Hit]
    if isinstance(answer, Verdict):
        result = {name: getattr(answer, name) for name in ("label", "rate", "second", "stale")}
        result["far"] = options.far
        hits = answer.hits
    else:
        hits = answer
    result["results"] = [_hit_json(hit, served, prefix, options.fields) for hit in hits]
    if isinstance(answer, NotedHits):
        result["search_id"] = answer.search_id
        if answer.credits:
            result["explored"] = True
    if getattr(options, "facets", None):
        assert isinstance(answer, Hits)
        result["facets"] = {
            name: [{"value": value, "count": count} for value, count in counts]
            for name, counts in answer.facets.items()
        }
    return result


def _item_json(
    served: Served, item: Item, prefix: str, names: list[str] | None = None
) -> dict[str, Any]:
    """Return an item as JSON; `names` as in `_hit_json`."""
    return {
        "id": item.id,
        "key": item.id,
        "label": item.label,
        "metadata": _chosen(item.metadata, names),
        "bytes": item.bytes,
        "sha256": (item.stamp or "").partition(" ")[0] if item.bytes is not None else None,
        "width": item.width,
        "height": item.height,
        "keep": item.keep,
        **_urls(served, prefix, item.id, item.keep, item.path),
    }


def _explanation() -> dict[str, Any]:
    """Return the `explain` member of a search: the durations of its stages so far."""
    trail = TRAIL.get() or Trail()
    return {"stages_ms": {name: round(1000 * time, 3) for name, time in trail.seconds.items()}}


def _description(served: Served, index: Index) -> dict[str, Any]:
    bundle = index.follow()
    stats = index.stats()
    manifest = bundle.manifest
    measured = index.calibration()
    calibration = None
    if measured is not None:
        calibration = {fact: getattr(measured, fact) for fact in _CALIBRATION}
        calibration["stale"] = measured.is_stale(index)
    return {
        "index": served.name,
        "identity": index.identity,
        "name": manifest.name,
        "items": len(index),
        "bundle": bundle.sha256,
        "input": {"kind": manifest.input.kind, "shape": list(manifest.input.shape)},
        "vector": manifest.vector,
        "distance": manifest.distance.name,
        "rescores": manifest.rescorer is not None,
        "text": bundle.takes_text or index.store.keeps_words(),
        "format": INDEX_FORMAT,
        "generation": index.generation.number,
        "generations": [
            {"number": entry.number, "state": entry.state, "bundle": entry.bundle}
            for entry in stats.generations
        ],
        "bytes": stats.bytes,
        "deleted": stats.details.get("deleted"),
        "calibration": calibration,
        "drift": served.drift.state(index.bundle.sha256, measured),
        **index.store.settings(),
    }


def _encoded_cursor(last: str) -> str:
    """Return the cursor of the page after the id or number `last`."""
    return base64.urlsafe_b64encode(last.encode()).decode()


def _decoded_cursor(cursor: str, newest: bool) -> str | int:
    """Return the id or number that a cursor encodes; raise a RequestError 400 without one."""
    try:
        last = base64.b64decode(cursor.encode("ascii"), b"-_", validate=True).decode()
    except ValueError:
        last = ""
    if newest and re.fullmatch("[0-9]{1,18}", last):
        return int(last)
    if newest or not last:
        raise RequestError(400, "This is not a cursor of this list. Omit it to start again.")
    return last
