"""The formulas of AML and GMML as plain loops in float64."""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def all_pairs(x: Floats, y: Any) -> tuple[Floats, NDArray[np.bool_]]:
    """Every unordered pair of items, and whether their labels agree."""
    both = [(i, j) for i, j in itertools.combinations(range(len(x)), 2)]
    pairs = np.array([[x[i], x[j]] for i, j in both])
    return pairs, np.array([y[i] == y[j] for i, j in both])


def moments(pairs: Floats, similar: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Means of outer products of differences, one pair at a time."""
    sums = {True: np.zeros((pairs.shape[2],) * 2), False: np.zeros((pairs.shape[2],) * 2)}
    for (first, second), alike in zip(pairs, similar, strict=True):
        sums[bool(alike)] += np.outer(first - second, first - second)
    return sums[True] / similar.sum(), sums[False] / (~similar).sum()


def printed_eq_9(m: Floats, pair: Floats, alike: bool, beta: float) -> Floats:
    """Eq 9 as printed, by solving its linear equations."""
    opposite = np.linalg.inv(m) if alike else m
    both = pair[0] + pair[1]
    return np.array(
        [np.linalg.solve(2 * opposite + beta * m, opposite @ both + beta * m @ x) for x in pair]
    )


def loss(m: Floats, pairs: Floats, similar: NDArray[np.bool_]) -> float:
    """Eq 7 with means: similar pairs' distances under M, dissimilar pairs' under its inverse."""
    inverse, total = np.linalg.inv(m), 0.0
    for (first, second), alike in zip(pairs, similar, strict=True):
        d = first - second
        total += float(d @ (m if alike else inverse) @ d) / ((similar if alike else ~similar).sum())
    return total


def whole(m: Floats, pairs: Floats, similar: NDArray[np.bool_], alpha: float, beta: float) -> float:
    """Eq 11, with one adversarial pair per pair."""
    built = np.array(
        [printed_eq_9(m, p, bool(s), beta) for p, s in zip(pairs, similar, strict=True)]
    )
    return loss(m, pairs, similar) + alpha * loss(m, built, similar)
