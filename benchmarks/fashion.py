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

from bench import MODELS, RAW, RESULTS, WORK, arguments, chosen, markdown, page, read_lines, write

KEPT = RAW / "fashion.jsonl"
RECIPES = ("fashion-mnist", "fashion-danml")
SEEDS, EPOCHS = (0, 1, 2), 6
CHOOSE = ["split.validation=0.4", "split.validation_by=class"]
CHOOSE += ["sampler.classes=3", "sampler.items=40", f"train.epochs={EPOCHS}"]


def curve(recipe: str, folder: Path, seed: int) -> list[float]:
    """Train a seed, unless it is done already; return its MAP@R on validation classes by epoch."""
    from retrieval.recipe.read import read_recipe
    from retrieval.training.trainer import train

    if not (folder / "summary.json").is_file():
        made = read_recipe(MODELS / recipe / "recipe.toml", [*CHOOSE, f"seed={seed}"])
        begun = (folder / "checkpoints" / "last.safetensors").is_file()
        train(folder, made, resume=begun, report=print)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["validation_map_at_r"] for line in lines]


def measure(recipe: str, output: Path, threads: int) -> list[dict[str, Any]]:
    """Return what is kept of a recipe, one row a seed."""
    import torch

    torch.set_num_threads(threads)
    about = {"recipe": recipe, "torch": torch.__version__}
    curves = {seed: curve(recipe, output / f"{recipe}-{seed}", seed) for seed in SEEDS}
    return [about | {"seed": seed, "map_at_r": points} for seed, points in curves.items()]


def means(rows: list[dict[str, Any]]) -> list[float]:
    """Return the mean over seeds by epoch."""
    if "printed" in rows[0]:
        printed: list[float] = rows[0]["printed"]
        return printed
    return [
        statistics.mean(points) for points in zip(*(row["map_at_r"] for row in rows), strict=True)
    ]


def render(kept: list[dict[str, Any]]) -> str:
    lines = []
    for recipe in RECIPES:
        if rows := chosen(kept, recipe=recipe):
            values = means(rows)
            best = values.index(max(values))
            cells = [f"**{v:.3f}**" if i == best else f"{v:.3f}" for i, v in enumerate(values)]
            lines.append([recipe, str(rows[0].get("seeds", len(rows))), *cells, str(best + 1)])
    old = " and ".join(row["recipe"] for row in kept if "printed" in row)
    return page(f"""
        # Fashion-MNIST, disjoint classes: how many epochs

        `python benchmarks/fashion.py` says what is trained. MAP@R on two of the five training
        classes, kept for validation, after each epoch; means over seeds. The cards in `models/` say
        what the recipes reach on the classes to search.

        {old and f"Of the rows of {old} only the means that the run printed were kept."}

        {markdown(["", "seeds", *(str(n + 1) for n in range(EPOCHS)), "epochs chosen"], lines)}
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--output", type=Path, default=WORK / "fashion")
    parser.add_argument("--recipe", default=RECIPES[0], choices=RECIPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="run nothing")
    options = parser.parse_args()
    rows = read_lines(KEPT)
    if not options.write:
        rows = [row for row in rows if row["recipe"] != options.recipe]
        rows += measure(options.recipe, options.output, options.threads)
        write(KEPT, "".join(json.dumps(row) + "\n" for row in rows))
    write(RESULTS / "fashion.md", render(rows))
    print(render(rows))


if __name__ == "__main__":
    main()
