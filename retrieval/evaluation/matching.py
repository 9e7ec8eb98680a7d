"""For each query and rank, whether the item there has the query's label: what metrics are made of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.evaluation.exclusion import Search
from retrieval.evaluation.neighbors import as_tensor
from retrieval.evaluation.ranking import Ranking

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def matching(
    search: Search, query_class: Ints, item_class: Ints, asked: Ints, depths: Ints
) -> Iterator[tuple[Ints, Bools]]:
    """Yield queries (B,) and matches (B, k), block by block; k is at least the depth of each.

    Args:
        search: the queries and what is searched.
        query_class: (Q,) class numbers.
        item_class: (N,) class numbers.
        asked: (A,) rows of the queries, in order of depth.
        depths: (A,) how many ranks each wants, ascending.
    """
    ranked = Ranking.serves(len(item_class), depths) if _only_distance(search) else 0
    left = [np.arange(ranked, len(asked))]
    if ranked:
        codes = as_tensor(search.queries, "gallery").cpu()
        if codes.dtype != torch.float64:
            codes = codes.float()  # exactly, of half precision
        place = np.empty(len(query_class), np.int64)
        place[asked] = np.arange(len(asked))
        for rows, matches, failed in Ranking(codes.numpy(), item_class, asked[:ranked], depths[:ranked]):
            yield rows[~failed], matches[~failed]
            left.append(place[rows[failed]])
    rest = np.sort(np.concatenate(left))
    if len(rest):
        for rows, items, _ in search.blocks(asked[rest], depths[rest]):
            yield rows, (item_class[items] == query_class[rows, None]) & (items >= 0)


def _only_distance(search: Search) -> bool:
    """Return whether items are searched for one another on a CPU, by Euclidean distance alone."""
    on_cpu = search.device == "cpu" or (search.device == "auto" and not torch.cuda.is_available())
    plain = search.gallery is None and search.distance is None and search.hidden is None
    return on_cpu and plain and search.block is None
