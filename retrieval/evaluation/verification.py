"""Distances of pairs, "the same or not", to verification figures: ROC curve, AUC, equal error rate,
accuracy, TAR.

A pair is *accepted* ("the same") when its distance is at or under a threshold. FAR is the share of
different pairs that are accepted, TAR the share of same pairs that are. Time grows as P log P and
memory as P, the number of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrieval.data.error_lists import refuse
from retrieval.data.pairs import fold_problems
from retrieval.errors import DataError
from retrieval.model.labels import read_labels, read_values

Floats = NDArray[np.float64]

FAR_LEVELS = (1e-2, 1e-3)


@dataclass(frozen=True)
class Roc:
    """The ROC curve: straight lines between T points, from (0, 0) to (1, 1).

    Pairs at equal distances share a point.

    Attributes:
        threshold: (T,) distances, ascending; the first is −∞, which accepts nothing.
        far: (T,) false accept rate at each.
        tar: (T,) true accept rate at each.
    """

    threshold: Floats
    far: Floats
    tar: Floats

    def corners(self, same: int, different: int) -> Roc:
        """Return the curve without points in the middle of a line, by its numbers of pairs."""
        steps = np.stack(
            [np.rint(np.diff(self.tar) * same), np.rint(np.diff(self.far) * different)]
        )
        across = steps[0, 1:] * steps[1, :-1] != steps[0, :-1] * steps[1, 1:]
        kept = np.concatenate([[True], across, [True]])
        return Roc(self.threshold[kept], self.far[kept], self.tar[kept])


@dataclass(frozen=True)
class Verification:
    """What `verification` found.

    Attributes:
        values: "auc", "eer", "accuracy" (the mean over folds), "accuracy_se" (its standard error),
            and "tar_at_far_0.01", "tar_at_far_0.001" where there are different pairs enough: one
            over the rate at least.
        roc: the curve.
        accuracy: (K,) the share of each fold's pairs that are judged rightly.
        threshold: (K,) the threshold of each fold, which the other folds' pairs chose.
    """

    values: dict[str, float]
    roc: Roc
    accuracy: Floats
    threshold: Floats


def verification(
    distances: ArrayLike, same: ArrayLike, folds: ArrayLike, *, far: Sequence[float] = FAR_LEVELS
) -> Verification:
    """Return the verification metrics of pairs.

    AUC is the probability that a same pair is nearer than a different one, ties counting half. The
    equal error rate is where the curve meets FAR = 1 − TAR. Accuracy is Labeled Faces in the Wild's
    (Huang et al., TR 07-49, 2007): each fold is judged by the threshold that is best on all *other*
    folds; the standard error of the mean is σ / √K, with σ the standard deviation of the K
    accuracies (over K − 1).

    Args:
        distances: (P,) smaller is closer.
        same: (P,) whether a pair is one of "the same": true or false, or 1 or 0.
        folds: (P,) the fold of each pair: whole numbers or text.
        far: false accept rates at which to give the true accept rate.

    Raises:
        DataError: shapes that do not fit, distances that are not finite, pairs of one kind only or
            that are neither true nor false, or folds on which no threshold can be chosen.
    """
    d = np.asarray(distances, dtype=np.float64)
    s = _kinds(same)
    groups = read_labels(folds, "folds", "Leave those pairs out, or give each its fold.")
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
    """Return the ROC curve of pairs, with a point for each distance that occurs."""
    from sklearn import metrics

    far, tar, similarity = metrics.roc_curve(same, -distances, drop_intermediate=False)
    return Roc(-similarity, far, tar)


def equal_error_rate(roc: Roc) -> float:
    """Return the rate at which FAR = 1 − TAR, on the straight line between the points on both sides
    of it.
    """
    gap = roc.far + roc.tar - 1  # ascends strictly from −1 to 1
    i = int(np.searchsorted(gap, 0.0))
    part = gap[i - 1] / (gap[i - 1] - gap[i])
    return float(roc.far[i - 1] + part * (roc.far[i] - roc.far[i - 1]))


def fold_accuracy(
    distances: Floats, same: NDArray[np.bool_], fold: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return each fold's accuracy (K,) and the threshold (K,) that is best on all other folds.

    The threshold lies half-way between the distances that it parts; of several equally good ones it
    is the smallest.
    """
    order = np.argsort(distances, kind="stable")
    d, s, f = distances[order], same[order], fold[order]
    accuracy, threshold = [], []
    for k in range(int(fold.max()) + 1):
        mine = f == k
        t = _best_threshold(d[~mine], s[~mine])
        threshold.append(t)
        accuracy.append(((d[mine] <= t) == s[mine]).mean())
    return np.array(accuracy), np.array(threshold)


def _best_threshold(distances: Floats, same: NDArray[np.bool_]) -> float:
    """Return the threshold that judges most pairs rightly; the distances ascend."""
    # judged rightly when the i nearest are accepted
    right = np.concatenate([[0], np.cumsum(np.where(same, 1, -1))])
    cut = np.concatenate(
        [[True], distances[1:] > distances[:-1], [True]]
    )  # equal distances are never parted
    i = int(np.where(cut, right, -len(same) - 1).argmax())
    if i == 0:
        return float(np.nextafter(distances[0], -np.inf))
    if i == len(distances):
        return float(distances[-1])
    middle = distances[i - 1] / 2 + distances[i] / 2
    return float(middle if middle < distances[i] else distances[i - 1])


def _kinds(same: ArrayLike) -> NDArray[np.bool_]:
    """Return which pairs are the same.

    Truth as Python has it would take NaN, -1 and the text "False" for true.
    """
    flags = read_values(
        same, "pairs' kinds", "Leave those pairs out, or say of each whether it is the same."
    )
    for row, flag in enumerate(flags.tolist()):
        if isinstance(flag, str) or flag not in (0, 1):
            raise DataError(
                f"Whether a pair is the same must be true or false, or 1 or 0; row {row} is"
                f" {flag!r}."
            )
    return flags.astype(bool)


def _check(distances: Floats, same: NDArray[np.bool_], folds: NDArray[Any]) -> None:
    if distances.ndim != 1 or not distances.shape == same.shape == folds.shape:
        raise DataError(
            f"There are distances of shape {distances.shape}, kinds of shape {same.shape} and folds"
            f" of shape {folds.shape}: one of each a pair is needed."
        )
    if bad := int((~np.isfinite(distances)).sum()):
        raise DataError(
            f"{bad:,} of {len(distances):,} distances are NaN or infinite: training has diverged,"
            " or the combiner divides by 0."
        )
    if same.all() or not same.any():
        kind = "the same" if len(same) and same.all() else "different" if len(same) else "missing"
        raise DataError(f"All {len(same):,} pairs are {kind}: both kinds are needed.")
