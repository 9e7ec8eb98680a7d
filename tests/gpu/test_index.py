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
from retrieval.serving.index.backends import make_backend

LEAST = {"flat": 0.9999, "ivf": 0.9, "ivfpq": 0.5, "cagra": 0.9}


def loaded(name: str, vectors: Any, folder: Path, **options: Any) -> Any:
    made = make_backend(name, options)
    made.build(vectors, lambda count: None)
    made.save(folder / name)
    again = make_backend(name, options)
    again.load(folder / name, vectors)
    return again


def exact(vectors: NDArray[np.float32], queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    squared = (queries**2).sum(1)[:, None] - 2 * queries @ vectors.T + (vectors**2).sum(1)
    return np.argsort(squared, axis=1, kind="stable")[:, :k]


def recall(found: Any, expected: Any) -> float:
    return float(
        np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, expected, strict=True)])
    )


@pytest.mark.parametrize("name", LEAST)
def test_hits_of_each_structure(index_gpus, vectors, tmp_path, name):
    backend = loaded(name, vectors, tmp_path)
    assert backend._gpu_index is not None
    _, rows = backend.search(vectors[:200], 10)
    assert recall(rows, exact(vectors, vectors[:200], 10)) >= LEAST[name]


def test_a_cpu_searches_what_a_gpu_built(index_gpus, vectors, tmp_path):
    loaded("cagra", vectors, tmp_path)
    np.save(tmp_path / "vectors.npy", vectors)
    code = (
        "import sys, numpy as np; from pathlib import Path; from retrieval.serving.index.backends"
        " import make_backend\nfolder = Path(sys.argv[1]); b = make_backend('cagra', {});"
        " v = np.load(folder / 'vectors.npy'); b.load(folder / 'cagra', v)\nassert b._gpu_index is"
        " None; np.save(folder / 'rows.npy', b.search(v[:100], 10)[1])"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)
    assert recall(np.load(tmp_path / "rows.npy"), exact(vectors, vectors[:100], 10)) > 0.9


def test_threads_that_search_at_once_get_their_own_hits(index_gpus, vectors, tmp_path):
    backend = loaded("flat", vectors, tmp_path)
    wrong: list[int] = []

    def ask(first: int) -> None:
        for at in range(first, first + 50):
            if backend.search(vectors[at : at + 1], 1)[1][0, 0] != at:
                wrong.append(at)

    threads = [threading.Thread(target=ask, args=(50 * number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_too_little_memory_is_a_sentence(index_gpus, vectors, tmp_path):
    torch = pytest.importorskip("torch")
    backend = loaded("flat", vectors, tmp_path)
    backend.search(vectors[:1], 1)  # FAISS reserves its memory now
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
