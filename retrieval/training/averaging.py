"""Averages of a model's weights, which are validated and saved instead of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from retrieval.model.model import Model
from retrieval.recipe.tables import Phase, Train


class Average:
    """The average of a phase's weights and batch statistics.

    `[train] ema` selects an exponential moving average over steps, θ' ← d θ' + (1 − d) θ, with
    d = min(ema, (1 + n) / (10 + n)) at step n (Tarvainen & Valpola, "Mean teachers are better role
    models", NeurIPS 2017). Its warm-up, TensorFlow's, lets a short phase forget its initial
    weights. `average_last` selects the mean of the weights at the ends of the last epochs (Izmailov
    et al., "Averaging Weights Leads to Wider Optima", UAI 2018).

    Args:
        model: the model in training.
        train: the recipe's `[train]`.
        phase: the phase.
    """

    def __init__(self, model: Model, train: Train, phase: Phase) -> None:
        self.trained, self.ema = model, train.ema
        self.last, self.epochs = train.average_last, phase.epochs
        self.averaged: AveragedModel | None = None
        if self.ema is not None or self.last is not None:
            average = None if self.ema is None else _moving(self.ema)
            self.averaged = AveragedModel(model, avg_fn=average, use_buffers=True)
            if self.ema is not None:
                self.averaged.update_parameters(model)  # n = 0 is the phase's start

    @property
    def model(self) -> Model:
        """The model to validate and save: the average once it has two terms, else the model."""
        if self.averaged is None or int(self.averaged.n_averaged) < 2:
            return self.trained
        return cast(Model, self.averaged.module)

    def step(self) -> None:
        """Update the moving average after a training step."""
        if self.averaged is not None and self.ema is not None:
            self.averaged.update_parameters(self.trained)

    def epoch_end(self, epoch: int) -> None:
        """Update the mean after an epoch of the phase, counted from 1."""
        if self.averaged is not None and self.last and epoch > self.epochs - self.last:
            self.averaged.update_parameters(self.trained)

    def state_dict(self) -> dict[str, Any]:
        """Return the average's state; empty without an average."""
        return {} if self.averaged is None else self.averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()` of the same phase."""
        if self.averaged is not None:
            self.averaged.load_state_dict(state)


def _moving(decay: float) -> Callable[[Tensor, Tensor, Tensor | int], Tensor]:
    def average(before: Tensor, now: Tensor, number: Tensor | int) -> Tensor:
        if not before.is_floating_point():
            return now
        steps = int(number)
        return before.lerp(now, 1 - min(decay, (1 + steps) / (10 + steps)))

    return average
