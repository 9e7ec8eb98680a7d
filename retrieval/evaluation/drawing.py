"""Draw pairs for verification: balanced, in folds that share no class if classes suffice.

The pairs are chosen as those of Labeled Faces in the Wild (Huang et al., TR 07-49, 2007, section
3): a pair of one class by class and then by item, a pair of two classes likewise, so that a large
class does not fill the list.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from retrieval.data.error_lists import refuse
from retrieval.data.pairs import LabelledPairs

Items = NDArray[np.int64]

FOLDS = 10
PER_FOLD = 300
ENOUGH = 30
"""The fewest pairs of each kind in each fold for which folds are kept apart."""


def draw_pairs(
    items: Items,
    labels: Items,
    *,
    count: int | None = None,
    folds: int | None = None,
    seed: int = 0,
) -> LabelledPairs:
    """Draw pairs of items, as many of one class as of two, the same number of each in every fold.

    No two folds share a class if the classes suffice; else no item; else (few items) no pair.
    Memory grows with items and pairs.

    Args:
        items: (n,) the items to draw from.
        labels: (n,) their class numbers.
        count: how many pairs; a multiple of 2 × `folds`. By default 300 of each kind in each fold
            (6,000 in ten), or as many as there are.
        folds: how many folds; by default ten, or as many as there are pairs for.
        seed: of the draw: the same seed, items and labels give the same pairs.

    Raises:
        DataError: there are not enough pairs, or `count` and `folds` do not fit.
    """
    fold_count = FOLDS if folds is None else folds
    problems = []
    if fold_count < 2:
        problems.append(
            f"folds = {fold_count} is too few: the threshold of a fold is chosen on the others, so"
            " there must be two at least."
        )
    elif count is not None and (count < 2 * fold_count or count % (2 * fold_count)):
        problems.append(
            f"{count:,} pairs cannot be drawn, half of them same, in {fold_count} equal folds: take"
            f" a multiple of {2 * fold_count}."
        )
    most = [_same_capacity(labels), _different_capacity(labels)]
    words = (
        "no class has two items, so no two are the same",
        "they are of one class, so no two differ",
    )
    problems += [f"{word}." for number, word in zip(most, words, strict=True) if not number]
    if not problems and folds is None and count is None:
        fold_count = min(fold_count, *most)
    per_fold = PER_FOLD if count is None else count // (2 * max(fold_count, 1))
    if not problems and (
        fold_count < 2 or (min(most) < fold_count * (per_fold if count is not None else 1))
    ):
        problems.append(
            f"there are no more pairs than {most[0]:,} of one class and {most[1]:,} of two classes;"
            f" {fold_count if fold_count > 1 else 2} folds"
            f" {f'of {per_fold:,} of each kind ' if count is not None else ''}need more. Draw"
            " fewer, or in fewer folds."
        )
    if problems:
        refuse(f"Pairs of {len(items):,} items", problems)
    random = np.random.default_rng([seed % 2**64, *b"verification"])
    groups, number = _groups(labels, fold_count, per_fold, count is not None, random)
    if groups is None:
        return _undivided(items, labels, fold_count, min(per_fold, min(most) // fold_count), random)
    parts = []
    for group in groups:
        for draw in (_same, _different):
            parts.append(group[draw(labels[group], number, random)])
    rows = np.concatenate(parts)
    return LabelledPairs(
        items[rows[:, 0]],
        items[rows[:, 1]],
        np.tile(np.repeat([True, False], number), fold_count),
        np.repeat(np.arange(fold_count), 2 * number),
        _names(fold_count),
    )


def make_folds(
    same: NDArray[np.bool_], folds: int | None = None, seed: int = 0
) -> tuple[Items, tuple[str, ...]]:
    """Return a fold for each pair (P,), at random and evenly in both kinds, and the folds' names.

    By default there are ten, or as many as there are pairs of the rarer kind.

    Raises:
        DataError: there are fewer than two folds, or fewer pairs of a kind than folds.
    """
    least = int(min(same.sum(), (~same).sum()))
    fold_count = min(FOLDS, least) if folds is None else folds
    if fold_count < 2 or fold_count > least:
        refuse(
            f"{int(same.sum()):,} same and {int((~same).sum()):,} different pairs",
            [
                f"they cannot be divided into {max(fold_count, 2) if folds is None else folds}"
                " folds: there must be two folds at least, and in each a pair of both kinds."
            ],
        )
    random = np.random.default_rng([seed % 2**64, *b"folds"])
    fold = np.empty(len(same), np.int64)
    for kind in (True, False):
        rows = random.permutation(np.flatnonzero(same == kind))
        fold[rows] = np.arange(len(rows)) % fold_count
    return fold, _names(fold_count)


def _names(folds: int) -> tuple[str, ...]:
    return tuple(str(k + 1) for k in range(folds))


def _undivided(
    items: Items, labels: Items, folds: int, per_fold: int, random: np.random.Generator
) -> LabelledPairs:
    """Draw from all items; the folds share items, but no pair."""
    rows = np.concatenate([draw(labels, per_fold * folds, random) for draw in (_same, _different)])
    rows[: per_fold * folds] = random.permutation(rows[: per_fold * folds])
    fold = np.tile(np.arange(folds), 2 * per_fold)
    order = np.argsort(fold, kind="stable")
    same = np.repeat([True, False], per_fold * folds)
    return LabelledPairs(
        items[rows[order, 0]],
        items[rows[order, 1]],
        same[order],
        fold[order].astype(np.int64),
        _names(folds),
    )


def _groups(
    labels: Items, folds: int, per_fold: int, exact: bool, random: np.random.Generator
) -> tuple[list[Items] | None, int]:
    """Return each fold's rows (None: folds cannot be kept apart), and how many pairs to draw."""
    need = per_fold if exact else min(per_fold, ENOUGH)
    for dealt in (_by_class(labels, folds, random), _by_item(labels, folds, random)):
        groups = [np.flatnonzero(dealt == k) for k in range(folds)]
        available = min(
            min(_same_capacity(labels[g]), _different_capacity(labels[g])) for g in groups
        )
        if available >= need:
            return groups, min(per_fold, available)
    return None, 0


def _by_class(labels: Items, folds: int, random: np.random.Generator) -> Items:
    """Return a fold for each row, of whole classes; classes that have a pair are dealt first."""
    classes, number, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    order = random.permutation(len(classes))
    order = order[np.argsort(-np.minimum(sizes[order], 2), kind="stable")]
    fold = np.empty(len(classes), np.int64)
    fold[order] = np.arange(len(classes)) % folds
    return fold[number]


def _by_item(labels: Items, folds: int, random: np.random.Generator) -> Items:
    """Return a fold for each row: every class dealt out evenly, starting at another fold each."""
    dealt = np.empty(len(labels), np.int64)
    start = 0
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        dealt[rows] = (start + np.arange(len(rows))) % folds
        start += len(rows)
    return dealt


def _same_capacity(labels: Items) -> int:
    sizes = np.unique(labels, return_counts=True)[1]
    return int((sizes * (sizes - 1) // 2).sum())


def _different_capacity(labels: Items) -> int:
    return len(labels) * (len(labels) - 1) // 2 - _same_capacity(labels)


def _same(labels: Items, count: int, random: np.random.Generator) -> Items:
    """Return pairs of rows (count, 2) of one class, as evenly from all classes as they can be."""
    order = np.argsort(labels, kind="stable")
    sizes = np.unique(labels, return_counts=True)[1]
    starts = np.cumsum(sizes) - sizes
    room = sizes * (sizes - 1) // 2
    share = np.zeros_like(room)
    while left := count - int(share.sum()):
        open_ = random.permutation(np.flatnonzero(share < room))
        quota, extra = divmod(left, len(open_))
        more = np.full(len(open_), quota)
        more[:extra] += 1
        share[open_] += np.minimum(more, room[open_] - share[open_])
    parts = []
    for c in np.flatnonzero(share):
        chosen = random.choice(int(room[c]), int(share[c]), replace=False)
        # number t of the pairs (i, j), i < j, counted by j: t = j (j − 1) / 2 + i
        j = ((1 + np.sqrt(8.0 * chosen + 1)) / 2).astype(np.int64)
        j -= j * (j - 1) // 2 > chosen  # the root's rounding
        j += j * (j + 1) // 2 <= chosen
        i = chosen - j * (j - 1) // 2
        flip = random.random(len(chosen)) < 0.5
        parts.append(
            order[starts[c] + np.stack([np.where(flip, j, i), np.where(flip, i, j)], axis=1)]
        )
    return np.concatenate(parts).astype(np.int64)


def _different(labels: Items, count: int, random: np.random.Generator) -> Items:
    """Return `count` pairs of rows (count, 2) of two classes, no two of them the same pair."""
    size = len(labels)
    kept = np.empty((0, 2), np.int64)
    for proposed in _proposals(labels, count, random):
        both = np.concatenate([kept, proposed])
        number = both.min(axis=1) * size + both.max(axis=1)
        first = np.sort(np.unique(number, return_index=True)[1])
        kept = both[first[:count]]
        if len(kept) == count:
            return kept
    raise AssertionError  # the proposals do not end


def _proposals(labels: Items, count: int, random: np.random.Generator) -> Iterator[Items]:
    """Yield pairs of rows of two classes: eight times classes are equally likely, then items.

    The first alone may never come to an end, where most pairs are of two large classes among many
    small ones.
    """
    order = np.argsort(labels, kind="stable")
    sizes = np.unique(labels, return_counts=True)[1]
    starts = np.cumsum(sizes) - sizes
    for _ in range(8):
        a = random.integers(len(sizes), size=count)
        b = (a + random.integers(1, len(sizes), size=count)) % len(sizes)
        yield np.stack([order[starts[c] + random.integers(sizes[c])] for c in (a, b)], axis=1)
    pairs_by_class = sizes * (len(labels) - sizes)
    while True:
        a = random.choice(len(sizes), count, p=pairs_by_class / pairs_by_class.sum())
        first_row = starts[a] + random.integers(sizes[a])
        # any row of the other classes: those before the class, then those after it
        second_row = random.integers(len(labels) - sizes[a])
        second_row += np.where(second_row >= starts[a], sizes[a], 0)
        yield order[np.stack([first_row, second_row], axis=1)]
