"""The result of one batch: its losses, the check for NaN, and the sums of an epoch."""

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
    """A batch after its forward pass.

    Attributes:
        features: (B, F), only this process's rows unless the recipe has a generator.
        codes: (B, C).
        labels: (B,).
        indices: the miner's picks; `None` without a miner.
        own: the combiner's own objective, if it has one.
        metrics: metrics for the log.
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
        value: a detached scalar.
        sentence: the error message if it is not finite, with `{}` for the number.
    """

    value: Tensor
    sentence: str


@dataclass(frozen=True)
class Losses:
    """One batch's loss of each side, metrics for the log, and numbers that must be finite."""

    metric: Tensor | None
    generator: Tensor | None
    metrics: Metrics
    watched: tuple[Watched, ...] = ()

    def all_metrics(self) -> dict[str, Tensor | int]:
        """Return the metrics with "loss" and "generator_loss", without waiting for the device."""
        losses = {"loss": self.metric, "generator_loss": self.generator}
        return {**self.metrics, **{k: v.detach() for k, v in losses.items() if v is not None}}

    def refuse(self) -> None:
        """Refuse NaN and infinity; waits for the device.

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
        DataError: with the sentence of that number.
    """
    for number, sentence in zip(numbers, sentences, strict=True):
        if not math.isfinite(number):
            raise DataError(sentence.replace("{}", str(number)))


class Watch:
    """Checks numbers for NaN and infinity: at once on a CPU, later on a GPU."""

    def __init__(self) -> None:
        self._kept: list[Watched] = []

    def loss(self, name: str, value: Tensor, who: str) -> Tensor:
        """Watch a loss and return it; `who` names its part, such as "loss pml.triplet_margin".

        Raises:
            DataError: the loss is on a CPU and not finite.
        """
        self._keep(Watched(value.detach(), f"{name} is {{}} ({who})"))
        return value

    def rows(self, rows: Tensor, who: str) -> None:
        """Watch the rows (T, F) of a generator; see `loss`."""
        wrong = (rows.detach() * 0).sum()  # 0 if all numbers are finite, else NaN
        self._keep(Watched(wrong, f"the generator's output became NaN or infinite ({who})"))

    def _keep(self, watched: Watched) -> None:
        if reads_at_once(watched.value.device):
            refuse([float(watched.value)], [watched.sentence])
        self._kept.append(watched)

    def take(self) -> tuple[Watched, ...]:
        """Return the watched numbers and forget them."""
        kept, self._kept = tuple(self._kept), []
        return kept


def reads_at_once(device: torch.device) -> bool:
    """Return whether reading a number does not wait: only on a CPU."""
    return device.type == "cpu"


def moved(inputs: Tensor, labels: Labels, device: torch.device) -> tuple[Tensor, Labels]:
    """Return a batch on a device; transfers to a GPU start in pinned memory and do not block."""
    if device.type == "cuda":
        inputs, labels = inputs.pin_memory(), labels.pin_memory()
    return inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite; waits for the device once."""
    return not tensors or bool(
        torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()
    )


EVERY = 50
"""On a GPU, the number of steps between two readings of the metrics."""


@dataclass(frozen=True)
class _Kept:
    """One step: its number, metrics by name, watched numbers and their sentences."""

    step: int
    metrics: dict[str, Tensor | int | float]
    watched: list[Tensor]
    sentences: list[str]


class Tally:
    """Adds metrics to a `Position`'s sums and checks for NaN, once every `every` steps.

    Steps in between do not wait for the device. The sums add Python floats in the order of the
    steps, so they do not depend on `every`.
    """

    def __init__(
        self, progress: Callable[[], Position], every: int, stopped: Callable[[int, str], DataError]
    ) -> None:
        self._progress, self._every, self._stopped = progress, every, stopped
        self._kept: list[_Kept] = []

    def add(self, losses: Losses) -> None:
        """Keep a copy of a step's metrics.

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
        """Wait for the device, and add the kept metrics to the sums.

        Raises:
            DataError: a loss or a synthetic feature was not finite; the message names the first
                such step.
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
    """Return a copy of a scalar, because its tensor may change before `Tally.read`."""
    return value.detach().reshape(()).to(torch.float64, copy=True)
