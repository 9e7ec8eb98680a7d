"""Retrieval metrics of vectors that need not fit into memory: `retrieval evaluate FOLDER`.

Each of this machine's cores searches one block of the gallery for one block of queries. A neighbour
is an integer that holds its distance, rounded to 24 bits as in exact search, and its row. The
nearest items are therefore the smallest integers of all blocks, in any order of the blocks, and the
metrics are those of `evaluate`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.evaluation.evaluation import (
    DEFAULT_METRICS,
    Evaluation,
    class_numbers,
    depth_of,
    means,
)
from retrieval.evaluation.neighbors import MOST_ITEMS, Neighbors, key_rows, rounded_keys
from retrieval.host.cores import cores
from retrieval.model.metrics import metric
from retrieval.serving.files.places import StrPath
from retrieval.serving.index.embedded import VectorRows
from retrieval.serving.progress import Meter, Progress, shown
from retrieval.serving.sessions import ahead
from retrieval.serving.store.search import measured

if TYPE_CHECKING:
    from retrieval.model.contracts import Metric

Ints = NDArray[np.int64]
Span = tuple[int, int]
Block = tuple[Span, Span, int]
"""Rows of queries, rows of the gallery, and the number of neighbours."""

_QUERIES = 8192
_GALLERY_BYTES = 64 * 2**20
"""Bytes of a block of the gallery in float64."""
_NO_NEIGHBOR = np.iinfo(np.int64).max


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
        DataError: a folder is not a complete folder of embeddings, or an item has no label.
    """
    queries = VectorRows(Path(folder))
    items = None if gallery is None else VectorRows(Path(gallery))
    if items is not None and items.bundle != queries.bundle:
        raise DataError(
            f"{folder} and {gallery} hold vectors of two bundles, which have no distance to each"
            " other."
        )
    theirs = None if items is None else items.labels()
    return pairwise(
        queries,
        queries.labels(),
        gallery=items,
        gallery_labels=theirs,
        metrics=metrics,
        progress=progress,
    )


@shown
def pairwise(
    codes: VectorRows,
    labels: Sequence[Any] | NDArray[Any],
    *,
    gallery: VectorRows | None = None,
    gallery_labels: Sequence[Any] | NDArray[Any] | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    block: int | None = None,
    progress: Progress = False,
) -> Evaluation:
    """Return the metrics of `evaluate` without holding the gallery or a matrix of all pairs.

    A block has `block` rows of the gallery and of queries; `None` means 64 MB and 8,192 rows. For
    the other arguments see `evaluate`.

    Raises:
        DataError: codes and labels do not fit together, or codes are not finite.
    """
    chosen = {name: metric(name) for name in metrics}
    searched, itself = codes if gallery is None else gallery, gallery is None
    if len(searched) > MOST_ITEMS:
        raise DataError(
            f"The gallery has {len(searched):,} items; exact search takes {MOST_ITEMS:,} at most."
        )
    query_class, item_class = class_numbers(labels, len(codes), gallery_labels, len(searched))
    counts = np.bincount(item_class, minlength=int(query_class.max(initial=-1)) + 1)
    relevant = counts[query_class] - int(itself)
    values = {name: np.full(len(query_class), np.nan) for name in chosen}
    blocks = list(_blocks(len(codes), searched, relevant, chosen, block))
    waiting = Counter(queries for queries, _, _ in blocks)
    nearest: dict[Span, Ints] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the last bit of a product may depend on the number of threads
    try:
        with Meter("searching", len(blocks), "blocks") as meter:
            search = _Search(codes, searched, itself)
            for (queries, _, k), keys in ahead(search, blocks, workers=cores(), most=cores()):
                if queries in nearest:
                    keys = np.sort(np.concatenate([nearest[queries], keys], axis=1), axis=1)[:, :k]
                nearest[queries] = keys
                waiting[queries] -= 1
                meter.update()
                if not waiting[queries]:
                    keys, rows = nearest.pop(queries), np.arange(*queries)
                    filled = keys != _NO_NEIGHBOR
                    classes = item_class[np.where(filled, key_rows(keys), 0)]
                    matches = (classes == query_class[rows, None]) & filled
                    some = relevant[rows] > 0
                    for name, measure in chosen.items():
                        values[name][rows[some]] = measure(matches[some], relevant[rows[some]])
    finally:
        torch.set_num_threads(threads)
    answerable = np.flatnonzero(relevant > 0)
    return Evaluation(
        means(values, answerable),
        len(answerable),
        len(searched),
        len(query_class) - len(answerable),
    )


def _blocks(
    count: int,
    gallery: VectorRows,
    relevant: Ints,
    metrics: Mapping[str, Metric],
    block: int | None,
) -> Iterator[Block]:
    """Yield all blocks, grouped by queries."""
    size = block or max(1, _GALLERY_BYTES // (8 * max(gallery.width, 1)))
    step = block or _QUERIES
    for first in range(0, count, step):
        queries = first, min(first + step, count)
        most = int(relevant[slice(*queries)].max(initial=0))
        if not most:
            continue
        k = depth_of(metrics, most, len(gallery))
        for start in range(0, len(gallery), size):
            yield queries, (start, min(start + size, len(gallery))), k


class _Search(threading.local):
    """Searches a block; each thread keeps its last block of the gallery."""

    def __init__(self, codes: VectorRows, gallery: VectorRows, itself: bool) -> None:
        self.codes, self.gallery, self.itself = codes, gallery, itself
        self.kept: tuple[Span, Neighbors, NDArray[np.float64]] | None = None

    def __call__(self, block: Block) -> tuple[Block, Ints]:
        """Return the block and the sorted keys (B, k) of its queries' neighbours."""
        (first, last), (low, high), k = block
        if self.kept is None or self.kept[0] != (low, high):
            self.kept = None  # free the old block before reading
            vectors = self.gallery.read(low, high)
            exact = np.ascontiguousarray(vectors, np.float64)
            self.kept = (low, high), Neighbors(vectors, device="cpu"), exact
        _, search, items = self.kept
        keys = np.full((last - first, k), _NO_NEIGHBOR)
        step = search.block(k)
        for start in range(first, last, step):
            queries = self.codes.read(start, min(start + step, last))
            own = np.arange(start, start + len(queries)) - low
            own[(own < 0) | (own >= high - low)] = -1
            columns, _ = search(queries, k, own if self.itself else None)
            query, place = np.nonzero(columns >= 0)
            column = columns[query, place]
            # `Neighbors` scales each block, so measure again to compare distances across blocks
            squared = measured(np.asarray(queries, np.float64), items, query, column)
            keys[start - first + query, place] = rounded_keys(squared, column + low)
        keys.sort(axis=1)
        return block, keys
