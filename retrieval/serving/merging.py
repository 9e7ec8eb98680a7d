"""Distances of queries to stored vectors, as the bundle defines them; smaller is closer.

Distances in several sub-spaces are merged into one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.serving.bundle import Bundle
    from retrieval.serving.manifest import SubspaceEntry

Floats = NDArray[np.floating[Any]]
Distances = NDArray[np.float64]

_ZERO = 8 * float(np.finfo(np.float32).eps)
"""Squared distances of unit vectors below this are rounding errors of float32 and count as 0."""


def measured(
    bundle: Bundle,
    query: Floats,
    code: Floats | None,
    vectors: Floats,
    codes: Floats | None,
    k: int,
) -> Distances:
    """Return the distances (n,) of a query to candidates: the rescorer's, or measured in float64.

    Args:
        bundle: bundle that encoded the query and the candidates.
        query: vector (P,) of the query.
        code: code (C,) of the query; `None` without a rescorer.
        vectors: vectors (n, P) of the candidates.
        codes: codes (n, C) of the candidates; `None` without a rescorer.
        k: number of hits.

    Raises:
        DataError: the rescorer returns NaN or infinity.
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
    """Return whether a pair's distance depends on that pair alone."""
    manifest = bundle.manifest
    return (
        manifest.rescorer is None
        and manifest.distance.measure != "inner"
        and manifest.merge != "score"
    )


def spans_of(subspaces: Sequence[Any]) -> list[slice]:
    """Return columns `start` to `stop` of each sub-space; without sub-spaces, all as one."""
    return [slice(space.start, space.stop) for space in subspaces] or [slice(None)]


def merged(
    query: Floats, vectors: Floats, k: int, subspaces: Sequence[SubspaceEntry], merge: str
) -> Distances:
    """Return the distances (n,) of a query (P,) to vectors (n, P), merged over sub-spaces.

    Without sub-spaces the whole vector is one. `merge` is "min" or "score"; see `best_score`.
    """
    apart = vectors.astype(np.float64) - query
    # Sums in the same order as a store that measures (`local.distances.measured`), so that a pair
    # has the same distance everywhere.
    squared = [
        np.einsum("ij,ij->i", part, part)
        for part in (apart[:, span] for span in spans_of(subspaces))
    ]
    distances = np.sqrt(squared)
    if merge == "score":
        return best_score(distances, k, [space.weight for space in subspaces])
    nearest: Distances = distances.min(axis=0)
    return nearest


def of_products(products: Floats) -> Distances:
    """Return √(2 − 2 p) of inner products p, of any shape (measure "inner").

    This is the distance of two unit vectors. If an item's vector concatenates unit vectors, and a
    query's concatenates unit vectors times weights α_l that sum to 1, it is √(Σ α_l D_l²).
    """
    squares = 2.0 - 2.0 * np.asarray(products, dtype=np.float64)
    return np.asarray(np.sqrt(np.where(squares < _ZERO, 0.0, squares)), dtype=np.float64)


def best_score(distances: Floats, k: int, weights: Sequence[float]) -> Distances:
    """Return −log of each item's best score (n,) (merge "score", Eq. 27 of Gao et al. 2019).

    Each sub-space scores its k nearest items by α e^{−(d − d_min) / (d_max − d_min)}, where d_min
    and d_max are the smallest and largest of their distances. An item's best score over all
    sub-spaces counts. If all k distances are equal, the score is α.

    Args:
        distances: Euclidean distances (S, n) of one query to the candidates, which must include the
            k nearest of each sub-space.
        k: number of hits.
        weights: weight α of each sub-space, above 0.

    Returns:
        −log of the score, infinite for items that no sub-space has among its k nearest. At least
            min(k, n) values are finite.
    """
    distances = np.asarray(distances, dtype=np.float64)
    best = np.full(distances.shape[1], np.inf)
    for row, weight in zip(distances, weights, strict=True):
        own = np.argsort(row, kind="stable")[:k]
        least, most = row[own[0]], row[own[-1]]
        spread = (row[own] - least) / (most - least) if most > least else np.zeros(len(own))
        best[own] = np.minimum(best[own], spread - np.log(weight))
    return best
