"""Exact search beside FAISS's flat index as it comes, on one thread.

    python benchmarks/search.py               # all shapes; writes results/search.md
    python benchmarks/search.py --rows 10000  # the shapes of so many rows alone, which are not kept

Vectors are Fashion-MNIST's training images, shifted and mirrored, along the principal components of
their pixels; those of 128 numbers are damped as a trained embedding's are (96 % of the variance in
about 20 directions). Queries are test images. Each cell is the median CPU time of a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
from retrieval.data.idx import read_idx
from retrieval.serving.store.search import Companion, nearest

from bench import FASHION, arguments, finish, markdown, one_thread, page

SHAPES = {(10_000, 128): 25, (50_000, 64): 25, (100_000, 128): 11, (1_000_000, 128): 5}
"""Rows and numbers of the vectors, and how many calls are measured."""
BATCHES, COMPANION_FROM, K = (1, 8, 32), 50_000, 10


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


def measured(shape: tuple[int, int], calls: int) -> list[dict[str, Any]]:
    """Return a row of the table for each batch."""
    vectors, queries = vectors_of(*shape, power=0.25 if shape[1] == 128 else 0.0)
    index = faiss.IndexFlatL2(shape[1])
    index.add(vectors)
    contestants: dict[str, Callable[[Any], Any]] = {
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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, choices=sorted({rows for rows, _ in SHAPES}))
    options = parser.parse_args()
    one_thread()
    shapes = {shape: calls for shape, calls in SHAPES.items() if options.rows in (None, shape[0])}
    rows = [row for shape, calls in shapes.items() for row in measured(shape, calls)]
    finish("search", rows, render(rows), keep=not options.rows)


def render(rows: list[dict[str, Any]]) -> str:
    names = ["IndexFlatL2", "nearest", "with companion"]
    lines = [
        [row["shape"], str(row["queries"]), *(f"{row[n]:.2f}" if n in row else "" for n in names)]
        for row in rows
    ]
    return page(f"""
        # Exact search

        `python benchmarks/search.py`: median CPU milliseconds of a call on one thread, ten nearest.

        {markdown(["vectors", "queries", *names], lines)}
    """)


if __name__ == "__main__":
    main()
