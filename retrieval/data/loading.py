"""Batches of inputs, as a sampler draws them for training, or in order for evaluation."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from retrieval.base.arrays import Array, Floats32, Ints, Pixels
from retrieval.base.cores import cores
from retrieval.data.augment import Changes, Draws, Labels, Mix, MixedLabels
from retrieval.data.samplers import ClassBalanced, drawn_batches, training_items
from retrieval.errors import DataError, PluginError
from retrieval.host.processes import refuse_unguarded
from retrieval.images.conversions import from_array

if TYPE_CHECKING:
    from PIL.Image import Image

    from retrieval.images.preprocessing import Preprocessing
    from retrieval.model.contracts import BatchSampler, Dataset, Transform
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
        self, dataset: Dataset, preprocessing: Preprocessing | None, budget: int = BUDGET
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
        self._kept: Pixels | None = None
        if self.array is None and preprocessing is not None:
            shape = (len(dataset), *preprocessing.shape)
            if np.prod(shape, dtype=np.int64) <= budget:
                self._kept = np.empty(shape, np.uint8)
                self._decoded = np.zeros(len(dataset), bool)

    @property
    def in_memory(self) -> bool:
        """True if batches are slices of an array, or will be once every item is decoded."""
        return self.array is not None or self._kept is not None

    def ready(self, indices: Ints) -> bool:
        """Return whether these items are all in memory."""
        return self.array is not None or (
            self._kept is not None and bool(self._decoded[indices].all())
        )

    def changed(self, indices: Ints, changes: Changes, draws: Draws) -> Pixels:
        """Return randomly changed images, uint8 (B, channels, H, W)."""
        preprocessing = self.preprocessing
        rows = range(len(indices))
        assert preprocessing is not None

        def crop(row: int) -> Pixels:
            return changes.crop(self._image(indices[row]), preprocessing, draws[row])

        cropped = changes.table.crop_scale is not None
        if cropped:
            pixels = np.stack(self._map(crop, rows))
        else:
            pixels = self.batch(indices)
        pixels = changes.mirror(pixels, draws)
        if not changes.transforms:
            return pixels
        return np.stack(self._map(lambda row: changes.transformed(pixels[row], draws[row]), rows))

    def batch(self, indices: Ints) -> Array:
        """Return a copy of items' inputs, uint8 (B, channels, H, W) or float32 (B, F)."""
        if self.array is not None:
            return np.take(self.array, indices, axis=0)
        if self._kept is None:
            return np.stack(self._map(self._item, indices.tolist()))
        missing = np.unique(indices[~self._decoded[indices]])
        self._map(self._keep, missing.tolist())
        return np.take(self._kept, indices, axis=0)

    def _image(self, index: int) -> Image:
        item = self.dataset[int(index)]
        if isinstance(item, np.ndarray):
            return from_array(item)
        return item

    def _item(self, index: int) -> Array:
        if self.preprocessing is None:
            return np.asarray(self.dataset[index], dtype=np.float32)
        return self.preprocessing(self._image(index))

    def _keep(self, index: int) -> None:
        assert self._kept is not None
        self._kept[index] = self._item(index)
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
        """Return the state for worker processes, without threads and kept pixels."""
        state = {k: v for k, v in self.__dict__.items() if k not in ("_threads", "_decoded")}
        return {**state, "_kept": None}


def _as_inputs(arrays: Array | None, preprocessing: Preprocessing | None) -> Array | None:
    """Return the dataset's array as inputs without copying, or None if items need preprocessing."""
    if arrays is None:
        return None
    if preprocessing is None:
        if arrays.dtype == np.float32:
            return arrays
        return None
    height, width = preprocessing.size
    fits = arrays.shape[1:] == (height, width) and preprocessing.channels == 1
    if fits and preprocessing.resize in (None, min(height, width)):
        return arrays[:, None]
    return None


def _decoders() -> int:
    """Return the number of decoding threads: at most eight, because each holds an image."""
    return min(8, cores())


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
        draws = self.changes.draw(self.seed, job.epoch, job.batch, len(job.items))
        mix = self.mix(job)
        if mix is None:
            share = job.share
            return torch.from_numpy(self.raw.changed(job.items[share], self.changes, draws[share]))
        rows = np.arange(len(job.items))[job.share]
        needed, place = np.unique(np.concatenate([rows, mix.partner[rows]]), return_inverse=True)
        pixels = self.raw.changed(job.items[needed], self.changes, draws[needed])[place]
        return torch.from_numpy(mix.mixed(pixels[: len(rows)], pixels[len(rows) :]))

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
        except DataError as error:  # the loader would add a traceback to a raised error's message
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
    ) -> None:
        if augmentation.positives == "item":
            labels = np.arange(len(labels))
        self.indices = np.asarray(indices, dtype=np.int64)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.batch_sampler = batch_sampler or ClassBalanced()
        columns = dataset.metadata
        self.items = training_items(
            sampler, self.labels, None if columns is None else [columns[i] for i in self.indices]
        )
        self._count = self.batch_sampler.batches(self.items)
        if not self._count:
            name = type(getattr(self.batch_sampler, "_fresh", self.batch_sampler)).__name__
            raise PluginError(f"The sampler {name} draws no batches: there is nothing to train on.")
        self.views = augmentation.views
        raw = raw or RawInputs(dataset, preprocessing)
        is_changed = augmentation.active and preprocessing is not None
        if is_changed:
            changes = Changes(augmentation, tuple(transforms))
        else:
            changes = None
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
        """Yield an epoch's batches: raw inputs and class ids (B,) int64, or `MixedLabels`.

        Args:
            number: the epoch's number from 0.
            start: number of the first batch.
            rank: this process's rank.
            world: number of processes that share each batch.
            drawn: the epoch's batches, if they were drawn before; by default `draw(number)`.
        """
        rows = [np.repeat(batch, self.views) for batch in drawn or self.draw(number)]
        if uneven := [len(batch) for batch in rows if len(batch) % world]:
            raise DataError(
                f"[sampler]: a batch of {uneven[0]} rows (classes × items × views) cannot be shared"
                f" equally by {world} processes. Make classes × items a multiple of {world}."
            )
        jobs = []
        labels = []
        for batch_number, positions in enumerate(rows[start:], start):
            share = slice(len(positions) * rank // world, len(positions) * (rank + 1) // world)
            job = LoadingJob(self.indices[positions], number, batch_number, share)
            jobs.append(job)
            labels.append(self._labels(job, self.labels[positions]))
        if self._workers is not None:
            batches = self._workers.run(jobs)
        elif self._slices and self._make.raw.ready(self.indices):
            batches = map(self._make, jobs)
        else:
            batches = _ahead(self._make, jobs)
        return zip(batches, labels, strict=True)

    def _labels(self, job: LoadingJob, labels: Ints) -> Labels:
        """Return the job's share of a batch's class ids."""
        own = torch.from_numpy(labels[job.share])
        mix = self._make.mix(job)
        if mix is None:
            return own
        return MixedLabels(own, torch.from_numpy(labels[mix.partner[job.share]]), mix.weight)

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
