"""Answers made better after the search: queries expanded, the gallery augmented, and neighbours
re-ranked.

Each is a distance between *places* of queries and gallery items, so that figures of them are made
by the very code that makes all others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.errors import DataError
from retrieval.evaluation.neighbors import Codes, DistanceBlock, Hidden, Search

Floats = NDArray[np.float64]
MOST = 50_000
"""Queries and gallery items that are re-ranked: what is nearest to each of them is held in memory.
"""


class Reordered(NamedTuple):
    """What `evaluate` takes instead of codes and distance: places (Q, 1) and (N, 1), and a distance
    between places.
    """

    query: Floats
    gallery: Floats | None
    distance: DistanceBlock


def expanded(
    query: Codes,
    gallery: Codes | None,
    *,
    k: int = 5,
    alpha: float = 0.0,
    queries: bool = True,
    hidden: Hidden | None = None,
) -> Reordered:
    """Return queries, or the gallery's items, as weighted means of themselves and k neighbours.

    Weights are 1 for itself and max(cos, 0)^α for a neighbour: α = 0 is average query expansion
    (Chum et al., "Total Recall", ICCV 2007), larger ones weigh nearer neighbours more (Radenović,
    Tolias & Chum, "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI 2019). With
    `queries` false it is database augmentation (Turcot & Lowe 2009; Arandjelović & Zisserman 2012):
    the gallery's items are every query's, and are augmented with all of it. A query is expanded
    with none of the items that are hidden from it, nor itself. A mean is scaled to the length of
    its item.
    """
    ours = _array(query)
    theirs = ours if gallery is None else _array(gallery)
    if queries:
        left, right = _mean(ours, theirs, k, alpha, gallery is None, hidden), theirs
    else:
        left, right = ours, _mean(theirs, theirs, k, alpha, True)

    def distance(a: Tensor, b: Tensor) -> Tensor:
        changed_queries, changed_items = (
            torch.from_numpy(left)[_places(a)],
            torch.from_numpy(right)[_places(b)],
        )
        return torch.cdist(
            changed_queries, changed_items, compute_mode="donot_use_mm_for_euclid_dist"
        )

    return _reordered(len(ours), None if gallery is None else len(theirs), distance)


def _mean(
    codes: Floats, gallery: Floats, k: int, alpha: float, itself: bool, hidden: Hidden | None = None
) -> Floats:
    rows, _ = Search(codes, None if itself else gallery, hidden).nearest(k)
    length = np.linalg.norm(codes, axis=1, keepdims=True)
    unit = codes / np.where(length == 0, 1, length)
    total = unit.copy()
    for place in range(k):
        exists = rows[:, place] >= 0
        near = gallery[np.maximum(rows[:, place], 0)]
        size = np.linalg.norm(near, axis=1, keepdims=True)
        near = near / np.where(size == 0, 1, size)
        weight = np.maximum((unit * near).sum(1), 0) ** alpha * exists
        total += weight[:, None] * near
    size = np.linalg.norm(total, axis=1, keepdims=True)
    return np.asarray(total / np.where(size == 0, 1, size) * length)


def reranked(
    query: Codes, gallery: Codes | None, *, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> Reordered:
    """Return k-reciprocal re-ranking: items are near whose reciprocal neighbours are shared.

    Zhong, Zheng, Cao & Li, "Re-ranking Person Re-identification with k-reciprocal Encoding", CVPR
    2017, equations 3 to 12, on squared Euclidean distances over the largest of each row: k1
    neighbours must be reciprocal, an encoding is averaged over k2, and `weight` is λ, of the
    original distance against the Jaccard distance. Neighbours are found among all queries and the
    whole gallery; items that are hidden from a query are dropped from its answers after that, as
    the authors' code does.

    Raises:
        DataError: there are more than `MOST` items.
    """
    ours = _array(query)
    every = ours if gallery is None else np.concatenate([ours, _array(gallery)])
    if len(every) > MOST:
        raise DataError(
            f"[evaluate] rerank: there are {len(every):,} queries and gallery items; {MOST:,} can"
            " be re-ranked."
        )
    k1, k2 = min(k1, len(every) - 1), min(k2, len(every))
    neighbours, _ = Search(every, None).nearest(k1)
    near = np.concatenate(
        [np.arange(len(every))[:, None], neighbours], axis=1
    )  # first each item itself
    codes = torch.from_numpy(every)
    largest = np.array([float(_squared(part, codes).max()) for part in codes[:, None]])
    encoded = _encoded(every, near, largest, k1)
    if k2 > 1:
        rows = np.repeat(np.arange(len(every)), k2)
        from scipy.sparse import csr_array

        mean = csr_array(
            (np.full(len(rows), 1 / k2), (rows, near[:, :k2].ravel())), shape=(len(every),) * 2
        )
        encoded = (mean @ encoded).tocsr()
    start = 0 if gallery is None else len(ours)

    def distance(a: Tensor, b: Tensor) -> Tensor:
        left, right = _places(a).numpy(), _places(b).numpy() + start
        shared = _shared(encoded[left], encoded[right])
        jaccard = 1 - shared / (2 - shared)
        own = (
            _squared(codes[left], codes[right]).numpy()
            / np.where(largest[left] == 0, 1, largest[left])[:, None]
        )
        return torch.from_numpy(jaccard * (1 - weight) + own * weight)

    return _reordered(len(ours), None if gallery is None else len(every) - start, distance)


def _encoded(every: Floats, near: NDArray[np.int64], largest: Floats, k1: int) -> Any:
    """Return the encodings of items, sparse (N, N): weights of their expanded reciprocal
    neighbours, which add up to 1.
    """
    from scipy.sparse import csr_array

    def reciprocal(item: int, k: int) -> NDArray[np.int64]:
        forward = near[item, : k + 1]
        return np.asarray(forward[(near[forward, : k + 1] == item).any(axis=1)])

    half = round(k1 / 2)
    narrow = [reciprocal(item, half) for item in range(len(every))]
    columns, weights, ends = [], [], [0]
    codes = torch.from_numpy(every)
    for item in range(len(every)):
        wide = reciprocal(item, k1)
        grown = wide
        for other in wide:
            if len(np.intersect1d(narrow[other], wide)) > 2 / 3 * len(narrow[other]):
                grown = np.append(grown, narrow[other])
        grown = np.unique(grown)
        apart = _squared(codes[item : item + 1], codes[grown]).numpy()[0] / (largest[item] or 1)
        weight = np.exp(-apart)
        columns.append(grown)
        weights.append(weight / weight.sum())
        ends.append(ends[-1] + len(grown))
    return csr_array(
        (np.concatenate(weights), np.concatenate(columns), ends), shape=(len(every),) * 2
    )


def _shared(left: Any, right: Any) -> Floats:
    """Return Σ_g min(left_g, right_g) of sparse rows, (B, R)."""
    out = np.zeros((left.shape[0], right.shape[0]))
    by_column = right.tocsc()
    for row in range(left.shape[0]):
        for place in range(left.indptr[row], left.indptr[row + 1]):
            column = left.indices[place]
            some = slice(by_column.indptr[column], by_column.indptr[column + 1])
            out[row, by_column.indices[some]] += np.minimum(by_column.data[some], left.data[place])
    return out


def _squared(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()


def _reordered(queries: int, items: int | None, distance: DistanceBlock) -> Reordered:
    gallery = None if items is None else np.arange(items, dtype=np.float64)[:, None]
    return Reordered(np.arange(queries, dtype=np.float64)[:, None], gallery, distance)


def _places(codes: Tensor) -> Tensor:
    return codes[:, 0].long()


def _array(codes: Codes) -> Floats:
    array = codes.detach().cpu().numpy() if isinstance(codes, torch.Tensor) else np.asarray(codes)
    return np.ascontiguousarray(array, dtype=np.float64)
