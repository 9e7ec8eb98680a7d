"""Exact search of image vectors: `retrieval.serving.local.exact` beside FAISS's flat search, with and without a filter.

    python benchmarks/exact_search.py --cache FOLDER                  # all shapes; makes the vectors that are not there yet
    python benchmarks/exact_search.py --cache FOLDER --only 1000000x128     # one shape; the others stay as they are kept
    python benchmarks/exact_search.py --write                         # the page alone, from what is kept

Vectors and queries are those of benchmarks/image_vectors.py; the vectors are mapped from their file, but for FAISS's index, which holds
a copy. Contestants take turns in one process on one thread, and each cell is the least CPU time of its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
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
from numpy.typing import NDArray
from retrieval.host.files import write_text
from retrieval.serving.local import compact, exact

from exact_search_report import COMPACT, DEFAULT, INDEX, KNN, KNN_BLAS, NORMS, OURS, POST, render
from image_vectors import ImageVectors, image_vectors

RAW = Path(__file__).parent / "results" / "raw" / "exact_search.json"
SHAPES = {
    "1000000x128": (1, 32),
    "100000x128": (1, 32),
    "1000000x64": (1, 8, 32, 256),
    "50000x1280": (1, 32),
}
FILTERED = "1000000x128"
FRACTIONS = (0.01, 0.1, 0.5)
K = 10
TRUE = 8  # queries whose answer is compared with a plain search in double precision
Answer = tuple[Any, Any]


def true_rows(queries: NDArray[np.float32], vectors: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the K nearest rows by Σ (q − x)² in double precision, of every row, by loops of plain NumPy."""
    best = np.full((len(queries), K), np.inf)
    rows = np.full((len(queries), K), -1, np.int64)
    for start in range(0, len(vectors), 20_000):
        block = vectors[start : start + 20_000].astype(np.float64)
        for number, query in enumerate(queries.astype(np.float64)):
            apart = block - query
            every = np.concatenate([best[number], np.einsum("ij,ij->i", apart, apart)])
            order = np.argsort(every, kind="stable")[:K]
            known = np.concatenate([rows[number], np.arange(start, start + len(block))])
            best[number], rows[number] = every[order], known[order]
    return rows


def recall(found: NDArray[np.int64], true: NDArray[np.int64]) -> float:
    """Return which part of the true rows was found."""
    return float(
        np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), true.tolist(), strict=True)])
    )


def turns(contestants: dict[str, Callable[[], Answer]], rounds: int) -> dict[str, dict[str, Any]]:
    """Let each contestant search in turn; return its least CPU and wall milliseconds, and its last answer."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, search in contestants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            answer = search()
            row = {"cpu": 1e3 * (time.process_time() - cpu), "wall": 1e3 * (time.perf_counter() - wall)}
            before = found.get(name, row)
            found[name] = {key: min(row[key], before[key]) for key in row} | {"answer": answer[1]}
    return found


def with_blas(queries: NDArray[np.float32], vectors: NDArray[np.float32]) -> Answer:
    """Search by FAISS's matrix products, whose threshold is the whole process's."""
    before = faiss.cvar.distance_compute_blas_threshold
    faiss.cvar.distance_compute_blas_threshold = 1024
    try:
        return faiss.knn(queries, vectors, K)
    finally:
        faiss.cvar.distance_compute_blas_threshold = before


def plain(data: ImageVectors, batches: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Measure searches without a filter, at each number of queries a call."""
    vectors = data.vectors
    norms = exact.squared_norms(vectors)
    began = time.process_time()
    companion = compact.build(vectors)
    told: dict[str, Any] = {
        "build": time.process_time() - began,
        "width": companion.table.shape[1] if companion else 0,
        "rows": [],
    }
    index = faiss.IndexFlatL2(vectors.shape[1])
    index.add(vectors)
    queries = data.queries[:: len(data.queries) // max(batches)]
    true = true_rows(queries[:TRUE], vectors)
    for batch in batches:
        some = np.ascontiguousarray(queries[:batch])
        contestants: dict[str, Callable[[], Answer]] = {
            INDEX: lambda some=some: index.search(some, K),
            KNN: lambda some=some: faiss.knn(some, vectors, K),
            KNN_BLAS: lambda some=some: with_blas(some, vectors),
            OURS: lambda some=some: exact.nearest(some, vectors, K),
            NORMS: lambda some=some: exact.nearest(some, vectors, K, norms=norms),
            COMPACT: lambda some=some: exact.nearest(some, vectors, K, compact=companion),
        }
        if batch > 1:
            del contestants[KNN]  # by default the same loop as the index's
        else:
            del contestants[KNN_BLAS], contestants[NORMS]  # they change nothing for one query
        if companion is None:
            del contestants[COMPACT]
        for name, row in turns(contestants, max(2, rounds // (2 if batch > 32 else 1))).items():
            part = min(batch, TRUE)
            row["recall"] = recall(row.pop("answer")[:part], true[:part])
            told["rows"].append({"contestant": name, "batch": batch} | row)
    told["threads"] = _threads(queries, vectors, rounds)
    return told


def _threads(queries: NDArray[np.float32], vectors: NDArray[np.float32], rounds: int) -> list[dict[str, Any]]:
    """Measure a search by one and by two threads over ranges of the rows."""
    rows = []
    for batch in (1, 32):
        some = np.ascontiguousarray(queries[:batch])
        contestants: dict[str, Callable[[], Answer]] = {
            str(count): lambda some=some, count=count: exact.nearest(some, vectors, K, threads=count)
            for count in (1, 2)
        }
        rows += [
            {"threads": int(name), "batch": batch, "cpu": row["cpu"], "wall": row["wall"]}
            for name, row in turns(contestants, rounds).items()
        ]
    return rows


def filtered(data: ImageVectors, rounds: int) -> list[dict[str, Any]]:
    """Measure searches of a part of the items: a random one, and one of the ten classes."""
    vectors, rows, random = data.vectors, [], np.random.default_rng(0)
    companion = compact.build(vectors)
    masks = {f"{100 * part:g} % at random": random.random(len(vectors)) < part for part in FRACTIONS}
    masks["one class of ten"] = data.labels == 3
    for batch in (1, 32):
        some = np.ascontiguousarray(data.queries[:: len(data.queries) // 32][:batch])
        for title, keep in masks.items():
            kept = np.flatnonzero(keep)
            true = kept[true_rows(some[:TRUE], np.ascontiguousarray(vectors[kept]))]
            depth = min(int(2 * K / keep.mean()), len(vectors))
            contestants: dict[str, Callable[[], Answer]] = {
                DEFAULT: lambda some=some: exact.nearest(some, vectors, K),
                OURS: lambda some=some, keep=keep: exact.nearest(some, vectors, K, keep=keep),
                COMPACT: lambda some=some, keep=keep: exact.nearest(
                    some, vectors, K, keep=keep, compact=companion
                ),
                POST: lambda some=some, keep=keep, depth=depth: _dropped(
                    exact.nearest(some, vectors, depth), keep
                ),
            }
            for name, row in turns(contestants, rounds).items():
                found = row.pop("answer")[:TRUE]
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


def _machine() -> str:
    model = platform.processor() or platform.machine()
    flags = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() == "flags":
            known = value.split()
            flags = ", ".join(
                flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_tile") if flag in known
            )
            break
    return f"{model} ({flags}), {os.cpu_count()} cores, no GPU"


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--cache", type=Path, help="folder of the vectors")
    arguments.add_argument("--only", choices=list(SHAPES), help="measure this shape alone")
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--write", action="store_true", help="write the page alone")
    given = arguments.parse_args()
    if given.cache is None and not given.write:
        arguments.error("Give --cache FOLDER, or --write.")
    kept: dict[str, Any] = json.loads(RAW.read_text(encoding="utf-8")) if RAW.is_file() else {}
    faiss.omp_set_num_threads(1)
    for shape in [] if given.write else [given.only] if given.only else SHAPES:
        count, width = map(int, shape.split("x"))
        data = image_vectors(given.cache, count, width)
        kept[shape] = {
            "machine": _machine(),
            "load": os.getloadavg()[0],
            "date": time.strftime("%Y-%m-%d"),
            "versions": ", ".join(f"{name} {version(name)}" for name in ("numpy", "faiss-cpu"))
            + f", Python {platform.python_version()}",
        } | plain(data, SHAPES[shape], given.rounds)
        write_text(RAW, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        if shape == FILTERED:
            kept[shape]["filtered"] = filtered(data, max(2, given.rounds // 2))
        write_text(RAW, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    page = render(kept)
    write_text(RAW.parents[1] / "exact_search.md", page)
    print(page)


if __name__ == "__main__":
    main()
