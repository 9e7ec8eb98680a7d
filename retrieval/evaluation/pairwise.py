"""Retrieval metrics of vectors that need not fit into memory: `retrieval evaluate FOLDER`.

Each of this machine's cores searches one block of the gallery for one block of queries. A neighbour
is a key (see `rounded_keys`): an integer that holds its distance, rounded to 24 bits, and its row.
The nearest items are therefore the smallest keys of all blocks, whatever the order of the blocks,
and the metrics are those of `evaluate`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
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
Block = tuple[range, range, int]
"""Rows of queries, rows of the gallery, and the number of neighbours."""

# Sizes of a block: rows of queries, and bytes of the gallery in float64.
_QUERIES = 8192
_GALLERY_BYTES = 64 * 2**20
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
            f"{folder} and {gallery} hold vectors of two bundles, which cannot be compared."
        )
    item_labels = None if items is None else items.labels()
    options: Any = {"metrics": metrics, "progress": progress}
    return pairwise(queries, queries.labels(), gallery=items, gallery_labels=item_labels, **options)


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
    """Return the metrics of `evaluate` without holding the gallery or all distances in memory.

    A block has `block` rows of the gallery and of queries; `None` means 64 MB of the gallery and
    8,192 queries. For the other arguments, see `evaluate`.

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
    blocks = _blocks(relevant, searched, chosen, block)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the last bit of a product may depend on the number of threads
    try:
        with Meter("searching", len(blocks), "blocks") as meter:
            search = _Search(codes, searched, itself)
            nearest = np.empty((0, 0), np.int64)
            for (queries, items, k), keys in ahead(search, blocks, workers=cores(), most=cores()):
                if items.start:  # not the first block of these queries
                    keys = np.sort(np.concatenate([nearest, keys], axis=1), axis=1)[:, :k]
                nearest = keys
                meter.update()
                if items.stop < len(searched):
                    continue
                rows, scored = np.array(queries), relevant[queries] > 0
                present = nearest != _NO_NEIGHBOR
                classes = item_class[np.where(present, key_rows(nearest), 0)]
                matches = (classes == query_class[rows, None]) & present
                for name, measure in chosen.items():
                    values[name][rows[scored]] = measure(matches[scored], relevant[rows[scored]])
    finally:
        torch.set_num_threads(threads)
    answerable = np.flatnonzero(relevant > 0)
    singletons = len(query_class) - len(answerable)
    return Evaluation(means(values, answerable), len(answerable), len(searched), singletons)


def _blocks(
    relevant: Ints, gallery: VectorRows, metrics: Mapping[str, Metric], block: int | None
) -> list[Block]:
    """Return all blocks in the order of queries, whose numbers of relevant items are given (Q,)."""
    size = block or max(1, _GALLERY_BYTES // (8 * max(gallery.width, 1)))
    step = block or _QUERIES
    blocks = []
    for first in range(0, len(relevant), step):
        queries = range(first, min(first + step, len(relevant)))
        if most := int(relevant[queries].max(initial=0)):
            k = depth_of(metrics, most, len(gallery))
            for start in range(0, len(gallery), size):
                blocks.append((queries, range(start, min(start + size, len(gallery))), k))
    return blocks


class _Search(threading.local):
    """Searches a block. Each thread keeps the last block of the gallery that it read."""

    def __init__(self, codes: VectorRows, gallery: VectorRows, itself: bool) -> None:
        self.codes, self.gallery, self.itself = codes, gallery, itself
        self.kept: tuple[range, Neighbors, NDArray[np.float64]] | None = None

    def __call__(self, block: Block) -> tuple[Block, Ints]:
        """Return the block and the sorted keys (B, k) of its queries' neighbours."""
        queries, items, k = block
        if self.kept is None or self.kept[0] != items:
            self.kept = None  # free the old block before reading
            vectors = self.gallery.read(items.start, items.stop)
            exact = np.ascontiguousarray(vectors, np.float64)
            self.kept = items, Neighbors(vectors, device="cpu"), exact
        _, search, gallery = self.kept
        keys = np.full((len(queries), k), _NO_NEIGHBOR)
        step = search.block(k)
        for start in range(0, len(queries), step):
            rows = queries[start : start + step]
            codes = self.codes.read(rows.start, rows.stop)
            own = np.array([row - items.start if row in items else -1 for row in rows])
            columns, _ = search(codes, k, own if self.itself else None)
            query, place = np.nonzero(columns >= 0)
            column = columns[query, place]
            # `Neighbors` scales each block, so measure again to compare distances across blocks
            squared = measured(np.asarray(codes, np.float64), gallery, query, column)
            keys[start + query, place] = rounded_keys(squared, column + items.start)
        keys.sort(axis=1)
        return block, keys
