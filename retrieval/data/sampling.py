"""Which items make each training batch: P classes × M items."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.recipe.tables import Sampler


def batches_in_epoch(items: int, sampler: Sampler) -> int:
    """Return how many batches an epoch has: what the recipe says, or items / (P × M), at least one."""
    return sampler.batches or max(1, items // (sampler.classes * sampler.items))


def check_sampler(labels: NDArray[np.int64], sampler: Sampler) -> None:
    """Refuse more classes per batch than there are.

    Raises:
        DataError: fewer than P classes train.
    """
    classes = len(np.unique(labels))
    if classes < sampler.classes:
        raise DataError(
            f"[sampler] classes: a batch takes {sampler.classes} classes, and only {classes} train."
            f" Set classes = {classes} or fewer."
        )


def draw_epoch(
    labels: NDArray[np.int64], sampler: Sampler, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return the batches of an epoch, (batches, P × M) positions in `labels`; the same for the same
    seed and epoch.

    The draw is pytorch-metric-learning's `MPerClassSampler`'s, to the last item: P classes at
    random for each batch, of each M items without repetition, or with repetition where the class
    has fewer. Items of a class stand together. Its own would draw from a generator that all threads
    share, and loads scikit-learn, pandas and FAISS.

    Args:
        labels: (n,) class ids.
        sampler: P, M and the number of batches.
        seed: the run's seed.
        epoch: number of the epoch.
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
