"""What a real server bounds in number, time and memory, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import wire
from PIL import Image
from retrieval.serving.http import budget as bodies
from retrieval.serving.http.budget import Budget
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.pool import Pool
from retrieval.serving.index.creating import create_index

LIVE = wire.get("/livez")


@pytest.fixture
def port(served, index_path) -> int:
    return served(index_path).port


def memory_of(server: SimpleNamespace) -> int:
    """Return the resident bytes of the server's own process."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# --- time and memory


def test_a_body_in_tiny_chunks_is_cut_off(port, photos):
    body = wire.form((photos / "3" / "0003.png").read_bytes())
    large = wire.form(bytes(200_000))
    assert (
        wire.ask(port, wire.chunked([body[i : i + 10] for i in range(0, len(body), 10)], wire.FORM)).status
        == 200
    )
    tiny = wire.chunked([large[i : i + 1] for i in range(len(large))], wire.FORM)
    assert wire.ask(port, tiny).status in (0, 400)
    assert wire.ask(port, LIVE).status == 200


def test_connections_that_say_nothing_give_way(served, index_path, photos):
    port = served(
        index_path, "--connections", "64", "--connections-per-address", "48", "--idle-seconds", "2"
    ).port
    search = wire.post(wire.form((photos / "3" / "0003.png").read_bytes(), "1"), wire.FORM)
    idle = [wire.connect(port) for _ in range(150)]
    try:
        time.sleep(0.6)
        assert wire.ask(port, LIVE).status == 200
        assert wire.ask(port, wire.get("/readyz")).status == 200
        assert wire.found(wire.ask(port, search))
        assert wire.found(wire.ask(port, search, source="127.0.0.2"))
        dripping = idle.pop()
        dripping.close()
        dripping = wire.connect(port)
        dripping.sendall(b"GET / HTTP/1.1\r\nX: ")
        answer = wire.read_answer(dripping)  # it never ends its header
        dripping.close()
        assert answer.status == 408
        assert answer.error == "No complete header came within 2 seconds."
        for connection in idle:  # and all that said nothing are closed by now
            connection.settimeout(10)
            assert connection.recv(1) == b""
    finally:
        for connection in idle:
            connection.close()


def test_uploads_share_a_memory(served, index_path, photos):
    """Unfinished ones that stall give theirs back to others; while none has stalled, the answer is 503."""
    port = served(index_path, "--body-memory", "1000000").port
    head = wire.post(bytes(400_000), wire.FORM)[:-200_000]
    held = [wire.connect(port) for _ in range(5)]
    for connection in held:
        connection.sendall(head)
    good = wire.post(wire.form((photos / "3" / "0003.png").read_bytes()), wire.FORM)
    large = wire.post(wire.form(bytes(300_000)), wire.FORM)
    busy = wire.ask(port, large)
    assert (busy.status, busy.headers["retry-after"]) == (503, "1")
    assert "memory" in busy.error
    time.sleep(1.2)
    assert wire.ask(port, large).status == 422  # it was read: no image
    assert wire.ask(port, good).status == 200
    assert "The upload stalled" in wire.read_answer(held[0]).error
    for connection in held:
        connection.close()
    for _ in range(20):  # what they held is back
        assert wire.ask(port, large).status == 422


def test_a_limit_on_files_is_raised_or_named(index_path, tmp_path):
    def limited(hard: int):
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))

    command = [sys.executable, "-m", "retrieval.cli", "serve", str(index_path), "--port", "0"]
    refused = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited(256), cwd=tmp_path)
    assert refused.returncode == 2
    assert "may open 256 files, and 768 are needed" in refused.stderr
    assert "ulimit -Hn" in refused.stderr
    raised = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=limited(4096), cwd=tmp_path
    )
    try:
        port = int(raised.stdout.readline().split("/ ")[0].rpartition(":")[2])
        crowd = [wire.connect(port) for _ in range(700)]
        assert wire.ask(port, LIVE).status == 200
        for connection in crowd:
            connection.close()
    finally:
        raised.terminate()
        raised.wait(15)
        raised.stdout.close()


def test_health_has_a_port_of_its_own(served, index_path):
    server = served(index_path, "--health-port", "0", "--connections", "8")
    # the line that names both ports was read by the fixture: ask for the sockets that listen
    lines = Path(f"/proc/{server.process.pid}/net/tcp").read_text().splitlines()[1:]
    inodes = {str(f.readlink()) for f in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    ports = {
        int(line.split()[1].split(":")[1], 16)
        for line in lines
        if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes
    }
    (health,) = ports - {server.port}
    assert wire.ask(health, LIVE).status == 200
    assert wire.ask(health, wire.get("/readyz")).status == 200
    assert "port" in wire.ask(health, wire.get("/v1/index")).error
    assert wire.ask(health, wire.vector()).status == 404


def test_files_that_change_under_a_server_end_its_readiness_and_not_its_answers(served, index_path, tmp_path):
    own = Path(shutil.copytree(index_path, tmp_path / "own"))
    port = served(own, "--probe-seconds", "0.2").port
    before = wire.found(wire.ask(port, wire.vector()))
    for name in ("vectors.npy", "vectors.faiss", "items.sqlite"):
        (own / name).write_bytes(b"something else")
    unready = wire.until(lambda: (a := wire.ask(port, wire.get("/readyz"))).status == 503 and a)
    assert unready.error == (
        "The files of the index are no longer those that are served. Start the server again."
    )
    assert wire.found(wire.ask(port, wire.vector())) == before
    shutil.rmtree(own)
    assert wire.found(wire.ask(port, wire.vector())) == before
    assert wire.ask(port, LIVE).status == 200


def test_a_gallery_of_pipes_and_changed_files_stops_nothing(served, makers, bundle_path, tmp_path):
    paths = makers.write_digits(tmp_path / "photos", 12)
    create_index(tmp_path / "i", bundle_path, [tmp_path / "photos"], progress=False)
    server = served(tmp_path / "i", "--grace", "3")
    port = server.port
    for path in paths:
        path.unlink()
        os.mkfifo(path)
    asking = [wire.connect(port) for _ in range(12)]
    for number, one in enumerate(asking):
        one.sendall(wire.get(f"/v1/items/{number}/image"))
    assert {wire.read_answer(one).status for one in asking} == {404}
    assert wire.found(wire.ask(port, wire.vector()))
    server.process.terminate()
    assert server.process.wait(10) == 0
    for one in asking:
        one.close()


def test_a_storage_that_hangs_keeps_only_the_gallery_waiting():
    """Its threads are its own, and none of them keeps the process."""

    async def scenario() -> None:
        gate = threading.Event()
        pictures, searches = Pool("picture", 2, 4), Pool("search", 1, 4)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.gather(*(pictures.run(lambda job: gate.wait()) for _ in range(5)))
        assert await searches.run(lambda job: 5) == 5
        assert not pictures.close(0.1)
        assert searches.close(5)
        gate.set()
        assert pictures.close(5)

    asyncio.run(scenario())


def test_a_large_picture_comes_whole_and_a_slow_reader_holds_a_piece(served, makers, bundle_path, tmp_path):
    paths = makers.write_digits(tmp_path / "photos", 3)
    noise = np.random.default_rng(0).integers(0, 256, (2000, 2000, 3), dtype=np.uint8)
    Image.fromarray(noise).save(paths[0], compress_level=0)
    create_index(tmp_path / "i", bundle_path, [tmp_path / "photos"], progress=False)
    server = served(tmp_path / "i")
    port = server.port
    (number,) = (
        hit["id"] for hit in wire.found(wire.ask(port, wire.vector())) if hit["key"].endswith(paths[0].name)
    )
    assert wire.ask(port, wire.get(f"/v1/items/{number}/image")).body == paths[0].read_bytes()
    slow = [wire.connect(port) for _ in range(20)]
    before = memory_of(server)
    for one in slow:
        one.sendall(wire.get(f"/v1/items/{number}/image"))
    time.sleep(1)
    assert memory_of(server) - before < 100_000_000  # 240 MB were asked for
    for one in slow:
        one.close()
    head = wire.get(f"/v1/items/{number}/image").replace(b"GET", b"HEAD")
    with wire.connect(port) as connection:
        connection.sendall(head + wire.get("/livez"))
        got = connection.recv(65_536)
        while b"live" not in got:
            got += connection.recv(65_536)
    assert f"content-length: {paths[0].stat().st_size}".encode() in got


def test_pictures_that_are_converted_count_in_the_memory_of_uploads(served, makers, bundle_path, tmp_path):
    paths = makers.write_digits(tmp_path / "photos", 3)
    noise = np.random.default_rng(0).integers(0, 256, (500, 600, 3), dtype=np.uint8)
    paths[0].unlink()
    Image.fromarray(noise).save(tmp_path / "photos" / "large.tiff")
    create_index(tmp_path / "i", bundle_path, [tmp_path / "photos"], progress=False)
    port = served(tmp_path / "i", "--body-memory", "2000000").port
    hits = wire.found(wire.ask(port, wire.vector()))
    (number,) = (hit["id"] for hit in hits if hit["key"] == "large.tiff")
    ask = wire.get(f"/v1/items/{number}/image")
    for _ in range(5):  # what one took is back for the next
        shown = wire.ask(port, ask)
        assert shown.status == 200
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(shown.body))), noise)
    small = served(tmp_path / "i", "--body-memory", "1000000").port
    assert "memory" in wire.ask(small, ask).error


def test_memory_comes_back_after_large_uploads(served, index_path):
    """In the lull after a burst of 240 MB the server's own process holds at most 24 MB more than before it."""
    server = served(index_path)
    image = io.BytesIO()
    Image.new("L", (4000, 5000)).save(image, "PPM")
    upload = wire.post(wire.form(image.getvalue()[:19_900_000]), wire.FORM)  # cut off: refused at the end
    before = memory_of(server)

    def send() -> None:
        for _ in range(3):
            assert wire.ask(server.port, upload).status in (422, 503)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wire.until(lambda: memory_of(server) < before + 24_000_000)


def test_what_cycles_hold_after_a_burst_is_collected_in_the_lull(monkeypatch):
    """Also when the burst's own memory was given back while it lasted."""
    monkeypatch.setattr(bodies, "_LULL", 0.01)

    def refused() -> weakref.ref[RequestError]:
        try:
            raise RequestError(422, "The image is damaged.")
        except RequestError as fault:
            kept = fault  # the fault holds this frame, and this frame the fault
            return weakref.ref(kept)

    async def scenario() -> None:
        budget = Budget(1_000_000_000)
        keeper = asyncio.create_task(bodies.give_back(budget))
        held = refused()
        with budget.upload() as upload:
            budget.take(upload, 100_000_000)
        async with asyncio.timeout(20):
            while held() is not None:
                await asyncio.sleep(0.01)
        keeper.cancel()

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
