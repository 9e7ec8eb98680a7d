"""Spans for OpenTelemetry, where its SDK is installed and its environment variables name an exporter; else nothing, at no cost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from time import perf_counter_ns
from typing import Any

from retrieval.errors import MissingDependency, StoreError
from retrieval.serving.stages import Trail

_EXPORTER = "OTEL_TRACES_EXPORTER"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_CARRIED = {b"traceparent", b"tracestate"}
_INSTALL = "Install it with: pip install 'embedding-retrieval[otel]', or unset {name}."


class Traces:
    """Makes the spans of requests that are over.

    Args:
        provider: OpenTelemetry's, an SDK `TracerProvider`.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("retrieval.serving")
        self._propagator = TraceContextTextMapPropagator()

    def finish(
        self,
        trail: Trail,
        headers: Sequence[tuple[bytes, bytes]],
        times: tuple[float, float],
        attributes: Mapping[str, Any],
    ) -> None:
        """Make the spans of a request: its own, and below it one for each stage.

        Args:
            trail: its stages.
            headers: of the request; `traceparent` and `tracestate` say which span of a client's it belongs to.
            times: its begin and end, by `time.perf_counter`.
            attributes: of its own span, by OpenTelemetry's names.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        offset = time.time_ns() - perf_counter_ns()

        def clock(seconds: float) -> int:
            return offset + int(seconds * 1e9)

        carrier = {name.decode(): value.decode("latin-1") for name, value in headers if name in _CARRIED}
        name = f"{attributes['http.request.method']} {attributes['http.route']}"
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(
            name, parent, SpanKind.SERVER, attributes=attributes, start_time=clock(times[0])
        )
        inside = set_span_in_context(span, parent)
        for part in trail.spans:
            stage = self._tracer.start_span(part.stage, inside, start_time=clock(part.began))
            stage.end(clock(part.ended))
        if attributes["http.response.status_code"] >= 500:
            span.set_status(Status(StatusCode.ERROR, trail.reason or None))
        span.end(clock(times[1]))

    def close(self, seconds: float = 1.0) -> None:
        """Send what is left, within some time: a collector that does not answer holds nobody up."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(seconds)


def traces_of_environment() -> Traces | None:
    """Return what exports spans as the variables OTEL_… say; None where they name no exporter.

    OTEL_TRACES_EXPORTER names one (`otlp`, `console`); without it, OTEL_EXPORTER_OTLP_ENDPOINT means `otlp`. Sampler, resource,
    headers and limits are read by the SDK itself.

    Raises:
        MissingDependency: an exporter is named and not installed.
        StoreError: it cannot be set up.
    """
    name = os.environ.get(_EXPORTER, "").strip()
    variable = _EXPORTER if name else next((each for each in _ENDPOINTS if os.environ.get(each)), None)
    if variable is None or name == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    name = name or "otlp"
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise MissingDependency(
            f"{variable} asks for traces, which need opentelemetry-sdk. {_INSTALL.format(name=variable)}"
        ) from None
    names = (name, f"{name}_proto_http", f"{name}_proto_grpc")
    points = {point.name: point for point in entry_points(group="opentelemetry_traces_exporter")}
    point = next((points[each] for each in names if each in points), None)
    if point is None:
        known = ", ".join(sorted(points)) or "none"
        raise MissingDependency(
            f"{variable} asks for the exporter '{name}', which is not installed (installed: {known}). "
            f"{_INSTALL.format(name=variable)}"
        )
    try:
        exporter = point.load()()
    except Exception as fault:
        raise StoreError(f"The exporter '{name}' of traces cannot be set up: {fault}") from None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider)
