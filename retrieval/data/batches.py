"""One batch's inputs, made here or in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.data.augment import draw_changes
from retrieval.data.raw import RawInputs

if TYPE_CHECKING:
    from retrieval.recipe.tables import Augmentation


class Job(NamedTuple):
    """One process's share of one batch."""

    items: NDArray[np.int64]
    epoch: int
    batch: int
    share: slice


@dataclass
class BatchMaker:
    """Makes a batch's inputs from a `Job`, here or in another process.

    Attributes:
        raw: the dataset's inputs.
        augmentation: how they change.
        seed: the run's seed.
        size: items in the whole batch.
    """

    raw: RawInputs
    augmentation: Augmentation
    seed: int
    size: int

    def __call__(self, job: Job) -> Tensor:
        """Return the inputs of the job's items."""
        draws = None
        if self.augmentation.active:
            draws = draw_changes(self.seed, job.epoch, job.batch, self.size)[job.share]
        return torch.from_numpy(self.raw.batch(job.items, self.augmentation, draws))
