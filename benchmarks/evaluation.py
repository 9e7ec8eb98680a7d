"""Recall@1 and MAP@R: `retrieval.evaluate` beside pytorch-metric-learning's AccuracyCalculator.

    python benchmarks/evaluation.py # writes results/evaluation.md; needs 4 GB of memory
    python benchmarks/evaluation.py --items 2000          # smaller; nothing is kept

"Images" are Fashion-MNIST's training images as 128 principal components of unit length, in ten
classes, so MAP@R needs the nearest tenth of the gallery. "Small classes" have 15 items each:
Gaussian clouds on the unit sphere. Each item searches among all others. Each contestant runs in a
new process on one thread, after a warm-up on a small set.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

import bench

ITEMS = (6_000, 20_000)
OURS, DEFAULT = "`retrieval.evaluate`", "`AccuracyCalculator()`"
BINS = '`AccuracyCalculator(k="max_bin_count")`'
SETS, CALLS = ("images", "small classes"), 3


def items_of(name: str, count: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    if name == "images":
        from retrieval.data.image_archives import read_idx
        from sklearn.decomposition import PCA

        images = read_idx(bench.FASHION / "train-images-idx3-ubyte.gz", 3).reshape(60_000, -1)
        rows = random.permutation(len(images))[:count]
        labels = read_idx(bench.FASHION / "train-labels-idx1-ubyte.gz", 1)[rows].astype(np.int64)
        vectors = PCA(128, random_state=0).fit_transform(images[rows] / 255)
    else:
        labels = np.arange(count, dtype=np.int64) // 15
        centres = random.normal(size=(labels[-1] + 1, 128))
        vectors = centres[labels] + 2.2 * random.normal(size=(count, 128))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32), labels


def figures_of(name: str, embeddings: Any, labels: Any) -> dict[str, float]:
    """Return a contestant's Recall@1 and MAP@R."""
    if name == OURS:
        from retrieval.evaluation.evaluation import evaluate

        return dict(evaluate(embeddings, labels, metrics=["recall_at_1", "map_at_r"]).values)
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    torch.set_num_threads(1)
    names = {"precision_at_1": "recall_at_1", "mean_average_precision_at_r": "map_at_r"}
    kept = "max_bin_count" if name == BINS else None
    calculator = AccuracyCalculator(include=tuple(names), k=kept, device=torch.device("cpu"))
    metrics = calculator.get_accuracy(torch.from_numpy(embeddings), torch.from_numpy(labels))
    return {names[key]: float(value) for key, value in metrics.items()}


def contestant(name: str, data: str, count: int) -> dict[str, Any]:
    """Return a contestant's metrics, CPU seconds, and additional memory in MB."""
    bench.one_thread()
    embeddings, labels = items_of(data, count)
    figures_of(name, embeddings[:300], labels[:300])
    before, times = bench.status("VmRSS"), []
    for _ in range(CALLS):
        began = time.process_time()
        values = figures_of(name, embeddings, labels)
        times.append(time.process_time() - began)
        if times[0] > 30:
            break
    added = (bench.status("VmHWM") - before) / 2**20
    return {"cpu": statistics.median(times), "added": added, "values": values}


def measure(counts: list[int]) -> list[dict[str, Any]]:
    """Run each contestant on each set and size, one after the other."""
    rows = []
    for data in SETS:
        for count in counts:
            for name in (OURS, BINS, *([DEFAULT] if count <= ITEMS[0] else [])):
                row = {"set": data, "items": count, "contestant": name}
                try:
                    row |= bench.alone(contestant, name, data, count)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    return rows


def render(raw: dict[str, Any]) -> str:
    lines, apart = [], 0.0
    for row in raw["rows"]:
        ours = bench.chosen(raw["rows"], set=row["set"], items=row["items"])[0]
        cells = [row["set"], f"{row['items']:,}", row["contestant"]]
        if "failed" in row:
            lines.append([*cells, row["failed"], "", "", "", ""])
            continue
        ratio = row["cpu"] / ours["cpu"]
        values = [row["values"][key] for key in ("recall_at_1", "map_at_r")]
        lines.append(
            [*cells, f"{row['cpu']:.2f}", f"{ratio:.1f} ×", f"{row['added']:,.0f}"]
            + [f"{value:.4f}" for value in values]
        )
        apart = max(apart, *(abs(value - ours["values"][k]) for k, value in row["values"].items()))
    head = ["set", "items", "contestant", "CPU s", "÷ ours", "added MB", "Recall@1", "MAP@R"]
    return bench.page(f"""
        # Evaluation: Recall@1 and MAP@R

        `python benchmarks/evaluation.py`. Each item searches among all others. *Images* are
        Fashion-MNIST's as 128 principal components of unit length, 10 classes; *small classes* have
        15 items each. `retrieval` computes in double precision and orders ties by row.

        {raw["machine"]}, one thread, each contestant in a new process; {raw["versions"]}; load
        average {raw["load"]} at the start. CPU seconds are the median of up to {CALLS} calls;
        memory is the rise of the process's peak.

        {bench.markdown(head, lines)}

        The contestants' metrics on the same items differ by at most {apart:.0e}.
    """)


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--items", type=int, nargs="+", help="how many; nothing is kept")
    options = parser.parse_args()
    bench.one_thread()
    raw = bench.machine_of("torch", "numpy", "faiss-cpu", "pytorch-metric-learning")
    raw["rows"] = measure(options.items or list(ITEMS))
    bench.finish("evaluation", raw, render(raw), keep=not options.items)


if __name__ == "__main__":
    main()
