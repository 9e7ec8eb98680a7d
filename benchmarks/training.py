"""One training epoch against a bare hand-written torch loop doing the same work; channels_last and bfloat16.

Fashion-MNIST at 28 px, batches of 8 × 16: the same network, loss, miner, optimiser and sampler on both sides, in turn
in one process. Run by hand:

    python benchmarks/training.py
    OMP_WAIT_POLICY=PASSIVE python benchmarks/training.py     # waiting threads sleep
    python benchmarks/training.py --small                     # a small net, on one thread: the trainer's own cost, and validation's
    python benchmarks/training.py --write                     # the page alone, from what is kept

Every epoch's seconds are kept in results/raw/training.jsonl, one run a line; a run replaces the earlier one of the same machine, the same net and the same kind of waiting. Of
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

import training_cases
from page_tables import markdown

CLASSES, ITEMS, BATCHES = 8, 16, 40
BARE = "bare loop"
AIM = 1.05
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


def conditions(repeats: int, threads: int) -> dict[str, Any]:
    """Return what the page says of a run."""
    return {
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "waiting": os.environ.get("OMP_WAIT_POLICY", "active").lower(),
        "repeats": repeats,
        "threads": threads,
        "versions": f"torch {torch.__version__}, {platform.machine()}",
    }


def measure(repeats: int, threads: int) -> dict[str, Any]:
    """Return one run: every epoch's seconds, contestants in turn."""
    kept = conditions(repeats, threads)
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
        rows = in_turn(contestants, repeats)
    return kept | {"rows": rows}


def in_turn(contestants: dict[str, Callable[[], None]], repeats: int) -> dict[str, Any]:
    """Return every epoch's seconds; the first of each warms up."""
    rows: dict[str, Any] = {title: {"wall": [], "cpu": []} for title in contestants}
    for turn in range(repeats + 1):
        for title, epoch in contestants.items():
            w, c = time.perf_counter(), time.process_time()
            epoch()
            if turn:
                rows[title]["wall"].append(round(time.perf_counter() - w, 3))
                rows[title]["cpu"].append(round(time.process_time() - c, 3))
    return rows


def measure_small(repeats: int, only: list[str] | None) -> dict[str, Any]:
    """Return one run of the small net: each case's loop by hand and the trainer, in turn."""
    kept = conditions(repeats, 1) | {"cases": {}}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, pictures = Path(name), Path(name) / "pictures"
        training_cases.write_pictures(pictures)
        for case in training_cases.CASES:
            if only and not any(word in case.title for word in only):
                continue
            contestants = {
                BARE: training_cases.by_hand(case, folder, pictures),
                "framework": training_cases.framework(case, folder, pictures),
            }
            kept["cases"][case.title] = rows = in_turn(contestants, repeats)
            print(case.title, [f"{figures(row, rows[BARE])['cpu_ratio']:.3f}" for row in rows.values()], flush=True)  # fmt: skip
        if not only:
            kept["validation"] = training_cases.validation(folder)
    return kept


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
            if "cases" in run:
                lines += small(run)
                continue
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


def small(run: dict[str, Any]) -> list[str]:
    """Return the lines of the small net."""
    net = training_cases.NET
    table, over = [], []
    for title, rows in run["cases"].items():
        bare, own = (figures(rows[name], rows[BARE]) for name in (BARE, "framework"))
        images = training_cases.BATCHES * CLASSES * ITEMS
        cells = [f"{images / bare['cpu']:,.0f}", f"{bare['cpu']:.2f}", f"{own['cpu']:.2f}"]
        table.append([title, *cells, f"{own['cpu_ratio']:.2f} ×", f"{own['wall_ratio']:.2f} ×"])
        over += [f"{title} ({own['cpu_ratio']:.2f} ×)"] if own["cpu_ratio"] > AIM else []
    lines = [
        f"A small net (core.convnet of width {net['width']}, one convolution a stage), {run['repeats']} epochs of {training_cases.BATCHES} batches of each in turn after one to warm up, one thread, {run['versions']}; load "
        f"{run['load']:.1f} at the start. Both sides call the same loss and miner, so what differs is the trainer. Aim: {AIM} × the CPU seconds of the loop by hand.",
        "",
        markdown(
            [
                "",
                "by hand, images a CPU second",
                "by hand, CPU s",
                "trainer, CPU s",
                "CPU, against by hand (median of pairs)",
                "wall",
            ],
            table,
        ),
        "",
        f"Above the aim: {', '.join(over)}." if over else "Every case is within the aim.",
        "A transform by name draws from a generator that a `TorchFunctionMode` lends it, so that a resumed run draws the same: Python is asked at every call of torch, which for so "
        "small a picture is some twenty microseconds; torchvision's own transforms are asked for their draws alone. An image file is read, screened against hostile content and bounded before it is decoded, which by hand it is not.",
        "",
    ]
    lines += [
        f"Validation after an epoch on Fashion-MNIST, {title}: {told['validate']:.2f} CPU s for {told['validated']:,.0f} items, {told['validate'] / told['epoch']:.3f} of the "
        f"{told['epoch']:.1f} s of an epoch of {told['trained']:,.0f} images (aim: 0.1). Encoding is {told['encode']:.2f} s of it; the rest ranks each item's whole class, {told['validated'] / 10:,.0f} items, among all, for MAP@R.\n"
        for title, told in run.get("validation", {}).items()
    ]
    return lines


def kind(run: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a run shares with the one that it replaces; on one thread, as with the small net, none waits."""
    return run["machine"], "cases" in run or run["waiting"], "cases" in run


def read() -> list[dict[str, Any]]:
    """Return the runs that were kept."""
    return [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--small", action="store_true", help="measure the small net")
    arguments.add_argument(
        "--only", nargs="*", help="cases of the small net with these words, which are not kept"
    )
    arguments.add_argument("--write", action="store_true", help="run nothing")
    options = arguments.parse_args()
    runs = read()
    if not options.write:
        run = (
            measure_small(options.repeats, options.only)
            if options.small
            else measure(options.repeats, options.threads)
        )
        if options.only:
            return
        same = [kind(r) == kind(run) for r in runs]
        runs = [r for r, replaced in zip(runs, same, strict=True) if not replaced] + [run]
        temporary = KEPT.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(r) + "\n" for r in runs), encoding="utf-8")
        temporary.replace(KEPT)
    RESULT.write_text(render(runs), encoding="utf-8")
    print(render(runs))


if __name__ == "__main__":
    main()
