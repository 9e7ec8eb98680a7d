"""Batches of inputs: samplers draw them for training, and evaluation takes them in order.

A batch sampler takes P classes × M items, or is any of torch's. `RawInputs` reads the items, in
threads, or in the processes of `Workers`.
"""

from __future__ import annotations

import copy
import math
import pickle
import random as python_random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from retrieval.base.arrays import Array, Floats32, Ints, Pixels
from retrieval.base.machine import cores
from retrieval.data.augment import Changes, Draws, Labels, Mix, MixedLabels
from retrieval.errors import DataError, PluginError
from retrieval.host.factory import calling
from retrieval.host.hookspecs import Factories, hookimpl
from retrieval.host.processes import refuse_unguarded
from retrieval.images.preprocessing import from_array
from retrieval.model.contracts import BatchSampler, TrainingItems

if TYPE_CHECKING:
    from PIL.Image import Image

    from retrieval.data.datasets import Dataset
    from retrieval.data.texts import EncodedTexts
    from retrieval.images.preprocessing import Preprocessing
    from retrieval.model.contracts import Transform
    from retrieval.recipe.tables import Augmentation, Sampler

BUDGET = 1 << 30
"""Largest size of the decoded pixels kept in memory, in bytes."""

T = TypeVar("T")


class RawInputs:
    """A dataset's items as inputs of the encoder.

    If the dataset's array needs no preprocessing, batches are slices of that array. Otherwise the
    preprocessed pixels are kept in memory, if the pixels of all items fit.

    Args:
        dataset: the dataset; `dataset[i]` is called from several threads.
        preprocessing: the backbone's preprocessing, or `None` for vectors.
        budget: largest size of the kept pixels, in bytes.

    Raises:
        DataError: the dataset has images and the backbone takes vectors, or vice versa.
    """

    def __init__(
        self,
        dataset: Dataset,
        preprocessing: Preprocessing | None,
        budget: int = BUDGET,
    ) -> None:
        if dataset.kind == "features" and preprocessing is not None:
            raise DataError(
                "The dataset's items are vectors, and the backbone takes images. Use the backbone"
                " core.features."
            )
        if dataset.kind == "image" and preprocessing is None:
            raise DataError(
                "The dataset's items are images, and the backbone takes vectors. Use a backbone for"
                " images."
            )
        self.dataset = dataset
        self.preprocessing = preprocessing
        self.array = _as_inputs(dataset.arrays, preprocessing)
        # Pixels of all items; those that are not `_decoded` yet are undefined.
        self._pixels: Pixels | None = None
        if self.array is None and preprocessing is not None:
            shape = (len(dataset), *preprocessing.shape)
            if math.prod(shape) <= budget:
                self._pixels = np.empty(shape, np.uint8)
                self._decoded = np.zeros(len(dataset), bool)

    @property
    def in_memory(self) -> bool:
        """True if batches are slices of an array, or will be once every item is decoded."""
        return self.array is not None or self._pixels is not None

    def ready(self, indices: Ints) -> bool:
        """Return whether these items are all in memory."""
        if self._pixels is None:
            return self.array is not None
        return bool(self._decoded[indices].all())

    def changed(self, indices: Ints, changes: Changes, draws: Draws) -> Pixels:
        """Return randomly changed images, uint8 (B, channels, H, W)."""
        preprocessing = self.preprocessing
        assert preprocessing is not None
        rows = range(len(indices))

        def crop(row: int) -> Pixels:
            return changes.crop(self._image(indices[row]), preprocessing, draws[row])

        def transform(row: int) -> Pixels:
            return changes.transformed(pixels[row], draws[row])

        # A crop starts from the whole image, which the pixels in memory no longer show.
        if changes.table.crop_scale is not None:
            pixels = np.stack(self._map(crop, rows))
        else:
            pixels = self.batch(indices)
        pixels = changes.mirror(pixels, draws)
        if changes.transforms:
            pixels = np.stack(self._map(transform, rows))
        return pixels

    def batch(self, indices: Ints) -> Array:
        """Return a copy of items' inputs, uint8 (B, channels, H, W) or float32 (B, F)."""
        if self.array is not None:
            return np.take(self.array, indices, axis=0)
        if self._pixels is None:
            return np.stack(self._map(self._item, indices.tolist()))
        # An item may occur several times in a batch, but needs decoding once.
        missing = np.unique(indices[~self._decoded[indices]])
        self._map(self._decode, missing.tolist())
        return np.take(self._pixels, indices, axis=0)

    def _image(self, index: int) -> Image:
        item = self.dataset[int(index)]
        if isinstance(item, np.ndarray):
            return from_array(item)
        return item

    def _item(self, index: int) -> Array:
        if self.preprocessing is None:
            return np.asarray(self.dataset[index], dtype=np.float32)
        return self.preprocessing(self._image(index))

    def _decode(self, index: int) -> None:
        assert self._pixels is not None
        self._pixels[index] = self._item(index)
        # Set last: another thread must not take pixels that are still being written.
        self._decoded[index] = True

    def _map(self, function: Callable[[Any], T], jobs: Sequence[Any]) -> list[T]:
        """Return a function's results for all jobs, in threads if images must be decoded."""
        if len(jobs) < 2 or self.dataset.arrays is not None:  # threads would be slower
            return [function(job) for job in jobs]
        # Each thread gets about four parts, because some images take longer. With one image a part,
        # small images would take a tenth more CPU time.
        size = -(-len(jobs) // (4 * _decoders()))
        parts = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        done = self._threads.map(lambda part: [function(job) for job in part], parts)
        return [result for part in done for result in part]

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_decoders(), thread_name_prefix="decode")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for worker processes, without threads and decoded pixels."""
        state = self.__dict__ | {"_pixels": None}
        # Threads cannot be pickled, and each process starts its own.
        state.pop("_threads", None)
        state.pop("_decoded", None)
        return state


def _as_inputs(arrays: Array | None, preprocessing: Preprocessing | None) -> Array | None:
    """Return the dataset's array as inputs without copying, or None if items need preprocessing."""
    if arrays is None:
        return None
    if preprocessing is None:
        return arrays if arrays.dtype == np.float32 else None
    # Only grey images: of colour images, the array has the channels last and the encoder first.
    fits = arrays.shape[1:] == preprocessing.size and preprocessing.channels == 1
    if fits and preprocessing.resize in (None, min(preprocessing.size)):
        return arrays[:, None]
    return None


def _decoders() -> int:
    """Return the number of decoding threads: at most eight, because each holds an image."""
    return min(8, cores())


class ClassBalanced(BatchSampler):
    """P random classes and M random items of each.

    Items repeat only if a class has fewer than M. Items of a class are adjacent. The batches equal
    those of pytorch-metric-learning's `MPerClassSampler` with the same random state.
    """

    def batches(self, items: TrainingItems) -> int:
        """Return the number of batches, after checking that a batch can get enough classes."""
        check_classes(items)
        return items.batches

    def draw(
        self,
        items: TrainingItems,
        epoch: int,
        random: np.random.RandomState,
    ) -> list[Ints]:
        """Return the batches of an epoch."""
        by_class = rows_by_class(items.labels)
        # Shuffling the list of arrays gives the same order but takes five times as long.
        numbers = np.arange(len(by_class))
        drawn = []
        for _ in range(items.batches):
            random.shuffle(numbers)
            chosen = [by_class[number] for number in numbers[: items.classes]]
            drawn.append(rows_of(chosen, items, random))
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
    starts = np.flatnonzero(np.diff(labels[by_class])) + 1
    rows = np.split(by_class, starts)
    return sorted(rows, key=lambda of_class: int(of_class[0]))


def rows_of(
    classes: Sequence[Ints],
    items: TrainingItems,
    random: np.random.RandomState,
) -> Ints:
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
        # Only a first result shows whether the sampler yields positions or batches of them. A copy
        # gives it, so that the sampler itself starts where it is.
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
        self,
        items: TrainingItems,
        epoch: int,
        random: np.random.RandomState,
    ) -> list[list[int]]:
        """Return the batches of an epoch."""
        # A sampler with a state of its own can only go forward.
        if epoch < self._next:
            self._current = copy.deepcopy(self._fresh)
            self._next = 0
        while self._next <= epoch:
            if hasattr(self._current, "set_epoch"):
                self._current.set_epoch(self._next)
            with _seeded(_random_of(self._seed, self._next).randint(2**31)):
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


def _random_of(seed: int, epoch: int) -> np.random.RandomState:
    """Return the generator from which an epoch's batches are drawn."""
    # The number of the epoch is part of the seed, so a resumed run draws any epoch at once.
    sequence = np.random.SeedSequence([seed % 2**64, epoch])
    return np.random.RandomState(np.random.MT19937(sequence))


def as_batch_sampler(
    sampler: Any,
    name: str,
    seed: int,
    size: int = 64,
) -> BatchSampler:
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
    table: Sampler,
    labels: Ints,
    metadata: Sequence[Mapping[str, Any]] | None,
) -> TrainingItems:
    """Return the input of a sampler: the training items, and the sizes that `[sampler]` sets."""
    batch_size = table.classes * table.items
    batches = table.batches or max(1, len(labels) // batch_size)
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
    subject = _named(sampler)
    items = replace(items, embeddings=embeddings)
    with calling(subject):
        batches: Iterable[Any] = sampler.draw(items, epoch, _random_of(seed, epoch))
        drawn = [np.asarray(batch) for batch in batches]
    count = sampler.batches(items)
    if len(drawn) != count:
        raise PluginError(
            f"{subject} drew {len(drawn)} batches for epoch {epoch}, but its length is {count}."
        )
    size = len(items.labels)
    for batch in drawn:
        is_list = batch.ndim == 1 and len(batch) and np.issubdtype(batch.dtype, np.integer)
        # NumPy would take a negative position from the end.
        if not is_list or batch.min() < 0 or batch.max() >= size:
            raise PluginError(
                f"{subject} drew a batch that is not a list of positions among the {size} training"
                " items, numbered from 0."
            )
    return [batch.astype(np.int64) for batch in drawn]


def _named(sampler: BatchSampler) -> str:
    """Return a sampler as the subject of an error message."""
    if isinstance(sampler, TorchBatches):
        sampler = sampler._fresh
    return f"The sampler {type(sampler).__name__}"


@hookimpl
def retrieval_samplers() -> Factories:
    """P classes × M items."""
    return {"class_balanced": ClassBalanced}


class LoadingJob(NamedTuple):
    """The part of a batch that one process makes.

    Attributes:
        items: indices (B,) of the whole batch's items in the dataset.
        epoch: number of the epoch.
        batch: number of the batch in the epoch.
        share: the rows of the batch to make.
    """

    items: Ints
    epoch: int
    batch: int
    share: slice


@dataclass
class BatchMaker:
    """Makes a batch's inputs from a `LoadingJob`, in this or another process.

    `changes` are the random changes to images; `None` leaves images and vectors unchanged.
    """

    raw: RawInputs
    changes: Changes | None
    seed: int

    def __call__(self, job: LoadingJob) -> Tensor:
        """Return the inputs of the job's items."""
        if self.changes is None:
            return torch.from_numpy(self.raw.batch(job.items[job.share]))
        # Draw for the whole batch: a row's changes must not depend on who shares the batch.
        draws = self.changes.draw(self.seed, job.epoch, job.batch, len(job.items))
        rows = np.arange(len(job.items))[job.share]
        mix = self.mix(job)
        if mix is None:
            pixels = self.raw.changed(job.items[rows], self.changes, draws[rows])
            return torch.from_numpy(pixels)
        # A partner may lie in another process's share, and is then made here too.
        partners = mix.partner[rows]
        both = np.concatenate([rows, partners])
        needed, position = np.unique(both, return_inverse=True)
        changed = self.raw.changed(job.items[needed], self.changes, draws[needed])
        pixels = changed[position]
        mixed = mix.mixed(pixels[: len(rows)], pixels[len(rows) :])
        return torch.from_numpy(mixed)

    def mix(self, job: LoadingJob) -> Mix | None:
        """Return how the images of the job's batch are mixed, or None."""
        if self.changes is None or self.raw.preprocessing is None:
            return None
        key = (self.seed, job.epoch, job.batch)
        shape = self.raw.preprocessing.size
        return Mix.drawn(self.changes.table, key, len(job.items), shape)


class _Work(torch_data.Dataset[Any]):
    """Dataset of the worker processes: maps a job to its inputs or to an error message."""

    def __init__(self, make: BatchMaker) -> None:
        self.make = make

    def __getitem__(self, job: LoadingJob) -> Tensor | str:
        try:
            return self.make(job)
        except DataError as error:
            # The loader would add a traceback to a raised error's message.
            return str(error)


class Workers:
    """Worker processes that make batches, started in the first epoch and kept until `close`.

    The processes are spawned, because a forked one hangs if FAISS or OpenMP ran in the parent.
    """

    def __init__(self, make: BatchMaker, count: int) -> None:
        refuse_unguarded()
        self._jobs: list[LoadingJob] = []
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            _Work(make),
            batch_size=None,
            sampler=self._jobs,
            num_workers=count,
            multiprocessing_context="spawn",
            persistent_workers=True,
            # By default, the loader draws a seed from the global generator, which the model uses.
            generator=torch.Generator().manual_seed(0),
        )

    def run(self, jobs: list[LoadingJob]) -> Iterator[Tensor]:
        """Yield each job's inputs, in order."""
        # The loader keeps its sampler while its processes live, so the list itself is filled anew.
        self._jobs[:] = jobs
        try:
            batches = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"The dataset cannot be sent to other processes ({error}). Set [train] workers = 0."
            ) from error
        try:
            for batch in batches:
                if isinstance(batch, str):
                    raise DataError(batch)
                yield batch
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error):
                raise
            raise DataError(
                "A process that loads images died; the lines above say why. It may lack memory, or"
                " the dataset's class may not be importable there. Set [train] workers = 0."
            ) from error

    def close(self) -> None:
        """End the processes."""
        # The loader has no public method for this.
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class TrainBatches:
    """Training batches as a sampler draws them; stateless, so that a run can resume at any step.

    All randomness depends on seed, epoch and batch number only, not on global generators. A `with`
    block ends the worker processes.

    Args:
        dataset: the dataset; `dataset[i]` is called from several threads.
        indices: training items (n,) (`Splits.train`).
        labels: class ids (n,) of those items (`Splits.train_labels`).
        preprocessing: see `RawInputs`.
        sampler: number of batches in an epoch, of classes P in a batch, and of items M of a class.
        batch_sampler: chooses the items; the default draws P random classes and M items of each.
        augmentation: random changes to images, number of views of each item, and what counts as
            positives.
        transforms: the transforms that `augmentation` names, built.
        seed: the run's seed.
        workers: number of processes that decode images; 0 uses threads of this process. The batches
            do not depend on this number. Pixels that are already in memory need no processes.
        raw: reads the dataset's items; pass one to share kept pixels with `inputs`.
        texts: the items' texts, of which each batch draws some; its labels are `TextLabels`.

    Raises:
        DataError: a batch takes more classes than there are, or dataset and backbone do not fit.
    """

    def __init__(
        self,
        dataset: Dataset,
        indices: Ints,
        labels: Ints,
        preprocessing: Preprocessing | None,
        *,
        sampler: Sampler,
        batch_sampler: BatchSampler | None = None,
        augmentation: Augmentation,
        transforms: Sequence[Transform] = (),
        seed: int,
        workers: int = 0,
        raw: RawInputs | None = None,
        texts: EncodedTexts | None = None,
    ) -> None:
        self.texts = texts
        if augmentation.positives == "item":
            labels = np.arange(len(labels))
        self.indices = np.asarray(indices, dtype=np.int64)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.batch_sampler = batch_sampler or ClassBalanced()
        metadata = None
        if dataset.metadata is not None:
            metadata = [dataset.metadata[i] for i in self.indices]
        self.items = training_items(sampler, self.labels, metadata)
        self._count = self.batch_sampler.batches(self.items)
        if not self._count:
            raise PluginError(
                f"{_named(self.batch_sampler)} draws no batches: there is nothing to train on."
            )
        self.views = augmentation.views
        raw = raw or RawInputs(dataset, preprocessing)
        changes = None
        if augmentation.active and preprocessing is not None:
            changes = Changes(augmentation, tuple(transforms))
        self._make = BatchMaker(raw, changes, seed)
        self._workers: Workers | None = None
        # Slices of pixels in memory are fast. A random crop cannot use them, because it starts from
        # the whole image, and transforms take time.
        self._slices = raw.in_memory and augmentation.crop_scale is None and not transforms
        if workers and not self._slices and preprocessing is not None and dataset.arrays is None:
            self._workers = Workers(self._make, workers)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._count

    def draw(self, number: int, embeddings: Floats32 | None = None) -> list[Ints]:
        """Return an epoch's batches as positions in `indices`."""
        return drawn_batches(self.batch_sampler, self.items, self._make.seed, number, embeddings)

    def epoch(
        self,
        number: int,
        *,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
        drawn: Sequence[Ints] | None = None,
    ) -> Iterator[tuple[Tensor, Labels]]:
        """Yield an epoch's batches: raw inputs and class ids (B,) int64, or other `Labels`.

        Args:
            number: the epoch's number from 0.
            start: number of the first batch.
            rank: this process's rank.
            world: number of processes that share each batch.
            drawn: the epoch's batches, if they were drawn before; by default `draw(number)`.
        """
        rows = [np.repeat(batch, self.views) for batch in drawn or self.draw(number)]
        uneven = [len(batch) for batch in rows if len(batch) % world]
        if uneven:
            raise DataError(
                f"[sampler]: a batch of {uneven[0]} rows (classes × items × views) cannot be shared"
                f" equally by {world} processes. Make classes × items a multiple of {world}."
            )
        jobs = []
        classes = []
        for batch_number, positions in enumerate(rows[start:], start):
            size = len(positions) // world
            share = slice(rank * size, (rank + 1) * size)
            job = LoadingJob(self.indices[positions], number, batch_number, share)
            jobs.append(job)
            classes.append(self.labels[positions])
        if self._workers is not None:
            batches = self._workers.run(jobs)
        elif self._slices and self._make.raw.ready(self.indices):
            batches = map(self._make, jobs)
        else:
            batches = _ahead(self._make, jobs)
        # one batch after another, as the texts of a whole epoch may not fit into memory
        return zip(batches, map(self._labels, jobs, classes), strict=True)

    def _labels(self, job: LoadingJob, labels: Ints) -> Labels:
        """Return the job's share of a batch's class ids."""
        if self.texts is not None:
            key = self._make.seed, job.epoch, job.batch
            return self.texts.labels(job.items, labels, key)
        own_labels = torch.from_numpy(labels[job.share])
        mix = self._make.mix(job)
        if mix is None:
            return own_labels
        partners = torch.from_numpy(labels[mix.partner[job.share]])
        return MixedLabels(own_labels, partners, mix.weight)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._workers is not None:
            self._workers.close()


def inputs(
    dataset: Dataset,
    indices: Ints | Sequence[int],
    preprocessing: Preprocessing | None,
    batch_size: int,
    *,
    raw: RawInputs | None = None,
) -> Iterator[Tensor]:
    """Yield items' raw inputs in order: uint8 (B, channels, H, W) or float32 (B, F).

    Threads decode images one batch ahead of the caller. `raw` reads the items; pass one to share
    kept pixels with `TrainBatches`. By default nothing is kept in memory.

    Raises:
        DataError: an item cannot be read, or dataset and backbone do not fit.
    """
    raw = raw or RawInputs(dataset, preprocessing, budget=0)
    chosen = np.asarray(indices, dtype=np.int64)
    blocks = [chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size)]

    def make(block: Ints) -> Tensor:
        return torch.from_numpy(raw.batch(block))

    if raw.ready(chosen):
        return map(make, blocks)
    return _ahead(make, blocks)


def _ahead(make: Callable[[Any], T], jobs: Iterable[Any]) -> Iterator[T]:
    """Yield `make(job)` for each job, while a thread works on the next job."""
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        pending = None
        for job in jobs:
            upcoming = thread.submit(make, job)
            if pending is not None:
                yield pending.result()
            pending = upcoming
        if pending is not None:
            yield pending.result()
