"""What the host asks of a tracker: a place outside the run's folder that is told how a training or
a comparison goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told at the beginning.

    Attributes:
        name: what to call it: the recipe's name, or the comparison's.
        group: the comparison that a training belongs to; None where it belongs to none.
        configuration: the recipe, or the comparison's settings: tables of what JSON can say.
        key: what `begin` gave when this run began, where it goes on; else None.
    """

    name: str
    group: str | None
    configuration: Mapping[str, Any]
    key: str | None


class Tracker(Protocol):
    """Is told how one run goes.

    All calls come from one thread, which is not the one that trains; what makes it is called by
    that one, before anything else, and is the place to import what it needs.

    Whatever a tracker raises is told in a sentence, and the run goes on without it.
    """

    def begin(self, run: TrackedRun) -> tuple[str, str]:
        """Begin a run, or go on with the one that `run.key` names; called first, and once.

        Returns:
            The run's key, and where a person finds it.
        """

    def figures(self, figures: Mapping[str, float], epoch: int | None) -> None:
        """Take figures, by name.

        Args:
            figures: an epoch's, or the final ones. An epoch that was cut off is done, and told,
                again.
            epoch: its number from 0; None: they are final.
        """

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Take a table, its head first."""

    def end(self, how: Literal["finished", "stopped", "failed"]) -> None:
        """End the run; called last. One that was stopped may go on later."""
