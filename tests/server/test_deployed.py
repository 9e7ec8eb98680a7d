"""The deployment of `deploy/`: a server with the options of compose, and nginx before a server."""

import contextlib
import json
import re
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import wire
import yaml
from proxy import Proxy

from retrieval_server.keys import add_key, new_key
from retrieval_server.settings import HEALTH

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def test_the_commands_of_compose_and_the_image_serve_metrics_and_require_keys(
    served, index_path, photos, tmp_path, monkeypatch
):
    page = (ROOT / "docs" / "operator.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"(?m)^docker run (.*)$", page)
    assert "-e RETRIEVAL_KEYS=/keys" in line and '-v "$PWD/keys.jsonl:/keys:ro"' in line
    assert '--user "$(id -u):$(id -g)"' in line
    sent, kept = new_key("shop", "read")
    add_key(tmp_path / "keys.jsonl", kept)
    monkeypatch.setenv("RETRIEVAL_KEYS", str(tmp_path / "keys.jsonl"))
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    (text,) = re.findall(r"(?m)^CMD (.*)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    image = json.loads(text)
    for words in (image, compose["services"]["retrieval"]["command"]):
        text = " ".join(words[1:]).replace("${HOST:-localhost}", "photos.example")
        text = re.sub(r"\$\{IMAGES:.*?\}", str(photos), text).replace("=/data", f"={tmp_path}")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        text = re.sub(r"--port[= ]\d+", "", text)
        text = re.sub(r"--health-port[= ]\d+", f"--health-port {port}", text)
        server = served(index_path, *text.split())
        for path in HEALTH:
            assert wire.ask(port, wire.get(path, host=f"retrieval:{port}")).status == 200, path
        assert wire.ask(port, wire.get("/v1/index", host="retrieval")).status == 404
        assert wire.ask(server.port, wire.get("/v1/index", host="localhost")).status == 401
        keyed = wire.get("/v1/index", f"Authorization: Bearer {sent}", host="localhost")
        assert wire.ask(server.port, keyed).status == 200


@pytest.fixture
def proxied(served, index_path, tmp_path):
    """A server behind nginx with the configuration of `deploy/`, on free ports."""
    if shutil.which("nginx") is None or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is not installed")
    options = ("--open", "read", "--proxy-header-from", "127.0.0.1", "--log-format", "json")
    server = served(index_path, *options)
    times = ("client_header_timeout 15s", "client_body_timeout   15s")
    shorter = {text: text.replace("15s", "2s") for text in times}
    proxy = Proxy(tmp_path / "proxy", server.port, shorter)

    def ask(request):
        with proxy.open() as connection:
            connection.sendall(request)
            return wire.read_answer(connection)

    yield SimpleNamespace(server=server, open=proxy.open, ask=ask)
    proxy.stop()


def test_the_proxy_ends_tls_buffers_slow_requests_and_limits_rates_and_connections(proxied):
    search = wire.vector()
    forged = search.replace(b"\r\n", b"\r\nX-Forwarded-For: 203.0.113.7\r\n", 1)
    assert wire.found(proxied.ask(forged))
    assert proxied.ask(wire.get("/metrics")).status == 404
    too_large = search.replace(b"Content-Length: ", b"Content-Length: 9999999")
    assert proxied.ask(too_large).status == 413
    with proxied.open() as dripping, proxied.open() as stalled:
        dripping.sendall(b"GET /v1/index HTTP/1.1\r\nHost: localhost\r\nX: ")
        stalled.sendall(search[:-5])
        assert wire.read_answer(dripping).status in (0, 408)
        assert wire.read_answer(stalled).status in (0, 408)
    time.sleep(3)  # nginx permits requests again
    with proxied.open() as hasty:  # with a handshake for each request, the rate would be too low
        hasty.sendall(wire.get("/livez") * 199 + wire.get("/livez", "Connection: close"))
        answers = b"".join(iter(lambda: hasty.recv(65_536), b""))
    assert answers.count(b"HTTP/1.1 200") >= 40 and answers.count(b"HTTP/1.1 429") > 20
    time.sleep(3)
    with contextlib.ExitStack() as held:
        crowd = [held.enter_context(proxied.open()) for _ in range(40)]
        for client in crowd:
            client.sendall(search[:-5])  # nginx counts connections with an unfinished request
        answers = [wire.read_answer(client).status for client in crowd]
    assert 8 <= answers.count(429) < 40 and set(answers) <= {0, 408, 429}
    log = wire.log_of(proxied.server)
    lines = [json.loads(line) for line in log.splitlines() if '"/v1/search"' in line]
    # The forged address is ignored, and no slow request has reached the server.
    assert {(line["client"], line["status"]) for line in lines} == {("127.0.0.1", 200)}
    assert "/v1/index" not in log
