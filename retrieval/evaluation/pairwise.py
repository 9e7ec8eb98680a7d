"""Retrieval figures of galleries that need not fit into memory: blocks of queries by blocks of the gallery, on any runner.

Each task measures one block of queries against one block of the gallery, in one thread, and gives the nearest of each query there.
What two blocks give is merged by a total order (the distance rounded to 24 bits, as exact search rounds it, then the row), so that the figures do not depend
on who did which block, or when: with a cluster and without they are the same to the last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.evaluation.clusters import cluster_figures
from retrieval.evaluation.evaluation import DEFAULT_METRICS, Evaluation, class_numbers
from retrieval.evaluation.neighbors import Codes, DistanceBlock, Neighbors
from retrieval.host.cores import cores
from retrieval.model.built_in import metric
from retrieval.serving.embedding.runners import Runner, here
from retrieval.serving.files.places import StrPath
from retrieval.serving.index.embedded import VectorRows
from retrieval.serving.progress import Meter, Progress, shown
from retrieval.serving.store.search import measured

if TYPE_CHECKING:
    from retrieval.model.contracts import Metric

_QUERIES = 8192
_BYTES = 64 * 2**20
"""Of a block of the gallery in double precision."""
_BITS = 24

Answers = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Rows of the gallery (B, k), −1 where there are fewer, and what they are ordered by (B, k)."""


class Rows(Protocol):
    """Codes that are read block by block, from memory or from files."""

    def __len__(self) -> int:
        """Return how many rows there are."""

    @property
    def width(self) -> int:
        """How many numbers a row has."""

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return some rows (stop − start, C)."""


class ArrayRows:
    """Codes (N, C) that are in memory, or in a mapped file."""

    def __init__(self, codes: Codes) -> None:
        self._codes = codes.detach().cpu().numpy() if isinstance(codes, torch.Tensor) else codes
        if self._codes.ndim != 2:
            raise DataError(f"Codes are a matrix, one row per item, not of shape {self._codes.shape}.")

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return int(self._codes.shape[1])

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return some rows."""
        return self._codes[start:stop]


@dataclass(frozen=True)
class _Block:
    """A block of queries against a block of the gallery.

    Attributes:
        queries: first row, and the one behind the last.
        gallery: likewise.
        k: how many are wanted.
    """

    queries: tuple[int, int]
    gallery: tuple[int, int]
    k: int


@dataclass(frozen=True)
class _Found:
    queries: tuple[int, int]
    answers: Answers


@shown
def pairwise(
    codes: Rows,
    labels: Sequence[Any] | NDArray[Any],
    *,
    gallery: Rows | None = None,
    gallery_labels: Sequence[Any] | NDArray[Any] | None = None,
    metrics: Sequence[str] | Mapping[str, Metric] = DEFAULT_METRICS,
    distance: DistanceBlock | None = None,
    runner: Runner | None = None,
    block: int | None = None,
    progress: Progress = False,
) -> Evaluation:
    """Return the retrieval figures of codes by exact search, as `evaluate` does, without holding the gallery or a matrix of all pairs.

    Args:
        codes: the queries'. Without `gallery` they are the gallery too, each query left out of its own answer.
        labels: (Q,) one label per query.
        gallery: codes to search in.
        gallery_labels: (N,) their labels.
        metrics: see `evaluate`.
        distance: see `evaluate`; it goes to every worker.
        runner: who does the blocks; None is this machine's cores.
        block: rows of a block of the gallery, and of queries; by default as many as take 64 MB, and 8,192.
        progress: True shows a bar, False nothing; a function is told (what, done, total).

    Raises:
        DataError: codes and labels that do not fit together, or codes that are not finite.
    """
    chosen = dict(metrics) if isinstance(metrics, Mapping) else {name: metric(name) for name in metrics}
    if (gallery is None) != (gallery_labels is None):
        raise DataError("gallery and gallery_labels come together: one of them is missing.")
    searched, itself = codes if gallery is None else gallery, gallery is None
    query_class, item_class = class_numbers(labels, len(codes), gallery_labels, len(searched))
    counts = np.bincount(item_class, minlength=int(query_class.max(initial=-1)) + 1)
    relevant = counts[query_class] - int(itself)
    values = {name: np.full(len(query_class), np.nan) for name in chosen}
    asked = np.flatnonzero(relevant > 0)
    blocks = list(_blocks(codes, searched, relevant, chosen, block))
    wanted: dict[tuple[int, int], int] = {}
    for one in blocks:
        wanted[one.queries] = wanted.get(one.queries, 0) + 1
    merged: dict[tuple[int, int], Answers] = {}
    work = runner or partial(here, workers=cores())
    with _threads_kept(), Meter("searching", len(blocks), "blocks") as meter:
        for found in work(_searcher, (codes, searched, itself, distance), blocks):
            key = found.queries
            merged[key] = _merged(merged[key], found.answers) if key in merged else found.answers
            wanted[key] -= 1
            if not wanted[key]:
                rows, _ = merged.pop(key)
                some = slice(*key)
                matches = (item_class[rows] == query_class[some, None]) & (rows >= 0)
                there = relevant[some] > 0
                for name, measure in chosen.items():
                    values[name][np.arange(*key)[there]] = measure(matches[there], relevant[some][there])
            meter.update()
    means = {name: float(each[asked].mean()) if len(asked) else float("nan") for name, each in values.items()}
    return Evaluation(means, len(asked), len(searched), len(query_class) - len(asked))


def evaluate_on_ray(
    address: str,
    codes: Codes,
    labels: Sequence[Any] | NDArray[Any],
    gallery: Codes | None = None,
    *,
    gallery_labels: Sequence[Any] | NDArray[Any] | None = None,
    metrics: Mapping[str, Metric],
    distance: DistanceBlock | None = None,
    clusters: bool = False,
) -> Evaluation:
    """Return what `evaluate` does of codes in memory, searched on a Ray cluster; clusters are made here."""
    from retrieval.serving.embedding.runners import Cluster

    with Cluster.joined(address, "cpu", 1) as cluster:
        found = pairwise(
            ArrayRows(codes), labels, gallery=None if gallery is None else ArrayRows(gallery), gallery_labels=gallery_labels,
            metrics=metrics, distance=distance, runner=cluster, progress=True,
        )  # fmt: skip
    if clusters:
        count = len(codes) if gallery is None else len(gallery)
        classes, _ = class_numbers(labels, len(codes), gallery_labels, count)
        return replace(found, values=found.values | cluster_figures(codes, classes, seed=0))
    return found


def evaluate_vectors(
    folder: StrPath,
    *,
    gallery: StrPath | None = None,
    metrics: Sequence[str] | Mapping[str, Metric] = DEFAULT_METRICS,
    ray: str | None = None,
    progress: Progress = True,
) -> Evaluation:
    """Return the retrieval figures of a folder that `retrieval embed` wrote, whose items have labels. It may be larger than the memory.

    Args:
        folder: the queries, and without `gallery` what is searched, too. Every node of a cluster opens it by the same path.
        gallery: another such folder, to search in.
        metrics: see `evaluate`.
        ray: the address of a Ray cluster; None searches here. The figures are the same to the last bit.
        progress: True shows a bar, False nothing; a function is told (what, done, total).

    Raises:
        DataError: it is no complete folder of embeddings, or an item has no label.
    """
    queries = VectorRows(Path(folder))
    items = None if gallery is None else VectorRows(Path(gallery))
    if items is not None and items.bundle != queries.bundle:
        raise DataError(
            f"{folder} and {gallery} hold vectors of two bundles, which have no distance to each other."
        )
    with ExitStack() as stack:
        runner: Runner | None = None
        if ray is not None:
            from retrieval.serving.embedding.runners import Cluster

            runner = stack.enter_context(Cluster.joined(ray, "cpu", 1))
        return pairwise(
            queries, queries.labels(), gallery=items, gallery_labels=None if items is None else items.labels(), metrics=metrics,
            runner=runner, progress=progress,
        )  # fmt: skip


def _blocks(
    codes: Rows, gallery: Rows, relevant: NDArray[np.int64], metrics: Mapping[str, Metric], block: int | None
) -> Iterator[_Block]:
    """Give all blocks, those of the same queries one after another."""
    size = block or max(1, _BYTES // (8 * max(gallery.width, 1)))
    step = block or _QUERIES
    for first in range(0, len(codes), step):
        queries = first, min(first + step, len(codes))
        most = int(relevant[slice(*queries)].max(initial=0))
        if not most:
            continue
        depths = {"relevant": most, "all": len(gallery)}
        k = max(
            (one.depth if isinstance(one.depth, int) else depths[one.depth] for one in metrics.values()),
            default=1,
        )
        for start in range(0, len(gallery), size):
            yield _Block(queries, (start, min(start + size, len(gallery))), k)


def _merged(one: Answers, other: Answers) -> Answers:
    """Return the first k of two lists of answers."""
    k = one[0].shape[1]
    rows, keys = (np.concatenate(pair, axis=1) for pair in zip(one, other, strict=True))
    order = np.lexsort((rows, keys), axis=1)[:, :k]
    return np.take_along_axis(rows, order, 1), np.take_along_axis(keys, order, 1)


def _searcher(
    codes: Rows, gallery: Rows, itself: bool, distance: DistanceBlock | None
) -> Callable[[_Block], _Found]:
    """Return what searches blocks. Each thread keeps the block of the gallery that it had last."""
    torch.set_num_threads(1)  # how many there are may decide the last bit of a product
    local = threading.local()

    def search(block: _Block) -> _Found:
        if getattr(local, "at", None) != block.gallery:
            local.at, kept = None, gallery.read(*block.gallery)
            local.search = Neighbors(kept, distance=distance, device="cpu")
            local.kept = None if distance is not None else np.ascontiguousarray(kept, np.float64)
            local.at = block.gallery
        return _Found(block.queries, _answers(codes, local.search, local.kept, block, itself))

    return search


def _answers(
    codes: Rows, search: Neighbors, kept: NDArray[np.float64] | None, block: _Block, itself: bool
) -> Answers:
    first, last = block.queries
    low, high = block.gallery
    rows = np.full((last - first, block.k), -1, np.int64)
    keys = np.full((last - first, block.k), np.inf)
    size = search.block(block.k)
    for start in range(first, last, size):
        stop = min(start + size, last)
        queries = codes.read(start, stop)
        own = np.arange(start, stop) - low
        own[(own < 0) | (own >= high - low)] = -1
        columns, distances = search(queries, block.k, own if itself else None)
        there = columns >= 0
        part = slice(start - first, stop - first)
        rows[part] = np.where(there, columns + low, -1)
        if kept is None:
            keys[part] = distances
            continue
        at, place = np.nonzero(there)
        squared = measured(np.asarray(queries, np.float64), kept, at, columns[at, place])
        keys[start - first + at, place] = _rounded(squared)
    order = np.lexsort((rows, keys), axis=1)
    return np.take_along_axis(rows, order, 1), np.take_along_axis(keys, order, 1)


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return numbers rounded to the 24 significant bits of float32, at any size."""
    mantissa, exponent = np.frexp(values)
    found: NDArray[np.float64] = np.ldexp(np.round(np.ldexp(mantissa, _BITS)), exponent - _BITS)
    return found


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Give torch its threads back at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
