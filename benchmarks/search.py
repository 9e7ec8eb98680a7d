"""The cost of a search on one thread with real vectors: exact search, a whole search with ids and
labels, and search structures of growing size.

    # up to 100,000 vectors, in about 15 minutes, then results/search.md; other rows stay
    python benchmarks/search.py
    python benchmarks/search.py --large              # a million vectors; 25 minutes, 5 GB
    python benchmarks/search.py --parts exact        # one part
    python benchmarks/search.py --shapes 50000x64    # exact search and the whole path at one shape
    python benchmarks/search.py --vectors mine.npy   # structures on your own vectors, not kept

Vectors are Fashion-MNIST's training images, shifted and mirrored, as principal components of their
pixels. Vectors of 128 numbers are damped to resemble a trained embedding (96 % of the variance in
about 20 directions). Queries are test images.

Exact search: the median CPU time of a call, beside FAISS's flat index, for which the setting of
BLAS holds that our searches make. The whole path takes turns with FAISS by hand. A million vectors
of 768 numbers run only if `--shapes` names them: they need about 12 GB. A graph of 50,000 such
vectors is built in 14 CPU seconds, so one of a million in five minutes or more.
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

EXACT_SHAPES = [(10_000, 128), (50_000, 64), (100_000, 128), (1_000_000, 128)]
"""Rows and width of the vectors."""
BATCHES, COMPANION_FROM = (1, 8, 32), 50_000


def exact_rows(count: int, width: int) -> list[Row]:
    """Return the milliseconds of exact search for each batch."""
    shape = count, width
    calls = max(5, min(25, 2_000_000 // count))
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
        row = {"count": count, "width": width, "queries": batch, "commit": commit()}
        rows.append(row | medians)
        print(rows[-1], flush=True)
    return rows


# The whole path

ROUNDS = 15
PATH_SHAPES = [
    *((count, width) for count in (10_000, 50_000) for width in (64, 128, 768)),
    *((count, width) for count in (100_000, 1_000_000) for width in (64, 128)),
]
LARGE = 1_000_000
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
            began = time.process_time()
            make_index(folder / "index", folder / "bundle", vectors, name)
            built = time.process_time() - began
            first = alone(first_search, folder / "index", queries[:1])
            with Index.open(folder / "index", threads=1) as index:
                hand = by_hand(folder / "index", vectors, name)
                for batch in BATCHES_OF_PATH:
                    row: Row = {"count": count, "width": width, "index": name, "queries": batch}
                    row |= turns_of(index, hand, queries, batch) | {"load": load()}
                    rows.append(row | {"first": first, "built": built, "commit": commit()})
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
    raw: Row = {"what": f"{source}, {width} numbers", "width": width, "commit": commit()}
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


SEARCHES = ("IndexFlatL2", "nearest", "with companion")


def exact_table(rows: list[Row]) -> str:
    lines = [
        [
            f"{row['count']:,} × {row['width']}",
            str(row["queries"]),
            *(f"{row[name]:.2f}" if name in row else "" for name in SEARCHES),
            row["commit"],
        ]
        for row in rows
    ]
    return markdown(["vectors", "queries", *SEARCHES, "commit"], lines)


def growth_table(raw: Row) -> str:
    """Return the exponents of time by number of vectors, where there are three sizes or more."""
    curves: dict[tuple[str, str], dict[int, float]] = {}

    def add(title: str, queries: object, count: int, spent: float) -> None:
        curves.setdefault((title, str(queries)), {})[count] = spent

    for row in raw["exact"]:
        for name in SEARCHES:
            if name in row:
                add(f"{name}, {row['width']} numbers", row["queries"], row["count"], row[name])
    for row in raw["path"]:
        kind = f"`{row['index']}`, {row['width']} numbers"
        add(f"`Index.search`, {kind}", row["queries"], row["count"], row["ours"])
        add(f"FAISS by hand, {kind}", row["queries"], row["count"], row["hand"])
        add(f"first search, {kind}", 1, row["count"], row["first"])
        if "built" in row:
            add(f"adding and building, {kind}", "", row["count"], row["built"])
    lines = []
    for (title, queries), spent in curves.items():
        if len(spent) < 3:
            continue
        counts = sorted(spent)
        times = np.log([spent[count] for count in counts])
        exponent = np.polyfit(np.log(counts), times, 1)[0]
        note = "more than linear" if exponent > 1.1 else ""
        lines.append([title, queries, ", ".join(f"{n:,}" for n in counts), f"{exponent:.2f}", note])
    return markdown(["time of", "queries", "vectors", "exponent", ""], lines)


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
        average {raw["load"]} at the start, commit {raw.get("commit", "06cd1161")}.

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
    return page(f"""
        # Search

        `python benchmarks/search.py`, one thread, ten nearest.

        ## Exact search

        Median CPU milliseconds of a call.

        {exact_table(raw["exact"])}

        ## The whole path of a search

        CPU milliseconds of a call: `Index.search`, which returns ids, labels, metadata and exact
        distances, and FAISS's search followed by a look-up of ids and labels in lists, over the
        same graph and with the same setting of BLAS. They take turns of at least
        {SECONDS_OF_TURN:g} s, {ROUNDS} each; the milliseconds are the least, the ratio is the
        median. *First* is the CPU time of opening the index and the first search in a process that
        has imported FAISS. The load is that of the machine at the row's end, of which this script
        is 1: other programs share its caches and memory.

        {path_table(raw["path"])}

        ## How the time of a search grows

        The exponent b of the time c Nᵇ of N vectors, fitted to the rows above: 1 is linear.

        {growth_table(raw)}

        {structures_part(raw["structures"])}
    """)


PARTS = ("exact", "path", "structures")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    shapes = "rows and width such as 50000x64; the rows of other shapes stay"
    parser.add_argument("--shapes", nargs="*", default=[], help=shapes)
    parser.add_argument("--large", action="store_true", help="the shapes of a million rows alone")
    mine = "a .npy file (N, D) float32 to build structures over; its last rows are the queries"
    parser.add_argument("--vectors", type=Path, help=mine)
    options = parser.parse_args()
    one_thread()
    if options.vectors:
        print(page(structures_part(structures(options.vectors))))
        return
    WORK.mkdir(exist_ok=True)
    named = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    raw = json.loads((RAW / "search.json").read_text(encoding="utf-8"))
    if "structures" in options.parts and not named and not options.large:
        raw["structures"] = structures()
        keep_results(raw)
    for part, shapes_of_part, measure in (
        ("exact", EXACT_SHAPES, exact_rows),
        ("path", PATH_SHAPES, path_rows),
    ):
        chosen = [shape for shape in shapes_of_part if (shape[0] >= LARGE) == options.large]
        for count, width in (named or chosen) if part in options.parts else ():
            rows = measure(count, width)
            others = [row for row in raw[part] if (row["count"], row["width"]) != (count, width)]
            order = itemgetter("count", "width", "index", "queries")
            raw[part] = sorted([*others, *rows], key=lambda row: order({"index": "", **row}))
            keep_results(raw)


def keep_results(raw: Row) -> None:
    """Write the rows and the page after each shape, so that an interrupted run keeps them."""
    finish("search", raw, render(raw), measured=False)


if __name__ == "__main__":
    main()
