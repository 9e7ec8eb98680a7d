"""HTTP over a plain socket, for requests that no client library sends."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


TLS: ssl.SSLContext | None = None
"""TLS context of all connections, set by `trust`."""


def trust(certificate: str | None) -> None:
    """Use TLS for all connections and trust a certificate's file; `None` ends this."""
    global TLS
    TLS = None if certificate is None else ssl.create_default_context(cafile=certificate)


@dataclass
class Answer:
    """One answer; status 0 means that the connection ended without an answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def error(self) -> str:
        """The sentence of a problem document."""
        return str(json.loads(self.body)["detail"])


def connect(port: int, timeout: float = 20.0, source: str = "127.0.0.1") -> socket.socket:
    """Return a connection from a loopback address."""
    connection = socket.create_connection(("127.0.0.1", port), timeout, (source, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection if TLS is None else TLS.wrap_socket(connection, server_hostname="localhost")


def read_answer(connection: socket.socket) -> Answer:
    """Read one answer and skip `100 Continue`."""
    got = b""
    try:
        while True:
            while b"\r\n\r\n" not in got:
                piece = connection.recv(65_536)
                if not piece:
                    return Answer()
                got += piece
            head, _, got = got.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 100"):
                break
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        while len(got) < int(headers.get("content-length", "0")):
            piece = connection.recv(65_536)
            if not piece:
                break
            got += piece
    except ConnectionError:
        return Answer()
    return Answer(int(first.split()[1]), headers, got)


def ask(port: int, request: bytes, timeout: float = 20.0, source: str = "127.0.0.1") -> Answer:
    """Send bytes on a new connection and read one answer."""
    with connect(port, timeout, source) as connection:
        with suppress(ConnectionError):  # the server may answer before all is sent
            connection.sendall(request)
        return read_answer(connection)


def get(path: str, *headers: str, host: str = "localhost") -> bytes:
    """Return a GET request."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def post(
    body: bytes, kind: str = "application/json", *headers: str, host: str = "localhost"
) -> bytes:
    """Return a search request with a body."""
    lines = [
        "POST /v1/search HTTP/1.1",
        f"Host: {host}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + body


def form(
    image: bytes, k: str | None = None, name: str = "image", filename: str | None = "q.png"
) -> bytes:
    """Return the body of a form with the boundary `b`."""
    file = "" if filename is None else f'; filename="{filename}"'
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    body = head.encode() + image + b"\r\n"
    if k is not None:
        body += f'--b\r\nContent-Disposition: form-data; name="k"\r\n\r\n{k}\r\n'.encode()
    return body + b"--b--\r\n"


FORM = "multipart/form-data; boundary=b"


def vector(k: int = 3, width: int = 16) -> bytes:
    """Return a search with a vector."""
    return post(json.dumps({"vector": [0.25] * width, "k": k}).encode())


def chunked(pieces: list[bytes], kind: str, *headers: str) -> bytes:
    """Return a search request whose body comes in chunks."""
    lines = [
        "POST /v1/search HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {kind}",
        "Transfer-Encoding: chunked",
    ]
    head = "\r\n".join([*lines, *headers, "", ""]).encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def until(what: Callable[[], T], seconds: float = 30.0) -> T:
    """Call a function until its result is true; return that result."""
    end = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return result


def found(answer: Answer) -> list[dict[str, Any]]:
    """Return the results of a successful search."""
    assert answer.status == 200, answer
    return list(json.loads(answer.body)["results"])


def refused(answer, status: int, says: str) -> None:
    """Assert that an answer is a problem document with this status and text."""
    content = answer.json()
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert content["status"] == status and content["instance"] == answer.headers["x-request-id"]
    assert says in content["detail"], content


def log_of(server) -> str:
    """End a server with SIGTERM and return its unread output: its log, and nothing else."""
    server.process.terminate()
    log = "".join(server.process.communicate(timeout=20))
    assert server.process.returncode == 0, log
    return log


def not_ready(server) -> str | None:
    """Return why a server is not ready, by its `/readyz`, or `None` if it is."""
    answer = server.client.get("/readyz")
    return answer.json()["detail"] if answer.status_code == 503 else None
