"""Measure the stages of a request; outside of a request this does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from time import perf_counter

STAGES = ("read", "wait", "decode", "encode", "search", "items", "write", "send")
"""Stages of a request, in the order of a search.

"read" receives the body; "wait" is for the request's turn; "decode" and "encode" process the image;
"search" finds and measures the nearest items, perhaps together with the queries of waiting
requests; "items" reads the data of the hits; "write" stores items; "send" sends the response.
"""


class Trail:
    """The stages of one request, which run one after another, but perhaps in different threads.

    Attributes:
        id: id of the request.
        seconds: duration of each finished stage, without the stages nested in it.
        batches: the finished stages, each with the number of items that it processed together.
        reason: why the request was refused, or "".
        has_left: function that returns whether the client has disconnected.
        inside: seconds spent in stages nested in the current one.
    """

    __slots__ = ("batches", "has_left", "id", "inside", "reason", "seconds")

    def __init__(self, id: str = "", has_left: Callable[[], bool] = bool) -> None:
        self.id = id
        self.has_left = has_left
        self.reason = ""
        self.seconds: dict[str, float] = {}
        self.batches: list[tuple[str, int]] = []
        self.inside = 0.0

    def note(self, stage: str, seconds: float) -> None:
        """Add to the duration of a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


TRAIL: ContextVar[Trail | None] = ContextVar("trail", default=None)
"""The trail of the current thread's or task's request, or `None`."""


class stage:
    """Context manager that records its block as one stage of the current request.

    Args:
        name: one of `STAGES`.
        count: number of items that are processed together; 0 for a stage without items.
    """

    __slots__ = ("_began", "_count", "_name", "_outer", "_trail")

    def __init__(self, name: str, count: int = 1) -> None:
        self._name = name
        self._count = count

    def __enter__(self) -> None:
        self._trail = TRAIL.get()
        self._began = perf_counter()
        if self._trail is not None:
            self._outer = self._trail.inside
            self._trail.inside = 0.0

    def __exit__(self, *_: object) -> None:
        if self._trail is not None:
            seconds = perf_counter() - self._began
            self._trail.note(self._name, max(0.0, seconds - self._trail.inside))
            self._trail.batches.append((self._name, self._count))
            self._trail.inside = self._outer + seconds
