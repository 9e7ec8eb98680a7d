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

EVERY = 50
"""On a GPU, the number of steps between two readings of the metrics."""


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
class Losses:
    """One batch's loss of each side, and metrics for the log.

    Attributes:
        metric: the loss of the metric side, if it trains.
        generator: the generator's objective, if it trains.
        metrics: metrics for the log.
        watched: numbers that must be finite, each with its error message (`{}` is the number).
    """

    metric: Tensor | None
    generator: Tensor | None
    metrics: Metrics
    watched: Sequence[tuple[Tensor, str]] = ()

    def all_metrics(self) -> dict[str, Tensor | int]:
        """Return the metrics with "loss" and "generator_loss", without waiting for the device."""
        losses = {"loss": self.metric, "generator_loss": self.generator}
        return {**self.metrics, **{k: v.detach() for k, v in losses.items() if v is not None}}

    def refuse(self) -> None:
        """Refuse NaN and infinity; waits for the device.

        Raises:
            DataError: a loss or a synthetic feature is not finite.
        """
        for number, sentence in self.watched:
            refuse(float(number), sentence)


def refuse(number: float, sentence: str) -> None:
    """Raise a `DataError` with this sentence if the number is not finite."""
    if not math.isfinite(number):
        raise DataError(sentence.replace("{}", str(number)))


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


class Tally:
    """Adds metrics to a `Position`'s sums and checks for NaN, once every `every` steps.

    Steps in between do not wait for the device. The sums add Python floats in the order of the
    steps, so they do not depend on `every`.
    """

    def __init__(
        self, progress: Callable[[], Position], every: int, stopped: Callable[[int, str], DataError]
    ) -> None:
        self._progress, self._every, self._stopped = progress, every, stopped
        self._kept: list[tuple[int, list[str], list[str], list[Tensor]]] = []

    def add(self, losses: Losses) -> None:
        """Keep a copy of a step's numbers, as its tensors may change before `read`.

        Raises:
            DataError: see `read`.
        """
        metrics = losses.all_metrics()
        numbers = [
            torch.as_tensor(value).detach().reshape(()).to(torch.float64, copy=True)
            for value in (*(number for number, _ in losses.watched), *metrics.values())
        ]
        sentences = [sentence for _, sentence in losses.watched]
        self._kept.append((self._progress().total + 1, sentences, list(metrics), numbers))
        if len(self._kept) >= self._every:
            self.read()

    def read(self) -> None:
        """Wait for the device, and add the kept metrics to the sums.

        Raises:
            DataError: a loss or a synthetic feature was not finite; the message names the first
                such step.
        """
        kept, self._kept = self._kept, []
        if not kept:
            return
        device = max((n.device for *_, of in kept for n in of), key=lambda device: device.type)
        values = iter(torch.stack([n.to(device) for *_, of in kept for n in of]).tolist())
        sums, counts = self._progress().sums, self._progress().counts
        for step, sentences, names, _ in kept:
            watched = [next(values) for _ in sentences]
            for name in names:
                sums[name] = sums.get(name, 0.0) + next(values)
                counts[name] = counts.get(name, 0) + 1
            try:
                for number, sentence in zip(watched, sentences, strict=True):
                    refuse(number, sentence)
            except DataError as error:
                raise self._stopped(step, str(error)) from error
