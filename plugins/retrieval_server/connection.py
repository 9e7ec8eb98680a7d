"""uvicorn's HTTP/1.1 protocol with protection against abuse.

It refuses upgrades, long or slow headers, and requests whose length is ambiguous.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from socket import SO_ERROR, SOL_SOCKET
from typing import Any

import httptools
from retrieval.index.change_log import new_request_id
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from retrieval_server.problems import MEDIA_TYPE, problem_json

HEADER_SECONDS = 15.0
HEADER_BYTES = 32_768
HEADER_LINES = 64
PIPELINED_REQUESTS = 8
BODY_PIECES = 16_384
PIECE_BYTES = 16
"""Smallest mean size of the pieces of a body that has more than `BODY_PIECES`."""
_LEAVING_SECONDS = 0.25
_UPGRADES = (b"upgrade", b"connection", b"http2-settings")
_SINGLE_HEADERS = (b"host", b"content-length", b"content-type", b"transfer-encoding")


# This overrides methods of uvicorn, because neither a setting nor another server does the same.
# With httptools, uvicorn limits neither the time nor the size of a header; with h11 it limits only
# the size. Hypercorn (on h11) cannot time a header, always accepts upgrades to HTTP/2, and accepts
# a request with both Content-Length and Transfer-Encoding. Granian (on hyper) limits the time and
# size of a header, but accepts such a request, too. Neither limits the pieces of a body, and both
# answer a request that is not valid HTTP without a problem document. `tests/attack` sends all of
# these.
class Protocol(HttpToolsProtocol):
    """One connection, with limits on headers and without upgrades."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first header."""
        super().connection_made(transport)
        self._header_bytes = 0
        self._refusal = (400, "The request is not valid HTTP.")
        self._in_header = True
        self._answered: RequestResponseCycle | None = None
        self._timer = self.loop.call_later(HEADER_SECONDS, self._header_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer, and tell the request that is being answered.

        uvicorn tells only the last request that was received.
        """
        self._timer.cancel()
        self._disconnect()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a complete request of a client that only stops sending; else close."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._timer.cancel()
        self._timer = self.loop.call_later(_LEAVING_SECONDS, self._ask_whether_it_has_left, cycle)
        return True

    def _ask_whether_it_has_left(self, cycle: RequestResponseCycle, again: bool = False) -> None:
        """Send an interim response, to which the system of a client that has left sends a reset."""
        if again:
            if self.transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_ERROR):
                self.transport.abort()
        elif not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            ask = self._ask_whether_it_has_left
            self._timer = self.loop.call_later(_LEAVING_SECONDS, ask, cycle, True)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        cycle.scope["retrieval.has_left"] = lambda: cycle.disconnected  # type: ignore[typeddict-unknown-key]
        super()._start_asgi_task(cycle, app)

    def _disconnect(self) -> None:
        """Discard the rest of the application's response."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse data; a request for an upgrade is parsed again without its upgrade headers."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            remaining = [header for header in self.headers if header[0] not in _UPGRADES]
            # This is a CONNECT request, or the preface of HTTP/2.
            if len(remaining) == len(self.headers):
                self._refuse(400, "The server is not a proxy, and speaks HTTP/1.1 only.")
                return
            lines = [b"%b: %b\r\n" % header for header in remaining]
            line = b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(line + b"".join(lines) + b"\r\n" + data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        else:
            if self._in_header:
                # httptools reports a line only when it is complete, so `on_header` would not see a
                # line without an end. Complete lines are counted in both places.
                self._header_bytes += len(data)
            if self._header_bytes > 2 * HEADER_BYTES:
                self._refuse(431, "The request's header is too large.")

    def on_message_begin(self) -> None:
        """Start to count and time a header."""
        super().on_message_begin()
        self._header_bytes = 0
        self._in_header = True
        self._body_bytes = self._pieces = 0
        self._timer.cancel()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._header_is_late)

    def on_url(self, url: bytes) -> None:
        """Count the URL."""
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a line of the header or trailer."""
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > HEADER_BYTES or len(self.headers) > HEADER_LINES:
            self._fail(431, "The request's header is too large.")

    def on_headers_complete(self) -> None:
        """Pass the request to the application unless its framing is ambiguous."""
        self._timer.cancel()
        self._in_header = False
        names = [name for name, _ in self.headers]
        encoding = dict(self.headers).get(b"transfer-encoding", b"chunked").lower()
        # A proxy in front may understand an ambiguous length differently; the rest of the body
        # would then be the next client's request.
        if encoding != b"chunked" or {b"transfer-encoding", b"content-length"} <= set(names):
            sentence = "Send either a Content-Length or one Transfer-Encoding, which is chunked."
            self._fail(400, sentence)
        if any(names.count(name) > 1 for name in _SINGLE_HEADERS):
            self._fail(400, "The request repeats a header that is allowed only once.")
        # uvicorn reads on after each response, so a client could fill the memory with requests.
        if len(self.pipeline) >= PIPELINED_REQUESTS:
            self._fail(400, "Too many requests were sent without waiting for responses.")
        # Without its upgrade headers, the request is parsed once more; see `data_received`.
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body; a chunk of one byte takes as long as one of many."""
        self._body_bytes += len(body)
        self._pieces += 1
        if self._pieces > BODY_PIECES and self._body_bytes < PIECE_BYTES * self._pieces:
            self._fail(400, "The body arrives in too many small chunks.")
        if not self.parser.should_upgrade():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Complete a request."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed."""
        self._refuse(*self._refusal)

    def _fail(self, status: int, sentence: str) -> None:
        self._refusal = (status, sentence)
        # httptools stops at this error, and `send_400_response` answers.
        raise ValueError(sentence)

    def _header_is_late(self) -> None:
        if self._header_bytes:
            self._refuse(408, f"No complete header arrived within {HEADER_SECONDS:g} seconds.")
        self.transport.close()

    def _refuse(self, status: int, sentence: str) -> None:
        """Close the connection, with a problem document unless a response has begun."""
        cycle = self._answered
        begun = cycle is not None and cycle.response_started and not cycle.response_complete
        self._disconnect()
        # After the beginning of a response, the client would take this one for its content.
        if not begun and not self.transport.is_closing():
            request_id = new_request_id()
            body = problem_json(status, sentence, request_id)
            lines = [
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                f"content-type: {MEDIA_TYPE}",
                f"x-request-id: {request_id}",
                f"content-length: {len(body)}",
                "connection: close",
            ]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()
