"""How often an approximate back end finds the true neighbours, measured on the gallery's own
vectors.
"""

from __future__ import annotations

import numpy as np

from retrieval.serving.index.contract import Floats, IndexBackend, checked_search
from retrieval.serving.store.search import nearest

_QUERIES = 200


def recall_at_10(backend: IndexBackend, name: str, vectors: Floats) -> float:
    """Return the share of the exact ten nearest that `backend` finds, with items as queries,
    themselves left out.

    Args:
        backend: built over `vectors`.
        name: of the back end, for errors.
        vectors: (N, P), float32, C-contiguous. The queries are 200 of them.
    """
    count = len(vectors)
    k = min(10, count - 1)
    if k < 1:
        return 1.0
    sample = np.sort(np.random.default_rng(0).choice(count, min(_QUERIES, count), replace=False))
    queries = vectors[sample]
    # The item itself is the nearest. Whatever is as near as the last counts: duplicates would
    # otherwise look like misses.
    limits = nearest(queries, vectors, k + 1)[0][:, k] + 2e-6 * np.square(queries).sum(axis=1).max()
    hits = 0
    for row, query, limit, rows in zip(
        sample, queries, limits, checked_search(backend, name, queries, k + 1, count), strict=True
    ):
        others = rows[(rows >= 0) & (rows != row)]
        squared = np.square(vectors[others] - query).sum(axis=1)
        hits += min(k, int((squared <= limit).sum()))
    return hits / (k * len(sample))
