"""k-means of `retrieval evaluate --clusters` beside FAISS's, at four shapes: CPU seconds, memory, and how good the clusters are.

    python benchmarks/kmeans.py                # goes on where it stopped; results/raw/kmeans.jsonl, results/kmeans.md
    python benchmarks/kmeans.py --write        # the page alone, from what is kept

Codes are those of `evaluation_shapes.py`, and scikit-learn's digits as pixels. There are as many clusters as classes. Each contestant runs in a process of its
own on one thread, after a call on a small set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # counts only before NumPy is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from evaluation_shapes import made, peak
from learners import machine
from page_tables import markdown

KEPT = Path(__file__).parent / "results" / "raw" / "kmeans.jsonl"
OURS = "retrieval"
FAISS = {"FAISS as it comes": {}, "FAISS, every item": {"max_points_per_centroid": 10**9}}
"""Its 25 rounds from items drawn at random; as it comes it looks at 256 items a cluster at most."""
SHAPES: dict[str, tuple[int, int, int] | None] = {
    "digits, 1,797 × 64 / 10": None,
    "6,000 × 128 / 100": (6_000, 128, 100),
    "15,000 × 128 / 10": (15_000, 128, 10),
    "15,000 × 128 / 1,000": (15_000, 128, 1_000),
    "30,000 × 128 / 5,600": (30_000, 128, 5_600),
}


def codes_of(shape: str) -> tuple[Any, Any]:
    """Return codes (N, C) float32 and labels (N,)."""
    sizes = SHAPES[shape]
    if sizes is not None:
        return made(*sizes)
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.data.astype(np.float32), digits.target


def clusters(name: str, codes: Any, count: int) -> Any:
    """Return the cluster of each code (N,)."""
    if name == OURS:
        from retrieval.evaluation.kmeans import kmeans

        return kmeans(codes, count)
    import faiss

    faiss.omp_set_num_threads(1)
    found = faiss.Kmeans(codes.shape[1], count, seed=0, **FAISS[name])
    found.train(codes)
    return found.index.search(codes, 1)[1][:, 0]


def contestant(name: str, shape: str) -> None:
    """Print one contestant's CPU seconds, memory and figures as JSON."""
    import torch
    from retrieval.evaluation.clusters import nmi

    torch.set_num_threads(1)
    clusters(name, made(3_000, 16, 30)[0], 30)
    codes, labels = codes_of(shape)
    classes = np.unique(labels, return_inverse=True)[1]
    before, start = peak(), time.process_time()
    found = clusters(name, codes, int(classes.max()) + 1)
    seconds, added = time.process_time() - start, peak() - before
    wide = codes.astype(np.float64)
    spread = sum(
        float(((wide[found == each] - wide[found == each].mean(0)) ** 2).sum()) for each in np.unique(found)
    )
    print(
        json.dumps(
            {"cpu": seconds, "added": added, "spread": spread / len(codes), "nmi": nmi(found, classes)}
        )
    )


def measure(shape: str, name: str) -> dict[str, Any]:
    """Run one contestant at a shape in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--contestant", name, shape], capture_output=True, text=True, check=True
    )
    return {"shape": shape, "name": name, "machine": machine(), "load": round(os.getloadavg()[0], 1),
            **json.loads(done.stdout.splitlines()[-1])}  # fmt: skip


def render(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    table = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of = {row["name"]: row for row in rows if row["shape"] == shape}
        for name, row in of.items():
            ratio = "" if name == OURS or OURS not in of else f"{row['cpu'] / of[OURS]['cpu']:.2f} ×"
            table.append([shape, name, f"{row['cpu']:.2f}", ratio, f"{row['added']:,.0f}",
                          f"{row['spread']:.4f}", f"{row['nmi']:.4f}"])  # fmt: skip
    return "\n".join(
        [
            "# k-means beside FAISS",
            "",
            "`python benchmarks/kmeans.py`. One thread, each contestant in a process of its own, one call. *Spread* is the mean squared distance of an item from the mean of its",
            "cluster, in double precision: what k-means makes small. `retrieval` starts by k-means++, many centres at once, and ends when hardly anything moves, after 100 rounds at most; FAISS starts from items",
            "drawn at random and does 25 rounds, *as it comes* on 256 items a cluster at most.",
            "",
            f"Machine: {rows[0]['machine']}. Load {min(r['load'] for r in rows)} to {max(r['load'] for r in rows)}.",
            "",
            markdown(
                ["items × width / clusters", "", "CPU s", "of ours", "added MB", "spread", "NMI"], table
            ),
            "",
            "Up to 100 clusters FAISS is quicker, by some hundredths of a second: there k-means++ is half of our time, and the rest some fifteen calls of Python a round.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="the page alone")
    parser.add_argument("--contestant", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        contestant(*given.contestant)
        return
    rows = (
        [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()] if KEPT.exists() else []
    )
    done = {(row["shape"], row["name"]) for row in rows}
    for shape in SHAPES:
        for name in () if given.write else (OURS, *FAISS):
            if (shape, name) not in done:
                rows.append(measure(shape, name))
                print(rows[-1], file=sys.stderr, flush=True)
                KEPT.write_text(
                    "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
                )
    (KEPT.parents[1] / "kmeans.md").write_text(render(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
