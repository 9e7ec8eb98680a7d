"""Recall@1, 2, 4, 8 and MAP@R: `retrieval.evaluate` beside pytorch-metric-learning's AccuracyCalculator.

Data: Fashion-MNIST's 60,000 training images (Debian: dataset-fashion-mnist) as 128 principal components, unit length. Each
contestant runs in a process of its own, in turn, with the same number of threads. Run by hand:

    OMP_NUM_THREADS=2 python benchmarks/evaluation.py --out benchmarks/results/evaluation.md
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from evaluation_report import render

FOLDER = Path("/usr/share/datasets/fashion-mnist")
OURS = "retrieval"
BINS = 'AccuracyCalculator, k="max_bin_count"'
# What the calculator took at 45,000 items for each pair of a query and one of its k neighbours.
_BYTES_A_PAIR = 68
DEFAULT = "AccuracyCalculator, default k"


def prepare(folder: Path, out: Path) -> None:
    """Write vectors (60000, 128) float32 of unit length, shuffled, and labels (60000,)."""
    from sklearn.decomposition import PCA

    def idx(name: str, header: int) -> Any:
        with gzip.open(folder / name) as file:
            return np.frombuffer(file.read(), np.uint8, offset=header)

    pixels = idx("train-images-idx3-ubyte.gz", 16).reshape(-1, 784).astype(np.float32) / 255
    labels = idx("train-labels-idx1-ubyte.gz", 8).astype(np.int64)
    vectors = PCA(128, svd_solver="covariance_eigh").fit_transform(pixels).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    shuffled = np.random.default_rng(0).permutation(len(labels))
    np.savez(out, vectors=vectors[shuffled], labels=labels[shuffled])


def contestant(name: str, data: Path, count: int, threads: int, shallow: bool, slices: int) -> None:
    """Run one contestant and print its figures, seconds and memory as JSON."""
    limit = _available() - 3 * 2**29
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # fail by itself, not by taking others along
    Path("/proc/self/oom_score_adj").write_text("1000")
    import torch

    torch.set_num_threads(threads)
    with np.load(data) as file:
        vectors, labels = file["vectors"][:count], file["labels"][:count]
    if name == OURS:
        from retrieval.evaluation.evaluation import evaluate

        names = [f"recall_at_{k}" for k in (1, 2, 4, 8)] + ([] if shallow else ["map_at_r"])
        before = _peak()
        wall, cpu = time.perf_counter(), time.process_time()
        values = evaluate(vectors, labels, metrics=names).values
    else:
        import faiss
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

        faiss.omp_set_num_threads(threads)

        class WithRecall(AccuracyCalculator):
            """Adds Recall@K from the neighbours it has already: its cost is a few columns."""

            def requires_knn(self) -> list[str]:
                return [*super().requires_knn(), *(f"recall_at_{k}" for k in (1, 2, 4, 8))]

        for k in (1, 2, 4, 8):
            setattr(WithRecall, f"calculate_recall_at_{k}", _recall(k))
        wanted = tuple(f"recall_at_{k}" for k in (1, 2, 4, 8)) + (
            () if shallow else ("mean_average_precision_at_r",)
        )
        kept = 8 if shallow else "max_bin_count" if name == BINS else None
        before = _peak()
        wall, cpu = time.perf_counter(), time.process_time()
        calculator = WithRecall(include=wanted, k=kept, device=torch.device("cpu"))
        codes, classes = torch.from_numpy(vectors), torch.from_numpy(labels)
        found = dict.fromkeys(wanted, 0.0)
        for part in torch.arange(count).chunk(slices):
            # The calculator wants a slice's queries to be the first of the gallery.
            order = torch.cat([part, torch.arange(0, int(part[0])), torch.arange(int(part[-1]) + 1, count)])
            whole = {} if slices == 1 else {
                "reference": codes[order], "reference_labels": classes[order], "ref_includes_query": True
            }  # fmt: skip
            for key, value in calculator.get_accuracy(codes[part], classes[part], **whole).items():
                found[key] += value * len(part) / count
        values = {
            key.replace("mean_average_precision_at_r", "map_at_r"): value for key, value in found.items()
        }
    print(
        json.dumps(
            {
                "wall": time.perf_counter() - wall,
                "cpu": time.process_time() - cpu,
                "peak": _peak(),
                "before": before,
                "values": values,
            }
        )
    )


def _recall(k: int) -> Any:
    def calculate(self: Any, knn_labels: Any, query_labels: Any, **kwargs: Any) -> float:
        return float((knn_labels[:, :k] == query_labels[:, None]).any(1).double().mean())

    return calculate


def _available() -> int:
    """Return how many bytes of memory are free or can be freed."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/meminfo names no MemAvailable: this benchmark runs on Linux.")


def _peak() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(
    name: str,
    data: Path,
    count: int,
    threads: int,
    shallow: bool = False,
    slices: int = 1,
) -> Any:
    """Run one contestant in a process of its own; return what it printed, or why it gave nothing."""
    command = [sys.executable, __file__, "--contestant", name, "--data", str(data), "--count", str(count)]
    command += [
        "--threads",
        str(threads),
        *(["--shallow"] if shallow else []),
        "--slices",
        str(slices),
    ]
    # Threads that wait must sleep: where other work shares the cores, spinning would count as CPU seconds.
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        if (
            "std::bad_alloc" in done.stderr
            or "not enough memory" in done.stderr
            or "MemoryError" in done.stderr
        ):
            return {"failed": f"cannot run: needs more than the {_available() / 2**30:.0f} GB that are free"}
        return {
            "failed": f"ended with code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
        }
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(name, count, "shallow" if shallow else "", result, file=sys.stderr, flush=True)
    return result


def row(label: str, count: int, result: Any) -> dict[str, Any]:
    """Return what is kept of a contestant's run."""
    if "failed" in result:
        return {"contestant": label, "items": count, "failed": result["failed"]}
    return {
        "contestant": label,
        "items": count,
        "wall": result["wall"],
        "cpu": result["cpu"],
        "added_mb": (result["peak"] - result["before"]) / 2**20,
        "whole_mb": result["peak"] / 2**20,
        "values": result["values"],
    }


def measure(data: Path, threads: int, counts: list[int], defaults: list[int], recall: bool) -> dict[str, Any]:
    """Run every contestant, one after the other."""
    packages = ("torch", "numpy", "faiss-cpu", "pytorch-metric-learning")
    kept: dict[str, Any] = {
        "machine": _machine(),
        "threads": threads,
        "load": f"{os.getloadavg()[0]:.1f} at the start",
        "versions": ", ".join(f"{name} {version(name)}" for name in packages)
        + f", Python {platform.python_version()}",
        "rows": [],
    }
    for count in counts:
        kept["rows"].append(row(f"`{OURS}.evaluate`", count, run(OURS, data, count, threads)))
        if (need := _BYTES_A_PAIR * count * count // 10) > _available():
            bins = {"failed": f"not run whole: it needs about {need / 2**30:.0f} GB"}
        else:
            bins = run(BINS, data, count, threads)
        kept["rows"].append(row(f"`{BINS}`", count, bins))
        if "failed" in bins:
            sliced = run(BINS, data, count, threads, slices=4)
            kept["rows"].append(row(f"`{BINS}`, queries in 4 slices", count, sliced))
        if count in defaults:
            kept["rows"].append(row(f"`{DEFAULT}`", count, run(DEFAULT, data, count, threads)))
    if recall:
        count, rows = counts[0], []
        rows.append(row(f"`{OURS}.evaluate`", count, run(OURS, data, count, threads, True)))
        rows.append(row("`AccuracyCalculator`, k=8", count, run(BINS, data, count, threads, True)))
        kept["recall"] = {"load": f"{os.getloadavg()[0]:.1f} at the end", "rows": rows}
    return kept


def _machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GB, no GPU"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where Fashion-MNIST's idx files are")
    parser.add_argument(
        "--out", type=Path, help="also write the page here, and what it was made from beside it, in raw/"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[60_000, 45_000, 15_000], help="how many items"
    )
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--no-recall", action="store_true", help="leave out the second table")
    parser.add_argument(
        "--defaults", type=int, nargs="*", default=[15_000], help="those of them with the default k too"
    )
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--slices", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--shallow", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        contestant(
            given.contestant, given.data, given.count, given.threads, given.shallow, given.slices
        )  # fmt: skip
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.npz"
        prepare(given.folder, data)
        kept = measure(data, given.threads, given.counts, given.defaults, not given.no_recall)
    print(render(kept))
    if given.out is not None:
        raw = given.out.parent / "raw" / f"{given.out.stem}.json"
        raw.parent.mkdir(parents=True, exist_ok=True)
        for path, text in ((raw, json.dumps(kept, indent=1, ensure_ascii=False)), (given.out, render(kept))):
            partial = path.with_name(f".{path.name}.partial")
            partial.write_text(text)
            partial.replace(path)


if __name__ == "__main__":
    main()
