"""Which items make each training batch: P classes × M items."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils import common_functions

from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.recipe.tables import Sampler

_swap = threading.Lock()


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
            f"[sampler] classes: a batch takes {sampler.classes} classes, and only {classes} train. "
            f"Set classes = {classes} or fewer."
        )


def draw_epoch(labels: NDArray[np.int64], sampler: Sampler, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the batches of an epoch, (batches, P × M) positions in `labels`; the same for the same seed and epoch.

    The draw is pytorch-metric-learning's `MPerClassSampler`: P classes at random for each batch, of each M items
    without repetition, or with repetition where the class has fewer. Items of a class stand together.

    Args:
        labels: (n,) class ids.
        sampler: P, M and the number of batches.
        seed: the run's seed.
        epoch: number of the epoch.
    """
    size = sampler.classes * sampler.items
    count = batches_in_epoch(len(labels), sampler)
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed % 2**64, epoch])))
    draw = MPerClassSampler(labels, sampler.items, size, count * size)
    # it draws from a global of its library, all at once: lend it a generator of ours for that long
    with _swap:
        before = common_functions.NUMPY_RANDOM
        common_functions.NUMPY_RANDOM = random
        try:
            drawn = list(draw)
        finally:
            common_functions.NUMPY_RANDOM = before
    return np.asarray(drawn, dtype=np.int64).reshape(count, size)
