"""Samplers of random items, of classes in the same group, and of similar classes."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt
from retrieval.base.arrays import Floats64, Ints
from retrieval.errors import DataError
from retrieval.helpers import some
from retrieval.plugin import BatchSampler, TrainingItems, check_classes, rows_by_class, rows_of

Batches = list[Ints]


class RandomItems(BatchSampler):
    """P × M random items of any classes, for classifiers and unlabelled data.

    No item repeats before all items have been drawn, as with a shuffled data loader.
    """

    def draw(self, items: TrainingItems, epoch: int, random: np.random.RandomState) -> Batches:
        """Return the batches of an epoch."""
        size = items.classes * items.rows
        count = len(items.labels)
        rounds = -(-items.batches * size // count)
        order = np.concatenate([random.permutation(count) for _ in range(rounds)])
        return np.split(order[: items.batches * size], items.batches)


class Hierarchical(BatchSampler):
    """P classes from few coarser groups, such as species of two genera, and M items of each class.

    Classes of one group look alike, so a batch holds harder negatives. If a group has too few
    classes, further groups fill the batch.
    """

    def __init__(self, level: str, groups: PositiveInt = 2) -> None:
        """Build the sampler.

        Args:
            level: column of metadata with the coarser label, such as `genus`.
            groups: number of groups in a batch.
        """
        self.level = level
        self.groups = groups

    def batches(self, items: TrainingItems) -> int:
        """Return the number of batches, after checking classes and groups."""
        self._groups(items)
        check_classes(items)
        return items.batches

    def draw(self, items: TrainingItems, epoch: int, random: np.random.RandomState) -> Batches:
        """Return the batches of an epoch."""
        groups = self._groups(items)
        # Rounded up, so that the groups together have enough classes for a batch.
        share = -(-items.classes // self.groups)
        drawn = []
        for _ in range(items.batches):
            first = []
            rest = []
            for number in random.permutation(len(groups)):
                group = groups[number]
                classes = [group[i] for i in random.permutation(len(group))]
                first += classes[:share]
                rest += classes[share:]
            drawn.append(rows_of((first + rest)[: items.classes], items, random))
        return drawn

    def _groups(self, items: TrainingItems) -> list[list[Ints]]:
        """Return, for each group, the rows of the items of each of its classes."""
        columns = items.metadata or [{}] * len(items.labels)
        groups: dict[str, list[Ints]] = {}
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
                " all items of a class one value."
            )
        return list(groups.values())


class HardClasses(BatchSampler):
    """P classes that the model confuses, and M items of each.

    A batch starts with a random class. Until it has P classes, it adds the class whose mean
    embedding is nearest to that of a class in the batch. This is the "hard negative class mining"
    of Sohn, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective" (NIPS 2016),
    except that the paper uses one or two examples of a class instead of its mean. The model embeds
    all training items once per epoch to compute the means.
    """

    uses_embeddings = True

    def __init__(self, candidates: Annotated[int, Field(ge=2)] = 200) -> None:
        """Build the sampler.

        Args:
            candidates: number of random classes from which the classes of a batch are chosen. With
                fewer candidates, batches are more random.
        """
        self.candidates = candidates

    def batches(self, items: TrainingItems) -> int:
        """Return the number of batches, after checking that a batch has enough classes."""
        check_classes(items)
        if self.candidates < items.classes:
            raise DataError(
                f"[sampler] candidates: a batch of {items.classes} classes cannot be chosen from"
                f" {self.candidates}. Set candidates = {items.classes} or more."
            )
        return items.batches

    def draw(self, items: TrainingItems, epoch: int, random: np.random.RandomState) -> Batches:
        """Return the batches of an epoch; if there are no embeddings, their classes are random."""
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


def _nearest(means: Floats64, count: int) -> list[int]:
    """Return `count` rows: the first row, then repeatedly the row nearest to any chosen row."""
    chosen = [0]
    nearest = np.full(len(means), np.inf)
    while len(chosen) < count:
        nearest = np.minimum(nearest, np.square(means - means[chosen[-1]]).sum(1))
        # A class is chosen once.
        nearest[chosen] = np.inf
        chosen.append(int(nearest.argmin()))
    return chosen
