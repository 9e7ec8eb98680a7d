"""Measure the stages of a request; outside of a request this does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from time import perf_counter

STAGES = ("read", "wait", "decode", "encode", "search", "items", "write", "send")
"""Stages of a request, in the order of a search.

"read" receives the body; "wait" is for the request's turn; "decode" and "encode" process the image;
"search" finds and measures the nearest items, for other requests' vectors at the same time if these
wait; "items" reads their data; "write" stores items; "send" sends the response.
"""


class Trail:
    """One request's stages, which run one after the other, though in several threads.

    Attributes:
        id: id of the request.
        seconds: duration of each finished stage, without nested stages.
        batches: stages that processed several items together, with the number of items.
        reason: why the request was refused, or "".
        has_left: returns whether the client has disconnected.
    """

    __slots__ = ("batches", "has_left", "id", "inside", "reason", "seconds")

    def __init__(self, id: str = "", has_left: Callable[[], bool] = bool) -> None:
        self.id, self.has_left, self.reason = id, has_left, ""
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
        count: number of items that are processed together; 0 counts no batch.
    """

    __slots__ = ("_began", "_count", "_name", "_outer", "_trail")

    def __init__(self, name: str, count: int = 1) -> None:
        self._name, self._count = name, count

    def __enter__(self) -> None:
        self._trail, self._began = TRAIL.get(), perf_counter()
        if self._trail is not None:
            self._outer, self._trail.inside = self._trail.inside, 0.0

    def __exit__(self, *_: object) -> None:
        if self._trail is not None:
            seconds = perf_counter() - self._began
            self._trail.note(self._name, max(0.0, seconds - self._trail.inside))
            self._trail.batches.append((self._name, self._count))
            self._trail.inside = self._outer + seconds
