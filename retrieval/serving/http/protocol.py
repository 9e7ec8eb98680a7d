"""HTTP on one connection: httptools under uvicorn, with what both leave open closed.

Strict framing, bounds on headers, chunks and pipelined requests, time-outs for connections that say nothing or take
nothing, and limits on their number. `tests/serving/test_hanging.py` names what is used of uvicorn's own class.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from http import HTTPStatus
from typing import Any

from retrieval.serving.http.cycle import Cycles
from retrieval.serving.http.leaving import LEAVING, Leaving
from retrieval.serving.http.problems import MEDIA_TYPE, new_request_id, problem, request_id, said
from retrieval.serving.http.settings import HEALTH

_HEALTH = {path.encode() for path in HEALTH}
_HEADER_BYTES = 32_768
_HEADERS = 64
_PIPELINED = 8
_CHUNKS = 1024  # of a body may be tiny; beyond these they hold _CHUNK bytes on average
_CHUNK = 256
_SPARE = 32  # connections beyond the limit, for health checks and for a sentence
_YOUNG = 0.5  # seconds that a connection may say nothing before it gives way to another
_WRITE_SECONDS = 20.0  # a client that takes nothing for so long is gone
_LINGER_SECONDS = 5.0  # what may arrive after the answer, before the connection is cut
_SWEEP_SECONDS = 0.5
_REFUSALS = 300  # a second, from which on a connection that was refused is not read for as long as it may be
_LATER = 1.0  # seconds, as a refusal's Retry-After says


class Connections:
    """The connections of one listening socket; for the event loop.

    Args:
        limit: at a time; beyond it the oldest idle one is closed, or the new one may ask for health only.
        per_address: likewise, of one address.
        idle_seconds: how long a connection may go without a complete header.

    Attributes:
        refused: how many requests were refused before the application saw them, by status.
    """

    def __init__(self, limit: int, per_address: int, idle_seconds: float) -> None:
        self.limit = limit
        self._per_address = per_address
        self._idle_seconds = idle_seconds
        self._all: set[Protocol] = set()
        self._of_address: dict[str, int] = {}
        self._idle: dict[Protocol, float] = {}  # since when, the longest first
        self.refused: Counter[int] = Counter()
        self._stuck: dict[Protocol, float] = {}  # until when they may take nothing, or send what nobody reads
        self._refusals, self._refused_at = 0.0, -math.inf

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._all)

    @property
    def idle_count(self) -> int:
        """How many of them have no request under way."""
        return len(self._idle)

    @property
    def exhausted(self) -> bool:
        """Whether every connection is taken, by a request under way."""
        return len(self._all) - len(self._idle) >= self.limit

    def add(self, new: Protocol) -> bool:
        """Count a connection in; return whether it may ask for anything but health."""
        address = new.address
        others = self._of_address.get(address, 0)
        crowded = others >= self._per_address and not self._close_idle(address)
        full = len(self._all) >= self.limit and not self._close_idle(None)
        if len(self._all) >= self.limit + _SPARE and not self._close_idle(None, 0.0):
            new.abort()
        self._all.add(new)
        self._of_address[address] = self._of_address.get(address, 0) + 1
        self.idle(new)
        return not (crowded or full)

    def remove(self, old: Protocol) -> None:
        """Count a connection out, once."""
        if old in self._all:
            self._all.discard(old)
            self.busy(old)
            self._stuck.pop(old, None)
            self._of_address[old.address] -= 1
            if not self._of_address[old.address]:
                del self._of_address[old.address]

    def idle(self, one: Protocol) -> None:
        """Note that it has no request under way."""
        self._idle.pop(one, None)
        self._idle[one] = time.monotonic()

    def busy(self, one: Protocol) -> None:
        """Note that a header is complete."""
        self._idle.pop(one, None)

    def stuck(self, one: Protocol, seconds: float) -> None:
        """Cut it off after so long, unless `moving` is called before."""
        self._stuck.setdefault(one, time.monotonic() + seconds)

    def moving(self, one: Protocol) -> None:
        """Undo `stuck`."""
        self._stuck.pop(one, None)

    def refusal(self) -> float:
        """Count a request that found no room; return for how many seconds its connection is not read.

        In a flood, refusing takes the time of those that are let in. So a connection hears a refusal once a second where there are many,
        as its client is told; where there are few it hardly waits.
        """
        now = time.monotonic()
        self._refusals = 1.0 + self._refusals * math.exp(self._refused_at - now)
        self._refused_at = now
        return _LATER * min(1.0, self._refusals / _REFUSALS)

    def _close_idle(self, address: str | None, least: float = _YOUNG) -> bool:
        """Close the connection that has been idle longest (of an address); return whether there was one."""
        now = time.monotonic()
        for one, since in self._idle.items():
            if now - since < least:
                break
            if address is None or one.address == address:
                one.close_idle(503, "The server has too many connections. Try again in a moment.")
                self.remove(one)
                return True
        return False

    async def sweep(self) -> None:
        """Close what has been idle or stuck for too long, for ever."""
        now = time.monotonic()
        while True:
            last = now
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            if now - last > 2 * _SWEEP_SECONDS:
                continue  # this process was kept waiting: what they sent may not have been read yet
            for one, since in list(self._idle.items()):
                if now - since < self._idle_seconds:
                    break
                one.close_idle(408, f"No complete header came within {self._idle_seconds:g} seconds.")
                self.remove(one)
            for one in [one for one, until in self._stuck.items() if until < now]:
                one.abort()


class Protocol(Cycles):
    """One connection; `gates` is set by `protocol_class`: by the port that was connected to."""

    gates: dict[int | None, Connections]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it in."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._header_bytes = self._header_count = self._chunks = self._body_bytes = 0
        self._in_headers = self._in_body = False
        self._leaving = Leaving()
        port = self.server[1] if self.server else None
        self.gate = self.gates.get(port, self.gates[None])
        self._ordinary = self.gate.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it out."""
        self.gate.remove(self)
        super().connection_lost(exc)
        self._leaving.now()

    def close_idle(self, status: int, sentence: str) -> None:
        """Close it between two requests; say why if a request has begun."""
        if self._in_headers:
            self._say(status, sentence)
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        self.transport.close()

    def abort(self) -> None:
        """Cut it."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse, and bound a header that does not end."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > _HEADER_BYTES:
                self._refuse(431, "The request's header is too large.")

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self.scope[LEAVING] = self._leaving  # type: ignore[literal-required]
        if self._answered():
            self.gate.idle(self)  # from its first byte on, a header has its whole time
        self._header_bytes = self._header_count = self._chunks = self._body_bytes = 0
        self._in_headers, self._leaving.whole = True, False

    def on_url(self, url: bytes) -> None:
        """Count the address as header."""
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count it, in the trailer too."""
        self._header_bytes += len(name) + len(value) + 4
        self._header_count += 1
        if self._in_body and (self._header_bytes > _HEADER_BYTES or self._header_count > _HEADERS):
            raise ValueError("the trailer is too large")
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Hand the request to the application, or to a refusal in its place."""
        self._in_headers, self._in_body = False, True
        self.gate.busy(self)
        refusal = self._refusal()
        if refusal is None:
            super().on_headers_complete()
            return
        self.gate.refused[refusal[0]] += 1
        app, self.app = self.app, refuse(*refusal)
        try:
            super().on_headers_complete()
        finally:
            self.app = app
            self.cycle.keep_alive = False

    def _refusal(self) -> tuple[int, str] | None:
        """Return why this request is not taken, if it is not."""
        names = [name for name, _ in self.headers]
        if self._header_bytes > _HEADER_BYTES or self._header_count > _HEADERS:
            return 431, "The request's header is too large."
        if b"transfer-encoding" in names and (
            b"content-length" in names or dict(self.headers)[b"transfer-encoding"].lower() != b"chunked"
        ):
            return 400, "Give a Content-Length or one Transfer-Encoding, chunked; not both."
        if names.count(b"content-length") > 1 or names.count(b"host") > 1 or names.count(b"content-type") > 1:
            return 400, "The request repeats a header that it may give once."
        if len(self.pipeline) >= _PIPELINED:
            return 400, "Too many requests were sent without waiting for an answer."
        if not self._ordinary and self.url not in _HEALTH:
            return 503, "The server has too many connections. Try again in a moment."
        return None

    def on_body(self, body: bytes) -> None:
        """Count the chunks: each costs the same work, however little it holds."""
        self._chunks += 1
        self._body_bytes += len(body)
        if self._chunks > _CHUNKS + self._body_bytes // _CHUNK:
            raise ValueError("the body comes in too many chunks")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the body is complete, and listen for the client's leaving."""
        super().on_message_complete()
        self._in_body, self._leaving.whole = False, True
        if not self.pipeline:
            self.flow.resume_reading()
        if self._answered():
            self.gate.moving(self)
            self.gate.idle(self)
            self._hold_off()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of this one's body for a moment."""
        super().on_response_complete()
        if self._in_body:
            self.gate.stuck(self, _LINGER_SECONDS)
        elif self._answered():
            self.gate.idle(self)
            self._hold_off()
        if not self._ordinary:
            self.transport.close()

    def _hold_off(self) -> None:
        """Leave the next request unread for a while, after one that was told to come again later: unread, it costs nothing."""
        if self._leaving.crowded:
            self._leaving.crowded = False
            self.flow.pause_reading()
            self.loop.call_later(self.gate.refusal(), self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Note that the client does not take its answer."""
        super().pause_writing()
        self.gate.stuck(self, _WRITE_SECONDS)

    def resume_writing(self) -> None:
        """Note that it does again."""
        super().resume_writing()
        self.gate.moving(self)

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed; uvicorn calls this."""
        self._refuse(400, "The request is not valid HTTP, or comes in too many pieces.")

    def _answered(self) -> bool:
        """Whether every request so far has its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self, status: int, sentence: str) -> None:
        """Answer in the middle of a request, unless that would end up in another's answer; and close."""
        if self._answered():
            self._say(status, sentence)
        else:
            if not self.cycle.response_started and not self.pipeline:
                self._say(status, sentence)
            self.cycle.disconnected = True  # what the application still answers goes nowhere
            self.cycle.message_event.set()
            self._leaving.now()
        self.transport.close()

    def _say(self, status: int, sentence: str) -> None:
        self.gate.refused[status] += 1
        name = new_request_id()
        body = said(status, sentence, name)
        head = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"content-type: {MEDIA_TYPE}",
            f"x-request-id: {name}",
            f"content-length: {len(body)}",
            "x-content-type-options: nosniff",
            "connection: close",
            *(["retry-after: 1"] if status == 503 else []),
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)


def refuse(status: int, sentence: str) -> Any:
    """Return an application that answers with a sentence and nothing else."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = {
            "Connection": "close",
            "X-Content-Type-Options": "nosniff",
            "X-Request-Id": request_id(scope),
        }
        answer = problem(scope, status, sentence, headers)
        await answer(scope, receive, send)

    return app


def protocol_class(gates: dict[int | None, Connections]) -> type[Protocol]:
    """Return the class for uvicorn, whose connections count in the gate of their port, or in that of None."""
    return type("Protocol", (Protocol,), {"gates": gates})
