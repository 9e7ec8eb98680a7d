"""A request that one process hands on to another: what it is answered when the other has read no more than it needed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from retrieval.serving.http.access.roles import Caller, set_caller
from retrieval.serving.http.problems import REQUEST
from retrieval.serving.http.processes.handing import Door, HandedOn

PARTS, SIZE = 30, 60_000


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    """Answer after the first part of the body, as whoever needs no more of it."""
    await receive()
    await send({"type": "http.response.start", "status": 400, "headers": [(b"x", b"y")]})
    await send({"type": "http.response.body", "body": b"no"})


async def no_figures() -> bytes:
    return b""


def asked() -> dict[str, Any]:
    """The scope of a change."""
    scope = {
        "type": "http", "method": "PUT", "path": "/v1/items/x", "root_path": "", "http_version": "1.1", "scheme": "http",
        "raw_path": b"/v1/items/x", "query_string": b"", "headers": [], "client": None, "server": None, REQUEST: "urn:uuid:1",
    }  # fmt: skip
    set_caller(scope, Caller("", "write", "127.0.0.1", None))
    return scope


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_answer_before_the_body_is_there_arrives(
    run: Callable[[Coroutine[Any, Any, Any]], Any], tmp_path: Path
) -> None:
    async def hand_on(door: Path) -> list[Any]:
        left, got = PARTS, []

        async def receive() -> dict[str, Any]:
            nonlocal left
            left -= 1
            if left < 0:
                await asyncio.sleep(60)
            return {"type": "http.request", "body": b"x" * SIZE, "more_body": left > 0}

        async def send(message: Any) -> None:
            got.append(message.get("status", message.get("body")))

        await HandedOn(door, 5.0, 5.0)(asked(), receive, send)
        return got

    async def both() -> float:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "1"))
            listener.listen()
            door = Door(refuses, no_figures, True)
            door.open(listener)
            for _ in range(10):
                assert await hand_on(tmp_path / "1") == [400, b"no", b""]
            began = time.monotonic()
            await door.close(time.monotonic() + 60)
            return time.monotonic() - began

    assert run(both()) < 4  # nobody waits any more for the rest
