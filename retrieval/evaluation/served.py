"""What a server answers with without a rescorer: candidates of each sub-space, merged as the bundle says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.evaluation.neighbors import exact_neighbors
from retrieval.serving.merging import merged, spans_of

if TYPE_CHECKING:
    from retrieval.serving.manifest import Manifest, SubspaceEntry

Floats = NDArray[np.floating[Any]]
Rows = NDArray[np.int64]


def nearest_in_each(
    query: Floats, vector: Floats, k: int, subspaces: Sequence[SubspaceEntry], exclude: Rows | None = None
) -> Rows:
    """Return each sub-space's exact k nearest rows (S, Q, k); without sub-spaces the whole vector is the one.

    Args:
        query: (Q, P) vectors that are asked with.
        vector: (N, P) vectors that are stored.
        k: how many; at most N, less one with `exclude`.
        subspaces: ranges of columns.
        exclude: (Q,) the row to leave out for each query.
    """
    found = [
        exact_neighbors(query[:, span], vector[:, span], k, exclude=exclude)[0]
        for span in spans_of(subspaces)
    ]
    return np.stack(found)


def served_neighbors(
    query: Floats, vector: Floats, k: int, manifest: Manifest, exclude: Rows | None = None
) -> Rows:
    """Return rows (Q, k), nearest first, as a server that is asked for k answers orders them.

    With merge "score" an answer's place depends on how many are asked for, so that a figure among the first ten is here that of a
    list of k.

    Args:
        query: see `nearest_in_each`, as the next ones.
        vector: likewise.
        k: likewise.
        manifest: a bundle's, without a rescorer.
        exclude: likewise.
    """
    proposed = nearest_in_each(query, vector, k, manifest.subspaces, exclude)
    if len(proposed) == 1 and manifest.merge == "min":
        only: Rows = proposed[0]
        return only
    found = np.empty(proposed.shape[1:], dtype=np.int64)
    for number, asked in enumerate(query):
        rows = np.unique(proposed[:, number])
        distances = merged(asked, vector[rows], k, manifest.subspaces, manifest.merge)
        found[number] = rows[np.argsort(distances, kind="stable")[:k]]
    return found
