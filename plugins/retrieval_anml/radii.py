"""Means of a row of distances, soft and hard, with their derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.intp]

NEGLIGIBLE = -37.0
"""e to this is half a unit in the last place of 1."""


def soft_radius(d: Floats, gamma: float, skip: Ints | None = None) -> tuple[Floats, Floats]:
    """Return the log-exp mean of each row of d (B, K), and its derivative by each number (B, K),
    whose rows sum to 1.

    Args:
        d: (B, K) distances.
        gamma: γ, of either sign.
        skip: (B,) one column per row that does not count (a query is not its own neighbour); None:
            all count.
    """
    count = d.shape[1] - (skip is not None)
    flat = abs(gamma) < 1e-8  # nearer 0 than rounding lets the two differ
    e = np.zeros_like(d) if flat else d * -gamma
    if skip is not None:
        e[np.arange(len(d)), skip] = -np.inf
    top = e.max(axis=1, keepdims=True)
    e -= top
    np.exp(e, out=e)
    mass = e.sum(axis=1, keepdims=True)
    e /= mass
    radius = np.einsum("ij,ij->i", e, d) if flat else -(top + np.log(mass / count))[:, 0] / gamma
    return radius, e


def hard_radius(d: Floats, k: int, skip: Ints | None = None) -> tuple[Floats, Floats]:
    """Return the mean of the k smallest, or for k < 0 the −k largest, of each row of d (B, K), and
    1/|k| where they stand.

    Song et al., Eq 6, r(S, θ, x, Kα). As Eq 10 writes it, it is the least (greatest) mean of any
    |k| of the numbers.

    Args:
        d: (B, K) distances.
        k: Kα, not 0; a row that has fewer takes all.
        skip: (B,) one column per row that does not count; None: all count.
    """
    ranked = d if k > 0 else -d
    if skip is not None:
        ranked = ranked.copy()
        ranked[np.arange(len(d)), skip] = np.inf
    count = min(abs(k), d.shape[1] - (skip is not None))
    near = np.argpartition(ranked, count - 1, axis=1)[:, :count]
    weights = np.zeros_like(d)
    np.put_along_axis(weights, near, 1 / count, axis=1)
    return np.take_along_axis(d, near, axis=1).mean(axis=1), weights


def largest(t: Floats, k: int) -> tuple[Floats, Any, Floats]:
    """Return −(the mean of the k largest of each row of t), ones where they stand (B, K), and how
    many they are (B,).
    """
    count = min(k, t.shape[1])
    places = np.argpartition(t, t.shape[1] - count, axis=1)[:, t.shape[1] - count :]
    ends = np.arange(0, places.size + 1, count)
    ones = csr_array((np.ones(places.size), places.ravel(), ends), shape=t.shape)
    return -np.take_along_axis(t, places, axis=1).mean(axis=1), ones, np.full(len(t), float(count))


def exponentials(t: Floats) -> tuple[Any, Floats]:
    """Return e^t (B, K) and the sum of each row (B,), for t ≤ 0 with a 0 in each row; t is
    overwritten.

    What cannot change a sum in float64 is left out, and where that is most of it, as it is in large
    data under a sharp γ₂, the rest is a sparse array.
    """
    seen = t > NEGLIGIBLE
    if np.count_nonzero(seen) > t.size // 8:
        e = np.exp(t, out=t)
        return e, e.sum(axis=1)
    places = np.flatnonzero(seen)
    ends = np.concatenate([[0], np.count_nonzero(seen, axis=1).cumsum()])
    values = np.exp(t.ravel()[places])
    return csr_array((values, places % t.shape[1], ends), shape=t.shape), np.add.reduceat(
        values, ends[:-1]
    )
