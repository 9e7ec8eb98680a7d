"""The contestants of `scale.py`: our back ends as a segment has them, FAISS by itself, our local store, and Milvus."""
# ruff: noqa: D102  System says what each verb is

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Rows = NDArray[np.int64]
K = 10
PROBES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BREADTHS = (10, 12, 16, 24, 32, 48, 64, 96, 128, 256)


def lists_of(count: int) -> int:
    """Return the number of lists of every contestant that has lists: the root of the number of vectors."""
    return math.isqrt(count)


class System:
    """One contestant.

    Attributes:
        points: what its search is tried with, least work first.
        most: vectors that it is given at most: memory or hours.
    """

    points: Sequence[dict[str, int]] = ({},)
    most = 10_000_000
    exact = False

    def begin(self, folder: Path) -> None:
        """Start what does the work, where this is another process; its cost is not counted."""

    def build(self, vectors: Vectors, folder: Path) -> None:
        """Build over vectors (N, P), mapped, and write everything into a folder."""
        raise NotImplementedError

    def written(self, folder: Path) -> list[Path]:
        """Return the folders whose bytes count."""
        return [folder]

    def load(self, vectors: Vectors, folder: Path) -> None:
        """Make ready what `build` wrote."""
        raise NotImplementedError

    def search(self, query: Vectors, point: dict[str, int]) -> Rows:
        """Return rows of the ten nearest of one query (1, P), measured again on the vectors where they were proposed by codes."""
        raise NotImplementedError

    def cpu(self) -> float:
        """Return CPU seconds that were spent so far, in all processes that do the work."""
        return time.process_time()

    def beside(self) -> int:
        """Return bytes of memory of other processes that do the work."""
        return 0

    def close(self) -> None:
        """End what was started."""


def measured(vectors: Vectors, query: Vectors, rows: Rows) -> Rows:
    """Return the ten of these rows that are nearest, measured on the vectors in double precision."""
    rows = rows[rows >= 0]
    apart = vectors[rows].astype(np.float64) - query
    return rows[np.argsort(np.einsum("ij,ij->i", apart, apart), kind="stable")[:K]]


@dataclass
class Ours(System):
    """A back end as a segment of our store has it: its file beside the vectors, which are mapped; proposals are measured again."""

    name: str
    options: Callable[[int], dict[str, Any]] = field(default=lambda count: {})
    points: Sequence[dict[str, int]] = ({},)
    most: int = 10_000_000

    def build(self, vectors: Vectors, folder: Path) -> None:
        from retrieval.serving.index.backends import make_backend

        made = make_backend(self.name, self.options(len(vectors)))
        made.build(vectors, lambda count: None)
        made.save_beside(folder / "structure")

    def load(self, vectors: Vectors, folder: Path) -> None:
        from retrieval.serving.index.backends import make_backend

        self.vectors = vectors
        self.made = make_backend(self.name, self.options(len(vectors)))
        self.made.load_beside(folder / "structure", vectors)
        self.made.check(*vectors.shape)

    def search(self, query: Vectors, point: dict[str, int]) -> Rows:
        for key, value in point.items():
            setattr(self.made, key, value)
        _, (rows,) = self.made.search(query, self.made.expand * K)
        return measured(self.vectors, query, rows)


class OursExact(System):
    """Exact search of a segment, which reads a compact companion in the vectors' place."""

    exact = True

    def build(self, vectors: Vectors, folder: Path) -> None:
        from retrieval.serving.local.compact import build

        if (made := build(vectors)) is not None:
            made.save(folder / "structure")

    def load(self, vectors: Vectors, folder: Path) -> None:
        from retrieval.serving.local.compact import Compact

        self.vectors, file = vectors, folder / "structure"
        self.compact = Compact.load(file, *vectors.shape) if file.exists() else None

    def search(self, query: Vectors, point: dict[str, int]) -> Rows:
        from retrieval.serving.store.search import nearest

        _, (rows,) = nearest(query, self.vectors, K, compact=self.compact)
        return np.asarray(rows, np.int64)


@dataclass
class Faiss(System):
    """FAISS by itself, made by its factory, read into memory whole; codes with its own `RFlat`, which keeps the vectors and measures them again."""

    made_by: Callable[[int], str]
    points: Sequence[dict[str, int]] = ({},)
    most: int = 1_000_000
    exact: bool = False

    def build(self, vectors: Vectors, folder: Path) -> None:
        import faiss

        index = faiss.index_factory(vectors.shape[1], self.made_by(len(vectors)))
        if hasattr(inner := base(index), "hnsw"):
            inner.hnsw.efConstruction = 128
        if not index.is_trained:
            rows = np.random.default_rng(0).permutation(len(vectors))[: max(256 * lists_of(len(vectors)), 65_536)]  # fmt: skip
            index.train(np.ascontiguousarray(vectors[np.sort(rows)]))
        for start in range(0, len(vectors), 8192):
            index.add(np.ascontiguousarray(vectors[start : start + 8192]))
        faiss.write_index(index, str(folder / "structure"))

    def load(self, vectors: Vectors, folder: Path) -> None:
        import faiss

        self.index = faiss.read_index(str(folder / "structure"))

    def search(self, query: Vectors, point: dict[str, int]) -> Rows:
        inner = base(self.index)
        if "probes" in point:
            inner.nprobe = point["probes"]
        if "ef_search" in point:
            inner.hnsw.efSearch = point["ef_search"]
        if "expand" in point:
            self.index.k_factor = point["expand"]
        return np.asarray(self.index.search(query, K)[1][0], np.int64)


def base(index: Any) -> Any:
    """Return what refinement or a rotation stands on, as its own class."""
    import faiss

    index = faiss.downcast_index(index)
    for name in ("base_index", "index"):
        if hasattr(index, name):
            return base(getattr(index, name))
    return index


def crossed(probes: Sequence[int], expand: Sequence[int]) -> list[dict[str, int]]:
    """Return every pair of both."""
    return [{"probes": one, "expand": other} for one in probes for other in expand]


LISTS = [{"probes": one} for one in PROBES]
CODED = crossed(PROBES, (2, 8, 32))
GRAPH = [{"ef_search": one} for one in BREADTHS]

SYSTEMS: dict[str, System] = {
    "ours flat": OursExact(),
    "ours sq8": Ours("sq8", points=[{"expand": 1}, {"expand": 2}, {"expand": 4}]),
    "ours ivf": Ours("ivf", lambda n: {"lists": lists_of(n)}, LISTS),
    "ours ivfpq": Ours("ivfpq", lambda n: {"lists": lists_of(n), "bytes": 32}, CODED),
    "ours rabitq": Ours("rabitq", lambda n: {"lists": lists_of(n)}, CODED),
    "ours hnsw": Ours("hnsw", lambda n: {"m": 16, "ef_construction": 128}, GRAPH, most=1_000_000),
    "faiss flat": Faiss(lambda n: "Flat", exact=True),
    "faiss sq8": Faiss(lambda n: "SQ8,RFlat", [{"expand": 1}, {"expand": 2}, {"expand": 4}]),
    "faiss ivf": Faiss(lambda n: f"IVF{lists_of(n)},Flat", LISTS),
    "faiss ivfpq": Faiss(lambda n: f"IVF{lists_of(n)},PQ32np,RFlat", CODED),
    "faiss rabitq": Faiss(lambda n: f"RR128,IVF{lists_of(n)},RaBitQ,Refine(Flat)", CODED),
    "faiss hnsw": Faiss(lambda n: "HNSW16", GRAPH, most=200_000),
}
