"""One request and its answer on a connection: to the byte what uvicorn makes of it, in one piece where it can be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from retrieval.serving.http.leaving import FOLLOWS, LEAVING
from retrieval.serving.http.problems import Whole
from retrieval.serving.http.protocol import Connections, protocol_class
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

BODY = b'{"results":[]}'
LENGTH = (b"content-length", b"%d" % len(BODY))
KIND = (b"content-type", b"application/json")


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, content: bytes) -> None:
        assert not self.closed
        self.written.append(content)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name)

    def __getattr__(self, name: str) -> Any:
        assert name in ("pause_reading", "resume_reading", "get_write_buffer_size", "abort"), name
        return lambda: 0


def answering(status: int, headers: list[Any], *bodies: bytes, follows: bool = True) -> Any:
    """Return an application that answers so; the last body is the end."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        flag = {FOLLOWS: True} if follows else {}
        await send({"type": "http.response.start", "status": status, "headers": [*headers], **flag})
        for number, body in enumerate(bodies, 1):
            await send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})

    return app


def said(app: Any, *requests: bytes, plain: bool = False) -> tuple[list[bytes], bool]:
    """Return what is written as the answer to requests, by uvicorn's own class or by ours, and whether the connection is closed."""

    async def scenario() -> tuple[list[bytes], bool]:
        config = Config(app, log_config=None, access_log=False)
        made = HttpToolsProtocol if plain else protocol_class({None: Connections(10, 10, 60.0)})
        state, wire = ServerState(), Wire()
        state.default_headers = [(b"date", b"Tue, 24 Nov 2026 00:00:00 GMT")]
        connection = made(config=config, server_state=state, app_state={})
        connection.connection_made(wire)  # type: ignore[arg-type]
        for request in requests:
            connection.data_received(request)
            for _ in range(20):
                await asyncio.sleep(0)
        return wire.written, wire.closed

    return asyncio.run(scenario())


def asked(method: str = "POST", more: str = "", version: str = "1.1", body: bytes = b"xy") -> bytes:
    """Return a request as it goes over the wire."""
    head = f"{method} /v1/search?a=%20 HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


CASES = {
    "plain": (answering(200, [LENGTH, KIND], BODY), asked(), 1),
    "further headers": (answering(503, [LENGTH, KIND, (b"retry-after", b"1")], BODY), asked(), 1),
    "HTTP/1.0": (answering(200, [LENGTH, KIND], BODY), asked(version="1.0"), 1),
    "the client closes": (answering(200, [LENGTH], BODY), asked(more="Connection: close\r\n"), 1),
    "no body": (answering(200, [(b"content-length", b"0")], b""), asked(), 1),
    "it closes": (answering(400, [LENGTH, (b"connection", b"close")], BODY), asked(), 2),
    "HEAD": (answering(200, [LENGTH, KIND], BODY), asked("HEAD", body=b""), 1),
    "without a length": (answering(200, [KIND], BODY), asked(), 2),
    "in pieces": (answering(200, [LENGTH, KIND], BODY[:3], BODY[3:]), asked(), 3),
    "nothing said": (answering(200, [LENGTH, KIND], BODY, follows=False), asked(), 2),
    "a length twice": (answering(200, [LENGTH, LENGTH], BODY), asked(), 2),
    "capitals": (answering(200, [LENGTH, (b"X-Own", b"1")], BODY), asked(), 2),
    "expecting": (answering(200, [LENGTH], BODY), asked(more="Expect: 100-continue\r\n"), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_it_answers_as_uvicorn_does(case):
    app, request, writes = CASES[case]
    theirs, ours = said(app, request, request, plain=True), said(app, request, request)
    assert b"".join(ours[0]) == b"".join(theirs[0]) and ours[1] == theirs[1]
    answers = 1 if ours[1] else 2
    assert len(ours[0]) == writes * answers
    assert b"".join(ours[0]).count(b"HTTP/1.1 100 Continue") == (2 if case == "expecting" else 0)


def test_pipelined_requests_are_answered_in_their_order():
    app = answering(200, [LENGTH, KIND], BODY)
    written, closed = said(app, asked() * 3)
    assert len(written) == 3 and not closed and b"".join(written) == b"".join(said(app, *[asked()] * 3)[0])


@pytest.mark.parametrize("header", [(b"x-split", b"a\r\nset-cookie: b"), (b"x split", b"1")])
def test_a_header_that_cannot_be_is_never_written(header):
    for _ in range(2):  # what was refused is not remembered as good
        written, _ = said(answering(200, [LENGTH, header], BODY), asked())
        assert b"set-cookie" not in b"".join(written) and b"x split" not in b"".join(written)
        assert b"".join(written).startswith(b"HTTP/1.1 500 ")


def test_a_body_of_another_length_than_was_said_is_an_error():
    for content in (BODY[:-1], BODY + b"x"):
        written, closed = said(answering(200, [LENGTH], content), asked())
        assert closed and len(b"".join(written).partition(b"\r\n\r\n")[2]) <= len(BODY)


def test_the_date_is_that_of_the_answer():
    async def scenario() -> None:
        config = Config(answering(200, [LENGTH], BODY), log_config=None, access_log=False)
        state, wire = ServerState(), Wire()
        connection = protocol_class({None: Connections(10, 10, 60.0)})(
            config=config, server_state=state, app_state={}
        )
        connection.connection_made(wire)  # type: ignore[arg-type]
        for second in (b"one", b"two", b"two", b"three"):
            state.default_headers = [(b"date", second)]
            connection.data_received(asked())
            for _ in range(20):
                await asyncio.sleep(0)
            assert b"\r\ndate: %b\r\n" % second in wire.written[-1]

    asyncio.run(scenario())


def test_a_connection_says_when_all_of_a_request_is_there():
    """Whoever reads it does not wait then; of two that were sent at once, both are."""
    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope[LEAVING].whole)
        more = True
        while more:
            more = (await receive()).get("more_body")
        seen.append(scope[LEAVING].whole)
        await Whole(BODY, 200, KIND)(scope, receive, send)

    request = asked()
    said(app, request)
    assert seen == [True, True]
    seen.clear()
    said(app, request[:-1], request[-1:], request[:-1], request[-1:] + request)
    assert seen == [False, True] * 2 + [True, True]


def test_an_answer_made_by_us_is_one_that_uvicorn_takes():
    """In the hands of whatever else serves an application."""
    app = Whole(BODY, 201, KIND, {"Retry-After": "1", "WWW-Authenticate": "Bearer"})

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)

    written, _ = said(plain, asked(), plain=True)
    assert b"www-authenticate: Bearer\r\n" in written[0] and written[1] == BODY
    assert written[0].startswith(b"HTTP/1.1 201 ")
