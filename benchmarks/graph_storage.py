"""What the graph of a segment stores beside its links: the vectors once more, rounded ones, or none; speed and recall of each, in one run.

    python benchmarks/graph_storage.py --cache FOLDER --keep      # writes results/graph_storage.md; the vectors are those of image_vectors.py

One graph (`hnsw`, 32 links, 128 candidates while building) over the vectors in float32; the same vectors rounded to fp16, bf16 and one byte a number by FAISS's
`IndexHNSWSQ`, which builds its own graph over them; and the first graph without vectors, which reads those of the segment's file where they are mapped. Each proposes ten
rows, or twenty; what is proposed is measured again on the vectors and ordered, as an index does. Searches of one query each, by one thread; the kinds take turns,
query by query, so that whoever else uses the machine slows all of them alike: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from retrieval.serving.index.faiss_backends import Hnsw

RESULTS = Path(__file__).parent / "results"
KINDS = {
    "flat": "float32 beside the links",
    "mapped": "none: the segment's own, mapped",
    "fp16": "fp16",
    "bf16": "bf16",
    "8bit": "one byte a number",
}
K = 10


def built(kind: str, vectors: Any) -> tuple[Any, float]:
    """Return a graph over vectors, and the seconds that building took."""
    began = time.perf_counter()
    if kind == "flat":
        index = faiss.IndexHNSWFlat(vectors.shape[1], 32)
    else:
        index = faiss.IndexHNSWSQ(vectors.shape[1], getattr(faiss.ScalarQuantizer, f"QT_{kind}"), 32)
        index.train(vectors[:65_536])
    index.hnsw.efConstruction = 128
    for start in range(0, len(vectors), 8192):
        index.add(vectors[start : start + 8192])
    return index, time.perf_counter() - began


def searched(index: Any, vectors: Any, query: Any, ef: int, wide: int) -> tuple[Any, float]:
    """Return the ten nearest of what a graph proposes, measured again, and the seconds."""
    began = time.perf_counter()
    _, (rows,) = index.search(query[None], wide, params=faiss.SearchParametersHNSW(efSearch=ef))
    apart = ((vectors[rows].astype(np.float64) - query) ** 2).sum(axis=1)
    return rows[np.argsort(apart)[:K]], time.perf_counter() - began


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return what the page shows."""
    folder = given.cache / f"fashion-{given.width}"
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")[: given.count]
    queries = np.load(folder / "queries.npy")[: given.queries]
    exact = faiss.IndexFlatL2(given.width)
    exact.add(np.ascontiguousarray(vectors))
    _, truth = exact.search(queries, K)
    del exact
    indexes, kept = {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        for kind in KINDS:
            if kind == "mapped":
                backend = Hnsw()
                backend._index = indexes["flat"]
                backend.save_beside(Path(temporary) / kind)
                read = Hnsw()
                read.load_beside(Path(temporary) / kind, vectors)
                indexes[kind], seconds = read._index, kept["flat"]["built"]
                kept["backend"] = read  # holds the vectors
            else:
                indexes[kind], seconds = built(kind, np.ascontiguousarray(vectors))
                faiss.write_index(indexes[kind], str(Path(temporary) / kind))
            size = (Path(temporary) / kind).stat().st_size
            kept[kind] = {"built": round(seconds, 1), "bytes": size, "found": {}}
            print(kind, kept[kind], flush=True)
    del kept["backend"]
    for ef in given.ef:
        for wide in (K, 2 * K):
            right = dict.fromkeys(KINDS, 0)
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for at, query in enumerate(queries):
                order = list(KINDS)[at % len(KINDS) :] + list(KINDS)[: at % len(KINDS)]
                for kind in order:
                    rows, seconds = searched(indexes[kind], vectors, query, max(ef, wide), wide)
                    right[kind] += len(set(rows.tolist()) & set(truth[at].tolist()))
                    times[kind].append(seconds)
            for kind in KINDS:
                kept[kind]["found"][f"{ef}/{wide}"] = {
                    "recall": round(right[kind] / (K * len(queries)), 4),
                    "p50": round(1e3 * float(np.median(times[kind])), 4),
                }
    return kept


def render(kept: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# What a graph stores of the vectors",
        "",
        f"`python benchmarks/graph_storage.py`, {kept['date']}. {kept['machine']}; load average {kept['load'][0]} before and {kept['load'][1]} after: others shared the cores, so read "
        f"the ratios. {kept['count']:,} × {kept['width']}, vectors of images, {4e-6 * kept['count'] * kept['width']:.1f} MB in float32; {kept['queries']:,} queries one by one. Recall is of the ten "
        "nearest, after what was proposed is measured again on the vectors. FAISS "
        f"{kept['faiss']} with {kept['options']}.",
        "",
        "| stored | file, MB | built in, s | " + " | ".join(f"ef {name.replace('/', ', proposed ')}" for name in kept["found"]["flat"]["found"]) + " |",
        "|---" * (3 + len(kept["found"]["flat"]["found"])) + "|",
    ]  # fmt: skip
    base = kept["found"]["flat"]["found"]
    for kind, title in KINDS.items():
        row = kept["found"][kind]
        shown = [
            f"{one['recall']:.4f}, {one['p50'] / base[name]['p50']:.2f} ×" for name, one in row["found"].items()
        ]  # fmt: skip
        built = "the first's" if kind == "mapped" else f"{row['built']:.0f}"
        lines.append(f"| {title} | {row['bytes'] / 1e6:.1f} | {built} | {' | '.join(shown)} |")
    lines += [
        "",
        f"Each cell: recall, and the median time against the first line's, which is {', '.join(format(one['p50'], '.2f') for one in base.values())} ms.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cache", type=Path, required=True, help="folder of the vectors, see image_vectors.py"
    )
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--ef", type=int, nargs="*", default=[32, 64, 256])
    parser.add_argument(
        "--keep", action="store_true", help="keep the figures in results/, and write the page"
    )
    given = parser.parse_args()
    faiss.omp_set_num_threads(1)
    kept: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load": [round(os.getloadavg()[0], 1)], "count": given.count, "width": given.width, "queries": given.queries,
        "faiss": faiss.__version__, "options": faiss.get_compile_options().strip(), "found": measure(given),
    }  # fmt: skip
    kept["load"].append(round(os.getloadavg()[0], 1))
    if given.keep:
        (RESULTS / "raw" / "graph_storage.json").write_text(
            json.dumps(kept, indent=1) + "\n", encoding="utf-8"
        )
        (RESULTS / "graph_storage.md").write_text(render(kept), encoding="utf-8")
    print(render(kept))


if __name__ == "__main__":
    main()
