"""Exact search beside FAISS's flat index as it comes, on one thread.

    python benchmarks/search.py                       # all shapes
    python benchmarks/search.py --before CHECKOUT     # and an older checkout's search, in turns

Vectors are Fashion-MNIST's training images, shifted and mirrored, along the principal components of
their pixels; those of 128 numbers are damped as a trained embedding's are (96 % of the variance in
about 20 directions). Queries are test images. Each cell is the median CPU time of a call.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# These count only before NumPy and FAISS are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import faiss
import numpy as np
from retrieval.data.idx import read_idx
from retrieval.host.files import write_text
from retrieval.serving.store.search import Companion, nearest

IMAGES = Path("/usr/share/datasets/fashion-mnist")
RAW = Path(__file__).parent / "results" / "raw" / "search.json"
SHAPES = {(10_000, 128): 25, (50_000, 64): 25, (100_000, 128): 11, (1_000_000, 128): 5}
"""Rows and numbers of the vectors, and how many calls are measured."""
BATCHES = (1, 8, 32)
COMPANION_FROM = 50_000
K = 10


def vectors_of(count: int, width: int, power: float) -> tuple[Any, Any]:
    """Return vectors (count, width) and queries (10000, width)."""
    train = read_idx(IMAGES / "train-images-idx3-ubyte.gz", 3).astype(np.float32) / 255
    test = read_idx(IMAGES / "t10k-images-idx3-ubyte.gz", 3).astype(np.float32) / 255
    random = np.random.default_rng(0)

    def moved(images: Any) -> Any:
        down, right, mirrored = random.integers(-3, 4), random.integers(-3, 4), random.random() < 0.5
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


def before(checkout: Path, vectors: Any, large: bool) -> Callable[[Any], Any]:
    """Return the search of a checkout that still has `serving.local.exact`."""
    import retrieval.serving

    retrieval.serving.__path__.append(str(checkout / "retrieval" / "serving"))
    local = "retrieval.serving.local"
    exact, compact, distances = (
        importlib.import_module(f"{local}.{name}") for name in ("exact", "compact", "distances")
    )
    norms = distances.squared_norms(vectors)
    companion = compact.build(vectors) if large else None
    return lambda some: exact.nearest(some, vectors, K, norms=norms, compact=companion)


def measured(shape: tuple[int, int], calls: int, checkout: Path | None) -> list[dict[str, Any]]:
    """Return a row of the table for each batch."""
    vectors, queries = vectors_of(*shape, power=0.25 if shape[1] == 128 else 0.0)
    large = len(vectors) >= COMPANION_FROM
    companion = Companion.build(vectors) if large else None
    index = faiss.IndexFlatL2(shape[1])
    index.add(vectors)
    contestants: dict[str, Callable[[Any], Any]] = {
        "IndexFlatL2": lambda some: index.search(some, K),
        "nearest": lambda some: nearest(some, vectors, K),
    }
    if companion is not None:
        contestants["with companion"] = lambda some: nearest(some, vectors, K, companion=companion)
    if checkout is not None:
        contestants["before"] = before(checkout, vectors, large)
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


def main() -> None:
    arguments = argparse.ArgumentParser(description="Measure exact search.")
    arguments.add_argument("--before", type=Path, help="an older checkout")
    given = arguments.parse_args()
    faiss.omp_set_num_threads(1)
    rows = [row for shape, calls in SHAPES.items() for row in measured(shape, calls, given.before)]
    write_text(RAW, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    write_text(RAW.parents[1] / "search.md", render(rows))


def render(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    names = ["IndexFlatL2", "nearest", "with companion", "before"]
    lines = [
        "# Exact search\n",
        "`python benchmarks/search.py`: median CPU milliseconds of a call on one thread, ten "
        "nearest. `before` is the search that this one replaced, with its norms and companion.\n",
        f"| vectors | queries | {' | '.join(names)} |",
        f"| --- | --- |{' --- |' * len(names)}",
    ]
    for row in rows:
        cells = [f"{row[name]:.2f}" if name in row else "" for name in names]
        lines.append(f"| {row['shape']} | {row['queries']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
