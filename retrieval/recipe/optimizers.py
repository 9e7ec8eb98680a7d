"""Check a recipe's `[optimizer]` and `[schedule]`: torch's classes, or the shapes below."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer
from torch.optim import lr_scheduler

from retrieval.errors import did_you_mean
from retrieval.host.lazy import optimizing
from retrieval.recipe.tables import Optimizer, Schedule

SHAPES = ("constant", "linear", "cosine")
"""The built-in schedules."""


def _classes(module: Any, base: type) -> dict[str, Any]:
    return {
        n: c
        for n, c in vars(module).items()
        if inspect.isclass(c) and issubclass(c, base) and c is not base and n[0] != "_"
    }


def takes(kind: str, name: str, key: str) -> bool:
    """Return whether torch's optimiser or schedule class `name` takes the argument `key`."""
    known = (
        _classes(lr_scheduler, lr_scheduler.LRScheduler)
        if kind == "schedule"
        else _classes(torch.optim, TorchOptimizer)
    )
    return name in known and key in inspect.signature(known[name]).parameters


def _check_options(
    what: str, cls: Any, options: dict[str, Any], reserved: set[str], where: str
) -> list[str]:
    parameters = inspect.signature(cls).parameters
    known = [name for name in parameters if name not in reserved]
    needed = [name for name in known if parameters[name].default is inspect.Parameter.empty]
    return [
        f"{where} options.{key}: {what} takes no such argument (it takes:"
        f" {', '.join(known)}).{did_you_mean(key, known)}"
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
            f"{where} name: torch.optim has no '{section.name}' (known:"
            f" {', '.join(sorted(known))}).{did_you_mean(section.name, known)}"
        ]
    problems = _check_options(
        section.name, known[section.name], section.options, {"params", "lr"}, where
    )
    if not problems:
        try:
            with optimizing():
                known[section.name]([Parameter(torch.zeros(1))], lr=section.lr, **section.options)
        except (ValueError, TypeError, RuntimeError) as error:
            problems.append(f"{where} options: {section.name} refuses them: {error}.")
    return problems


def check_schedule(section: Schedule, where: str) -> list[str]:
    """Return every problem of a `[schedule]` table."""
    if section.name in SHAPES:
        return [
            f"{where} options.{key}: '{section.name}' takes no options." for key in section.options
        ]
    known = _classes(lr_scheduler, lr_scheduler.LRScheduler)
    for needs_more in ("LambdaLR", "MultiplicativeLR", "ChainedScheduler", "SequentialLR"):
        known.pop(needs_more, None)  # these need functions or other schedules
    if section.name not in known:
        names = [*SHAPES, *sorted(known)]
        return [
            f"{where} name: there is no schedule '{section.name}' (known:"
            f" {', '.join(names)}).{did_you_mean(section.name, names)}"
        ]
    problems = _check_options(
        section.name,
        known[section.name],
        section.options,
        {"optimizer", "last_epoch", *(["mode"] if section.name == "ReduceLROnPlateau" else [])},
        where,
    )
    if section.warmup:
        problems.append(
            f"{where} warmup: goes with constant, linear and cosine, not with {section.name}."
        )
    if not problems:
        try:
            with optimizing():
                known[section.name](
                    torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1), **section.options
                )
        except (ValueError, TypeError, RuntimeError) as error:
            problems.append(f"{where} options: {section.name} refuses them: {error}.")
    return problems
