"""Verification of pairs ("the same or not?"): drawing pairs, and metrics of their distances.

A pair is *accepted* ("the same") if its distance is at most a threshold. The false accept rate
(FAR) is the share of different pairs that are accepted, and the true accept rate (TAR) the share of
same pairs that are. For P pairs, time grows as P log P and memory as P.

Pairs are drawn as in Labeled Faces in the Wild (Huang et al., TR 07-49, 2007, section 3): first a
class or two classes, then their items, so that a large class does not dominate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrieval.data.error_lists import refuse
from retrieval.data.pairs import LabelledPairs, fold_problems
from retrieval.errors import DataError
from retrieval.model.labels import read_labels, read_values

Floats = NDArray[np.float64]

FAR_LEVELS = (1e-2, 1e-3)


@dataclass(frozen=True)
class Roc:
    """The ROC curve: straight lines between T points, from (0, 0) to (1, 1).

    Each distinct distance is a threshold and gives a point.

    Attributes:
        threshold: (T,), ascending distances; the first is −∞, which accepts nothing.
        far: (T,), the false accept rate at each threshold.
        tar: (T,), the true accept rate at each threshold.
    """

    threshold: Floats
    far: Floats
    tar: Floats


@dataclass(frozen=True)
class Verification:
    """The result of `verification`.

    Attributes:
        values: "auc", "eer", "accuracy" (the mean over folds), "accuracy_se" (its standard error),
            and, from 100 and 1,000 different pairs on, "tar_at_far_0.01" and "tar_at_far_0.001".
        roc: the ROC curve.
        accuracy: (K,), the share of each fold's pairs that are judged correctly.
        threshold: (K,), the threshold of each fold, chosen on the other folds.
    """

    values: dict[str, float]
    roc: Roc
    accuracy: Floats
    threshold: Floats


def verification(
    distances: ArrayLike, same: ArrayLike, folds: ArrayLike, *, far: Sequence[float] = FAR_LEVELS
) -> Verification:
    """Return the verification metrics of pairs.

    AUC is the probability that a same pair is nearer than a different one; ties count half. The
    equal error rate (EER) is the FAR at which FAR = 1 − TAR. Accuracy follows Labeled Faces in the
    Wild (Huang et al., TR 07-49, 2007): each fold is judged by the threshold that is best on all
    *other* folds. Its standard error is σ / √K, with σ the standard deviation of the accuracies of
    the K folds (over K − 1).

    Args:
        distances: (P,), the distance of each pair; smaller is closer.
        same: (P,), whether a pair is the same: true or false, or 1 or 0.
        folds: (P,), the fold of each pair: whole numbers or text.
        far: false accept rates at which to return the true accept rate, if there are enough
            different pairs to measure the rate.

    Raises:
        DataError: shapes do not fit, distances are not finite, all pairs are of one kind, `same`
            has other values, or the folds do not allow choosing a threshold.
    """
    d = np.asarray(distances, dtype=np.float64)
    s = _kinds(same)
    groups = read_labels(folds, "folds", "Leave those pairs out, or give each pair its fold.")
    _check(d, s, groups)
    names, fold = np.unique(groups, return_inverse=True)
    if problems := fold_problems(s, fold, [str(name) for name in names]):
        refuse("Pairs", problems)
    roc = roc_curve(d, s)
    accuracy, threshold = fold_accuracy(d, s, fold)
    values = {
        "auc": float(np.trapezoid(roc.tar, roc.far)),
        "eer": equal_error_rate(roc),
        "accuracy": float(accuracy.mean()),
        "accuracy_se": float(accuracy.std(ddof=1) / np.sqrt(len(accuracy))),
    }
    different = int((~s).sum())
    for rate in far:
        if different * rate >= 1 - 1e-9:
            values[f"tar_at_far_{rate:g}"] = float(roc.tar[roc.far <= rate * (1 + 1e-12)][-1])
    return Verification(values, roc, accuracy, threshold)


def roc_curve(distances: Floats, same: NDArray[np.bool_]) -> Roc:
    """Return the ROC curve of pairs, with one point per distinct distance."""
    from sklearn import metrics

    far, tar, similarity = metrics.roc_curve(same, -distances, drop_intermediate=False)
    return Roc(-similarity, far, tar)


def equal_error_rate(roc: Roc) -> float:
    """Return the FAR at which FAR = 1 − TAR, on the lines between the curve's points."""
    gap = roc.far + roc.tar - 1  # strictly ascending from −1 to 1
    i = int(np.searchsorted(gap, 0.0))
    part = gap[i - 1] / (gap[i - 1] - gap[i])
    return float(roc.far[i - 1] + part * (roc.far[i] - roc.far[i - 1]))


def fold_accuracy(
    distances: Floats, same: NDArray[np.bool_], fold: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return each fold's accuracy (K,) and the threshold (K,) that is best on all other folds.

    A threshold is half-way between the two distances that it separates. Of equally good thresholds,
    the smallest is used.
    """
    order = np.argsort(distances, kind="stable")
    d, s, f = distances[order], same[order], fold[order]
    accuracy, threshold = [], []
    for k in range(int(fold.max()) + 1):
        judged = f == k
        t = _best_threshold(d[~judged], s[~judged])
        threshold.append(t)
        accuracy.append(((d[judged] <= t) == s[judged]).mean())
    return np.array(accuracy), np.array(threshold)


def _best_threshold(distances: Floats, same: NDArray[np.bool_]) -> float:
    """Return the threshold that judges most pairs correctly; distances must ascend."""
    # at i: the number of correct judgements, up to a constant, if the i nearest pairs are accepted
    right = np.concatenate([[0], np.cumsum(np.where(same, 1, -1))])
    # a threshold never separates equal distances
    cut = np.concatenate([[True], distances[1:] > distances[:-1], [True]])
    i = int(np.where(cut, right, -len(same) - 1).argmax())
    if i == 0:
        return float(np.nextafter(distances[0], -np.inf))
    if i == len(distances):
        return float(distances[-1])
    middle = distances[i - 1] / 2 + distances[i] / 2
    return float(middle if middle < distances[i] else distances[i - 1])


def _kinds(same: ArrayLike) -> NDArray[np.bool_]:
    """Return which pairs are the same; refuse NaN, -1 and "False", which are true in Python."""
    flags = read_values(
        same, "pairs' kinds", "Leave those pairs out, or say of each whether it is the same."
    )
    for row, flag in enumerate(flags.tolist()):
        if isinstance(flag, str) or flag not in (0, 1):
            raise DataError(
                f"`same` must be true or false, or 1 or 0, for each pair, but row {row} is"
                f" {flag!r}."
            )
    return flags.astype(bool)


def _check(distances: Floats, same: NDArray[np.bool_], folds: NDArray[Any]) -> None:
    if distances.ndim != 1 or not distances.shape == same.shape == folds.shape:
        raise DataError(
            f"There are distances of shape {distances.shape}, kinds of shape {same.shape} and folds"
            f" of shape {folds.shape}: each pair needs one distance, one kind and one fold."
        )
    if bad := int((~np.isfinite(distances)).sum()):
        raise DataError(
            f"{bad:,} of {len(distances):,} distances are NaN or infinite. Perhaps training has"
            " diverged, or the combiner divides by 0."
        )
    if same.all() or not same.any():
        kind = "the same" if len(same) and same.all() else "different" if len(same) else "missing"
        raise DataError(f"All {len(same):,} pairs are {kind}: both kinds are needed.")


Items = NDArray[np.int64]

FOLDS = 10
PER_FOLD = 300  # pairs of each kind
ENOUGH = 30
"""Folds share no class or no item if each fold then has at least this many pairs of each kind."""


def draw_pairs(
    items: Items,
    labels: Items,
    *,
    count: int | None = None,
    folds: int | None = None,
    seed: int = 0,
) -> LabelledPairs:
    """Draw pairs in folds, with equally many pairs of one class and of two classes in each fold.

    Folds share no class if there are enough classes, otherwise no item or, if there are few items,
    no pair.

    Args:
        items: (n,), the items to draw from.
        labels: (n,), the items' class numbers.
        count: number of pairs, a multiple of 2 × `folds`. By default 300 of each kind per fold
            (6,000 in ten folds), or as many as exist.
        folds: number of folds, by default ten, or as many as the pairs allow.
        seed: seed of the draw. The same seed, items and labels give the same pairs.

    Raises:
        DataError: there are not enough pairs, or `count` and `folds` do not fit.
    """
    fold_count = FOLDS if folds is None else folds
    problems = []
    if fold_count < 2:
        problems.append(
            f"folds = {fold_count} is too few: a fold's threshold is chosen on the other folds, so"
            " at least two are needed."
        )
    elif count is not None and (count < 2 * fold_count or count % (2 * fold_count)):
        problems.append(
            f"{count:,} pairs cannot be drawn, half of them same, in {fold_count} equal folds: take"
            f" a multiple of {2 * fold_count}."
        )
    most = _capacities(labels)
    if not most[0]:
        problems.append("no class has two items, so no two are the same.")
    if not most[1]:
        problems.append("they are of one class, so no two differ.")
    if not problems and folds is None and count is None:
        fold_count = min(fold_count, *most)
    per_fold = PER_FOLD if count is None else count // (2 * max(fold_count, 1))
    if not problems and (
        fold_count < 2 or (min(most) < fold_count * (per_fold if count is not None else 1))
    ):
        problems.append(
            f"there are only {most[0]:,} pairs of one class and {most[1]:,} of two classes;"
            f" {fold_count if fold_count > 1 else 2} folds"
            f" {f'of {per_fold:,} of each kind ' if count is not None else ''}need more. Draw"
            " fewer pairs or folds."
        )
    if problems:
        refuse(f"Pairs of {len(items):,} items", problems)
    random = np.random.default_rng([seed % 2**64, *b"verification"])
    groups, number = _groups(labels, fold_count, per_fold, count is not None, random)
    if groups is None:  # folds share items, but no pair
        number = min(per_fold, min(most) // fold_count)
        same, different = (
            draw(labels, number * fold_count, random) for draw in (_same, _different)
        )
        same = random.permutation(same)
        parts = [rows[k::fold_count] for k in range(fold_count) for rows in (same, different)]
    else:
        parts = [
            group[draw(labels[group], number, random)]
            for group in groups
            for draw in (_same, _different)
        ]
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
    """Return a random fold for each pair (P,), and the folds' names.

    Each kind of pairs is spread evenly over the folds. By default there are ten folds, or as many
    as there are pairs of the rarer kind.

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
                " folds: there must be at least two folds, each with a pair of each kind."
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


def _groups(
    labels: Items, folds: int, per_fold: int, exact: bool, random: np.random.Generator
) -> tuple[list[Items] | None, int]:
    """Return each fold's rows, or `None` if folds must share items, and its pairs of each kind."""
    need = per_fold if exact else min(per_fold, ENOUGH)
    for dealt in (_by_class(labels, folds, random), _by_item(labels, folds, random)):
        groups = [np.flatnonzero(dealt == k) for k in range(folds)]
        available = min(min(_capacities(labels[rows])) for rows in groups)
        if available >= need:
            return groups, min(per_fold, available)
    return None, 0


def _by_class(labels: Items, folds: int, random: np.random.Generator) -> Items:
    """Return a fold for each row; a class stays in one fold, and classes with pairs come first."""
    classes, number, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    order = random.permutation(len(classes))
    order = order[np.argsort(-np.minimum(sizes[order], 2), kind="stable")]
    fold = np.empty(len(classes), np.int64)
    fold[order] = np.arange(len(classes)) % folds
    return fold[number]


def _by_item(labels: Items, folds: int, random: np.random.Generator) -> Items:
    """Return a fold for each row, with every class spread evenly over the folds."""
    dealt = np.empty(len(labels), np.int64)
    start = 0
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        dealt[rows] = (start + np.arange(len(rows))) % folds
        start += len(rows)
    return dealt


def _capacities(labels: Items) -> tuple[int, int]:
    """Return the number of pairs of one class, and of two classes."""
    sizes = np.unique(labels, return_counts=True)[1]
    same = int((sizes * (sizes - 1) // 2).sum())
    return same, len(labels) * (len(labels) - 1) // 2 - same


def _same(labels: Items, count: int, random: np.random.Generator) -> Items:
    """Return pairs of rows (count, 2) of one class, as evenly from all classes as possible."""
    order = np.argsort(labels, kind="stable")
    sizes = np.unique(labels, return_counts=True)[1]
    starts = np.cumsum(sizes) - sizes
    room = sizes * (sizes - 1) // 2
    share = np.zeros_like(room)
    while missing := count - int(share.sum()):
        classes = random.permutation(np.flatnonzero(share < room))
        quota, extra = divmod(missing, len(classes))
        more = np.full(len(classes), quota)
        more[:extra] += 1
        share[classes] += np.minimum(more, room[classes] - share[classes])
    parts = []
    for c in np.flatnonzero(share):
        chosen = random.choice(int(room[c]), int(share[c]), replace=False)
        # pair number t is (i, j), i < j, with t = j (j − 1) / 2 + i
        j = ((1 + np.sqrt(8.0 * chosen + 1)) / 2).astype(np.int64)
        j -= j * (j - 1) // 2 > chosen  # correct the rounding of the root
        j += j * (j + 1) // 2 <= chosen
        i = chosen - j * (j - 1) // 2
        flip = random.random(len(chosen)) < 0.5
        pairs = np.stack([np.where(flip, j, i), np.where(flip, i, j)], axis=1)
        parts.append(order[starts[c] + pairs])
    return np.concatenate(parts).astype(np.int64)


def _different(labels: Items, count: int, random: np.random.Generator) -> Items:
    """Return `count` distinct pairs of rows (count, 2) of two classes."""
    size = len(labels)
    kept = np.empty((0, 2), np.int64)
    for proposed in _proposals(labels, count, random):
        both = np.concatenate([kept, proposed])
        number = both.min(axis=1) * size + both.max(axis=1)
        first = np.sort(np.unique(number, return_index=True)[1])
        kept = both[first[:count]]
        if len(kept) == count:
            return kept
    raise AssertionError  # the proposals are endless


def _proposals(labels: Items, count: int, random: np.random.Generator) -> Iterator[Items]:
    """Yield pairs of rows of two classes: eight times by random classes, then by random pairs.

    Random classes alone may never give enough distinct pairs, if most pairs are of two large
    classes among many small ones.
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
        # any row of another class: one before the class, or one after it
        second_row = random.integers(len(labels) - sizes[a])
        second_row += np.where(second_row >= starts[a], sizes[a], 0)
        yield order[np.stack([first_row, second_row], axis=1)]
