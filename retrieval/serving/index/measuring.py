"""The distance of a query to candidates, as the bundle defines it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.contract import Floats
from retrieval.serving.merging import merged, of_products
from retrieval.serving.store.contract import CODE, VECTOR, Candidates

Distances: TypeAlias = NDArray[np.float64]

MARGIN = 8
"""Candidates beyond k: FAISS's matrix products swap neighbours that differ in the seventh digit."""


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


def candidates_of(bundle: Bundle, k: int, candidates: int | None) -> int:
    """Return how many candidates each sub-space is searched for."""
    rescorer = bundle.manifest.rescorer
    return max(k + MARGIN, candidates or (rescorer.candidates if rescorer else 0))


def by_id(proposed: Candidates) -> Candidates:
    """Return candidates in the order of their ids, for a distance other than the store's."""
    order = sorted(range(len(proposed.items)), key=lambda row: proposed.items[row].id)
    arrays = {name: array[order] for name, array in proposed.arrays.items()}
    return Candidates([proposed.items[row] for row in order], arrays)


def distances_of(
    bundle: Bundle, query: Floats, code: Floats | None, proposed: Sequence[Candidates], k: int
) -> list[Distances]:
    """Return the distances of each query to its candidates, measured as the bundle says."""
    if len(proposed) > 1 and measured_alone(bundle):
        # One computation of all pairs, in which each pair's sum is what it is by itself.
        counts = [len(each.items) for each in proposed]
        queries = np.repeat(query, counts, axis=0)
        vectors = np.concatenate(
            [each.arrays[VECTOR] for each in proposed if each.items] or [queries]
        )
        return np.split(measured(bundle, queries, None, vectors, None, k), np.cumsum(counts)[:-1])
    return [
        measured(
            bundle,
            query[number],
            None if code is None else code[number],
            each.arrays[VECTOR],
            None if code is None else each.arrays[CODE],
            min(k, len(each.items)),
        )
        if each.items
        else np.empty(0)
        for number, each in enumerate(proposed)
    ]
