"""A request's body: counted and paid for while it arrives, read in a thread once it is there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from retrieval.errors import DataError
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.http.errors import Gone, RequestError

MAX_K = 1000
MOST_CONDITIONS, MOST_VALUES = 100, 1000  # of a filter: a tenth of what Python takes
_ENVELOPE = 65_536  # what a form may weigh besides its image
_JSON_BYTES = 2_000_000
_FIELDS = ("image", "k", "where")
_DRAIN = 4  # times the limit that is read and thrown away, so that the sender gets to see the answer
_LARGE = 16_384  # bytes
_STALLED = 1.0  # seconds without a byte after which an upload gives way to another when memory is short
_TYPES = 'Send multipart/form-data with a field "image", or application/json with {"vector": [...]}.'

Receive = Callable[[], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True)
class Query:
    """What is searched for: an encoded image's bytes, or a vector; how many answers; and among which items."""

    image: bytes | None
    vector: NDArray[np.float64] | None
    k: int
    where: Filter | None = None


@dataclass(eq=False)
class Upload:
    """One body that is arriving, or waits to be searched with."""

    task: asyncio.Task[Any] | None
    held: int = 0
    last: float = 0.0
    arriving: bool = True
    evicted: bool = False


class Budget:
    """The memory that all bodies together may take; for the event loop.

    Args:
        limit: in bytes.

    Attributes:
        held: bytes of the bodies that are there.
        gone: bytes of those that are there no more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._uploads: set[Upload] = set()
        self.held = 0
        self.gone = 0

    @contextmanager
    def upload(self) -> Iterator[Upload]:
        """Open an account, whose memory comes back at the end."""
        upload = Upload(asyncio.current_task(), last=time.monotonic())
        self._uploads.add(upload)
        try:
            yield upload
        finally:
            self._uploads.discard(upload)
            self.held -= upload.held
            self.gone += upload.held

    def take(self, upload: Upload, size: int) -> None:
        """Count arrived bytes. When memory is short, the upload that has stalled longest gives its own back.

        Raises:
            RequestError: 503, all of it is taken and none has stalled.
        """
        upload.last = time.monotonic()
        while self.held + size > self._limit:
            others = [one for one in self._uploads if one.arriving and one is not upload]
            stalled = min(others, key=lambda one: one.last, default=None)
            if stalled is None or upload.last - stalled.last < _STALLED or stalled.task is None:
                raise RequestError(
                    503, "The server is busy: uploads take all its memory. Try again in a moment.", "memory"
                )
            self._uploads.discard(stalled)
            self.held -= stalled.held
            self.gone += stalled.held
            stalled.held, stalled.evicted = 0, True
            stalled.task.cancel()
        upload.held += size
        self.held += size


class Body:
    """A search request's body, first read, then understood.

    Args:
        headers: the request's, lower case.
        max_bytes: largest image.

    Raises:
        RequestError: 415, the body is of another type. A body that is said to be too large is refused by `read`, with 413.
    """

    def __init__(self, headers: Mapping[str, str], max_bytes: int) -> None:
        self._type = headers.get("content-type", "")
        kind = self._type.partition(";")[0].strip().lower()
        if kind not in ("multipart/form-data", "application/json"):
            raise RequestError(415, _TYPES)
        self._is_form = kind == "multipart/form-data"
        self._max_bytes = max_bytes
        self._said = max_bytes if self._is_form else _JSON_BYTES
        self._limit = max_bytes + _ENVELOPE if self._is_form else _JSON_BYTES
        length = headers.get("content-length", "0")
        self._too_large = length.isascii() and length.isdecimal() and int(length[:20]) > self._limit
        self._parts: list[bytes] = []
        self._received = 0

    @property
    def large(self) -> bool:
        """Whether understanding it takes longer than handing it to a thread."""
        return self._received > _LARGE

    async def read(self, receive: Receive, budget: Budget, upload: Upload, seconds: float) -> None:
        """Collect the body; past the limit, throw the rest away and refuse.

        Raises:
            RequestError: 408, 413 or 503: too slow, too large, or no memory is left.
            Gone: the client has left.
        """
        try:
            async with asyncio.timeout(seconds):
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

    def query(self) -> Query:
        """Return the query that the body holds; for a thread.

        Raises:
            RequestError: 400 or 413, it is not what it should be.
        """
        content = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        return _form(self._type, content, self._max_bytes) if self._is_form else _json(content)


def _form(content_type: str, content: bytes, max_bytes: int) -> Query:
    parts = _Parts(content_type, content)
    image, k = parts.values.get("image"), parts.values.get("k", b"10")
    if image is None or "image" not in parts.files:
        raise RequestError(400, 'The form needs a file in its field "image".')
    if len(image) > max_bytes:
        raise RequestError(413, f"The image has {len(image):,} bytes; the limit is {max_bytes:,}.")
    return Query(image, None, _k(k.decode("latin-1")), _where_of_form(parts.values.get("where")))


class _Parts:
    """The fields of a form.

    Attributes:
        values: a field's content by its name.
        files: the names of those that have a file's name.

    Raises:
        RequestError: not a form, or with other fields than `image`, `k` and `where`, or one of them twice.
    """

    def __init__(self, content_type: str, content: bytes) -> None:
        self.values: dict[str, bytes] = {}
        self.files: set[str] = set()
        self._headers: list[tuple[bytes, bytes]] = []
        self._name = b""
        self._value = b""
        self._field = ""
        self._pieces: list[bytes] = []
        self._ended = False
        boundary = parse_options_header(content_type.encode("latin-1", "replace"))[1].get(b"boundary")
        if not boundary:
            raise RequestError(400, "The form cannot be read: its content type names no boundary.")
        try:
            parser = MultipartParser(
                boundary,
                {
                    "on_part_data": lambda data, start, end: self._pieces.append(data[start:end]),
                    "on_part_end": self._end_part,
                    "on_header_field": self._on_name,
                    "on_header_value": self._on_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_part,
                    "on_end": self._end,
                },
            )
            parser.write(content)
            parser.finalize()
        except FormParserError as fault:
            raise RequestError(400, f"The form cannot be read: {str(fault).rstrip('.')}.") from None
        if not self._ended:
            raise RequestError(400, "The form cannot be read: its end is missing.")

    def _on_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers.append((self._name.lower(), self._value))
        self._name = self._value = b""

    def _begin_part(self) -> None:
        said = [value for name, value in self._headers if name == b"content-disposition"]
        self._headers = []
        kind, options = parse_options_header(said[0]) if len(said) == 1 else (b"", {})
        if kind != b"form-data" or b"name" not in options:
            raise RequestError(400, "The form cannot be read: a part of it does not say which field it is.")
        self._field = options[b"name"].decode("latin-1")
        if self._field not in _FIELDS:
            if b"filename" in options:
                raise RequestError(
                    400, 'The form needs a file in its field "image", and takes no other file.'
                )
            raise RequestError(400, 'The form has an unknown field; it takes "image", "k" and "where".')
        if self._field in self.values:
            what = "Too many files: give one, in the" if self._field == "image" else "The form repeats its"
            raise RequestError(400, f'{what} field "{self._field}".')
        if b"filename" in options:
            self.files.add(self._field)

    def _end_part(self) -> None:
        self.values[self._field] = b"".join(self._pieces)
        self._pieces = []

    def _end(self) -> None:
        self._ended = True


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise RequestError(400, "The JSON gives a key twice.")
    return content


def _json(body: bytes) -> Query:
    content = _loads(body, "The request is not JSON.")
    if (
        not isinstance(content, dict)
        or not set(content) <= {"vector", "k", "where"}
        or "vector" not in content
    ):
        raise RequestError(
            400,
            'JSON must be {"vector": [numbers], "k": 10, "where": {"label": "shoe"}}; k and where may be left out.',
        )
    vector = content["vector"]
    plain = isinstance(vector, list) and all(type(value) in (int, float) for value in vector)
    try:
        numbers = np.array(vector, dtype=np.float64) if plain and vector else None
    except OverflowError:
        numbers = None
    if numbers is None or not np.isfinite(numbers).all():
        raise RequestError(400, '"vector" must be a list of finite numbers.')
    return Query(None, numbers, _k(content.get("k", 10)), _where(content.get("where")))


def _loads(text: bytes, sentence: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise RequestError(400, sentence) from None


def _where_of_form(given: bytes | None) -> Filter | None:
    """Return the filter in a form's field: as text, or as JSON, which begins with a brace."""
    if given is None or not given.strip():
        return None
    if given.lstrip().startswith(b"{"):
        return _where(_loads(given, 'The filter in "where" is not JSON.'))
    try:
        return _where(given.decode())
    except UnicodeDecodeError:
        raise RequestError(400, 'The filter in "where" is not UTF-8 text.') from None


def _where(given: Any) -> Filter | None:
    """Return a filter from its text or its JSON form."""
    try:
        found = as_filter(given)
    except DataError as fault:
        raise RequestError(400, str(fault)) from None
    if found is not None and (found.size.conditions > MOST_CONDITIONS or found.size.values > MOST_VALUES):
        raise RequestError(
            400,
            f"The filter is too large: the server takes {MOST_CONDITIONS} conditions and {MOST_VALUES:,} values.",
        )
    return found


def _k(value: object) -> int:
    """Return k from a form's text or a JSON number."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 9:
        value = int(value)
    if type(value) is not int or not 1 <= value <= MAX_K:
        raise RequestError(400, f'"k" must be a whole number from 1 to {MAX_K}.')
    return value
