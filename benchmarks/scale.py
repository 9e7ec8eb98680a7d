"""What each structure of an index costs as it grows: time to build, bytes, recall and CPU time of a
query.

    python benchmarks/scale.py                                    # writes results/scale.md
    python benchmarks/scale.py --sizes 5000 --only flat hnsw      # a part of it, which is not kept
    python benchmarks/scale.py --vectors mine.npy --sizes 1000000 # on vectors of your own, likewise

Each structure has its parameters as they come and one thread, and proposes candidates that are
measured again, as a search of the index does. Vectors are those of `search.py`; queries are not
among them.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.serving.index.backends import make_backend
from retrieval.serving.store.search import nearest

from bench import arguments, finish, machine_of, markdown, one_thread, page
from search import vectors_of

SIZES, WIDTH, K, QUERIES = (20_000, 100_000), 128, 10, 200
STRUCTURES = ("flat", "hnsw", "ivf", "ivfpq")


def measure(name: str, vectors: Any, queries: Any, truth: Any) -> dict[str, Any]:
    """Return what one structure over all vectors costs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "structure"
        began = time.process_time()
        made = make_backend(name, {})
        made.build(vectors, lambda count: None)
        built = time.process_time() - began
        made.save(file)
        size = file.stat().st_size
        made = make_backend(name, {})
        made.load(file, vectors)
        hits, began = 0, time.process_time()
        for query, wanted in zip(queries, truth, strict=True):
            (rows,) = made.search(query[None], min(made.expand * K, len(vectors)))[1]
            rows = rows[rows >= 0]
            away = ((vectors[rows].astype(np.float64) - query) ** 2).sum(1)
            hits += len(np.intersect1d(rows[np.argsort(away, kind="stable")[:K]], wanted))
        spent = time.process_time() - began
    return {
        "structure": name,
        "build": built,
        "bytes": size / len(vectors),
        "recall": hits / K / len(queries),
        "query": 1000 * spent / len(queries),
    }


def render(raw: dict[str, Any]) -> str:
    columns = {
        "vectors": lambda row: f"{row['size']:,}",
        "structure": lambda row: f"`{row['structure']}`",
        "build, CPU s": lambda row: f"{row['build']:.1f}",
        "bytes a vector": lambda row: f"{row['bytes']:.0f}",
        "recall@10": lambda row: f"{row['recall']:.3f}",
        "query, CPU ms": lambda row: f"{row['query']:.3f}",
    }
    lines = [[cell(row) for cell in columns.values()] for row in raw["rows"]]
    return page(f"""
        # What an index costs as it grows

        `python benchmarks/scale.py`. {raw["what"]}, one thread, each structure as it comes; its
        candidates are measured again. Bytes are those of the structure's file; an index keeps the
        vectors ({4 * raw["width"]} bytes each) beside it. {QUERIES} queries, one at a time.
        {raw["machine"]}, {raw["versions"]}; load average {raw["load"]} at the start.

        {markdown(list(columns), lines)}
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", help="how many vectors; nothing is kept")
    parser.add_argument("--only", nargs="+", choices=STRUCTURES, default=STRUCTURES)
    parser.add_argument(
        "--vectors", type=Path, help="a .npy file (N, D) float32; its last rows are the queries"
    )
    options = parser.parse_args()
    one_thread()
    sizes = options.sizes or list(SIZES)
    if options.vectors:
        whole = np.load(options.vectors, mmap_mode="r")
        whole, queries = whole[:-QUERIES], np.array(whole[-QUERIES:], np.float32)
    else:
        whole, queries = vectors_of(max(sizes), WIDTH, power=0.25)
    queries = np.ascontiguousarray(queries[:QUERIES], np.float32)
    what = str(options.vectors or "Vectors of Fashion-MNIST's training images")
    raw: dict[str, Any] = {
        "what": f"{what}, {whole.shape[1]} numbers",
        "width": whole.shape[1],
        **machine_of("faiss-cpu", "numpy"),
        "rows": [],
    }
    for size in sizes:
        vectors = np.ascontiguousarray(whole[:size], np.float32)
        truth = nearest(queries, vectors, K)[1]
        for name in options.only:
            raw["rows"].append({"size": size} | measure(name, vectors, queries, truth))
            print(json.dumps(raw["rows"][-1]), flush=True)
    partial = options.sizes or options.vectors or len(options.only) < len(STRUCTURES)
    finish("scale", raw, render(raw), keep=not partial)


if __name__ == "__main__":
    main()
