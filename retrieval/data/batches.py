"""One batch's inputs, made here or in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.data.augment import Changes
from retrieval.data.mixing import Mix
from retrieval.data.raw import RawInputs


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
        made = self.raw.batch(job.items[needed], self.changes, draws[needed])[place]
        return torch.from_numpy(mix.of(made[: len(rows)], made[len(rows) :]))

    def mix(self, epoch: int, batch: int) -> Mix | None:
        """Return what a batch's images are mixed with; None where nothing is, or items are vectors."""
        if self.raw.preprocessing is None:
            return None
        key = (self.seed, epoch, batch)
        return Mix.drawn(self.changes.table, key, self.size, self.raw.preprocessing.size)
