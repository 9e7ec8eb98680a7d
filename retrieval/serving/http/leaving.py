"""What a connection and its requests tell each other: that the client has left, and that it is to come again later."""

from __future__ import annotations

from collections.abc import Callable

LEAVING = "retrieval.leaving"
"""Where a request's scope has the `Leaving` of its connection."""


FOLLOWS = "retrieval.follows"
"""What the beginning of an answer has where all the rest follows at once, in one piece: both are written as one."""


class Leaving:
    """The leaving of one connection's client, for the event loop.

    Attributes:
        over: whether it has left.
        told: what is called when it does.
        crowded: whether its last request found no room; its next one is left unread for a while.
        whole: whether all that its requests send is there: whoever reads it need not wait.
    """

    __slots__ = ("crowded", "over", "told", "whole")

    def __init__(self) -> None:
        self.over = self.crowded = self.whole = False
        self.told: set[Callable[[], None]] = set()

    def now(self) -> None:
        """Say that it has left, once."""
        self.over, told, self.told = True, self.told, set()
        for each in told:
            each()
