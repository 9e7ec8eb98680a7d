"""The cost of a search on one thread with real vectors: exact search, a whole search with ids and
labels, and search structures of growing size.

    python benchmarks/search.py                      # everything, then results/search.md
    python benchmarks/search.py --parts exact        # one part; the other results stay
    python benchmarks/search.py --shapes 50000x64    # the whole path at one shape
    python benchmarks/search.py --vectors mine.npy   # structures on your own vectors, not kept

Vectors are Fashion-MNIST's training images, shifted and mirrored, as principal components of their
pixels. Vectors of 128 numbers are damped to resemble a trained embedding (96 % of the variance in
about 20 directions). Queries are test images.

Exact search: the median CPU time of a call, beside FAISS's flat index, for which the setting of
BLAS holds that our searches make; rows before commit 5c3bb028 have its default. The whole path
takes turns with FAISS by hand; a million vectors of 768 numbers need 10 GB and half an hour.
Structures have their default parameters and propose candidates, whose distances are computed again,
as in a search of the index.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from retrieval.base.runtime import load_faiss
from retrieval.bundle.bundle import Encoded
from retrieval.data.image_archives import read_idx
from retrieval.index.index import Index
from retrieval.store.backends import make_backend
from retrieval.store.exact_search import Companion, nearest
from retrieval.store.search_structure import MIN_ROWS

from bench import (
    FASHION,
    RAW,
    WORK,
    alone,
    arguments,
    commit,
    finish,
    load,
    machine_of,
    markdown,
    one_thread,
    page,
)
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

COUNTS, WIDTHS, ROUNDS = (10_000, 50_000, 1_000_000), (64, 128, 768), 15
BATCHES_OF_PATH = (1, 32)
SECONDS_OF_TURN = 0.15
"""Least CPU time of one contestant's turn."""


def path_rows(count: int, width: int) -> list[Row]:
    vectors, queries = vectors_of(count, width, power=0.0 if width == 64 else 0.25)
    queries = np.ascontiguousarray(queries, np.float32)
    rows = []
    for name in ("flat", "hnsw"):
        if name == "hnsw" and count < MIN_ROWS:
            continue
        with tempfile.TemporaryDirectory(dir=WORK) as place:
            folder = Path(place)
            make_bundle(folder / "bundle", width, 1.0)
            make_index(folder / "index", folder / "bundle", vectors, name)
            first = alone(first_search, folder / "index", queries[:1])
            with Index.open(folder / "index", threads=1) as index:
                hand = by_hand(folder / "index", vectors, name)
                for batch in BATCHES_OF_PATH:
                    row: Row = {"count": count, "width": width, "index": name, "queries": batch}
                    row |= turns_of(index, hand, queries, batch) | {"load": load()}
                    rows.append(row | {"first": first, "commit": commit()})
                    print(rows[-1], flush=True)
    return rows


def first_search(folder: Path, query: Any) -> float:
    """Return the CPU seconds of opening an index and the first search in it."""
    load_faiss()
    began = time.process_time()
    with Index.open(folder, threads=1) as index:
        index.search(Encoded(query, query), K)
        return time.process_time() - began


def by_hand(folder: Path, vectors: Any, name: str) -> Search:
    """Return a search with FAISS that looks up ids and labels in lists.

    The graph is that of the index, and the setting of BLAS that of the index's searches.
    """
    ids = [f"{n:07}" for n in range(len(vectors))]
    labels = [str(n % 10) for n in range(len(vectors))]
    if name == "flat":
        faiss_index = faiss.IndexFlatL2(vectors.shape[1])
        faiss_index.add(vectors)
    else:
        backend = make_backend(name, {})
        (file,) = (folder / "arrays").glob(f"*.{name}")
        backend.load(file, vectors)
        faiss_index = backend._index
        # The back end owns the memory that its index reads.
        faiss_index.referenced_objects = [backend]

    def search(some: Any) -> Any:
        squared, rows = faiss_index.search(some, K)
        pairs = zip(rows.tolist(), np.sqrt(squared).tolist(), strict=True)
        return [
            [(ids[row], labels[row], apart) for row, apart in zip(*pair, strict=True)]
            for pair in pairs
        ]

    faiss.cvar.distance_compute_blas_threshold = 8 * vectors.shape[1]
    return search


def turns_of(index: Index, hand: Search, queries: Any, batch: int) -> Row:
    """Return the least milliseconds of a call of both, and the median ratio of their turns."""
    searches: dict[str, Search] = {
        "ours": lambda some: index.search(Encoded(some, some), K),
        "hand": hand,
    }
    parts = [queries[start : start + batch] for start in range(0, len(queries) - batch, batch)]
    # Items of hits are read once.
    calls = 0
    began = time.process_time()
    while calls < len(parts) and time.process_time() - began < SECONDS_OF_TURN:
        searches["ours"](parts[calls])
        calls += 1
    spent: dict[str, list[float]] = {name: [] for name in searches}
    for _ in range(ROUNDS):
        for name, search in searches.items():
            began = time.process_time()
            for part in parts[:calls]:
                search(part)
            spent[name].append(1000 * (time.process_time() - began) / calls)
    ratios = np.array(spent["ours"]) / np.array(spent["hand"])
    return {name: min(times) for name, times in spent.items()} | {"ratio": float(np.median(ratios))}


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


def path_table(rows: list[Row]) -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "vectors": lambda row: f"{row['count']:,} × {row['width']}",
        "structure": lambda row: f"`{row['index']}`",
        "queries": lambda row: str(row["queries"]),
        "`Index.search`": lambda row: f"{row['ours']:.3f}",
        "by hand": lambda row: f"{row['hand']:.3f}",
        "ratio": lambda row: f"{row['ratio']:.2f} ×",
        "first, s": lambda row: f"{row['first']:.2f}",
        "load": lambda row: f"{row['load']:.0f}",
        "commit": lambda row: row["commit"],
    }
    return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def render(raw: Row) -> str:
    searches = ["IndexFlatL2", "nearest", "with companion"]
    return page(f"""
        # Search

        `python benchmarks/search.py`, one thread, ten nearest.

        ## Exact search

        Median CPU milliseconds of a call.

        {times_table(["shape", "queries"], raw["exact"], searches)}

        ## The whole path of a search

        CPU milliseconds of a call: `Index.search`, which returns ids, labels, metadata and exact
        distances, and FAISS's search followed by a look-up of ids and labels in lists, over the
        same graph and with the same setting of BLAS. They take turns of at least
        {SECONDS_OF_TURN:g} s, {ROUNDS} each; the milliseconds are the least, the ratio is the
        median. *First* is the CPU time of opening the index and the first search in a process that
        has imported FAISS. The load is that of the machine at the row's end, of which this script
        is 1: other programs share its caches and memory.

        {path_table(raw["path"])}

        {structures_part(raw["structures"])}
    """)


PARTS: dict[str, Callable[[], Any]] = {"exact": exact, "structures": structures}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[])
    shapes = "rows and width such as 50000x64, for the whole path; the rows of other shapes stay"
    parser.add_argument("--shapes", nargs="*", default=[], help=shapes)
    mine = "a .npy file (N, D) float32 to build structures over; its last rows are the queries"
    parser.add_argument("--vectors", type=Path, help=mine)
    options = parser.parse_args()
    one_thread()
    if options.vectors:
        print(page(structures_part(structures(options.vectors))))
        return
    WORK.mkdir(exist_ok=True)
    chosen = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    if not options.parts and not chosen:
        options.parts = list(PARTS)
        chosen = [(count, width) for count in COUNTS for width in WIDTHS]
    parts = {name: PARTS[name]() for name in options.parts}
    rows = [row for shape in chosen for row in path_rows(*shape)]
    raw = json.loads((RAW / "search.json").read_text(encoding="utf-8")) | parts
    others = [row for row in raw["path"] if (row["count"], row["width"]) not in chosen]
    order = itemgetter("count", "width", "index", "queries")
    raw["path"] = sorted([*others, *rows], key=order)
    finish("search", raw, render(raw), measured=bool(options.parts))


if __name__ == "__main__":
    main()
