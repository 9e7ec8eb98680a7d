"""How a query's distance to an item is measured on stored vectors, and how several sub-spaces' distances become one number.

Smaller is closer. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

_ZERO = 8 * float(np.finfo(np.float32).eps)
"""A squared distance of unit vectors below this is what float32 made of 0."""


def of_products(products: Floats) -> NDArray[np.float64]:
    """Return √(2 − 2 p) of inner products p of a query with items, any shape: measure "inner".

    It is the distance of two unit vectors; and √(Σ α_l D_l²) where an item's vector is unit vectors side by side, a query's likewise, each times
    its weight α_l, and the weights sum to 1.
    """
    squares = 2.0 - 2.0 * np.asarray(products, dtype=np.float64)
    return np.asarray(np.sqrt(np.where(squares < _ZERO, 0.0, squares)), dtype=np.float64)


def nearest_of(distances: Floats) -> NDArray[np.float64]:
    """Return each item's smallest distance (n,) of its distances (S, n) in S sub-spaces: merge "min"."""
    return np.asarray(distances.min(axis=0), dtype=np.float64)


def best_score(distances: Floats, k: int, weights: Sequence[float]) -> NDArray[np.float64]:
    """Return −log of each item's best score (n,): merge "score", Eq 27 of Gao et al. 2019.

    Each sub-space scores its own k nearest, α e^{−(d − d_min) / (d_max − d_min)} with d_min and d_max the first and the last of
    them; an item that several propose counts with its best. Where all k are equally far, d counts as d_min.

    Args:
        distances: (S, n) Euclidean distances of one query to the candidates; each sub-space's k nearest must be among them.
        k: how many answers are wanted.
        weights: α, one a sub-space, above 0.

    Returns:
        −log of the score; infinite for items that are among no sub-space's k nearest. At least k are finite where n ≥ k.
    """
    distances = np.asarray(distances, dtype=np.float64)
    best = np.full(distances.shape[1], np.inf)
    for row, weight in zip(distances, weights, strict=True):
        own = np.argsort(row, kind="stable")[:k]
        least, most = row[own[0]], row[own[-1]]
        spread = (row[own] - least) / (most - least) if most > least else np.zeros(len(own))
        best[own] = np.minimum(best[own], spread - np.log(weight))
    return best
