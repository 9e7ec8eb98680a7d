"""The trainable parts, their parameters, and their optimisers and schedules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer
from torch.optim import lr_scheduler

from retrieval.errors import RecipeError
from retrieval.host.lazy import optimizing
from retrieval.model.model import Model
from retrieval.recipe.optimizers import SHAPES
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Optimizer, Phase, Schedule, Trainable
from retrieval.run.build import Objective


def names_of(recipe: Recipe) -> dict[str, str]:
    """Return each part's name in messages, such as "loss pml.triplet_margin", by part."""
    return {
        part: f"{part} {table.name if (table := getattr(recipe, part)) else ''}"
        for part in ("backbone", "loss", "miner", "generator", "combiner")
    }


def parts_of(model: Model, objective: Objective, frozen: bool) -> dict[Trainable, list[Parameter]]:
    """Return the parameters of each part, without repetition; a frozen backbone has none."""
    modules: dict[Trainable, Sequence[nn.Module | None]] = {
        "backbone": [] if frozen else [model.backbone],
        "head": [model.head],
        "combiner": [model.combiner],
        "loss": [objective.loss, objective.miner],
        "generator": [objective.generator],
    }
    seen: set[int] = set()
    parameters_of: dict[Trainable, list[Parameter]] = {name: [] for name in modules}
    # The first part with a parameter owns it; the combiner owns what the head shares with it.
    for name in sorted(modules, key=lambda name: name != "combiner"):
        for parameter in (p for m in modules[name] if m is not None for p in m.parameters()):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                parameters_of[name].append(parameter)
    return parameters_of


def set_modes(model: Model, objective: Objective, trains: Collection[Trainable]) -> None:
    """Put the parts that train into training mode, the others into evaluation mode."""
    model.train()
    model.backbone.train("backbone" in trains)
    model.head.train("head" in trains)
    objective.train()
    # last, because head, loss and miner may contain the combiner or one of its layers
    if model.combiner is not None:
        model.combiner.train("combiner" in trains)
    if objective.generator is not None:
        objective.generator.train("generator" in trains)


def build_optimizer(
    section: Optimizer, parts: Mapping[Trainable, Sequence[Parameter]], lr: float | None = None
) -> TorchOptimizer:
    """Return the optimiser with one group per part, each with rate `lr` times its factor.

    Raises:
        RecipeError: no part has parameters.
    """
    groups = [
        {
            "params": list(parameters),
            "lr": (lr or section.lr) * section.lr_factor.get(name, 1.0),
            "name": name,
        }
        for name, parameters in parts.items()
        if parameters
    ]
    if not groups:
        raise RecipeError(
            [f"nothing to train: {', '.join(parts) or 'the phase'} has no parameters."]
        )
    optimizer: TorchOptimizer = getattr(torch.optim, section.name)(
        groups, lr=lr or section.lr, **section.options
    )
    return optimizer


@optimizing()
def build_optimizers(
    recipe: Recipe, phase: Phase, parts: Mapping[Trainable, Sequence[Parameter]]
) -> dict[str, TorchOptimizer]:
    """Return a phase's optimisers, "metric" and "generator", without those that train nothing.

    Raises:
        RecipeError: none of the phase's parts has parameters.
    """
    optimizers: dict[str, TorchOptimizer] = {}
    metric: dict[Trainable, Sequence[Parameter]] = {
        name: p for name, p in parts.items() if name in phase.train and name != "generator"
    }
    if any(metric.values()):
        optimizers["metric"] = build_optimizer(recipe.optimizer, metric, phase.lr)
    if "generator" in phase.train and parts["generator"]:
        own = recipe.generator_optimizer
        # a phase's `lr` replaces that of [optimizer], which the generator uses unless it has its
        # own section
        rate = phase.generator_lr or (phase.lr if own is None else None)
        generator: dict[Trainable, Sequence[Parameter]] = {"generator": parts["generator"]}
        optimizers["generator"] = build_optimizer(own or recipe.optimizer, generator, rate)
    if not optimizers:
        raise RecipeError(
            [f"[[phase]] {phase.name}: none of {', '.join(phase.train)} has parameters to train."]
        )
    return optimizers


@optimizing()
def prepared(optimizers: Mapping[str, TorchOptimizer], accelerator: Any) -> dict[str, Any]:
    """Return the optimisers, that of the metric side prepared by Accelerate."""
    return {
        name: accelerator.prepare_optimizer(optimizer) if name == "metric" else optimizer
        for name, optimizer in optimizers.items()
    }


def schedules_of(
    section: Schedule, optimizers: Mapping[str, TorchOptimizer], steps: int
) -> dict[str, StepSchedule]:
    """Return a schedule for each optimiser, over a phase's steps."""
    return {name: StepSchedule(section, optimizer, steps) for name, optimizer in optimizers.items()}


class StepSchedule:
    """A learning-rate schedule per step or per epoch; call both `step` and `epoch_end`."""

    def __init__(self, section: Schedule, optimizer: TorchOptimizer, steps: int) -> None:
        self.per_epoch = section.name not in SHAPES
        if self.per_epoch:
            self.scheduler: Any = getattr(lr_scheduler, section.name)(optimizer, **section.options)
        else:
            warmup = round(section.warmup * steps)
            shape = SHAPES[section.name]

            def factor(step: int) -> float:
                if step < warmup:
                    return (step + 1) / (warmup + 1)
                return shape(min(1.0, (step - warmup) / max(1, steps - warmup)))

            self.scheduler = lr_scheduler.LambdaLR(optimizer, factor)

    def step(self) -> None:
        """Advance after an optimiser step."""
        if not self.per_epoch:
            self.scheduler.step()

    def epoch_end(self) -> None:
        """Advance after an epoch."""
        if self.per_epoch:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that resuming needs, numbers and lists of numbers."""
        return {
            k: v
            for k, v in self.scheduler.state_dict().items()
            if isinstance(v, int | float | bool | list) and k != "lr_lambdas"
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()`; with another number of steps, on the new curve."""
        self.scheduler.__dict__.update(state)
        if self.per_epoch:
            return
        optimizer, factors = self.scheduler.optimizer, self.scheduler.lr_lambdas
        for group, base, factor in zip(
            optimizer.param_groups, self.scheduler.base_lrs, factors, strict=True
        ):
            group["lr"] = base * factor(self.scheduler.last_epoch)
