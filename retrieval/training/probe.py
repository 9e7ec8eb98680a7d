"""A look ahead before training: whether batches fit in memory, change a weight, and files open.

It works on copies and puts the random generators back, so that training goes on as if it had not
been.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retrieval.data.augment import built_transforms
from retrieval.data.loading import TrainBatches
from retrieval.data.mixing import Labels
from retrieval.errors import DataError, listed
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Phase, Sampler
from retrieval.run import checkpoint
from retrieval.run.build import Objective, code_size
from retrieval.run.open import Run
from retrieval.serving.images import decode
from retrieval.training.batch import Losses
from retrieval.training.step import Step

_CLOSE = 0.1


class Allocated(TorchDispatchMode):
    """Mode that counts the bytes of the tensors that torch's operations made and still hold.

    Attributes:
        peak: the most there were at one time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        inputs = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in inputs:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def drawn_out(sizes: Sequence[int], peaks: Sequence[int], size: int) -> int:
    """Return the bytes that a batch takes, of those that smaller ones took.

    A network's part grows with the batch, that of pairs with its square, that of triplets with its
    cube: the sum of the first two that is closest to what was measured, none of them negative; of
    all three where two are not close. (Always three, noise of small batches would be drawn out with
    the cube.)
    """
    from scipy.optimize import nnls

    n = np.asarray(sizes, dtype=np.float64)
    scale = np.asarray(peaks, dtype=np.float64)
    for highest in (2, 3):
        powers = np.arange(1.0, highest + 1)
        terms = (
            n[:, None] ** powers / scale[:, None]
        )  # relative errors: small batches count as much
        weights, _ = nnls(terms, np.ones(len(n)))
        if np.abs(terms @ weights - 1).max() < _CLOSE:
            break
    return int(weights @ float(size) ** powers)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of the GPU, or of this process's machine and control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_meminfo(), _group()]
    return min((value for value in limits if value is not None), default=None)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, ValueError, StopIteration):  # not Linux
        return None


def _group() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        return max(0, limit - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):  # none, or "max"
        return None


def shown(size: int) -> str:
    """Return a number of bytes as a person reads it."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{max(1, round(size / 1e6))} MB"


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
    """Try a recipe's batches in each phase, on copies of the model and the objective.

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
    """Batches of a recipe, tried."""

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
        """Warn of batches larger than the data, and of batches without a pair of one class."""
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
            mined = losses.metrics.get("mined")
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

    def _memory(self, step: Step, item_bytes: float, seen: Seen) -> None:
        """Estimate the memory of the recipe's batch from one item's and the objective's."""
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
        needed = int(item_bytes * self.size) + drawn_out(sizes, peaks, self.size)
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
        values = [
            f"{name} {float(value.detach()):.4f}"
            for name, value in (("loss", losses.metric), ("generator loss", losses.generator))
            if value is not None
        ]
        values += [f"{name} {_short(float(value))}" for name, value in losses.metrics.items()]
        if losses.metrics.get("triplets") == 0:
            seen.warnings.append(
                f"in phase '{phase.name}' the batch has no triplet that the generator could change."
            )
        seen.lines.append(f"one batch of {size}, phase '{phase.name}': {', '.join(values)}")


def smaller(sampler: Sampler, size: int) -> Sampler:
    """Return a sampler of some `size` items: fewer items of a class, then fewer classes."""
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
