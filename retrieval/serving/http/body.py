"""A request's body: counted and paid for while it arrives, read in a thread once it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from retrieval.serving.http.budget import Budget, Upload
from retrieval.serving.http.errors import Gone, RequestError
from retrieval.serving.http.limit import Limit

Kind = Literal["form", "json", "image"]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]

ENVELOPE = 65_536  # what a form may weigh besides its images
JSON_BYTES = 2_000_000
_DRAIN = 4  # times the limit that is read and thrown away, so that the sender gets to see the answer
LARGE = 16_384  # bytes of text: understanding more takes longer than handing it to a thread
_COPIED = 262_144  # bytes of an image: likewise copying it


class Body:
    """A request's body, first read, then understood.

    Args:
        headers: the request's, lower case.
        limits: the largest content of each kind that is taken.
        types: the sentence for a body of another kind.

    Raises:
        RequestError: 415, the body is of another type. A body that is said to be too large is refused by `read`, with 413.

    Attributes:
        kind: what it is, by its content type.
        content_type: the header.
    """

    def __init__(self, headers: Mapping[str, str], limits: Mapping[Kind, int], types: str) -> None:
        self.content_type = headers.get("content-type", "")
        kind = kind_of(self.content_type)
        if kind is None or kind not in limits:
            raise RequestError(415, types)
        self.kind: Kind = kind
        self._said = limits[kind]
        self._limit = self._said + (ENVELOPE if kind == "form" else 0)
        length = headers.get("content-length", "0")
        self._too_large = length.isascii() and length.isdecimal() and int(length[:20]) > self._limit
        self._parts: list[bytes] = []
        self._received = 0

    @property
    def large(self) -> bool:
        """Whether understanding it takes longer than handing it to a thread, whatever a form's fields say."""
        return self._received > (LARGE if self.kind == "json" else _COPIED)

    async def read(
        self, receive: Receive, budget: Budget, upload: Upload, seconds: float, *, there: bool = False
    ) -> None:
        """Collect the body; past the limit, throw the rest away and refuse.

        Args:
            receive: gives a part of it.
            budget: of the memory that it takes.
            upload: its account there.
            seconds: that it may take to arrive.
            there: whether all of it has arrived: nothing is waited for then.

        Raises:
            RequestError: 408, 413 or 503: too slow, too large, or no memory is left.
            Gone: the client has left.
        """
        if there:
            await self._collect(receive, budget, upload)
            upload.arriving = False
            return
        upload.task = asyncio.current_task()
        try:
            with Limit(seconds):
                await self._collect(receive, budget, upload)
        except TimeoutError:
            raise RequestError(408, f"The request took longer than {seconds:g} seconds to arrive.") from None
        except asyncio.CancelledError:
            if not upload.evicted:
                raise
            raise RequestError(
                408, "The upload stalled while others waited for its memory. Send it again.", "memory"
            ) from None
        upload.arriving = False

    async def _collect(self, receive: Receive, budget: Budget, upload: Upload) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            chunk, more = message.get("body", b""), message.get("more_body", False)
            self._received += len(chunk)
            self._too_large = self._too_large or self._received > self._limit
            if self._too_large and self._received > _DRAIN * self._limit:
                break
            if not self._too_large:
                budget.take(upload, len(chunk))
                self._parts.append(chunk)
        if self._too_large:
            raise RequestError(413, f"The request is too large; the limit is {self._said:,} bytes.")

    def content(self) -> bytes:
        """Return all of it, once."""
        content = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        return content

    def put_back(self, content: bytes) -> None:
        """Have `content` return it once more."""
        self._parts = [content]


def kind_of(content_type: str) -> Kind | None:
    """Return what a body is by its content type; None for what no route takes."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return "form"
    if kind == "application/json":
        return "json"
    return "image" if kind.startswith("image/") or kind == "application/octet-stream" else None
