"""Monitoring of a server: log, metrics and traces."""

from __future__ import annotations

import logging
import os
import queue
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import entry_points
from logging.handlers import QueueHandler, QueueListener
from typing import TYPE_CHECKING, Any, Literal

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
from retrieval.base.stages import STAGES, TRAIL, Trail
from retrieval.errors import MissingDependency, StoreError, printable, printable_json

if TYPE_CHECKING:
    from retrieval_server.served import Served

LOG = "retrieval_server"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OTHER = "other"

_WAITING_LINES = 10_000
_MAX_TEXT = 2_000
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_TRACES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)


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
            message = " ".join(record.getMessage().split())[:_MAX_TEXT]
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
    levels = {LOG: logging.INFO, "uvicorn.error": logging.ERROR, "asyncio": logging.ERROR}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level)
    for name in ("python_multipart", "python_multipart.multipart"):  # the response has its message
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    listener = QueueListener(handler.queue, logging.StreamHandler(sys.stderr))
    listener.start()
    return listener


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
        if not self._has_siblings:
            registry.register(self._gauges)
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
        if status >= 400 and (route, status) != ("/readyz", 503):  # "not ready" is an answer
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
        if len(self._indexes) > 1:
            labels = ["index"]
        else:
            labels = []
        families = {
            name: gauge(f"index_{name}", text, labels=labels)
            for name, text in _INDEX_METRICS.items()
        }
        for index_name, served in self._indexes.items():
            with suppress(StoreError):  # `Readiness` reports the error
                with served.use() as index:
                    stats = index.stats()
                values = {"items": stats.count, "bytes": stats.bytes}
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
        default_span_details=lambda scope: (scope["method"], {}),  # paths contain items' ids
    )
