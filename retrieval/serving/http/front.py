"""What every request passes on its way in, and its answer on its way out: one wrapper, since each of its own costs as much as reading a small request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from retrieval.errors import DataError
from retrieval.serving.http.access.cors import cross_origin
from retrieval.serving.http.access.gate import Access
from retrieval.serving.http.errors import CROWDED, Gone, RequestError
from retrieval.serving.http.guard import Guard, report
from retrieval.serving.http.leaving import LEAVING
from retrieval.serving.http.observer import Observer
from retrieval.serving.http.problems import problem
from retrieval.serving.http.settings import Settings
from retrieval.serving.stages import current, following

App = Callable[[Any, Any, Any], Awaitable[None]]

_SENTENCES = {404: "There is nothing at this address.", 405: "This method is not possible at this address."}


class Front:
    """Answers requests: observed, by hosts that are served, of those who may ask.

    Args:
        app: answers what is let in; and what is no request, such as the server's start.
        settings: limits.
        access: who may do what.
        observer: notes it all.
    """

    def __init__(self, app: App, settings: Settings, access: Access, observer: Observer) -> None:
        self._app = app
        self._guard = Guard(settings)
        self._debug = settings.debug
        self._access = access
        self._observer = observer
        self._of_any_origin = cross_origin(self._admitted, settings.cors_origins)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        one = self._observer.begin(scope, receive, send)
        with following(one.trail):
            try:
                refused = self._guard.refusal(scope, one.known)
                await (refused or self._of_any_origin)(scope, one.receive, one.send)
            except Gone:
                pass
            except asyncio.CancelledError:  # the server's end: its grace is over
                if not one.status:
                    sentence = "The server is stopping. Try again in a moment."
                    await problem(scope, 503, sentence, {"Connection": "close"})(scope, one.receive, one.send)
            except Exception as fault:
                report(fault, self._debug)
                if not one.status:  # nothing can be added to half an answer: uvicorn cuts the connection
                    failed = problem(scope, 500, "The server failed on this request; its log says why.")
                    await failed(scope, one.receive, one.send)
            finally:
                self._observer.finish(scope, one)

    async def _admitted(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request whose sender may send it; what it takes and gives is counted where there are limits."""
        if self._access.is_free(scope):
            await self._app(scope, receive, send)
            return
        try:
            use = self._access.admit(scope)
        except RequestError as fault:
            await told(scope, fault)(scope, receive, send)
            return
        if use is None:
            await self._app(scope, receive, send)
            return

        async def counted_receive() -> Any:
            message = await receive()
            use.spend(len(message.get("body", b"")))
            return message

        async def counted_send(message: Any) -> None:
            use.spend(len(message.get("body", b"")))
            await send(message)

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            use.close()


class Routed:
    """Answers requests by their routes, and says what is wrong with those that fail.

    Args:
        app: whose. A route whose address has no parameters is found by that alone.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._endpoints = {
            (method, route.path): route.endpoint
            for route in app.routes
            if isinstance(route, Route) and not route.param_convertors
            for method in route.methods or ()
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or what is none."""
        scope["app"], router = self._app, self._app.router
        if scope["type"] != "http":
            await router(scope, receive, send)
            return
        endpoint = None if scope.get("root_path") else self._endpoints.get((scope["method"], scope["path"]))
        try:
            if endpoint is None:
                await router(scope, receive, send)
                return
            scope["endpoint"], scope["path_params"] = endpoint, {}
            answer = await endpoint(Request(scope, receive))
            await answer(scope, receive, send)
        except (HTTPException, DataError, RequestError) as fault:
            answer = told(scope, fault)
            fault.__traceback__ = None  # its frames hold the body, and through the job that failed, the fault
            await answer(scope, receive, send)


def told(scope: Any, fault: HTTPException | DataError | RequestError) -> Response:
    """Return what the sender of a request is told of its fault."""
    if isinstance(fault, HTTPException):
        sentence = _SENTENCES.get(fault.status_code, f"{fault.detail}.")
        return problem(scope, fault.status_code, sentence, fault.headers)
    if isinstance(fault, DataError):  # of the image or vector that was sent
        text = str(fault)
        return problem(scope, 422, text[:1].upper() + text[1:])
    if (trail := current()) is not None:
        trail.reason = fault.reason
    if fault.reason == CROWDED and (leaving := scope.get(LEAVING)) is not None:
        leaving.crowded = True
    return problem(scope, fault.status, str(fault), fault.headers, fault.more)
