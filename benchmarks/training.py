"""One training epoch against a bare hand-written torch loop doing the same work; channels_last and bfloat16.

Fashion-MNIST at 28 px, batches of 8 × 16: the same network, loss, miner, optimiser and sampler on both sides, in turn
in one process. Run by hand:  python benchmarks/training.py
"""

from __future__ import annotations

import argparse
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

CLASSES, ITEMS, BATCHES = 8, 16, 40


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


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contestants = {
            "bare loop": bare(folder),
            "framework": framework(folder),
            "framework, channels_last": framework(folder, channels_last=True),
            "framework, bf16": framework(folder, precision="bf16"),
            "framework, bf16 + channels_last": framework(folder, precision="bf16", channels_last=True),
        }
        wall: dict[str, list[float]] = {title: [] for title in contestants}
        cpu: dict[str, list[float]] = {title: [] for title in contestants}
        for turn in range(options.repeats + 1):
            for title, epoch in contestants.items():
                w, c = time.perf_counter(), time.process_time()
                epoch()
                if turn:  # the first warms up
                    wall[title].append(time.perf_counter() - w)
                    cpu[title].append(time.process_time() - c)
    print(
        f"Fashion-MNIST, 28 px, core.convnet, Multi-Similarity with its miner, {BATCHES} batches of {CLASSES} × {ITEMS}; "
        f"{options.repeats} epochs of each in turn after one to warm up, {options.threads} threads, torch {torch.__version__}, {platform.machine()}.\n"
    )
    print(
        "| | images/s | wall s (median) | CPU s (median) | wall, against the bare loop (median of pairs) | CPU, against the bare loop |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for title in contestants:
        pairs = [
            statistics.median(b / a for a, b in zip(times["bare loop"], times[title], strict=True))
            for times in (wall, cpu)
        ]
        seconds = statistics.median(wall[title])
        print(
            f"| {title} | {BATCHES * CLASSES * ITEMS / seconds:,.0f} | {seconds:.2f} | {statistics.median(cpu[title]):.2f} | {pairs[0]:.2f} × | {pairs[1]:.2f} × |"
        )


if __name__ == "__main__":
    main()
