"""The HTTP application: what every request passes, which route leads where, and what faults become."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from importlib.resources import files
from time import perf_counter
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from retrieval.errors import DataError
from retrieval.serving.http.access import Access
from retrieval.serving.http.audit import Audit
from retrieval.serving.http.keys import KeySource
from retrieval.serving.http.listening import plain_address
from retrieval.serving.http.monitoring import CONTENT_TYPE, METHODS, OTHER, Metrics, Traces
from retrieval.serving.http.problems import RequestError, new_request_id, problem, report
from retrieval.serving.http.readiness import Readiness
from retrieval.serving.http.routes import Routes
from retrieval.serving.http.served import Served
from retrieval.serving.http.settings import HEALTH, Settings
from retrieval.serving.http.turns import Workers
from retrieval.serving.index.index import Index
from retrieval.serving.stages import Trail, current, following

log = logging.getLogger("retrieval.serving.http")

_KEYS_SECONDS = 0.5
_PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{
        f"/{name}": (name, "text/javascript; charset=utf-8")
        for name in ("page.js", "page-part.js", "page-edit.js")
    },
}
_SENTENCES = {404: "There is nothing at this address.", 405: "This method is not possible at this address."}
# The page loads nothing from anywhere else, and nothing of it runs inside or is read by another page.
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; img-src 'self' blob: data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Application:
    """One server's ASGI application.

    Args:
        indexes: opened, by name.
        settings: limits.
        keys: of callers; None: there are none.
        audit: the record of changes; None for none.
        traces: None for none.
        reopen: opens the index that lies in a folder by now, by the index's name.

    Attributes:
        routes: of all addresses.
        served: the indexes, by name.
        readiness: of each.
    """

    def __init__(
        self,
        indexes: Mapping[str, Index],
        settings: Settings | None = None,
        keys: KeySource | None = None,
        audit: Audit | None = None,
        traces: Traces | None = None,
        reopen: Mapping[str, Callable[[], Index]] | None = None,
    ) -> None:
        self._settings = settings = settings or Settings()
        self._keys, self._audit, self._traces = keys, audit, traces
        self.workers = Workers(settings)
        self.served = {
            name: Served(name, index, settings, self.workers, audit, (reopen or {}).get(name))
            for name, index in indexes.items()
        }
        self.readiness = {name: Readiness(served) for name, served in self.served.items()}
        health = zip(HEALTH, (self._live, self._ready, self._show_metrics), strict=True)
        self.routes: list[BaseRoute] = [
            *Routes(self.served, settings).all(),
            *(Route(path, handler) for path, handler in health),
            *(Route(path, _static(*page)) for path, page in _PAGE.items()),
        ]
        self._patterns = {
            (route.endpoint, frozenset(route.param_convertors)): re.sub(r":\w+}", "}", route.path)
            for route in reversed(self.routes)
            if isinstance(route, Route)
        }
        self._metrics = Metrics(self.served, self._patterns.values())
        self._access = Access(settings, keys)
        self._is_served = lru_cache(64)(self._is_our_name)
        self._router = Router(self.routes, redirect_slashes=False, lifespan=self._lifespan)
        self._observed: Any = self._observe if traces is None else traces.around(self._observe)
        if settings.proxies:
            self._observed = ProxyHeadersMiddleware(self._observed, trusted_hosts=list(settings.proxies))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or run from the server's start to its end."""
        scope["app"] = self
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        if scope.get("client"):
            scope["client"] = (plain_address(scope["client"][0]), scope["client"][1])
        await self._observed(scope, receive, send)

    async def _observe(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, with its id and its line in the log; nothing that it does fails the server."""
        began, headers = perf_counter(), dict(scope["headers"])
        trace = _trace_id(scope["headers"])
        trail = Trail(new_request_id(trace))
        scope["retrieval.request_id"] = trail.id
        own = [*_HEADERS, (b"x-request-id", trail.id.encode())]
        if trace:
            own.append((b"traceparent", headers[b"traceparent"]))
        status = given = taken = 0
        sending = began

        async def counted_receive() -> Any:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            return message

        async def counted_send(message: Any) -> None:
            nonlocal status, given, sending
            if message["type"] == "http.response.start":
                status, sending = message["status"], perf_counter()
                if self._traces is not None:  # the instrumentation ends the span with the answer
                    self._traces.begin(trail, scope["method"], self._route(scope))
                message = {**message, "headers": [*message.get("headers", []), *own]}
            given += len(message.get("body", b""))
            await send(message)

        with following(trail):
            try:
                await self._admit(scope, counted_receive, counted_send, headers)
            except (ClientDisconnect, TimeoutError):  # nobody waits for the answer, or takes it
                pass
            except BaseException as error:
                stopping = isinstance(error, asyncio.CancelledError)
                if not stopping:
                    report(error)
                if not status:
                    sentence = "The server failed on this request; its log says why."
                    refusal = RequestError(500, sentence)
                    if stopping:
                        refusal = RequestError(503, "The server is stopping. Try again in a moment.")
                    await problem(scope, refusal)(scope, counted_receive, counted_send)
                if not isinstance(error, Exception) and not stopping:
                    raise
            finally:
                ended = perf_counter()
                if status:
                    trail.note("send", sending, ended)
                method = scope["method"] if scope["method"] in METHODS else OTHER
                route = self._route(scope)
                self._metrics.answered(trail, method, route, status, ended - began)
                if self._traces is not None:
                    self._traces.finish(trail)
                if self._settings.log_format and not (route in HEALTH and status in (200, 503)):
                    said = {"ms": round(1000 * (ended - began), 2), "bytes_in": taken, "bytes_out": given}
                    self._log(
                        scope, trail, {"method": method, "route": route, "status": status, **said}, trace
                    )

    @staticmethod
    def _log(scope: Any, trail: Trail, said: dict[str, Any], trace: str) -> None:
        """Write the line of a request that is over."""
        caller, client = scope.get("retrieval.caller"), scope.get("client")
        known = {
            "request_id": trail.id,
            "trace_id": trace,
            "key": caller.name if caller else None,
            "client": client[0] if client else None,
            "reason": trail.reason,
            "stages": {name: round(1000 * each, 2) for name, each in trail.seconds().items()},
        }
        said |= {name: value for name, value in known.items() if value not in (None, "", {})}
        log.info("request", extra={"request": said})

    def _route(self, scope: Any) -> str:
        """Return the pattern of a request's address."""
        key = (scope.get("endpoint"), frozenset(scope.get("path_params", ())))
        return self._patterns.get(key, OTHER)

    async def _admit(self, scope: Any, receive: Any, send: Any, headers: Mapping[bytes, bytes]) -> None:
        """Answer a request for a host that is served, whose sender may send it."""
        try:
            self._refuse_strangers(scope, headers)
            authorization = [value for name, value in scope["headers"] if name == b"authorization"]
            scope["retrieval.caller"] = self._access.admit(scope, authorization)
            await self._router(scope, receive, send)
        except HTTPException as error:
            refusal = RequestError(
                error.status_code,
                _SENTENCES.get(error.status_code, f"{error.detail}."),
                headers=dict(error.headers or {}),
            )
        except DataError as error:  # of the image, vector or item that was sent
            text = str(error)
            refusal = RequestError(422, text[:1].upper() + text[1:])
        except RequestError as error:
            refusal = error
        else:
            return
        if (trail := current()) is not None:
            trail.reason = refusal.reason
        await problem(scope, refusal)(scope, receive, send)

    def _refuse_strangers(self, scope: Any, headers: Mapping[bytes, bytes]) -> None:
        """Refuse requests for other hosts and of other sites' pages.

        Raises:
            RequestError: 400, 403, 404 or 421.
        """
        close = {"Connection": "close"}
        host = headers.get(b"host", b"").decode("latin-1")
        if not host and scope["http_version"] == "1.1":
            raise RequestError(400, "The request has no Host.", headers=close)
        on_health_port = (
            self._settings.health_port is not None and scope["server"][1] == self._settings.health_port
        )
        if on_health_port:  # for monitors, by whatever name they know the machine: it shows no item
            if scope["path"] not in HEALTH:
                raise RequestError(404, f"This port answers {', '.join(HEALTH)} only.", headers=close)
            return
        if host and not self._is_served(host):
            sentence = (
                "The server does not answer for this host name. Its operator can add names with --allow-host."
            )
            raise RequestError(421, sentence, headers=close)
        if scope["method"] in ("GET", "HEAD"):
            return
        origin = headers.get(b"origin")
        foreign = headers.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none")
        if origin is not None and not foreign:
            where = origin.decode("latin-1").partition("://")[2]
            foreign = where.lower() != host.lower() and _name(where) not in (self._settings.hosts or ())
        if foreign:
            raise RequestError(403, "The request comes from another site's page.", headers=close)

    def _is_our_name(self, host: str) -> bool:
        """Return whether the server answers for a Host; a page that rebinds a name of its own has no address to use."""
        known, name = self._settings.hosts, _name(host)
        return known is None or name in known or name == "localhost" or _is_address(name)

    # Health

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        """Say whether all indexes can be searched, and what is wrong with which."""
        found: dict[str, dict[str, Any]] = {}
        for name, one in self.readiness.items():
            fallback = {"fallback": one.fallback} if one.fallback else {}
            found[name] = {"items": one.items, "bundle": one.bundle, **fallback, "checks": one.checks()}
        several = len(found) > 1
        members: dict[str, Any] = {"indexes": found} if several else next(iter(found.values()))
        for name, one in self.readiness.items():
            if reason := one.reason():
                told = members if several else {"checks": members["checks"]}
                raise RequestError(503, f"Index {name}: {reason}" if several else reason, members=told)
        return JSONResponse({"status": "ready", **members})

    async def _show_metrics(self, request: Request) -> Response:
        text = await self.workers.pictures.run(self._metrics.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    # From start to end

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        watching: list[Awaitable[None]] = [each.watch() for each in self.readiness.values()]
        if self._keys is not None:
            watching.append(self._watch_keys(self._keys))
        tasks = [asyncio.ensure_future(each) for each in watching]
        if os.name == "posix" and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._read_again)
        # looking through what is there for garbage would keep the event loop from its clients for a tenth of a second
        gc.collect()
        gc.freeze()
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            self.close()

    def close(self) -> None:
        """Begin nothing any more."""
        self.workers.close()
        if self._traces is not None:
            self._traces.close()

    async def _watch_keys(self, keys: KeySource) -> None:
        while True:
            await asyncio.sleep(_KEYS_SECONDS)
            with suppress(RequestError):
                await self.workers.pictures.run(keys.look)

    def _read_again(self) -> None:
        if self._audit is not None:
            self._audit.reopen()


def _static(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("retrieval.serving.http").joinpath(name).read_bytes()

    async def give(request: Request) -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

    return give


def _name(host: str) -> str:
    """Return a Host's name without its port, lower case, without the dot at its end."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _trace_id(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the trace's id of a valid `traceparent`, as W3C Trace Context 1 has it; empty where there is none."""
    given = [value for name, value in headers if name == b"traceparent"]
    found = _PARENT.fullmatch(given[0]) if len(given) == 1 else None
    if found is None:
        return ""
    version, trace, span, _, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace.strip(b"0") or not span.strip(b"0"):
        return ""
    return trace.decode()
