"""Write the block of results in models/NAME/README.md: means over several seeds with 95 %
intervals.

    python benchmarks/cards.py digits digits-daml    # measures missing runs, then writes the blocks
    python benchmarks/cards.py digits --seeds 10
    python benchmarks/cards.py digits --write        # runs nothing

A seed determines the split (if the recipe splits by item) and everything random in training. "±" is
Student's 95 % interval of the mean over seeds, s·t/√n, not the deviation s. All rows of a card have
the same seeds, so their differences are paired. Each run's metrics are kept at once in
results/raw/cards.jsonl, so an interrupted call resumes. The block is written from that file alone;
a test compares both.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import (
    MODELS,
    RAW as FOLDER,
    append,
    arguments,
    commit,
    interval,
    markdown,
    read_lines,
    write,
)

KEPT = FOLDER / "cards.jsonl"
METRICS = ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "r_precision", "map_at_r"]
COMPARED = ["recall_at_1", "map_at_r"]
RAW = "raw pixels"
BLOCK = re.compile(
    r"(?<=<!-- results: benchmarks/cards.py -->\n).*?(?=<!-- end of results -->)", re.S
)


@dataclass(frozen=True)
class Row:
    """A line of a card: a recipe with overrides and without some tables, trained or untrained."""

    title: str
    recipe: str
    overrides: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    untrained: bool = False


def one_metric(title: str) -> Row:
    """Return the triplet loss alone, with as many epochs of the metric as DAML's recipes."""
    without = ("generator", "generator_optimizer", "phase", "train")
    return Row(title, "digits-daml", ("train.epochs=5",), without)


def learner(title: str, table: str) -> Row:
    """Return the recipe of digits-lanml with another learner."""
    return Row(title, "digits-lanml", (f"learner={{{table}}}",))


CARDS: dict[str, list[Row]] = {
    "digits": [Row("this recipe", "digits")],
    "digits-gmml": [
        Row("aml.gmml, this recipe", "digits-gmml"),
        Row(
            "aml.aml, t = .6, α = 1, regularization = .03",
            "digits-gmml",
            ('learner={name="aml.aml", t=0.6, alpha=1.0, regularization=0.03}',),
        ),
    ],
    "digits-lanml": [
        Row("anml.lanml, this recipe", "digits-lanml"),
        learner("core.pca, 9 components", 'name="core.pca", n_components=9'),
        learner("core.lda", 'name="core.lda"'),
        learner("core.nca, 9 components", 'name="core.nca", n_components=9'),
        learner("anml.pnca, α = .1, 32 components", 'name="anml.pnca", alpha=0.1, n_components=32'),
    ],
    "digits-daml": [Row("this recipe", "digits-daml"), one_metric("without the generator")],
    "digits-damml": [
        Row("four, weighed by the discriminator: this recipe", "digits-damml"),
        one_metric("one metric of 32 dimensions"),
        Row(
            "four, weighed evenly throughout",
            "digits-damml",
            ('combiner={name="daml.uniform", metrics=4}', "train.epochs=5"),
            ("phase",),
        ),
    ],
    "digits-efficientnet-lda": [Row("this recipe", "digits-efficientnet-lda")],
    "fashion-mnist": [
        Row("this recipe", "fashion-mnist"),
        Row("untrained net", "fashion-mnist", untrained=True),
    ],
    "fashion-danml": [
        Row("this recipe", "fashion-danml"),
        Row("pml.multi_similarity, its own recipe", "fashion-mnist"),
        Row("untrained net", "fashion-mnist", untrained=True),
    ],
    "fashion-oahu-warm": [Row("this recipe", "fashion-oahu-warm")],
}
"""The rows of each card, its own recipe first, with which raw pixels are measured."""


def key(row: Row, seed: int) -> str:
    """Return the key of a run. Rows of several cards may share a run."""
    return json.dumps(
        [row.recipe, sorted(row.overrides), sorted(row.without), row.untrained, seed],
        ensure_ascii=False,
    )


def kept() -> dict[str, dict[str, Any]]:
    """Return the metrics of every kept run by `key`."""
    return {row["key"]: row for row in read_lines(KEPT)}


def measure(row: Row, seed: int, baseline: bool) -> dict[str, Any]:
    """Train and evaluate a row with one seed; with `baseline`, also evaluate raw pixels."""
    import torch
    from retrieval.evaluation.evaluate_run import evaluate
    from retrieval.recipe.read import apply_overrides, check_recipe
    from retrieval.run import checkpoint_format
    from retrieval.run.folder import create_folder
    from retrieval.run.open import Run, build_run, run_versions
    from retrieval.training.trainer import train_run

    torch.set_num_threads(1)
    recipe = MODELS / row.recipe / "recipe.toml"
    table = {k: v for k, v in tomllib.loads(recipe.read_text()).items() if k not in row.without}
    apply_overrides(table, [f"seed={seed}", f"split.seed={seed}", *row.overrides])
    checked = check_recipe(table, str(recipe))
    started = time.process_time()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        if row.untrained:
            checkpoint_format.seed_everything(seed)
            create_folder(folder, checked)
            run = build_run(folder, checked)
        else:
            train_run(folder, checked, report=lambda line: None)
            run = Run.open(folder)
        trained = time.process_time()
        evaluation = evaluate(run, metrics=METRICS, baseline=baseline)
    return {
        "figures": {
            name: {metric: round(value, 6) for metric, value in values.items()}
            for name, values in evaluation.metrics.items()
        },
        "queries": evaluation.queries,
        "cpu_seconds": {
            "training": round(trained - started, 1),
            "evaluation": round(time.process_time() - trained, 1),
        },
        "torch": run_versions()["torch"],
    }


def run_missing(name: str, seeds: int) -> None:
    """Measure a card's missing runs, and keep each at once."""
    done = kept()
    for seed in range(seeds):
        for row in CARDS[name]:
            run_key = key(row, seed)
            if run_key in done:
                continue
            # one result of raw pixels is enough if every seed searches the same items
            baseline = row is CARDS[name][0] and not (
                seed and row.recipe in ("fashion-mnist", "fashion-danml")
            )
            done[run_key] = {"key": run_key, "commit": commit(), **measure(row, seed, baseline)}
            append(KEPT, done[run_key])


def block(name: str) -> str:
    """Return a card's block from the kept runs.

    Raises:
        KeyError: no run of the card's own recipe is kept.
    """
    done = kept()
    results = [
        (row.title, [done[key(row, seed)] for seed in range(99) if key(row, seed) in done])
        for row in CARDS[name]
    ]
    own = results[0][1]
    if not own:
        raise KeyError(f"{name} was never measured: python benchmarks/cards.py {name}")
    table = [(RAW, [entry["figures"][RAW] for entry in own if RAW in entry["figures"]])]
    table += [(title, [e["figures"]["trained"] for e in entries]) for title, entries in results]
    lines = []
    for title, rows in table:
        cells = [interval([row[metric] for row in rows]) for metric in METRICS]
        shown = f"**{title}**" if "this recipe" in title else title
        lines.append([shown, str(len(rows)), *cells])
    gains = []
    for title, rows in [table[0], *table[2:]]:
        # a recipe without randomness has one value for all seeds
        others = rows * len(own) if len(rows) == 1 else rows
        pairs = list(zip(table[1][1], others, strict=False))
        cells = [interval([a[m] - b[m] for a, b in pairs], sign=True) for m in COMPARED]
        gains.append([title, str(len(pairs)), *cells])
    entries = [entry for _, some in results for entry in some]
    seconds = sum(sum(entry["cpu_seconds"].values()) for entry in entries)
    return f"""
{markdown(["", "seeds", *METRICS], lines)}

This recipe less each of the others, of the same seeds:

{markdown(["", "seeds", *COMPARED], gains)}

Mean ± Student's 95 % interval of the mean over seeds (not the spread of single runs); \
{own[0]["queries"]:,} queries. `python benchmarks/cards.py {name}`, {seconds:.0f} seconds of one \
CPU thread; torch {", ".join(sorted({entry["torch"] for entry in entries}))}.

"""


def write_card(name: str) -> None:
    """Replace the block between the card's two marks."""
    card = MODELS / name / "README.md"
    text, count = BLOCK.subn(lambda _: block(name), card.read_text(encoding="utf-8"))
    assert count == 1, f"{card} lacks the two lines between which its results stand"
    write(card, text)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", default="all", choices=["all", *CARDS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--write", action="store_true", help="write the blocks from what is kept; run nothing"
    )
    options = parser.parse_args()
    for name in CARDS if "all" in options.names else options.names:
        if not options.write:
            run_missing(name, options.seeds)
        write_card(name)


if __name__ == "__main__":
    main()
