"""One request and its answer on a connection: uvicorn's, with an answer that is there at once written at once, and without a timer of its own.

What is taken from uvicorn as it is: the scope, pieces of an answer, chunks, and what is checked of an answer's headers and length.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from retrieval.serving.http.leaving import FOLLOWS

Headers = Sequence[tuple[bytes, bytes]]

_LINES, _SHORT = 256, 512  # headers that are remembered as they are written, and how long their values may be
_OWN = b"x-request-id"  # which no two answers share


def _line(name: bytes, value: bytes) -> bytes:
    """Return a header as it is written.

    Raises:
        RuntimeError: it cannot be one.
    """
    if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
        raise RuntimeError("Invalid HTTP header.")
    return b"%b: %b\r\n" % (name.lower(), value)


_remembered = lru_cache(_LINES)(_line)


class _Default:
    """What all answers have, which uvicorn makes anew each second: the date."""

    def __init__(self) -> None:
        self._of: Headers | None = None
        self._lines = b""

    def lines(self, headers: Headers) -> bytes:
        """Return them as they are written."""
        if headers is not self._of:
            self._of, self._lines = headers, b"".join([_line(*one) for one in headers])
        return self._lines


_default = _Default()


class Cycle(RequestResponseCycle):
    """One request and its answer.

    Args:
        protocol: of its connection; what is taken of it is there once the header is complete.
        keep_alive: whether the connection may have another request.
        on_response: is called when the answer is complete.
    """

    def __init__(
        self, protocol: HttpToolsProtocol, *, keep_alive: bool, on_response: Callable[[], None]
    ) -> None:
        self.scope = protocol.scope
        self.transport, self.flow = protocol.transport, protocol.flow
        self.logger, self.access_logger = protocol.logger, protocol.access_logger
        self.access_log = protocol.access_log
        self.default_headers = protocol.server_state.default_headers
        self.message_event = asyncio.Event()
        self.on_response = on_response
        self.disconnected, self.keep_alive = False, keep_alive
        self.waiting_for_100_continue = protocol.expect_100_continue
        self.body, self.more_body = b"", True  # type: ignore[assignment]  # bytes to older versions, which pass them on
        self.response_started = self.response_complete = False
        self.chunked_encoding: bool | None = None
        self.expected_content_length = 0
        self._held: Any = None  # the beginning of an answer whose rest follows at once

    async def send(self, message: Any) -> None:
        """Write a part of the answer; its beginning with the rest, where that is said to follow at once: two writes wake the client twice."""
        held, self._held = self._held, None
        if held is None:
            quick = FOLLOWS in message and not self.response_started and self.scope["method"] != "HEAD"
            if quick and not self.access_log:
                self._held = message
            else:
                await super().send(message)
            return
        body, lines = message.get("body", b""), None
        if message["type"] == "http.response.body" and not message.get("more_body"):
            lines = self._lines(held["status"], held["headers"], len(body))
        if lines is None:
            # what is not as it was said to be is looked at as any other; a new beginning is an error's
            if message["type"] != "http.response.start":
                await super().send(held)
            await super().send(message)
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        self.transport.write(b"".join((*lines, body)))
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _lines(self, status: int, headers: Headers, size: int) -> list[bytes] | None:
        """Return the header of an answer as it is written, of a body of so many bytes; None where it says something else, or what becomes of the connection."""
        lines, length = [STATUS_LINE[status], _default.lines(self.default_headers)], None
        for one in headers:
            name, value = one
            if name == b"content-length":
                if length is not None:
                    return None
                length = value
            elif name == b"connection" or name == b"transfer-encoding" or not name.islower():
                return None
            short = name != _OWN and len(value) < _SHORT
            lines.append(_remembered(name, value) if short else _line(name, value))
        if length != b"%d" % size:
            return None
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        return lines


class Cycles(HttpToolsProtocol):
    """A connection's requests, one `Cycle` each."""

    def on_headers_complete(self) -> None:
        """Complete the scope, and begin with the request, or have it wait for those before it; there are no WebSockets and no limits of uvicorn's own."""
        version, method = self.parser.get_http_version(), self.parser.get_method()
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        if "%" in path:
            path = urllib.parse.unquote(path)
        scope: Any = self.scope
        scope["method"] = method.decode("ascii")
        if version != "1.1":
            scope["http_version"] = version
        scope["path"] = self.root_path + path
        scope["raw_path"] = self.root_path.encode("ascii") + url.path
        scope["query_string"] = url.query or b""
        before = self.cycle
        self.cycle = Cycle(
            self,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._begin(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_response_complete(self) -> None:
        """Go on with the next request, if it is there; how long a connection may be idle is the gate's."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._begin(cycle, app)

    def _begin(self, cycle: RequestResponseCycle, app: Any) -> None:
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
