"""SIGTERM while items are written: what was accepted is finished, and what a client was told is there is there."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from retrieval.serving.index.creating import create_index
from retrieval.serving.index.living import LivingIndex

WIDTH = 16


@pytest.fixture
def writing(served, bundle_path, tmp_path) -> SimpleNamespace:
    """A server that is written to by four clients, each of which keeps what it was told."""
    create_index(tmp_path / "i", bundle_path, progress=False)
    server = served(tmp_path / "i", "--open", "admin")
    told: list[str] = []
    others: list[int] = []

    def write(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for turn in range(100_000):
                id = f"{number}-{turn}"
                try:
                    answer = client.put(f"/v1/items/{id}", json={"vector": [float(number + 1)] * WIDTH})
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
                    return  # it takes no new connection, and closes those that wait for a request
                if answer.status_code != 200:
                    others.append(answer.status_code)
                    return
                told.append(id)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    return SimpleNamespace(server=server, path=tmp_path / "i", told=told, others=others, threads=threads)


def test_what_was_accepted_is_written(writing):
    end = time.monotonic() + 20
    while len(writing.told) < 20 and time.monotonic() < end:
        time.sleep(0.02)
    writing.server.process.send_signal(signal.SIGTERM)
    assert writing.server.process.wait(15) == 0
    for thread in writing.threads:
        thread.join(15)
        assert not thread.is_alive()
    assert len(writing.told) >= 20 and set(writing.others) <= {503}
    with LivingIndex.open(writing.path, threads=1) as index:
        there = {item.id for item in index.scan(limit=100_000)}
    assert set(writing.told) <= there
    assert len(there - set(writing.told)) <= len(writing.threads)  # written, and the answer was cut off
    assert writing.server.process.stderr.read() == ""
