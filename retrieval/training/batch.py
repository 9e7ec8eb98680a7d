"""A batch that went through the model: its losses, what must be finite, and an epoch's sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retrieval.data.augment import Labels
from retrieval.errors import DataError
from retrieval.model.contracts import TripletIndices
from retrieval.run.resume import Position
from retrieval.training.synthetic import Metrics


@dataclass(frozen=True)
class Batch:
    """A batch that went through the model.

    Attributes:
        features: (B, F), of the whole batch where there is a generator.
        codes: (B, C).
        labels: (B,).
        indices: what the miner picked; None without a miner.
        own: the combiner's own objective, if it has one.
        metrics: for the log.
    """

    features: Tensor
    codes: Tensor
    labels: Tensor
    indices: TripletIndices | None
    own: Tensor | None
    metrics: Metrics


@dataclass(frozen=True)
class Watched:
    """A number that must be finite.

    Attributes:
        value: a scalar, without its gradient.
        sentence: what is said of one that is not, with `{}` for the number.
    """

    value: Tensor
    sentence: str


@dataclass(frozen=True)
class Losses:
    """What one batch gives: each side's loss, metrics for the log, numbers that must be finite."""

    metric: Tensor | None
    generator: Tensor | None
    metrics: Metrics
    watched: tuple[Watched, ...] = ()

    def all_metrics(self) -> dict[str, Tensor | int]:
        """Return the metrics, and the losses as "loss" and "generator_loss"; no number is read."""
        losses = {"loss": self.metric, "generator_loss": self.generator}
        return {**self.metrics, **{k: v.detach() for k, v in losses.items() if v is not None}}

    def refuse(self) -> None:
        """Refuse NaN and infinity; this waits for the device.

        Raises:
            DataError: a loss or a synthetic feature is not finite.
        """
        refuse(
            [float(number.value) for number in self.watched],
            [number.sentence for number in self.watched],
        )


def refuse(numbers: Sequence[float], sentences: Sequence[str]) -> None:
    """Refuse the first number that is not finite.

    Raises:
        DataError: its sentence.
    """
    for number, sentence in zip(numbers, sentences, strict=True):
        if not math.isfinite(number):
            raise DataError(sentence.replace("{}", str(number)))


class Watch:
    """Looks for NaN and infinity: at once on a CPU; on a device it keeps what to look at later."""

    def __init__(self) -> None:
        self._kept: list[Watched] = []

    def loss(self, name: str, value: Tensor, who: str) -> Tensor:
        """Watch a loss and return it; `who` is its part, such as "loss pml.triplet_margin".

        Raises:
            DataError: it is not finite, on a CPU.
        """
        self._keep(Watched(value.detach(), f"{name} is {{}} ({who})"))
        return value

    def rows(self, rows: Tensor, who: str) -> None:
        """Watch the rows (T, F) that a generator made; see `loss`."""
        wrong = (rows.detach() * 0).sum()  # of a finite number 0, of any other NaN
        self._keep(Watched(wrong, f"the generator's output became NaN or infinite ({who})"))

    def _keep(self, watched: Watched) -> None:
        if reads_at_once(watched.value.device):
            refuse([float(watched.value)], [watched.sentence])
        self._kept.append(watched)

    def take(self) -> tuple[Watched, ...]:
        """Return what was kept, and forget it."""
        kept, self._kept = tuple(self._kept), []
        return kept


def reads_at_once(device: torch.device) -> bool:
    """Whether a number can be read without waiting for a device: on a CPU it is there."""
    return device.type == "cpu"


def moved(inputs: Tensor, labels: Labels, device: torch.device) -> tuple[Tensor, Labels]:
    """Return a batch on a device.

    To a GPU it goes from pinned memory, so that nothing waits until it is there.
    """
    if device.type == "cuda":
        inputs, labels = inputs.pin_memory(), labels.pin_memory()
    return inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no number of them is NaN or infinite; the device is waited for once."""
    return not tensors or bool(
        torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()
    )


EVERY = 50
"""Steps between two readings on a device."""


@dataclass(frozen=True)
class _Kept:
    """What a step left: number, metrics by name, watched numbers and their sentences."""

    step: int
    metrics: dict[str, Tensor | int | float]
    watched: list[Tensor]
    sentences: list[str]


class Tally:
    """Adds each step's metrics to a `Position`'s sums and looks for NaN, some steps later.

    No step waits for the device in between.

    The sums are those of Python floats in the steps' order, whenever they are read.
    """

    def __init__(
        self, progress: Callable[[], Position], every: int, stopped: Callable[[int, str], DataError]
    ) -> None:
        self._progress, self._every, self._stopped = progress, every, stopped
        self._kept: list[_Kept] = []

    def add(self, losses: Losses) -> None:
        """Keep a step's metrics, as they are now.

        Raises:
            DataError: see `read`.
        """
        metrics: dict[str, Tensor | int | float] = {
            name: _copied(value) if isinstance(value, Tensor) else value
            for name, value in losses.all_metrics().items()
        }
        watched = [_copied(number.value) for number in losses.watched]
        sentences = [number.sentence for number in losses.watched]
        self._kept.append(_Kept(self._progress().total + 1, metrics, watched, sentences))
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
            for value in (*step.watched, *step.metrics.values())
            if isinstance(value, Tensor)
        ]
        numbers = iter(torch.stack(tensors).tolist() if tensors else [])
        progress = self._progress()
        sums, counts = progress.sums, progress.counts
        for step in kept:
            watched = [next(numbers) for _ in step.watched]
            for name, value in step.metrics.items():
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
