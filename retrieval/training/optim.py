"""Trainable parts of a model, their optimisers and schedules, and the average of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel

from retrieval.errors import RecipeError
from retrieval.model.model import Model
from retrieval.recipe.optimizers import SHAPES
from retrieval.recipe.read import Recipe
from retrieval.recipe.section import Trainable
from retrieval.recipe.tables import Phase, Schedule, Train
from retrieval.run.build import Objective
from retrieval.training.groups import Groups
from retrieval.training.monitor import Monitor


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
        for parameter in (p for m in modules[name] if m is not None for p in m.parameters()):
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
    own = recipe.generator_optimizer
    # A phase's `lr` replaces the rate of [optimizer]. This is the generator's rate too, unless the
    # recipe has a [generator_optimizer].
    generator_lr = phase.generator_lr or (phase.lr if own is None else None)
    sides = {
        "metric": (recipe.optimizer, phase.lr),
        "generator": (own or recipe.optimizer, generator_lr),
    }
    optimizers: dict[str, Any] = {}
    for side, (section, lr) in sides.items():
        rate = lr or section.lr
        parameter_groups = [
            group
            for part in groups.parts
            if part in phase.train and (part == "generator") == (side == "generator")
            for group in groups.of(section, part, rate, frozen)
        ]
        if parameter_groups:
            factory = getattr(torch.optim, section.name)
            optimizers[side] = factory(parameter_groups, lr=rate, **section.options)
    if not optimizers:
        raise RecipeError(
            f"[[phase]] {phase.name}: none of {', '.join(phase.train)} has parameters to train."
        )
    return optimizers


def schedules_of(
    recipe: Recipe, phase: Phase, optimizers: Mapping[str, TorchOptimizer], steps: int
) -> dict[str, StepSchedule]:
    """Return a schedule for each optimiser of a phase with `steps` steps per epoch.

    Raises:
        RecipeError: the warm-up is longer than the phase.
    """
    section = recipe.schedule
    whole = phase.epochs * steps
    warmup = section.warmup_steps(phase.epochs, steps)
    if warmup > whole:
        raise RecipeError(
            f"[schedule] warmup: {section.warmup} takes {warmup:,} steps, but the phase"
            f" '{phase.name}' has only {whole:,}. Set a share of the phase, such as 0.1."
        )
    larger = Monitor(recipe).larger
    return {
        name: StepSchedule(section, optimizer, whole, warmup, larger)
        for name, optimizer in optimizers.items()
    }


class StepSchedule:
    """A learning-rate schedule that changes the rates after each step, epoch or validation.

    The phase has `steps` steps; in the first `warmup` steps the rates rise. `larger` says whether
    larger values of the monitored metric are better.
    """

    def __init__(
        self,
        section: Schedule,
        optimizer: TorchOptimizer,
        steps: int,
        warmup: int,
        larger: bool = True,
    ) -> None:
        self.per_epoch = section.name not in SHAPES
        self.by_metric = section.name == "ReduceLROnPlateau"
        if self.per_epoch:
            if self.by_metric:
                mode = {"mode": "max" if larger else "min"}
            else:
                mode = {}
            self.scheduler: Any = getattr(lr_scheduler, section.name)(
                optimizer, **mode, **section.options
            )
        else:

            def factor(step: int) -> float:
                if step < warmup:
                    return (step + 1) / (warmup + 1)
                done = min(1.0, (step - warmup) / max(1, steps - warmup))
                if section.name == "cosine":
                    return 0.5 * (1.0 + math.cos(math.pi * done))
                if section.name == "linear":
                    return 1.0 - done
                return 1.0

            self.scheduler = lr_scheduler.LambdaLR(optimizer, factor)

    def step(self) -> None:
        """Advance after an optimiser step."""
        if not self.per_epoch:
            self.scheduler.step()

    def epoch_end(self, monitored: float | None) -> None:
        """Advance after an epoch, with the monitored metric if the epoch was validated."""
        if self.by_metric:
            if monitored is not None:
                self.scheduler.step(monitored)
        elif self.per_epoch:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: numbers, and lists of numbers."""
        return {
            k: v
            for k, v in self.scheduler.state_dict().items()
            if isinstance(v, int | float | bool | list) and k != "lr_lambdas"
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()`.

        If the phase's number of steps has changed since, the rates follow the new curve.
        """
        self.scheduler.__dict__.update(state)
        if self.per_epoch:
            return
        optimizer = self.scheduler.optimizer
        factors = self.scheduler.lr_lambdas
        for group, base, factor in zip(
            optimizer.param_groups, self.scheduler.base_lrs, factors, strict=True
        ):
            group["lr"] = base * factor(self.scheduler.last_epoch)


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
        if self.ema is not None or self.last is not None:
            if self.ema is None:
                average = None
            else:
                average = _moving(self.ema)
            self.averaged = AveragedModel(model, avg_fn=average, use_buffers=True)
            if self.ema is not None:
                self.averaged.update_parameters(model)  # n = 0: the weights at the phase's start

    @property
    def model(self) -> Model:
        """The model to validate and save: the average of two or more terms, else `trained`."""
        if self.averaged is None or int(self.averaged.n_averaged) < 2:
            return self.trained
        return cast(Model, self.averaged.module)

    def step(self) -> None:
        """Update the moving average after a training step."""
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
            return now
        steps = int(number)
        return before.lerp(now, 1 - min(decay, (1 + steps) / (10 + steps)))

    return average
