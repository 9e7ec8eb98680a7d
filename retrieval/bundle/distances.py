"""Distances of queries to stored vectors, as the bundle defines them; smaller is closer.

A vector may consist of several sub-spaces, which are ranges of its columns. The distances in the
sub-spaces are merged into one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from retrieval.base.arrays import Floats, Floats64
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.bundle.bundle import Bundle
    from retrieval.bundle.manifest import SubspaceEntry

Distances = Floats64

_ZERO = 8 * float(np.finfo(np.float32).eps)
"""Squared distances of unit vectors below this are rounding errors of float32 and count as 0."""


def bundle_distances(
    bundle: Bundle,
    query: Floats,
    code: Floats | None,
    vectors: Floats,
    codes: Floats | None,
    k: int,
) -> Distances:
    """Return the distances (n,) of a query to candidates, in float64.

    They come from the bundle's rescorer if it has one; otherwise they are measured on the vectors.

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
        return product_distances(vectors.astype(np.float64) @ query.astype(np.float64))
    return merged_distances(query, vectors, k, manifest.subspaces, manifest.merge)


def columns_of_subspaces(subspaces: Sequence[Any]) -> list[slice]:
    """Return the columns of each sub-space; a vector without sub-spaces is one sub-space."""
    return [slice(space.start, space.stop) for space in subspaces] or [slice(None)]


def merged_distances(
    query: Floats, vectors: Floats, k: int, subspaces: Sequence[SubspaceEntry], merge: str
) -> Distances:
    """Return the distances (n,) of a query (P,) to vectors (n, P), merged over sub-spaces.

    A vector without sub-spaces is one sub-space. `merge` is "min", the smallest of the Euclidean
    distances in the sub-spaces, or "score"; see `best_score`.
    """
    differences = vectors.astype(np.float64) - query
    # `store.search.squared_distances` sums in the same order, so that a pair has the same distance
    # wherever it is measured.
    parts = [differences[:, span] for span in columns_of_subspaces(subspaces)]
    distances = np.sqrt([np.einsum("ij,ij->i", part, part) for part in parts])
    if merge == "score":
        return best_score(distances, k, [space.weight for space in subspaces])
    nearest: Distances = distances.min(axis=0)
    return nearest


def product_distances(products: Floats) -> Distances:
    """Return √(2 − 2 p) of inner products p, of any shape (measure "inner").

    For two unit vectors, this is their Euclidean distance. If an item's vector concatenates unit
    vectors, and a query's vector concatenates unit vectors times weights α_l that sum to 1, the
    result is √(Σ α_l D_l²), where D_l is the distance of the l-th unit vectors.
    """
    squares = 2.0 - 2.0 * np.asarray(products, dtype=np.float64)
    return np.asarray(np.sqrt(np.where(squares < _ZERO, 0.0, squares)), dtype=np.float64)


def best_score(distances: Floats, k: int, weights: Sequence[float]) -> Distances:
    """Return −log of each item's best score (n,) (merge "score", Eq. 27 of Gao et al. 2019).

    Each sub-space scores its k nearest items by α e^{−(d − d_min) / (d_max − d_min)}, where d_min
    and d_max are the smallest and largest of these items' distances d. An item's score is the
    best over all sub-spaces. If all k distances in a sub-space are equal, it scores α.

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
        # Of equal distances the earlier candidate counts, so a repeated search gives the same.
        nearest = np.argsort(row, kind="stable")[:k]
        least = row[nearest[0]]
        most = row[nearest[-1]]
        if most > least:
            spread = (row[nearest] - least) / (most - least)
        else:
            spread = np.zeros(len(nearest))
        best[nearest] = np.minimum(best[nearest], spread - np.log(weight))
    return best
