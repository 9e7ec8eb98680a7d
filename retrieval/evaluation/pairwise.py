"""Retrieval metrics of vectors that need not fit into memory: `retrieval evaluate FOLDER`.

Blocks of queries search one block of the gallery after another, on all cores. A neighbour is a key
(see `rounded_keys`): an integer that holds its distance, rounded to 24 bits, and its row. The
nearest items are therefore the smallest keys of all blocks, and the metrics are those of
`evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrieval.base.arrays import Array, Ints
from retrieval.base.folder_kinds import StrPath
from retrieval.base.machine import ahead, cores
from retrieval.base.progress import Progress, shows_progress
from retrieval.errors import DataError
from retrieval.evaluation.evaluation import (
    DEFAULT_METRICS,
    Evaluation,
    class_numbers,
    evaluate_search,
    is_pooled,
    resolve_metrics,
)
from retrieval.evaluation.neighbors import MOST_ITEMS, Neighbors, key_rows, rounded_keys
from retrieval.index.read_embeddings import VectorRows
from retrieval.store.exact_search import squared_distances

# Sizes of a block: rows of queries, and bytes of the gallery in float64.
_QUERIES = 8192
_GALLERY_BYTES = 64 * 2**20
_NO_NEIGHBOR = np.iinfo(np.int64).max


@shows_progress
def evaluate_vectors(
    folder: StrPath,
    *,
    gallery: StrPath | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    progress: Progress = True,
) -> Evaluation:
    """Return the retrieval metrics of a folder of labelled items that `retrieval embed` wrote.

    Args:
        folder: the queries and, without `gallery`, also the gallery.
        gallery: another such folder to search in.
        metrics: see `evaluate`.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Raises:
        DataError: a folder is not a complete folder of embeddings, an item has no label, or no
            query has a right answer.
    """
    queries = VectorRows(Path(folder))
    items = None
    item_labels = None
    if gallery is not None:
        items = VectorRows(Path(gallery))
        if items.bundle != queries.bundle:
            raise DataError(
                f"{folder} and {gallery} hold vectors of two bundles, which cannot be compared."
            )
        item_labels = items.labels()
    evaluation = pairwise(queries, queries.labels(), items, item_labels, metrics)
    if not evaluation.queries:
        raise DataError(
            f"No item of {folder} can be a query, so there is no score: no other item that is"
            " searched has its label."
        )
    return evaluation


def pairwise(
    codes: VectorRows,
    labels: Sequence[Any] | Array,
    gallery: VectorRows | None = None,
    gallery_labels: Sequence[Any] | Array | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
) -> Evaluation:
    """Return the metrics of `evaluate` without holding the gallery or all distances in memory.

    Raises:
        DataError: codes and labels do not fit together, or codes are not finite.
    """
    search: Any = StoredSearch(codes, gallery)
    size = len(search.searched)
    if size > MOST_ITEMS:
        raise DataError(
            f"The gallery has {size:,} items; exact search takes {MOST_ITEMS:,} at most."
        )
    query_class, item_class = class_numbers(labels, len(codes), gallery_labels, size)
    chosen = resolve_metrics(metrics)
    if pooled := [name for name, measure in chosen.items() if is_pooled(measure)]:
        raise DataError(
            f"{', '.join(pooled)}: a metric of all queries together needs vectors in memory. Use"
            " retrieval.evaluate."
        )
    return evaluate_search(search, query_class, item_class, metrics=chosen)


@dataclass(frozen=True)
class StoredSearch:
    """Exact search of vectors in files, as `NeighborSearch` does of vectors in memory.

    Without a gallery, the queries are the gallery, and each query is left out of its own results.
    """

    queries: VectorRows
    gallery: VectorRows | None
    hidden: None = None
    ranks_all = False

    @property
    def searched(self) -> VectorRows:
        """The vectors in which to search: the gallery or, without one, the queries."""
        if self.gallery is None:
            return self.queries
        return self.gallery

    def blocks(self, query_rows: Ints, depths: Ints) -> Iterator[tuple[Ints, Ints, None]]:
        """Yield blocks as `Search.blocks` does, in the order of the files, without distances."""
        itself = self.gallery is None
        needed = np.zeros(len(self.queries), np.int64)
        needed[query_rows] = depths
        for start in range(0, len(needed), _QUERIES):
            rows = np.arange(start, min(start + _QUERIES, len(needed)))
            if k := int(needed[rows].max()):
                nearest = _nearest(self.queries, self.searched, rows, k, itself)
                items = np.where(nearest == _NO_NEIGHBOR, -1, key_rows(nearest))
                scored = needed[rows] > 0
                yield rows[scored], items[scored], None


def _nearest(codes: VectorRows, gallery: VectorRows, rows: Ints, k: int, itself: bool) -> Ints:
    """Return the sorted keys (B, k) of the nearest items of consecutive queries `rows` (B,)."""
    nearest = np.full((len(rows), k), _NO_NEIGHBOR)
    size = max(1, _GALLERY_BYTES // (8 * max(gallery.width, 1)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each core searches for queries of its own
    try:
        for start in range(0, len(gallery), size):
            items = range(start, min(start + size, len(gallery)))
            _search_block(nearest, codes, gallery, rows, items, itself)
    finally:
        torch.set_num_threads(threads)
    return nearest


def _search_block(
    nearest: Ints, codes: VectorRows, gallery: VectorRows, rows: Ints, items: range, itself: bool
) -> None:
    """Merge the keys of a block of the gallery into the keys `nearest` (B, k) of all before it."""
    vectors = gallery.read(items.start, items.stop)
    k = nearest.shape[1]
    search = Neighbors(vectors, device="cpu")
    exact = np.ascontiguousarray(vectors, np.float64)

    def merge(part: slice) -> None:
        part_rows = rows[part]
        queries = codes.read(int(part_rows[0]), int(part_rows[-1]) + 1)
        left_out = None
        if itself:
            inside = (part_rows >= items.start) & (part_rows < items.stop)
            left_out = np.where(inside, part_rows - items.start, -1)
        columns, _ = search(queries, min(k, len(items)), left_out)
        query, rank = np.nonzero(columns >= 0)
        column = columns[query, rank]
        # `Neighbors` scales each block, so measure again to compare distances across blocks
        squared = squared_distances(np.asarray(queries, np.float64), exact, query, column)
        keys: Ints = np.full(columns.shape, _NO_NEIGHBOR)
        keys[query, rank] = rounded_keys(squared, column + items.start)
        if items.start:
            keys = np.concatenate([nearest[part], keys], axis=1)
        keys.sort(axis=1)
        nearest[part, : keys.shape[1]] = keys[:, :k]

    step = search.block(k)
    parts = (slice(start, start + step) for start in range(0, len(rows), step))
    for _ in ahead(merge, parts, workers=cores(), most=cores()):
        pass
