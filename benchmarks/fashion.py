"""Fashion-MNIST with disjoint classes (0–4 train, 5–9 are searched): a recipe of models/ beside raw pixels and an untrained net.

The number of epochs is chosen on whole training classes kept for validation (two of the five); the held-out classes are
looked at once, at the end. Goes on where it stopped. Run by hand:

    python benchmarks/fashion.py --output FOLDER
    python benchmarks/fashion.py --output ANOTHER --recipe fashion-danml
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import tomllib
from pathlib import Path

import torch
from retrieval.evaluation.evaluate_run import evaluate_run
from retrieval.recipe.read import read_recipe
from retrieval.run import checkpoint
from retrieval.run.folder import create_folder
from retrieval.run.open import build_run, load_run
from retrieval.training.trainer import train

MODELS = Path(__file__).parents[1] / "models"
SEEDS = (0, 1, 2)
METRICS = ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "r_precision", "map_at_r"]
CHOOSE = ["split.validation=0.4", "split.validation_by=class", "sampler.classes=3", "sampler.items=40"]


def trained(recipe: Path, folder: Path, *overrides: str) -> Path:
    """Train the recipe, unless it is done already."""
    if not (folder / "summary.json").is_file():
        made = read_recipe(recipe, overrides)
        train(
            folder,
            made,
            resume=(folder / "checkpoints" / "last.safetensors").is_file(),
            report=print,
        )
    return folder


def choose_epochs(recipe: Path, output: Path, longest: int) -> int:
    """Return the number of epochs with the best mean MAP@R on validation classes, by curves of the longest run."""
    curves = []
    for seed in SEEDS:
        folder = trained(
            recipe, output / f"choose-{seed}", *CHOOSE, f"train.epochs={longest}", f"seed={seed}"
        )
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["validation_map_at_r"] for line in lines])
    means = [statistics.mean(points) for points in zip(*curves, strict=True)]
    print("\nvalidation MAP@R by epoch:", ", ".join(f"{value:.3f}" for value in means))
    return means.index(max(means)) + 1


def untrained(recipe: Path, output: Path, seed: int) -> dict[str, float]:
    """Evaluate the recipe's network as it is initialised."""
    folder = output / f"untrained-{seed}"
    if not (folder / "evaluation-test.json").is_file():
        made = read_recipe(recipe, [f"seed={seed}"])
        checkpoint.seed_everything(seed)
        if not folder.exists():
            create_folder(folder, made)
        evaluate_run(build_run(folder, made), metrics=METRICS)
    figures: dict[str, float] = json.loads((folder / "evaluation-test.json").read_text())["figures"][
        "trained"
    ]
    return figures


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "retrieval-fashion")
    arguments.add_argument("--recipe", default="fashion-mnist", choices=["fashion-mnist", "fashion-danml"])
    arguments.add_argument("--longest", type=int, default=6)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    recipe = MODELS / options.recipe / "recipe.toml"
    title = tomllib.loads(recipe.read_text())["loss"]["name"]
    epochs = choose_epochs(recipe, options.output, options.longest)
    rows: dict[str, list[dict[str, float]]] = {
        "raw pixels": [],
        "untrained net": [],
        title: [],
    }
    for seed in SEEDS:
        folder = trained(recipe, options.output / f"final-{seed}", f"train.epochs={epochs}", f"seed={seed}")
        found = folder / "evaluation-test.json"
        if not found.is_file():
            evaluate_run(load_run(folder), metrics=METRICS, baseline=seed == SEEDS[0])
        figures = json.loads(found.read_text())["figures"]
        rows[title].append(figures["trained"])
        rows["raw pixels"] += [figures["raw pixels"]] if "raw pixels" in figures else []
        rows["untrained net"].append(untrained(recipe, options.output, seed))
    print(f"\n{epochs} epochs, chosen on validation classes; {len(SEEDS)} seeds; torch {torch.__version__}\n")
    print("| | " + " | ".join(METRICS) + " |\n| --- |" + " --- |" * len(METRICS))
    for title, runs in rows.items():
        cells = []
        for name in METRICS:
            values = [run[name] for run in runs]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        print(f"| {title} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
