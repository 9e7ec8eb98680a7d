"""Trainable parts of a model: groups of their parameters, optimisers, and averages of weights.

A recipe selects parameters by part, by the backbone's stage or by name, to give them a learning
rate or a weight decay of their own, or to freeze them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel

from retrieval.errors import RecipeError, did_you_mean
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Optimizer, Phase, Train, Trainable
from retrieval.run.build import Objective


def names_of(recipe: Recipe) -> dict[str, str]:
    """Return the parts' names in messages by part, such as "loss pml.triplet_margin"."""
    parts = ("backbone", "loss", "miner", "generator", "combiner", "text")
    return {part: f"{part} {getattr(getattr(recipe, part), 'name', '')}" for part in parts}


def parts_of(model: Model, objective: Objective, frozen: bool) -> dict[Trainable, list[Parameter]]:
    """Return the parameters of each part, without duplicates; a frozen backbone has none."""
    modules: dict[Trainable, Sequence[nn.Module | None]] = {
        "backbone": [] if frozen else [model.backbone],
        "head": [model.head],
        "combiner": [model.combiner],
        "loss": [objective.loss, objective.miner],
        "generator": [objective.generator],
        "text": [],
    }
    if model.text is not None:
        modules["text"] = [model.text.head if model.text.frozen else model.text]
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


@dataclass(frozen=True)
class Entry:
    """A parameter, with what a recipe's selectors select by (`recipe.tables.Selector`).

    Attributes:
        name: full name, such as `backbone.stages.0.weight`.
        part: the part that owns the parameter; a miner's parameters belong to the loss.
        stage: number of the backbone's stage, from 1 at the input; 0 outside the backbone.
        is_vector: whether the selector `vectors` covers the parameter.
    """

    name: str
    part: Trainable
    stage: int
    is_vector: bool

    def fits(self, selector: str) -> bool:
        """Return whether a selector covers the parameter."""
        if selector.startswith("stages:"):
            return 0 < self.stage <= int(selector.partition(":")[2])
        if selector == "vectors":
            return self.is_vector
        return selector == self.part or fnmatchcase(self.name, selector)

    def last_of(self, values: Mapping[str, float]) -> float | None:
        """Return the value of the last selector that covers the parameter, or `None`."""
        fitting = [value for selector, value in values.items() if self.fits(selector)]
        if fitting:
            return fitting[-1]
        return None


_TOKENS = frozenset(
    ("cls_token", "class_token", "dist_token", "reg_token", "pos_embed", "pos_embedding")
)
"""Names that transformers give their class token, register tokens and positions."""


def exempt_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters of any shape that no weight decay should shrink.

    They are a transformer's tokens and positions, and what timm's `no_weight_decay` lists.
    """
    names = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] in _TOKENS}
    for path, module in model.named_modules():
        if callable(listed := getattr(module, "no_weight_decay", None)):
            names |= {f"{path}.{name}".lstrip(".") for name in listed()}
    return names


def stages(network: nn.Module, name: str = "") -> list[list[str]]:
    """Return the names of a network's parameters, one list per stage, from the input on.

    If the network has one sequence of blocks (EfficientNet, transformers), each block is a stage.
    Otherwise each direct child is a stage (`layer1` to `layer4` of a ResNet). A norm between stages
    belongs to the stage before it. The network's own parameters, such as a class token, belong to
    its first stage.
    """
    children = {key: part for key, part in network.named_children() if _size(part)}
    parts = list(children.values())
    sequences = [part for part in parts if _is_sequence(part)]
    inner: nn.Module | None = None  # the child whose stages are stages of the network
    if len(parts) == 1:
        inner = parts[0]
    elif len(sequences) <= 1 and not isinstance(network, nn.Sequential | nn.ModuleList):
        if sequences:
            inner = sequences[0]
        else:
            inner = max(parts, key=_size, default=None)
    own = [f"{name}{key}" for key, _ in network.named_parameters(recurse=False)]
    if own:
        by_stage = [own]
    else:
        by_stage = []
    for key, part in children.items():
        prefix = f"{name}{key}."
        names = [f"{prefix}{inside}" for inside, _ in part.named_parameters()]
        if part is inner and any(True for _ in part.children()):
            by_stage += stages(part, prefix)
        elif by_stage and all(p.ndim <= 1 for p in part.parameters()):
            by_stage[-1] += names
        else:
            by_stage.append(names)
    if len(by_stage) > 1 and by_stage[0] == own:
        by_stage[:2] = [[*own, *by_stage[1]]]  # class token and positions join the first layer
    return by_stage


def _is_sequence(module: nn.Module) -> bool:
    """Return whether a module is a sequence of blocks, not of single layers."""
    # PEFT's wrapper of a single layer has children too, but also a `base_layer`
    return isinstance(module, nn.Sequential | nn.ModuleList) and any(
        any(True for _ in block.children()) and not hasattr(block, "base_layer")
        for block in module.children()
    )


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class Groups:
    """Selects parameters of a model and its objective by the recipe's selectors.

    Args:
        recipe: the recipe.
        model: the model.
        objective: the loss, miner and generator.
        parts: the parameters of each part; see `parts_of`.

    Raises:
        RecipeError: a stage or name pattern of the recipe covers no parameter.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: Model,
        objective: Objective,
        parts: Mapping[Trainable, Sequence[Parameter]],
    ) -> None:
        self.recipe = recipe
        self.parts = parts
        by_stage = stages(model.backbone, "backbone.")
        self.stages = len(by_stage)
        stage_of: dict[str, int] = {}
        for number, names in enumerate(by_stage, 1):
            stage_of |= dict.fromkeys(names, number)
        undecayed = exempt_names(model)
        owner = {id(p): part for part, parameters in parts.items() for p in parameters}
        self.entries = {
            id(p): Entry(
                name, owner[id(p)], stage_of.get(name, 0), p.ndim <= 1 or name in undecayed
            )
            for module in (model, objective)
            for name, p in module.named_parameters()
            if id(p) in owner
        }
        self._refuse_idle()

    def frozen(self, phase: Phase) -> set[int]:
        """Return the ids of the parameters that do not train because of `freeze` or `[lora]`."""
        frozen = set()
        for number, entry in self.entries.items():
            # with [lora], only the additions to the backbone train
            is_below_lora = entry.part == "backbone" and ".lora_" not in entry.name
            if self.recipe.lora and is_below_lora:
                frozen.add(number)
            if any(entry.fits(selector) for selector in phase.freeze):
                frozen.add(number)
        return frozen

    def of(
        self, section: Optimizer, part: Trainable, lr: float, frozen: set[int]
    ) -> Iterator[dict[str, Any]]:
        """Yield a part's parameter groups for the optimiser, by increasing learning rate.

        `section` has factors of the learning rate `lr`. Parameters whose ids are `frozen` are in no
        group.
        """
        groups: dict[tuple[float, float | None], list[Parameter]] = {}
        for parameter in self.parts[part]:
            if id(parameter) in frozen:
                continue
            entry = self.entries[id(parameter)]
            factor = entry.last_of(section.lr_factor)
            if factor is None:
                factor = 1.0
            if entry.stage:
                factor *= section.layer_decay ** (self.stages + 1 - entry.stage)
            decay = entry.last_of(section.weight_decay)
            groups.setdefault((factor, decay), []).append(parameter)
        # sorted by the rate alone, because a decay may be `None`
        for (factor, decay), parameters in sorted(groups.items(), key=lambda group: group[0][0]):
            group = {"params": parameters, "lr": lr * factor, "name": part}
            if decay is not None:
                group["weight_decay"] = decay
            yield group

    def _refuse_idle(self) -> None:
        """Refuse stages and patterns that cover no parameter.

        A selector that names a part is allowed even if the part has no parameters.
        """
        selectors: list[tuple[str, str]] = []
        for where in ("optimizer", "generator_optimizer"):
            section = getattr(self.recipe, where)
            if section is not None:
                for key in ("lr_factor", "weight_decay"):
                    selectors += [(f"[{where}] {key}", s) for s in getattr(section, key)]
        for phase in self.recipe.phase:
            selectors += [(f"[[phase]] {phase.name}: freeze", s) for s in phase.freeze]
        entries = self.entries.values()
        names = [entry.name for entry in entries]
        problems = []
        for where, selector in selectors:
            is_pattern = any(sign in selector for sign in ".*?[")
            if int(selector.partition(":")[2] or 0) > self.stages:
                problems.append(
                    f"{where}: {selector}, but the backbone has only {self.stages} stages."
                )
            elif is_pattern and not any(entry.fits(selector) for entry in entries):
                problems.append(
                    f"{where}: no parameter's name matches '{selector}'. The first names are"
                    f" {', '.join(names[:3])}.{did_you_mean(selector, names)}"
                )
        if problems:
            raise RecipeError(problems)


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
