"""Spans for OpenTelemetry: of a request and its stages, below the span of the client that sent it;
and none where nobody asked.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from retrieval.errors import MissingDependency
from retrieval.serving.http.app import Application
from retrieval.serving.http.monitoring import Traces, traces_of_environment
from retrieval.serving.index.index import open_index

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def traced(index_path) -> Iterator[SimpleNamespace]:
    """An application whose spans are kept in memory."""
    pytest.importorskip(
        "opentelemetry.sdk", reason="opentelemetry-sdk, the extra otel, is not installed"
    )
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider)
    with open_index(index_path, threads=1) as index:
        app = Application({"i": index}, traces=traces)

        def ask(*requests: tuple) -> list[httpx.Response]:
            async def scenario() -> list[httpx.Response]:
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://localhost"
                ) as client:
                    return [await client.request(*entry, **more) for *entry, more in requests]

            return asyncio.run(scenario())

        yield SimpleNamespace(ask=ask, spans=exporter.get_finished_spans, traces=traces)
        app.workers.close()


def test_a_search_is_a_span_with_its_stages_inside(traced, photos):
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
    files = {"image": (photos / "3" / "0003.png").read_bytes()}
    (answer,) = traced.ask(("POST", "/v1/search", {"files": files, "headers": headers}))
    assert answer.status_code == 200
    (request,) = [span for span in traced.spans() if span.kind.name == "SERVER"]
    stages = [span for span in traced.spans() if span is not request]
    assert request.name == "POST /v1/search"
    assert f"{request.context.trace_id:032x}" == TRACE and f"{request.parent.span_id:016x}" == SPAN
    assert request.context.trace_state["vendor"] == "1"
    content = dict(request.attributes)
    assert content.pop("retrieval.request_id") == answer.headers["x-request-id"]
    assert (
        content["http.route"] == "/v1/search"
        and 200 in content.values()
        and "POST" in content.values()
    )
    assert {"read", "decode", "encode", "search", "items", "send"} <= {span.name for span in stages}
    for span in stages:
        assert span.parent.span_id == request.context.span_id
        assert request.start_time <= span.start_time <= span.end_time
        assert span.end_time <= request.end_time or span.name == "send"
    times = {span.name: (span.start_time, span.end_time) for span in stages}
    assert (
        times["decode"][1] <= times["encode"][0]
        and times["search"][0] <= times["items"][0] < times["items"][1] <= times["search"][1]
    )


def test_an_end_in_time_though_nobody_collects(traced, monkeypatch):
    answered, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(
        traced.traces._provider, "shutdown", lambda: (answered.wait(60), ended.set())
    )
    traced.traces.close()
    assert not ended.is_set()  # it did not wait for the collector, which answers only now
    answered.set()
    assert ended.wait(60)


@pytest.fixture
def environment(monkeypatch):
    for name in (
        "OTEL_TRACES_EXPORTER",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "OTEL_SDK_DISABLED",
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_nothing_is_traced_unless_asked_for(environment):
    assert traces_of_environment() is None
    environment.setenv("OTEL_TRACES_EXPORTER", "none")
    assert traces_of_environment() is None
    environment.setenv("OTEL_TRACES_EXPORTER", "console")
    environment.setenv("OTEL_SDK_DISABLED", "true")
    assert traces_of_environment() is None


def test_an_exporter_that_is_not_there_is_a_sentence(environment):
    environment.setenv("OTEL_TRACES_EXPORTER", "nobodys")
    with pytest.raises(
        MissingDependency, match=r"OTEL_TRACES_EXPORTER asks for .*embedding-retrieval\[otel\]"
    ):
        traces_of_environment()


def test_it_costs_no_import_where_it_is_not_asked_for():
    code = (
        "import sys, retrieval.serving.http.monitoring as t; assert t.traces_of_environment() is"
        " None; print('opentelemetry' in sys.modules)"
    )
    clean = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    assert done.stdout.strip() == "False", done.stderr
