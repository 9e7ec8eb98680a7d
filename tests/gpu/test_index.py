"""FAISS's structures on a GPU: hits, CAGRA's file on a CPU, threads and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from retrieval.errors import StoreError
from retrieval.store.backends import make_backend

LEAST = {"flat": 0.9999, "ivf": 0.9, "ivfpq": 0.5, "cagra": 0.9}


def loaded(name: str, vectors: Any, folder: Path, **options: Any) -> Any:
    """A back end that was built, saved and loaded."""
    built = make_backend(name, options)
    built.build(vectors, lambda count: None)
    built.save(folder / name)
    backend = make_backend(name, options)
    backend.load(folder / name, vectors)
    return backend


def exact(vectors: NDArray[np.float32], queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    squared = (queries**2).sum(1)[:, None] - 2 * queries @ vectors.T + (vectors**2).sum(1)
    return np.argsort(squared, axis=1, kind="stable")[:, :k]


def recall(rows: Any, expected: Any) -> float:
    shares = [len(set(a) & set(b)) / len(b) for a, b in zip(rows, expected, strict=True)]
    return float(np.mean(shares))


@pytest.mark.parametrize("name", LEAST)
def test_a_structure_finds_the_nearest(index_gpus, vectors, tmp_path, name):
    backend = loaded(name, vectors, tmp_path)
    assert backend._gpu_index is not None
    _, rows = backend.search(vectors[:200], 10)
    assert recall(rows, exact(vectors, vectors[:200], 10)) >= LEAST[name]


CPU = """
import sys
import numpy as np
from pathlib import Path
from retrieval.store.backends import make_backend

folder = Path(sys.argv[1])
backend, vectors = make_backend("cagra", {}), np.load(folder / "vectors.npy")
backend.load(folder / "cagra", vectors)
assert backend._gpu_index is None
np.save(folder / "rows.npy", backend.search(vectors[:100], 10)[1])
"""


def test_a_cpu_searches_what_a_gpu_built(index_gpus, vectors, tmp_path):
    loaded("cagra", vectors, tmp_path)
    np.save(tmp_path / "vectors.npy", vectors)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", CPU, str(tmp_path)], check=True, env=environment)
    assert recall(np.load(tmp_path / "rows.npy"), exact(vectors, vectors[:100], 10)) > 0.9


def test_many_threads_get_their_own_hits(index_gpus, vectors, tmp_path):
    backend = loaded("flat", vectors, tmp_path)
    wrong: list[int] = []

    def search(first: int) -> None:
        for row in range(first, first + 50):
            if backend.search(vectors[row : row + 1], 1)[1][0, 0] != row:
                wrong.append(row)

    threads = [threading.Thread(target=search, args=(50 * number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_too_little_memory_is_a_sentence(index_gpus, vectors, tmp_path):
    torch = pytest.importorskip("torch")
    backend = loaded("flat", vectors, tmp_path)
    backend.search(vectors[:1], 1)  # so that FAISS has reserved its memory
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(1, free - (4 << 20)), dtype=torch.uint8, device="cuda")
    try:
        says = "The GPU has too little memory for 20,000 vectors of 64 numbers"
        with pytest.raises(StoreError, match=says):
            backend.placed()
    finally:
        del held
        torch.cuda.empty_cache()
    assert (backend.search(vectors[:1], 1)[1] == 0).all()
