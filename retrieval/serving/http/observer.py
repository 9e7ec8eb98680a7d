"""What is noted of every request: its id, its stages, one line in the log, its figures, and its trace where there is one; and the headers of every answer."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from starlette.routing import BaseRoute, Route

from retrieval.serving.http.log import Log
from retrieval.serving.http.metrics import METHODS, OTHER, Metrics
from retrieval.serving.http.problems import REQUEST, new_request_id
from retrieval.serving.http.settings import HEALTH
from retrieval.serving.http.traces import Traces
from retrieval.serving.stages import Trail

KEY = "retrieval.key"
"""Where it has the name of the API key that was given, once it is known to be good."""

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


Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


def trace_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the trace's id of a request's `traceparent`, as W3C Trace Context 1 has it; empty where there is none that is valid."""
    given = [value for name, value in headers if name == b"traceparent"]
    found = _PARENT.fullmatch(given[0].decode("latin-1")) if len(given) == 1 else None
    if found is None:
        return ""
    version, trace, span, _, more = found.groups()
    if version == "ff" or (version == "00" and more) or not trace.strip("0") or not span.strip("0"):
        return ""
    return str(trace)


def patterns_of(routes: Sequence[BaseRoute]) -> dict[Any, str]:
    """Return the pattern of the addresses that each endpoint answers, by it and what it takes of the address: `/v1/items/{id}/image`."""
    found: dict[Any, str] = {}
    for route in routes:
        if isinstance(route, Route):
            found.setdefault(
                (route.endpoint, frozenset(route.param_convertors)), re.sub(r":\w+}", "}", route.path)
            )
    return found


class Observer:
    """Notes what there is to know of requests.

    Args:
        routes: the pattern of each endpoint; see `patterns_of`.
        metrics: counts.
        log: has a line for each request; None for no log. Monitors' have none.
        traces: None for none.
    """

    def __init__(
        self,
        routes: Mapping[Any, str],
        metrics: Metrics,
        log: Log | None = None,
        traces: Traces | None = None,
    ) -> None:
        self._routes = routes
        self._metrics = metrics
        self._log = log
        self._traces = traces

    def begin(self, scope: Any, receive: Receive, send: Send) -> Exchange:
        """Give a request its id; what it takes and is given passes through what this returns."""
        known = dict(scope["headers"])
        trace = trace_id(scope["headers"]) if b"traceparent" in known else ""
        trail = Trail(new_request_id(trace))
        headers = [*_HEADERS, (b"x-request-id", trail.id.encode())]
        if trace:
            headers.append((b"traceparent", known[b"traceparent"]))
        scope[REQUEST] = trail.id
        return Exchange(trail, receive, send, headers, trace, known)

    def finish(self, scope: Any, one: Exchange) -> None:
        """Note a request that is over."""
        ended = perf_counter()
        method = scope["method"] if scope["method"] in METHODS else OTHER
        route = self._routes.get((scope.get("endpoint"), frozenset(scope.get("path_params", ()))), OTHER)
        self._metrics.answered(one.trail, method, route, one.status, ended - one.began)
        monitored = route in HEALTH and one.status in (200, 503)  # the log has a line when readiness changes
        good = 0 < one.status < 400
        if self._log is not None and not monitored and self._log.room(good=good):
            client = scope.get("client")
            said = {
                "method": method,
                "route": route,
                "status": one.status or "left",
                "ms": round(1000 * (ended - one.began), 2),
                "bytes_in": one.taken,
                "bytes_out": one.given,
                "request_id": one.trail.id,
                "trace_id": one.trace,
                "key": scope.get(KEY),
                "client": client[0] if client else None,
                "reason": one.trail.reason,
                "stages": {stage: round(1000 * took, 2) for stage, took in one.trail.seconds().items()},
            }
            self._log.request(said, good=good)
        if self._traces is not None:
            attributes = {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": one.status,
                "retrieval.request_id": one.trail.id,
            }
            self._traces.finish(one.trail, scope["headers"], (one.began, ended), attributes)


class Exchange:
    """One request and its answer, as they pass.

    Args:
        trail: what is noted of it.
        receive: gives a part of the request.
        send: takes a part of the answer.
        headers: that the answer has, besides its own.
        trace: the id of the trace that it is part of; empty for none.
        known: the request's headers; of one that is repeated, the last.

    Attributes:
        trail: see above.
        trace: likewise.
        known: likewise.
        began: by `time.perf_counter`.
        status: of the answer; 0 until it has begun.
        taken: bytes of the request's body.
        given: bytes of the answer's.
    """

    __slots__ = (
        "_headers", "_receive", "_send", "_sending", "_whole", "began", "given", "known", "status", "taken", "trace", "trail",
    )  # fmt: skip

    def __init__(
        self,
        trail: Trail,
        receive: Receive,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        trace: str,
        known: Mapping[bytes, bytes],
    ) -> None:
        self.trail, self.trace, self.known = trail, trace, known
        self._receive, self._send, self._headers = receive, send, headers
        self.began = self._sending = perf_counter()
        self.status = self.taken = self.given = 0
        self._whole = False

    async def receive(self) -> Any:
        """Pass on a part of the request."""
        message = await self._receive()
        self.taken += len(message.get("body", b""))
        if self.taken and not self._whole and not message.get("more_body"):
            self._whole = True
            self.trail.note("read", self.began, perf_counter())
        return message

    async def send(self, message: Any) -> None:
        """Pass on a part of the answer."""
        if message["type"] == "http.response.start":
            self.status, self._sending = message["status"], perf_counter()
            await self._send({**message, "headers": [*message.get("headers", []), *self._headers]})
            return
        self.given += len(message.get("body", b""))
        await self._send(message)
        if not message.get("more_body"):
            self.trail.note("send", self._sending, perf_counter())
