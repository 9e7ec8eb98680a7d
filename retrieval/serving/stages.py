"""Where a request's time goes: whoever works on it notes a stage.

Outside of a request that costs nothing.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from time import perf_counter
from types import TracebackType
from typing import NamedTuple

STAGES = ("read", "wait", "decode", "encode", "search", "items", "write", "send")
"""Of a request, in the order that a search has them: its body arrives; it waits for its turn; its
image is decoded, and encoded; the nearest are found and measured; what is known of them is read;
items are written; the answer is sent.
"""


class Span(NamedTuple):
    """One stage of one request.

    Attributes:
        stage: one of `STAGES`.
        began: by `time.perf_counter`.
        ended: likewise.
        own: seconds, without those of the stages inside it.
        items: that went through it at once.
    """

    stage: str
    began: float
    ended: float
    own: float
    items: int


class Trail:
    """What is noted of one request.

    Its stages follow each other, so that no two threads write to it at a time.

    Attributes:
        id: of the request.
        spans: its stages, each after those inside it.
        reason: why it was refused; empty where it was not.
    """

    __slots__ = ("_inside", "id", "reason", "spans")

    def __init__(self, id: str = "") -> None:
        self.id = id
        self.spans: list[Span] = []
        self.reason = ""
        self._inside = 0.0

    def note(self, stage: str, began: float, ended: float, count: int = 1) -> None:
        """Note a stage that is over, with none inside it."""
        self.spans.append(Span(stage, began, ended, ended - began, count))

    def enter(self) -> float:
        """Begin a stage; return what `leave` is to be given back."""
        before, self._inside = self._inside, 0.0
        return before

    def leave(self, stage: str, began: float, before: float, count: int) -> None:
        """Note a stage that ends now."""
        ended = perf_counter()
        took = ended - began
        self.spans.append(Span(stage, began, ended, max(0.0, took - self._inside), count))
        self._inside = before + took

    def seconds(self) -> dict[str, float]:
        """Return the time of each stage that there was."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.stage] = seconds.get(span.stage, 0.0) + span.own
        return seconds


_TRAIL: ContextVar[Trail | None] = ContextVar("trail", default=None)


def current() -> Trail | None:
    """Return the trail of the request that this thread or task works on."""
    return _TRAIL.get()


class following:
    """A block in which stages are noted on a trail."""

    __slots__ = ("_token", "_trail")

    def __init__(self, trail: Trail | None) -> None:
        self._trail = trail

    def __enter__(self) -> None:
        self._token: Token[Trail | None] = _TRAIL.set(self._trail)

    def __exit__(self, *_: object) -> None:
        _TRAIL.reset(self._token)


class stage:
    """A block of work that is one stage of the request at hand."""

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
