"""Work that hangs in a real server: deadlines, full queues, clients that leave, timely ends."""

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import wire
from retrieval.index.index import Index, create_index, open_index

from retrieval_server.served_index import WAITING_PER_WORKER

SLEEPY = """
import os, sys, time
from pathlib import Path
from retrieval.index.index import Index

FOLDER = Path(sys.argv.pop(1))
search = Index.search

def slow(self, *given, **more):
    with (FOLDER / "begun").open("a") as file:
        file.write("x")
    while (FOLDER / "hang").exists():
        time.sleep(0.02)
    return search(self, *given, **more)

Index.search = slow
from retrieval.cli.app import main
sys.exit(main())
"""


@pytest.fixture
def sleepy(served, index_path, photos, tmp_path):
    """A server whose searches hang while `hang` exists."""
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    hang = tmp_path / "hang"

    def start(*options: str) -> SimpleNamespace:
        program = [str(tmp_path / "sleepy.py"), str(tmp_path)]
        options = ("--workers", "1", "--images", str(photos), *options)
        server = served(index_path, *options, program=program)
        server.hang, server.begun = hang, tmp_path / "begun"
        return server

    yield start
    hang.unlink(missing_ok=True)


def metric(port: int, name: str) -> float:
    """Return a value of `/metrics`."""
    lines = wire.ask(port, wire.get("/metrics")).body.decode().splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def test_a_response_has_a_deadline_and_readiness_reports_its_miss(sleepy):
    server = sleepy("--deadline", "1")
    port, ready = server.port, wire.get("/readyz")
    assert wire.found(wire.ask(port, wire.vector()))
    server.hang.touch()
    late = wire.ask(port, wire.vector())
    assert (late.status, late.headers["retry-after"]) == (503, "1")
    assert "no answer within 1 seconds" in late.error
    unready = wire.until(lambda: (a := wire.ask(port, ready)).status == 503 and a)
    assert unready.error == "Searches take longer than 1 seconds."
    for path in ("/livez", "/v1/items/3%2F0003.png/image"):  # images have their own threads
        assert wire.ask(port, wire.get(path)).status == 200
    server.hang.unlink()
    wire.until(lambda: wire.ask(port, ready).status == 200)
    assert wire.found(wire.ask(port, wire.vector()))
    assert metric(port, 'retrieval_refused_total{reason="deadline"}') >= 1


def test_a_search_whose_client_has_left_is_not_begun(sleepy):
    server = sleepy("--deadline", "20")
    port = server.port
    wire.until(lambda: server.begun.exists() and not time.sleep(0.5))
    server.begun.write_text("")
    server.hang.touch()
    with wire.connect(port) as first:
        first.sendall(wire.vector())
        wire.until(lambda: server.begun.read_text())
        for k in range(1, 11):  # another k each, since equal searches would be begun together
            with wire.connect(port) as connection:
                connection.sendall(wire.vector(k) * 2)  # uvicorn tells only the second request
                time.sleep(0.1)
        time.sleep(1)
        server.begun.write_text("")
        server.hang.unlink()
        assert wire.read_answer(first).status == 200
    assert wire.found(wire.ask(port, wire.vector()))
    assert len(server.begun.read_text()) <= 3  # the last search, and those of readiness


def test_a_full_queue_refuses_before_the_body_is_read(sleepy):
    server = sleepy("--deadline", "20")
    port, search = server.port, wire.vector()
    head, _, body = search.partition(b"\r\n\r\n")
    queue = 'retrieval_queue_length{queue="searches"}'
    server.hang.touch()
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(wire.connect(port)) for _ in range(WAITING_PER_WORKER + 2)]
        for connection in crowd:
            connection.sendall(search)
        wire.until(lambda: metric(port, queue) == WAITING_PER_WORKER)
        early = stack.enter_context(wire.connect(port))
        early.sendall(head + b"\r\n\r\n")
        answer = wire.read_answer(early)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["content-type"] == "application/problem+json"
        assert "too many searches are waiting" in answer.error
        assert metric(port, 'retrieval_refused_total{reason="queue"}') >= 1
        server.hang.unlink()
        answers = [wire.read_answer(connection).status for connection in crowd]
        assert set(answers) <= {200, 503} and answers.count(200) >= WAITING_PER_WORKER
        early.sendall(body + search)  # the connection is still usable
        assert wire.found(wire.read_answer(early))


def test_a_server_ends_in_time_whatever_hangs(sleepy, photos):
    server = sleepy()
    port = server.port
    server.hang.touch()
    asking = [wire.connect(port) for _ in range(6)]
    for connection in asking[:3]:
        connection.sendall(wire.vector())  # one hangs, two wait
    asking[3].sendall(wire.post(bytes(300_000), wire.FORM)[:-1])  # an upload that never ends
    asking[4].sendall(b"GET / HTTP/1.1\r\nHo")
    asking[5].sendall(wire.post(wire.form((photos / "3" / "0003.png").read_bytes()), wire.FORM))
    time.sleep(0.5)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert time.monotonic() - began < 11  # 10 are promised
    for connection in asking[:3]:
        answer = wire.read_answer(connection)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error == "The server is stopping. Try again in a moment."
    for connection in asking:
        connection.close()


# SIGTERM while items or a snapshot are written


def test_what_clients_wrote_before_a_signal_is_stored(served, empty):
    process, acknowledged = (server := served(empty, "--open", "admin")).process, []

    def write(number: int) -> int:
        """Put items until a request fails; return its status, or 0 if the connection was closed."""
        vector = {"vector": [float(number + 1)] * 16}
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for turn in range(100_000):
                try:
                    answer = client.put(f"/v1/items/{number}-{turn}", json=vector)
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                    return 0
                if answer.status_code != 200:
                    return answer.status_code
                acknowledged.append(f"{number}-{turn}")

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, number) for number in range(4)]
        try:
            wire.until(lambda: len(acknowledged) >= 20)
        finally:
            process.send_signal(signal.SIGTERM)  # which ends the writers
        assert process.wait(15) == 0
        assert {writer.result(15) for writer in writers} <= {0, 503}
    with Index.open(empty, threads=1) as index:
        stored = {item.id for item in index.scan(limit=100_000)}
    assert set(acknowledged) <= stored
    assert len(stored) - len(acknowledged) <= 4  # at most one response of each was cut off
    assert process.stderr.read() == ""


@pytest.fixture
def snapshotting(served, bundle_path, photos, tmp_path):
    """A server that got SIGTERM during a snapshot, which waits at a terminal for typed text."""
    create_index(tmp_path / "i", bundle_path, [photos / "1"], progress=False)
    typed, terminal = os.openpty()
    (bundle,) = (tmp_path / "i" / "bundles").iterdir()
    (bundle / "slow").symlink_to(os.ttyname(terminal))
    copies = tmp_path / "copies"
    copies.mkdir()
    server = served(tmp_path / "i", "--open", "admin", "--snapshots", str(copies))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{server.url}/v1/snapshots", timeout=60)
        wire.until(lambda: [path for path in copies.rglob("slow") if path.stat().st_size == 0])
        server.process.send_signal(signal.SIGTERM)
        yield SimpleNamespace(process=server.process, typed=typed, copies=copies, answer=answer)
        os.close(typed)
        os.close(terminal)


def visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def test_a_snapshot_that_was_begun_is_finished(snapshotting, photos):
    time.sleep(0.5)
    assert snapshotting.process.poll() is None and visible(snapshotting.copies) == []
    os.write(snapshotting.typed, b"\x04")  # the end of the file
    assert snapshotting.process.wait(15) == 0
    answer = snapshotting.answer.result(15)
    assert answer.status_code == 201
    (copy,) = visible(snapshotting.copies)
    assert copy.name == answer.json()["snapshot"]
    with open_index(copy, threads=1) as index:
        assert len(index) == len(list((photos / "1").iterdir()))
    assert snapshotting.process.stderr.read() == ""


def test_a_snapshot_beyond_the_grace_period_is_abandoned_and_does_not_appear(snapshotting):
    began = time.monotonic()
    assert snapshotting.process.wait(15) == 0
    assert time.monotonic() - began < 11
    with contextlib.suppress(httpx.TransportError):
        assert snapshotting.answer.result(15).status_code == 503
    assert visible(snapshotting.copies) == []
