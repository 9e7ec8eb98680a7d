"""The parts of what is trained: whose each parameter is, and which parts are in training mode."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.nn import Parameter

from retrieval.model.model import Model
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Trainable
from retrieval.run.build import Objective


def names_of(recipe: Recipe) -> dict[str, str]:
    """Return what each part is called in messages, by part: "loss pml.triplet_margin"."""
    return {
        part: f"{part} {table.name if (table := getattr(recipe, part)) else ''}"
        for part in ("backbone", "loss", "miner", "generator", "combiner")
    }


def parts_of(model: Model, objective: Objective, frozen: bool) -> dict[Trainable, list[Parameter]]:
    """Return each part's parameters, each parameter once; a frozen backbone has none."""
    modules: dict[Trainable, Sequence[nn.Module | None]] = {
        "backbone": [] if frozen else [model.backbone],
        "head": [model.head],
        "combiner": [model.combiner],
        "loss": [objective.loss, objective.miner],
        "generator": [objective.generator],
    }
    seen: set[int] = set()
    found: dict[Trainable, list[Parameter]] = {name: [] for name in modules}
    # what a head shares with its combiner is the combiner's: the first to name a parameter has it
    for name in sorted(modules, key=lambda name: name != "combiner"):
        for parameter in (p for m in modules[name] if m is not None for p in m.parameters()):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[name].append(parameter)
    return found


def set_modes(model: Model, objective: Objective, trains: Collection[Trainable]) -> None:
    """Put all in training mode but the parts that do not train, which keep their batch statistics
    too.
    """
    model.train()
    model.backbone.train("backbone" in trains)
    model.head.train("head" in trains)
    objective.train()
    # after the head, loss and miner, all of which may hold the combiner or a layer of it
    if model.combiner is not None:
        model.combiner.train("combiner" in trains)
    if objective.generator is not None:
        objective.generator.train("generator" in trains)
