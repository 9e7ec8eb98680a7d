"""What operators see of a server: its log, its metrics, its traces."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import entry_points
from logging.handlers import QueueHandler, QueueListener
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from retrieval.errors import MissingDependency, StoreError, printable
from retrieval.serving.stages import STAGES, Trail, current
from retrieval.serving.store.contract import Stats, patience

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


# The log


class _FewLines(logging.Filter):
    """Lets a burst of lines pass, then some a second; says how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._left = {True: float(2 * _ANSWERED_PER_SECOND), False: float(_EVENTS_AT_ONCE)}
        self._last = {True: time.monotonic(), False: time.monotonic()}
        self._dropped = {True: 0, False: 0}

    def filter(self, record: logging.LogRecord) -> bool:
        """Let a line pass, or leave it out."""
        request = getattr(record, "request", None)
        good = request is not None and 0 < (request["status"] or 0) < 400
        rate, most = (_ANSWERED_PER_SECOND, 2 * _ANSWERED_PER_SECOND) if good else (_EVENTS_PER_SECOND, _EVENTS_AT_ONCE)  # fmt: skip
        now = time.monotonic()
        self._left[good] = min(most, self._left[good] + rate * (now - self._last[good]))
        self._last[good] = now
        if self._left[good] < 1:
            self._dropped[good] += 1
            return False
        self._left[good] -= 1
        record.left_out, self._dropped[good] = self._dropped[good], 0
        return True


class _Lines(QueueHandler):
    """Formats lines, and hands them to a thread: nobody waits for whoever reads the log."""

    def __init__(self, waiting: queue.Queue[Any], form: str, several: bool) -> None:
        super().__init__(waiting)
        self._json, self._own = form == "json", {"process": os.getpid()} if several else {}

    def enqueue(self, record: logging.LogRecord) -> None:
        """Leave a line out where nobody reads the log."""
        with suppress(queue.Full):
            self.queue.put_nowait(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a record whose message is the whole line."""
        said: dict[str, Any] = dict(getattr(record, "request", None) or {})
        message = ""
        if not said:
            message = " ".join(record.getMessage().split())[:_MAX_TEXT]
            if record.exc_info and record.exc_info[0]:
                said["traceback"] = logging.Formatter().formatException(record.exc_info)
            if (trail := current()) is not None:
                said["request_id"] = trail.id
        said |= self._own
        if left_out := getattr(record, "left_out", 0):
            said["left_out"] = left_out
        record.msg = (
            self._as_json(record, message, said) if self._json else self._as_text(record, message, said)
        )
        record.args = record.exc_info = record.exc_text = None
        return record

    @staticmethod
    def _as_json(record: logging.LogRecord, message: str, said: dict[str, Any]) -> str:
        head = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": record.levelname}
        if message:
            head |= {"message": message, "logger": record.name}
        return json.dumps({**head, **said}, separators=(",", ":"))

    @staticmethod
    def _as_text(record: logging.LogRecord, message: str, said: dict[str, Any]) -> str:
        """Return `time INFO POST /v1/search 200 ms=3.1 …`; what could act on a terminal is escaped."""
        now = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
        trace = said.pop("traceback", None)
        head = [str(said.pop(name)) for name in ("method", "route", "status") if name in said]
        rest = [
            f"{name}={_plain(value)}"
            for name, value in {**said, **said.pop("stages", {})}.items()
            if name != "stages"
        ]
        line = printable(" ".join([now, record.levelname, *head, *([message] if message else []), *rest]))
        return line if trace is None else f"{line}\n{trace}"


def _plain(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def start_log(form: Literal["text", "json"], several: bool = False) -> QueueListener:
    """Have the log written to standard error, by a thread; `stop` writes what is left.

    Args:
        form: for people or for programs.
        several: whether lines say which process wrote them.
    """
    waiting: queue.Queue[Any] = queue.Queue(_WAITING_LINES)
    handler = _Lines(waiting, form, several)
    handler.addFilter(_FewLines())
    for name, level in ((LOG, logging.INFO), ("uvicorn.error", logging.ERROR), ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    for name in ("python_multipart", "python_multipart.multipart"):  # its sentence is in the answer
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    listener = QueueListener(waiting, logging.StreamHandler(sys.stderr))
    listener.start()
    return listener


# Metrics


class Metrics:
    """The metrics of one server, in a registry of its own.

    Args:
        indexes: whose queues, processes and items are looked up.
        routes: the patterns of addresses; any other address counts as "other".
    """

    def __init__(self, indexes: Mapping[str, Served], routes: Iterable[str]) -> None:
        self._several = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._registry, self._routes = CollectorRegistry(), {*routes, OTHER}

        def histogram(name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"retrieval_{name}", text, labels, buckets=buckets, registry=self._registry)

        self._requests = Counter(
            "retrieval_requests", "Requests answered.", ("method", "route", "status"), registry=self._registry
        )
        self._refused = Counter(
            "retrieval_refused",
            "Requests refused, by why; by their status where it says enough.",
            ("reason",),
            registry=self._registry,
        )
        self._duration = histogram(
            "request_seconds", "From a request's header to the end of its answer.", ("route",), _SECONDS
        )
        stages = histogram(
            "stage_seconds", "Of these, by stage, without the stages inside it.", ("stage",), _SECONDS
        )
        self._stages = {name: stages.labels(name) for name in STAGES}
        self._sizes = {
            "encode": histogram("encode_batch", "Images or features encoded at once.", (), _BATCHES),
            "search": histogram("search_batch", "Queries searched for at once.", (), _BATCHES),
        }
        self._looked_up = _LookedUp(indexes)
        if not self._several:
            self._registry.register(self._looked_up)
            ProcessCollector(registry=self._registry)

    def answered(self, trail: Trail, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request.

        Args:
            trail: its stages.
            method: of HTTP.
            route: the pattern that its address matched.
            status: of its answer; 0 when its client left before there was one.
            seconds: that it took.
        """
        method, route = method if method in METHODS else OTHER, route if route in self._routes else OTHER
        self._requests.labels(method, route, str(status)).inc()
        self._duration.labels(route).observe(seconds)
        for span in trail.spans:
            self._stages[span.stage].observe(span.own)
            if span.items and span.stage in self._sizes:
                self._sizes[span.stage].observe(span.items)
        if status >= 400:
            self._refused.labels(trail.reason or str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's format; for a thread: it looks at processes and the disk."""
        if not self._several:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(self._looked_up)
        ProcessCollector(registry=registry)
        return generate_latest(registry)


class _LookedUp(Collector):
    """What is looked up when Prometheus asks; of several processes, in the one that answers."""

    def __init__(self, indexes: Mapping[str, Served]) -> None:
        self._indexes = indexes
        self._workers = next(iter(indexes.values())).workers
        self._seen: dict[str, tuple[float, Stats | None]] = {}

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names need no look."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Give each metric as it is now."""
        lengths = GaugeMetricFamily("retrieval_queue_length", "What waits for its turn.", labels=["queue"])
        for name in ("searches", "images", "pictures", "changes"):
            lengths.add_metric([name], getattr(self._workers, name).waiting)
        yield lengths
        pids = self._workers.decoders.pids
        yield GaugeMetricFamily("retrieval_decode_processes", "Processes that decode.", value=len(pids))
        families: dict[str, Any] = {}
        for index, served in self._indexes.items():
            for name, value in _figures(self._stats(index, served)):
                labels = ["index"] if len(self._indexes) > 1 else []
                family = GaugeMetricFamily(f"retrieval_index_{name}", _INDEX_METRICS[name], labels=labels)
                families.setdefault(name, family).add_metric([index] if labels else [], value)
        yield from families.values()

    def _stats(self, name: str, served: Served) -> Stats | None:
        at, stats = self._seen.get(name, (-_STATS_SECONDS, None))
        if time.monotonic() - at >= _STATS_SECONDS:
            try:
                with served.use() as index, patience(served.settings.deadline):
                    stats = index.stats()
            except StoreError:  # readiness says so
                stats = None
            self._seen[name] = time.monotonic(), stats
        return stats


_INDEX_METRICS = {
    "items": "Items of the index.",
    "bytes": "Of the index on the disk.",
    "generation": "Number of the generation that is served.",
    "generations": "Generations that there are.",
}


def _figures(stats: Stats | None) -> Iterator[tuple[str, float]]:
    """Give name and value of each metric of an index."""
    if stats is None:
        return
    yield "items", stats.count
    if stats.bytes is not None:
        yield "bytes", stats.bytes
    for generation in stats.generations:
        if generation.state == "served":
            yield "generation", generation.number
            yield "generations", len(stats.generations)


# Traces


class Traces:
    """OpenTelemetry's spans of requests, and inside each one for each stage.

    Args:
        provider: a `TracerProvider` of OpenTelemetry's SDK.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("retrieval.serving")

    def around(self, app: Any) -> Any:
        """Return an ASGI application in OpenTelemetry's own instrumentation."""
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

        return OpenTelemetryMiddleware(app, tracer_provider=self._provider, exclude_spans=["receive", "send"])

    def begin(self, trail: Trail, method: str, route: str) -> None:
        """Name the span of a request whose answer begins."""
        from opentelemetry.trace import get_current_span

        span = get_current_span()
        span.update_name(f"{method} {route}")
        span.set_attributes({"http.route": route, "retrieval.request_id": trail.id})

    def finish(self, trail: Trail) -> None:
        """Make the spans of the stages of a request that is over."""
        offset = time.time_ns() - time.perf_counter_ns()
        for stage in trail.spans:
            made = self._tracer.start_span(stage.stage, start_time=offset + int(stage.began * 1e9))
            made.end(offset + int(stage.ended * 1e9))

    def close(self) -> None:
        """Send what is left, within a second: a collector that does not answer holds nobody up."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(1.0)


def traces_of_environment() -> Traces | None:
    """Return what exports spans as the variables OTEL_… say; None where they name no exporter.

    OTEL_TRACES_EXPORTER names one (`otlp`, `console`); without it, OTEL_EXPORTER_OTLP_ENDPOINT means `otlp`. The SDK
    itself reads sampler, resource, headers and limits.

    Raises:
        MissingDependency: an exporter is named and not installed.
        StoreError: the exporter cannot be set up.
    """
    name = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    variable = "OTEL_TRACES_EXPORTER" if name else next(filter(os.environ.get, endpoints), None)
    if variable is None or name == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    name = name or "otlp"
    install = f"Install it with: pip install 'embedding-retrieval[otel]', or unset {variable}."
    try:
        import opentelemetry.instrumentation.asgi
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        assert opentelemetry.instrumentation.asgi
    except ImportError as error:
        raise MissingDependency(f"{variable} asks for traces, which need {error.name}. {install}") from None
    points = {point.name: point for point in entry_points(group="opentelemetry_traces_exporter")}
    names = (name, f"{name}_proto_http", f"{name}_proto_grpc")
    point = next((points[each] for each in names if each in points), None)
    if point is None:
        known = ", ".join(sorted(points)) or "none"
        raise MissingDependency(
            f"{variable} asks for the exporter '{name}', which is not installed (installed: {known}). {install}"
        )
    try:
        exporter = point.load()()
    except Exception as error:
        raise StoreError(f"The exporter '{name}' of traces cannot be set up: {error}") from None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider)
