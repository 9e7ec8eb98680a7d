"""Means with intervals, and the difference of two models over the same queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05
"""A difference is decided if its corrected p value is below this level."""


@dataclass(frozen=True)
class Mean:
    """A mean over blocks.

    Attributes:
        value: the mean.
        half: half the width of the 95 % interval; 0 if all values are equal.
    """

    value: float
    half: float


def difference_over_classes(
    sums: Sequence[float], reference: Sequence[float], counts: Sequence[int]
) -> Mean:
    """Return the difference of two means over the same queries, and its interval over classes.

    The queries of a class are not independent, so classes are the unit, as clusters of unequal
    size: the mean over queries is the ratio of two sums over classes, and its variance is that of
    a ratio (Cochran, Sampling Techniques, 1977, §2.11). Student's t has one degree of freedom less
    than there are classes. With classes of one size this is the paired t test over classes. One
    class has an infinite interval.

    Args:
        sums: the first metric's sum over the queries of each class (C,).
        reference: the same of the metric that is subtracted.
        counts: number of queries of each class (C,).
    """
    from scipy.special import stdtrit  # takes a tenth of a second to import

    differences = np.subtract(sums, reference)
    sizes = np.asarray(counts, np.float64)
    mean = differences.sum() / sizes.sum()
    classes = len(sizes)
    if classes < 2:
        return Mean(float(mean), np.inf)
    squares = np.square(differences - mean * sizes).sum()
    error = np.sqrt(squares * classes / (classes - 1)) / sizes.sum()
    half = float(stdtrit(classes - 1, 1 - LEVEL / 2)) * error
    return Mean(float(mean), float(half))
