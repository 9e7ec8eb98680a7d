"""Trainable parts of a model, their optimisers, and the average of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel

from retrieval.errors import RecipeError
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe
from retrieval.recipe.section import Trainable
from retrieval.recipe.tables import Phase, Train
from retrieval.run.build import Objective
from retrieval.training.groups import Groups


def names_of(recipe: Recipe) -> dict[str, str]:
    """Return the parts' names in messages by part, such as "loss pml.triplet_margin"."""
    parts = ("backbone", "loss", "miner", "generator", "combiner")
    return {part: f"{part} {getattr(getattr(recipe, part), 'name', '')}" for part in parts}


def parts_of(model: Model, objective: Objective, frozen: bool) -> dict[Trainable, list[Parameter]]:
    """Return the parameters of each part, without duplicates; a frozen backbone has none."""
    modules: dict[Trainable, Sequence[nn.Module | None]] = {
        "backbone": [] if frozen else [model.backbone],
        "head": [model.head],
        "combiner": [model.combiner],
        "loss": [objective.loss, objective.miner],
        "generator": [objective.generator],
    }
    seen: set[int] = set()
    parameters_of: dict[Trainable, list[Parameter]] = {name: [] for name in modules}
    # The first part that has a parameter owns it. A head may share parameters with the combiner,
    # which owns them.
    for name in sorted(modules, key=lambda name: name != "combiner"):
        for module in modules[name]:
            for parameter in [] if module is None else module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    parameters_of[name].append(parameter)
    return parameters_of


def build_optimizers(
    recipe: Recipe, phase: Phase, groups: Groups, frozen: set[int]
) -> dict[str, Any]:
    """Return the optimisers of a phase by side: "generator" and, for all other parts, "metric".

    A side that trains nothing has no optimiser.

    Raises:
        RecipeError: none of the phase's parts has parameters to train.
    """
    generator_lr = phase.generator_lr
    # A phase's `lr` replaces the rate of [optimizer]. This is the generator's rate too, unless the
    # recipe has a [generator_optimizer].
    if recipe.generator_optimizer is None:
        generator_lr = generator_lr or phase.lr
    sides = {
        "metric": (recipe.optimizer, phase.lr),
        "generator": (recipe.generator_optimizer or recipe.optimizer, generator_lr),
    }
    optimizers: dict[str, Any] = {}
    for side, (section, lr) in sides.items():
        rate = lr or section.lr
        parameter_groups: list[dict[str, Any]] = []
        for part in groups.parts:
            is_on_side = (part == "generator") == (side == "generator")
            if part in phase.train and is_on_side:
                parameter_groups += groups.of(section, part, rate, frozen)
        if parameter_groups:
            factory = getattr(torch.optim, section.name)
            optimizers[side] = factory(parameter_groups, lr=rate, **section.options)
    if not optimizers:
        raise RecipeError(
            f"[[phase]] {phase.name}: none of {', '.join(phase.train)} has parameters to train."
        )
    return optimizers


class Average:
    """The average of a phase's weights and batch statistics.

    `[train] ema` selects an exponential moving average over steps, θ' ← d θ' + (1 − d) θ, with
    d = min(ema, (1 + n) / (10 + n)) at step n (Tarvainen & Valpola, "Mean teachers are better role
    models", NeurIPS 2017). As in TensorFlow, d rises with n, so that the average of a short phase
    forgets the initial weights. `[train] average_last` selects the mean of the weights at the ends
    of the last epochs (Izmailov et al., "Averaging Weights Leads to Wider Optima", UAI 2018).
    """

    def __init__(self, model: Model, train: Train, phase: Phase) -> None:
        self.trained = model
        self.ema = train.ema
        self.last = train.average_last
        self.epochs = phase.epochs
        self.averaged: AveragedModel | None = None
        if self.last is not None:
            self.averaged = AveragedModel(model, use_buffers=True)
        if self.ema is not None:
            self.averaged = AveragedModel(model, avg_fn=_moving(self.ema), use_buffers=True)
            self.averaged.update_parameters(model)  # n = 0: the weights at the phase's start

    @property
    def model(self) -> Model:
        """The model to validate and save: the average of two or more terms, else `trained`."""
        # of one term, the average is a copy of weights that training has passed
        if self.averaged is None or int(self.averaged.n_averaged) < 2:
            return self.trained
        return cast(Model, self.averaged.module)

    def step(self) -> None:
        """Update the moving average, if there is one, after a training step."""
        if self.averaged is not None and self.ema is not None:
            self.averaged.update_parameters(self.trained)

    def epoch_end(self, epoch: int) -> None:
        """Update the mean after the phase's epoch number `epoch`, counted from 1."""
        if self.averaged is not None and self.last and epoch > self.epochs - self.last:
            self.averaged.update_parameters(self.trained)

    def state_dict(self) -> dict[str, Any]:
        """Return the average's state, empty if nothing is averaged."""
        if self.averaged is None:
            return {}
        return self.averaged.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()` of the same phase."""
        if self.averaged is not None:
            self.averaged.load_state_dict(state)


def _moving(decay: float) -> Callable[[Tensor, Tensor, Tensor | int], Tensor]:
    def average(before: Tensor, now: Tensor, number: Tensor | int) -> Tensor:
        if not before.is_floating_point():
            return now  # a counter of batch norm has no mean
        steps = int(number)
        return before.lerp(now, 1 - min(decay, (1 + steps) / (10 + steps)))

    return average
