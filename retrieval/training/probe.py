"""A look ahead, before anything is trained or written: whether a batch fits in memory and would
change a weight, and whether the files open. It works on copies and puts the random generators back,
so training goes on as if it had not been.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from retrieval.data.augment import Labels, built_transforms
from retrieval.data.loading import TrainBatches
from retrieval.errors import DataError, listed
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Phase, Sampler
from retrieval.run import checkpoint
from retrieval.run.build import Objective, code_size
from retrieval.run.open import Run
from retrieval.serving.images import decode
from retrieval.training.batch import Losses
from retrieval.training.memory import Allocated, drawn_out, free_bytes, shown
from retrieval.training.step import Step

WHOLE = 256
"""Batches up to this size are tried as they are; of larger ones some that are smaller."""
DRAWN = (128, 256, 512)
"""Numbers of drawn codes on which the objective of larger batches is measured."""
AGAIN = 4
"""So many batches more are tried where the first would change nothing."""
FILES = 64
"""So many files are opened."""


@dataclass
class Seen:
    """What a look ahead found, a sentence each.

    Attributes:
        lines: what happened.
        warnings: what is probably not meant.
    """

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def look_ahead(run: Run, accelerator: Accelerator) -> Seen:
    """Try a recipe's batches, forward and backward, in each phase, on copies of the model and the
    objective.

    Raises:
        DataError: a file cannot be read, a loss is not finite, or a batch is too large for the
            memory.
        PluginError: a part breaks its contract, as a loss without a gradient does.
        RecipeError: a phase trains nothing.
    """
    assert run.objective is not None
    open_some(run)
    seen = Seen()
    random = checkpoint.random_state()
    try:
        model, objective = copy.deepcopy((run.model, run.objective))
        tried = _Tried(run, model.to(accelerator.device), objective, accelerator)
        tried.sampler_warnings(seen)
        for phase in run.recipe.phases:
            tried.phase(phase, seen)
    finally:
        checkpoint.restore_random_state(random)
    return seen


def open_some(run: Run) -> None:
    """Open some of the files of every side, evenly spaced.

    Raises:
        DataError: some cannot be read; all of those are named.
    """
    files = run.dataset.files
    if files is None or run.dataset.arrays is not None:
        return
    sides = [run.splits.train, run.splits.validation, run.splits.query, run.splits.gallery]
    items = np.concatenate([side for side in sides if side is not None])
    chosen = np.unique(
        items[np.linspace(0, len(items) - 1, min(FILES, len(items))).astype(np.int64)]
    )
    problems = []
    for item in chosen:
        try:
            decode(files[int(item)])
        except DataError as error:
            problems.append(f"{error} {getattr(run.dataset, 'advice', '')}".rstrip())
    if problems:
        raise DataError(
            listed(
                f"[data] {run.recipe.data.name}, of which {len(chosen)} files were opened,",
                problems,
            )
        )


class _Tried:
    """Batches of a recipe, tried.

    Args:
        run: what is to be trained.
        model: a copy of its model.
        objective: a copy of its objective.
        accelerator: device and precision.
    """

    def __init__(
        self, run: Run, model: Model, objective: Objective, accelerator: Accelerator
    ) -> None:
        self.run, self.model, self.objective, self.accelerator = run, model, objective, accelerator
        self.recipe: Recipe = run.recipe
        objective.to(accelerator.device)
        self.size = self.recipe.batch_size
        self.transforms = built_transforms(self.recipe)
        whole = self.size <= WHOLE
        self.sampler = (
            self.recipe.sampler
            if whole
            else smaller(self.recipe.sampler, WHOLE // 2 // self.recipe.augmentation.views)
        )

    def sampler_warnings(self, seen: Seen) -> None:
        """Say what labels alone show: batches larger than the data, batches without a pair of one
        class.
        """
        assert self.recipe.loss is not None
        items, loss = len(self.run.splits.train), self.recipe.loss
        drawn = self.size // self.recipe.augmentation.views
        if drawn > items:
            seen.warnings.append(
                f"[sampler]: a batch takes {self.recipe.sampler.classes} classes ×"
                f" {self.recipe.sampler.items} items = {drawn:,}, and only {items:,} items train,"
                " so it holds most of them several times. Set items lower."
            )
        pairs = self.run.plugins.every("losses", loss.table, lambda factory: factory.supports_miner)
        if self.recipe.sampler.items * self.recipe.augmentation.views == 1 and pairs:
            seen.warnings.append(
                f"[sampler] items = 1: {loss.name} compares items of one class, and a batch has one"
                " of each, so no such pair is found. Set items = 2 or more."
            )

    def phase(self, phase: Phase, seen: Seen) -> None:
        """Try a phase's batches."""
        step = self.step(phase)
        step.set_modes()
        batches = self._batches(self.sampler)
        batch, labels = self._batch(batches, 0)
        with Allocated() as allocated:
            losses = _losses(step, batch, labels)
        if self.size > WHOLE and not any(line.startswith("memory") for line in seen.lines):
            self._memory(step, allocated.peak / len(labels), seen)
        changes, number = _changes(step), 0
        while not changes and number < min(AGAIN, len(batches) - 1):
            number += 1
            batch, labels = self._batch(batches, number)
            losses = _losses(step, batch, labels)
            changes = _changes(step)
        self._say(phase, losses, len(labels), seen)
        if not changes:
            mined = losses.figures.get("mined")
            why = ": the miner found no pair" if mined is not None and int(mined) == 0 else ""
            seen.warnings.append(
                f"phase '{phase.name}': no weight would change in {number + 1} sampled"
                f" batch{'es' * (number > 0)}{why}. Check the loss, the miner and [sampler]."
            )

    def step(self, phase: Phase) -> Step:
        """Return the step of a phase, on the copies."""
        return Step(self.model, self.objective, self.recipe, phase, 1, self.accelerator, tried=True)

    def _batches(self, sampler: Sampler) -> TrainBatches:
        run = self.run
        return TrainBatches(
            run.dataset,
            run.splits.train,
            run.splits.train_labels,
            self.model.preprocessing,
            sampler=sampler,
            augmentation=self.recipe.augmentation,
            transforms=self.transforms,
            seed=self.recipe.seed,
        )

    def _batch(self, batches: TrainBatches, number: int) -> Any:
        batch, labels = next(batches.epoch(0, start=number))
        return batch.to(self.accelerator.device), labels.to(self.accelerator.device)

    def _memory(self, step: Step, each: float, seen: Seen) -> None:
        """Say what the recipe's batch will take, from what an item took and from the objective on
        drawn codes.
        """
        sizes, peaks = [], []
        width = code_size(self.model)
        for sampler in (
            smaller(self.recipe.sampler, size // self.recipe.augmentation.views) for size in DRAWN
        ):
            labels = torch.arange(
                sampler.classes, device=self.accelerator.device
            ).repeat_interleave(sampler.items * self.recipe.augmentation.views)
            codes = torch.randn(
                len(labels), width, device=self.accelerator.device, requires_grad=True
            )
            with Allocated() as allocated:
                step.real_loss(codes, labels).backward()  # type: ignore[no-untyped-call]
            sizes.append(len(labels))
            peaks.append(allocated.peak)
        free = free_bytes(self.accelerator.device)
        needed = int(each * self.size) + drawn_out(sizes, peaks, self.size)
        have = "" if free is None else f"; {shown(free)} are free"
        seen.lines.append(
            f"memory: a batch of {self.size:,} takes about {shown(needed)}, judging by small"
            f" ones{have}"
        )
        if free is not None and needed > free:
            raise DataError(
                f"[sampler]: a batch of {self.size:,} items takes about {shown(needed)} of memory,"
                f" and {shown(free)} are free. Set classes or items lower."
            )

    def _say(self, phase: Phase, losses: Losses, size: int, seen: Seen) -> None:
        found = [
            f"{name} {float(value.detach()):.4f}"
            for name, value in (("loss", losses.metric), ("generator loss", losses.generator))
            if value is not None
        ]
        found += [f"{name} {_short(float(value))}" for name, value in losses.figures.items()]
        if losses.figures.get("triplets") == 0:
            seen.warnings.append(
                f"in phase '{phase.name}' the batch has no triplet that the generator could change."
            )
        seen.lines.append(f"one batch of {size}, phase '{phase.name}': {', '.join(found)}")


def smaller(sampler: Sampler, size: int) -> Sampler:
    """Return the sampler of a batch of some `size` items, for one of larger batches: fewer items of
    a class, then fewer classes.
    """
    items = max(1, min(sampler.items, size // min(sampler.classes, 32)))
    return sampler.model_copy(
        update={"items": items, "classes": max(2, min(sampler.classes, size // items))}
    )


def _losses(step: Step, batch: torch.Tensor, labels: Labels) -> Losses:
    """Return a batch's losses, with the gradients of what trains."""
    step.zero_grad()
    try:
        losses = step.losses(batch, labels)
        losses.refuse()
    except DataError as error:
        raise DataError(
            f"One batch in phase '{step.phase.name}' was tried, and {str(error).rstrip('.')}. Check"
            " the data and the parameters."
        ) from error
    step.backward(losses)
    return losses


def _changes(step: Step) -> bool:
    return any(
        p.grad is not None and bool(p.grad.abs().max() > 0)
        for part in step.parts.values()
        for p in part
        if p.numel()
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
