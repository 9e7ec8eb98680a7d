"""What a client is told when its request fails: `application/problem+json`, as RFC 9457 has it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from retrieval.serving.http.leaving import FOLLOWS

MEDIA_TYPE = "application/problem+json"
REQUEST = "retrieval.request"
"""Where an ASGI scope has the request's id."""

_RANDOM = random.Random()  # seeded by the system
_VARIANTS = "89ab"
_TITLES = {status.value: status.phrase for status in HTTPStatus}


_TYPE = (b"content-type", MEDIA_TYPE.encode())


class Whole(Response):
    """An answer that is there, for a third of what Starlette's costs.

    Args:
        body: of it.
        status: of HTTP.
        kind: the header that says what it is.
        headers: further ones.
    """

    def __init__(
        self,
        body: bytes,
        status: int,
        kind: tuple[bytes, bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code, self.body, self.background = status, body, None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), kind]
        if headers:
            self.raw_headers += [
                (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
            ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        status, headers = self.status_code, self.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers, FOLLOWS: True})
        await send({"type": "http.response.body", "body": self.body})


def new_request_id(trace: str = "") -> str:
    """Return an id for a request, as a URN: what `instance` names, and the header `X-Request-Id`.

    Args:
        trace: id of the trace that it belongs to, 32 hexadecimal digits, which is then its own; empty for none.
    """
    said = trace or f"{_RANDOM.getrandbits(128):032x}"
    if (
        not trace
    ):  # version 4 of RFC 9562, without the system call of `uuid.uuid4`: an id is a name, and no secret
        said = f"{said[:12]}4{said[13:16]}{_VARIANTS[int(said[16], 16) & 3]}{said[17:]}"
    return f"urn:uuid:{said[:8]}-{said[8:12]}-{said[12:16]}-{said[16:20]}-{said[20:]}"


def request_id(scope: Any) -> str:
    """Return the id of the request that an ASGI scope is of; the same one each time."""
    if REQUEST not in scope:
        scope[REQUEST] = new_request_id()
    return str(scope[REQUEST])


def said(status: int, sentence: str, instance: str, more: Mapping[str, Any] | None = None) -> bytes:
    """Return a problem's JSON.

    Args:
        status: of HTTP.
        sentence: what is wrong, and what to do: its `detail`.
        instance: the request's id.
        more: further members.
    """
    content = {
        "type": "about:blank",
        "title": _TITLES[status],
        "status": status,
        "detail": sentence,
        "instance": instance,
        **(more or {}),
    }
    return to_json(content)


def problem(
    scope: Any,
    status: int,
    sentence: str,
    headers: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Response:
    """Return the answer to a request that failed; a 503 says when to come again."""
    again = {"Retry-After": "1"} if status == 503 else {}
    body = said(status, sentence, request_id(scope), more)
    return Whole(body, status, _TYPE, {**again, **(headers or {})})
