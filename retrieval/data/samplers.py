"""Batch samplers: P classes × M items, or any batch sampler of torch."""

from __future__ import annotations

import copy
import random as python_random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from retrieval.base.arrays import Floats32, Ints
from retrieval.errors import DataError, PluginError
from retrieval.host.factory import calling
from retrieval.host.hookspecs import Factories, hookimpl
from retrieval.model.contracts import BatchSampler, TrainingItems

if TYPE_CHECKING:
    from retrieval.recipe.tables import Sampler


class ClassBalanced(BatchSampler):
    """P random classes and M random items of each.

    Items repeat only if a class has fewer than M. Items of a class are adjacent. The batches equal
    those of pytorch-metric-learning's `MPerClassSampler` with the same random state.
    """

    def batches(self, items: TrainingItems) -> int:
        """Return the number of batches, after checking that a batch can get enough classes."""
        check_classes(items)
        return items.batches

    def draw(self, items: TrainingItems, epoch: int, random: np.random.RandomState) -> list[Ints]:
        """Return the batches of an epoch."""
        by_class = rows_by_class(items.labels)
        # Shuffling the list of arrays gives the same order but takes five times as long.
        numbers = np.arange(len(by_class))
        drawn = []
        for _ in range(items.batches):
            random.shuffle(numbers)
            drawn.append(rows_of([by_class[i] for i in numbers[: items.classes]], items, random))
        return drawn


def check_classes(items: TrainingItems) -> None:
    """Raise a `DataError` if a batch takes more classes than there are."""
    classes = len(np.unique(items.labels))
    if classes < items.classes:
        raise DataError(
            f"[sampler] classes: a batch takes {items.classes} classes, but only {classes} train."
            f" Set classes = {classes} or fewer."
        )


def rows_by_class(labels: Ints) -> list[Ints]:
    """Return the positions of each class's items, with the classes in order of appearance."""
    by_class = np.argsort(labels, kind="stable")
    firsts = np.flatnonzero(np.diff(labels[by_class], prepend=labels.min() - 1))
    rows = np.split(by_class, firsts[1:])
    return sorted(rows, key=lambda of_class: int(of_class[0]))


def rows_of(classes: Sequence[Ints], items: TrainingItems, random: np.random.RandomState) -> Ints:
    """Return M random rows of each class, repeated only if a class has fewer."""
    return np.concatenate(
        [random.choice(rows, items.rows, replace=len(rows) < items.rows) for rows in classes]
    )


class TorchBatches(BatchSampler):
    """A sampler of torch, or any object that yields positions or batches of them and has a length.

    Single positions are divided into batches of `size`; the last positions, too few for a batch,
    are left out.

    The sampler may draw from its own generator, or from the global generators of torch, NumPy and
    Python, which are seeded for each epoch and restored afterwards. `set_epoch` is called before
    each epoch, if the sampler has it. When a run is resumed, a copy of the sampler draws the
    earlier epochs again.
    """

    def __init__(self, sampler: Any, seed: int, size: int) -> None:
        self._fresh = sampler
        self._seed = seed
        self._current = copy.deepcopy(sampler)
        self._next = 0
        with _seeded(seed % 2**32):
            first = next(iter(copy.deepcopy(sampler)), ())
        self._size = size if np.ndim(first) == 0 else None

    def batches(self, items: TrainingItems) -> int:
        """Return the number of batches that the sampler's length makes."""
        count = len(self._fresh)
        if self._size is None:
            return count
        if count < self._size:
            raise DataError(
                f"The sampler {type(self._fresh).__name__} draws {count} items in an epoch, which"
                f" are too few for a batch of {self._size}. Set [sampler] classes and items."
            )
        return count // self._size

    def draw(
        self, items: TrainingItems, epoch: int, random: np.random.RandomState
    ) -> list[list[int]]:
        """Return the batches of an epoch."""
        if epoch < self._next:
            self._current = copy.deepcopy(self._fresh)
            self._next = 0
        while self._next <= epoch:
            if hasattr(self._current, "set_epoch"):
                self._current.set_epoch(self._next)
            with _seeded(random_of(self._seed, self._next).randint(2**31)):
                drawn = list(self._current)
            self._next += 1
        if self._size is not None:
            whole = len(drawn) // self._size * self._size
            drawn = np.reshape(drawn[:whole], (-1, self._size)).tolist()
        return [list(batch) for batch in drawn]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Context manager that seeds the global generators and restores them."""
    numpy_state = np.random.get_state()
    python_state = python_random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        python_random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            python_random.setstate(python_state)


def random_of(seed: int, epoch: int) -> np.random.RandomState:
    """Return the generator from which an epoch's batches are drawn."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed % 2**64, epoch])))


def as_batch_sampler(sampler: Any, name: str, seed: int, size: int = 64) -> BatchSampler:
    """Return the result of a sampler's factory as a `BatchSampler`.

    `size` is the size of a batch, if the sampler draws single items and has no `batch_size`.

    Raises:
        PluginError: the result is not a sampler.
    """
    if isinstance(sampler, BatchSampler):
        return sampler
    if not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        raise PluginError(
            f"The sampler {name} is an object of type {type(sampler).__name__}. It must be a"
            " retrieval.plugin.BatchSampler, or yield positions or batches of positions and have a"
            " length, as the samplers of torch.utils.data do."
        )
    with calling(f"The sampler {name}"):
        return TorchBatches(sampler, seed, getattr(sampler, "batch_size", None) or size)


def training_items(
    table: Sampler, labels: Ints, metadata: Sequence[Mapping[str, Any]] | None
) -> TrainingItems:
    """Return the input of a sampler: the training items, and the sizes that `[sampler]` sets."""
    batches = table.batches or max(1, len(labels) // (table.classes * table.items))
    return TrainingItems(labels, metadata, table.classes, table.items, batches)


def drawn_batches(
    sampler: BatchSampler,
    items: TrainingItems,
    seed: int,
    epoch: int,
    embeddings: Floats32 | None = None,
) -> list[Ints]:
    """Return an epoch's checked batches as positions in `items.labels`.

    Raises:
        PluginError: the sampler fails, draws more or fewer batches than its length, or returns
            anything but positions.
    """
    if isinstance(sampler, TorchBatches):
        named = sampler._fresh
    else:
        named = sampler
    who = f"The sampler {type(named).__name__}"
    items = replace(items, embeddings=embeddings)
    with calling(who):
        batches: Iterable[Any] = sampler.draw(items, epoch, random_of(seed, epoch))
        drawn = [np.asarray(batch) for batch in batches]
    if len(drawn) != (count := sampler.batches(items)):
        raise PluginError(
            f"{who} drew {len(drawn)} batches for epoch {epoch}, but its length is {count}."
        )
    size = len(items.labels)
    for batch in drawn:
        whole = batch.ndim == 1 and len(batch) and np.issubdtype(batch.dtype, np.integer)
        if not (whole and batch.min() >= 0 and batch.max() < size):
            raise PluginError(
                f"{who} drew a batch that is not a list of positions among the {size} training"
                " items, numbered from 0."
            )
    return [batch.astype(np.int64) for batch in drawn]


@hookimpl
def retrieval_samplers() -> Factories:
    """P classes × M items."""
    return {"class_balanced": ClassBalanced}
