"""The HTTP application: middleware of every request, routes, and error handling."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from time import perf_counter
from typing import Any

from retrieval.base.plain import out_of_files
from retrieval.base.stages import TRAIL, Trail
from retrieval.errors import DataError
from retrieval.index.audit import Audit, AuditUnavailable, new_request_id
from retrieval.index.index import Index
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Router
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from retrieval_server.access import Access
from retrieval_server.keys import KeySource
from retrieval_server.monitoring import CONTENT_TYPE, METHODS, OTHER, Metrics, traced
from retrieval_server.problems import RequestError, busy, problem, report
from retrieval_server.readiness import Readiness
from retrieval_server.routes import NamedRoute, Routes
from retrieval_server.served import Served
from retrieval_server.settings import (
    DRAIN_SECONDS,
    GRACE_SECONDS,
    HEALTH,
    Settings,
    plain_address,
)
from retrieval_server.turns import Workers

log = logging.getLogger("retrieval_server")

_MAX_TEXT = 500
"""Maximum length of a reason or a path in the log."""
_KEYS_SECONDS = 0.5
"""Seconds between two checks whether the file of keys has changed."""
_PAGE = {
    "page.html": "text/html",
    "page.css": "text/css",
    **dict.fromkeys(("page.js", "page-part.js", "page-edit.js"), "text/javascript"),
}
_SENTENCES = {
    404: "There is nothing at this address.",
    405: "This address does not support this method.",
}
# The page loads nothing from other sites, and other sites can neither embed nor read it.
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; img-src 'self' blob: data:; style-src 'self'; script-src 'self';"
        b" connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_PARENT = re.compile(
    rb"(?!ff|00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)
"""A valid `traceparent`: no id is zero, and version 00 has exactly 55 characters."""


class Application:
    """The ASGI application of one server.

    Args:
        indexes: open indexes by name.
        settings: settings of the server.
        keys: source of API keys, or `None`.
        audit: record of changes, or `None`.
        reopen: functions by index name; each opens the index that is now at the served index's
            path.

    Attributes:
        ends_process: whether the process exits within `GRACE_SECONDS` of SIGTERM even if a thread
            hangs.
    """

    ends_process = False

    def __init__(
        self,
        indexes: Mapping[str, Index],
        settings: Settings | None = None,
        keys: KeySource | None = None,
        audit: Audit | None = None,
        reopen: Mapping[str, Callable[[], Index]] | None = None,
    ) -> None:
        self._settings = settings = settings or Settings()
        self._keys = keys
        self.workers = Workers(settings)
        self.served = {
            name: Served(name, index, settings, self.workers, audit, (reopen or {}).get(name))
            for name, index in indexes.items()
        }
        self.readiness = {name: Readiness(served) for name, served in self.served.items()}
        health = zip(HEALTH, (self._live, self._ready, self._show_metrics), strict=True)
        routes = [
            *Routes(self.served, settings).all(),
            *(NamedRoute(path, handler) for path, handler in health),
            *(_static(name, f"{kind}; charset=utf-8") for name, kind in _PAGE.items()),
        ]
        self._metrics = Metrics(self.served)
        self._access = Access(settings, keys)
        self._router = Router(routes, redirect_slashes=False, lifespan=self._lifespan)
        self._observed = traced(self._observe)
        if settings.proxies:
            trusted = list(settings.proxies)
            self._observed = ProxyHeadersMiddleware(self._observed, trusted_hosts=trusted)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request, or the lifespan of the server."""
        scope["app"] = self  # without it, the router would answer 404 and 405 itself
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        if scope.get("client"):
            scope["client"] = (plain_address(scope["client"][0]), scope["client"][1])
        await self._observed(scope, receive, send)

    async def _observe(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request: check access, answer errors, add headers, metrics and a log line."""
        began = perf_counter()
        trace = _trace_id(scope["headers"])
        trail = Trail(new_request_id(trace), scope.get("retrieval.has_left", bool))
        scope["retrieval.request_id"] = trail.id
        headers = [*_HEADERS, (b"x-request-id", trail.id.encode())]
        if trace:
            headers.append((b"traceparent", dict(scope["headers"])[b"traceparent"]))
        status = bytes_out = bytes_in = 0
        sending = began
        sentence = ""

        async def counted_receive() -> Any:
            nonlocal bytes_in
            message = await receive()
            bytes_in += len(message.get("body", b""))
            return message

        async def counted_send(message: Any) -> None:
            nonlocal status, bytes_out, sending
            if message["type"] == "http.response.start":
                status = message["status"]
                sending = perf_counter()
                message = {**message, "headers": [*message.get("headers", []), *headers]}
            bytes_out += len(message.get("body", b""))
            await send(message)

        token = TRAIL.set(trail)
        try:
            scope["retrieval.caller"] = self._access.admit(scope)
            await self._router(scope, counted_receive, counted_send)
        except (ClientDisconnect, TimeoutError):  # the client has left or reads too slowly
            pass
        except (Exception, asyncio.CancelledError) as error:
            refusal = _refusal_of(error)
            trail.reason = refusal.reason
            sentence = str(refusal)[:_MAX_TEXT]
            if not status:
                await problem(scope, refusal)(scope, counted_receive, counted_send)
        finally:
            TRAIL.reset(token)
            ended = perf_counter()
            if status:
                trail.note("send", ended - sending)
            if scope["method"] in METHODS:
                method = scope["method"]
            else:
                method = OTHER
            route = scope.get("retrieval.route") or self._route_of(scope)
            self._metrics.answered(trail, method, route, status, ended - began)
            if self._settings.log_format and not (route in HEALTH and status in (200, 503)):
                line = {
                    "method": method,
                    "route": route,
                    "status": status,
                    "ms": round(1000 * (ended - began), 2),
                    "bytes_in": bytes_in,
                    "bytes_out": bytes_out,
                    "reason": sentence,
                }
                if route == OTHER:
                    line["path"] = scope.get("raw_path", b"")[:_MAX_TEXT].decode("latin-1")
                _log(scope, trail, line, trace)

    def _route_of(self, scope: Any) -> str:
        """Return the pattern of a request that was refused before it reached the router."""
        for route in self._router.routes:
            match, child = route.matches(scope)
            if match is not Match.NONE:
                return str(child["retrieval.route"])
        return OTHER

    # Health

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        """Report whether all indexes can be searched, and if not, what is wrong."""
        states = {name: readiness.state() for name, readiness in self.readiness.items()}
        is_one = len(states) == 1
        members: dict[str, Any] = next(iter(states.values())) if is_one else {"indexes": states}
        for name, readiness in self.readiness.items():
            if reason := readiness.reason():
                if is_one:
                    sentence = reason
                else:
                    sentence = f"Index {name}: {reason}"
                if is_one:
                    shown = {"checks": members["checks"]}
                else:
                    shown = members
                raise RequestError(503, sentence, members=shown)
        return JSONResponse({"status": "ready", **members})

    async def _show_metrics(self, request: Request) -> Response:
        text = await self.workers.pictures.run(self._metrics.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    # Lifespan

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        watching = [readiness.watch() for readiness in self.readiness.values()]
        if self._keys is not None:
            watching.append(self._watch_keys(self._keys))
        tasks = [asyncio.create_task(watch) for watch in watching]
        if threading.current_thread() is threading.main_thread():
            # The server keeps running after a SIGHUP from a closing terminal or from logrotate.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Without `freeze`, each full garbage collection would block the event loop for 0.1 s.
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            if self.ends_process:  # Python would wait for a hanging thread
                timer = threading.Timer(GRACE_SECONDS - DRAIN_SECONDS - 1, os._exit, (0,))
                timer.daemon = True
                timer.start()
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            self.workers.close()

    async def _watch_keys(self, keys: KeySource) -> None:
        while True:
            await asyncio.sleep(_KEYS_SECONDS)
            with suppress(RequestError):
                await self.workers.pictures.run(keys.look)


def _log(scope: Any, trail: Trail, line: dict[str, Any], trace: str) -> None:
    """Log a finished request: the members of `line` and those below, if they have a value."""
    caller = scope.get("retrieval.caller")
    client = scope.get("client")
    optional = {
        "request_id": trail.id,
        "trace_id": trace,
        "key": caller.name if caller else None,
        "client": client[0] if client else None,
        "stages": {name: round(1000 * seconds, 2) for name, seconds in trail.seconds.items()},
    }
    members = (line | optional).items()
    line = {name: value for name, value in members if value not in (None, "", {})}
    log.info("request", extra={"request": line})


def _refusal_of(error: BaseException) -> RequestError:
    """Return the error response for an exception; log the exception if the server caused it."""
    if isinstance(error, AuditUnavailable):
        return RequestError(503, str(error), "audit")
    if isinstance(error, RequestError):
        return error
    if isinstance(error, DataError):  # the image, vector or item in the request is invalid
        text = str(error)
        return RequestError(422, text[:1].upper() + text[1:])
    if isinstance(error, HTTPException):
        sentence = _SENTENCES.get(error.status_code, f"{error.detail}.")
        return RequestError(error.status_code, sentence, headers=dict(error.headers or {}))
    if isinstance(error, asyncio.CancelledError):
        return RequestError(503, "The server is stopping. Try again in a moment.")
    report(error)
    if out_of_files(error):
        return busy("it has too many open files", "files")
    return RequestError(500, "The server failed to handle this request; its log says why.")


def _static(name: str, media_type: str) -> NamedRoute:
    content = files("retrieval_server").joinpath(name).read_bytes()

    async def respond(request: Request) -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

    return NamedRoute("/" if name == "page.html" else f"/{name}", respond)


def _trace_id(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the trace id of a single valid `traceparent` header (W3C), or an empty string."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) == 1:
        match = _PARENT.fullmatch(parents[0])
    else:
        match = None
    if match:
        return match[1].decode()
    return ""
