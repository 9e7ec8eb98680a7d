"""Measure the stages of a request; outside of a request this does nothing."""

from __future__ import annotations

from contextvars import ContextVar, Token
from time import perf_counter
from types import TracebackType
from typing import NamedTuple

STAGES = ("read", "wait", "decode", "encode", "search", "items", "write", "send")
"""Stages of a request, in the order of a search.

"read" receives the body; "wait" is for the request's turn; "decode" and "encode" process the image;
"search" finds and measures the nearest items, for other requests' vectors at the same time if these
wait; "items" reads their data; "write" stores items; "send" sends the response.
"""


class Span(NamedTuple):
    """One stage of one request.

    Attributes:
        stage: one of `STAGES`.
        began: start by `time.perf_counter`.
        ended: end by `time.perf_counter`.
        own: duration in seconds, without nested stages.
        items: number of items processed together.
    """

    stage: str
    began: float
    ended: float
    own: float
    items: int


class Trail:
    """Records the stages of one request.

    Stages run one after the other, so no two threads write to it at the same time.

    Attributes:
        id: id of the request.
        spans: finished stages; a nested stage precedes the one that contains it.
        reason: why the request was refused, or "".
    """

    __slots__ = ("_inside", "id", "reason", "spans")

    def __init__(self, id: str = "") -> None:
        self.id = id
        self.spans: list[Span] = []
        self.reason = ""
        self._inside = 0.0

    def note(self, stage: str, began: float, ended: float, count: int = 1) -> None:
        """Record a finished stage without nested stages."""
        self.spans.append(Span(stage, began, ended, ended - began, count))

    def enter(self) -> float:
        """Begin a stage; return the value to pass to `leave` as `before`."""
        before, self._inside = self._inside, 0.0
        return before

    def leave(self, stage: str, began: float, before: float, count: int) -> None:
        """Record a stage that ends now."""
        ended = perf_counter()
        took = ended - began
        self.spans.append(Span(stage, began, ended, max(0.0, took - self._inside), count))
        self._inside = before + took

    def seconds(self) -> dict[str, float]:
        """Return the total seconds of each recorded stage, by name."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.stage] = seconds.get(span.stage, 0.0) + span.own
        return seconds


_TRAIL: ContextVar[Trail | None] = ContextVar("trail", default=None)


def current() -> Trail | None:
    """Return the trail of the current thread's or task's request, or `None`."""
    return _TRAIL.get()


class following:
    """Context manager that records stages inside it on a trail."""

    __slots__ = ("_token", "_trail")

    def __init__(self, trail: Trail | None) -> None:
        self._trail = trail

    def __enter__(self) -> None:
        self._token: Token[Trail | None] = _TRAIL.set(self._trail)

    def __exit__(self, *_: object) -> None:
        _TRAIL.reset(self._token)


class stage:
    """Context manager that records its block as one stage of the current request."""

    __slots__ = ("_before", "_began", "_count", "_name", "_trail")

    def __init__(self, name: str, count: int = 1) -> None:
        self._name, self._count = name, count
        self._trail = _TRAIL.get()

    def __enter__(self) -> None:
        if self._trail is not None:
            self._before = self._trail.enter()
            self._began = perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._trail is not None:
            self._trail.leave(self._name, self._began, self._before, self._count)
