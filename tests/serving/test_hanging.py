"""Work that hangs in a real server: deadlines, turns, clients that leave, and an end in time."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import wire
from retrieval.serving.http.turns import WAITING_PER_WORKER
from retrieval.serving.index.index import Index, create_index, open_index

LIVE = wire.get("/livez")


SLEEPY = """
import os, sys, time
from pathlib import Path
from retrieval.serving.index.index import Index

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


def test_an_answer_has_a_deadline_and_readiness_knows(sleepy):
    server = sleepy("--deadline", "1")
    port, ready = server.port, wire.get("/readyz")
    assert wire.found(wire.ask(port, wire.vector()))
    server.hang.touch()
    late = wire.ask(port, wire.vector())
    assert (late.status, late.headers["retry-after"]) == (503, "1")
    assert "no answer within 1 seconds" in late.error
    unready = wire.until(lambda: (a := wire.ask(port, ready)).status == 503 and a)
    assert unready.error == "Searches take longer than 1 seconds."
    # the gallery has threads of its own
    for request in (LIVE, wire.get("/v1/items/3%2F0003.png/image")):
        assert wire.ask(port, request).status == 200
    server.hang.unlink()
    wire.until(lambda: wire.ask(port, ready).status == 200)
    assert wire.found(wire.ask(port, wire.vector()))
    assert figure(port, 'retrieval_refused_total{reason="deadline"}') >= 1


def figure(port: int, name: str) -> float:
    """Return one of the figures that Prometheus is told."""
    lines = wire.ask(port, wire.get("/metrics")).body.decode().splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def test_what_clients_left_is_not_begun(sleepy):
    server = sleepy("--deadline", "20")
    port = server.port
    wire.until(lambda: server.begun.exists() and not time.sleep(0.5))
    server.begun.write_text("")
    server.hang.touch()
    with wire.connect(port) as first:
        first.sendall(wire.vector())
        wire.until(lambda: server.begun.read_text())
        for _ in range(10):
            with wire.connect(port) as connection:
                connection.sendall(wire.vector())
                time.sleep(0.1)
        time.sleep(0.5)
        server.begun.write_text("")
        server.hang.unlink()
        assert wire.read_answer(first).status == 200
    assert wire.found(wire.ask(port, wire.vector()))
    assert len(server.begun.read_text()) <= 3  # this one, and those of readiness


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
        wire.until(lambda: figure(port, queue) == WAITING_PER_WORKER)
        early = stack.enter_context(wire.connect(port))
        early.sendall(head + b"\r\n\r\n")  # and nothing of the body
        answer = wire.read_answer(early)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.headers["content-type"] == "application/problem+json"
        assert "too many searches are waiting" in answer.error
        assert figure(port, 'retrieval_refused_total{reason="queue"}') >= 1
        server.hang.unlink()
        answers = [wire.read_answer(connection).status for connection in crowd]
        assert set(answers) <= {200, 503} and answers.count(200) >= WAITING_PER_WORKER
        early.sendall(body + search)  # the connection goes on
        assert wire.found(wire.read_answer(early))


def test_it_ends_in_time_whatever_hangs(sleepy, photos):
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


# SIGTERM while items or a snapshot are written: what was accepted is finished, and what a client
# was told is there is there.


@pytest.fixture
def writing(served, empty):
    """A server that is written to by four clients, each of which keeps what was acknowledged."""
    server, acknowledged, statuses = served(empty, "--open", "admin"), [], []

    def write(number: int) -> None:
        vector = {"vector": [float(number + 1)] * 16}
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for turn in range(100_000):
                try:
                    answer = client.put(f"/v1/items/{number}-{turn}", json=vector)
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                    return  # it takes no new connection, and closes those that wait for a request
                if answer.status_code != 200:
                    statuses.append(answer.status_code)
                    return
                acknowledged.append(f"{number}-{turn}")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    return SimpleNamespace(
        server=server, path=empty, acknowledged=acknowledged, statuses=statuses, threads=threads
    )


def test_what_was_accepted_is_written(writing):
    wire.until(lambda: len(writing.acknowledged) >= 20)
    writing.server.process.send_signal(signal.SIGTERM)
    assert writing.server.process.wait(15) == 0
    for thread in writing.threads:
        thread.join(15)
        assert not thread.is_alive()
    assert set(writing.statuses) <= {503}
    with Index.open(writing.path, threads=1) as index:
        stored = {item.id for item in index.scan(limit=100_000)}
    acknowledged = set(writing.acknowledged)
    assert acknowledged <= stored
    # written, and the answer was cut off
    assert len(stored - acknowledged) <= len(writing.threads)
    assert writing.server.process.stderr.read() == ""


@pytest.fixture
def snapshotting(served, bundle_path, photos, tmp_path):
    """A server whose snapshot stands still at a file that is a terminal, until somebody types."""
    create_index(tmp_path / "i", bundle_path, [photos / "1"], progress=False)
    typed, terminal = os.openpty()
    (bundle,) = (tmp_path / "i" / "bundles").iterdir()
    (bundle / "slow").symlink_to(os.ttyname(terminal))
    copies = tmp_path / "copies"
    copies.mkdir()
    answers: list[httpx.Response | None] = []

    def start(*options):
        server = served(tmp_path / "i", "--open", "admin", "--snapshots", str(copies), *options)

        def ask():
            try:
                answers.append(httpx.post(f"{server.url}/v1/snapshots", timeout=60))
            except httpx.TransportError:
                answers.append(None)

        asking = threading.Thread(target=ask)
        asking.start()
        wire.until(lambda: [path for path in copies.rglob("slow") if path.stat().st_size == 0])
        server.process.send_signal(signal.SIGTERM)
        return SimpleNamespace(process=server.process, asking=asking)

    yield SimpleNamespace(
        start=start,
        typed=typed,
        copies=copies,
        answers=answers,
        count=len(list((photos / "1").iterdir())),
    )
    os.close(typed)
    os.close(terminal)


def visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def test_a_snapshot_that_was_begun_is_finished(snapshotting):
    server = snapshotting.start()
    time.sleep(0.5)
    assert server.process.poll() is None and visible(snapshotting.copies) == []
    os.write(snapshotting.typed, b"\x04")  # the end of the file
    assert server.process.wait(15) == 0
    server.asking.join(15)
    (answer,) = snapshotting.answers
    assert answer.status_code == 201
    (copy,) = visible(snapshotting.copies)
    assert copy.name == answer.json()["snapshot"]
    with open_index(copy, threads=1) as index:
        assert len(index) == snapshotting.count
    assert server.process.stderr.read() == ""


def test_a_snapshot_beyond_the_grace_is_given_up_and_none_appears(snapshotting):
    server = snapshotting.start()
    began = time.monotonic()
    assert server.process.wait(15) == 0
    assert time.monotonic() - began < 11
    server.asking.join(15)
    (answer,) = snapshotting.answers
    assert answer is None or answer.status_code == 503
    assert visible(snapshotting.copies) == []
