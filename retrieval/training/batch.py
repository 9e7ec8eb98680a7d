"""A batch that went through the model, and what it gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retrieval.data.augment import Labels
from retrieval.errors import DataError
from retrieval.model.contracts import TripletIndices
from retrieval.training.synthetic import Figures


@dataclass(frozen=True)
class Batch:
    """A batch that went through the model.

    Attributes:
        features: (B, F), of the whole batch where there is a generator.
        codes: (B, C).
        labels: (B,).
        indices: what the miner picked; None without a miner.
        own: the combiner's own objective, if it has one.
        figures: for the log.
    """

    features: Tensor
    codes: Tensor
    labels: Tensor
    indices: TripletIndices | None
    own: Tensor | None
    figures: Figures


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
    """What one batch gives: a scalar for each side that trains, figures for the log, and what to
    look for NaN in.
    """

    metric: Tensor | None
    generator: Tensor | None
    figures: Figures
    watched: tuple[Watched, ...] = ()

    def all_figures(self) -> dict[str, Tensor | int]:
        """Return the figures, and the losses as "loss" and "generator_loss" where there are any;
        nothing is read.
        """
        losses = {"loss": self.metric, "generator_loss": self.generator}
        return {**self.figures, **{k: v.detach() for k, v in losses.items() if v is not None}}

    def refuse(self) -> None:
        """Refuse NaN and infinity; this waits for the device.

        Raises:
            DataError: a loss or a synthetic feature is not finite.
        """
        refuse(
            [float(each.value) for each in self.watched], [each.sentence for each in self.watched]
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
    """Looks for NaN and infinity: where nothing waits at once, elsewhere it keeps what is to be
    looked at.
    """

    def __init__(self) -> None:
        self._kept: list[Watched] = []

    def loss(self, name: str, value: Tensor, who: str) -> Tensor:
        """Watch a loss and return it; `who` is its part, such as "loss pml.triplet_margin".

        Raises:
            DataError: it is not finite, on a CPU.
        """
        self._keep(Watched(value.detach(), f"{name} is {{}} ({who})"))
        return value

    def rows(self, made: Tensor, who: str) -> None:
        """Watch the rows (T, F) that a generator made; see `loss`."""
        wrong = (made.detach() * 0).sum()  # of a finite number 0, of any other NaN
        self._keep(Watched(wrong, f"the generator's output became NaN or infinite ({who})"))

    def _keep(self, watched: Watched) -> None:
        if reads_at_once(watched.value.device):
            refuse([float(watched.value)], [watched.sentence])
        self._kept.append(watched)

    def taken(self) -> tuple[Watched, ...]:
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
    return not tensors or bool(torch.stack([torch.isfinite(each).all() for each in tensors]).all())
