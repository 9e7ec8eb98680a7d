"""Which items train, which choose, which are held out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from retrieval.contracts import Dataset
    from retrieval.recipe import Split


@dataclass(frozen=True)
class Splits:
    """A dataset's items by side.

    Attributes:
        labels: (N,) index into `classes` of every item of the dataset.
        classes: the labels' texts in natural order ("class 2" before "class 10").
        train: items that train, ascending.
        validation: items kept from the training side for early stopping and every choice; may be empty.
        query: test items that are searched for.
        gallery: test items that are searched; None: the queries themselves, each without itself.
        notes: what the user should know, one sentence each.
    """

    labels: NDArray[np.int64]
    classes: list[str]
    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    query: NDArray[np.int64]
    gallery: NDArray[np.int64] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def train_classes(self) -> list[str]:
        """The texts of the classes that train, in natural order; `train_labels` index it."""
        return [self.classes[i] for i in np.unique(self.labels[self.train])]

    @property
    def train_labels(self) -> NDArray[np.int64]:
        """(len(train),) class ids 0…K−1 of the items `train`, without gaps."""
        return np.unique(self.labels[self.train], return_inverse=True)[1].astype(np.int64)


def make_splits(dataset: Dataset, split: Split) -> Splits:
    """Divide a dataset as a recipe's `[split]` says."""
    raise NotImplementedError
