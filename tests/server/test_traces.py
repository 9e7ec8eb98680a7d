"""Traces: each request is an OpenTelemetry span below the client's span, if traces are on."""

import asyncio

import httpx
import pytest
from retrieval.errors import MissingDependency, StoreError
from retrieval.index.index import open_index

from retrieval_server.app import Application, traced

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def environment(monkeypatch):
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_request_is_a_span_below_the_clients_span(index_path, environment):
    pytest.importorskip("opentelemetry.instrumentation.asgi", reason="needs the extra otel")
    from opentelemetry.sdk.trace import export

    spans = []

    def keep(self, batch):
        spans.extend(batch)

    environment.setattr(export.ConsoleSpanExporter, "export", keep)
    environment.setattr(export, "BatchSpanProcessor", export.SimpleSpanProcessor)
    environment.setenv("OTEL_TRACES_EXPORTER", "console")

    async def ask(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
            return await client.get("/v1/item?id=secret", headers=headers)

    with open_index(index_path, threads=1) as index:
        app = Application({"i": index})
        assert asyncio.run(ask(app)).status_code == 404
        app.workers.close()
    (span,) = spans
    assert span.name == "GET" and 404 in dict(span.attributes).values()
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == SPAN


def test_traces_are_off_by_default(environment):
    app = object()
    assert traced(app) is app
    environment.setenv("OTEL_TRACES_EXPORTER", "none")
    assert traced(app) is app
    environment.setenv("OTEL_TRACES_EXPORTER", "console")
    environment.setenv("OTEL_SDK_DISABLED", "true")
    assert traced(app) is app


def test_a_missing_exporter_is_a_sentence(environment):
    environment.setenv("OTEL_TRACES_EXPORTER", "nobodys")
    with pytest.raises(MissingDependency, match=r"TRACES_EXPORTER .*'nobodys'.*retrieval\[otel\]"):
        traced(object())


def test_an_exporter_that_cannot_be_set_up_is_a_sentence(environment):
    pytest.importorskip("opentelemetry.instrumentation.asgi", reason="needs the extra otel")
    environment.setenv("OTEL_TRACES_EXPORTER", "console")
    environment.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(StoreError, match=r"'console' cannot be set up: .*queue"):
        traced(object())
