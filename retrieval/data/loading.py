"""Batches: P classes × M items for training, in order for evaluation.

`RawInputs` gives items as a `Model` takes them, `draw_epoch` says which items make each training
batch, `BatchMaker` makes one batch, here or in a process of `Workers`; `TrainBatches` and `inputs`
are what the other rooms use.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import data as torch_data

from retrieval.data.augment import Changes, Draws, Labels, Mix, MixedLabels, without_asking
from retrieval.errors import DataError
from retrieval.host.cores import cores
from retrieval.serving.images import from_array

if TYPE_CHECKING:
    from PIL.Image import Image

    from retrieval.model.contracts import Dataset, Transform
    from retrieval.recipe.tables import Augmentation, Sampler
    from retrieval.serving.images import Preprocessing

BUDGET = 1 << 30
"""Bytes of decoded pixels that are kept in memory at most."""
# Several parts for each thread, because some images take longer.
_PARTS_PER_THREAD = 4
_TIMED_ITEMS = 4
# Threads pay from here on: below, they wait for one another and cost twice the CPU time.
_SECONDS_WORTH_A_THREAD = 0.4e-3


class RawInputs:
    """What the encoder is given for a dataset's items.

    Where the dataset has its items in an array that needs no preprocessing, batches are slices of
    it. Elsewhere preprocessed pixels are kept in memory once made, when those of all items fit.

    Args:
        dataset: the items; `dataset[i]` is called from several threads.
        preprocessing: the backbone's; None for vectors.
        budget: largest size of the kept pixels, in bytes.

    Raises:
        DataError: images for a backbone of vectors, or the other way round.
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
        self._quick: dict[str, bool] = {}
        self._kept: NDArray[np.uint8] | None = None
        if self.array is None and preprocessing is not None:
            shape = (len(dataset), *preprocessing.shape)
            if np.prod(shape, dtype=np.int64) <= budget:
                self._kept = np.empty(shape, np.uint8)
                self._decoded = np.zeros(len(dataset), bool)

    @property
    def in_memory(self) -> bool:
        """Whether batches are slices of an array, or will be once each item was decoded."""
        return self.array is not None or self._kept is not None

    def ready(self, indices: NDArray[np.int64]) -> bool:
        """Whether these items cost no decoding."""
        return self.array is not None or (
            self._kept is not None and bool(self._decoded[indices].all())
        )

    def batch(
        self,
        indices: NDArray[np.int64],
        changes: Changes | None = None,
        draws: Draws | None = None,
    ) -> NDArray[Any]:
        """Return inputs, uint8 (B, channels, H, W) or float32 (B, F), in memory of their own."""
        if changes is not None and changes.active and self.preprocessing is not None:
            assert draws is not None
            pre = self.preprocessing
            if changes.table.crop_scale is None:
                pixels = changes.mirror(self.batch(indices), draws)
                if not changes.transforms:
                    return pixels
                if self.dataset.arrays is not None:
                    return changes.transformed(pixels, draws)
                return np.concatenate(
                    self._map(
                        lambda i: changes.transformed(pixels[i : i + 1], draws[i : i + 1]),
                        range(len(pixels)),
                        "transform",
                    )
                )
            return np.stack(
                self._map(
                    lambda i: changes.changed(self._image(int(indices[i])), pre, draws[i]),
                    range(len(indices)),
                    "crop",
                )
            )
        if self.array is not None:
            return np.take(self.array, indices, axis=0)
        if self._kept is not None:
            missing = np.unique(indices[~self._decoded[indices]])
            self._map(self._keep, missing.tolist(), "decode")
            return np.take(self._kept, indices, axis=0)
        return np.stack(self._map(self._item, indices.tolist(), "decode"))

    def _image(self, index: int) -> Image:
        item = self.dataset[index]
        return from_array(item) if isinstance(item, np.ndarray) else item

    def _item(self, index: int) -> NDArray[Any]:
        if self.preprocessing is None:
            return np.asarray(self.dataset[index], dtype=np.float32)
        return self.preprocessing(self._image(index))

    def _keep(self, index: int) -> None:
        assert self._kept is not None
        self._kept[index] = self._item(index)
        self._decoded[index] = True

    def _map(self, function: Any, jobs: Sequence[Any], work: str) -> list[Any]:
        """Return a function's results for all jobs, in threads where one takes long enough."""
        if len(jobs) < 2 or self.dataset.arrays is not None:  # without decoding, threads only cost
            return [function(job) for job in jobs]
        done: list[Any] = []
        if work not in self._quick:
            spent = []
            for job in jobs[:_TIMED_ITEMS]:
                start = time.perf_counter()
                done.append(function(job))
                spent.append(time.perf_counter() - start)
            self._quick[work] = (
                median(spent[1:]) < _SECONDS_WORTH_A_THREAD
            )  # the first one loads code
        remaining = jobs[len(done) :]
        if self._quick[work]:
            return done + [function(job) for job in remaining]
        # to hand over each image by itself would cost a twentieth of decoding a small one
        size = -(-len(remaining) // (_PARTS_PER_THREAD * _decoders())) or 1
        parts = [remaining[start : start + size] for start in range(0, len(remaining), size)]
        for part in self._threads.map(lambda part: [function(job) for job in part], parts):
            done += part
        return done

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_decoders(), thread_name_prefix="decode")

    def __getstate__(self) -> dict[str, Any]:
        """Worker processes get the dataset, and neither threads nor kept pixels."""
        state = {k: v for k, v in self.__dict__.items() if k not in ("_threads", "_decoded")}
        return {**state, "_kept": None}


def _as_inputs(
    arrays: NDArray[Any] | None, preprocessing: Preprocessing | None
) -> NDArray[Any] | None:
    """Return the dataset's array as inputs, without a copy; None where items need work first."""
    if arrays is None:
        return None
    if preprocessing is None:
        return arrays if arrays.dtype == np.float32 else None
    height, width = preprocessing.size
    if arrays.shape[1:3] != (height, width) or preprocessing.resize not in (
        None,
        min(height, width),
    ):
        return None
    if arrays.ndim == 3 and preprocessing.channels == 1:
        return arrays[:, None]
    return None


def _decoders() -> int:
    """Return the number of decoding threads; each holds an image, so at most eight."""
    return min(8, cores())


def batches_in_epoch(items: int, sampler: Sampler) -> int:
    """Return the batches in an epoch: the recipe's number, or items / (P × M), at least 1."""
    return sampler.batches or max(1, items // (sampler.classes * sampler.items))


def check_sampler(labels: NDArray[np.int64], sampler: Sampler) -> None:
    """Refuse more classes per batch than there are."""
    classes = len(np.unique(labels))
    if classes < sampler.classes:
        raise DataError(
            f"[sampler] classes: a batch takes {sampler.classes} classes, and only {classes} train."
            f" Set classes = {classes} or fewer."
        )


def draw_epoch(
    labels: NDArray[np.int64], sampler: Sampler, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return an epoch's batches, (batches, P × M) positions in `labels`, by seed and epoch.

    The draw is pytorch-metric-learning's `MPerClassSampler`'s, to the last item: P classes at
    random for each batch, of each M items without repetition, or with repetition where the class
    has fewer. Items of a class stand together. Its own would draw from a generator that all threads
    share, and loads scikit-learn, pandas and FAISS.
    """
    count = batches_in_epoch(len(labels), sampler)
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed % 2**64, epoch])))
    by_class = np.argsort(labels, kind="stable")
    firsts = np.flatnonzero(np.diff(labels[by_class], prepend=labels.min() - 1))
    lasts = np.append(firsts[1:], len(labels))
    appearing = np.argsort(by_class[firsts])  # classes as they first appear
    firsts, lasts = firsts[appearing], lasts[appearing]
    numbers = np.arange(len(firsts))  # an array: a list is shuffled alike, and five times as long
    drawn = []
    for _ in range(count):
        random.shuffle(numbers)
        for number in numbers[: sampler.classes]:
            items = by_class[firsts[number] : lasts[number]]
            drawn.append(random.choice(items, sampler.items, replace=len(items) < sampler.items))
    return np.asarray(drawn, dtype=np.int64).reshape(count, sampler.classes * sampler.items)


class Job(NamedTuple):
    """One process's share of one batch: of the whole batch's items, those at `share`."""

    items: NDArray[np.int64]
    epoch: int
    batch: int
    share: slice


@dataclass
class BatchMaker:
    """Makes a batch's inputs from a `Job`, here or in another process.

    Attributes:
        raw: the dataset's inputs.
        changes: how they change.
        seed: the run's seed.
        size: rows of the whole batch.
    """

    raw: RawInputs
    changes: Changes
    seed: int
    size: int

    def __call__(self, job: Job) -> Tensor:
        """Return the inputs of the job's items."""
        if not self.changes.active:
            return torch.from_numpy(self.raw.batch(job.items[job.share]))
        draws = self.changes.draw(self.seed, job.epoch, job.batch, self.size)
        mix = self.mix(job.epoch, job.batch)
        if mix is None:
            return torch.from_numpy(
                self.raw.batch(job.items[job.share], self.changes, draws[job.share])
            )
        rows = np.arange(len(job.items))[job.share]
        needed, place = np.unique(np.concatenate([rows, mix.partner[rows]]), return_inverse=True)
        pixels = self.raw.batch(job.items[needed], self.changes, draws[needed])[place]
        return torch.from_numpy(mix.of(pixels[: len(rows)], pixels[len(rows) :]))

    def mix(self, epoch: int, batch: int) -> Mix | None:
        """Return what a batch's images are mixed with; None for no mixing and for vectors."""
        if self.raw.preprocessing is None:
            return None
        key = (self.seed, epoch, batch)
        return Mix.drawn(self.changes.table, key, self.size, self.raw.preprocessing.size)


class _Work(torch_data.Dataset[Any]):
    """Runs in the worker: a job in, a batch out."""

    def __init__(self, make: BatchMaker) -> None:
        self.make = make

    def __getitem__(self, job: Job) -> Tensor | str:
        try:
            return self.make(job)
        except (
            DataError
        ) as error:  # raised over there it would come back as a traceback in a string
            return str(error)


class _Jobs(torch_data.Sampler[Any]):
    """The jobs of the epoch under way."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


def _as_is(batch: Any) -> Any:
    return batch


class Workers:
    """Worker processes, started at the first epoch and kept until `close`.

    They are spawned, not forked: a forked child hangs once FAISS or OpenMP has run in the parent.
    """

    def __init__(self, make: BatchMaker, count: int) -> None:
        self._jobs = _Jobs()
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            _Work(make),
            batch_size=None,
            sampler=self._jobs,
            num_workers=count,
            collate_fn=_as_is,
            multiprocessing_context="spawn",
            persistent_workers=True,
            # by default it takes its base seed from the global generator, which the model draws
            # from too
            generator=torch.Generator().manual_seed(0),
        )

    def run(self, jobs: list[Job]) -> Iterator[Tensor]:
        """Yield each job's batch, in order."""
        self._jobs.jobs = jobs
        try:
            batches = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"The dataset cannot be sent to other processes ({error}). Set [train] workers = 0."
            ) from error
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "exited unexpectedly" not in str(error):
                    raise
                raise DataError(
                    "A process that loads images died; the lines above say why. It may lack memory,"
                    " or the dataset's class may not be importable there. Set [train] workers = 0."
                ) from error
            if isinstance(batch, str):
                raise DataError(batch)
            yield batch

    def close(self) -> None:
        """End the processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


T = TypeVar("T")


class TrainBatches:
    """Training batches of P classes × M items; stateless, so that a run can go on at any step.

    All that is random follows from seed, epoch and the place in the epoch; nothing touches the
    global generators. A `with` block ends the processes that decode.

    Args:
        dataset: the items. `dataset[i]` is called from several threads.
        indices: (n,) the items that train (`Splits.train`).
        labels: (n,) class ids of those items (`Splits.train_labels`).
        preprocessing: the backbone's; None for vectors.
        sampler: P, M and the batches in an epoch.
        augmentation: random changes to images; how many views a batch has of each item, and whose
            label they bear.
        transforms: those that `augmentation` names, built.
        seed: the run's seed.
        workers: processes that decode, where images come from files and do not fit in memory; 0:
            threads of this process. The batches are the same with any number.
        raw: the dataset's inputs, where they are shared with `inputs`; by default they are made
            here.

    Raises:
        DataError: fewer classes train than a batch takes, or dataset and backbone do not fit.
    """

    def __init__(
        self,
        dataset: Dataset,
        indices: NDArray[np.int64],
        labels: NDArray[np.int64],
        preprocessing: Preprocessing | None,
        *,
        sampler: Sampler,
        augmentation: Augmentation,
        transforms: Sequence[Transform] = (),
        seed: int,
        workers: int = 0,
        raw: RawInputs | None = None,
    ) -> None:
        if augmentation.positives == "item":
            labels = np.arange(len(labels))
        check_sampler(labels, sampler)
        self.indices = np.asarray(indices, dtype=np.int64)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.sampler = sampler
        self.views = augmentation.views
        raw = raw or RawInputs(dataset, preprocessing)
        changes = Changes(
            augmentation, tuple(without_asking(transform) for transform in transforms)
        )
        self._make = BatchMaker(raw, changes, seed, self.batch_size)
        self._workers: Workers | None = None
        # pixels that stay in memory are of use to no other process; a random crop is another one
        # each time
        self._slices = raw.in_memory and augmentation.crop_scale is None and not transforms
        if workers and not self._slices and preprocessing is not None and dataset.arrays is None:
            self._workers = Workers(self._make, workers)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return batches_in_epoch(len(self.labels), self.sampler)

    @property
    def batch_size(self) -> int:
        """P × M × views, over all processes."""
        return self.sampler.classes * self.sampler.items * self.views

    def epoch(
        self, number: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Labels]]:
        """Return an epoch's batches: raw inputs and class ids (B,) int64, or `MixedLabels`."""
        if self.batch_size % world:
            raise DataError(
                f"[sampler]: a batch of {self.sampler.classes} classes × {self.sampler.items} items"
                f"{f' × {self.views} views' if self.views > 1 else ''} cannot be shared "
                f"equally by {world} processes. Make classes × items a multiple of {world}."
            )
        return self._epoch(number, start, rank, self.batch_size // world)

    def _epoch(
        self, number: int, start: int, rank: int, size: int
    ) -> Iterator[tuple[Tensor, Labels]]:
        share = slice(rank * size, (rank + 1) * size)
        drawn = draw_epoch(self.labels, self.sampler, self._make.seed, number)[start:]
        drawn = np.repeat(drawn, self.views, axis=1)
        labels = [
            self._labels(row, number, start + i, share) for i, row in enumerate(self.labels[drawn])
        ]
        jobs = [Job(items, number, start + i, share) for i, items in enumerate(self.indices[drawn])]
        if self._workers is not None:
            batches = self._workers.run(jobs)
        elif self._slices and self._make.raw.ready(self.indices):
            batches = map(self._make, jobs)
        else:
            batches = _ahead(self._make, jobs)
        return zip(batches, labels, strict=True)

    def _labels(self, labels: NDArray[np.int64], epoch: int, batch: int, share: slice) -> Labels:
        """Return a share of a batch's class ids."""
        own, mix = torch.from_numpy(labels[share]), self._make.mix(epoch, batch)
        return (
            own
            if mix is None
            else MixedLabels(own, torch.from_numpy(labels[mix.partner[share]]), mix.weight)
        )

    def __enter__(self) -> Self:
        """Return the batches."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._workers is not None:
            self._workers.close()


def inputs(
    dataset: Dataset,
    indices: NDArray[np.int64] | Sequence[int],
    preprocessing: Preprocessing | None,
    batch: int,
    *,
    raw: RawInputs | None = None,
) -> Iterator[Tensor]:
    """Return the items' raw inputs in order, `batch` at a time: uint8 (B, channels, H, W) or
    float32 (B, F).

    Images are decoded in threads, one batch ahead of the caller.

    Args:
        dataset: the items. `dataset[i]` is called from several threads.
        indices: (n,) which of them.
        preprocessing: the backbone's; None for vectors.
        batch: how many at a time; the last batch may be smaller.
        raw: the dataset's inputs, where they are shared with `TrainBatches`; by default nothing is
            kept in memory.

    Raises:
        DataError: an item cannot be read, or dataset and backbone do not fit.
    """
    raw = raw or RawInputs(dataset, preprocessing, budget=0)
    chosen = np.asarray(indices, dtype=np.int64)
    blocks = [chosen[i : i + batch] for i in range(0, len(chosen), batch)]

    def make(block: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(raw.batch(block))

    return map(make, blocks) if raw.ready(chosen) else _ahead(make, blocks)


def _ahead(make: Callable[[Any], T], jobs: Iterable[Any]) -> Iterator[T]:
    """Yield `make(job)` of each job, the next one under way in a thread meanwhile."""
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        pending = iter(jobs)
        next_up = [thread.submit(make, job) for job in itertools.islice(pending, 1)]
        while next_up:
            current, next_up = (
                next_up[0],
                [thread.submit(make, job) for job in itertools.islice(pending, 1)],
            )
            yield current.result()
