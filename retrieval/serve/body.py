"""Read a request's body: counted while it arrives, refused before it is decoded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from retrieval.errors import RetrievalError

MAX_K = 1000
_ENVELOPE = 65_536  # what a form may weigh besides its image
_JSON_BYTES = 2_000_000
_SECONDS = 60.0
_DRAIN = 4  # times the limit that is read and thrown away, so that the sender gets to see the answer


class RequestError(RetrievalError):
    """A request that cannot be answered.

    Args:
        status: HTTP status, 4xx or 503.
        sentence: for the person who sent it.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Query:
    """What is searched for: an encoded image's bytes, or a vector; and how many answers."""

    image: bytes | None
    vector: NDArray[np.float64] | None
    k: int


class _Form(MultiPartParser):
    """Keeps an image within the limit in memory: a query is never written to the disk."""

    spool_max_size = 1 << 30
    max_file_size = 1 << 30  # the same under its older name


async def read_query(request: Request, max_bytes: int) -> Query:
    """Return the query that a request carries, as a form with `image` or as JSON with `vector`.

    Raises:
        RequestError: too large, too slow, of another type, or not what it says.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        async with asyncio.timeout(_SECONDS):
            if kind == "multipart/form-data":
                return await _form(request, max_bytes)
            if kind == "application/json":
                return _json(b"".join([chunk async for chunk in _limited(request, _JSON_BYTES, _JSON_BYTES)]))
    except TimeoutError:
        raise RequestError(408, f"The request took longer than {_SECONDS:.0f} seconds to arrive.") from None
    raise RequestError(
        415, 'Send multipart/form-data with a field "image", or application/json with {"vector": [...]}.'
    )


async def _limited(request: Request, limit: int, said: int) -> AsyncGenerator[bytes, None]:
    """Give the body's chunks; past the limit, throw the rest away and refuse."""
    length = request.headers.get("content-length", "0")
    too_large = length.isdecimal() and int(length) > limit
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        too_large = too_large or received > limit
        if too_large and received > _DRAIN * limit:
            break
        if not too_large:
            yield chunk
    if too_large:
        raise RequestError(413, f"The request is too large; the limit is {said:,} bytes.")


async def _form(request: Request, max_bytes: int) -> Query:
    chunks = _limited(request, max_bytes + _ENVELOPE, max_bytes)
    try:
        form = await _Form(request.headers, chunks, max_files=1, max_fields=4, max_part_size=1024).parse()
    except MultiPartException as fault:
        raise RequestError(400, f"The form cannot be read: {fault.message.rstrip('.')}.") from None
    except KeyError:  # no boundary
        raise RequestError(400, "The form cannot be read: its content type names no boundary.") from None
    try:
        image = form.get("image")
        if not isinstance(image, UploadFile):
            raise RequestError(400, 'The form needs a file in its field "image".')
        content = await image.read()
        if len(content) > max_bytes:
            raise RequestError(413, f"The image has {len(content):,} bytes; the limit is {max_bytes:,}.")
        return Query(content, None, _k(form.get("k", "10")))
    finally:
        await form.close()


def _json(body: bytes) -> Query:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, "The request is not JSON.") from None
    if not isinstance(content, dict) or not set(content) <= {"vector", "k"} or "vector" not in content:
        raise RequestError(400, 'JSON must be {"vector": [numbers], "k": 10}; k may be left out.')
    vector = content["vector"]
    plain = isinstance(vector, list) and all(type(value) in (int, float) for value in vector)
    try:
        numbers = np.array(vector, dtype=np.float64) if plain and vector else None
    except OverflowError:
        numbers = None
    if numbers is None or not np.isfinite(numbers).all():
        raise RequestError(400, '"vector" must be a list of finite numbers.')
    return Query(None, numbers, _k(content.get("k", 10)))


def _k(value: object) -> int:
    """Return k from a form's text or a JSON number."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 9:
        value = int(value)
    if type(value) is not int or not 1 <= value <= MAX_K:
        raise RequestError(400, f'"k" must be a whole number from 1 to {MAX_K}.')
    return value
