"""What an index of image vectors costs beside FAISS's flat index: to build, to open, and to search as the server does. For `exact_search.py`.

Each building and opening is in a process of its own, one thread; openings take turns. What is opened was just written, so the system has it in
memory. Vectors come as features of a bundle whose encoder multiplies them by 1, as people bring their own (`retrieval index create BUNDLE
x.npz`): each becomes an item with an id, a row of SQLite and a stamp. FAISS's contestant keeps vectors alone, without ids.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

from exact_search_report import BUILT, INDEX, MAPPED, READ, SEARCHED

OPENINGS = 5


def memory(name: str) -> float:
    """Return megabytes of this process as the kernel counts them: VmRSS or VmHWM."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024


def spent(work: Any) -> dict[str, float]:
    """Do some work; return its seconds, the memory before and at the most."""
    Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted from here on
    before, wall, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    kept = work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    found = {"cpu": cpu, "wall": wall, "before": before, "after": memory("VmRSS"), "peak": memory("VmHWM")}
    del kept
    return found


def prepare(folder: Path, vectors: Any) -> None:
    """Write the features and the bundle that an index is made of."""
    from scaled_bundle import make_bundle

    make_bundle(folder / "bundle", vectors.shape[1], 1.0)
    np.savez(folder / "x.npz", features=vectors)


def build(folder: Path) -> dict[str, float]:
    """Make an index of the features; return what it took."""
    import faiss  # noqa: F401  loaded before time and memory are taken
    import onnxruntime  # noqa: F401
    from retrieval.serving.index.creating import create_index

    return spent(
        lambda: create_index(
            folder / "index",
            folder / "bundle",
            [folder / "x.npz"],
            backend="flat",
            batch=4096,
            progress=False,
        )
    )


def build_faiss(folder: Path) -> dict[str, float]:
    """Make FAISS's flat index of the same features, and write it."""
    import faiss

    def work() -> Any:
        with np.load(folder / "x.npz") as file:
            features = file["features"]
        index = faiss.IndexFlatL2(features.shape[1])
        index.add(features)
        faiss.write_index(index, str(folder / "flat.faiss"))
        return index

    return spent(work)


def opened(folder: Path, query: Any) -> dict[str, float]:
    """Open the index and search once."""
    import faiss  # noqa: F401
    import onnxruntime  # noqa: F401
    from retrieval.serving.index.index import open_index

    def work() -> Any:
        index = open_index(folder / "index", threads=1)
        index.search(query, 10)
        return index

    return spent(work)


def opened_faiss(folder: Path, query: Any, flags: int) -> dict[str, float]:
    """Read FAISS's index and search once."""
    import faiss

    def work() -> Any:
        index = faiss.read_index(str(folder / "flat.faiss"), flags)
        index.search(query, 10)
        return index

    return spent(work)


def searched(folder: Path, data: Any, rounds: int) -> list[dict[str, Any]]:
    """Search the opened index as the server does, and FAISS's, in turns."""
    import faiss
    from retrieval.serving.index.index import open_index

    from exact_search_turns import BATCHES, K, drawn, measured

    flat = faiss.read_index(str(folder / "flat.faiss"))
    rows = []
    with open_index(folder / "index", threads=1) as index:
        contestants = {INDEX: lambda some: flat.search(some, K), SEARCHED: lambda some: index.search(some, K)}
        for batch in BATCHES:
            rows += measured(contestants, batch, drawn(data.queries, batch, rounds), data.vectors)
            rows[-1]["kernel"] = within(index, drawn(data.queries, batch, rounds))
    return rows


def within(index: Any, rounds: list[Any]) -> float:
    """Return what part of the CPU time of searches `nearest` has."""
    from retrieval.serving.local import piece

    from exact_search_turns import K

    nearest, inside = piece.nearest, [0.0]

    def timed(*given: Any, **named: Any) -> Any:
        start = time.process_time()
        found = nearest(*given, **named)
        inside[0] += time.process_time() - start
        return found

    piece.nearest = timed
    start = time.process_time()
    for some in rounds:
        index.search(some, K)
    whole = time.process_time() - start
    piece.nearest = nearest
    return inside[0] / whole


def work(arguments: argparse.Namespace) -> Any:
    """Do what a process is for."""
    from image_vectors import image_vectors

    folder, what = arguments.folder, arguments.work
    if what == BUILT:
        return build(folder)
    if what == INDEX:
        return build_faiss(folder)
    count, width = map(int, arguments.shape.split("x"))
    data = image_vectors(arguments.cache, count, width)
    if what == "prepare":
        return prepare(folder, data.vectors)
    if what == "search":
        return searched(folder, data, arguments.rounds)
    if what == BUILT + " opened":
        return opened(folder, data.queries[:1])
    import faiss

    return opened_faiss(folder, data.queries[:1], faiss.IO_FLAG_MMAP_IFC if what == MAPPED else 0)


def whole(cache: Path, folder: Path, shape: str, rounds: int) -> dict[str, Any]:
    """Return what an index of a shape costs, beside FAISS's.

    Args:
        cache: of the vectors.
        folder: an empty one, for both indexes.
        shape: rows and width.
        rounds: of searches.
    """

    def ask(what: str) -> Any:
        command = [sys.executable, __file__, what, "--cache", cache, "--folder", folder, "--shape", shape]
        done = subprocess.run(
            [*map(str, command), "--rounds", str(rounds)], stdout=subprocess.PIPE, check=True, text=True
        )
        return json.loads(done.stdout)

    ask("prepare")
    told: dict[str, Any] = {"built": {name: ask(name) for name in (BUILT, INDEX)}}
    (folder / "x.npz").unlink()
    told["bytes"] = {
        BUILT: sum(path.stat().st_size for path in (folder / "index").rglob("*") if path.is_file()),
        INDEX: (folder / "flat.faiss").stat().st_size,
    }
    openings: dict[str, list[dict[str, float]]] = {BUILT: [], READ: [], MAPPED: []}
    for _ in range(OPENINGS):
        for name, rows in openings.items():
            rows.append(ask(name + (" opened" if name == BUILT else "")))
    told["opened"] = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in openings.items()
    }
    told["rows"] = ask("search")
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    print(json.dumps(work(parser.parse_args())))
