"""Splits of a dataset into items for training, validation and test."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from retrieval.base.arrays import Bools, Ints
from retrieval.errors import DataError, did_you_mean, refuse, some

if TYPE_CHECKING:
    from retrieval.data.datasets import Dataset
    from retrieval.recipe.tables import Split

# Indices of items in the dataset.
Items = Ints

SPLITS = ("train", "validation", "test")
ROLES = ("", "query", "gallery")
SIDES = {
    "train": ("train", ""),
    "validation": ("validation", ""),
    "valid": ("validation", ""),
    "val": ("validation", ""),
    "test": ("test", ""),
    "query": ("test", "query"),
    "gallery": ("test", "gallery"),
}
"""The split and role of the items in a folder with this name."""


def sides(column: Sequence[str] | None) -> list[str] | None:
    """Return a table's column `split` with its names mapped to `SPLITS`; unknown names stay."""
    if column is None:
        return None
    side_of = {name: side for name, (side, role) in SIDES.items() if not role}
    return [side_of.get(text.strip().lower(), text) for text in column]


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts "class 2" before "class 10"."""
    parts = [part for part in re.split(r"([0-9]+)", text) if part]
    # "²" is a digit for Python, too, but `int` does not read it.
    return tuple(
        (0, int(part), part) if part.isascii() and part.isdigit() else (1, 0, part)
        for part in parts
    )


@dataclass(frozen=True)
class Splits:
    """A dataset's items by side.

    Attributes:
        labels: for each item of the dataset, the index (N,) of its label in `classes`.
        classes: the labels in natural order ("class 2" before "class 10").
        train: training items, ascending.
        validation: items held out from training for early stopping and model selection; may be
            empty.
        query: test items used as queries.
        gallery: test items in which queries search. `None` means that each query searches all other
            queries.
        notes: sentences for the user.
        validation_query: validation items of held-out sources, which search the other validation
            items. `None` means that each validation item searches all others.
    """

    labels: Items
    classes: list[str]
    train: Items
    validation: Items
    query: Items
    gallery: Items | None = None
    notes: list[str] = field(default_factory=list)
    validation_query: Items | None = None

    @property
    def held_out(self) -> Items:
        """The test items, or else the validation items, or else the training items."""
        for side in (self.query, self.validation):
            if len(side):
                return side
        return self.train

    @property
    def validation_sides(self) -> tuple[Items, Items | None]:
        """The queries of the validation side, and the items in which they search, if others."""
        query = self.validation_query
        if query is None:
            return self.validation, None
        return query, np.setdiff1d(self.validation, query)

    @property
    def train_classes(self) -> list[str]:
        """The labels of the training classes in natural order; `train_labels` refer to them."""
        return [self.classes[i] for i in np.unique(self.labels[self.train])]

    @property
    def train_labels(self) -> Items:
        """Class ids 0…K−1 of the training items, without gaps."""
        _, numbers = np.unique(self.labels[self.train], return_inverse=True)
        return numbers.astype(np.int64)


def make_splits(dataset: Dataset, split: Split) -> Splits:
    """Divide a dataset according to a recipe's `[split]`.

    - `given` uses the dataset's own "train", "validation" and "test". In a dataset with roles,
      items may have no side: those with a role are on the test side, the others train.
    - `class` holds out the last part of the classes in natural order, or the named classes. With
      a half, this is the protocol of CUB-200 and Cars-196 (Oh Song et al., "Deep Metric Learning
      via Lifted Structured Feature Embedding", CVPR 2016, §6). The dataset's own split is ignored.
    - `item` holds out a random part of every class.

    If there are no items for validation yet, a part of the training side becomes the validation
    side. A held-out part of a class has at least two items and leaves at least two, because a query
    needs another item to find. The dataset's roles "query" and "gallery" apply to the test side.
    With `source`, some sources do not train. Their items are validation's queries: those of the
    validation classes or, with `validation_by = "item"`, of all training classes.

    The sides are always the same for the same dataset and table.

    Raises:
        DataError: sides, classes or sources do not exist, a side is empty, or no class has two
            items. The message lists every problem of the columns, or else of the split.
    """
    labels, classes = _classes(dataset)
    notes: list[str] = []
    train, validation, test = _sides(dataset, split, labels, classes)
    if not len(validation) and split.validation:
        train, validation = _take_validation(train, labels, split)
    validation_query = None
    if split.source is not None and len(validation):
        is_new = _of_new_sources(dataset, split, np.concatenate([train, validation]), notes)
        if split.validation_by == "item":
            validation = np.union1d(validation, train[is_new[train]])
        train = train[~is_new[train]]
        validation_query = validation[is_new[validation]]
    query, gallery = _roles(dataset, test, notes)
    splits = Splits(labels, classes, train, validation, query, gallery, notes, validation_query)
    problems = [
        problem for problem in (_training_problem(splits), _test_problem(splits)) if problem
    ]
    if problems:
        refuse("[split]", problems)
    return splits


def tested_splits(dataset: Dataset) -> Splits:
    """Return splits in which no item trains: all items are of the test side.

    Items of the dataset's own training and validation sides are left out.

    Raises:
        DataError: sides do not exist, or no item is left to test on.
    """
    labels, classes = _classes(dataset)
    notes: list[str] = []
    trains = np.isin(dataset.splits or [""] * len(labels), ("train", "validation"))
    query, gallery = _roles(dataset, np.flatnonzero(~trains), notes)
    if not len(query):
        raise DataError("The dataset has no items to test on.")
    none = np.empty(0, np.int64)
    return Splits(labels, classes, none, none, query, gallery, notes)


def _classes(dataset: Dataset) -> tuple[Items, list[str]]:
    """Return class ids (N,) and class names, after checking the names of sides and roles."""
    if not len(dataset):
        raise DataError("The dataset has no items.")
    # An item with a role needs no side: the role implies the test side.
    sides = SPLITS if dataset.roles is None else (*SPLITS, "")
    problems = []
    for name, column, words in (("splits", dataset.splits, sides), ("roles", dataset.roles, ROLES)):
        allowed = ", ".join(repr(word) for word in words if word)
        for value in sorted({*map(str, column or ())} - {*words}):
            hint = did_you_mean(value, words)
            problems.append(f"{name} must be {allowed}, not '{value}'.{hint}")
    if problems:
        refuse("The dataset", problems)
    texts = [label.strip() for label in dataset.labels]
    classes = sorted(set(texts), key=natural)
    numbers = {text: number for number, text in enumerate(classes)}
    return np.array([numbers[text] for text in texts], np.int64), classes


def _sides(
    dataset: Dataset,
    split: Split,
    labels: Items,
    classes: list[str],
) -> tuple[Items, Items, Items]:
    """Return training items, validation items of the dataset's own split, and test items."""
    none = np.empty(0, np.int64)
    if split.by == "given":
        return _own_split(dataset)
    if split.by == "class":
        is_test = np.isin(labels, _held_out(split.test, classes))
        return np.flatnonzero(~is_test), none, np.flatnonzero(is_test)
    if not isinstance(split.test, float | int):
        raise DataError(
            '[split] test: with by = "item" it is the fraction of each class\'s items, not a list.'
        )
    items = np.arange(len(labels))
    train, test = _part_of_each(items, labels, split.test, split.seed, "test")
    return train, none, test


def _own_split(dataset: Dataset) -> tuple[Items, Items, Items]:
    roles = dataset.roles or [""] * len(dataset)
    if dataset.splits is None and not any(roles):
        raise DataError(
            'The dataset comes with no split of its own. Set [split] by = "class" or by = "item".'
        )
    # An item without a side is on the test side if it has a role.
    sides = np.array(["test" if role else "train" for role in roles], dtype=object)
    if dataset.splits is not None:
        stated = np.array(dataset.splits, dtype=object)
        sides = np.where(stated == "", sides, stated)
    train, validation, test = (np.flatnonzero(sides == side) for side in SPLITS)
    return train, validation, test


def _held_out(test: float | Sequence[str | int], classes: list[str]) -> list[int]:
    if isinstance(test, float | int):
        # + 0.5 rounds half up; Python's round() would round 2.5 classes down and 3.5 up.
        count = int(len(classes) * test + 0.5)
        return list(range(len(classes) - count, len(classes)))
    names = dict.fromkeys(str(name).strip() for name in test)
    numbers = {name: number for number, name in enumerate(classes)}
    problems = [
        f"there is no class '{name}'.{did_you_mean(name, classes)}"
        for name in names
        if name not in numbers
    ]
    if problems:
        refuse("[split] test", [*problems, f"The dataset's classes: {some(classes, 20)}."])
    return [numbers[name] for name in names]


def _part_of_each(
    items: Items,
    labels: Items,
    part: float,
    seed: int,
    purpose: str,
) -> tuple[Items, Items]:
    """Return two sorted sides; the second gets a fraction `part` of every class."""
    random = _generator(seed, purpose)
    # One sort instead of a pass over all items for each class.
    by_class = items[np.argsort(labels[items], kind="stable")]
    starts = np.flatnonzero(np.diff(labels[by_class])) + 1
    parts = [np.empty(0, np.int64)]
    for items_of_class in np.split(by_class, starts):
        shuffled = random.permutation(items_of_class)
        rounded = int(len(shuffled) * part + 0.5)
        count = min(max(rounded, 2), len(shuffled) - 2)
        # A class of fewer than four items stays whole.
        if part and count >= 2:
            parts.append(shuffled[:count])
    second = np.sort(np.concatenate(parts))
    return np.setdiff1d(items, second), second


def _take_validation(train: Items, labels: Items, split: Split) -> tuple[Items, Items]:
    if split.validation_by == "item":
        return _part_of_each(train, labels, split.validation, split.seed, "validation")
    classes = np.unique(labels[train])
    count = max(2, int(len(classes) * split.validation + 0.5))
    if len(classes) - count < 2:
        raise DataError(
            "[split] validation_by: whole classes cannot be kept for validation when only"
            f" {len(classes)} train: at least two must stay on each side. Set validation_by ="
            ' "item", or validation = 0.'
        )
    chosen = _generator(split.seed, "validation").permutation(classes)[:count]
    is_validation = np.isin(labels[train], chosen)
    return train[~is_validation], train[is_validation]


def _of_new_sources(dataset: Dataset, split: Split, items: Items, notes: list[str]) -> Bools:
    """Return for each item of the dataset whether its source is held out; add a note on these.

    `items` are those whose sources are divided. An item without a source trains.
    """
    rows = dataset.metadata or [{}] * len(dataset)
    name = str(split.source)
    column = np.array([str(row.get(name) or "") for row in rows])
    sources = sorted({*column[items].tolist()} - {""}, key=natural)
    if len(sources) < 3:
        existing = sorted({str(key) for row in rows for key in row})
        raise DataError(
            f"[split] source: the training side has {len(sources)} values of '{name}', but"
            " two sources must train and one must not."
            f"{did_you_mean(name, existing)}"
        )
    count = min(max(1, int(len(sources) * split.validation + 0.5)), len(sources) - 2)
    order = _generator(split.seed, "source").permutation(sources)
    chosen = sorted(order[:count].tolist(), key=natural)
    notes.append(f"{name} {some(chosen)} does not train, and chooses the epoch.")
    return np.isin(column, chosen)


def _generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a generator for one purpose, so that test and validation parts are independent."""
    return np.random.default_rng([seed % 2**64, *purpose.encode()])


def _roles(dataset: Dataset, test: Items, notes: list[str]) -> tuple[Items, Items | None]:
    if not dataset.roles:
        return test, None
    roles = np.array([dataset.roles[i] for i in test], dtype=object)
    if not roles.any():
        return test, None
    query = test[roles == "query"]
    gallery = test[roles == "gallery"]
    without_role = len(test) - len(query) - len(gallery)
    if without_role:
        notes.append(
            f"{without_role:,} test items are neither query nor gallery, and are left out."
        )
    return query, gallery


def _training_problem(splits: Splits) -> str | None:
    """Return why nothing can be learned from the training side; add a note on lone items."""
    counts = np.bincount(splits.labels[splits.train], minlength=len(splits.classes))
    present = np.flatnonzero(counts)
    single = np.flatnonzero(counts == 1)
    if not len(present):
        return "nothing is left to train on."
    if len(present) == 1:
        only = splits.classes[present[0]]
        return f"only the class '{only}' is left to train on; at least two are needed."
    if counts.max() < 2:
        return "no class has two items to train on, so there is no pair of one class to learn from."
    if len(single):
        names = some([splits.classes[i] for i in single])
        ending = "es have" if len(single) > 1 else " has"
        splits.notes.append(
            f"{len(single):,} class{ending} one training item only ({names}): it serves as a"
            " negative, and is repeated where a batch takes several of a class."
        )
    return None


def _test_problem(splits: Splits) -> str | None:
    """Return why no query can find a match; add a note on queries without a match."""
    labels = splits.labels
    query = splits.query
    gallery = splits.gallery
    if not len(query):
        if gallery is None:
            return "nothing is left to test on."
        return "no item is a query."
    if gallery is None:
        if np.bincount(labels[query]).max() < 2:
            return "no test class has two items, so no query can find another of its class."
        return None
    if not len(gallery):
        return "there are queries but no gallery: give test items the role 'gallery'."
    has_match = np.isin(labels[query], labels[gallery])
    alone = int((~has_match).sum())
    if alone == len(query):
        return "no query has an item of its class in the gallery, so no query can find a match."
    if alone:
        splits.notes.append(f"{alone:,} queries have no item of their class in the gallery.")
    return None
