"""The influence of λ₁, λ₂, λ and μ: Tables XII and XIII and Figure 7 of DAML's paper, on a small
set.

    python benchmarks/daml_weights.py    # measures missing runs, then writes page and picture
    python benchmarks/daml_weights.py --write    # writes both from the kept runs

The set is letter, whose package `uci.py` names: A–M train, N–Z are searched. Features are
standardised and of unit length. The net has a hidden layer of 128 and 32 dimensions; the loss is
N-pair as in the paper's tables; DAML's three phases have 240 batches of the metric, with five
seeds. As in the paper, λ₁ varies at λ₂ = 50, and λ₂ at λ₁ = 1. Further sweeps vary λ of Eq 7
(`loss_weight`), with gradients of both objectives flowing everywhere (the only case where λ has an
effect under Adam), and μ of Eq 15 with K = 4 and 60 items of each searched class. Every row is
judged on the searched classes: the page shows how flat the curves are, and chooses nothing. An
earlier page had more values, most of them with one seed.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import bench
import uci

SEEDS = (0, 1, 2, 3, 4)
FEW = 60
"""Items of each searched class for μ, whose distance is computed for every pair."""
SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "lambda1": ("λ₁, at λ₂ = 50", (0.1, 1.0, 50.0, 1000.0)),
    "lambda2": ("λ₂, at λ₁ = 1", (0.1, 5.0, 50.0, 1000.0)),
    "lambda": ("λ, both objectives flowing everywhere", (0.01, 1.0, 100.0)),
    "mu": ("μ, K = 4, 60 items per class", (0.0, 0.02, 2.0, 20.0)),
}


def recipe(file: Path, sweep: str, value: float | None, seed: int) -> dict[str, Any]:
    """Return the recipe of one run; without a value, that of the loss alone."""
    weights = {"lambda_reg": 1.0, "lambda_adv": 50.0}
    if sweep in ("lambda1", "lambda2"):
        weights["lambda_reg" if sweep == "lambda1" else "lambda_adv"] = value
    metric = ["backbone", "head", *(["combiner"] if sweep == "mu" else []), "loss"]
    table: dict[str, Any] = {
        "name": "weights",
        "seed": seed,
        "data": {"name": "core.features", "file": str(file)},
        "split": {"by": "class", "test": list("NOPQRSTUVWXYZ"), "validation": 0.0},
        "sampler": {"classes": 12, "items": 4, "batches": 60},
        "backbone": {"name": "core.features"},
        "head": {"embedding_size": 32, "hidden": [128]},
        "loss": {"name": "daml.npair", "scale": 16.0},
        "miner": {"name": "daml.one_per_class", "anchors": "one"},
        "generator": {"name": "daml.hard_negative", **weights},
        "generator_optimizer": {"lr": 1e-3},
        "optimizer": {"lr": 1e-3},
        "train": {"device": "cpu"},
        "phase": [
            {"name": "metric", "epochs": 1, "train": metric, "synthetic": False},
            {"name": "generator", "epochs": 1, "train": ["generator"]},
            {"name": "both", "epochs": 3, "train": [*metric, "generator"]},
        ],
        "evaluate": {"metrics": ["recall_at_1"]},
    }
    if sweep == "mu":
        table["head"] = {"embedding_size": 32}
        table["combiner"] = {"name": "daml.discriminator", "metrics": 4, "hidden": 32}
        table["combiner"] |= {"mu": value, "rho": 5.0}
    if sweep == "lambda":
        table["train"] |= {"coupling": "joint", "loss_weight": value}
    if value is None:  # for the same number of batches
        for part in ("generator", "generator_optimizer", "phase"):
            del table[part]
        table["train"]["epochs"] = 4
    return table


def letters(folder: Path) -> dict[bool, Path]:
    """Write letter; return the file, and under True one with few items of each searched class."""
    x, y = uci.load("letter")
    x = (x - x[y < 13].mean(0)) / x[y < 13].std(0)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    names, place = np.array([chr(ord("A") + c) for c in y]), np.zeros(len(y), dtype=int)
    for c in range(26):
        place[y == c] = np.arange((y == c).sum())
    files = {}
    for few, rows in ((False, place >= 0), (True, (y < 13) | (place < FEW))):
        files[few] = folder / f"letter-{few}.npz"
        np.savez(files[few], features=x[rows].astype(np.float32), labels=names[rows])
    return files


def measure(kept: bench.Kept) -> None:
    """Train what is missing; keep each run at once."""
    import torch

    torch.set_num_threads(1)
    sweeps = [(sweep, value) for sweep, (_, grid) in SWEEPS.items() for value in grid]
    jobs: list[tuple[str, float | None, int]] = [("alone", None, seed) for seed in SEEDS]
    jobs += [(*sweep, seed) for seed, sweep in itertools.product(SEEDS, sweeps)]
    with tempfile.TemporaryDirectory() as folder:
        files = letters(Path(folder))
        for sweep, value, seed in kept.missing(jobs):
            table = recipe(files[sweep == "mu"], sweep, value, seed)
            figures, seconds = bench.train_and_judge(table, Path(folder) / "run")
            row = {"sweep": sweep, "value": value, "seed": seed, "seconds": round(seconds, 1)}
            kept.add(row | {"recall_at_1": figures["trained"]["recall_at_1"]})


def collected(rows: list[dict[str, Any]]) -> dict[str, dict[Any, list[float]]]:
    """Return Recall@1 in % by sweep and value."""
    results: dict[str, dict[Any, list[float]]] = {}
    for row in rows:
        values = results.setdefault(row["sweep"], {}).setdefault(row["value"], [])
        values.append(100 * row["recall_at_1"])
    return results


def paper(sweep: str) -> list[float]:
    """Return the paper's values of a sweep in %; [] if it has none."""
    grid = [f"{value:g}" for value in SWEEPS[sweep][1]]
    known = bench.has("daml_table_12", sweep, grid[0])
    return [bench.published("daml_table_12", sweep, value) for value in grid] if known else []


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"


def render(kept: list[dict[str, Any]]) -> str:
    results, parts = collected(kept), ""
    for sweep, values in results.items():
        if sweep == "alone":
            continue
        title, grid = SWEEPS[sweep]
        theirs = [f"{figure:.1f}" for figure in paper(sweep)] or ["–"] * len(grid)
        rows = [
            [f"{value:g}", spread(values[value]), str(len(values[value])), figure]
            for value, figure in zip(grid, theirs, strict=True)
            if value in values
        ]
        parts += f"""
            ## {title}

            {bench.markdown(["", "here", "seeds", "paper"], rows)}
        """
    return bench.page(f"""
        # Weights of DAML: λ₁, λ₂, λ and μ

        `python benchmarks/daml_weights.py` describes the training. Recall@1 in % on letter's
        classes N–Z, mean ± standard deviation over seeds; the loss alone, without generator and
        combiner: {spread(results["alone"][None])}. The paper's values are for Cars196.

        {parts}
    """)


def draw(rows: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    results = collected(rows)
    measured = [sweep for sweep in SWEEPS if sweep in results]
    figure, axes = plt.subplots(
        1, len(measured), figsize=(2.8 * len(measured), 2.9), layout="constrained", squeeze=False
    )
    for axis, sweep in zip(axes[0], measured, strict=True):
        title, grid = SWEEPS[sweep]
        values = results[sweep]
        points = [value for value in grid if value in values]
        means = np.array([np.mean(values[value]) for value in points])
        bars = [np.std(values[value], ddof=1) for value in points]
        shown = [max(value, 1e-3) for value in points]
        axis.errorbar(shown, means - means.mean(), bars, fmt="o-", ms=3, label="letter, here")
        if sweep != "mu":  # measured on fewer items
            alone = np.mean(results["alone"][None]) - means.mean()
            axis.axhline(alone, ls=":", c="grey", label="the loss alone, here")
        if theirs := paper(sweep):
            line = {"c": "#d6604d", "ms": 4, "label": "paper, Cars196"}
            axis.plot(grid, np.subtract(theirs, np.mean(theirs)), "x--", **line)
        axis.set_xscale("log")
        axis.set_title(title, fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0, 0].set_ylabel("Recall@1 less the curve's mean, points", fontsize=7)
    axes[0, 0].legend(fontsize=6)
    bench.save_figure(figure, bench.DOCS / "daml_weights.png")


def main() -> None:
    options = bench.resume_arguments(__doc__).parse_args()
    kept = bench.Kept("daml_weights", options, ("sweep", "value", "seed"))
    if not options.write:
        measure(kept)
    kept.finish(render(kept.rows))
    if not options.fresh:
        draw(kept.rows)


if __name__ == "__main__":
    main()
