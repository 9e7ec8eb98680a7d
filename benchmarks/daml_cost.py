"""What a generator costs: a DAML step beside the plain step at batch 120 and feature size 1,024, as in the paper's experiments.

The network is torchvision's GoogLeNet (1,024 features) with a linear layer to 512, the generator 3,072 → 1,024 → 1,024. Plain and
DAML steps take turns on the same batches, forward, backward and both optimisers' steps; the median of the ratios counts. The
triplet loss makes 120 synthetic negatives (one an anchor), N-pair one for each of 60 anchors and every other class: 3,540. The
paper's images have 227 pixels; a smaller image makes the network cheaper and the ratio *worse*.

    python benchmarks/daml_cost.py --size 112 --output benchmarks/results/daml_cost.md
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from retrieval.recipe.read import check_recipe
from retrieval.run import checkpoint
from retrieval.run.open import build_run
from retrieval.training.trainer import Trainer

BATCH = 120
CASES: dict[str, dict[str, Any]] = {
    "triplet, one negative per anchor": {
        "loss": {"name": "daml.triplet"}, "miner": {"name": "daml.one_per_class", "negatives": 1},
    },
    "N-pair, one negative per anchor and class": {
        "loss": {"name": "daml.npair"}, "miner": {"name": "daml.one_per_class", "anchors": "one"},
    },
}  # fmt: skip


def images(folder: Path, size: int) -> None:
    """Write the fewest images a split by class takes: noise, as only time is measured."""
    rng = np.random.default_rng(0)
    for label in range(120):
        (folder / f"{label:03}").mkdir(parents=True)
        for item in range(2):
            pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{label:03}" / f"{item}.png")


def trainer(folder: Path, size: int, case: dict[str, Any], generator: bool) -> Trainer:
    table: dict[str, Any] = {
        "name": "cost",
        "data": {"name": "core.image_folder", "folder": str(folder / "images")},
        "split": {"by": "class", "validation": 0.0},
        "backbone": {"name": "core.torchvision", "model": "googlenet", "size": size},
        "head": {"embedding_size": 512},
        "sampler": {"classes": 60, "items": 2},
        "train": {"device": "cpu"},
        **case,
    }
    if generator:
        table["generator"] = {"name": "daml.hard_negative"}
    checkpoint.seed_everything(0)
    return Trainer(build_run(folder / "run", check_recipe(table)), Accelerator(cpu=True))


def step(of: Trainer, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    start = time.process_time()
    of._train_batch(inputs, labels)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=112, help="pixels of an image's side")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Cost of a generated negative (DAML)",
        "",
        f"Made by `python benchmarks/daml_cost.py --size {options.size}`, which says what is measured: GoogLeNet at {options.size} pixels, batch {BATCH},",
        f"feature size 1,024, one thread, torch {torch.__version__}. CPU seconds, medians of {options.steps} steps after one that is not counted.",
        "",
        "| | synthetic negatives | plain step | DAML step | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            images(folder / "images", options.size)
            plain, daml = (trainer(folder, options.size, case, generator) for generator in (False, True))
            assert plain.run.model.backbone.features == 1024
            inputs, labels = next(iter(plain.batches.epoch(0)))
            assert len(labels) == BATCH
            for of in (plain, daml):
                of.step.set_modes()
                step(of, inputs, labels)
            pairs = [(step(plain, inputs, labels), step(daml, inputs, labels)) for _ in range(options.steps)]
            made = int(daml._train_batch(inputs, labels)["triplets"])
        one, other = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        lines.append(f"| {name} | {made:,} | {one:.2f} | {other:.2f} | {ratio:.2f} |")
        print(lines[-1], flush=True)
    if options.output:
        temporary_file = options.output.with_suffix(".tmp")
        temporary_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        temporary_file.replace(options.output)


if __name__ == "__main__":
    main()
