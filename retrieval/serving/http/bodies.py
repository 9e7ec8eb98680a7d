"""Read the bodies of requests within limits, and parse forms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal, NamedTuple

from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from retrieval.serving.http.problems import RequestError, busy
from retrieval.serving.http.settings import BODY_MEMORY, BODY_SECONDS

Kind = Literal["form", "json", "image"]

_FORM_BYTES_BESIDES_IMAGES = 65_536
_DRAINED = 4
"""Read and discard up to this many times the limit, so that the sender sees the response."""


class Body(NamedTuple):
    """The body of a request: its kind, its Content-Type header and its bytes."""

    kind: Kind
    content_type: str
    content: bytes


class BodyMemory:
    """Limits the memory of the bodies of all current requests. Use it in the event loop only."""

    def __init__(self) -> None:
        self.held = 0

    async def read(self, request: Request, limits: Mapping[Kind, int], types: str) -> Body:
        """Read the body of a request; call `release` when it is no longer needed.

        Raises:
            RequestError: 408 if the body arrives too slowly, 413 if it is too large, 415 if it has
                another type, 503 if no memory is left.
        """
        content_type = request.headers.get("content-type", "")
        kind = _kind_of(content_type)
        if kind is None or kind not in limits:
            raise RequestError(415, types)
        limit = limits[kind] + (_FORM_BYTES_BESIDES_IMAGES if kind == "form" else 0)
        chunks: list[bytes] = []
        held = received = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    received += len(chunk)
                    if received > _DRAINED * limit:
                        break
                    if received <= limit:
                        if self.held + len(chunk) > BODY_MEMORY:
                            raise busy("uploads take all its memory", "memory")
                        self.held += len(chunk)
                        held += len(chunk)
                        chunks.append(chunk)
            if received > limit:
                raise RequestError(
                    413, f"The request is too large; the limit is {limits[kind]:,} bytes."
                )
        except BaseException as error:
            self.held -= held
            if isinstance(error, TimeoutError):
                sentence = f"The request took longer than {BODY_SECONDS:g} seconds to arrive."
                raise RequestError(408, sentence) from None
            raise
        return Body(kind, content_type, chunks[0] if len(chunks) == 1 else b"".join(chunks))

    def release(self, body: Body) -> None:
        """Stop counting a body's memory."""
        self.held -= len(body.content)


def _kind_of(content_type: str) -> Kind | None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return "form"
    if kind == "application/json":
        return "json"
    return "image" if kind.startswith("image/") or kind == "application/octet-stream" else None


class Form(NamedTuple):
    """A parsed form: the files of its field `image`, in order, and its other fields as text."""

    images: list[bytes]
    fields: dict[str, str]


class _Parser(MultiPartParser):
    """Starlette's parser, which also records whether the form was complete."""

    ended = False

    def on_end(self) -> None:
        """Record that the form is complete."""
        self.ended = True


def read_form(body: Body, names: Sequence[str], max_bytes: int, max_images: int = 1) -> Form:
    """Parse a `multipart/form-data` body. Blocks, so call it in a thread if the body is large.

    Raises:
        RequestError: the body is not a form, an image is too large, or a field is unknown or
            repeated.
    """
    form, parts = Form([], {}), _parts(body, max_images, len(names))
    try:
        for name, value in parts:
            if isinstance(value, str) and name != "image":
                if name not in names:
                    fields = ", ".join(f'"{field}"' for field in ("image", *names))
                    raise RequestError(400, f"The form has an unknown field; it takes {fields}.")
                if name in form.fields:
                    raise RequestError(400, f'The form repeats its field "{name}".')
                form.fields[name] = value
            elif isinstance(value, str) or name != "image":
                sentence = 'The form needs a file in its field "image", and takes no other file.'
                raise RequestError(400, sentence)
            else:
                content = value.file.read()
                if len(content) > max_bytes:
                    sentence = f"The image has {len(content):,} bytes; the limit is {max_bytes:,}"
                    raise RequestError(413, f"{sentence} (--max-bytes).")
                form.images.append(content)
    finally:
        for _, value in parts:
            if not isinstance(value, str):
                value.file.close()
    if not form.images:
        raise RequestError(400, 'The form needs a file in its field "image".')
    return form


def _parts(body: Body, max_images: int, max_fields: int) -> list[tuple[str, str | UploadFile]]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body.content

    parser = _Parser(
        Headers({"content-type": body.content_type}),
        stream(),
        max_files=max_images,
        max_fields=max_fields + 1,
        max_part_size=_FORM_BYTES_BESIDES_IMAGES,
    )
    parser.spool_max_size = len(body.content) + 1  # keep all of it in memory
    reason = "its end is missing"
    try:
        parser.parse().send(None)  # never waits, since the whole body is in memory
    except StopIteration as done:
        parts: list[tuple[str, str | UploadFile]] = done.value.multi_items()
        if parser.ended:
            return parts
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            limit = "one" if max_images == 1 else f"{max_images:,} at most"
            raise RequestError(
                400, f'Too many files: give {limit}, in the field "image".'
            ) from None
        reason = error.message.rstrip(".")
    except FormParserError as error:  # Starlette before 1.10 does not convert it
        reason = str(error).rstrip(".")
    except UnicodeError:
        reason = "a field is not text of its charset"
    raise RequestError(400, f"The form cannot be read: {reason}.")
