"""What a client is told when its request fails: `application/problem+json`, as RFC 9457 has it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"
REQUEST = "retrieval.request"
"""Where an ASGI scope has the request's id."""


def new_request_id(trace: str = "") -> str:
    """Return an id for a request, as a URN: what `instance` names, and the header `X-Request-Id`.

    Args:
        trace: id of the trace that it belongs to, 32 hexadecimal digits, which is then its own; empty for none.
    """
    return f"urn:uuid:{uuid.UUID(hex=trace) if trace else uuid.uuid4()}"


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
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": sentence,
        "instance": instance,
        **(more or {}),
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


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
    return Response(body, status, headers={**again, **(headers or {})}, media_type=MEDIA_TYPE)
