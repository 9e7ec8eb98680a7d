"""Which structure suits an index: several are built over its own vectors and measured on vectors that are held out."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError
from retrieval.serving.index.alike import pages
from retrieval.serving.index.backends import make_backend
from retrieval.serving.index.collection import Collection
from retrieval.serving.index.contract import Floats, IndexBackend, Rows, checked_search
from retrieval.serving.local.compact import build as build_compact
from retrieval.serving.local.exact import nearest
from retrieval.serving.progress import Meter
from retrieval.serving.runtime import load_faiss

_QUERIES = 200
_LEAST = 1000
_K = 10
_ROUNDS = 3


@dataclass(frozen=True)
class Trial:
    """One structure, measured.

    Attributes:
        backend: its name.
        options: its parameters.
        recall: share of the ten nearest that it finds, after they are measured on the vectors.
        milliseconds: of one query on one thread, the median.
        bytes: of the structure itself, for all items; the vectors are mapped besides.
        seconds: that building took, for the vectors that were tried.
    """

    backend: str
    options: Mapping[str, Any]
    recall: float
    milliseconds: float
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Tuned:
    """What was tried, and what is taken.

    Attributes:
        trials: in the order in which they were tried.
        chosen: the fastest that meets both limits; None where none does.
        count: vectors that structures were built over.
    """

    trials: tuple[Trial, ...]
    chosen: Trial | None
    count: int


def tune(index: Collection, *, recall: float = 0.95, memory: int | None = None, most: int = 200_000) -> Tuned:
    """Measure structures on an index's own vectors; see `LivingIndex.tune`."""
    if not 0 < recall <= 1:
        raise DataError(f"Recall is a share above 0 and at most 1, not {recall}.")
    if len(index.generation.spans) > 1:
        raise DataError(
            "The vectors of this index have sub-spaces, each with a structure of its own, which tuning cannot weigh yet."
        )
    vectors, total = _sample(index, most + _QUERIES)
    if len(vectors) < _LEAST + _QUERIES:
        raise DataError(
            f"{total:,} items are searched exactly in a moment: there is nothing to tune below {_LEAST + _QUERIES:,}."
        )
    order = np.random.default_rng(0).permutation(len(vectors))
    queries, held = vectors[order[:_QUERIES]], np.ascontiguousarray(vectors[order[_QUERIES:]])
    _, exact = nearest(queries, held, _K)
    trials = []
    todo = [one for one in _grid(len(held), held.shape[1]) if one[0] in index.store.structures]
    with Meter("measuring", sum(len(points) for *_, points in todo), "structures") as meter:
        for name, options, points in todo:
            for trial in _tried(name, options, points, held, queries, exact, total):
                trials.append(trial)
                meter.update()
    good = [
        one
        for one in trials
        if one.recall >= recall and (memory is None or one.bytes + 4 * total * held.shape[1] <= memory)
    ]
    return Tuned(tuple(trials), min(good, key=lambda one: one.milliseconds, default=None), len(held))


def _sample(index: Collection, most: int) -> tuple[Floats, int]:
    """Return vectors of items, at most so many, chosen at random but repeatably; and how many items there are."""
    total = index.store.count()
    chance = min(1.0, 1.05 * most / max(1, total))
    rng = np.random.default_rng(1)
    chosen: list[Floats] = []
    with Meter("reading", total, "items") as meter:
        for page in pages(index, size=4096):
            chosen += [item.vector for item in page if chance == 1 or rng.random() < chance]
            meter.update(len(page))
    return np.array(chosen[:most], np.float32), total


def _grid(count: int, width: int) -> Iterator[tuple[str, dict[str, Any], Sequence[dict[str, Any]]]]:
    """Give what is tried: a back end, what it is built with, and what its search may be given afterwards."""
    yield "flat", {}, [{}]
    yield "sq8", {}, [{}]
    for links in (16, 32):
        yield "hnsw", {"m": links}, [{"ef_search": breadth} for breadth in (32, 64, 128, 256, 512)]
    lists = max(1, min(int(4 * count**0.5), count // 39))
    probes = [
        {"probes": share} for share in sorted({max(1, lists // part) for part in (256, 64, 32, 16, 8, 4)})
    ]
    yield "ivf", {"lists": lists}, probes
    for size in sorted({min(width, size) for size in (width // 4, width // 2) if size}):
        yield "ivfpq", {"lists": lists, "bytes": size}, probes[2:]


def _tried(
    name: str,
    options: dict[str, Any],
    points: Sequence[dict[str, Any]],
    vectors: Floats,
    queries: Floats,
    exact: Rows,
    total: int,
) -> Iterator[Trial]:
    """Build one structure, and measure it with each of the parameters of its search."""
    began = time.perf_counter()
    if name == "flat":
        compact = build_compact(vectors)
        seconds = time.perf_counter() - began
        size = 0 if compact is None else compact.table.nbytes
        spent = _spent(lambda query: nearest(query, vectors, _K + 8, compact=compact), queries)
        yield Trial(name, {}, 1.0, spent, size * total // len(vectors), seconds)
        return
    built = make_backend(name, options)
    built.build(vectors, lambda count: None)
    seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "structure"
        built.save(file)
        size = file.stat().st_size * total // len(vectors)
    for point in points:
        for key, value in point.items():
            setattr(built, key, value)
        found = _candidates(built, name, queries, vectors)
        share = float(
            np.mean([len(np.intersect1d(one, other)) / _K for one, other in zip(found, exact, strict=True)])
        )
        spent = _spent(lambda query: _candidates(built, name, query, vectors), queries)
        yield Trial(name, {**options, **point}, share, spent, size, seconds)


def _candidates(backend: IndexBackend, name: str, queries: Floats, vectors: Floats) -> list[Rows]:
    """Return the ten nearest that a back end proposes, measured on the vectors, as an index does."""
    rows = checked_search(backend, name, queries, min(backend.expand * (_K + 8), len(vectors)), len(vectors))
    out = []
    for query, own in zip(queries, rows, strict=True):
        there = own[own >= 0]
        squared = ((vectors[there] - query) ** 2).sum(axis=1)
        out.append(there[np.argsort(squared, kind="stable")[:_K]])
    return out


def _spent(search: Callable[[Floats], object], queries: Floats) -> float:
    """Return the milliseconds of one query: the median, each query at its best of some rounds, on one thread."""
    load_faiss().omp_set_num_threads(1)
    best = np.full(len(queries[:50]), np.inf)
    for _ in range(_ROUNDS):
        for at, query in enumerate(queries[:50]):
            began = time.perf_counter()
            search(query[None])
            best[at] = min(best[at], time.perf_counter() - began)
    return float(1000 * np.median(best))
