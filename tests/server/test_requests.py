"""Invalid requests: each is answered with a sentence, never with a 500."""

import json

import numpy as np
import pytest
import wire
from retrieval.index.index import create_index

LIVE = wire.get("/livez")


@pytest.fixture(scope="module")
def port(shared, index_path):
    return shared(index_path).port


# --- framing, headers, hosts

HEAD = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /livez HTTP/1.1\r\n"
HOSTED = GET + b"Host: localhost\r\n"
VECTOR = b'\r\n\r\n{"vector": [1]}'
AMBIGUOUS = {
    "both lengths": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, in the other order": HEAD
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "a list of lengths": HEAD + b"Content-Length: 0, 0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 15\r\nContent-Length: 15" + VECTOR,
    "a signed length": HEAD + b"Content-Length: +15" + VECTOR,
    "twice chunked": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "another encoding": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a chunk without its length": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc",
    "a bare line feed": b"GET /livez HTTP/1.1\nHost: localhost\n\n",
    "a bare line feed in a header": GET + b"Host: localhost\nX: y\r\n\r\n",
    "a folded header": HOSTED + b"X: a\r\n b\r\n\r\n",
    "space before the colon": GET + b"Host : localhost\r\n\r\n",
    "a null in a header": HOSTED + b"X: a\0b\r\n\r\n",
    "no host": GET + b"\r\n",
    "two hosts": HOSTED + b"Host: localhost\r\n\r\n",
    "no HTTP at all": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
}
TOO_LARGE = {
    "many headers": HOSTED + b"X: y\r\n" * 100 + b"\r\n",
    "a large header": HOSTED + b"X: " + b"y" * 40_000 + b"\r\n\r\n",
    "a header without an end": HOSTED + b"X: " + b"y" * 400_000,
    "a long address": b"GET /" + b"y" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def test_ambiguous_framing_and_large_headers_are_refused(port):
    for status, requests in ((400, AMBIGUOUS), (431, TOO_LARGE)):
        for name, request in requests.items():
            answer = wire.ask(port, request)
            assert answer.status == status, (name, answer)
            assert answer.error.endswith("."), name
            assert answer.headers["connection"] == "close", name
    with wire.connect(port) as connection:
        connection.sendall(LIVE * 50)
        answers = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answers.count(b"HTTP/1.1 200 OK") <= 10
    assert b"without waiting for responses" in answers
    assert wire.ask(port, LIVE).status == 200


def test_a_large_trailer_ends_the_connection(port):
    request = wire.chunked([b"{}"], "application/json")[:-2] + b"X: y\r\n" * 100_000 + b"\r\n"
    assert wire.ask(port, request).status in (0, 400, 431)
    assert wire.ask(port, LIVE).status == 200


def test_a_compressed_body_is_refused(port):
    for body, kind in (
        (wire.form(b"x"), wire.FORM),
        (b"{}", "application/json"),
        (b"x", "image/png"),
    ):
        for encoding in ("gzip", "br", "gzip, identity", "x"):
            answer = wire.ask(port, wire.post(body, kind, f"Content-Encoding: {encoding}"))
            assert answer.status == 415 and "Content-Encoding" in answer.error, answer
            assert answer.headers["accept-encoding"] == "identity"
    kind = "application/json"
    assert wire.ask(port, wire.post(b"{", kind, "Content-Encoding: Identity")).status == 400


def test_only_known_hosts_are_answered_and_no_input_is_reflected(served, index_path):
    port = served(index_path, "--allow-host", "Photos.example").port
    known = ["localhost", "127.0.0.1", "10.1.2.3", "photos.example:80", "LOCALHOST."]
    for host in (*known, f"localhost:{port}", f"[::1]:{port}"):
        assert wire.ask(port, wire.get("/v1/index", host=host)).status == 200, host
    evil = ("", "localhost.", "127.0.0.1.", "photos.example.")
    for host in (*(f"{name}evil.example" for name in evil), "a@localhost"):
        answer = wire.ask(port, wire.get("/v1/index", host=host))
        assert answer.status == 421 and "--allow-host" in answer.error, host
    for path in ("/v1/search/", "/v1/index/", "//evil.example/", "/nowhere-of-mine"):
        answer = wire.ask(port, wire.get(path))
        assert answer.status == 404 and "location" not in answer.headers, path
        assert b"example" not in answer.body + str(answer.headers).encode()
        assert b"nowhere-of-mine" not in answer.body


def test_pages_of_other_sites_cannot_search_or_embed(port):
    body, host = json.dumps({"vector": [0.25] * 16}).encode(), f"localhost:{port}"
    for headers, status in (
        ((), 200),
        ((f"Origin: http://{host}", "Sec-Fetch-Site: same-origin"), 200),
        (("Sec-Fetch-Site: none",), 200),
        (("Sec-Fetch-Site: cross-site",), 403),
        (("Sec-Fetch-Site: same-site", f"Origin: http://{host}"), 403),
        (("Origin: http://evil.example",), 403),
        (("Origin: null",), 403),
    ):
        answer = wire.ask(port, wire.post(body, "application/json", *headers, host=host))
        assert answer.status == status, (headers, answer)
    for path in ("/", "/page.js", "/v1/items/x/image", "/v1/index", "/nowhere", "/v1/index?x=1"):
        answer = wire.ask(port, wire.get(path))
        assert answer.headers["cross-origin-resource-policy"] == "same-origin", path
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"], path


# --- bodies and ids

IDS = ["1" * 4301, "²", "%C2%B2", "%201", "%25"]
BODIES = [
    b'{"vector": [1e999]}',
    b'{"vector": [' + b"9" * 5000 + b"]}",
    b'{"vector": [1], "k": ' + b"9" * 5000 + b"}",
    b'{"k": 1, "k": 2, "vector": [1]}',
    b'{"vector": ' + b"[" * 60_000,
    *(b'"\\ud800"', b"\xff\xfe{}", b"\x00", b"nul"),
]
PART = b"--b\r\nContent-Disposition: form-data"
END = b"\r\n\r\nx\r\n--b--\r\n"
FORMS = {  # and those of test_limits.py
    "no name": PART + END,
    "no disposition": b"--b" + END,
    "many parts": (PART + b'; name="k"\r\n\r\n\r\n') * 20_000,
    "a long header": PART + b"; name=" + b"x" * 60_000 + END,
}


def test_no_request_is_the_servers_fault(served, index_path, photos):
    server = served(index_path)
    form = wire.form((photos / "3" / "0003.png").read_bytes(), "3")

    def post(body: bytes, kind: str = wire.FORM) -> wire.Answer:
        return wire.ask(server.port, wire.post(body, kind))

    for charset in ("undefined", "punycode", "utf-8\\"):
        answer = post(form, f"multipart/form-data; boundary=b; charset={charset}")
        assert answer.status in (200, 400), (charset, answer)
    for id in IDS:
        answer = wire.ask(server.port, wire.get(f"/v1/items/{id}/image"))
        assert answer.status in (400, 404), id
    for body in BODIES:
        answer = post(body, "application/json")
        assert answer.status in (400, 422), (body[:50], answer)
    for name, body in FORMS.items():
        answer = post(body)
        assert answer.status == 400, (name, answer)
    unknown = post(form.replace(b'"k"', b'"K"'))
    assert unknown.status == 400 and "unknown field" in unknown.error
    assert len(wire.found(post(form))) == 3
    assert wire.log_of(server).count("\n") < 40


def test_no_path_of_the_machine_is_in_an_error(served, makers, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", normalized=False)
    np.savez(tmp_path / "f.npz", features=np.random.default_rng(0).normal(size=(10, 64)))
    create_index(tmp_path / "i", bundle, [tmp_path / "f.npz"], progress=False)
    port = served(tmp_path / "i").port
    for request in (
        wire.post(wire.form(b"x"), wire.FORM),
        wire.vector(width=3),
        wire.post(json.dumps({"vector": [1e300] * 64}).encode()),
        wire.get("/v1/items/1/image"),
    ):
        answer = wire.ask(port, request)
        assert 400 <= answer.status < 500
        assert str(tmp_path) not in answer.body.decode(), answer.body
