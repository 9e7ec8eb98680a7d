"""How `exact_search.py` and `exact_search_index.py` let contestants take turns, and what they compare answers with."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCHES = (1, 8, 32, 256)
K = 10
TRUE = 8  # queries whose answer is compared with a plain search in double precision
Queries = NDArray[np.float32]
Search = Callable[[Queries], Any]


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


def turns(contestants: dict[str, Search], rounds: Sequence[Queries]) -> dict[str, dict[str, Any]]:
    """Let each contestant in turn search for each round's queries; return its least CPU and wall milliseconds, and its last answer."""
    found: dict[str, dict[str, Any]] = {}
    for queries in rounds:
        for name, search in contestants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            answer = search(queries)
            row = {"cpu": 1e3 * (time.process_time() - cpu), "wall": 1e3 * (time.perf_counter() - wall)}
            before = found.get(name, row)
            found[name] = {key: min(row[key], before[key]) for key in row} | {"answer": answer}
    return found


def drawn(queries: Queries, batch: int, rounds: int) -> list[Queries]:
    """Return as many rounds of queries, each of other ones as far as there are enough."""
    few = max(2, rounds // (2 if batch > 32 else 1))
    order = np.random.default_rng(batch).permutation(len(queries))
    return [np.ascontiguousarray(queries[np.resize(order[r * batch :], batch)]) for r in range(few)]


def measured(
    contestants: dict[str, Search], batch: int, given: list[Queries], vectors: NDArray[np.float32]
) -> list[dict[str, Any]]:
    """Return a row for each contestant: its times, and its recall of the last round's first queries."""
    few = TRUE if vectors.size < 100_000_000 else TRUE // 2  # plain loops take as long as all else
    true, rows = true_rows(given[-1][:few], vectors), []
    for name, row in turns(contestants, given).items():
        found = rows_of(row.pop("answer"))[: len(true)]
        rows.append({"contestant": name, "batch": batch} | row | {"recall": recall(found, true)})
    return rows


def rows_of(answer: Any) -> NDArray[np.int64]:
    """Return the rows (Q, K) of an answer: FAISS's distances and rows, or an index's hits, whose ids end in the row."""
    if isinstance(answer, tuple):
        return answer[1]
    return np.array([[int(hit.id.rpartition("/")[2]) for hit in hits] for hits in answer], np.int64)


def machine() -> str:
    """Return the processor's name, what instructions it has, and how many cores there are."""
    model = platform.processor() or platform.machine()
    flags = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() == "flags":
            known = value.split()
            flags = ", ".join(
                flag
                for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
                if flag in known
            )
            break
    return f"{model} ({flags}), {os.cpu_count()} cores, no GPU"
