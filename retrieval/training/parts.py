"""What a phase trains: the parts of the two sides, an optimiser and a schedule for each side, and who is in training mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from retrieval.errors import RecipeError
from retrieval.model.model import Model
from retrieval.recipe.tables import Phase, Recipe, Trainable
from retrieval.run.build import Objective
from retrieval.training.optim import StepSchedule, build_optimizer


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


class Sides:
    """The metric (backbone, head, combiner, loss) and the generator as a phase trains them, with a fresh optimiser each.

    Making one says which parameters want a gradient.

    Args:
        model: the model being trained.
        objective: its loss, miner and generator.
        recipe: optimisers and schedule.
        phase: what trains.
        steps: steps in an epoch.
        accelerator: Hugging Face Accelerate's.

    Attributes:
        parts: each part's parameters, each parameter once.
        optimizers: "metric" and "generator", those that train.
        schedules: theirs.

    Raises:
        RecipeError: nothing that the phase names has parameters.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        recipe: Recipe,
        phase: Phase,
        steps: int,
        accelerator: Accelerator,
    ) -> None:
        self.model, self.objective, self.phase = model, objective, phase
        self.frozen = recipe.frozen
        self.parts = parts_of(model, objective, recipe.frozen)
        for name, parameters in self.parts.items():
            for parameter in parameters:
                parameter.requires_grad_(name in phase.train)
        model.backbone.requires_grad_(self._trains("backbone"))
        metric: dict[Trainable, list[Parameter]] = {
            name: p for name, p in self.parts.items() if name in phase.train and name != "generator"
        }
        found: dict[str, Optimizer] = {}
        if any(metric.values()):
            found["metric"] = build_optimizer(recipe.optimizer, metric, phase.lr)
        if "generator" in phase.train and self.parts["generator"]:
            own = recipe.generator_optimizer
            # a phase's `lr` stands for that of [optimizer], which is the generator's where it has none of its own
            rate = phase.generator_lr or (phase.lr if own is None else None)
            found["generator"] = build_optimizer(
                own or recipe.optimizer, {"generator": self.parts["generator"]}, rate
            )
        if not found:
            raise RecipeError(
                [f"[[phase]] {phase.name}: none of {', '.join(phase.train)} has parameters to train."]
            )
        self.schedules = {
            name: StepSchedule(recipe.schedule, optimizer, phase.epochs * steps)
            for name, optimizer in found.items()
        }
        self.optimizers: dict[str, Any] = {
            name: accelerator.prepare_optimizer(optimizer) if name == "metric" else optimizer
            for name, optimizer in found.items()
        }

    def _trains(self, part: Trainable) -> bool:
        return part in self.phase.train and not (part == "backbone" and self.frozen)

    def set_modes(self) -> None:
        """Put all in training mode but the parts that do not train, which keep their batch statistics too."""
        model, objective = self.model, self.objective
        model.train()
        model.backbone.train(self._trains("backbone"))
        model.head.train(self._trains("head"))
        for module, trains in (
            (objective.loss, True),
            (objective.miner, True),
            # after the head, loss and miner, all of which may hold it or a layer of it
            (model.combiner, self._trains("combiner")),
            (objective.generator, self._trains("generator")),
        ):
            if module is not None:
                module.train(trains)

    def zero_grad(self) -> None:
        """Forget the gradients of what trains."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Step each side's optimiser by its gradients, then its rate."""
        for name, optimizer in self.optimizers.items():
            optimizer.step()
            self.schedules[name].step()

    def end_epoch(self) -> None:
        """Advance the rates that change once an epoch."""
        for schedule in self.schedules.values():
            schedule.epoch_end()

    def rates(self) -> dict[str, float]:
        """Return each side's learning rate, that of its first part."""
        return {name: optimizer.param_groups[0]["lr"] for name, optimizer in self.optimizers.items()}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of optimisers and schedules."""
        return {
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "schedules": {name: schedule.state_dict() for name, schedule in self.schedules.items()},
        }

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Go on from `state_dict()` of the same phase.

        Raises:
            KeyError, ValueError: it is of another phase or recipe.
        """
        for name, values in state["optimizers"].items():
            self.optimizers[name].load_state_dict(values)
        for name, values in state["schedules"].items():
            self.schedules[name].load_state_dict(values)
