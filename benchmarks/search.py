"""The cost of a search on one thread with real vectors: exact search, a whole search with ids and
labels, and search structures of growing size.

    python benchmarks/search.py                      # all three parts, then results/search.md
    python benchmarks/search.py --parts path         # one part; the other results stay
    python benchmarks/search.py --vectors mine.npy   # structures on your own vectors, not kept

Vectors are Fashion-MNIST's training images, shifted and mirrored, as principal components of their
pixels. Vectors of 128 numbers are damped to resemble a trained embedding (96 % of the variance in
about 20 directions). Queries are test images. Libraries that are not installed are left out.

Exact search: the median CPU time of a call, beside FAISS's flat index with its defaults. The whole
path: the best of several rounds. Structures have their default parameters and propose candidates,
whose distances are computed again, as in a search of the index.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from retrieval.bundle.bundle import Encoded
from retrieval.data.image_archives import read_idx
from retrieval.index.index import Index
from retrieval.store.backends import make_backend
from retrieval.store.exact_search import Companion, nearest

from bench import FASHION, RAW, arguments, finish, machine_of, markdown, one_thread, page
from scaled_bundle import make_bundle, make_index

K = 10
Search = Callable[[Any], Any]
Row = dict[str, Any]


def vectors_of(count: int, width: int, power: float) -> tuple[Any, Any]:
    """Return vectors (count, width) and queries (10000, width)."""
    train = read_idx(FASHION / "train-images-idx3-ubyte.gz", 3).astype(np.float32) / 255
    test = read_idx(FASHION / "t10k-images-idx3-ubyte.gz", 3).astype(np.float32) / 255
    random = np.random.default_rng(0)

    def moved(images: Any) -> Any:
        down, right = random.integers(-3, 4), random.integers(-3, 4)
        mirrored = random.random() < 0.5
        images = np.roll(images, (down, right), (1, 2))
        return images[:, :, ::-1] if mirrored else images

    flat = train.reshape(len(train), -1)
    mean = flat.mean(0)
    energy, basis = np.linalg.eigh(np.cov(flat[::4].T.astype(np.float64)))
    basis = (basis[:, ::-1][:, :width] * energy[::-1][:width] ** power).astype(np.float32)
    vectors = np.empty((count, width), np.float32)
    for start in range(0, count, 1000):
        images = train[start % len(train) :][: min(1000, count - start)]
        images = images if start < len(train) else moved(images)
        vectors[start : start + len(images)] = (images.reshape(len(images), -1) - mean) @ basis
    return vectors, (test.reshape(len(test), -1) - mean) @ basis


# Exact search

SHAPES = {(10_000, 128): 25, (50_000, 64): 25, (100_000, 128): 11, (1_000_000, 128): 5}
"""Rows and width of the vectors, and the number of measured calls."""
BATCHES, COMPANION_FROM = (1, 8, 32), 50_000


def exact() -> list[Row]:
    """Return the milliseconds of exact search for each shape and batch."""
    return [row for shape, calls in SHAPES.items() for row in exact_rows(shape, calls)]


def exact_rows(shape: tuple[int, int], calls: int) -> list[Row]:
    vectors, queries = vectors_of(*shape, power=0.25 if shape[1] == 128 else 0.0)
    index = faiss.IndexFlatL2(shape[1])
    index.add(vectors)
    contestants: dict[str, Search] = {
        "IndexFlatL2": lambda some: index.search(some, K),
        "nearest": lambda some: nearest(some, vectors, K),
    }
    if len(vectors) >= COMPANION_FROM:
        companion = Companion.build(vectors)
        contestants["with companion"] = lambda some: nearest(some, vectors, K, companion=companion)
    rows = []
    for batch in BATCHES:
        spent: dict[str, list[float]] = {name: [] for name in contestants}
        for call in range(calls):
            some = np.ascontiguousarray(queries[call * batch : (call + 1) * batch])
            for name, search in contestants.items():
                began = time.process_time()
                search(some)
                spent[name].append(1000 * (time.process_time() - began))
        medians = {name: float(np.median(times)) for name, times in spent.items()}
        rows.append({"shape": f"{shape[0]:,} × {shape[1]}", "queries": batch, **medians})
        print(rows[-1], flush=True)
    return rows


# The whole path

ROWS, WIDTH, ROUNDS = 50_000, 64, 7
CALLS = {1: 1000, 32: 100}
"""Queries of a call, and calls in a round."""
BLAS = faiss.cvar.distance_compute_blas_threshold
"""FAISS's own setting, which our `hnsw` changes for the whole process."""


def path() -> Row:
    """Return the milliseconds of `Index.search` and other libraries, and the recall of `hnsw`."""
    vectors, queries = vectors_of(ROWS, WIDTH, power=0.0)
    queries = np.ascontiguousarray(queries, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        indexes = {name: build(Path(folder), vectors, name) for name in ("flat", "hnsw")}
        ours: dict[str, Search] = {
            f"Index.search, {name}": lambda some, index=index: index.search(Encoded(some, some), K)
            for name, index in indexes.items()
        }
        ids = [[{hit.id for hit in hits} for hits in way(queries[:1000])] for way in ours.values()]
        recall = float(np.mean([len(a & b) / K for a, b in zip(*ids, strict=True)]))
        rows = best_of_rounds(ours | peers(vectors), queries)
        for index in indexes.values():
            index.close()
    return {"recall of hnsw": recall, "rows": rows}


def build(folder: Path, vectors: Any, structure: str) -> Index:
    """Return an open index of vectors with ids and labels."""
    make_bundle(folder / f"bundle-{structure}", vectors.shape[1], 1.0)
    make_index(folder / structure, folder / f"bundle-{structure}", vectors, structure)
    return Index.open(folder / structure, threads=1)


def peers(vectors: Any) -> dict[str, Search]:
    """Return other libraries' searches with their defaults, by name; they return row numbers."""
    flat, graph = faiss.IndexFlatL2(WIDTH), faiss.IndexHNSWFlat(WIDTH, 32)
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


def best_of_rounds(searches: dict[str, Search], queries: Any) -> list[Row]:
    """Return the milliseconds of a call, the best of all rounds, for each number of queries."""
    rows = []
    for batch, calls in CALLS.items():
        parts = [queries[start : start + batch] for start in range(0, batch * calls, batch)]
        best = dict.fromkeys(searches, float("inf"))
        for _ in range(ROUNDS):
            for name, search in searches.items():
                began = time.process_time()
                for part in parts:
                    search(part)
                best[name] = min(best[name], 1000 * (time.process_time() - began) / calls)
        rows.append({"queries": batch} | best)
    return rows


# Structures

SIZES, QUERIES = (20_000, 100_000), 200
STRUCTURES = ("flat", "hnsw", "ivf", "ivfpq")


def structures(file: Path | None = None) -> Row:
    """Return the cost of each structure on our vectors in two sizes, or on a file's vectors."""
    if file:
        whole = np.load(file, mmap_mode="r")
        whole, queries, sizes = whole[:-QUERIES], whole[-QUERIES:], (len(whole) - QUERIES,)
    else:
        sizes = SIZES
        whole, queries = vectors_of(max(sizes), 128, power=0.25)
    queries, width = np.ascontiguousarray(queries[:QUERIES], np.float32), whole.shape[1]
    source = str(file or "Vectors of Fashion-MNIST's training images")
    raw: Row = {"what": f"{source}, {width} numbers", "width": width}
    raw |= {**machine_of("faiss-cpu", "numpy"), "rows": []}
    for size in sizes:
        vectors = np.ascontiguousarray(whole[:size], np.float32)
        truth = nearest(queries, vectors, K)[1]
        for name in STRUCTURES:
            raw["rows"].append({"size": size} | structure_row(name, vectors, queries, truth))
            print(json.dumps(raw["rows"][-1]), flush=True)
    return raw


def structure_row(name: str, vectors: Any, queries: Any, truth: Any) -> Row:
    """Return the cost of one structure on all vectors."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "structure"
        began = time.process_time()
        backend = make_backend(name, {})
        backend.build(vectors, lambda count: None)
        built = time.process_time() - began
        backend.save(file)
        size = file.stat().st_size
        backend = make_backend(name, {})
        backend.load(file, vectors)
        hits, began = 0, time.process_time()
        for query, neighbours in zip(queries, truth, strict=True):
            (rows,) = backend.search(query[None], min(backend.expand * K, len(vectors)))[1]
            rows = rows[rows >= 0]
            away = ((vectors[rows].astype(np.float64) - query) ** 2).sum(1)
            hits += len(np.intersect1d(rows[np.argsort(away, kind="stable")[:K]], neighbours))
        spent = time.process_time() - began
    return {
        "structure": name,
        "build": built,
        "bytes": size / len(vectors),
        "recall": hits / K / len(queries),
        "query": 1000 * spent / len(queries),
    }


# The page


def times_table(head: list[str], rows: list[Row], names: list[str]) -> str:
    """Return a table of milliseconds: columns of text, then a column for each contestant."""
    lines = [
        [*(str(row[key]) for key in head), *(f"{row[n]:.2f}" if n in row else "" for n in names)]
        for row in rows
    ]
    titles = ["vectors" if key == "shape" else key for key in head]
    return markdown([*titles, *names], lines)


def structures_part(raw: Row) -> str:
    """Return the page's part on structures."""
    columns: dict[str, Callable[[Row], str]] = {
        "vectors": lambda row: f"{row['size']:,}",
        "structure": lambda row: f"`{row['structure']}`",
        "build, CPU s": lambda row: f"{row['build']:.1f}",
        "bytes a vector": lambda row: f"{row['bytes']:.0f}",
        "recall@10": lambda row: f"{row['recall']:.3f}",
        "query, CPU ms": lambda row: f"{row['query']:.3f}",
    }
    lines = [[cell(row) for cell in columns.values()] for row in raw["rows"]]
    return f"""
        ## What an index costs as it grows

        {raw["what"]}, each structure as it comes; its candidates are measured again. Bytes are
        those of the structure's file; an index keeps the vectors ({4 * raw["width"]} bytes each)
        beside it. {QUERIES} queries, one at a time. {raw["machine"]}, {raw["versions"]}; load
        average {raw["load"]} at the start.

        {markdown(list(columns), lines)}
    """


def render(raw: Row) -> str:
    contestants = [name for name in raw["path"]["rows"][0] if name != "queries"]
    searches = ["IndexFlatL2", "nearest", "with companion"]
    return page(f"""
        # Search

        `python benchmarks/search.py`, one thread, ten nearest.

        ## Exact search

        Median CPU milliseconds of a call.

        {times_table(["shape", "queries"], raw["exact"], searches)}

        ## The whole path of a search

        CPU milliseconds of a call among Fashion-MNIST's {ROWS:,} × {WIDTH}. `Index.search` returns
        ids, labels and exact distances; the libraries return row numbers. FAISS's flat index is
        measured with its defaults, and with the setting that our `hnsw` makes. The recall of our
        `hnsw` is {raw["path"]["recall of hnsw"]:.4f}.

        {times_table(["queries"], raw["path"]["rows"], contestants)}

        {structures_part(raw["structures"])}
    """)


PARTS: dict[str, Callable[[], Any]] = {"exact": exact, "path": path, "structures": structures}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    mine = "a .npy file (N, D) float32 to build structures over; its last rows are the queries"
    parser.add_argument("--vectors", type=Path, help=mine)
    options = parser.parse_args()
    one_thread()
    if options.vectors:
        print(page(structures_part(structures(options.vectors))))
        return
    raw = json.loads((RAW / "search.json").read_text(encoding="utf-8"))
    raw |= {name: PARTS[name]() for name in options.parts}
    finish("search", raw, render(raw))


if __name__ == "__main__":
    main()
