"""The HTTP application: which route leads where, and what faults become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from retrieval.serving.http.access.audit import Audit
from retrieval.serving.http.access.gate import Access
from retrieval.serving.http.budget import give_back
from retrieval.serving.http.front import Front, Routed
from retrieval.serving.http.monitoring import Monitoring
from retrieval.serving.http.originals import Originals
from retrieval.serving.http.routes.about import About
from retrieval.serving.http.routes.ids import ItemRoute
from retrieval.serving.http.routes.items import Items
from retrieval.serving.http.routes.many import Many
from retrieval.serving.http.routes.pictures import Pictures
from retrieval.serving.http.routes.searching import Searching
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.http.site import Served, Site
from retrieval.serving.http.writing import Writing

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


class Application(Starlette):
    """Starlette's application, behind one wrapper in the place of its middlewares.

    Attributes:
        routed: what answers behind everything that looks at a request first: for those that another process has let in.
        front: what looks at it first.
    """

    front: Front

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.routed = Routed(self)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or run from the server's start to its end."""
        await self.front(scope, receive, send)


def create_app(
    searchers: Searcher | Mapping[str, Searcher],
    monitoring: Monitoring | None = None,
    access: Access | None = None,
    audit: Audit | None = None,
    hand_on: HandOn | None = None,
) -> Application:
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

    app = Application(routes=every, lifespan=lifespan)
    app.router.redirect_slashes = False  # a redirect would repeat the Host that it was sent
    app.front = Front(app.routed, settings, access or Access(settings), monitoring.observer(every))
    app.state.readiness = next(iter(monitoring.readiness.values()))
    app.state.site = site
    return app


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
