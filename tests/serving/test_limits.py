"""What a real server refuses, bounds and survives, over real sockets: framing, hosts, connections, memory, time."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from retrieval.index.build import build_index

_spec = importlib.util.spec_from_file_location("wire", Path(__file__).parents[1] / "attack" / "wire.py")
wire = importlib.util.module_from_spec(_spec)
sys.modules["wire"] = wire
_spec.loader.exec_module(wire)

LIVE = wire.get("/v1/health/live")


def port_of(server: SimpleNamespace) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.fixture
def port(served, index_path) -> int:
    return port_of(served(index_path))


def memory_of(server: SimpleNamespace) -> int:
    """Return the resident bytes of the server's own process."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def until(what, seconds: float = 15.0):
    """Ask until the answer is not false; bounded."""
    end = time.monotonic() + seconds
    while not (got := what()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return got


# --- framing, headers, hosts


def test_ambiguous_framing_is_refused(port):
    """Whatever a proxy before this server might read in another way."""
    line, host, end = b"POST /v1/search HTTP/1.1\r\n", b"Host: localhost\r\n", b"\r\n"
    kind, body = b"Content-Type: application/json\r\n", b'{"vector": [1]}'
    for name, request, status in (
        ("both lengths", line + host + kind + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("both, in the other order", line + host + kind + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
        ("a list of lengths", line + host + kind + b"Content-Length: 0, 0\r\n\r\n", 400),
        ("two lengths", line + host + kind + b"Content-Length: 15\r\nContent-Length: 15\r\n\r\n" + body, 400),
        ("a signed length", line + host + kind + b"Content-Length: +15\r\n\r\n" + body, 400),
        ("twice chunked", line + host + kind + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
        ("another encoding", line + host + kind + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        ("a bare line feed", b"GET /v1/health/live HTTP/1.1\nHost: localhost\n\n", 400),
        ("a bare line feed in a header", b"GET /v1/health/live HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n", 400),
        ("a folded header", b"GET /v1/health/live HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n", 400),
        ("space before the colon", b"GET /v1/health/live HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        ("a null in a header", b"GET /v1/health/live HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n", 400),
        ("no host", b"GET /v1/health/live HTTP/1.1\r\n\r\n", 400),
        ("two hosts", b"GET /v1/health/live HTTP/1.1\r\n" + host + host + end, 400),
        ("a bad chunk", line + host + kind + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        ("a chunk without its length", line + host + kind + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc", 400),
        ("many headers", b"GET /v1/health/live HTTP/1.1\r\n" + host + b"X: y\r\n" * 100 + end, 431),
        ("a large header", b"GET /v1/health/live HTTP/1.1\r\n" + host + b"X: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        ("a header without an end", b"GET /v1/health/live HTTP/1.1\r\n" + host + b"X: " + b"y" * 400_000, 431),
        ("a long address", b"GET /" + b"y" * 40_000 + b" HTTP/1.1\r\n" + host + end, 431),
        ("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), 400),
    ):  # fmt: skip
        answer = wire.ask(port, request)
        assert answer.status == status, (name, answer)
        assert answer.error.endswith("."), name
        assert answer.headers["connection"] == "close", name
    many = b"".join([LIVE] * 50)
    with wire.connect(port) as connection:
        connection.sendall(many)
        answers = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answers.count(b"HTTP/1.1 200 OK") <= 10
    assert b"without waiting for an answer" in answers
    assert wire.ask(port, LIVE).status == 200


def test_a_large_trailer_ends_the_connection(port):
    request = wire.chunked([b"{}"], "application/json")[:-2] + b"X: y\r\n" * 100_000 + b"\r\n"
    assert wire.ask(port, request).status in (0, 400)
    assert wire.ask(port, LIVE).status == 200


def test_only_known_hosts_are_answered_and_none_is_reflected(served, index_path):
    port = port_of(served(index_path, "--allow-host", "Photos.example"))
    for host in (
        "localhost",
        f"localhost:{port}",
        "127.0.0.1",
        f"[::1]:{port}",
        "10.1.2.3",
        "photos.example:80",
        "LOCALHOST.",
    ):
        assert wire.ask(port, wire.get("/v1/index", host=host)).status == 200, host
    for host in (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "photos.example.evil.example",
        "a@localhost",
    ):
        answer = wire.ask(port, wire.get("/v1/index", host=host))
        assert answer.status == 421, host
        assert "--allow-host" in answer.error
    for path in ("/v1/search/", "/v1/index/", "//evil.example/", "/nowhere-of-mine"):
        answer = wire.ask(port, wire.get(path))
        assert answer.status == 404, path
        assert "location" not in answer.headers
        assert b"example" not in answer.body + str(answer.headers).encode()
        assert b"nowhere-of-mine" not in answer.body


def test_other_sites_pages_cannot_search_or_show(port):
    body = json.dumps({"vector": [0.25] * 16}).encode()
    for headers, status in (
        ((), 200),
        ((f"Origin: http://localhost:{port}", "Sec-Fetch-Site: same-origin"), 200),
        (("Sec-Fetch-Site: none",), 200),
        (("Sec-Fetch-Site: cross-site",), 403),
        (("Sec-Fetch-Site: same-site", f"Origin: http://localhost:{port}"), 403),
        (("Origin: http://evil.example",), 403),
        (("Origin: null",), 403),
    ):
        answer = wire.ask(port, wire.post(body, "application/json", *headers, host=f"localhost:{port}"))
        assert answer.status == status, (headers, answer)
    for path in ("/", "/page.js", "/v1/items/0/image", "/v1/index", "/nowhere", "/v1/index?x=1"):
        answer = wire.ask(port, wire.get(path))
        assert answer.headers["cross-origin-resource-policy"] == "same-origin", path
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"], path


# --- what a client sends is never a 500


def test_no_request_is_the_servers_fault(served, index_path, photos):
    server = served(index_path)
    port, good = port_of(server), (photos / "3" / "0003.png").read_bytes()
    for charset in ("undefined", "punycode", "idna", "rot13", "x" * 1000, "utf-8\\"):
        answer = wire.ask(
            port, wire.post(wire.form(good, "3"), f"multipart/form-data; boundary=b; charset={charset}")
        )
        assert answer.status in (200, 400), (charset, answer)
    for number in ("1" * 4301, "9" * 20_000, "1" * 19, "²", "%C2%B2", "1_0", "+1", " 1", "0x1", "1e3"):
        assert wire.ask(
            port,
            wire.get(
                f"/v1/items/{number}/image".replace(" ", "%20"),
            ),
        ).status in (400, 404), number
    for body in (b'{"vector": [1e999]}', b'{"vector": [' + b"9" * 5000 + b"]}", b'{"vector": [1], "k": ' + b"9" * 5000 + b"}",
                 b'{"k": 1, "k": 2, "vector": [1]}', b'{"vector": ' + b"[" * 60_000, b'"\\ud800"', b"\xff\xfe{}", b"\x00", b"nul"):  # fmt: skip
        answer = wire.ask(port, wire.post(body))
        assert answer.status in (400, 422), (body[:50], answer)
    for name, body in (
        (
            "a field too many",
            wire.form(good).replace(
                b"--b--", b'--b\r\nContent-Disposition: form-data; name="kk"\r\n\r\n3\r\n--b--'
            ),
        ),
        (
            "k twice",
            wire.form(good, "3").replace(
                b"--b--", b'--b\r\nContent-Disposition: form-data; name="k"\r\n\r\n3\r\n--b--'
            ),
        ),
        ("no end", wire.form(good)[:-10]),
        ("no name", b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n"),
        ("no disposition", b"--b\r\n\r\nx\r\n--b--\r\n"),
        ("many parts", b'--b\r\nContent-Disposition: form-data; name="k"\r\n\r\n\r\n' * 20_000),
        ("many headers", b"--b\r\n" + b"X: y\r\n" * 20_000 + b"\r\nx\r\n--b--\r\n"),
        (
            "a long header",
            b"--b\r\nContent-Disposition: form-data; name=" + b"x" * 60_000 + b"\r\n\r\nx\r\n--b--\r\n",
        ),
        ("nothing", b""),
    ):
        answer = wire.ask(port, wire.post(body, wire.FORM))
        assert answer.status == 400, (name, answer)
    unknown = wire.ask(port, wire.post(wire.form(good, "3").replace(b'"k"', b'"K"'), wire.FORM))
    assert unknown.status == 400 and "unknown field" in unknown.error
    query = wire.post(wire.form(good, "3"), wire.FORM).replace(b"/v1/search ", b"/v1/search?k=1 ")
    assert "query string" in wire.ask(port, query).error
    assert len(wire.found(wire.ask(port, wire.post(wire.form(good, "3"), wire.FORM)))) == 3
    server.process.terminate()
    assert server.process.wait(15) == 0
    assert server.process.stderr.read().count("\n") < 40


def test_no_path_of_the_machine_is_shown(served, makers, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", normalized=False)
    import numpy as np

    np.savez(tmp_path / "f.npz", features=np.random.default_rng(0).normal(size=(10, 64)))
    build_index(bundle, [tmp_path / "f.npz"], tmp_path / "i", progress=False)
    port = port_of(served(tmp_path / "i"))
    for request in (
        wire.post(wire.form(b"x"), wire.FORM),
        wire.vector(width=3),
        wire.post(json.dumps({"vector": [1e300] * 64}).encode()),
        wire.get("/v1/items/1/image"),
    ):
        answer = wire.ask(port, request)
        assert 400 <= answer.status < 500
        assert str(tmp_path) not in answer.body.decode(), answer.body


def test_the_log_stays_small(served, index_path):
    server = served(index_path)
    for _ in range(300):
        wire.ask(port_of(server), b"nonsense\r\n\r\n")
    server.process.terminate()
    assert server.process.wait(15) == 0
    assert len(server.process.stderr.read()) < 10_000


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
    port = port_of(
        served(index_path, "--connections", "64", "--connections-per-address", "48", "--idle-seconds", "2")
    )
    search = wire.post(wire.form((photos / "3" / "0003.png").read_bytes(), "1"), wire.FORM)
    idle = [wire.connect(port) for _ in range(150)]
    try:
        time.sleep(0.6)
        assert wire.ask(port, LIVE).status == 200
        assert wire.ask(port, wire.get("/v1/health/ready")).status == 200
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
    port = port_of(served(index_path, "--body-memory", "1000000"))
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
    (health,) = ports - {port_of(server)}
    assert wire.ask(health, LIVE).status == 200
    assert wire.ask(health, wire.get("/v1/health/ready")).status == 200
    assert "port" in wire.ask(health, wire.get("/v1/index")).error
    assert wire.ask(health, wire.vector()).status == 404


def test_files_that_change_under_a_server_end_its_readiness_and_not_its_answers(served, index_path, tmp_path):
    own = Path(shutil.copytree(index_path, tmp_path / "own"))
    port = port_of(served(own, "--probe-seconds", "0.2"))
    before = wire.found(wire.ask(port, wire.vector()))
    for name in ("vectors.npy", "vectors.faiss", "items.sqlite"):
        (own / name).write_bytes(b"something else")
    unready = until(lambda: (a := wire.ask(port, wire.get("/v1/health/ready"))).status == 503 and a)
    assert unready.error == (
        "The files of the index are no longer those that are served. Start the server again."
    )
    assert wire.found(wire.ask(port, wire.vector())) == before
    shutil.rmtree(own)
    assert wire.found(wire.ask(port, wire.vector())) == before
    assert wire.ask(port, LIVE).status == 200


def test_a_gallery_of_pipes_and_changed_files_stops_nothing(served, makers, bundle_path, tmp_path):
    paths = makers.write_digits(tmp_path / "photos", 12)
    build_index(bundle_path, [tmp_path / "photos"], tmp_path / "i", progress=False)
    server = served(tmp_path / "i", "--grace", "3")
    port = port_of(server)
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
    import asyncio

    from retrieval.serve.pool import Pool

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
    import numpy as np
    from PIL import Image

    paths = makers.write_digits(tmp_path / "photos", 3)
    noise = np.random.default_rng(0).integers(0, 256, (2000, 2000, 3), dtype=np.uint8)
    Image.fromarray(noise).save(paths[0], compress_level=0)
    build_index(bundle_path, [tmp_path / "photos"], tmp_path / "i", progress=False)
    server = served(tmp_path / "i")
    port = port_of(server)
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
    build_index(
        bundle_path,
        [photos / "3"],
        tmp_path / "i",
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
    port = port_of(server)
    assert wire.found(wire.ask(port, wire.vector()))
    server.hang.touch()
    late = wire.ask(port, wire.vector())
    assert (late.status, late.headers["retry-after"]) == (503, "1")
    assert "longer than 1 seconds" in late.error
    unready = until(lambda: (a := wire.ask(port, wire.get("/v1/health/ready"))).status == 503 and a)
    assert unready.error == "Searches take longer than 1 seconds."
    assert wire.ask(port, LIVE).status == 200
    assert wire.ask(port, wire.get("/v1/items/0/image")).status == 200  # the gallery has threads of its own
    server.hang.unlink()
    until(lambda: wire.ask(port, wire.get("/v1/health/ready")).status == 200)
    assert wire.found(wire.ask(port, wire.vector()))


def test_what_clients_left_is_not_begun(sleepy):
    server = sleepy("--deadline", "20", "--probe-seconds", "60")
    port = port_of(server)
    server.begun.write_text("")
    server.hang.touch()
    with wire.connect(port) as first:
        first.sendall(wire.vector())
        until(lambda: server.begun.read_text())
        for _ in range(10):
            with wire.connect(port) as one:
                one.sendall(wire.vector())
        time.sleep(0.5)
        server.hang.unlink()
        assert wire.read_answer(first).status == 200
    assert wire.found(wire.ask(port, wire.vector()))
    assert len(server.begun.read_text()) == 2


def test_clients_take_turns(sleepy):
    """One address with many searches waiting neither keeps another out nor makes it wait for all of them."""
    server = sleepy("--deadline", "20", "--probe-seconds", "60", "--waiting", "8")
    port = port_of(server)
    server.hang.touch()
    crowd = [wire.connect(port) for _ in range(9)]
    for one in crowd:
        one.sendall(wire.vector())
    time.sleep(0.5)
    assert "too many searches are waiting" in wire.ask(port, wire.vector()).error
    with wire.connect(port, source="127.0.0.2") as other:
        other.sendall(wire.vector())
        dropped = wire.read_answer(crowd[-1])  # the newest of those who have most
        assert dropped.status == 503
        server.hang.unlink()
        assert wire.found(wire.read_answer(other))
    assert [wire.read_answer(one).status for one in crowd[:-1]] == [200] * 8
    for one in crowd:
        one.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_time_whatever_hangs(how, sleepy, photos):
    server = sleepy("--grace", "3")
    port = port_of(server)
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
    for one in asking:
        one.close()


# --- what is used of uvicorn


def test_what_is_used_of_uvicorn_is_there():
    """`serve/protocol.py` overrides and reads these. When this fails, uvicorn has changed: read its class again."""
    from uvicorn import Config, Server
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
    from uvicorn.server import ServerState

    overridden = (
        "connection_made connection_lost data_received on_message_begin on_url on_header on_headers_complete on_body "
        "on_message_complete on_response_complete pause_writing resume_writing send_400_response "
        "_unset_keepalive_if_required"
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
