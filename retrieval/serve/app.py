"""The HTTP application: routes, answers and errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrieval.errors import DataError, RetrievalError
from retrieval.serve.body import RequestError, read_query
from retrieval.serve.searcher import Searcher

_HEADERS = {
    # The page loads nothing from anywhere else, and nothing of it runs inside another page.
    "Content-Security-Policy": "default-src 'none'; img-src 'self' blob: data:; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}

Handler = Callable[[Request], Awaitable[Response]]


def create_app(searcher: Searcher) -> Starlette:
    """Return the application over a searcher, which it closes when it shuts down."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        first = asyncio.create_task(searcher.warm_up())
        try:
            yield
        finally:
            first.cancel()
            with suppress(BaseException):
                await first
            searcher.close()

    async def search(request: Request) -> Response:
        began = time.perf_counter()
        query = await read_query(request, searcher.limits.bytes)
        hits = await searcher.search(query, request.client.host if request.client else "")
        prefix = request.scope.get("root_path", "")
        results = [
            {
                "id": hit.id,
                "key": hit.key,
                "label": hit.label,
                "distance": hit.distance,
                "metadata": dict(hit.metadata),
                "image_url": f"{prefix}/v1/items/{hit.id}/image" if hit.path is not None else None,
            }
            for hit in hits
        ]
        return JSONResponse({"results": results, "took_ms": round((time.perf_counter() - began) * 1000, 2)})

    async def image(request: Request) -> Response:
        number = request.path_params["id"]
        if number >= len(searcher.index):
            raise RequestError(404, f"There is no item {number}.")
        tag = f'"{searcher.index.sha256[:16]}-{number}"'
        headers = {"Cache-Control": "no-cache", "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        picture = await searcher.picture(number, request.client.host if request.client else "")
        return Response(picture.content, media_type=picture.media_type, headers=headers)

    async def about(request: Request) -> Response:
        manifest = searcher.index.bundle.manifest
        return JSONResponse(
            {
                "name": manifest.name,
                "items": len(searcher.index),
                "input": {"kind": manifest.input.kind, "shape": list(manifest.input.shape)},
                "distance": manifest.distance.name,
                "limits": {"bytes": searcher.limits.bytes, "pixels": searcher.limits.pixels},
            }
        )

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(request: Request) -> Response:
        if searcher.ready:
            return JSONResponse({"status": "ready", "items": len(searcher.index)})
        return JSONResponse({"error": searcher.fault or "The first search has not been run yet."}, 503)

    routes = [
        Route("/v1/search", search, methods=["POST"]),
        Route("/v1/items/{id:int}/image", image),
        Route("/v1/index", about),
        Route("/v1/health/live", live),
        Route("/v1/health/ready", ready),
        *(Route(path, _static(*what)) for path, what in _PAGE.items()),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            HTTPException: _http_error,
            RetrievalError: _retrieval_error,
            ClientDisconnect: _gone,
            Exception: _our_fault,
        },
    )
    app.add_middleware(_Headers)
    return app


class _Headers:
    """Adds the security headers to every answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


def _static(name: str, media_type: str) -> Handler:
    content = files("retrieval.serve").joinpath(name).read_bytes()

    async def give(request: Request) -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

    return give


async def _http_error(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, HTTPException)
    sentences = {
        404: f"There is nothing at {request.url.path}.",
        405: f"{request.method} is not possible at {request.url.path}.",
    }
    sentence = sentences.get(fault.status_code, f"{fault.detail}.")
    return JSONResponse({"error": sentence}, fault.status_code, headers=fault.headers)


async def _retrieval_error(request: Request, fault: Exception) -> Response:
    if isinstance(fault, RequestError):
        headers = {"Retry-After": "1"} if fault.status == 503 else None
        return JSONResponse({"error": str(fault)}, fault.status, headers=headers)
    if isinstance(fault, DataError):  # the image or vector that was sent
        text = str(fault)
        return JSONResponse({"error": text[:1].upper() + text[1:]}, 422)
    return JSONResponse({"error": str(fault)}, 500)


async def _gone(request: Request, fault: Exception) -> Response:
    return JSONResponse({"error": "The connection was closed before the request was complete."}, 400)


async def _our_fault(request: Request, fault: Exception) -> Response:
    return JSONResponse({"error": "The server failed on this request; its log says why."}, 500)
