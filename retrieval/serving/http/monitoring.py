"""Monitoring of a server: log, metrics and traces."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import time
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

from retrieval.errors import MissingDependency, StoreError, printable
from retrieval.serving.stages import STAGES, TRAIL, Trail

if TYPE_CHECKING:
    from retrieval.serving.http.served import Served

LOG = "retrieval.serving.http"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OTHER = "other"

_EVENTS_AT_ONCE, _EVENTS_PER_SECOND = 20, 1
_ANSWERED_PER_SECOND = 200
_WAITING_LINES = 10_000
_MAX_TEXT = 2_000
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_STATS_SECONDS = 15.0
_TRACES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)


# The log


class _RateLimit(logging.Filter):
    """Limits the rate of log lines after a burst, and counts the lines that it drops."""

    def __init__(self) -> None:
        super().__init__()
        self._left = {True: 2.0 * _ANSWERED_PER_SECOND, False: float(_EVENTS_AT_ONCE)}
        self._last = dict.fromkeys(self._left, time.monotonic())
        self._dropped = dict.fromkeys(self._left, 0)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line passes; successful requests have a separate rate."""
        request = getattr(record, "request", None)
        answered = request is not None and 0 < (request["status"] or 0) < 400
        rate, most = _EVENTS_PER_SECOND, _EVENTS_AT_ONCE
        if answered:
            rate, most = _ANSWERED_PER_SECOND, 2 * _ANSWERED_PER_SECOND
        now = time.monotonic()
        left = min(most, self._left[answered] + rate * (now - self._last[answered]))
        self._last[answered] = now
        self._left[answered] = left - (left >= 1)
        self._dropped[answered] += left < 1
        if left >= 1:
            record.left_out, self._dropped[answered] = self._dropped[answered], 0
        return left >= 1


class _Lines(QueueHandler):
    """Formats log lines and queues them for a thread, so that a slow reader blocks nobody."""

    def __init__(self, waiting: queue.Queue[Any], form: str, names_process: bool) -> None:
        super().__init__(waiting)
        self._json = form == "json"
        self._process = {"process": os.getpid()} if names_process else {}

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a line, or drop it if the queue is full."""
        with suppress(queue.Full):
            self.queue.put_nowait(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Replace a record's message by the whole formatted line."""
        fields: dict[str, Any] = dict(getattr(record, "request", None) or {})
        message = ""
        if not fields:
            message = " ".join(record.getMessage().split())[:_MAX_TEXT]
            if record.exc_info and record.exc_info[0]:
                fields["traceback"] = logging.Formatter().formatException(record.exc_info)
            if (trail := TRAIL.get()) is not None:
                fields["request_id"] = trail.id
        fields |= self._process
        if left_out := getattr(record, "left_out", 0):
            fields["left_out"] = left_out
        record.msg = (_as_json if self._json else _as_text)(record, message, fields)
        record.args = record.exc_info = record.exc_text = None
        return record


def _as_json(record: logging.LogRecord, message: str, fields: dict[str, Any]) -> str:
    head = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": record.levelname}
    if message:
        head |= {"message": message, "logger": record.name}
    return json.dumps({**head, **fields}, separators=(",", ":"))


def _as_text(record: logging.LogRecord, message: str, fields: dict[str, Any]) -> str:
    """Return `time INFO POST /v1/search 200 ms=3.1 …` with control characters escaped."""
    now = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
    trace = fields.pop("traceback", None)
    words = [now, record.levelname]
    words += [str(fields.pop(name)) for name in ("method", "route", "status") if name in fields]
    words += [message] if message else []
    for name, value in {**fields, **fields.pop("stages", {})}.items():
        if name != "stages":
            text = str(value)
            plain = text.isprintable() and " " not in text
            words.append(f"{name}={text if plain else json.dumps(text)}")
    line = printable(" ".join(words))
    return line if trace is None else f"{line}\n{trace}"


def start_log(form: Literal["text", "json"], names_process: bool = False) -> QueueListener:
    """Log to standard error from a background thread; `stop` writes the remaining lines.

    Args:
        form: "text" for people or "json" for programs.
        names_process: whether lines include the process id.
    """
    waiting: queue.Queue[Any] = queue.Queue(_WAITING_LINES)
    handler = _Lines(waiting, form, names_process)
    handler.addFilter(_RateLimit())
    for name, level in (
        (LOG, logging.INFO),
        ("uvicorn.error", logging.ERROR),
        ("asyncio", logging.ERROR),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    for name in ("python_multipart", "python_multipart.multipart"):  # the response has its message
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    listener = QueueListener(waiting, logging.StreamHandler(sys.stderr))
    listener.start()
    return listener


# Metrics


class Metrics:
    """Prometheus metrics of one server and its indexes, in a separate registry."""

    def __init__(self, indexes: Mapping[str, Served]) -> None:
        self._has_siblings = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"retrieval_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(
                f"retrieval_{name}", text, labels, buckets=buckets, registry=self._registry
            )

        self._requests = counter("requests", "Requests answered.", "method", "route", "status")
        self._refused = counter(
            "refused", "Refused requests by reason, or by status if there is none.", "reason"
        )
        self._duration = histogram(
            "request_seconds",
            "Time from a request's header to the end of its response.",
            _SECONDS,
            "route",
        )
        stages = histogram(
            "stage_seconds", "Time of each stage, without nested stages.", _SECONDS, "stage"
        )
        self._stages = {name: stages.labels(name) for name in STAGES}
        self._sizes = {
            "encode": histogram("encode_batch", "Images or features encoded at once.", _BATCHES),
            "search": histogram("search_batch", "Queries searched at once.", _BATCHES),
        }
        self._gauges = _Gauges(indexes)
        if not self._has_siblings:
            self._registry.register(self._gauges)
            ProcessCollector(registry=self._registry)

    def answered(self, trail: Trail, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request; status 0 means that the client left before the response began."""
        self._requests.labels(method, route, str(status)).inc()
        self._duration.labels(route).observe(seconds)
        for stage, duration in trail.seconds.items():
            self._stages[stage].observe(duration)
        for stage, count in trail.batches:
            if count and stage in self._sizes:
                self._sizes[stage].observe(count)
        if status >= 400:
            self._refused.labels(trail.reason or str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's format. Blocks on the disk, so call it in a thread."""
        registry = self._registry
        if self._has_siblings:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            registry.register(self._gauges)
            ProcessCollector(registry=registry)
        return generate_latest(registry)


class _Gauges(Collector):
    """Gauges that are computed on each scrape, by the process that answers it."""

    def __init__(self, indexes: Mapping[str, Served]) -> None:
        self._indexes = indexes
        self._workers = next(iter(indexes.values())).workers
        self._seen: dict[str, tuple[float, dict[str, float]]] = {}

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration does not compute the gauges."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        lengths = GaugeMetricFamily(
            "retrieval_queue_length", "Jobs that wait for a thread.", labels=["queue"]
        )
        for name in ("searches", "images", "pictures", "changes"):
            lengths.add_metric([name], getattr(self._workers, name).waiting)
        yield lengths
        pids = self._workers.decoders.pids
        yield GaugeMetricFamily(
            "retrieval_decode_processes", "Decoding processes.", value=len(pids)
        )
        labels = ["index"] if len(self._indexes) > 1 else []
        for name, text in _INDEX_METRICS.items():
            family = GaugeMetricFamily(f"retrieval_index_{name}", text, labels=labels)
            for index, served in self._indexes.items():
                if (value := self._values(index, served).get(name)) is not None:
                    family.add_metric([index] if labels else [], value)
            if family.samples:
                yield family

    def _values(self, name: str, served: Served) -> dict[str, float]:
        """Return the metrics of an index by name, cached for 15 seconds."""
        looked, values = self._seen.get(name, (-_STATS_SECONDS, {}))
        if time.monotonic() - looked >= _STATS_SECONDS:
            values = {}
            with suppress(StoreError):  # readiness reports it
                with served.use() as index:
                    stats = index.stats()
                values["items"] = stats.count
                if stats.bytes is not None:
                    values["bytes"] = stats.bytes
                for generation in stats.generations:
                    if generation.state == "served":
                        values["generation"] = generation.number
                        values["generations"] = len(stats.generations)
            self._seen[name] = time.monotonic(), values
        return values


_INDEX_METRICS = {
    "items": "Number of items.",
    "bytes": "Size of the index on the disk.",
    "generation": "Number of the served generation.",
    "generations": "How many generations exist.",
}


# Traces


def traced(app: Any) -> Any:
    """Wrap an application in OpenTelemetry's instrumentation if its variables name an exporter.

    OTEL_TRACES_EXPORTER names it (`otlp`, `console`, `none`); an endpoint alone selects `otlp`. The
    SDK itself reads sampler, resource, headers and limits.

    Raises:
        MissingDependency: a package of the extra `otel` is not installed, or no such exporter.
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

        group, entry = "opentelemetry_traces_exporter", {"otlp": "otlp_proto_http"}.get(name, name)
        (exporter,) = entry_points(group=group, name=entry)
    except (ImportError, ValueError):
        raise MissingDependency(
            f"{variable} asks for traces by the exporter '{name}', which is not installed. Install"
            f" it with: pip install 'embedding-retrieval[otel]', or unset {variable}."
        ) from None
    provider = TracerProvider()
    try:
        provider.add_span_processor(BatchSpanProcessor(exporter.load()()))
    except Exception as error:
        raise StoreError(f"The exporter '{name}' of traces cannot be set up: {error}") from None
    return OpenTelemetryMiddleware(
        app,
        tracer_provider=provider,
        exclude_spans=["receive", "send"],
        default_span_details=lambda scope: (scope["method"], {}),  # a path would name items
    )
