"""Optimisers and schedules by the names that torch gives them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer
from torch.optim import lr_scheduler

from retrieval.errors import RecipeError, did_you_mean
from retrieval.recipe import Optimizer, Schedule, Trainable

_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def _classes(module: Any, base: type) -> dict[str, Any]:
    return {
        n: c
        for n, c in vars(module).items()
        if inspect.isclass(c) and issubclass(c, base) and c is not base and n[0] != "_"
    }


def takes(kind: str, name: str, key: str) -> bool:
    """Return whether a class takes an argument.

    Args:
        kind: "optimizer" or "schedule".
        name: the class's.
        key: the argument's.
    """
    known = (
        _classes(lr_scheduler, lr_scheduler.LRScheduler)
        if kind == "schedule"
        else _classes(torch.optim, TorchOptimizer)
    )
    return name in known and key in inspect.signature(known[name]).parameters


def _check_options(what: str, cls: Any, options: dict[str, Any], taken: set[str], where: str) -> list[str]:
    parameters = inspect.signature(cls).parameters
    known = [name for name in parameters if name not in taken]
    needed = [name for name in known if parameters[name].default is inspect.Parameter.empty]
    return [
        f"{where} options.{key}: {what} takes no such argument (it takes: {', '.join(known)}).{did_you_mean(key, known)}"
        for key in options
        if key not in known
    ] + [
        f"{where} options.{key}: is required; {what} has no default for it."
        for key in needed
        if key not in options
    ]


def check_optimizer(section: Optimizer, where: str) -> list[str]:
    """Return every problem of an `[optimizer]` table."""
    known = _classes(torch.optim, TorchOptimizer)
    known.pop("LBFGS", None)  # needs a closure
    if section.name not in known:
        return [
            f"{where} name: torch.optim has no '{section.name}' (known: {', '.join(sorted(known))}).{did_you_mean(section.name, known)}"
        ]
    problems = _check_options(section.name, known[section.name], section.options, {"params", "lr"}, where)
    if not problems:
        try:
            known[section.name]([Parameter(torch.zeros(1))], lr=section.lr, **section.options)
        except (ValueError, TypeError, RuntimeError) as error:
            problems.append(f"{where} options: {section.name} refuses them: {error}.")
    return problems


def check_schedule(section: Schedule, where: str) -> list[str]:
    """Return every problem of a `[schedule]` table."""
    if section.name in _SHAPES:
        return [f"{where} options.{key}: '{section.name}' takes no options." for key in section.options]
    known = _classes(lr_scheduler, lr_scheduler.LRScheduler)
    for needs_more in (
        "ReduceLROnPlateau",
        "LambdaLR",
        "MultiplicativeLR",
        "ChainedScheduler",
        "SequentialLR",
    ):
        known.pop(needs_more, None)  # they need functions, other schedules or a metric
    if section.name not in known:
        names = [*_SHAPES, *sorted(known)]
        return [
            f"{where} name: there is no schedule '{section.name}' (known: {', '.join(names)}).{did_you_mean(section.name, names)}"
        ]
    problems = _check_options(
        section.name, known[section.name], section.options, {"optimizer", "last_epoch"}, where
    )
    if section.warmup:
        problems.append(f"{where} warmup: goes with constant, linear and cosine, not with {section.name}.")
    if not problems:
        try:
            known[section.name](torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1), **section.options)
        except (ValueError, TypeError, RuntimeError) as error:
            problems.append(f"{where} options: {section.name} refuses them: {error}.")
    return problems


def build_optimizer(
    section: Optimizer, parts: Mapping[Trainable, Sequence[Parameter]], lr: float | None = None
) -> TorchOptimizer:
    """Return the optimiser with one group a part, each at `lr` times its factor.

    Args:
        section: the recipe's table.
        parts: the parameters of each part that trains.
        lr: the phase's own rate, if any.

    Raises:
        RecipeError: nothing trains.
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
        raise RecipeError([f"nothing to train: {', '.join(parts) or 'the phase'} has no parameters."])
    made: TorchOptimizer = getattr(torch.optim, section.name)(groups, lr=lr or section.lr, **section.options)
    return made


class StepSchedule:
    """A learning-rate schedule that is told of every step and of every epoch's end.

    Args:
        section: the recipe's table.
        optimizer: whose rates it sets.
        steps: steps of the phase, for the shapes that end at 0.
    """

    def __init__(self, section: Schedule, optimizer: TorchOptimizer, steps: int) -> None:
        self.per_epoch = section.name not in _SHAPES
        if self.per_epoch:
            self.scheduler: Any = getattr(lr_scheduler, section.name)(optimizer, **section.options)
        else:
            warmup = round(section.warmup * steps)
            shape = _SHAPES[section.name]

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
        """Return what resuming needs: numbers and lists of numbers."""
        return {
            k: v
            for k, v in self.scheduler.state_dict().items()
            if isinstance(v, int | float | bool | list) and k != "lr_lambdas"
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; over another number of steps, from the same step on the new curve."""
        self.scheduler.__dict__.update(state)
        if self.per_epoch:
            return
        optimizer, factors = self.scheduler.optimizer, self.scheduler.lr_lambdas
        for group, base, factor in zip(optimizer.param_groups, self.scheduler.base_lrs, factors, strict=True):
            group["lr"] = base * factor(self.scheduler.last_epoch)
