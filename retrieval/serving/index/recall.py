"""How often an approximate back end finds the true neighbours, measured on the gallery's own vectors."""

from __future__ import annotations

import numpy as np

from retrieval.serving.index.contract import Floats, IndexBackend, checked_search

_QUERIES = 200
_BLOCK = 65_536


def recall_at_10(backend: IndexBackend, name: str, vectors: Floats) -> float:
    """Return the share of the exact ten nearest that `backend` finds, with items as queries, themselves left out.

    Args:
        backend: built over `vectors`.
        name: of the back end, for errors.
        vectors: (N, P), float32. A sample of 200 is searched exactly, block by block.
    """
    count = len(vectors)
    k = min(10, count - 1)
    if k < 1:
        return 1.0
    sample = np.sort(np.random.default_rng(0).choice(count, min(_QUERIES, count), replace=False))
    queries = np.ascontiguousarray(vectors[sample])
    nearest = np.full((len(sample), k), np.inf)
    for start in range(0, count, _BLOCK):
        block = vectors[start : start + _BLOCK]
        squared = (block**2).sum(axis=1)[None] - 2 * queries @ block.T
        own = np.flatnonzero((sample >= start) & (sample < start + len(block)))
        squared[own, sample[own] - start] = np.inf
        both = np.concatenate([nearest, squared], axis=1)
        nearest = np.partition(both, k - 1, axis=1)[:, :k]
    # An item as near as the tenth counts as found: duplicates would otherwise look like misses.
    limit = nearest.max(axis=1) + 2e-6 * (queries**2).sum(axis=1).max()
    rows = checked_search(backend, name, queries, k + 1, count)
    found = 0
    for number, row in enumerate(rows):
        others = row[(row >= 0) & (row != sample[number])]
        near = vectors[others]
        squared = (near**2).sum(axis=1) - 2 * near @ queries[number]
        found += min(k, int((squared <= limit[number]).sum()))
    return found / (k * len(sample))
