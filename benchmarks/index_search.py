"""The whole path of a search, ids and labels included, beside libraries that give row numbers, on
one thread.

    python benchmarks/index_search.py

Fashion-MNIST's training images, 50,000 × 64 along their principal components; queries are test
images. Each figure is the CPU time of a call for the ten nearest, the best of several rounds. Peers
that are not installed are left out.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.index.index import Index
from retrieval.serving.store.contract import Item
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.structure import StructureChoice

from bench import finish, markdown, one_thread, page
from scaled_bundle import make_bundle
from search import vectors_of

ROWS, WIDTH, K = 50_000, 64, 10
BLAS = faiss.cvar.distance_compute_blas_threshold
"""FAISS's own setting, which our `hnsw` changes for the whole process."""
BATCHES = {1: 1000, 32: 100}
"""Queries of a call, and how many calls a round has."""
ROUNDS = 7


def build(folder: Path, vectors: Any, structure: str) -> Index:
    """Return an opened index of vectors with ids and labels."""
    make_bundle(folder / f"bundle-{structure}", vectors.shape[1], 1.0)
    bundle = Bundle.open(folder / f"bundle-{structure}", threads=1)
    widths = {"vector": vectors.shape[1]}
    create_local(folder / structure, bundle, widths, structure=StructureChoice(structure))
    with LocalStore(folder / structure, upkeep=False) as store:
        for start in range(0, len(vectors), 5000):
            rows = enumerate(vectors[start : start + 5000], start)
            items = [Item(f"{n:05}", str(n % 10), arrays={"vector": row}) for n, row in rows]
            store.upsert(items, bundle.sha256)
        store.compact()
    return Index.open(folder / structure, threads=1)


def peers(vectors: Any) -> dict[str, Callable[[Any], Any]]:
    """Return searches of the libraries as they come, by name; they give row numbers."""
    flat = faiss.IndexFlatL2(WIDTH)
    graph = faiss.IndexHNSWFlat(WIDTH, 32)
    for index in (flat, graph):
        index.add(vectors)
    graph.hnsw.efSearch = 64

    def plain(some: Any, threshold: int) -> Any:
        before = faiss.cvar.distance_compute_blas_threshold
        faiss.cvar.distance_compute_blas_threshold = threshold
        answer = flat.search(some, K)
        faiss.cvar.distance_compute_blas_threshold = before
        return answer

    searches = {
        "IndexFlatL2": lambda some: plain(some, BLAS),
        "the same, BLAS from 8 queries": lambda some: plain(some, 8 * WIDTH),
        "IndexHNSWFlat": lambda some: graph.search(some, K),
    }
    if importlib.util.find_spec("hnswlib"):
        import hnswlib

        other = hnswlib.Index("l2", WIDTH)
        other.init_index(len(vectors), M=32, ef_construction=100)
        other.set_num_threads(1)
        other.add_items(vectors)
        other.set_ef(64)
        searches["hnswlib"] = lambda some: other.knn_query(some, K)
    return searches


def measure(searches: dict[str, Callable[[Any], Any]], queries: Any) -> list[dict[str, Any]]:
    """Return the CPU milliseconds of a call by batch and search, the best of rounds in turns."""
    rows = []
    for batch, calls in BATCHES.items():
        parts = [np.ascontiguousarray(queries[n * batch :][:batch]) for n in range(calls)]
        best = dict.fromkeys(searches, float("inf"))
        for _ in range(ROUNDS):
            for name, search in searches.items():
                began = time.process_time()
                for part in parts:
                    search(part)
                best[name] = min(best[name], 1000 * (time.process_time() - began) / calls)
        rows.append({"queries": batch} | best)
    return rows


def recall(search: Callable[[Any], Any], flat: Callable[[Any], Any], queries: Any) -> float:
    """Return the share of the ten nearest that a search finds."""
    ids = [[{hit.id for hit in hits} for hits in way(queries)] for way in (search, flat)]
    return float(np.mean([len(a & b) / K for a, b in zip(*ids, strict=True)]))


def main() -> None:
    one_thread()
    vectors, queries = vectors_of(ROWS, WIDTH, power=0.0)
    queries = np.ascontiguousarray(queries, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        indexes = {name: build(Path(folder), vectors, name) for name in ("flat", "hnsw")}
        ours: dict[str, Callable[[Any], Any]] = {
            f"Index.search, {name}": lambda some, index=index: index.search(Encoded(some, some), K)
            for name, index in indexes.items()
        }
        flat, hnsw = ours.values()
        share = recall(hnsw, flat, queries[:1000])
        rows = measure(ours | peers(vectors), queries)
        for index in indexes.values():
            index.close()
    raw = {"recall of hnsw": share, "rows": rows}
    finish("index_search", raw, render(raw))


def render(raw: dict[str, Any]) -> str:
    names = [name for name in raw["rows"][0] if name != "queries"]
    lines = [[str(row["queries"]), *(f"{row[name]:.2f}" for name in names)] for row in raw["rows"]]
    return page(f"""
        # The whole path of a search

        `python benchmarks/index_search.py`: CPU milliseconds of a call on one thread, ten nearest
        of Fashion-MNIST's {ROWS:,} × {WIDTH}. `Index.search` gives ids, labels and exact distances,
        the libraries row numbers. FAISS's flat index is measured as it comes, and with the setting
        that our `hnsw` makes. The recall of our `hnsw` is {raw["recall of hnsw"]:.4f}.

        {markdown(["queries", *names], lines)}
    """)


if __name__ == "__main__":
    main()
