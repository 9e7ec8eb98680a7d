"""Batches: P classes × M items for training, in order for evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.data.augment import Changes
from retrieval.data.batches import BatchMaker, Job
from retrieval.data.drawing import without_asking
from retrieval.data.mixing import Labels, MixedLabels
from retrieval.data.raw import RawInputs
from retrieval.data.sampling import batches_in_epoch, check_sampler, draw_epoch
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.data.workers import Workers
    from retrieval.model.contracts import Dataset, Transform
    from retrieval.recipe.tables import Augmentation, Sampler
    from retrieval.serving.images import Preprocessing

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
        changes = Changes(augmentation, tuple(without_asking(each) for each in transforms))
        self._make = BatchMaker(raw, changes, seed, self.batch_size)
        self._workers: Workers | None = None
        # pixels that stay in memory are of use to no other process; a random crop is another one
        # each time
        self._slices = raw.in_memory and augmentation.crop_scale is None and not transforms
        if workers and not self._slices and preprocessing is not None and dataset.arrays is None:
            from retrieval.data.workers import Workers

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
        """Return an epoch's batches: raw inputs, uint8 (B, channels, H, W) or float32 (B, F), and
        class ids (B,) int64, of each image's two parts where images are mixed.

        Args:
            number: the epoch, from 0.
            start: the first batch to give.
            rank: this process's number; it gets the contiguous share `rank` of each batch.
            world: how many processes there are.

        Raises:
            DataError: a batch cannot be shared among so many, or an item cannot be read.
        """
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
            made = self._workers.run(jobs)
        elif self._slices and self._make.raw.ready(self.indices):
            made = map(self._make, jobs)
        else:
            made = _ahead(self._make, jobs)
        return zip(made, labels, strict=True)

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
