"""Work that hangs in a real server: deadlines, turns, clients that leave, and an end in time."""

from __future__ import annotations

import inspect
import re
import selectors
import signal
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import wire
from retrieval.serving.index.creating import create_index

LIVE = wire.get("/livez")


# --- a back end that hangs while a file exists: any work that does

SLEEPY = '''
import time
from pathlib import Path
import numpy as np
from retrieval import IndexBackend, hookimpl

FOLDER = Path(__file__).parent

class Sleepy(IndexBackend):
    """Compare with everything, unless it hangs."""

    def build(self, vectors, report):
        self.vectors = np.array(vectors)

    def search(self, queries, k):
        with (FOLDER / "begun").open("a") as file:
            file.write("x")
        while (FOLDER / "hang").exists():
            time.sleep(0.02)
        distances = np.linalg.norm(self.vectors[None] - queries[:, None], axis=2)
        rows = np.argsort(distances, axis=1)[:, :k]
        return np.take_along_axis(distances, rows, axis=1).astype(np.float32), rows

    def save(self, path):
        with path.open("wb") as file:
            np.save(file, self.vectors)

    def load(self, path):
        self.vectors = np.load(path, allow_pickle=False)

@hookimpl
def retrieval_indexes():
    return {"sleepy": Sleepy}
'''


@pytest.fixture
def sleepy(served, bundle_path, photos, tmp_path, monkeypatch):
    """A server whose searches hang while `hang` exists."""
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "cache"))
    plugin = tmp_path / "tired.py"
    plugin.write_text(SLEEPY)
    create_index(
        tmp_path / "i",
        bundle_path,
        [photos / "3"],
        backend="tired.sleepy",
        plugins=[str(plugin)],
        progress=False,
    )

    def start(*options: str) -> SimpleNamespace:
        server = served(tmp_path / "i", "--plugin", str(plugin), "--workers", "1", *options)
        server.hang, server.begun = tmp_path / "hang", tmp_path / "begun"
        return server

    yield start
    (tmp_path / "hang").unlink(missing_ok=True)


def test_an_answer_has_a_deadline_and_readiness_knows(sleepy):
    server = sleepy("--deadline", "1", "--decode-seconds", "1", "--probe-seconds", "0.5")
    port = server.port
    assert wire.found(wire.ask(port, wire.vector()))
    server.hang.touch()
    late = wire.ask(port, wire.vector())
    assert (late.status, late.headers["retry-after"]) == (503, "1")
    assert "longer than 1 seconds" in late.error
    unready = wire.until(lambda: (a := wire.ask(port, wire.get("/readyz"))).status == 503 and a)
    assert unready.error == "Searches take longer than 1 seconds."
    assert wire.ask(port, LIVE).status == 200
    assert wire.ask(port, wire.get("/v1/items/0/image")).status == 200  # the gallery has threads of its own
    server.hang.unlink()
    wire.until(lambda: wire.ask(port, wire.get("/readyz")).status == 200)
    assert wire.found(wire.ask(port, wire.vector()))
    assert figure(port, 'retrieval_refused_total{reason="deadline"}') == 1


def figure(port: int, name: str) -> float:
    """Return one of the figures that Prometheus is told."""
    lines = wire.ask(port, wire.get("/metrics")).body.decode().splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
    return float(value)


@pytest.mark.parametrize("spaces", [0, 300_000])
def test_what_clients_left_is_not_begun(sleepy, spaces):
    """Also of a body that is longer than what uvicorn reads at once: its connection is listened to again when it is whole."""
    body = wire.vector().partition(b"\r\n\r\n")[2]
    asked = wire.post(body + b" " * spaces, "application/json")
    server = sleepy("--deadline", "20", "--probe-seconds", "60")
    port = server.port
    server.begun.write_text("")
    server.hang.touch()
    with wire.connect(port) as first:
        first.sendall(wire.vector())
        wire.until(lambda: server.begun.read_text())
        for _ in range(10):
            with wire.connect(port) as one:
                one.sendall(asked)
                time.sleep(0.1)
        time.sleep(0.5)
        server.hang.unlink()
        assert wire.read_answer(first).status == 200
    assert wire.found(wire.ask(port, wire.vector()))
    assert len(server.begun.read_text()) == 2


@pytest.mark.parametrize("spaces", [0, 100_000])
def test_who_is_refused_and_asks_again_at_once_is_heard_seldom(sleepy, spaces):
    """A thousand refusals a second would take the time of what is let in. After the flood, every connection is answered."""
    server = sleepy("--deadline", "30", "--probe-seconds", "60", "--waiting", "1")
    asked = wire.post(wire.vector().partition(b"\r\n\r\n")[2] + b" " * spaces, "application/json")
    server.begun.write_text("")
    server.hang.touch()
    with ExitStack() as opened:
        first, second, *crowd = (opened.enter_context(wire.connect(server.port)) for _ in range(22))
        first.sendall(wire.vector())
        wire.until(lambda: server.begun.read_text())
        second.sendall(wire.vector())
        wire.until(lambda: figure(server.port, 'retrieval_queue_length{queue="search"}') == 1)
        refused, stop = 0, time.monotonic() + 2
        watch = opened.enter_context(selectors.DefaultSelector())
        for one in crowd:
            watch.register(one, selectors.EVENT_READ, crowd.index(one))
            one.sendall(asked)
        while time.monotonic() < stop:
            for key, _ in watch.select(0.05):
                answer = wire.read_answer(crowd[key.data])
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                refused += 1
                crowd[key.data].sendall(asked)
        assert len(crowd) < refused < 450
        server.hang.unlink()
        for one in crowd:
            assert wire.read_answer(one).status in (200, 503)
            one.sendall(LIVE)
            assert wire.read_answer(one).status == 200


def test_clients_take_turns(sleepy):
    """One address with many searches waiting neither keeps another out nor makes it wait for all of them."""
    server = sleepy("--deadline", "20", "--probe-seconds", "60", "--waiting", "8")
    port = server.port
    server.begun.write_text("")
    server.hang.touch()
    crowd = [wire.connect(port) for _ in range(9)]
    for one in crowd:
        one.sendall(wire.vector())
        wire.until(lambda: server.begun.read_text())  # or the first is done together with others
    wire.until(lambda: figure(port, 'retrieval_queue_length{queue="search"}') == 8)
    assert "too many searches are waiting" in wire.ask(port, wire.vector()).error
    assert figure(port, 'retrieval_refused_total{reason="queue"}') == 1
    with wire.connect(port, source="127.0.0.2") as other:
        other.sendall(wire.vector())
        dropped = wire.read_answer(crowd[-1])  # the newest of those who have most
        assert dropped.status == 503
        server.hang.unlink()
        assert wire.found(wire.read_answer(other))
    assert [wire.read_answer(one).status for one in crowd[:-1]] == [200] * 8
    for one in crowd:
        one.close()


def test_a_full_queue_refuses_before_the_body_is_read(sleepy):
    server = sleepy("--deadline", "20", "--probe-seconds", "60", "--waiting", "1")
    port = server.port
    server.begun.write_text("")
    server.hang.touch()
    crowd = [wire.connect(port) for _ in range(2)]
    for one in crowd:
        one.sendall(wire.vector())
        wire.until(lambda: server.begun.read_text())  # or the first is done together with the second
    waits = b'retrieval_queue_length{queue="search"} 1.0'
    wire.until(lambda: waits in wire.ask(port, wire.get("/metrics")).body)
    head = wire.vector().partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    with wire.connect(port) as early:
        early.sendall(head)  # and nothing of the body
        answer = wire.read_answer(early)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["content-type"] == "application/problem+json"
        assert "too many searches are waiting" in answer.error
        server.hang.unlink()
        assert [wire.read_answer(one).status for one in crowd] == [200, 200]
        early.sendall(wire.vector().partition(b"\r\n\r\n")[2] + wire.vector())  # the connection goes on
        assert wire.found(wire.read_answer(early))
    for one in crowd:
        one.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_time_whatever_hangs(how, sleepy, photos):
    server = sleepy("--grace", "3")
    port = server.port
    server.hang.touch()
    asking = [wire.connect(port) for _ in range(6)]
    for one in asking[:3]:
        one.sendall(wire.vector())  # one hangs, two wait
    asking[3].sendall(wire.post(bytes(300_000), wire.FORM)[:-1])  # an upload that never ends
    asking[4].sendall(b"GET / HTTP/1.1\r\nHo")
    asking[5].sendall(wire.post(wire.form((photos / "3" / "0003.png").read_bytes()), wire.FORM))
    time.sleep(0.5)
    began = time.monotonic()
    server.process.send_signal(how)
    assert server.process.wait(20) == 0
    assert time.monotonic() - began < 5  # 3 are promised
    for one in asking[:3]:
        answer = wire.read_answer(one)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error == "The server is stopping. Try again in a moment."
    for one in asking:
        one.close()


# --- what is used of uvicorn


def test_what_is_used_of_uvicorn_is_there():
    """`serve/protocol.py` overrides and reads these. When this fails, uvicorn has changed: read its class again."""
    from retrieval.serving.http.cycle import Cycle, Cycles
    from uvicorn import Config, Server
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
    from uvicorn.server import ServerState

    overridden = (
        "connection_made connection_lost data_received on_message_begin on_url on_header on_headers_complete on_body "
        "on_message_complete on_response_complete pause_writing resume_writing send_400_response"
    )
    for name in overridden.split():
        assert callable(getattr(HttpToolsProtocol, name)), name
    for name in ("serve", "handle_exit", "run"):
        assert callable(getattr(Server, name)), name

    async def app(scope, receive, send):
        raise AssertionError

    config = Config(app, log_config=None)
    made = HttpToolsProtocol(config, ServerState(), {}, _loop=SimpleNamespace())
    for name in ["app", "cycle", "pipeline", "transport", "server", "client", "headers", "url"]:
        assert hasattr(made, name) or name in ("headers", "url"), name
    source = inspect.getsource(HttpToolsProtocol.on_headers_complete)
    assert "self.app" in source and "self.pipeline" in source
    fields = inspect.getsource(RequestResponseCycle)
    for name in ("response_started", "response_complete", "disconnected", "message_event", "keep_alive"):
        assert f"self.{name}" in fields, name
    # `Cycle.__init__` takes the place of uvicorn's: what that sets, ours does
    theirs = inspect.getsource(RequestResponseCycle.__init__)
    ours = inspect.getsource(Cycle.__init__)
    names = set(re.findall(r"self\.(\w+)(?::.*)? = ", theirs))
    assert len(names) > 15 and not {name for name in names if f"self.{name}" not in ours}
    # `Cycles.on_headers_complete` likewise: what uvicorn's does with the scope, ours does
    said = set(re.findall(r'self\.scope\["(\w+)"\]', source))
    written = inspect.getsource(Cycles.on_headers_complete)
    assert said == {"method", "http_version", "path", "raw_path", "query_string"}
    assert not {name for name in said if f'scope["{name}"]' not in written}
