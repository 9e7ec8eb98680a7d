"""Receive the bodies of requests within limits of time and memory, and parse forms."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from retrieval.base.machine import give_back
from starlette.requests import Request

from retrieval_server.problems import RequestError, busy
from retrieval_server.settings import BODY_MEMORY, BODY_SECONDS

Kind = Literal["form", "json", "image"]
_KINDS: Mapping[str, Kind] = {
    "multipart/form-data": "form",
    "application/json": "json",
    "image/*": "image",
    "application/octet-stream": "image",
}

_FORM_BYTES_BESIDES_IMAGES = 65_536
_RELEASED_BYTES_BEFORE_TRIM = 16_000_000
_DISCARDED_LIMITS = 4
"""The rest of a body that is too large is read and discarded, up to this many times the limit.

Many clients read the error response only after they have sent the whole body.
"""


class Body(NamedTuple):
    """The body of a request: its kind, its Content-Type header and its bytes."""

    kind: Kind
    content_type: str
    content: bytes


class BodyMemory:
    """Limits the memory of the bodies of all current requests; not thread-safe."""

    def __init__(self) -> None:
        self.held = self._released = 0

    async def read(self, request: Request, limits: Mapping[Kind, int]) -> Body:
        """Read a request's body, which must be of a kind in `limits`; call `release` after use."""
        content_type = request.headers.get("content-type", "")
        media_type = content_type.partition(";")[0].strip().lower()
        # RFC 7396 names this type for a merge patch.
        if (request.method, media_type) == ("PATCH", "application/merge-patch+json"):
            media_type = "application/json"
        kind = _KINDS.get("image/*" if media_type.startswith("image/") else media_type)
        if kind is None or kind not in limits:
            types = " or ".join(name for name in _KINDS if _KINDS[name] in limits)
            raise RequestError(415, f"The Content-Type must be {types}; see /v1/openapi.json.")
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise RequestError(
                415,
                "The body is compressed, which this server does not read. Send it without a"
                " Content-Encoding.",
                headers={"Accept-Encoding": "identity"},
            )
        limit = limits[kind] + (_FORM_BYTES_BESIDES_IMAGES if kind == "form" else 0)
        content = bytearray()
        received = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    received += len(chunk)
                    if received > _DISCARDED_LIMITS * limit:
                        break
                    # The rest is read but not kept; see `_DISCARDED_LIMITS`.
                    if received <= limit:
                        if self.held + len(chunk) > BODY_MEMORY:
                            raise busy("uploads take all its memory", "memory")
                        self.held += len(chunk)
                        content += chunk
            if received > limit:
                sentence = f"The request is too large; the limit is {limits[kind]:,} bytes."
                raise RequestError(413, sentence)
        except BaseException as error:
            self.release(len(content))
            if isinstance(error, TimeoutError):
                sentence = f"The request took longer than {BODY_SECONDS:g} seconds to arrive."
                raise RequestError(408, sentence) from None
            raise
        return Body(kind, content_type, bytes(content))

    def release(self, size: int) -> None:
        """Subtract bytes that are no longer held; after many, return free memory to the system."""
        self.held -= size
        self._released += size
        if self._released > _RELEASED_BYTES_BEFORE_TRIM and not self.held:
            self._released = 0
            asyncio.get_running_loop().call_later(1.0, give_back)


@dataclass
class _Part:
    """One part of a form; `options` are the parameters of its header Content-Disposition."""

    options: dict[bytes, bytes] = field(default_factory=dict)
    content: bytes | bytearray = b""


def read_form(
    body: Body,
    names: Sequence[str],
    max_bytes: int,
    max_images: int = 1,
    examples: Mapping[str, list[bytes]] = MappingProxyType({}),
    max_examples: int = 0,
) -> tuple[list[bytes], dict[str, str]]:
    """Parse a form; return the files of its field `image`, in order, and its other fields as text.

    Parsing blocks, so call this in a thread if the body is large.

    Args:
        body: the form.
        names: names of fields with text.
        max_bytes: largest number of bytes of a file.
        max_images: largest number of files in the field `image`.
        examples: by the names of further fields, lists to which their files are added. A file or a
            text in the field `like` can stand for an image.
        max_examples: largest number of files in these fields together.
    """
    images = list[bytes]()
    fields = dict[str, str]()
    for part in _parts(body, max_images + max_examples + len(names) + 1):
        name = part.options.get(b"name", b"").decode("utf-8", "replace")
        value = part.content
        if name == "image" and b"filename" in part.options:
            check_size(value, max_bytes)
            if len(images) == max_images:
                limit = "one" if max_images == 1 else f"{max_images:,} at most"
                sentence = f'Too many files: send {limit}, in the field "image".'
                raise RequestError(400, sentence)
            images.append(bytes(value))
        elif name in examples and b"filename" in part.options:
            check_size(value, max_bytes)
            if sum(map(len, examples.values())) == max_examples:
                sentence = f"Too many files: send at most {max_examples:,} to like or dislike."
                raise RequestError(400, sentence)
            examples[name].append(bytes(value))
        elif name == "image" or b"filename" in part.options:
            sentence = 'The form needs a file in its field "image", and takes no other file.'
            raise RequestError(400, sentence)
        elif name not in names:
            fields_taken = ", ".join(f'"{entry}"' for entry in ("image", *names))
            raise RequestError(400, f"The form has an unknown field; it takes {fields_taken}.")
        elif name in fields:
            raise RequestError(400, f'The form repeats its field "{name}".')
        elif len(value) > _FORM_BYTES_BESIDES_IMAGES:
            limit = f"has more than {_FORM_BYTES_BESIDES_IMAGES:,} bytes"
            raise RequestError(400, f'The field "{name}" of the form {limit}.')
        else:
            try:
                fields[name] = value.decode()
            except UnicodeError:
                raise _unreadable(f'its field "{name}" is not text in UTF-8') from None
    if not (images or "like" in fields or examples.get("like")):
        raise RequestError(400, 'The form needs a file in its field "image".')
    return images, fields


def check_size(image: bytes | bytearray, max_bytes: int) -> None:
    """Raise a RequestError 413 if an image is too large."""
    if len(image) > max_bytes:
        sentence = f"The image has {len(image):,} bytes; the limit is {max_bytes:,}"
        raise RequestError(413, f"{sentence} (--max-bytes).")


def _parts(body: Body, most: int) -> list[_Part]:
    """Return the parts of a form; raise a RequestError 400 if it has more than `most`."""
    parts = list[_Part]()
    ends = list[bool]()
    header = [b""]

    def begin() -> None:
        if len(parts) == most:
            raise RequestError(400, f"The form has too many parts; the limit is {most:,}.")
        parts.append(_Part())

    def header_field(data: bytes, start: int, end: int) -> None:
        header[0] = data[start:end].lower()

    def header_value(data: bytes, start: int, end: int) -> None:
        if header[0] == b"content-disposition":
            parts[-1].options = parse_options_header(data[start:end])[1]

    def part_data(data: bytes, start: int, end: int) -> None:
        part = parts[-1]
        # Most parts come in one piece, which is copied only once.
        if not part.content:
            part.content = data[start:end]
            return
        if isinstance(part.content, bytes):
            part.content = bytearray(part.content)
        part.content += data[start:end]

    boundary = parse_options_header(body.content_type)[1].get(b"boundary")
    if not boundary:
        raise _unreadable("its boundary is missing")
    callbacks: Any = {
        "on_part_begin": begin,
        "on_header_field": header_field,
        "on_header_value": header_value,
        "on_part_data": part_data,
        "on_end": lambda: ends.append(True),
    }
    try:
        # Each header arrives in one call, because the whole body is passed at once. The parser
        # itself limits the number of headers of a part, and their size.
        MultipartParser(boundary, callbacks).write(body.content)
    except FormParserError as error:
        raise _unreadable(str(error).rstrip(".")) from None
    if not ends:
        raise _unreadable("its end is missing")
    return parts


def _unreadable(reason: str) -> RequestError:
    return RequestError(400, f"The form cannot be read: {reason}.")
