"""Limits of a real server in number, time and memory, over real sockets."""

import asyncio
import contextlib
import json
import os
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
import wire
from retrieval.index.index import create_index
from starlette.requests import ClientDisconnect, Request

from retrieval_server.forms import Body, BodyMemory, read_form
from retrieval_server.problems import RequestError
from retrieval_server.server import KEEP_ALIVE_SECONDS

LIVE = wire.get("/livez")


@pytest.fixture(scope="module")
def port(shared, index_path):
    return shared(index_path).port


def memory_of(server: SimpleNamespace) -> int:
    """Return the resident bytes of the server's process, without its decoders."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_images_that_became_pipes_do_not_stop_the_server(served, makers, bundle_path, tmp_path):
    paths = makers.write_digits(tmp_path / "photos", 12)
    create_index(tmp_path / "i", bundle_path, [tmp_path / "photos"], progress=False)
    server = served(tmp_path / "i", "--images", str(tmp_path / "photos"))
    for path in paths:
        path.unlink()
        os.mkfifo(path)
    with contextlib.ExitStack() as stack:
        asking = [stack.enter_context(wire.connect(server.port)) for _ in paths]
        for path, connection in zip(paths, asking, strict=True):
            id = quote(path.relative_to(tmp_path / "photos").as_posix(), safe="")
            connection.sendall(wire.get(f"/v1/items/{id}/image"))
        assert {wire.read_answer(connection).status for connection in asking} == {404}
        assert wire.found(wire.ask(server.port, wire.vector()))
        server.process.terminate()
        assert server.process.wait(10) == 0


def test_memory_comes_back_after_large_uploads(served, index_path):
    server = served(index_path)
    image = b"P5 4000 5000 255\n" + bytes(19_900_000 - 17)  # cut off: refused at the end
    upload = wire.post(wire.form(image), wire.FORM)
    before = memory_of(server)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: wire.ask(server.port, upload), range(12)))
    assert {answer.status for answer in answers} <= {422, 503}
    wire.until(lambda: memory_of(server) < before + 24_000_000)


def test_bodies_share_a_memory_and_give_it_back():
    memory = BodyMemory()

    def read(*chunks: bytes):
        left = [*chunks]

        async def receive() -> dict:
            if not left:
                return {"type": "http.disconnect"}
            body, more = left.pop(0), len(left) > 0 or len(chunks) > 2
            return {"type": "http.request", "body": body, "more_body": more}

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        return memory.read(Request(scope, receive), {"json": 64_000_000})

    async def scenario() -> None:
        bodies = [await read(bytes(size)) for size in 3 * [64_000_000] + [60_000_000]]
        assert memory.held == sum(len(body.content) for body in bodies) == 252_000_000
        for chunks, fault, says in (
            ((bytes(3_000_000), bytes(3_000_000)), RequestError, "memory"),
            ((bytes(2_000_000), bytes(256_000_000)), RequestError, "the limit is 64,000,000"),
            ((bytes(65_000_000),) * 5, RequestError, "too large"),  # the last is not read
            ((b"a", b"b", b"c"), ClientDisconnect, None),
        ):
            with pytest.raises(fault, match=says):
                await read(*chunks)
        assert memory.held == 252_000_000
        for body in bodies:
            memory.release(len(body.content))
        assert memory.held == 0
        most = await read(bytes(40_000_000), b"x" * 24_000_000)
        assert most.content == bytes(40_000_000) + b"x" * 24_000_000
        assert memory.held == 64_000_000
        memory.release(len(most.content))
        with pytest.raises(RequestError, match="too large"):
            await read(bytes(64_000_001))

    asyncio.run(scenario())


FLOODS = {
    "texts": b'{"vector": [' + b'"",' * 660_000 + b'""]}',
    "lists": b'{"vector": [' + b"[]," * 600_000 + b"[]]}",
    "objects": b'{"vector": [' + b"{}," * 49_000 + b"{}]}",
    "an object of texts": b'{"filter": {"a": [' + b'"",' * 99_000 + b'""]}}',
    "conditions": b'{"id": "a", "filter": {"and": [' + b'{"a":1},' * 32_000 + b'{"a":1}]}}',
    "unknown members": json.dumps(dict.fromkeys(map(str, range(90_000)), 0)).encode(),
    "a member twice": (
        json.dumps({str(n): 0 for n in range(90_000)})[:-1] + ',"89999":1}'
    ).encode(),
    "long numbers": b'{"vector": [' + (b"9" * 4000 + b",") * 490 + b'""]}',
    "a long key": b'{"' + b"a" * 1_999_000 + b'": 1}',
    "depth": b'{"vector": ' + b"[" * 1_900_000,
    "fields": b'{"id": "a", "fields": [' + b"1," * 99_000 + b"1]}",
}
BATCHES = {
    "entries": b'{"NAME": [' + b"{}," * 4_000_000 + b"{}]}",
    "few entries": b'{"NAME": [' + b"{}," * 240_000 + b"{}]}",
    "texts": b'{"NAME": [{"vector": [' + b'"",' * 499_000 + b'""]}]}',
    "unknown members": b'{"NAME": [' + FLOODS["unknown members"] + b"]}",
    "spaces": b'{"NAME": [' + b" " * 15_900_000 + b"]}",
    "brackets in a text": b'{"NAME": ["' + b"[" * 15_900_000 + b'"]}',
    "metadata": b'{"NAME": [{"id": 1, "metadata": {"a": [' + b"[]," * 249_000 + b"[]]}}]}",
}


def test_a_flood_of_json_needs_no_memory(served, index_path):
    """Before its shape was read first, a body of 2 MB took 684 MB, and one of 30 MB took 6.3 GB."""
    server = served(index_path, "--open", "write")

    def most() -> int:
        lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
        (kilobytes,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
        return int(kilobytes) * 1000

    before = most()
    headers = {"Content-Type": "application/json"}
    routes = ("POST /v1/search", "POST /v1/delete", "PUT /v1/items/a", "PATCH /v1/items/a")
    requests = [(route, body) for body in FLOODS.values() for route in routes]
    for path, name in (("search/batch", b"queries"), ("items", b"items")):
        requests += [(f"POST /v1/{path}", body.replace(b"NAME", name)) for body in BATCHES.values()]
    for route, body in requests:
        answer = server.client.request(*route.split(), content=body, headers=headers)
        assert answer.status_code in (400, 413), (route, body[:60], answer.text)
        assert len(answer.content) < 1000, (route, body[:60])
    flood = [wire.post(FLOODS["objects"])] * 6
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(partial(wire.ask, server.port), flood))
    assert [answer.status for answer in answers] == [400] * 6
    assert most() - before < 250_000_000
    assert server.client.get("/v1/index").json()["items"] == 200


def test_a_client_that_only_stops_sending_gets_its_answer(served, living, photos):
    """`printf … | nc -N`, and clients in other languages, close their half of a connection."""
    port = served(living, "--open", "write", "--images", str(photos)).port
    image = (photos / "3" / "0003.png").read_bytes()
    put = wire.post(b'{"vector": [' + b"1," * 15 + b"1]}").replace(
        b"POST /v1/search", b"PUT /v1/items/a"
    )
    for request, status in (
        (LIVE, 200),
        (wire.vector(), 200),
        (wire.post(wire.form(image), wire.FORM), 200),
        (wire.get("/v1/items"), 200),
        (wire.get("/v1/items/3%2F0003.png/thumbnail"), 200),
        (put, 200),
        (wire.get("/v1/items/nobody"), 404),
        (wire.post(b"{"), 400),
        (wire.vector() + wire.get("/v1/index") + LIVE, 200),
        (wire.get("/v1/index").replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
    ):
        with wire.connect(port) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            content = b"".join(iter(partial(connection.recv, 65_536), b""))
        assert content.startswith(b"HTTP/1.1 %d " % status), (request, content)
        assert content.count(b"HTTP/1.1 ") == max(1, request.count(b" HTTP/1.1\r\n")), content
    with wire.connect(port) as connection:  # the rest of this request will never come
        connection.sendall(wire.vector()[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""


def test_bodies_of_small_chunks_are_refused(port):
    pieces = [b'{"vector": [', *[b"0.25,"] * 15, b"0.25]}"]
    assert wire.found(wire.ask(port, wire.chunked(pieces, "application/json")))
    for body, status in ((b" " * 16_384, 400), (b" " * 16_385, 400), (b" " * 400_000, 400)):
        answer = wire.ask(port, wire.chunked([b"%c" % sign for sign in body], "application/json"))
        assert answer.status == status, answer
        assert ("small chunks" in answer.error) == (len(body) > 16_384)
    assert wire.ask(port, LIVE).status == 200


def test_a_file_whose_bytes_resemble_the_boundary_is_read_whole():
    image = b"\r\n--" * 50_000 + b"\r\n-"
    assert read_form(Body("form", wire.FORM, wire.form(image)), (), 10**6) == ([image], {})


PART = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n'
IMAGE = PART % (b"image", b'; filename="x"') + b"\x89PNG\r\n"
END = b"--b--\r\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "its end is missing"),
        (IMAGE, "its end is missing"),
        (IMAGE + b"--b\r\n", "its end is missing"),
        (IMAGE[:-2] + END, "its end is missing"),
        (IMAGE * 2 + END, "Too many files"),
        (b"--b\r\n\r\n\r\n" * 100_000 + END, "too many parts; the limit is 3"),
        (b"--b\r\n" + b"X: y\r\n" * 100_000 + b"\r\n" + END, "header"),
        (PART % (b"k", b"") + b"1" * 65_537 + b"\r\n" + IMAGE + END, "more than 65,536 bytes"),
        (PART % (b"k", b"") + b"\xff\r\n" + IMAGE + END, "not text in UTF-8"),
        ((PART % (b"k", b"") + b"1\r\n") * 2 + IMAGE + END, 'repeats its field "k"'),
        (b"--b\r\n\r\nx\r\n" + IMAGE + END, "unknown field"),
        (PART % (b"k", b'; filename="x"') + b"1\r\n" + IMAGE + END, "takes no other file"),
        (b"--c" + IMAGE + END, "cannot be read"),
    ],
)
def test_a_form_beyond_its_bounds_is_refused(content, says):
    with pytest.raises(RequestError, match=says) as caught:
        read_form(Body("form", wire.FORM, content), ("k",), 10**6)
    assert caught.value.status == 400
    assert read_form(Body("form", wire.FORM, IMAGE + END), ("k",), 10**6) == ([b"\x89PNG"], {})


def test_a_header_that_drips_is_cut_off_and_an_idle_connection_is_kept(port):
    assert KEEP_ALIVE_SECONDS > 120  # Caddy's, the longest of the proxies'
    began = time.monotonic()
    with wire.connect(port) as dripping, wire.connect(port) as kept:
        kept.sendall(wire.vector())
        assert wire.read_answer(kept).status == 200
        dripping.sendall(b"GET / HTTP/1.1\r\nX: ")
        answer = wire.read_answer(dripping)
        assert answer.status == 408 and 10 < time.monotonic() - began < 30
        assert answer.error == "No complete header arrived within 15 seconds."
        kept.sendall(wire.vector())
        assert wire.read_answer(kept).status == 200


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_a_request_to_upgrade_is_answered_without_an_upgrade(port, upgrade):
    """The JDK's client requests h2c with every POST. A body must never become a request."""
    inner = b"GET /v1/indexes HTTP/1.1\r\nHost: localhost\r\n\r\n"
    settings = ("Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk")
    headers = (f"Upgrade: {upgrade}", *settings)
    search = wire.post(b'{"id": "3/0003.png", "k": 1}', "application/json", *headers)
    hostile = wire.post(inner, "application/json", *headers)
    for pause in (0, 0.2):  # head and body in one piece, and in two
        with wire.connect(port) as connection:
            for request, status in ((search, 200), (hostile, 400), (search, 200)):
                head, _, body = request.partition(b"\r\n\r\n")
                for piece in [request] if not pause else [head + b"\r\n\r\n", body]:
                    connection.sendall(piece)
                    time.sleep(pause)
                answer = wire.read_answer(connection)
                assert answer.status == status, (pause, answer)
                assert b'"indexes"' not in answer.body
            connection.sendall(search + LIVE)
            assert wire.read_answer(connection).status == 200
            connection.sendall(wire.get("/livez", *headers))
            assert wire.read_answer(connection).status == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_requests_to_a_proxy_and_http_2_are_refused(port, request_):
    answer = wire.ask(port, request_)
    assert answer.status == 400 and answer.error.endswith("."), answer
    assert wire.ask(port, LIVE).status == 200
