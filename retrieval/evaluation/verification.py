"""Verification of pairs ("the same or not?"): drawing pairs, and metrics of their distances.

A pair is *accepted* ("the same") if its distance is at most a threshold. The false accept rate
(FAR) is the share of different pairs that are accepted, and the true accept rate (TAR) the share of
same pairs that are. For P pairs, time grows as P log P and memory as P.

Pairs are drawn as in Labeled Faces in the Wild (Huang et al., TR 07-49, 2007, section 3): first a
class or two classes, then their items, so that a large class does not dominate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from retrieval.base.arrays import Array, Bools, Floats64, Ints
from retrieval.data.pairs import LabelledPairs, fold_problems
from retrieval.errors import DataError, refuse
from retrieval.model.labels import read_labels, read_values

log = logging.getLogger(__name__)

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

    threshold: Floats64
    far: Floats64
    tar: Floats64


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
    accuracy: Floats64
    threshold: Floats64


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
        distances: (P,), the distance of each pair; smaller is closer. An AUC below 0.5, as of
            similarities, is logged as a warning.
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
    if values["auc"] < 0.5:
        log.warning(
            "AUC %.4f: different pairs are nearer than same pairs. Distances are smaller for closer"
            " items; of similarities, pass the negative.",
            values["auc"],
        )
    different = int((~s).sum())
    for rate in far:
        # fewer different pairs cannot tell the rate from 0; the margins allow for rounding
        if different * rate >= 1 - 1e-9:
            within = roc.far <= rate * (1 + 1e-12)
            values[f"tar_at_far_{rate:g}"] = float(roc.tar[within][-1])
    return Verification(values, roc, accuracy, threshold)


def roc_curve(distances: Floats64, same: Bools) -> Roc:
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


def fold_accuracy(distances: Floats64, same: Bools, fold: Ints) -> tuple[Floats64, Floats64]:
    """Return each fold's accuracy (K,) and the threshold (K,) that is best on all other folds.

    A threshold is half-way between the two distances that it separates. Of equally good thresholds,
    the smallest is used.
    """
    order = np.argsort(distances, kind="stable")
    d = distances[order]
    s = same[order]
    f = fold[order]
    accuracy = []
    threshold = []
    for k in range(int(fold.max()) + 1):
        judged = f == k
        best = _best_threshold(d[~judged], s[~judged])
        accepted = d[judged] <= best
        threshold.append(best)
        accuracy.append((accepted == s[judged]).mean())
    return np.array(accuracy), np.array(threshold)


def _best_threshold(distances: Floats64, same: Bools) -> float:
    """Return the threshold that judges most pairs correctly; distances must ascend."""
    # right[i]: the correct judgements, up to a constant, if the i nearest pairs are accepted
    right = np.concatenate([[0], np.cumsum(np.where(same, 1, -1))])
    # a threshold never separates equal distances
    cut = np.concatenate([[True], distances[1:] > distances[:-1], [True]])
    i = int(np.where(cut, right, -len(same) - 1).argmax())
    if i == 0:
        return float(np.nextafter(distances[0], -np.inf))
    if i == len(distances):
        return float(distances[-1])
    # half of the sum could overflow; the middle of two neighbouring floats rounds to one of them
    middle = distances[i - 1] / 2 + distances[i] / 2
    return float(middle if middle < distances[i] else distances[i - 1])


def _kinds(same: ArrayLike) -> Bools:
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


def _check(distances: Floats64, same: Bools, folds: Array) -> None:
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
        kind = "missing"
        if len(same):
            if same.all():
                kind = "the same"
            else:
                kind = "different"
        raise DataError(f"All {len(same):,} pairs are {kind}: both kinds are needed.")


Items = Ints

FOLDS = 10
PER_FOLD = 300  # pairs of each kind
ENOUGH = 30
"""Folds share no class if each fold then has at least this many pairs of each kind."""


def draw_pairs(
    items: Items, labels: Items, *, count: int | None = None, seed: int = 0
) -> LabelledPairs:
    """Draw pairs in up to ten folds, with equally many pairs of each kind in each fold.

    Folds share no class if there are enough classes, otherwise no item. Few items, or few pairs,
    are divided into fewer folds.

    Args:
        items: (n,), the items to draw from.
        labels: (n,), the items' class numbers.
        count: largest number of pairs in all, at least 4, by default 6,000. There are fewer if
            the folds do not have enough items.
        seed: seed of the draw. The same seed, items and labels give the same pairs.

    Raises:
        DataError: two folds would not each have a pair of each kind.
    """
    if count is None:
        count = 2 * FOLDS * PER_FOLD
    if count < 4:
        raise DataError(
            f"{count:,} pairs are too few to draw: two folds with a pair of each kind need 4."
        )
    random = np.random.default_rng([seed % 2**64, *b"verification"])
    most = min(FOLDS, count // 2)
    plans = [(_by_class, most, ENOUGH)]
    for folds in range(most, 1, -1):
        plans += [(_by_item, folds, 1), (_by_class, folds, 1)]
    for deal, folds, least in plans:
        fold = deal(labels, folds, random)
        groups = [np.flatnonzero(fold == k) for k in range(folds)]
        number = min(_fewest_pairs(labels[rows]) for rows in groups)
        if number >= least:
            break
    else:
        raise DataError(
            f"No pairs can be drawn from {len(items):,} items of {len(np.unique(labels)):,}"
            " classes: two folds that share no item each need two classes, one of them with two"
            " items. Name a list of pairs instead."
        )
    number = min(number, count // (2 * folds))
    parts = []
    for rows in groups:
        for same in (True, False):
            parts.append(rows[_draw(labels[rows], number, same, random)])
    pairs = items[np.concatenate(parts)]
    return LabelledPairs(
        pairs[:, 0],
        pairs[:, 1],
        np.tile(np.repeat([True, False], number), folds),
        np.repeat(np.arange(folds), 2 * number),
        _names(folds),
    )


def make_folds(same: Bools, seed: int = 0) -> tuple[Items, tuple[str, ...]]:
    """Return a random fold for each pair (P,), and the folds' names.

    Each kind of pairs is spread evenly over ten folds, or over as many as there are pairs of the
    rarer kind.

    Raises:
        DataError: there are fewer than two pairs of a kind.
    """
    folds = min(FOLDS, int(same.sum()), int((~same).sum()))
    if folds < 2:
        raise DataError(
            f"{int(same.sum()):,} same and {int((~same).sum()):,} different pairs cannot be divided"
            " into two folds, each with a pair of each kind. List more pairs."
        )
    random = np.random.default_rng([seed % 2**64, *b"folds"])
    fold = np.empty(len(same), np.int64)
    for kind in (True, False):
        rows = random.permutation(np.flatnonzero(same == kind))
        fold[rows] = np.arange(len(rows)) % folds
    return fold, _names(folds)


def _names(folds: int) -> tuple[str, ...]:
    return tuple(str(k + 1) for k in range(folds))


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
    order = random.permutation(len(labels))
    fold = np.empty(len(labels), np.int64)
    fold[order[np.argsort(labels[order], kind="stable")]] = np.arange(len(labels)) % folds
    return fold


def _fewest_pairs(labels: Items) -> int:
    """Return the smaller of the numbers of pairs of one class and of two classes."""
    sizes = np.unique(labels, return_counts=True)[1]
    same = int((sizes * (sizes - 1) // 2).sum())
    return min(same, len(labels) * (len(labels) - 1) // 2 - same)


def _draw(labels: Items, count: int, same: bool, random: np.random.Generator) -> Items:
    """Return `count` distinct pairs of rows (count, 2) of one class (`same`) or of two classes.

    At least `count` such pairs must exist. Classes are drawn uniformly, so that no large class
    dominates. If this gives too few distinct pairs, the classes of random items follow.
    """
    order = np.argsort(labels, kind="stable")
    _, class_of_item, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    starts = np.cumsum(sizes) - sizes
    paired = np.flatnonzero(sizes > int(same))

    def classes() -> Items:
        return np.concatenate([random.choice(paired, count), random.choice(class_of_item, count)])

    pairs = np.empty((0, 2), np.int64)
    while len(pairs) < count:
        first = classes()
        if same:
            second = first
        else:
            second = classes()
        left = order[starts[first] + random.integers(sizes[first])]
        right = order[starts[second] + random.integers(sizes[second])]
        if same:
            valid = left != right
        else:
            valid = first != second
        drawn = np.stack([left, right], axis=1)[valid]
        pairs = np.concatenate([pairs, drawn])
        # one number for both orders of a pair; the first draw of each pair stays
        number = pairs.min(axis=1) * len(labels) + pairs.max(axis=1)
        earliest = np.unique(number, return_index=True)[1]
        pairs = pairs[np.sort(earliest)[:count]]
    return pairs
