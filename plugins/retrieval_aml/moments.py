"""The two matrices that GMML and AML learn from: second moments of the differences of similar and
of dissimilar pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

BLOCK = 2**20
"""How many pairs are differenced at a time, over the number of features."""


@dataclass(frozen=True)
class Moments:
    """Means over pairs of (x − x′)(x − x′)ᵀ, and how many pairs there are.

    Attributes:
        similar: A, (F, F), over similar pairs.
        dissimilar: B, (F, F), over dissimilar pairs.
        n_similar: how many similar pairs.
        n_dissimilar: how many dissimilar pairs.
    """

    similar: Floats
    dissimilar: Floats
    n_similar: int
    n_dissimilar: int


def moments_of_classes(x: Floats, codes: NDArray[np.intp]) -> Moments:
    """Return the moments over *all* unordered pairs of items, from sums of classes: no pair is
    formed.

    With the scatter S_c of class c about its mean m_c, of n_c of all n items, and the mean m of
    all,

        Σ over pairs in classes       = Σ_c n_c S_c
        Σ over pairs between classes  = Σ_c (n − n_c) S_c + n Σ_c n_c (m_c − m)(m_c − m)ᵀ,

    sums of positive semi-definite terms, so that nothing cancels.

    Args:
        x: (N, F) features.
        codes: (N,) classes, 0 to C − 1, each with a member.
    """
    n, features = x.shape
    counts = np.bincount(codes)
    mean = x.mean(axis=0)
    similar, dissimilar = np.zeros((features, features)), np.zeros((features, features))
    order = np.argsort(codes, kind="stable")
    centres = np.empty((len(counts), features))
    for c, rows in enumerate(np.split(order, counts.cumsum()[:-1])):
        part = x[rows] - mean
        centres[c] = part.mean(axis=0)
        part -= centres[c]
        scatter = part.T @ part
        similar += counts[c] * scatter
        dissimilar += (n - counts[c]) * scatter
    weighted = centres * np.sqrt(counts)[:, None]
    dissimilar += n * (weighted.T @ weighted)
    total = n * (n - 1) // 2
    n_similar = int((counts * (counts - 1) // 2).sum())
    return Moments(
        similar / max(n_similar, 1),
        dissimilar / max(total - n_similar, 1),
        n_similar,
        total - n_similar,
    )


def moments_of_pairs(pairs: Floats, similar: NDArray[np.bool_]) -> Moments:
    """Return the moments over listed pairs.

    Args:
        pairs: (N, 2, F) the two points of each.
        similar: (N,) whether they are similar.
    """
    sums = []
    for chosen in (similar, ~similar):
        rows = np.flatnonzero(chosen)
        sums.append(_sum_of_squares(pairs[:, 0], pairs[:, 1], rows, rows) / max(len(rows), 1))
    return Moments(sums[0], sums[1], int(similar.sum()), int((~similar).sum()))


def moments_of_drawn_pairs(x: Floats, codes: NDArray[np.intp], n_pairs: int, seed: int) -> Moments:
    """Return the moments over pairs of two different items drawn alike, with replacement, as in the
    papers' experiments.

    Args:
        x: (N, F) features.
        codes: (N,) classes.
        n_pairs: how many pairs, of both kinds together.
        seed: of the drawing.
    """
    random = np.random.default_rng(seed)
    first = random.integers(0, len(x), n_pairs)
    second = random.integers(0, len(x) - 1, n_pairs)
    second += second >= first
    alike = codes[first] == codes[second]
    sums = [_sum_of_squares(x, x, first[chosen], second[chosen]) for chosen in (alike, ~alike)]
    n_similar = int(alike.sum())
    return Moments(
        sums[0] / max(n_similar, 1),
        sums[1] / max(n_pairs - n_similar, 1),
        n_similar,
        n_pairs - n_similar,
    )


def count_to_draw(n_pairs: int | Literal["paper"], classes: int) -> int:
    """Return how many pairs to draw: "paper" is 1,000 C (C − 1) of C classes."""
    return 1000 * classes * (classes - 1) if n_pairs == "paper" else int(n_pairs)


def _sum_of_squares(
    left: Floats, right: Floats, i: NDArray[np.intp], j: NDArray[np.intp]
) -> Floats:
    features = left.shape[1]
    total = np.zeros((features, features))
    step = max(1, BLOCK // features)
    for start in range(0, len(i), step):
        difference = left[i[start : start + step]] - right[j[start : start + step]]
        total += difference.T @ difference
    return total
