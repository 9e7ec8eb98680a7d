"""Who may do what: the one place that every route asks."""

from __future__ import annotations

import ipaddress
from typing import Literal

from starlette.requests import Request

from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.settings import Settings

Role = Literal["read", "write", "admin"]
"""Search and look; change items; change what the operator sees of the index, such as its snapshots."""

_CLOSED = "This server is read-only. Its operator can allow changes with --write."
_FAR = (
    "This server is changed from its own machine only. Its operator can allow it from others with --writable."
)


def permit(request: Request, role: Role, settings: Settings) -> None:
    """Let a request pass that may do what it asks for.

    Raises:
        RequestError: 403, it may not.
    """
    if role == "read" or settings.writable:
        return
    if not settings.write:
        raise RequestError(403, _CLOSED)
    if not _is_near(request):
        raise RequestError(403, _FAR)


def _is_near(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
