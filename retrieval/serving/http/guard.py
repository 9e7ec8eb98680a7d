"""What every request passes: hosts, other sites' pages, headers of the answer, and faults of our own."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from retrieval.errors import StoreError
from retrieval.serving.http.errors import Gone, RequestError
from retrieval.serving.http.problems import problem, request_id
from retrieval.serving.http.settings import HEALTH, Settings
from retrieval.serving.stores.contract import StoreUnavailable

log = logging.getLogger("retrieval.serving.http")

UNREACHABLE = (
    "The store of this index cannot be reached now. Nothing is known to be damaged: try again in a moment."
)

_HEADERS = [
    (name.encode(), value.encode())
    for name, value in {
        # The page loads nothing from anywhere else, and nothing of it runs inside or is read by another page.
        "content-security-policy": "default-src 'none'; img-src 'self' blob: data:; style-src 'self'; "
        "script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "cross-origin-resource-policy": "same-origin",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }.items()
]


class Guard:
    """Wraps the application: refuses before it, and answers for it when it fails.

    Args:
        app: the application.
        settings: which hosts are served, and whether the log holds tracebacks.
    """

    def __init__(self, app: Any, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, own = False, [*_HEADERS, (b"x-request-id", request_id(scope).encode())]

        async def with_headers(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        refused = self._refusal(scope)
        try:
            await (self._app if refused is None else refused)(scope, receive, with_headers)
        except Gone:
            pass
        except asyncio.CancelledError:  # the server's end: its grace is over
            if not started:
                stopping = _error(scope, 503, "The server is stopping. Try again in a moment.")
                await stopping(scope, receive, with_headers)
        except Exception as fault:
            report(fault, self._settings.debug)
            if started:
                return  # nothing sensible can be added to half an answer: uvicorn cuts the connection
            failed = problem(scope, 500, "The server failed on this request; its log says why.")
            await failed(scope, receive, with_headers)

    def _refusal(self, scope: Any) -> Response | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if not host and scope.get("http_version") == "1.1":
            return _error(scope, 400, "The request has no Host.")
        if host and not self._knows(_name(host)):
            return _error(
                scope,
                421,
                "The server does not answer for this host name. Its operator can add names with --allow-host.",
            )
        port = (scope.get("server") or ("", None))[1]
        if port is not None and port == self._settings.health_port and scope["path"] not in HEALTH:
            return _error(scope, 404, f"This port answers {', '.join(HEALTH)} only.")
        if scope["method"] not in ("GET", "HEAD") and self._is_foreign(headers, host):
            return _error(scope, 403, "The request comes from another site's page.")
        return None

    def _knows(self, name: str) -> bool:
        """Whether the server answers for a name. A page that rebinds a name of its own has no address to use."""
        known = self._settings.hosts
        return known is None or name in known or name == "localhost" or _is_address(name)

    def _is_foreign(self, headers: Mapping[str, str], host: str) -> bool:
        origin = headers.get("origin")
        if origin in self._settings.cors_origins:
            return False
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return True
        if origin is None:
            return False
        where = origin.partition("://")[2]
        return where.lower() != host.lower() and _name(where) not in (self._settings.hosts or ())


def report(fault: BaseException, debug: bool) -> None:
    """Write one line about a fault of our own; with its traceback only for those who look for it."""
    code = fault.__traceback__
    while code is not None and code.tb_next is not None:
        code = code.tb_next
    where = f" ({code.tb_frame.f_code.co_filename}:{code.tb_lineno})" if code is not None else ""
    text = str(fault)[:200].encode("unicode_escape").decode()
    log.error("%s: %s%s", type(fault).__name__, text, where, exc_info=fault if debug else None)


def store_failed(fault: StoreError, sentence: str, reason: str, debug: bool) -> RequestError:
    """Write about a fault of an index's store, and return what the client is told: `sentence`, unless it cannot be reached now."""
    report(fault, debug)
    if isinstance(fault, StoreUnavailable):
        return RequestError(503, UNREACHABLE, "unreachable")
    return RequestError(503, sentence, reason)


def _error(scope: Any, status: int, sentence: str) -> Response:
    return problem(scope, status, sentence, {"Connection": "close"})


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
