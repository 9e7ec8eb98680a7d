"""How many epochs the recipes for Fashion-MNIST with disjoint classes train: chosen on whole
training classes, two of the five, kept for validation.

    python benchmarks/fashion.py --output FOLDER                          # goes on where it stopped
    python benchmarks/fashion.py --output FOLDER --recipe fashion-danml
    python benchmarks/fashion.py --write # the page alone, from what is kept

Each seed trains for as many epochs as are tried, and MAP@R on the validation classes is kept after
each, in results/raw/fashion.jsonl. The classes to search are not looked at here: `cards.py`
measures the recipe on them and writes its card. Of an earlier run only the means that it printed
are there; a new one takes their place.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from bench import WORK, arguments, markdown, read_lines

MODELS = Path(__file__).parents[1] / "models"
RESULT = Path(__file__).parent / "results" / "fashion.md"
KEPT = RESULT.parent / "raw" / "fashion.jsonl"
RECIPES = ("fashion-mnist", "fashion-danml")
SEEDS = (0, 1, 2)
EPOCHS = 6
CHOOSE = [
    "split.validation=0.4",
    "split.validation_by=class",
    "sampler.classes=3",
    "sampler.items=40",
]


def curve(recipe: str, folder: Path, seed: int) -> list[float]:
    """Train a seed, unless it is done already; return its MAP@R on validation classes by epoch."""
    from retrieval.recipe.read import read_recipe
    from retrieval.training.trainer import train

    if not (folder / "summary.json").is_file():
        made = read_recipe(
            MODELS / recipe / "recipe.toml", [*CHOOSE, f"train.epochs={EPOCHS}", f"seed={seed}"]
        )
        train(
            folder,
            made,
            resume=(folder / "checkpoints" / "last.safetensors").is_file(),
            report=print,
        )
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["validation_map_at_r"] for line in lines]


def measure(recipe: str, output: Path, threads: int) -> list[dict[str, Any]]:
    """Return what is kept of a recipe, one row a seed."""
    import torch

    torch.set_num_threads(threads)
    return [
        {
            "recipe": recipe,
            "seed": seed,
            "torch": torch.__version__,
            "map_at_r": curve(recipe, output / f"{recipe}-{seed}", seed),
        }
        for seed in SEEDS
    ]


def means(rows: list[dict[str, Any]]) -> list[float]:
    """Return the mean over seeds by epoch."""
    if "printed" in rows[0]:
        printed: list[float] = rows[0]["printed"]
        return printed
    return [
        statistics.mean(points) for points in zip(*(row["map_at_r"] for row in rows), strict=True)
    ]


def render(kept: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = []
    for recipe in RECIPES:
        rows = [row for row in kept if row["recipe"] == recipe]
        if rows:
            values = means(rows)
            best = values.index(max(values))
            cells = [f"**{v:.3f}**" if i == best else f"{v:.3f}" for i, v in enumerate(values)]
            lines.append([recipe, str(rows[0].get("seeds", len(rows))), *cells, str(best + 1)])
    old = [row["recipe"] for row in kept if "printed" in row]
    printed = (
        [
            "Of the rows of "
            + " and ".join(old)
            + " only the means that the run printed were kept.",
            "",
        ]
        if old
        else []
    )
    return "\n".join(
        [
            "# Fashion-MNIST, disjoint classes: how many epochs",
            "",
            (
                "`python benchmarks/fashion.py` says what is trained. MAP@R on two of the five"
                " training classes, kept for validation, after each epoch; means over seeds. The"
                " cards in"
            ),
            "`models/` say what the recipes reach on the classes to search.",
            "",
            *printed,
            markdown(["", "seeds", *(str(n + 1) for n in range(EPOCHS)), "epochs chosen"], lines),
            "",
        ]
    )


def read() -> list[dict[str, Any]]:
    """Return what is kept."""
    return read_lines(KEPT)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, default=WORK / "fashion")
    parser.add_argument("--recipe", default=RECIPES[0], choices=RECIPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="run nothing")
    options = parser.parse_args()
    rows = read()
    if not options.write:
        others = [row for row in rows if row["recipe"] != options.recipe]
        rows = others + measure(options.recipe, options.output, options.threads)
        temporary = KEPT.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        temporary.replace(KEPT)
    RESULT.write_text(render(rows), encoding="utf-8")
    print(render(rows))


if __name__ == "__main__":
    main()
