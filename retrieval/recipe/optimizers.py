"""Check a recipe's `[optimizer]` and `[schedule]` against torch's classes."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer, lr_scheduler

from retrieval.errors import did_you_mean
from retrieval.recipe.tables import Optimizer, Schedule

SHAPES = ("constant", "linear", "cosine")
"""The built-in schedules."""

_UNUSABLE = ("LBFGS", "LambdaLR", "MultiplicativeLR", "ChainedScheduler", "SequentialLR")
"""Classes that no recipe can use: they need a closure, functions or other schedules."""


def _classes(kind: str) -> dict[str, Any]:
    """Return torch's optimisers or schedules that a recipe can name."""
    module: Any = lr_scheduler
    base: type = lr_scheduler.LRScheduler
    if kind == "optimizer":
        module = torch.optim
        base = TorchOptimizer
    return {
        name: cls
        for name, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, base) and cls is not base and name[0] != "_" and name not in _UNUSABLE
    }


def takes(kind: str, name: str, key: str) -> bool:
    """Return whether torch's optimiser or schedule class `name` takes the argument `key`."""
    cls = _classes(kind).get(name)
    return cls is not None and key in inspect.signature(cls).parameters


def _option_problems(
    make: partial[Any], options: dict[str, Any], reserved: set[str], where: str
) -> list[str]:
    """Return every problem of options for `make`, which creates an object of a torch class.

    `reserved` are the arguments that no recipe sets.
    """
    name = make.func.__name__
    parameters = inspect.signature(make.func).parameters
    known = [name for name in parameters if name not in reserved]
    problems = [
        f"{where} options.{key}: {name} takes no such argument (it takes:"
        f" {', '.join(known)}).{did_you_mean(key, known)}"
        for key in options
        if key not in known
    ]
    problems += [
        f"{where} options.{key}: is required; {name} has no default for it."
        for key in known
        if key not in options and parameters[key].default is inspect.Parameter.empty
    ]
    if not problems:
        try:
            make(**options)
        except (ValueError, TypeError, RuntimeError) as error:
            problems.append(f"{where} options: {name} refuses them: {error}.")
    return problems


def check_optimizer(section: Optimizer, where: str) -> list[str]:
    """Return every problem of an `[optimizer]` table."""
    known = _classes("optimizer")
    if section.name not in known:
        return [
            f"{where} name: torch.optim has no '{section.name}' (known:"
            f" {', '.join(sorted(known))}).{did_you_mean(section.name, known)}"
        ]
    make = partial(known[section.name], [Parameter(torch.zeros(1))], lr=section.lr)
    return _option_problems(make, section.options, {"params", "lr"}, where)


def check_schedule(section: Schedule, where: str) -> list[str]:
    """Return every problem of a `[schedule]` table."""
    if section.name in SHAPES:
        return [
            f"{where} options.{key}: '{section.name}' takes no options." for key in section.options
        ]
    known = _classes("schedule")
    if section.name not in known:
        names = [*SHAPES, *sorted(known)]
        return [
            f"{where} name: there is no schedule '{section.name}' (known:"
            f" {', '.join(names)}).{did_you_mean(section.name, names)}"
        ]
    reserved = {"optimizer", "last_epoch"}
    if section.name == "ReduceLROnPlateau":
        reserved.add("mode")
    make = partial(known[section.name], torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1))
    problems = _option_problems(make, section.options, reserved, where)
    if section.warmup:
        problems.append(
            f"{where} warmup: goes with constant, linear and cosine, not with {section.name}."
        )
    return problems
