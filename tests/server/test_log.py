"""The server's log: one line a request, without control characters."""

import io
import json
import logging
import subprocess
import sys
from contextlib import redirect_stderr

import pytest
import wire

from retrieval_server.app import _trace_id as trace_id, start_log
from retrieval_server.keys import add_key, new_key

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def test_a_request_has_one_line(served, index_path, photos):
    server = served(index_path, "--log-format", "json")
    image = wire.post(wire.form((photos / "3" / "0003.png").read_bytes(), "3"), wire.FORM)
    answer = wire.ask(server.port, image)
    missing = wire.ask(server.port, wire.get("/v1/items/nobody/image", f"traceparent: {PARENT}"))
    wire.ask(server.port, wire.get("/livez"))
    log = wire.log_of(server).splitlines()
    lines = [json.loads(line) for line in log if line.startswith("{")]
    search, item = [line for line in lines if "route" in line]
    for line, *request in (
        (search, "POST", "/v1/search", 200),
        (item, "GET", "/v1/items/{id}/image", 404),
    ):
        assert [line["method"], line["route"], line["status"]] == request
    assert search["request_id"] == answer.headers["x-request-id"]
    assert search["client"] == "127.0.0.1" and search["level"] == "INFO"
    assert search["bytes_out"] == len(answer.body) and search["bytes_in"] > 100
    assert {"read", "decode", "encode", "search", "items", "send"} <= set(search["stages"])
    assert 0 < sum(search["stages"].values()) <= 1.5 * search["ms"]
    # An error response contains the request's id, which is made from the trace's id if there is one
    assert item["trace_id"] == TRACE and "trace_id" not in search
    instance = json.loads(missing.body)["instance"]
    assert instance == item["request_id"] == missing.headers["x-request-id"]
    assert item["request_id"].replace("-", "").endswith(TRACE)
    assert missing.headers["traceparent"] == PARENT


def test_a_refused_request_has_its_route_and_the_reason(served, index_path, tmp_path):
    sent, kept = new_key("shop", "read")
    add_key(tmp_path / "keys", kept)
    options = ("--keys", str(tmp_path / "keys"), "--log-format", "json")
    server = served(index_path, *options)
    key = f"Authorization: Bearer {sent}"
    delete = wire.get("/v1/items/a%2Fb", key).replace(b"GET", b"DELETE", 1)
    requests = [
        (wire.vector(), 401, "/v1/search", "A key is needed for searching"),
        (wire.get("/v1/index", key + "x"), 401, "/v1/index", "does not know this key"),
        (delete, 403, "/v1/items/{id}", "deleting need a key with the role write"),
        (wire.get("/metrics", key), 403, "/metrics", "need a key with the role admin"),
        (wire.get("/v1/index", host="evil.example"), 421, "/v1/index", "--allow-host"),
        (wire.get("/v1/items/a/image", key), 404, "/v1/items/{id}/image", "no such item"),
        (wire.get("/a%0Ab?c=d", key), 404, "other", "nothing at this address"),
        (wire.get("/" + 600 * "x"), 401, "other", "A key is needed"),
    ]
    answers = [wire.ask(server.port, request) for request, *_ in requests]
    log = wire.log_of(server)
    lines = [json.loads(line) for line in log.splitlines() if '"route"' in line]
    for line, answer, (_, status, route, says) in zip(lines, answers, requests, strict=True):
        assert (answer.status, line["status"], line["route"]) == (status, status, route)
        assert says in line["reason"] and line["reason"] == json.loads(answer.body)["detail"]
    assert [line.get("path") for line in lines] == [None] * 6 + ["/a%0Ab", "/" + 499 * "x"]
    assert sent not in log


def test_a_line_of_text(served, index_path):
    server = served(index_path, "--log-format", "text")
    answer = wire.ask(server.port, wire.vector())
    (line,) = [line for line in wire.log_of(server).splitlines() if "/v1/search" in line]
    assert "INFO POST /v1/search 200 ms=" in line and answer.headers["x-request-id"] in line


def test_only_a_valid_traceparent_is_used():
    odd = (PARENT[:-1], PARENT + "-more", PARENT + "\n", PARENT.upper(), PARENT.replace("4", "g"))
    version = PARENT.replace("00-", "ff-", 1)
    zeros = (f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE}-{'0' * 16}-01")
    for parent in ("", "x", "٠" * 55, version, *odd, *zeros):
        assert trace_id([(b"traceparent", parent.encode())]) == "", parent
    for parent in (PARENT, f"01-{TRACE}-00f067aa0ba902b7-01-more"):  # the second: a later version
        assert trace_id([(b"traceparent", parent.encode())]) == TRACE
    assert trace_id([(b"traceparent", PARENT.encode())] * 2) == ""


@pytest.fixture
def loggers():
    """The server's logger; all changed loggers are restored."""
    kept = list(map(logging.getLogger, ("retrieval_server", "uvicorn.error", "asyncio")))
    before = [(logger.handlers, logger.propagate) for logger in kept]
    yield kept[0]
    for logger, (handlers, propagate) in zip(kept, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate


@pytest.mark.parametrize("form", ["text", "json"])
def test_control_characters_are_escaped(form, loggers):
    written = io.StringIO()
    with redirect_stderr(written):
        log = start_log(form)
    hostile = "x\x1b[2J\x07\r\n2026 INFO forged\u202e\x85"
    request = {"method": "GET", "route": "/", "status": 200, "key": hostile}
    loggers.info("request", extra={"request": request})
    loggers.warning("Not ready. %s", hostile)
    log.stop()
    lines = written.getvalue().splitlines()
    assert len(lines) == 2 and all(sign.isprintable() for line in lines for sign in line)
    if form == "json":
        line, event = map(json.loads, lines)
        assert line["key"] == hostile
        assert event["level"] == "WARNING" and "Not ready" in event["message"]


FULL_PIPE = """
import logging, os
from retrieval_server import app
app.start_log("json")
for number in range(50_000):
    fields = {"status": 200, "more": "x" * 100}
    logging.getLogger("retrieval_server").info("request", extra={"request": fields})
print("went on", flush=True)
os._exit(0)
"""


def test_a_full_pipe_that_nobody_reads_stops_no_request():
    """The log drops lines then."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FULL_PIPE], **pipes) as process:
        try:
            assert process.stdout.readline() == b"went on\n"
            assert process.wait(30) == 0
        finally:
            process.kill()
