"""A request's body, read within limits, and the fields of a form."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal, NamedTuple

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from retrieval.serving.http.problems import RequestError
from retrieval.serving.http.settings import BODY_MEMORY, BODY_SECONDS
from retrieval.serving.memory import Memory

Kind = Literal["form", "json", "image"]


_ENVELOPE = 65_536
"""Bytes of a form besides its images."""

_GIVEN_BACK = 16_000_000
"""Bytes of bodies after whose end memory goes back to the system."""

_DRAINED = 4
"""Times its limit that a body is read and thrown away, so that its sender sees the answer."""


class BodyMemory:
    """The bytes that the bodies of all requests under way take together; for the event loop."""

    def __init__(self) -> None:
        self.held = self._gone = 0
        self._system = Memory()

    async def read(self, request: Request, limits: Mapping[Kind, int], types: str) -> Body:
        """Return a request's body; `release` gives its memory back.

        Args:
            request: whose body it is.
            limits: the largest content of each kind that is taken.
            types: the sentence for a body of another type.

        Raises:
            RequestError: 408, 413, 415 or 503: too slow, too large, of another type, or no memory is left.
        """
        content_type = request.headers.get("content-type", "")
        kind = _kind_of(content_type)
        if kind is None or kind not in limits:
            raise RequestError(415, types)
        limit = limits[kind] + (_ENVELOPE if kind == "form" else 0)
        parts: list[bytes] = []
        held = received = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    received += len(chunk)
                    if received > _DRAINED * limit:
                        break
                    if received <= limit:
                        if self.held + len(chunk) > BODY_MEMORY:
                            sentence = (
                                "The server is busy: uploads take all its memory. Try again in a moment."
                            )
                            raise RequestError(503, sentence, "memory")
                        self.held += len(chunk)
                        held += len(chunk)
                        parts.append(chunk)
            if received > limit:
                raise RequestError(413, f"The request is too large; the limit is {limits[kind]:,} bytes.")
        except TimeoutError:
            self._let_go(held)
            raise RequestError(
                408, f"The request took longer than {BODY_SECONDS:g} seconds to arrive."
            ) from None
        except BaseException:
            self._let_go(held)
            raise
        return Body(kind, content_type, parts[0] if len(parts) == 1 else b"".join(parts))

    def release(self, body: Body) -> None:
        """Give a body's memory back."""
        self._let_go(len(body.content))

    def _let_go(self, size: int) -> None:
        """Count bytes out; after many of them, give the C library's free memory back to the system."""
        self.held -= size
        self._gone += size
        if self._gone > _GIVEN_BACK and not self.held:
            self._gone = 0
            asyncio.get_running_loop().call_later(1.0, self._give_back)

    def _give_back(self) -> None:
        gc.collect()  # an exception and its frames are a cycle that may hold a body
        self._system.give_back()


class Body(NamedTuple):
    """A request's body: its kind, the header that says so, and its bytes."""

    kind: Kind
    content_type: str
    content: bytes


def _kind_of(content_type: str) -> Kind | None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return "form"
    if kind == "application/json":
        return "json"
    return "image" if kind.startswith("image/") or kind == "application/octet-stream" else None


class _Parser(MultiPartParser):
    """Starlette's, which knows whether the form's end came."""

    ended = False

    def on_end(self) -> None:
        """Note the end."""
        self.ended = True


class Form:
    """The fields of a form, and nothing else.

    Args:
        body: `multipart/form-data`.
        fields: names of fields that the form may have besides images.
        max_bytes: of an image.
        max_images: files that its field `image` may hold.

    Attributes:
        images: the content of each file in the field `image`, in order.

    Raises:
        RequestError: the body is no form, has other fields, or one of them too often.
    """

    def __init__(self, body: Body, fields: Sequence[str], max_bytes: int, max_images: int = 1) -> None:
        self.images: list[bytes] = []
        self._values: dict[str, str] = {}
        parts = self._parts(body, max_images, len(fields))
        try:
            for name, value in parts:
                self._add(name, value, fields, max_bytes)
        finally:
            for _, value in parts:
                if not isinstance(value, str):
                    value.file.close()
        if not self.images:
            raise RequestError(400, 'The form needs a file in its field "image".')

    def _add(self, name: str, value: str | UploadFile, fields: Sequence[str], max_bytes: int) -> None:
        if isinstance(value, str):
            if name == "image":
                raise RequestError(400, 'The form needs a file in its field "image".')
            if name not in fields:
                names = ", ".join(f'"{known}"' for known in ("image", *fields))
                raise RequestError(400, f"The form has an unknown field; it takes {names}.")
            if name in self._values:
                raise RequestError(400, f'The form repeats its field "{name}".')
            self._values[name] = value
            return
        if name != "image":
            raise RequestError(400, 'The form needs a file in its field "image", and takes no other file.')
        content = value.file.read()
        if len(content) > max_bytes:
            sentence = f"The image has {len(content):,} bytes; the limit is {max_bytes:,} (--max-bytes)."
            raise RequestError(413, sentence)
        self.images.append(content)

    @staticmethod
    def _parts(body: Body, max_images: int, max_fields: int) -> list[tuple[str, str | UploadFile]]:
        async def stream() -> AsyncGenerator[bytes, None]:
            yield body.content

        headers = Headers({"content-type": body.content_type})
        parser = _Parser(
            headers, stream(), max_files=max_images, max_fields=max_fields + 1, max_part_size=_ENVELOPE
        )
        parser.spool_max_size = len(body.content) + 1  # nothing of it is written to a disk
        reason = "its end is missing"
        try:
            parser.parse().send(None)  # all of the body is here, so that it ends without waiting
        except StopIteration as done:
            parts: list[tuple[str, str | UploadFile]] = done.value.multi_items()
            if parser.ended:
                return parts
        except MultiPartException as error:
            if error.message.startswith("Too many files"):
                few = "one" if max_images == 1 else f"{max_images:,} at most"
                raise RequestError(400, f'Too many files: give {few}, in the field "image".') from None
            reason = error.message.rstrip(".")
        except UnicodeError:
            reason = "a field is not text of its charset"
        raise RequestError(400, f"The form cannot be read: {reason}.")

    def get(self, name: str) -> str | None:
        """Return a field's text; None where there is none."""
        return self._values.get(name)
