"""The HTTP application: routes, answers and errors."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrieval.errors import DataError
from retrieval.serving.http.body import Body, Budget
from retrieval.serving.http.errors import Gone, RequestError
from retrieval.serving.http.guard import Guard
from retrieval.serving.http.monitoring import Monitoring
from retrieval.serving.http.pictures import PIECE, Picture
from retrieval.serving.http.problems import problem
from retrieval.serving.http.searcher import Searcher, number_of
from retrieval.serving.index.base import Hit
from retrieval.serving.index.frozen import FrozenIndex
from retrieval.serving.memory import Memory
from retrieval.serving.stages import current

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_LULL = 1.0  # seconds without a body that has gone
_SOME, _MUCH = 1_000_000, 16_000_000  # bytes of bodies gone: enough to give back in a lull, and at once
_SOON = 0.05  # seconds after which a request that is worked on is watched for its client's leaving


def create_app(searcher: Searcher, monitoring: Monitoring | None = None) -> Starlette:
    """Return the application over a searcher, whose settings it takes.

    Args:
        searcher: what answers; closing it is the caller's.
        monitoring: of that searcher; by default one that writes no log.
    """
    monitoring = monitoring or Monitoring(searcher)
    handlers = _Handlers(searcher, monitoring)
    routes = [
        *monitoring.routes,
        Route("/v1/search", handlers.search, methods=["POST"]),
        Route("/v1/items/{id:any}/image", handlers.image),
        Route("/v1/index", handlers.about),
        *(Route(path, _static(*what)) for path, what in _PAGE.items()),
    ]
    app = Starlette(
        routes=routes,
        lifespan=handlers.lifespan,
        middleware=[monitoring.observer(routes), Middleware(Guard, settings=searcher.settings)],
        exception_handlers={HTTPException: _http_error, RequestError: _request_error, DataError: _data_error},
    )
    app.router.redirect_slashes = False  # a redirect would repeat the Host that it was sent
    app.state.readiness = monitoring.readiness
    return app


class _Any(StringConvertor):
    """An item's id in an address: any characters, slashes and line breaks too."""

    regex = "(?s:.+)"


register_url_convertor("any", _Any())


class _Handlers:
    """What is done at each address."""

    def __init__(self, searcher: Searcher, monitoring: Monitoring) -> None:
        self._searcher = searcher
        self._settings = searcher.settings
        self._budget = Budget(searcher.settings.body_memory)
        self._monitoring = monitoring

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        work = [self._monitoring.readiness.watch(), give_back(self._budget)]
        tasks = [asyncio.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            self._monitoring.close()

    async def search(self, request: Request) -> Response:
        began = time.perf_counter()
        prefix = request.scope.get("root_path", "")
        client = _client(request)
        body = Body(request.headers, self._settings.max_bytes)

        def finish(hits: list[Hit]) -> bytes:
            return _answer(hits, self._searcher.gallery.shows, prefix, began)

        async def answer() -> bytes:
            if body.large:
                query = await self._searcher.searches.run(lambda job: body.query(), client)
            else:
                query = body.query()
            return await self._searcher.search(query, finish, client)

        with self._budget.upload() as upload:
            await body.read(request.receive, self._budget, upload, self._settings.body_seconds)
            return Response(await self._in_time(request, answer()), media_type="application/json")

    async def image(self, request: Request) -> Response:
        id, index, client = request.path_params["id"], self._searcher.index, _client(request)
        frozen = None
        if isinstance(index, FrozenIndex):  # nothing of it changes, so that its number is enough
            frozen = f"{index.sha256[:16]}-{number_of(id, index)}"
        if frozen is not None and _has(request, frozen):
            return Response(status_code=304, headers=_tagged(frozen))
        with ExitStack() as stack:
            upload = stack.enter_context(self._budget.upload())
            upload.arriving = False
            picture = await self._in_time(request, self._searcher.picture(id, client))
            tag = frozen or picture.tag
            if _has(request, tag):
                return Response(status_code=304, headers=_tagged(tag))
            if picture.content is not None or picture.media_type is None:
                self._budget.take(upload, picture.size)  # it is in memory until it is sent
            if picture.media_type is None:
                content = await self._in_time(request, self._searcher.shown(picture, client))
                self._budget.take(upload, len(content))
                return Pieces(_slices(content), len(content), "image/png", _tagged(tag), stack.pop_all())
            if picture.size <= PIECE:
                return Response(picture.first, media_type=picture.media_type, headers=_tagged(tag))
            pieces = self._pieces(picture, client)
            return Pieces(pieces, picture.size, picture.media_type, _tagged(tag), stack.pop_all())

    async def _pieces(self, picture: Picture, client: str) -> AsyncIterator[bytes]:
        yield picture.first
        sent = len(picture.first)
        while sent < picture.size:
            async with asyncio.timeout(self._settings.deadline):
                piece = await self._searcher.piece(picture, sent, client)
            yield piece
            sent += len(piece)

    async def _in_time(self, request: Request, work: Awaitable[T]) -> T:
        """Return what some work gives, within the deadline and as long as its client waits.

        Raises:
            RequestError: 503, the deadline has passed.
            Gone: the client has left.
        """
        task = asyncio.current_task()
        left = _Departure(request.receive, task)
        timer = asyncio.get_running_loop().call_later(_SOON, left.watch)
        try:
            async with asyncio.timeout(self._settings.deadline):
                return await work
        except TimeoutError:
            raise RequestError(
                503,
                f"The answer took longer than {self._settings.deadline:g} seconds. Try again in a moment.",
                "deadline",
            ) from None
        except asyncio.CancelledError:
            if not left.noticed:
                raise
            raise Gone from None
        finally:
            timer.cancel()
            left.stop()

    async def about(self, request: Request) -> Response:
        bundle, count = await self._in_time(request, self._searcher.state(_client(request)))
        manifest = bundle.manifest
        return JSONResponse(
            {
                "name": manifest.name,
                "items": count,
                "bundle": bundle.sha256,
                "input": {"kind": manifest.input.kind, "shape": list(manifest.input.shape)},
                "distance": manifest.distance.name,
                "limits": {"bytes": self._settings.max_bytes, "pixels": self._settings.max_pixels},
            }
        )


async def give_back(budget: Budget) -> None:
    """Give the memory of bodies that are gone back to the system, for ever: much of it soon, the rest in a lull.

    An exception and its frames are a cycle that may hold a body; collecting it can wait until nobody does.
    """
    memory, given, collected, last = Memory(), 0, 0, 0
    while True:
        await asyncio.sleep(_LULL)
        gone = budget.gone
        if gone == last and gone - collected > _SOME:
            gc.collect()
            memory.give_back()
            given = collected = gone
        elif gone - given > _MUCH:
            memory.give_back()
            given = gone
        last = gone


class Pieces(Response):
    """An answer that is made and sent piece by piece, no faster than its client takes it.

    Args:
        pieces: its content.
        size: of them all, in bytes.
        media_type: of the content.
        headers: besides.
        held: closed when the last piece is sent, or none will be.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        size: int,
        media_type: str,
        headers: Mapping[str, str],
        held: ExitStack | None = None,
    ) -> None:
        super().__init__(None, media_type=media_type, headers={**headers, "Content-Length": str(size)})
        self._pieces = pieces
        self._held = held or ExitStack()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        with self._held:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            if scope["method"] != "HEAD":
                async for piece in self._pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _slices(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE]


class _Departure:
    """Cancels a request's task when its client leaves."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], task: asyncio.Task[Any] | None) -> None:
        self._receive = receive
        self._task = task
        self._watch: asyncio.Task[None] | None = None
        self.noticed = False

    def watch(self) -> None:
        self._watch = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.noticed = True
        if self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


def _answer(hits: list[Hit], shows: Callable[[Hit], bool], prefix: str, began: float) -> bytes:
    """Return a search's answer as JSON; for a thread.

    Args:
        hits: what was found.
        shows: whether an item's image is offered.
        prefix: of the images' addresses.
        began: when the request came, by `time.perf_counter`.
    """
    results = [
        {
            "id": hit.id,
            "key": hit.key,
            "label": hit.label,
            "distance": hit.distance,
            "metadata": dict(hit.metadata),
            "image_url": f"{prefix}/v1/items/{quote(str(hit.id), safe='')}/image" if shows(hit) else None,
        }
        for hit in hits
    ]
    answer = {"results": results, "took_ms": round((time.perf_counter() - began) * 1000, 2)}
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _tagged(tag: str) -> dict[str, str]:
    return {"Cache-Control": "no-cache", "ETag": f'"{tag}"'}


def _has(request: Request, tag: str) -> bool:
    return request.headers.get("if-none-match") == f'"{tag}"'


def _client(request: Request) -> str:
    return request.client.host if request.client else ""


def _static(name: str, media_type: str) -> Handler:
    content = files("retrieval.serving.http").joinpath(name).read_bytes()

    async def give(request: Request) -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

    return give


async def _http_error(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    sentences = {
        404: "There is nothing at this address.",
        405: "This method is not possible at this address.",
    }
    sentence = sentences.get(fault.status_code, f"{fault.detail}.")
    return problem(request.scope, fault.status_code, sentence, fault.headers)


async def _request_error(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, RequestError)
    if (trail := current()) is not None:
        trail.reason = fault.reason
    fault.__traceback__ = None  # its frames hold the body, and through the job that failed, the fault
    return problem(request.scope, fault.status, str(fault))


async def _data_error(request: Request, fault: Exception) -> Response:
    """Answer for the image or vector that was sent."""
    fault.__traceback__ = None  # as above
    text = str(fault)
    return problem(request.scope, 422, text[:1].upper() + text[1:])
