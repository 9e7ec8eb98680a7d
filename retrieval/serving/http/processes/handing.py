"""A request handed on to the process that writes, over a Unix socket in a folder that only this user may enter.

It goes as the application got it: its header once, its body as it arrives; its answer comes back the same way. So all that a write promises
(its order, its Idempotency-Key, its record) is one process's, and whoever asked need not know which. A connection carries one request, and whoever
hands it on first waits for a sign of life: what nobody waits for any more was never sent.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.responses import Response

from retrieval.serving.http.access.audit import Author, author
from retrieval.serving.http.access.roles import Caller, caller_of, set_caller
from retrieval.serving.http.errors import Gone, RequestError
from retrieval.serving.http.guard import report
from retrieval.serving.http.problems import REQUEST, problem, request_id
from retrieval.serving.http.processes.group import Member, door_of
from retrieval.serving.stages import Trail, current, following

_HEAD = struct.Struct(">BI")
_ALIVE, _ASK, _BODY, _END, _START, _FIGURES = range(6)
_PIECE = 65_536
_PAUSE = 0.05  # seconds between two tries to reach a process that starts
_REST = 5.0  # seconds for the rest of a body that is not wanted
_SCRAPE = 1.0  # seconds that another process has to give its figures
_STARTING = "Changes cannot be made just now: the process that makes them is starting. Try again in a moment."
_ENDED = "The process that makes changes ended before it answered: whether this one was made is not known. Send it again."
_SILENT = "The process that makes changes does not answer. Try again in a moment."

App = Callable[[Any, Any, Any], Awaitable[None]]
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HandedOn(Response):
    """An answer that another process gives.

    Args:
        door: of that process.
        patience: seconds to wait for it while it starts.
        seconds: that its answer may take; None for as long as it does.
    """

    def __init__(self, door: Path, patience: float, seconds: float | None) -> None:
        super().__init__()
        self._door, self._patience, self._seconds = door, patience, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Hand the request on, and its answer back.

        Raises:
            RequestError: 503, nobody answered, or whoever did ended in the midst of it.
            Gone: the client has left.
        """
        reader, writer = await self._reached()
        sending = asyncio.create_task(_passed(receive, writer))
        started = False
        try:
            writer.write(_frame(_ASK, json.dumps(_said(scope)).encode()))
            async with asyncio.timeout(self._seconds) as limit:
                while True:
                    kind, content = await _read(reader)
                    if kind == _END:
                        _note(json.loads(content))
                        await send({"type": "http.response.body", "body": b"", "more_body": False})
                        return
                    if kind == _START:
                        started = True
                        limit.reschedule(None)
                        status, headers = json.loads(content)
                        await send({"type": "http.response.start", "status": status, "headers": _encoded(headers)})  # fmt: skip
                    else:
                        await send({"type": "http.response.body", "body": content, "more_body": True})
        except (OSError, EOFError) as fault:  # TimeoutError is an OSError
            if sending.done() and sending.result():
                raise Gone from None
            if started:
                raise
            sentence = _SILENT if isinstance(fault, TimeoutError) else _ENDED
            raise RequestError(503, sentence, "writer") from None
        finally:
            sending.cancel()
            writer.close()

    async def _reached(self) -> Stream:
        """Return a connection with a process that has begun to listen to it."""
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    with suppress(ConnectionError, FileNotFoundError, EOFError):
                        return await _reached(self._door)
                    await asyncio.sleep(_PAUSE)
        except TimeoutError:
            raise RequestError(503, _STARTING, "writer") from None


async def figures_of_others(member: Member) -> list[bytes]:
    """Return what is looked up in the other processes of a server, of those that give it in time."""
    others = [number for number in range(1, member.of + 1) if number != member.number]
    found = await asyncio.gather(*(_figures_of(door_of(member.folder, number)) for number in others))
    return [text for text in found if text is not None]


async def _figures_of(door: Path) -> bytes | None:
    try:
        async with asyncio.timeout(_SCRAPE):
            reader, writer = await _reached(door)
            try:
                writer.write(_frame(_FIGURES))
                kind, content = await _read(reader)
                return content if kind == _FIGURES else None
            finally:
                writer.close()
    except (OSError, EOFError):
        return None


class Door:
    """Where the other processes come in.

    Args:
        app: answers the requests that they hand on.
        figures: gives those that are looked up here.
        debug: whether the log holds tracebacks.
    """

    def __init__(self, app: App, figures: Callable[[], Awaitable[bytes]], debug: bool) -> None:
        self._app, self._figures, self._debug = app, figures, debug
        self._inside: set[asyncio.Task[None]] = set()
        self._opened: asyncio.Task[None] | None = None

    def open(self, listener: socket.socket) -> None:
        """Let them in from now on."""
        listener.setblocking(False)
        self._opened = asyncio.create_task(self._accept(listener))

    async def close(self, end: float) -> None:
        """Let nobody in, and those who are in finish, until a time by `time.monotonic`."""
        if self._opened is not None:
            self._opened.cancel()
        if self._inside:
            await asyncio.wait(self._inside, timeout=max(0.0, end - time.monotonic()))
        for task in self._inside:
            task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # it has left again, or no more files may be open
                await asyncio.sleep(_PAUSE)
                continue
            task = asyncio.create_task(self._in(connection))
            self._inside.add(task)
            task.add_done_callback(self._inside.discard)

    async def _in(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        with suppress(OSError, EOFError):
            writer.write(_frame(_ALIVE))
            kind, content = await _read(reader)
            if kind == _FIGURES:
                writer.write(_frame(_FIGURES, await self._figures()))
            elif kind == _ASK:
                await self._answer(json.loads(content), reader, writer)
            await writer.drain()
        writer.close()

    async def _answer(
        self, said: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        scope = _scope(said)
        trail, exchange = Trail(request_id(scope)), _Exchange(reader, writer)
        author.set(Author(caller_of(scope), trail.id))
        with following(trail):
            try:
                await self._app(scope, exchange.receive, exchange.send)
            except Gone:
                return
            except Exception as fault:
                report(fault, self._debug)
                if exchange.started:
                    return
                failed = problem(scope, 500, "The server failed on this request; its log says why.")
                await failed(scope, exchange.receive, exchange.send)
        spans = [[span.stage, span.own, span.items] for span in trail.spans]
        writer.write(_frame(_END, json.dumps({"reason": trail.reason, "spans": spans}).encode()))
        await exchange.rest()


class _Exchange:
    """A request that was handed on, for the application."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._whole = self.started = False
        self._turn = asyncio.Lock()

    async def receive(self) -> Any:
        """Return the next part of its body, or that its client has left."""
        async with self._turn:
            try:
                if self._whole:
                    await self._reader.read(1)
                    return {"type": "http.disconnect"}
                kind, content = await _read(self._reader)
            except (OSError, EOFError):
                return {"type": "http.disconnect"}
            self._whole = kind == _END
            return {"type": "http.request", "body": content, "more_body": not self._whole}

    async def rest(self) -> None:
        """Read until the other process closes, which has then read the answer.

        Closed with something unread in it, the connection would break under a process that still hands the body on.

        Raises:
            OSError: it takes too long.
        """
        async with asyncio.timeout(_REST), self._turn:
            while await self._reader.read(_PIECE):
                pass

    async def send(self, message: Any) -> None:
        """Pass on a part of the answer; its end is for the one who counts the stages."""
        if message["type"] == "http.response.start":
            self.started = True
            said = [message["status"], _decoded(message.get("headers", []))]
            self._writer.write(_frame(_START, json.dumps(said).encode()))
            return
        for piece in _pieces(message.get("body", b"")):
            self._writer.write(_frame(_BODY, piece))
        await self._writer.drain()


async def _passed(receive: Callable[[], Awaitable[Any]], writer: asyncio.StreamWriter) -> bool:
    """Pass a body on as it arrives; return whether its client has left, and else that the other process has ended."""
    more = True
    try:
        while (message := await receive())["type"] != "http.disconnect":
            if not more:
                continue
            more = message.get("more_body", False)
            for piece in _pieces(message.get("body", b"")):
                writer.write(_frame(_BODY, piece))
            if not more:
                writer.write(_frame(_END))
            await writer.drain()
    except OSError:
        return False
    writer.close()
    return True


def _said(scope: Any) -> dict[str, Any]:
    """Return what the other process is told of a request."""
    caller = caller_of(scope)
    return {
        **{name: scope[name] for name in ("method", "path", "root_path", "http_version", "scheme")},
        "raw_path": scope["raw_path"].decode("latin-1"),
        "query_string": scope["query_string"].decode("latin-1"),
        "headers": _decoded(scope["headers"]),
        "client": scope.get("client"),
        "server": scope.get("server"),
        "id": request_id(scope),
        "caller": [caller.name, caller.role, caller.address, caller.indexes, caller.keyed],
    }


def _scope(said: dict[str, Any]) -> dict[str, Any]:
    """Return the ASGI scope of a request that was handed on."""
    name, role, address, indexes, keyed = said.pop("caller")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        **said,
        "raw_path": said["raw_path"].encode("latin-1"),
        "query_string": said["query_string"].encode("latin-1"),
        "headers": _encoded(said["headers"]),
        REQUEST: said.pop("id"),
    }
    set_caller(scope, Caller(name, role, address, None if indexes is None else tuple(indexes), keyed=keyed))
    return scope


def _note(said: dict[str, Any]) -> None:
    """Note the stages that a request went through in the other process, for figures and log."""
    trail = current()
    if trail is None:
        return
    trail.reason, now = said["reason"], time.perf_counter()
    for stage, own, items in said["spans"]:
        trail.note(stage, now - own, now, items)


async def _reached(door: Path) -> Stream:
    """Return a connection with a process that says that it listens."""
    reader, writer = await asyncio.open_unix_connection(door)
    try:
        await _read(reader)
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the next frame.

    Raises:
        EOFError: the other process has closed the connection, or ended.
        OSError: likewise.
    """
    kind, size = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    return kind, await reader.readexactly(size) if size else b""


def _frame(kind: int, content: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(content)) + content


def _pieces(content: bytes) -> list[bytes]:
    return [content[start : start + _PIECE] for start in range(0, len(content), _PIECE)]


def _decoded(headers: Any) -> list[list[str]]:
    return [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]


def _encoded(headers: Any) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
