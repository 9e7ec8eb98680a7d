"""Samplers beside P classes × M items: any items, classes of one group, classes that are near."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from retrieval.errors import DataError
from retrieval.plugin import BatchSampler, TrainingItems, rows_by_class, rows_of, some

Batches = list[NDArray[np.int64]]


class RandomItems(BatchSampler):
    """P × M random items, whatever their classes, as for classifiers and unlabelled data.

    Each item comes once before any comes again, as with a shuffled data loader.
    """

    def draw(self, items: TrainingItems, epoch: int, random: np.random.RandomState) -> Batches:
        """Return the batches of an epoch."""
        size, count = items.classes * items.rows, len(items.labels)
        rounds = -(-items.batches * size // count)
        order = np.concatenate([random.permutation(count) for _ in range(rounds)])
        return np.split(order[: items.batches * size], items.batches)


class Hierarchical(BatchSampler):
    """P classes of few coarser groups, such as species of two genera, and M items of each.

    Classes of one group look alike, so a batch holds harder negatives. A group with too few classes
    gives those that it has, and further groups the others.
    """

    def __init__(self, level: str, groups: Annotated[int, Field(ge=1)] = 2) -> None:
        """Choose groups.

        Args:
            level: the column of metadata that holds the coarser label, such as `genus`; one of
                `[evaluate] levels`.
            groups: number of groups in a batch.
        """
        self.level, self.groups = level, groups

    def batches(self, items: TrainingItems) -> int:
        """Return the number of batches, after checking classes and groups."""
        groups = self._groups(items)
        classes = sum(map(len, groups))
        if classes < items.classes:
            raise DataError(
                f"[sampler] classes: a batch takes {items.classes} classes, and only {classes}"
                f" train. Set classes = {classes} or fewer."
            )
        return items.batches

    def draw(self, items: TrainingItems, epoch: int, random: np.random.RandomState) -> Batches:
        """Return the batches of an epoch."""
        groups = self._groups(items)
        share = -(-items.classes // self.groups)
        drawn = []
        for _ in range(items.batches):
            first, rest = [], []
            for number in random.permutation(len(groups)):
                group = groups[number]
                classes = [group[i] for i in random.permutation(len(group))]
                first += classes[:share]
                rest += classes[share:]
            drawn.append(rows_of((first + rest)[: items.classes], items, random))
        return drawn

    def _groups(self, items: TrainingItems) -> list[list[NDArray[np.int64]]]:
        """Return the positions of the items of each class, by group."""
        columns = items.metadata or [{}] * len(items.labels)
        groups: dict[str, list[NDArray[np.int64]]] = {}
        faults = []
        for rows in rows_by_class(items.labels):
            values = {str(columns[row].get(self.level) or "") for row in rows}
            if len(values) > 1 or "" in values:
                faults.append(", ".join(sorted(value or "nothing" for value in values)))
            groups.setdefault(min(values), []).append(rows)
        if faults:
            raise DataError(
                f"[sampler] level: {len(faults)} of {sum(map(len, groups.values()))} classes have"
                f" no single value in the column '{self.level}' (they have {some(faults)}). Give"
                " each class one value."
            )
        return list(groups.values())


class HardClasses(BatchSampler):
    """P classes that the model confuses, and M items of each.

    A batch begins with a random class. Then the class whose mean embedding is nearest to one that
    the batch has joins it, until there are P. This is "hard negative class mining" of Sohn,
    "Improved Deep Metric Learning with Multi-class N-pair Loss Objective" (NIPS 2016), with
    the mean of a class where the paper embeds one or two examples. All training items pass through
    the model once in each epoch.
    """

    uses_embeddings = True

    def __init__(self, candidates: Annotated[int, Field(ge=2)] = 200) -> None:
        """Choose candidates.

        Args:
            candidates: number of random classes that a batch's classes are chosen from; fewer make
                batches more random.
        """
        self.candidates = candidates

    def batches(self, items: TrainingItems) -> int:
        """Return the number of batches, after checking that a batch has enough classes."""
        classes = len(np.unique(items.labels))
        if min(classes, self.candidates) < items.classes:
            least = f"{classes} train" if classes < items.classes else "the candidates are fewer"
            raise DataError(
                f"[sampler] classes: a batch takes {items.classes} classes, and only {least}. Set"
                f" classes = {min(classes, self.candidates)} or fewer."
            )
        return items.batches

    def draw(self, items: TrainingItems, epoch: int, random: np.random.RandomState) -> Batches:
        """Return the batches of an epoch; without embeddings, their classes are random."""
        by_class = rows_by_class(items.labels)
        means = None
        if items.embeddings is not None:
            means = np.stack(
                [items.embeddings[rows].mean(0, dtype=np.float64) for rows in by_class]
            )
        drawn = []
        for _ in range(items.batches):
            chosen = random.permutation(len(by_class))[: self.candidates]
            if means is not None:
                chosen = chosen[_nearest(means[chosen], items.classes)]
            drawn.append(rows_of([by_class[i] for i in chosen[: items.classes]], items, random))
        return drawn


def _nearest(means: NDArray[np.float64], count: int) -> list[int]:
    """Return the first row, and again and again the row that is nearest to one of those."""
    chosen = [0]
    nearest = np.full(len(means), np.inf)
    while len(chosen) < count:
        nearest = np.minimum(nearest, np.square(means - means[chosen[-1]]).sum(1))
        nearest[chosen] = np.inf
        chosen.append(int(nearest.argmin()))
    return chosen
