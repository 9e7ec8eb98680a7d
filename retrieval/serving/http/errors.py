"""What goes wrong with a request, and what its sender is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrieval.errors import RetrievalError

CROWDED = "queue"
"""The reason of a request that finds no room among those that wait."""


class RequestError(RetrievalError):
    """A request that cannot be answered.

    Args:
        status: HTTP status, 4xx or 503.
        sentence: for the person who sent it.
        reason: one word for the server's figures, one of a few; by default its status says enough.
        more: further members of the problem.
        headers: of the answer, besides.
    """

    def __init__(
        self,
        status: int,
        sentence: str,
        reason: str = "",
        more: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        self.more = more
        self.headers = dict(headers or {})


class Gone(Exception):
    """The client has left; nobody waits for the answer."""
