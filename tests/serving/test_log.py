"""The server's log: a line a request, and none that acts on a terminal."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest
import wire
from retrieval.serving.http.app import _trace_id as trace_id
from retrieval.serving.http.monitoring import start_log

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def lines_of(server) -> list[dict]:
    """Stop the server and return its log, in JSON."""
    server.process.terminate()
    assert server.process.wait(15) == 0
    return [
        json.loads(line)
        for line in server.process.stderr.read().splitlines()
        if line.startswith("{")
    ]


def test_a_line_a_request(served, index_path, photos):
    server = served(index_path, "--log-format", "json")
    image = wire.post(wire.form((photos / "3" / "0003.png").read_bytes(), "3"), wire.FORM)
    answer = wire.ask(server.port, image)
    missing = wire.ask(server.port, wire.get("/v1/items/nobody/image", f"traceparent: {PARENT}"))
    wire.ask(server.port, wire.get("/livez"))
    lines = [line for line in lines_of(server) if "route" in line]
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("POST", "/v1/search", 200),
        ("GET", "/v1/items/{id}/image", 404),
    ]
    search, item = lines
    assert search["request_id"] == answer.headers["x-request-id"]
    assert search["client"] == "127.0.0.1" and search["level"] == "INFO"
    assert search["bytes_out"] == len(answer.body) and search["bytes_in"] > 100
    assert {"read", "decode", "encode", "search", "items", "send"} <= set(search["stages"])
    assert 0 < sum(search["stages"].values()) <= 1.5 * search["ms"]
    # An answer that is an error has its id, and a trace's id is the request's own
    assert item["trace_id"] == TRACE and "trace_id" not in search
    assert (
        json.loads(missing.body)["instance"]
        == item["request_id"]
        == missing.headers["x-request-id"]
    )
    assert item["request_id"].replace("-", "").endswith(TRACE)
    assert missing.headers["traceparent"] == PARENT


def test_as_text(served, index_path):
    server = served(index_path, "--log-format", "text")
    answer = wire.ask(server.port, wire.vector())
    server.process.terminate()
    assert server.process.wait(15) == 0
    (line,) = [line for line in server.process.stderr.read().splitlines() if "/v1/search" in line]
    assert "INFO POST /v1/search 200 ms=" in line and answer.headers["x-request-id"] in line


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "x",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-more",
        PARENT.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        PARENT.replace("4", "g"),
        "٠" * 55,
        PARENT + "\n",
    ],
)
def test_a_parent_that_is_none_is_not_taken(parent):
    assert trace_id([(b"traceparent", parent.encode("utf-8"))]) == ""


def test_a_parent_of_a_later_version_is_taken():
    assert trace_id([(b"traceparent", PARENT.encode())]) == TRACE
    assert trace_id([(b"traceparent", f"01-{TRACE}-00f067aa0ba902b7-01-more".encode())]) == TRACE
    assert trace_id([(b"traceparent", PARENT.encode())] * 2) == ""


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    names = ("retrieval.serving.http", "uvicorn.error", "asyncio")
    before = {
        name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate)
        for name in names
    }
    yield io.StringIO()
    for name, (handlers, propagate) in before.items():
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate


def request(**content) -> None:
    logging.getLogger("retrieval.serving.http").info("request", extra={"request": content})


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_acts_on_a_terminal_is_escaped(form, written):
    with redirect_stderr(written):
        log = start_log(form)
    hostile = "x\x1b[2J\x07\r\n2026 INFO forged\u202e\x85"
    request(method="GET", route="/", status=200, key=hostile)
    logging.getLogger("retrieval.serving.http").warning("Not ready. %s", hostile)
    log.stop()
    text = written.getvalue()
    assert len(text.splitlines()) == 2
    assert all(sign.isprintable() for line in text.splitlines() for sign in line)
    if form == "json":
        line, event = map(json.loads, text.splitlines())
        assert (
            line["key"] == hostile
            and event["level"] == "WARNING"
            and "Not ready" in event["message"]
        )


def test_nobody_waits_for_who_reads_the_log():
    """Standard error is a full pipe that nobody reads: lines are dropped."""
    code = """
import logging, os
from retrieval.serving.http import monitoring
monitoring.start_log("json")
for number in range(50_000):
    said = {"status": 200, "more": "x" * 100}
    logging.getLogger("retrieval.serving.http").info("request", extra={"request": said})
print("went on", flush=True)
os._exit(0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"went on\n"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
