"""Answers: JSON that a thread has made, and pictures piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from retrieval.serving.http.pictures import PIECE
from retrieval.serving.http.problems import Whole

_JSON = (b"content-type", b"application/json")


class Pieces(Response):
    """An answer that is made and sent piece by piece, no faster than its client takes it.

    Args:
        pieces: its content.
        size: of them all, in bytes.
        media_type: of the content.
        headers: besides.
        held: closed when the last piece is sent, or none will be.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        size: int,
        media_type: str,
        headers: Mapping[str, str],
        held: ExitStack | None = None,
    ) -> None:
        super().__init__(None, media_type=media_type, headers={**headers, "Content-Length": str(size)})
        self._pieces = pieces
        self._held = held or ExitStack()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        with self._held:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            if scope["method"] != "HEAD":
                async for piece in self._pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def slices(content: bytes) -> AsyncIterator[bytes]:
    """Give content in pieces."""
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE]


def as_json(content: object) -> bytes:
    """Return an answer's JSON."""
    return to_json(content, inf_nan_mode="null")


def answer(content: bytes | object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer of JSON: encoded already, or yet to be."""
    body = content if isinstance(content, bytes) else as_json(content)
    return Whole(body, status, _JSON, headers)
