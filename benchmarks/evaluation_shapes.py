"""R@1, R-precision and MAP@R at five shapes: `retrieval.evaluate` beside pytorch-metric-learning's AccuracyCalculator.

Codes: Gaussian classes (centres of variance 1, items 1.3 from them in each dimension) on the unit sphere. Each contestant runs in a
process of its own, in turn, on one thread, after a call on a small set. The least CPU seconds of `--rounds` calls are kept.
Run by hand; what was measured is kept in raw/ after each shape, and measured again only without `--resume`:

    python benchmarks/evaluation_shapes.py --out benchmarks/results/evaluation_shapes.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = [
    (6_000, 128, 100), (15_000, 128, 1_000), (15_000, 128, 10), (30_000, 128, 5_600), (60_000, 512, 11_316),
]  # fmt: skip
OURS, PEER = "retrieval", "AccuracyCalculator"
NOISE = 1.3


def made(items: int, width: int, classes: int) -> tuple[Any, Any]:
    """Return codes (items, width) float32 of unit length and labels (items,)."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, classes, items)
    codes = generator.standard_normal((classes, width), np.float32)[labels]
    codes += NOISE * generator.standard_normal((items, width), np.float32)
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    return codes, labels


def peak() -> float:
    """Return the largest resident size of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def contestant(name: str, shape: tuple[int, int, int], rounds: int) -> None:
    """Print one contestant's figures, CPU seconds and memory as JSON."""
    import torch

    torch.set_num_threads(1)
    if name == OURS:
        from retrieval.evaluation.evaluation import evaluate

        def figures(codes: Any, labels: Any) -> list[float]:
            wanted = ["recall_at_1", "r_precision", "map_at_r"]
            return list(evaluate(codes, labels, metrics=wanted).values.values())
    else:
        import faiss
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

        faiss.omp_set_num_threads(1)
        names = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
        calculator = AccuracyCalculator(include=names, k="max_bin_count", device=torch.device("cpu"))

        def figures(codes: Any, labels: Any) -> list[float]:
            found = calculator.get_accuracy(torch.from_numpy(codes), torch.from_numpy(labels))
            return [found[each] for each in names]

    figures(*made(3_000, 16, 30))
    codes, labels = made(*shape)
    before, seconds, values = peak(), [], []
    for _ in range(rounds):
        start = time.process_time()
        values = figures(codes, labels)
        seconds.append(time.process_time() - start)
    print(json.dumps({"cpu": min(seconds), "added": peak() - before, "whole": peak(), "values": values}))


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Run both contestants at a shape, in turn."""
    rounds = 1 if shape[0] >= 30_000 else rounds
    kept: dict[str, Any] = {"shape": shape, "load": os.getloadavg()[0], "rounds": rounds}
    for name in (OURS, PEER):
        command = [sys.executable, __file__, "--contestant", name, "--rounds", str(rounds)]
        done = subprocess.run(
            [*command, "--shape", *map(str, shape)], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )  # fmt: skip
        if done.returncode:
            kept[name] = {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
        else:
            kept[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, shape, kept[name], file=sys.stderr, flush=True)
    return kept


def render(kept: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Evaluation at five shapes: R@1, R-precision and MAP@R",
        "",
        "`python benchmarks/evaluation_shapes.py`. Gaussian classes on the unit sphere, query = gallery without itself. One thread; each contestant in a process",
        'of its own, one after the other; `AccuracyCalculator` with its best setting, `k="max_bin_count"`. CPU seconds are the least of the calls; memory is the peak',
        "resident size, what the evaluation added to a process that holds the codes, and the whole.",
        "",
        f"Machine: {kept['machine']}. Versions: {kept['versions']}.",
        "",
        "| items × width / classes | ours: CPU s | peer: CPU s | peer ÷ ours | ours: added / whole MB | peer: added / whole MB | largest difference of a figure | calls | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in kept["rows"]:
        ours, peer, (items, width, classes) = row[OURS], row[PEER], row["shape"]
        label = f"{items:,} × {width} / {classes:,}"
        if "failed" in ours or "failed" in peer:
            lines.append(
                f"| {label} | {ours.get('failed', ours.get('cpu'))} | {peer.get('failed', peer.get('cpu'))} |"
                + " |" * 6
            )
            continue
        apart = max(abs(a - b) for a, b in zip(ours["values"], peer["values"], strict=True))
        memory = " | ".join(f"{each['added']:,.0f} / {each['whole']:,.0f}" for each in (ours, peer))
        lines.append(
            f"| {label} | {ours['cpu']:.2f} | {peer['cpu']:.2f} | {peer['cpu'] / ours['cpu']:.1f} × | {memory} | {apart:.0e} | {row['rounds']} | {row['load']:.0f} |"
        )
    lines += [
        "",
        "The peer orders in single precision, so that figures may differ in the fifth decimal. Other work shared the cores: the load is that at a row's start.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=False, help="the page; what it is made from goes to raw/ beside it"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="keep the shapes that were measured")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        contestant(given.contestant, tuple(given.shape), given.rounds)
        return
    model = next(
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    )
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    sets = [each for each in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if each in flags.split()]
    packages = ("torch", "numpy", "faiss-cpu", "pytorch-metric-learning")
    kept: dict[str, Any] = {
        "machine": f"{model.partition(':')[2].strip()} ({', '.join(sets)}), {os.cpu_count()} cores",
        "versions": ", ".join(f"{each} {version(each)}" for each in packages)
        + f", Python {platform.python_version()}",
        "rows": [],
    }
    raw = given.out and given.out.parent / "raw" / f"{given.out.stem}.json"
    if given.resume and raw and raw.exists():
        kept["rows"] = json.loads(raw.read_text())["rows"]
    for shape in SHAPES:
        if list(shape) in [list(row["shape"]) for row in kept["rows"]]:
            continue
        kept["rows"].append(measure(shape, given.rounds))
        if raw:
            raw.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
            given.out.write_text(render(kept))
    print(render(kept))


if __name__ == "__main__":
    main()
