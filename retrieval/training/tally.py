"""An epoch's figures, kept where they are computed and read together: every reading waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from retrieval.errors import DataError
from retrieval.run.position import Position
from retrieval.training.batch import Losses, refuse

EVERY = 50
"""Steps between two readings on a device."""


@dataclass(frozen=True)
class _Kept:
    """What a step left: the step's number, figures and watched numbers by name, and sentences of
    the latter.
    """

    step: int
    figures: dict[str, Tensor | int | float]
    watched: list[Tensor]
    sentences: list[str]


class Tally:
    """Adds each step's figures to a `Position`'s sums, and looks for NaN; both some steps later, so
    that no step waits.

    The sums are those of Python floats in the steps' order, whenever they are read.

    Args:
        progress: returns that whose sums and counts are kept.
        every: steps between readings; 1 on a CPU, where nothing waits.
        stopped: makes the error from a step's number and what was found.
    """

    def __init__(
        self, progress: Callable[[], Position], every: int, stopped: Callable[[int, str], DataError]
    ) -> None:
        self._progress, self._every, self._stopped = progress, every, stopped
        self._kept: list[_Kept] = []

    def add(self, losses: Losses) -> None:
        """Keep a step's figures, as they are now.

        Raises:
            DataError: see `read`.
        """
        figures: dict[str, Tensor | int | float] = {
            name: _copied(value) if isinstance(value, Tensor) else value
            for name, value in losses.all_figures().items()
        }
        watched = [_copied(each.value) for each in losses.watched]
        sentences = [each.sentence for each in losses.watched]
        self._kept.append(_Kept(self._progress().total + 1, figures, watched, sentences))
        if len(self._kept) >= self._every:
            self.read()

    def read(self) -> None:
        """Wait for the device, and add what was kept to the sums.

        Raises:
            DataError: a loss or a synthetic feature was not finite; it names the first step that
                had one.
        """
        kept, self._kept = self._kept, []
        tensors = [
            value
            for step in kept
            for value in (*step.watched, *step.figures.values())
            if isinstance(value, Tensor)
        ]
        numbers = iter(torch.stack(tensors).tolist() if tensors else [])
        progress = self._progress()
        sums, counts = progress.sums, progress.counts
        for step in kept:
            watched = [next(numbers) for _ in step.watched]
            for name, value in step.figures.items():
                sums[name] = sums.get(name, 0.0) + (
                    next(numbers) if isinstance(value, Tensor) else float(value)
                )
                counts[name] = counts.get(name, 0) + 1
            try:
                refuse(watched, step.sentences)
            except DataError as error:
                raise self._stopped(step.step, str(error)) from error


def _copied(value: Tensor) -> Tensor:
    """Return a scalar as it is now: what it was read from may change before it is read."""
    return value.detach().reshape(()).to(torch.float64, copy=True)
