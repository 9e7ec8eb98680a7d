"""Which structure suits an index: several are built over its own vectors and measured on vectors
that are held out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from retrieval.errors import DataError, StoreError
from retrieval.serving.index.alike import pages
from retrieval.serving.index.backends import make_backend
from retrieval.serving.index.contract import Floats, IndexBackend, Rows, checked_search
from retrieval.serving.index.measuring import MARGIN
from retrieval.serving.manifest import Manifest
from retrieval.serving.merging import merged
from retrieval.serving.progress import Meter
from retrieval.serving.runtime import load_faiss
from retrieval.serving.store.search import Companion, nearest

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index

_QUERIES = 200
_TIMED_QUERIES = 50
_FEWEST_VECTORS = 1000
_K = 10
_ROUNDS = 3


@dataclass(frozen=True)
class Trial:
    """One structure, measured.

    Attributes:
        backend: its name.
        options: its parameters, the same in each sub-space.
        recall: share of the ten nearest that it finds, after they are measured on the vectors.
        milliseconds: of one query on one thread, the median.
        bytes: of the structure itself, for all items; the vectors are mapped besides.
        seconds: that building took, for the vectors that were tried.
    """

    backend: str
    options: dict[str, Any]
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
        recall: that was asked for.
        memory: likewise, in bytes; None without a limit.
        when: it was measured, by ISO 8601.
    """

    trials: tuple[Trial, ...]
    chosen: Trial | None
    count: int
    recall: float
    memory: int | None
    when: str

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, as an index keeps it; `chosen` is a place among the
        trials.
        """
        chosen = None if self.chosen is None else self.trials.index(self.chosen)
        values = asdict(self)
        return {
            "vectors": values.pop("count"),
            **values,
            "trials": list(values["trials"]),
            "chosen": chosen,
        }

    @staticmethod
    def of(kept: Mapping[str, Any]) -> Tuned:
        """Return what `as_dict` gave.

        Raises:
            StoreError: it is something else.
        """
        try:
            trials = TypeAdapter(tuple[Trial, ...]).validate_python(kept["trials"])
            chosen = None if kept["chosen"] is None else trials[kept["chosen"]]
            memory = None if kept["memory"] is None else int(kept["memory"])
            return Tuned(
                trials,
                chosen,
                int(kept["vectors"]),
                float(kept["recall"]),
                memory,
                str(kept["when"]),
            )
        except (KeyError, IndexError, TypeError, ValueError) as fault:
            raise StoreError(
                "What the index keeps of its tuning cannot be read. Tune it again."
            ) from fault


@dataclass(frozen=True)
class _Sample:
    """Vectors that structures are tried on, and how the index measures them.

    Attributes:
        vectors: (N, P).
        spans: half-open column range `(start, stop)` of each sub-space; one of all columns without
            any.
        manifest: of the bundle.
        total: how many items the index has.
    """

    vectors: Floats
    spans: Sequence[tuple[int, int]]
    manifest: Manifest
    total: int

    def exactly(self, queries: Floats, companion: Companion | None = None) -> list[Rows]:
        """Return the ten nearest of each query."""
        spans: Sequence[tuple[int, int] | None] = self.spans if len(self.spans) > 1 else [None]
        k = _K + MARGIN
        rows = [
            nearest(queries, self.vectors, k, span=span, companion=companion)[1] for span in spans
        ]
        return self._ordered(queries, rows)

    def proposed(self, backends: Sequence[IndexBackend], name: str, queries: Floats) -> list[Rows]:
        """Return the ten nearest of what back ends, one a sub-space, propose for each query."""
        rows = []
        for backend, (start, stop) in zip(backends, self.spans, strict=True):
            count = min(backend.expand * (_K + MARGIN), len(self.vectors))
            rows.append(
                checked_search(backend, name, queries[:, start:stop], count, len(self.vectors))
            )
        return self._ordered(queries, rows)

    def _ordered(self, queries: Floats, proposals: Sequence[Rows]) -> list[Rows]:
        nearest_rows = []
        for query, *rows in zip(queries, *proposals, strict=True):
            candidates = np.unique(np.concatenate(rows))
            candidates = candidates[candidates >= 0]
            spaces, merge = self.manifest.subspaces, self.manifest.merge
            distances = merged(query, self.vectors[candidates], _K, spaces, merge)
            nearest_rows.append(candidates[np.argsort(distances, kind="stable")[:_K]])
        return nearest_rows


def tune(
    index: Index, *, recall: float = 0.95, memory: int | None = None, most: int = 200_000
) -> Tuned:
    """Measure structures on an index's own vectors; see `Index.tune`."""
    if not 0 < recall <= 1:
        raise DataError(f"Recall is a share above 0 and at most 1, not {recall}.")
    total = index.store.count()
    vectors = _drawn(index, total, most + _QUERIES)
    if len(vectors) < _FEWEST_VECTORS + _QUERIES:
        raise DataError(
            f"{total:,} items are searched exactly in a moment: there is nothing to tune below "
            f"{_FEWEST_VECTORS + _QUERIES:,}."
        )
    order = np.random.default_rng(0).permutation(len(vectors))
    queries, held = vectors[order[:_QUERIES]], np.ascontiguousarray(vectors[order[_QUERIES:]])
    sample = _Sample(held, index.generation.spans, index.bundle.manifest, total)
    exact = sample.exactly(queries)
    trials: list[Trial] = []
    width = min(stop - start for start, stop in sample.spans)
    grid = [entry for entry in _grid(len(held), width) if entry[0] in index.store.structures]
    with Meter("measuring", sum(len(points) for *_, points in grid), "structures") as meter:
        for name, options, points in grid:
            for trial in _tried(name, options, points, sample, queries, exact):
                trials.append(trial)
                meter.update()
    fitting = [
        trial
        for trial in trials
        if trial.recall >= recall
        and (memory is None or trial.bytes + 4 * total * held.shape[1] <= memory)
    ]
    chosen = min(fitting, key=lambda trial: trial.milliseconds, default=None)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Tuned(tuple(trials), chosen, len(held), recall, memory, when)


def _drawn(index: Index, total: int, most: int) -> Floats:
    """Return vectors of items, at most so many, chosen at random but repeatably."""
    chance = min(1.0, 1.05 * most / max(1, total))
    rng = np.random.default_rng(1)
    vectors: list[Floats] = []
    with Meter("reading", total, "items") as meter:
        for page in pages(index, size=4096):
            vectors += [item.vector for item in page if chance == 1 or rng.random() < chance]
            meter.update(len(page))
    return np.array(vectors[:most], np.float32)


def _grid(count: int, width: int) -> Iterator[tuple[str, dict[str, Any], Sequence[dict[str, Any]]]]:
    """Give what is tried: a back end, what it is built with, and what its search may be given
    afterwards.
    """
    yield "flat", {}, [{}]
    yield "sq8", {}, [{}]
    for links in (16, 32):
        yield "hnsw", {"m": links}, [{"ef_search": breadth} for breadth in (32, 64, 128, 256, 512)]
    lists = max(1, min(int(4 * count**0.5), count // 39))
    shares = sorted({max(1, lists // part) for part in (256, 64, 32, 16, 8, 4)})
    probes = [{"probes": share} for share in shares]
    yield "ivf", {"lists": lists}, probes
    for size in sorted({min(width, size) for size in (width // 4, width // 2) if size}):
        yield "ivfpq", {"lists": lists, "bytes": size}, probes[2:]
    for bits in (1, 4):
        points = [{**probe, "expand": more} for probe in probes[2:] for more in (8, 32)]
        yield "rabitq", {"lists": lists, "bits": bits}, points


def _tried(
    name: str,
    options: dict[str, Any],
    points: Sequence[dict[str, Any]],
    sample: _Sample,
    queries: Floats,
    exact: Sequence[Rows],
) -> Iterator[Trial]:
    """Build one structure, in each sub-space, and measure it with each of the parameters of its
    search.
    """
    vectors = sample.vectors
    began = time.perf_counter()
    if name == "flat":
        companion = Companion.build(vectors) if len(sample.spans) == 1 else None
        seconds = time.perf_counter() - began
        size = 0 if companion is None else companion.table.nbytes * sample.total // len(vectors)
        milliseconds = _milliseconds(lambda query: sample.exactly(query, companion), queries)
        yield Trial(name, {}, 1.0, milliseconds, size, seconds)
        return
    backends = [make_backend(name, options) for _ in sample.spans]
    for backend, (start, stop) in zip(backends, sample.spans, strict=True):
        backend.build(np.ascontiguousarray(vectors[:, start:stop]), lambda count: None)
    seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        for number, backend in enumerate(backends):
            backend.save_beside(Path(folder) / str(number))
        size = (
            sum(path.stat().st_size for path in Path(folder).iterdir())
            * sample.total
            // len(vectors)
        )
    for point in points:
        for backend in backends:
            for key, value in point.items():
                setattr(backend, key, value)
        pairs = zip(sample.proposed(backends, name, queries), exact, strict=True)
        recall = float(np.mean([len(np.intersect1d(rows, true)) / _K for rows, true in pairs]))
        milliseconds = _milliseconds(lambda query: sample.proposed(backends, name, query), queries)
        yield Trial(name, {**options, **point}, recall, milliseconds, size, seconds)


def _milliseconds(search: Callable[[Floats], object], queries: Floats) -> float:
    """Return the milliseconds of one query: the median, each query at its best of some rounds, on
    one thread.
    """
    load_faiss().omp_set_num_threads(1)
    best = np.full(len(queries[:_TIMED_QUERIES]), np.inf)
    for _ in range(_ROUNDS):
        for number, query in enumerate(queries[:_TIMED_QUERIES]):
            began = time.perf_counter()
            search(query[None])
            best[number] = min(best[number], time.perf_counter() - began)
    return float(1000 * np.median(best))
