"""The HTTP application: what happens to every request, and its log, metrics and traces.

A request passes the access control, its route and the handling of errors. When its response has
been sent, it is counted and logged.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import queue
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import entry_points
from importlib.resources import files
from logging.handlers import QueueHandler, QueueListener
from time import perf_counter
from types import MappingProxyType
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from retrieval.base.regular_files import out_of_files
from retrieval.base.timing import STAGES, TRAIL, Trail
from retrieval.errors import (
    DataError,
    MissingDependency,
    StoreError,
    printable,
    printable_json,
)
from retrieval.index.change_log import Audit, AuditUnavailable, new_request_id
from retrieval.index.index import Index
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Router
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from retrieval_server.access import Access, plain_address
from retrieval_server.drift import NearestDistances, read_calibration
from retrieval_server.feedback import Feedback
from retrieval_server.keys import KeySource
from retrieval_server.problems import RequestError, busy, problem, report
from retrieval_server.readiness import Readiness
from retrieval_server.routes import NamedRoute, Routes
from retrieval_server.served_index import Served, Workers
from retrieval_server.settings import DRAIN_SECONDS, GRACE_SECONDS, HEALTH, PAGE_FILES, Settings

log = logging.getLogger("retrieval_server")

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_OTHER = "other"
"""Label of unknown methods and routes: a client cannot make new labels in the metrics."""
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_TRACES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)
_WAITING_LINES = 10_000
_MAX_EVENT_TEXT = 2_000
"""Maximum length of a log line that is not of a request."""
_MAX_TEXT = 500
"""Maximum length of a reason or a path in the log."""
_KEYS_SECONDS = 0.5
"""Seconds between two checks whether the file of keys has changed."""
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
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
        feedback: feedback on the searches of indexes, by name.

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
        feedback: Mapping[str, Feedback] = MappingProxyType({}),
    ) -> None:
        self._settings = settings = settings or Settings()
        self._keys = keys
        self._feedback = feedback
        self.workers = Workers(settings)
        self.served = {}
        for name, index in indexes.items():
            labels = {"index": name} if len(indexes) > 1 else {}
            again = (reopen or {}).get(name)
            self.served[name] = Served(
                *(name, index, settings, self.workers, audit, again, labels, feedback.get(name))
            )
        self.readiness = {name: Readiness(served) for name, served in self.served.items()}
        health = zip(HEALTH, (self._live, self._ready, self._show_metrics), strict=True)
        routes = [
            *Routes(self.served, settings).all(),
            *(NamedRoute(path, handler) for path, handler in health),
            *(_static(path, name) for path, name in PAGE_FILES.items()),
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
        # Without this entry, the router would answer 404 and 405 itself, in plain text.
        scope["app"] = self
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        # Keys, logs and trusted proxies name IPv4 addresses in their usual form.
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
        except (ClientDisconnect, TimeoutError):
            # The client has left or reads too slowly.
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
            method = scope["method"]
            if method not in _METHODS:
                method = _OTHER
            route = scope.get("retrieval.route") or self._route_of(scope)
            self._metrics.answered(trail, method, route, status, ended - began)
            # Monitors ask every few seconds: their lines would hide the others.
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
                if route == _OTHER:
                    line["path"] = scope.get("raw_path", b"")[:_MAX_TEXT].decode("latin-1")
                _log(scope, trail, line, trace)

    def _route_of(self, scope: Any) -> str:
        """Return the pattern of a request that was refused before it reached the router."""
        for route in self._router.routes:
            match, child = route.matches(scope)
            if match is not Match.NONE:
                return str(child["retrieval.route"])
        return _OTHER

    # Health

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        """Report whether all indexes can be searched, and if not, what is wrong."""
        states = {name: readiness.state() for name, readiness in self.readiness.items()}
        reasons = {name: readiness.reason() for name, readiness in self.readiness.items()}
        failed = next((name for name, reason in reasons.items() if reason), None)
        if len(states) > 1:
            if failed is not None:
                sentence = f"Index {failed}: {reasons[failed]}"
                raise RequestError(503, sentence, members={"indexes": states})
            return JSONResponse({"status": "ready", "indexes": states})
        (state,) = states.values()
        if failed is not None:
            sentence = str(reasons[failed])
            raise RequestError(503, sentence, members={"checks": state["checks"]})
        return JSONResponse({"status": "ready", **state})

    async def _show_metrics(self, request: Request) -> Response:
        text = await self.workers.pictures.run(self._metrics.text)
        return Response(text, headers={"Content-Type": _CONTENT_TYPE})

    # Lifespan

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        watching = [readiness.watch() for readiness in self.readiness.values()]
        if self._keys is not None:
            watching.append(self._watch_keys(self._keys))
        tasks = [asyncio.create_task(watch) for watch in watching]
        # Python allows only the main thread to set a handler; in a notebook, a thread serves.
        if threading.current_thread() is threading.main_thread():
            # The server keeps running after a SIGHUP from a closing terminal or from logrotate.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Without `freeze`, each full garbage collection would block the event loop for 0.1 s.
        gc.collect()
        gc.freeze()
        for feedback in self._feedback.values():
            feedback.start()
        try:
            yield
        finally:
            # At its exit, Python waits for the threads of all pools, even for one that hangs.
            if self.ends_process:
                timer = threading.Timer(GRACE_SECONDS - DRAIN_SECONDS - 1, os._exit, (0,))
                timer.daemon = True
                timer.start()
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            self.workers.close()
            for feedback in self._feedback.values():
                feedback.close()

    async def _watch_keys(self, keys: KeySource) -> None:
        while True:
            await asyncio.sleep(_KEYS_SECONDS)
            with suppress(RequestError):
                await self.workers.pictures.run(keys.look)


def _refusal_of(error: BaseException) -> RequestError:
    """Return the error response for an exception; log the exception if the server caused it."""
    if isinstance(error, AuditUnavailable):
        return RequestError(503, str(error), "audit")
    if isinstance(error, RequestError):
        return error
    # The image, vector or item in the request is invalid.
    if isinstance(error, DataError):
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


def _static(path: str, name: str) -> NamedRoute:
    content = files("retrieval_server").joinpath(name).read_bytes()
    media_type = f"{_MEDIA_TYPES[name.rpartition('.')[2]]}; charset=utf-8"

    async def respond(request: Request) -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

    return NamedRoute(path, respond)


def _trace_id(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the trace id of a single valid `traceparent` header (W3C), or an empty string."""
    parents = [value for name, value in headers if name == b"traceparent"]
    # W3C: a receiver ignores a repeated header.
    if len(parents) == 1 and (match := _PARENT.fullmatch(parents[0])):
        return match[1].decode()
    return ""


# The log


class _Lines(QueueHandler):
    """Formats log lines; a thread writes them, so that a slow reader does not delay requests."""

    def __init__(self, form: str, names_process: bool) -> None:
        super().__init__(queue.Queue(_WAITING_LINES))
        self._form = _as_json if form == "json" else _as_text
        self._process = {"process": os.getpid()} if names_process else {}

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a line, or drop it if the queue is full."""
        with suppress(queue.Full):
            self.queue.put_nowait(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Replace a record's message with the whole formatted line."""
        fields: dict[str, Any] = dict(getattr(record, "request", None) or {})
        message = ""
        if not fields:
            message = " ".join(record.getMessage().split())[:_MAX_EVENT_TEXT]
            if record.exc_info and record.exc_info[0]:
                fields["traceback"] = logging.Formatter().formatException(record.exc_info)
            if (trail := TRAIL.get()) is not None:
                fields["request_id"] = trail.id
        record.msg = self._form(record, message, fields | self._process)
        record.args = record.exc_info = record.exc_text = None
        return record


def _as_json(record: logging.LogRecord, message: str, fields: dict[str, Any]) -> str:
    head = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": record.levelname}
    if message:
        head |= {"message": message, "logger": record.name}
    return printable_json({**head, **fields}, separators=(",", ":"))


def _as_text(record: logging.LogRecord, message: str, fields: dict[str, Any]) -> str:
    """Return `time INFO POST /v1/search 200 ms=3.1 …` with control characters escaped."""
    trace = fields.pop("traceback", None)
    stages = fields.pop("stages", {})
    words = [datetime.now().isoformat(" ", "milliseconds").replace(".", ","), record.levelname]
    words += [str(fields.pop(name)) for name in ("method", "route", "status") if name in fields]
    words += [message] if message else []
    words += [f"{name}={value}" for name, value in {**fields, **stages}.items()]
    line = printable(" ".join(" ".join(words).split()))
    if trace is None:
        return line
    return f"{line}\n{printable(trace)}"


def start_log(form: Literal["text", "json"], names_process: bool = False) -> QueueListener:
    """Start logging to standard error from a background thread.

    Args:
        form: "text" or "json".
        names_process: whether lines contain the process id.

    Returns:
        The listener; its method `stop` writes the remaining lines.
    """
    handler = _Lines(form, names_process)
    levels = {log.name: logging.INFO, "uvicorn.error": logging.ERROR, "asyncio": logging.ERROR}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
    # A fault in a form is the client's, and the response describes it.
    for name in ("python_multipart", "python_multipart.multipart"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    listener = QueueListener(handler.queue, logging.StreamHandler(sys.stderr))
    listener.start()
    return listener


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


# Metrics


class Metrics:
    """Prometheus metrics of one server and its indexes, in a separate registry."""

    def __init__(self, indexes: Mapping[str, Served]) -> None:
        self._has_siblings = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._registry = registry = CollectorRegistry()
        self._gauges = _Gauges(indexes)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"retrieval_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: Any = _SECONDS) -> Histogram:
            name = f"retrieval_{name}"
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._requests = counter("requests", "Requests answered.", "method", "route", "status")
        self._refused = counter(
            "refused", "Refused requests by reason, or by status if there is none.", "reason"
        )
        self._duration = histogram(
            "request_seconds", "Time from a request's header to the end of its response.", "route"
        )
        stages = histogram("stage_seconds", "Time of each stage, without nested stages.", "stage")
        self._stages = {name: stages.labels(name) for name in STAGES}
        texts = {"encode": "Images or features encoded at once.", "search": "Queries at once."}
        self._sizes = {
            name: histogram(f"{name}_batch", text, buckets=_BATCHES) for name, text in texts.items()
        }
        # Processes share their counters in files, but each has gauges of its own: `text` adds those
        # of the process that answers.
        if not self._has_siblings:
            registry.register(self._gauges)
            registry.register(NearestDistances(served.drift for served in indexes.values()))
            ProcessCollector(registry=registry)

    def answered(self, trail: Trail, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request; status 0 means that the client left before the response began."""
        self._requests.labels(method, route, str(status)).inc()
        self._duration.labels(route).observe(seconds)
        for stage, duration in trail.seconds.items():
            self._stages[stage].observe(duration)
        for stage, count in trail.batches:
            if count and stage in self._sizes:
                self._sizes[stage].observe(count)
        # To `/readyz`, "not ready" is an answer and not a refusal.
        if status >= 400 and (route, status) != ("/readyz", 503):
            self._refused.labels(trail.reason or str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's format; reads the disk, so call this in a thread."""
        registry = self._registry
        if self._has_siblings:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            registry.register(self._gauges)
            ProcessCollector(registry=registry)
        return generate_latest(registry)


class _Gauges(Collector):
    """Gauges, computed at each request of `/metrics` by the process that answers it."""

    def __init__(self, indexes: Mapping[str, Served]) -> None:
        self._indexes = indexes

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration does not compute the gauges."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""

        def gauge(name: str, text: str, **more: Any) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"retrieval_{name}", text, **more)

        workers = next(iter(self._indexes.values())).workers
        lengths = gauge("queue_length", "Jobs that wait for a thread.", labels=["queue"])
        for name in ("searches", "images", "pictures", "changes"):
            lengths.add_metric([name], getattr(workers, name).waiting)
        yield lengths
        pids = workers.decoders.pids
        yield gauge("decode_processes", "Decoding processes.", value=len(pids))
        labels = []
        if len(self._indexes) > 1:
            labels = ["index"]
        families = {
            name: gauge(f"index_{name}", text, labels=labels)
            for name, text in _INDEX_METRICS.items()
        }
        for index_name, served in self._indexes.items():
            # `Readiness` reports the error.
            with suppress(StoreError):
                with served.use() as index:
                    stats = index.stats()
                    drift = served.drift.state(index.bundle.sha256, read_calibration(index))
                values = {"items": stats.count, "bytes": stats.bytes}
                values["drifts"] = int(drift is not None and drift["warning"] is not None)
                for generation in stats.generations:
                    if generation.state == "served":
                        values["generation"] = generation.number
                        values["generations"] = len(stats.generations)
                for name, value in values.items():
                    if value is not None:
                        families[name].add_metric([index_name] if labels else [], value)
        yield from (family for family in families.values() if family.samples)


_INDEX_METRICS = {
    "items": "Number of items.",
    "bytes": "Size of the index on the disk.",
    "generation": "Number of the served generation.",
    "generations": "How many generations exist.",
    "drifts": "1 if many searches by image are unusually far from their nearest item, else 0.",
}


# Traces


def traced(app: Any) -> Any:
    """Wrap an application in OpenTelemetry's instrumentation if its variables name an exporter.

    OTEL_TRACES_EXPORTER names the exporter (`otlp`, `console`, `none`); if only an endpoint is set,
    the exporter is `otlp`. OpenTelemetry's SDK reads the variables of sampler, resource, headers
    and limits itself.

    Raises:
        MissingDependency: a package of the extra `otel`, or the exporter, is not installed.
        StoreError: the exporter cannot be set up.
    """
    variable = next(filter(os.environ.get, _TRACES), None)
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    name = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if variable is None or name == "none" or off:
        return app
    try:
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        group = "opentelemetry_traces_exporter"
        entry = {"otlp": "otlp_proto_http"}.get(name, name)
        (exporter,) = entry_points(group=group, name=entry)
    except (ImportError, ValueError):
        raise MissingDependency(
            f"{variable} requests traces by the exporter '{name}', which is not installed. Install"
            f" it with: pip install 'embedding-retrieval[otel]', or unset {variable}."
        ) from None
    provider = TracerProvider()
    try:
        provider.add_span_processor(BatchSpanProcessor(exporter.load()()))
    except Exception as error:
        raise StoreError(f"The trace exporter '{name}' cannot be set up: {error}") from None
    return OpenTelemetryMiddleware(
        app,
        tracer_provider=provider,
        exclude_spans=["receive", "send"],
        # By default a span is named by its path, which contains items' ids.
        default_span_details=lambda scope: (scope["method"], {}),
    )
