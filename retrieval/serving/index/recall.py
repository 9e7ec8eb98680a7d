"""How often an approximate back end finds the true neighbours, measured on the gallery's own vectors."""

from __future__ import annotations

import numpy as np

from retrieval.serving.index.contract import Floats, IndexBackend, checked_search
from retrieval.serving.runtime import load_faiss

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
    nearest = np.full((len(sample), k + 1), np.inf)
    for start in range(0, count, _BLOCK):
        block = np.ascontiguousarray(vectors[start : start + _BLOCK])
        squared, _ = load_faiss().knn(queries, block, min(k + 1, len(block)))
        nearest = np.sort(np.concatenate([nearest, squared], axis=1), axis=1)[:, : k + 1]
    # the item itself is the nearest. Whatever is as near as the last counts: duplicates would otherwise look like misses
    limit = nearest[:, k] + 2e-6 * (queries**2).sum(axis=1).max()
    rows = checked_search(backend, name, queries, k + 1, count)
    found = 0
    for number, row in enumerate(rows):
        others = row[(row >= 0) & (row != sample[number])]
        squared = ((vectors[others] - queries[number]) ** 2).sum(axis=1)
        found += min(k, int((squared <= limit[number]).sum()))
    return found / (k * len(rows))
