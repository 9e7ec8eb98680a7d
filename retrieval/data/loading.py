"""Batches: P classes × M items for training, in order for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from retrieval.contracts import Dataset
    from retrieval.images import Preprocessing
    from retrieval.recipe import Augmentation, Sampler


class TrainBatches:
    """Training batches of P classes × M items; stateless, so that a run can go on at any step.

    All that is random follows from seed, epoch and the place in the epoch; nothing touches the global generators.

    Args:
        dataset: the items.
        indices: (n,) the items that train (`Splits.train`).
        labels: (n,) class ids of those items (`Splits.train_labels`).
        preprocessing: the backbone's; None for vectors.
        sampler: P, M and the batches in an epoch.
        augmentation: random changes to images.
        seed: the run's seed.
        workers: processes that decode where images come from files and do not fit in memory; 0: threads of this process.
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
        seed: int,
        workers: int = 0,
    ) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        """Batches in an epoch."""
        raise NotImplementedError

    def epoch(
        self, number: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs, raw uint8 (B, C, H, W) or float32 (B, F), and class ids (B,) int64, of an epoch's batches.

        Args:
            number: the epoch, from 0.
            start: the first batch to give.
            rank: this process's number; it gets the contiguous share `rank` of each batch.
            world: how many processes there are.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the worker processes, if there are any."""
        raise NotImplementedError


def inputs(
    dataset: Dataset,
    indices: NDArray[np.int64] | Sequence[int],
    preprocessing: Preprocessing | None,
    batch: int,
) -> Iterator[Tensor]:
    """Yield the items' inputs in order, `batch` at a time: raw uint8 (B, C, H, W) or float32 (B, F)."""
    raise NotImplementedError
