"""The HTTP application: which route leads where, and what faults become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from retrieval.errors import DataError
from retrieval.serving.http.access.audit import Audit
from retrieval.serving.http.access.cors import cross_origin
from retrieval.serving.http.access.gate import Access, Gate
from retrieval.serving.http.budget import give_back
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.guard import Guard
from retrieval.serving.http.monitoring import Monitoring
from retrieval.serving.http.originals import Originals
from retrieval.serving.http.problems import problem
from retrieval.serving.http.routes.about import About
from retrieval.serving.http.routes.ids import ItemRoute
from retrieval.serving.http.routes.items import Items
from retrieval.serving.http.routes.many import Many
from retrieval.serving.http.routes.pictures import Pictures
from retrieval.serving.http.routes.searching import Searching
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.http.site import Served, Site
from retrieval.serving.http.writing import Writing
from retrieval.serving.stages import current

Handler = Callable[[Request], Awaitable[Response]]
HandOn = Callable[[float | None], Response]

_PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{
        f"/{name}": (name, "text/javascript; charset=utf-8")
        for name in ("page.js", "page-part.js", "page-edit.js")
    },
}


def create_app(
    searchers: Searcher | Mapping[str, Searcher],
    monitoring: Monitoring | None = None,
    access: Access | None = None,
    audit: Audit | None = None,
    hand_on: HandOn | None = None,
) -> Starlette:
    """Return the application over one or more searchers of the same settings.

    Args:
        searchers: what answers, by the name of its index; closing them is the caller's.
        monitoring: of those searchers; by default one that writes no log.
        access: who may do what; by default what the settings let everybody do.
        audit: where changes are recorded; None for nowhere.
        hand_on: gives the answer to a change that another process makes; None: this one makes them.
    """
    named = {"index": searchers} if isinstance(searchers, Searcher) else searchers
    settings = next(iter(named.values())).settings
    monitoring = monitoring or Monitoring(named)
    watch, close = monitoring.watch, monitoring.close
    site = Site(
        {name: Served(name, one, Originals(one), Writing(one, name, audit)) for name, one in named.items()},
        settings,
        audit,
    )
    every = [
        *monitoring.routes,
        *routes(site, hand_on),
        *(Route(path, _static(*what)) for path, what in _PAGE.items()),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(watch()), asyncio.create_task(give_back(site.budget))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            close()

    app = Starlette(
        routes=every,
        lifespan=lifespan,
        middleware=[
            monitoring.observer(every),
            Middleware(Guard, settings=settings),
            *cross_origin(settings.cors_origins),
            Middleware(Gate, access=access or Access(settings)),
        ],
        exception_handlers=FAULTS,
    )
    app.router.redirect_slashes = False  # a redirect would repeat the Host that it was sent
    app.state.readiness = next(iter(monitoring.readiness.values()))
    app.state.site = site
    return app


def inside(app: Starlette) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """Return what answers behind everything that looks at a request first: for those that another process has let in."""
    routed = ExceptionMiddleware(app.router, handlers=FAULTS)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await routed({**scope, "app": app}, receive, send)

    return answer


def routes(site: Site, hand_on: HandOn | None = None) -> list[BaseRoute]:
    """Return the routes of /v1: those of an index come with its name in the address, and without."""
    searching, items, many = Searching(site), Items(site), Many(site)
    pictures, about = Pictures(site), About(site)
    deadline = site.settings.deadline
    put, delete, add, remove = (
        _elsewhere(each, hand_on, site.settings.body_seconds + 2 * deadline)
        for each in (items.put, items.delete, many.add, many.delete)
    )
    snapshot = _elsewhere(about.snapshot, hand_on, None)
    own: list[BaseRoute] = [
        Route("/v1/indexes", about.indexes),
        Route("/v1/openapi.json", about.openapi),
    ]
    for prefix in ("/v1", "/v1/indexes/{index}"):
        own += [
            Route(f"{prefix}/search", searching.search, methods=["POST"]),
            Route(f"{prefix}/search/batch", searching.batch, methods=["POST"]),
            Route(f"{prefix}/index", about.index),
            Route(f"{prefix}/items", many.list),
            Route(f"{prefix}/items", add, methods=["POST"]),
            Route(f"{prefix}/delete", remove, methods=["POST"]),
            Route(f"{prefix}/snapshots", snapshot, methods=["POST"]),
            Route(f"{prefix}/item/image", pictures.image),
            Route(f"{prefix}/item/thumbnail", pictures.thumbnail),
            Route(f"{prefix}/item", items.get),
            Route(f"{prefix}/item", put, methods=["PUT"]),
            Route(f"{prefix}/item", delete, methods=["DELETE"]),
            ItemRoute(f"{prefix}/items/{{id:any}}/image", pictures.image),
            ItemRoute(f"{prefix}/items/{{id:any}}/thumbnail", pictures.thumbnail),
            ItemRoute(f"{prefix}/items/{{id:any}}", items.get),
            ItemRoute(f"{prefix}/items/{{id:any}}", put, methods=["PUT"]),
            ItemRoute(f"{prefix}/items/{{id:any}}", delete, methods=["DELETE"]),
        ]
    return own


def _elsewhere(handler: Handler, hand_on: HandOn | None, seconds: float | None) -> Handler:
    """Return what answers a change: the handler, or another process within some seconds."""
    if hand_on is None:
        return handler

    async def handed_on(request: Request) -> Response:
        return hand_on(seconds)

    return handed_on


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
    return problem(request.scope, fault.status, str(fault), fault.headers, fault.more)


async def _data_error(request: Request, fault: Exception) -> Response:
    """Answer for the image or vector that was sent."""
    fault.__traceback__ = None  # as above
    text = str(fault)
    return problem(request.scope, 422, text[:1].upper() + text[1:])


FAULTS: dict[Any, Any] = {HTTPException: _http_error, RequestError: _request_error, DataError: _data_error}
"""What faults become."""
