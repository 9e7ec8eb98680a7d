"""One training epoch against a bare hand-written torch loop doing the same work; channels_last and bfloat16.

Fashion-MNIST at 28 px, batches of 8 × 16: the same network, loss, miner, optimiser and sampler on both sides, in turn
in one process. Run by hand:

    python benchmarks/training.py
    OMP_WAIT_POLICY=PASSIVE python benchmarks/training.py     # waiting threads sleep
    python benchmarks/training.py --write                     # the page alone, from what is kept

Every epoch's seconds are kept in results/raw/training.jsonl, one run a line; a run replaces the earlier one of the same machine and the same kind of waiting. Of
the run on the Xeon only what it printed is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning import losses, miners, samplers
from retrieval.recipe.read import check_recipe
from retrieval.run import checkpoint
from retrieval.run.open import build_run
from retrieval.serving.progress import Meter
from retrieval.training.process import make_accelerator
from retrieval.training.trainer import Trainer
from torch import nn

from page_tables import markdown

CLASSES, ITEMS, BATCHES = 8, 16, 40
BARE = "bare loop"
RESULT = Path(__file__).parent / "results" / "training.md"
KEPT = RESULT.parent / "raw" / "training.jsonl"
WAITING = {
    "active": "Waiting threads spin, as torch has it.",
    "passive": "The same with `OMP_WAIT_POLICY=PASSIVE`, as the command line sets it (waiting threads sleep, so that other processes get the cores).",
}
HEAD = ["", "images/s", "wall s (median)", "CPU s (median)"]
HEAD += ["wall, against the bare loop (median of pairs)", "CPU, against the bare loop"]


def recipe(**train: Any) -> dict[str, Any]:
    return {
        "data": {"name": "core.fashion_mnist"},
        "split": {"by": "given", "validation": 0.0},
        "sampler": {"classes": CLASSES, "items": ITEMS, "batches": BATCHES},
        "backbone": {"name": "core.convnet", "size": 28},
        "loss": {"name": "pml.multi_similarity"},
        "miner": {"name": "pml.multi_similarity"},
        "train": {"epochs": 1, **train},
    }


def framework(folder: Path, **train: Any) -> Callable[[], None]:
    """An epoch by the framework's trainer, without validation and checkpoints."""
    made = check_recipe(recipe(**train))
    checkpoint.seed_everything(0)
    run = build_run(folder, made)
    trainer = Trainer(run, make_accelerator(made))

    def epoch() -> None:
        trainer._epoch(Meter("training", 0, "batches", show=False))
        trainer.progress.step, trainer.progress.sums = 0, {}
        trainer.progress.epoch += 1

    return epoch


def bare(folder: Path) -> Callable[[], None]:
    """The loop that one writes by hand: uint8 pixels in memory, indexed by the sampler's batches."""
    made = check_recipe(recipe())
    checkpoint.seed_everything(0)
    run = build_run(folder, made)
    pixels = torch.from_numpy(np.asarray(run.dataset.arrays)[run.splits.train])[:, None]
    labels = torch.from_numpy(run.splits.train_labels)
    net = nn.Sequential(run.model.backbone, run.model.head).train()
    loss, miner = losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    size = CLASSES * ITEMS

    def epoch() -> None:
        sampler = samplers.MPerClassSampler(labels, ITEMS, size, length_before_new_iter=BATCHES * size)
        order = torch.tensor(list(sampler))
        for rows in order.split(size):
            x, y = (pixels[rows].float() / 255 - 0.5) / 0.5, labels[rows]
            codes = net(x)
            value = loss(codes, y, miner(codes, y))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            value.item()

    return epoch


def measure(repeats: int, threads: int) -> dict[str, Any]:
    """Return one run: every epoch's seconds, contestants in turn."""
    kept: dict[str, Any] = {
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "waiting": os.environ.get("OMP_WAIT_POLICY", "active").lower(),
        "repeats": repeats,
        "threads": threads,
        "versions": f"torch {torch.__version__}, {platform.machine()}",
    }
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contestants = {
            BARE: bare(folder),
            "framework": framework(folder),
            "framework, channels_last": framework(folder, channels_last=True),
            "framework, bf16": framework(folder, precision="bf16"),
            "framework, bf16 + channels_last": framework(folder, precision="bf16", channels_last=True),
        }
        rows: dict[str, Any] = {title: {"wall": [], "cpu": []} for title in contestants}
        for turn in range(repeats + 1):
            for title, epoch in contestants.items():
                w, c = time.perf_counter(), time.process_time()
                epoch()
                if turn:  # the first warms up
                    rows[title]["wall"].append(round(time.perf_counter() - w, 3))
                    rows[title]["cpu"].append(round(time.process_time() - c, 3))
    return kept | {"rows": rows}


def machine() -> str:
    """Return the processor's name and how many cores there are."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, no GPU"


def figures(row: dict[str, Any], beside: dict[str, Any]) -> dict[str, float]:
    """Return a contestant's figures, `beside` being the bare loop's epochs; of a run that kept only what it printed, these."""
    if "printed" in row:
        printed: dict[str, float] = row["printed"]
        return printed
    found = {key: statistics.median(row[key]) for key in ("wall", "cpu")}
    for key in ("wall", "cpu"):
        pairs = zip(beside[key], row[key], strict=True)
        found[f"{key}_ratio"] = statistics.median(own / bare for bare, own in pairs)
    return found | {"images_per_second": BATCHES * CLASSES * ITEMS / found["wall"]}


def render(runs: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = [
        "# One training epoch",
        "",
        "`python benchmarks/training.py`. The bare loop is a hand-written torch loop with the same network, loss, miner, optimiser, sampler and batches. Aim: within 1.10 ×.",
        f"Fashion-MNIST, 28 px, core.convnet, Multi-Similarity with its miner, {BATCHES} batches of {CLASSES} × {ITEMS}; epochs of each in turn after one to warm up.",
        "",
    ]
    for name in dict.fromkeys(run["machine"] for run in runs):
        lines += [f"## {name}", ""]
        for run in (run for run in runs if run["machine"] == name):
            table = []
            for title, row in run["rows"].items():
                f = figures(row, run["rows"][BARE])
                cells = [f"{f['images_per_second']:,.0f}", f"{f['wall']:.2f}", f"{f['cpu']:.2f}"]
                table.append([title, *cells, f"{f['wall_ratio']:.2f} ×", f"{f['cpu_ratio']:.2f} ×"])
            about = f"{run['repeats']} epochs of each, {run['threads']} threads, {run['versions']}"
            about += "." if run["load"] is None else f"; load {run['load']:.1f} at the start."
            if any("printed" in row for row in run["rows"].values()):
                about += " Only what this run printed was kept."
            lines += [f"{WAITING[run['waiting']]} {about}", "", markdown(HEAD, table), ""]
    return "\n".join(lines)


def read() -> list[dict[str, Any]]:
    """Return the runs that were kept."""
    return [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--write", action="store_true", help="run nothing")
    options = arguments.parse_args()
    runs = read()
    if not options.write:
        run = measure(options.repeats, options.threads)
        same = [(r["machine"], r["waiting"]) == (run["machine"], run["waiting"]) for r in runs]
        runs = [r for r, replaced in zip(runs, same, strict=True) if not replaced] + [run]
        temporary = KEPT.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in runs), encoding="utf-8")
        temporary.replace(KEPT)
    RESULT.write_text(render(runs), encoding="utf-8")
    print(render(runs))


if __name__ == "__main__":
    main()
