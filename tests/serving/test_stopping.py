"""SIGTERM while items or a snapshot are written: what was accepted is finished, and what a client
was told is there is there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import wire
from retrieval.serving.index.index import Index, create_index, open_index

WIDTH = 16


@pytest.fixture
def writing(served, bundle_path, tmp_path) -> SimpleNamespace:
    """A server that is written to by four clients, each of which keeps what was acknowledged."""
    create_index(tmp_path / "i", bundle_path, progress=False)
    server = served(tmp_path / "i", "--open", "admin")
    acknowledged: list[str] = []
    statuses: list[int] = []

    def write(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for turn in range(100_000):
                id = f"{number}-{turn}"
                try:
                    answer = client.put(
                        f"/v1/items/{id}", json={"vector": [float(number + 1)] * WIDTH}
                    )
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                    return  # it takes no new connection, and closes those that wait for a request
                if answer.status_code != 200:
                    statuses.append(answer.status_code)
                    return
                acknowledged.append(id)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    return SimpleNamespace(
        server=server,
        path=tmp_path / "i",
        acknowledged=acknowledged,
        statuses=statuses,
        threads=threads,
    )


def test_what_was_accepted_is_written(writing):
    end = time.monotonic() + 20
    while len(writing.acknowledged) < 20 and time.monotonic() < end:
        time.sleep(0.02)
    writing.server.process.send_signal(signal.SIGTERM)
    assert writing.server.process.wait(15) == 0
    for thread in writing.threads:
        thread.join(15)
        assert not thread.is_alive()
    assert len(writing.acknowledged) >= 20 and set(writing.statuses) <= {503}
    with Index.open(writing.path, threads=1) as index:
        stored = {item.id for item in index.scan(limit=100_000)}
    assert set(writing.acknowledged) <= stored
    assert len(stored - set(writing.acknowledged)) <= len(
        writing.threads
    )  # written, and the answer was cut off
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

    def start(*options: str) -> SimpleNamespace:
        server = served(tmp_path / "i", "--open", "admin", "--snapshots", str(copies), *options)

        def ask() -> None:
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
