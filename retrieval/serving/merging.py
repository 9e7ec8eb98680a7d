"""The distance of a query to stored vectors, as the bundle defines it; smaller is closer.

Distances in several sub-spaces are merged into one number. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.serving.bundle import Bundle

Floats = NDArray[np.floating[Any]]
Distances = NDArray[np.float64]

_ZERO = 8 * float(np.finfo(np.float32).eps)
"""A squared distance of unit vectors below this is what float32 made of 0."""


class Columns(Protocol):
    """Columns `start` to `stop` of the vector, and their weight for merge "score"."""

    @property
    def start(self) -> int:
        """First column."""
        ...

    @property
    def stop(self) -> int:
        """First column after the last."""
        ...

    @property
    def weight(self) -> float:
        """What its score counts, for merge "score"."""
        ...


def measured(
    bundle: Bundle,
    query: Floats,
    code: Floats | None,
    vectors: Floats,
    codes: Floats | None,
    k: int,
) -> Distances:
    """Return the distances (n,) of a query to candidates: its rescorer's, or measured in float64.

    Args:
        bundle: of the query and the candidates.
        query: (P,).
        code: (C,), None without a rescorer.
        vectors: (n, P) of the candidates.
        codes: (n, C) of the candidates, None without a rescorer.
        k: how many answers are wanted.

    Raises:
        DataError: the rescorer gives NaN or infinity.
    """
    manifest = bundle.manifest
    if code is not None and codes is not None:
        distances: Distances = bundle.rescore(code[None], codes)[0].astype(np.float64)
        if not np.isfinite(distances).all():
            raise DataError("The rescorer gives NaN or infinity for this query.")
        return distances
    if manifest.distance.measure == "inner":
        return of_products(vectors.astype(np.float64) @ query.astype(np.float64))
    return merged(query, vectors, k, manifest.subspaces, manifest.merge)


def measured_alone(bundle: Bundle) -> bool:
    """Return whether a pair's distance depends on that pair alone.

    `measured` then takes the pairs of many queries at once: query (n, P), vectors (n, P).
    """
    manifest = bundle.manifest
    return (
        manifest.rescorer is None
        and manifest.distance.measure != "inner"
        and manifest.merge != "score"
    )


def spans_of(subspaces: Sequence[Columns]) -> list[slice]:
    """Return the columns of each sub-space; without sub-spaces, all columns as one."""
    return [slice(space.start, space.stop) for space in subspaces] or [slice(None)]


def merged(
    query: Floats, vectors: Floats, k: int, subspaces: Sequence[Columns], merge: str
) -> Distances:
    """Return the distances (n,) of one query (P,) to vectors (n, P), merged over sub-spaces.

    Args:
        query: what is asked with.
        vectors: the candidates; see `best_score`.
        k: how many answers are wanted.
        subspaces: none: the whole vector is the one.
        merge: "min" or "score".
    """
    apart = vectors.astype(np.float64) - query
    # the sum in the very order in which a store has it that measures (`local.distances.measured`),
    # so that one pair has one distance
    squared = [
        np.einsum("ij,ij->i", part, part)
        for part in (apart[:, span] for span in spans_of(subspaces))
    ]
    distances = np.sqrt(squared)
    if merge == "score":
        return best_score(distances, k, [space.weight for space in subspaces])
    return nearest_of(distances)


def of_products(products: Floats) -> Distances:
    """Return √(2 − 2 p) of inner products p of a query with items, any shape: measure "inner".

    It is the distance of two unit vectors; and √(Σ α_l D_l²) where an item's vector is unit vectors
    side by side, a query's likewise, each times its weight α_l, and the weights sum to 1.
    """
    squares = 2.0 - 2.0 * np.asarray(products, dtype=np.float64)
    return np.asarray(np.sqrt(np.where(squares < _ZERO, 0.0, squares)), dtype=np.float64)


def nearest_of(distances: Floats) -> Distances:
    """Return each item's smallest distance (n,) in S sub-spaces (S, n): merge "min"."""
    return np.asarray(distances.min(axis=0), dtype=np.float64)


def best_score(distances: Floats, k: int, weights: Sequence[float]) -> Distances:
    """Return −log of each item's best score (n,): merge "score", Eq 27 of Gao et al. 2019.

    Each sub-space scores its own k nearest, α e^{−(d − d_min) / (d_max − d_min)} with d_min and
    d_max the first and the last of them; an item that several propose counts with its best. Where
    all k are equally far, d counts as d_min.

    Args:
        distances: (S, n) Euclidean distances of one query to the candidates; each sub-space's k
            nearest must be among them.
        k: how many answers are wanted.
        weights: α, one a sub-space, above 0.

    Returns:
        −log of the score; infinite for items that are among no sub-space's k nearest. At least k
            are finite where n ≥ k.
    """
    distances = np.asarray(distances, dtype=np.float64)
    best = np.full(distances.shape[1], np.inf)
    for row, weight in zip(distances, weights, strict=True):
        own = np.argsort(row, kind="stable")[:k]
        least, most = row[own[0]], row[own[-1]]
        spread = (row[own] - least) / (most - least) if most > least else np.zeros(len(own))
        best[own] = np.minimum(best[own], spread - np.log(weight))
    return best
