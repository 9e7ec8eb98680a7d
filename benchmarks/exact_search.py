"""Exact search of image vectors: `retrieval.serving.local.exact` beside FAISS's flat search, with and without a filter; and a whole index.

    python benchmarks/exact_search.py --cache FOLDER                  # all shapes; makes the vectors that are not there yet
    python benchmarks/exact_search.py --cache FOLDER --only 1000000x128     # one shape; the others stay as they are kept
    python benchmarks/exact_search.py --write                         # the page alone, from what is kept

Vectors and queries are those of benchmarks/image_vectors.py; the vectors are mapped from their file, but for FAISS's index, which holds
a copy. Contestants take turns in one process on one thread, and each cell is the least CPU time of its rounds. What an index costs, and
how it is searched as the server searches it, `exact_search_index.py` measures, in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # as the two others, counts only before NumPy and FAISS are imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import faiss
import numpy as np
from exact_search_index import whole
from numpy.typing import NDArray
from retrieval.host.files import write_text
from retrieval.serving.local import compact, distances, exact

from exact_search_report import COMPACT, DEFAULT, INDEX, KNN, KNN_BLAS, NORMS, OURS, POST, render
from exact_search_turns import (
    BATCHES,
    TRUE,
    K,
    Queries,
    Search,
    drawn,
    machine,
    measured,
    recall,
    true_rows,
    turns,
)
from image_vectors import ImageVectors, image_vectors

RAW = Path(__file__).parent / "results" / "raw" / "exact_search.json"
SHAPES = ("1000000x128", "100000x128", "1000000x64", "50000x1280", "10000x128")
INDEXED = ("1000000x128", "100000x128", "50000x1280", "10000x128")
"""Shapes of which an index is made."""
FILTERED = "1000000x128"
PARTS = ("kernel", "index", "filter")
FRACTIONS = (0.01, 0.1, 0.5)
Answer = tuple[Any, Any]


def with_blas(queries: NDArray[np.float32], vectors: NDArray[np.float32]) -> Answer:
    """Search by FAISS's matrix products, whose threshold is the whole process's."""
    before = faiss.cvar.distance_compute_blas_threshold
    faiss.cvar.distance_compute_blas_threshold = 1024
    try:
        return faiss.knn(queries, vectors, K)
    finally:
        faiss.cvar.distance_compute_blas_threshold = before


def plain(data: ImageVectors, rounds: int) -> dict[str, Any]:
    """Measure searches without a filter, at each number of queries a call."""
    vectors = data.vectors
    norms = distances.squared_norms(vectors)
    began = time.process_time()
    companion = compact.build(vectors)
    told: dict[str, Any] = {
        "build": time.process_time() - began,
        "width": companion.table.shape[1] if companion else 0,
        "rows": [],
    }
    index = faiss.IndexFlatL2(vectors.shape[1])
    index.add(vectors)
    for batch in BATCHES:
        given = drawn(data.queries, batch, rounds)
        contestants: dict[str, Search] = {
            INDEX: lambda some: index.search(some, K),
            KNN: lambda some: faiss.knn(some, vectors, K),
            KNN_BLAS: lambda some: with_blas(some, vectors),
            OURS: lambda some: exact.nearest(some, vectors, K),
            NORMS: lambda some: exact.nearest(some, vectors, K, norms=norms),
            COMPACT: lambda some: exact.nearest(some, vectors, K, norms=norms, compact=companion),
        }
        if batch > 1:
            del contestants[KNN]  # by default the same loop as the index's
        else:
            del contestants[KNN_BLAS], contestants[NORMS]  # they change nothing for one query
        if companion is None:
            del contestants[COMPACT]
        told["rows"] += measured(contestants, batch, given, vectors)
    told["threads"] = _threads(data.queries, vectors, rounds)
    return told


def _threads(queries: Queries, vectors: NDArray[np.float32], rounds: int) -> list[dict[str, Any]]:
    """Measure a search by one and by two threads over ranges of the rows."""
    rows = []
    for batch in (1, 32):
        contestants: dict[str, Search] = {
            str(count): lambda some, count=count: exact.nearest(some, vectors, K, threads=count)
            for count in (1, 2)
        }
        rows += [
            {"threads": int(name), "batch": batch, "cpu": row["cpu"], "wall": row["wall"]}
            for name, row in turns(contestants, drawn(queries, batch, rounds)).items()
        ]
    return rows


def filtered(data: ImageVectors, rounds: int) -> list[dict[str, Any]]:
    """Measure searches of a part of the items: a random one, and one of the ten classes."""
    vectors, rows, random = data.vectors, [], np.random.default_rng(0)
    companion = compact.build(vectors)
    masks = {f"{100 * part:g} % at random": random.random(len(vectors)) < part for part in FRACTIONS}
    masks["one class of ten"] = data.labels == 3
    for batch in (1, 32):
        given = drawn(data.queries, batch, rounds)
        for title, keep in masks.items():
            kept = np.flatnonzero(keep)
            true = kept[true_rows(given[-1][:TRUE], np.ascontiguousarray(vectors[kept]))]
            depth = min(int(2 * K / keep.mean()), len(vectors))
            contestants: dict[str, Search] = {
                DEFAULT: lambda some: exact.nearest(some, vectors, K),
                OURS: lambda some, keep=keep: exact.nearest(some, vectors, K, keep=keep),
                COMPACT: lambda some, keep=keep: exact.nearest(
                    some, vectors, K, keep=keep, compact=companion
                ),
                POST: lambda some, keep=keep, depth=depth: _dropped(
                    exact.nearest(some, vectors, depth), keep
                ),
            }
            for name, row in turns(contestants, given).items():
                found = row.pop("answer")[1][:TRUE]
                row["recall"] = None if name == DEFAULT else recall(found, true)
                rows.append({"contestant": name, "batch": batch, "kept": title, "depth": depth} | row)
    return rows


def _dropped(answer: Answer, keep: NDArray[np.bool_]) -> Answer:
    """Return the first K of an answer that are kept; −1 where there are fewer."""
    squared, rows = answer
    found = np.full((len(rows), K), -1, np.int64)
    for own, row in zip(found, rows, strict=True):
        kept = row[keep[row]][:K]
        own[: len(kept)] = kept
    return squared, found


def about() -> dict[str, Any]:
    """Return what the page says of a run."""
    return {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
        "versions": ", ".join(f"{name} {version(name)}" for name in ("numpy", "faiss-cpu"))
        + f", Python {platform.python_version()}",
    }


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--cache", type=Path, help="folder of the vectors")
    arguments.add_argument("--only", nargs="+", choices=SHAPES, help="measure these shapes alone")
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="measure these of a shape"
    )
    arguments.add_argument("--write", action="store_true", help="write the page alone")
    given = arguments.parse_args()
    if given.cache is None and not given.write:
        arguments.error("Give --cache FOLDER, or --write.")
    kept: dict[str, Any] = json.loads(RAW.read_text(encoding="utf-8")) if RAW.is_file() else {}
    faiss.omp_set_num_threads(1)
    for shape in [] if given.write else given.only or SHAPES:
        count, width = map(int, shape.split("x"))
        data = image_vectors(given.cache, count, width)
        told = kept.setdefault(shape, {})
        if "kernel" in given.parts:
            told |= about() | plain(data, given.rounds)
        if "index" in given.parts and shape in INDEXED:
            with tempfile.TemporaryDirectory(dir=given.cache) as folder:
                told["index"] = about() | whole(given.cache, Path(folder), shape, given.rounds)
        if "filter" in given.parts and shape == FILTERED:
            told["filtered"] = about() | {"rows": filtered(data, max(2, given.rounds // 2))}
        write_text(RAW, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    page = render(kept)
    write_text(RAW.parents[1] / "exact_search.md", page)
    print(page)


if __name__ == "__main__":
    main()
