"""Does a generator of hard negatives help?

The paper's four losses with and without it, on sets that fit a small computer.

Rows: the loss alone, with semi-hard mining, with DAML, DAML on semi-hard triplets, semi-hard
selection after generation, DAML with both objectives flowing everywhere (`coupling = "joint"`),
hard positives, and DAMML: several metrics, weighted per pair or evenly. All by recipes of this
framework. Beyond the paper: the nearest semi-hard negative instead of a random one, DAML on it, and
`daml.disturbed_negative` on either. Where a net is trained, "not moved" is the control: DAML's
phases and triplets, real negatives.

Sets, all with disjoint classes (`daml_sets.py`):

- glyphs: 1,200 Han characters in twelve font families (`benchmarks/glyphs.py` says which Debian
  packages it needs), 600 to train, 600 to search. Frozen EfficientNet-Lite0 features (96 pixels),
  reduced to 128 principal components of the training classes and to unit length; the head is
  linear, 64 dimensions. 400 batches, three random negatives per anchor (the lifted structure and
  N-pair: one of every other class of the batch).
- random: the same with one random negative an anchor (N-pair: as before) and four times as many
  batches, fixed for every row. It is where a loss without mining starves: its negatives are all far
  away long before training ends.
- few: 60 classes of glyphs, others for each seed, the same 600 to search. For what lies beyond the
  paper.
- drawn: glyphs as images of 24 pixels and a small convolutional net from scratch, everything
  trained; 320 batches.
- Fashion-MNIST: 1,000 images per class, 0–4 train, 5–9 are searched, frozen features and head as
  for glyphs; 200 batches.

Choices are made on training classes alone: glyphs, random and drawn train on 480 and are judged on
120, few trains on 60 of these 480, Fashion-MNIST trains on 0, 1, 3 and is judged on 2, 4; one seed,
highest Recall@1 (MAP@R for Fashion-MNIST, where Recall@1 saturates). Every row of a set chooses
among as many candidates: three margins or scales of its loss, for drawn two, for few three numbers
of steps. Then three other seeds train on all training classes, and the test classes are looked at
once. Every row takes as many steps of the metric. DAML's generator takes a quarter more by itself,
as Algorithm 1 has it, in which the metric stands still.

Fixed beforehand, by pilots that saw validation classes only: glyphs drawn at strength 1 and not 2,
the generator's margin of 1 for every loss, 128 components and not 256 (for speed), a rate of 1e-3
for metric and generator, and a linear head. That one negative and long training is where DAML helps
was found so too, among some thirty pilots of lengths, margins, batches and drawing strengths. The
step and number of copies of `daml.disturbed_negative` come from pilots on four folds of the
training classes (docs/daml.md shows them).

A last table has plain losses with their parameters as they come instead of chosen ones, since what
a generator gains depends on how good the loss without it is.

    # goes on where it stopped, in benchmarks/work/daml_baselines
    python benchmarks/daml_baselines.py
    # a part of it
    python benchmarks/daml_baselines.py --sets fashion --losses triplet --methods plain DAML
    python benchmarks/daml_baselines.py --report benchmarks/results/daml_baselines.md
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import Runs, report, spread, work_arguments
from daml_sets import CHOOSING_SEED, SEEDS, SETS, held_out, prepare
from published import published

METRICS = ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "map_at_r"]

LOSSES: dict[str, list[dict[str, Any]]] = {
    "contrastive": [{"name": "daml.contrastive", "margin": m} for m in (0.5, 1.0, 2.0)],
    "triplet": [{"name": "daml.triplet", "margin": m} for m in (0.2, 0.5, 1.0)],
    "lifted": [{"name": "daml.lifted", "margin": m} for m in (0.2, 0.5, 1.0)],
    "N-pair": [{"name": "daml.npair", "scale": s} for s in (8.0, 16.0, 32.0)],
}
"""Each loss with its candidates, the same in every row."""

TRIPLETS: dict[str, dict[str, Any]] = {
    "contrastive": {"negatives": 3},
    "triplet": {"negatives": 3},
    "lifted": {},
    "N-pair": {"anchors": "one"},
}
"""How many negatives an anchor is given: three at random, or one of every other class of the batch.
"""

NET = {"name": "core.convnet", "size": 24, "width": 16, "depth": 4, "layers": 1}
"""The small net from scratch."""

METHODS = (
    "plain",
    "DAML",
    "semi-hard",
    "DAML + semi-hard",
    "DAML joint",
    "hard positives",
    "DAML + real",
    "DAML, mined after",
    "DAML (paper's λ)",
)
STILL = "not moved"
"""The control of a net that is trained: DAML's phases and triplets, with real negatives in the
synthetic ones' place.
"""

BEYOND = (
    "hardest semi-hard",
    "DAML + hardest semi-hard",
    "disturbed + semi-hard",
    "disturbed + hardest semi-hard",
    "disturbed + hardest semi-hard + real",
)
COMBINED = tuple(
    f"DAMML {kind} K = {k}" for kind in ("discriminator", "uniform") for k in (2, 4, 8)
)

UNTUNED: list[tuple[str, str, dict[str, Any]]] = [
    ("glyphs", "contrastive", {"name": "daml.contrastive", "margin": 0.5}),
    ("glyphs", "contrastive", {"name": "daml.contrastive", "margin": 1.0}),
    ("glyphs", "triplet", {"name": "daml.triplet", "margin": 1.0}),
    ("random", "contrastive", {"name": "daml.contrastive", "margin": 1.0}),
    ("random", "triplet", {"name": "daml.triplet", "margin": 1.0}),
    ("random", "lifted", {"name": "daml.lifted", "margin": 1.0}),
]
"""What the losses are without choosing: with the margin of 1 that the paper gives every loss and
the generator, and for the contrastive loss also half of it. N-pair has none. On glyphs the lifted
loss has chosen just that margin.
"""

LENGTH = {"glyphs": 400, "random": 1600, "few": 400, "drawn": 320, "fashion": 200}
"""How many batches the metric takes."""

STEPS = (100, 200, 400)
"""Candidates of the set of few classes, where training too long is the danger."""


def taken(data: str, method: str, loss: str) -> bool:
    """Return whether a row is measured."""
    if data == "few":
        return loss == "triplet" and (
            method in BEYOND or method in ("plain", "semi-hard", "DAML + semi-hard")
        )
    if method == STILL:
        return data == "drawn"
    if method in BEYOND:
        return (
            loss == "triplet" if data == "glyphs" else data == "drawn" and "disturbed" not in method
        )
    if method in COMBINED:
        return data in ("glyphs", "fashion")
    return data == "glyphs" or method in METHODS[:6]


def candidates(data: str, loss: str) -> list[dict[str, Any]]:
    """Return what a row chooses among."""
    if data == "few":
        return [{"name": "daml.triplet", "margin": 0.5, "steps": steps} for steps in STEPS]
    return LOSSES[loss][:2] if data == "drawn" else LOSSES[loss]


def recipe(
    work: Path,
    data: str,
    loss: str,
    method: str,
    loss_table: dict[str, Any],
    seed: int,
    choose: bool,
) -> dict[str, Any]:
    """Return the recipe of one run; `choose`: on the training classes alone."""
    part = "-choose" if choose else f"-{seed}" if data == "few" else ""
    loss_table = dict(loss_table)
    steps = loss_table.pop("steps", LENGTH[data])
    made: dict[str, Any] = {
        "name": "daml",
        "seed": seed,
        "loss": loss_table,
        "data": {
            "name": "core.features",
            "file": str(work / f"{'glyphs' if data == 'random' else data}{part}.npz"),
        },
        "backbone": {"name": "core.features"},
        "head": {"embedding_size": 64},
        "optimizer": {"lr": 1e-3},
        "evaluate": {"metrics": METRICS, "clusters": not choose},
        "split": {"by": "class", "test": held_out(work, data, choose), "validation": 0.0},
    }
    if data != "fashion":
        made["sampler"] = {"classes": 24, "items": 4, "batches": steps // 4}
    else:
        made["sampler"] = {"classes": 3 if choose else 5, "items": 16, "batches": steps // 4}
    if data == "drawn":
        made["plugins"] = [str(Path(__file__).with_name("glyphs.py"))]
        made["data"]["name"] = "glyphs.saved"
        made["backbone"] = NET
    made["train"] = {"device": "cpu", "epochs": 4}
    # the same triplets with real negatives and with synthetic ones: as the paper has them for each
    # loss
    made["miner"] = {"name": "daml.one_per_class", **TRIPLETS[loss]}
    if data == "random" and loss != "N-pair":
        made["miner"]["negatives"] = 1
    if "semi-hard" in method or "mined after" in method:
        made["miner"] = {"name": "daml.semi_hard", "margin": 1.0}
    if "hardest" in method:
        made["miner"]["pick"] = "hardest"
    if method in ("plain", "semi-hard", "hardest semi-hard"):
        return made
    if "disturbed" in method or method == STILL:  # without parameters: no phase of its own
        made["generator"] = {"name": "daml.disturbed_negative"}
        if method == STILL:
            made["generator"] |= {"step": 0.0, "tries": 1}
        made["train"]["real_weight"] = 1.0 if method.endswith("+ real") else 0.0
        made["phase"] = [
            {"name": "real", "epochs": 1, "synthetic": False},
            {"name": "disturbed", "epochs": 3},
        ]
        return made
    if method.startswith("DAMML"):
        _, kind, _, _, count = method.split()
        made["combiner"] = {"name": f"daml.{kind}", "metrics": int(count)}
        made["head"] = {"embedding_size": 64}
    generator: dict[str, Any] = {"name": "daml.hard_negative"}
    if method == "hard positives":
        generator["name"] = "daml.hard_positive"
    elif loss == "contrastive":
        generator["form"] = "contrastive"
    if "paper" in method:
        generator["preset"] = "paper"
    if method == "DAML joint":
        made["train"]["coupling"] = "joint"
    if method == "DAML + real":
        made["train"]["real_weight"] = 1.0
    if "mined after" in method:
        made["train"]["mine"] = "after"
    metric = ["backbone", "head", "combiner", "loss"]
    made["generator"] = generator
    made["generator_optimizer"] = {"lr": 1e-3}
    made["phase"] = [  # algorithm 1
        {"name": "metric", "epochs": 1, "train": metric, "synthetic": False},
        {"name": "generator", "epochs": 1, "train": ["generator"]},
        {"name": "both", "epochs": 3, "train": [*metric, "generator"]},
    ]
    return made


def run(
    runs: Runs, data: str, loss: str, method: str, choice: dict[str, Any], seed: int, choose: bool
) -> dict[str, Any]:
    """Return a run's figures; train it if that was not done."""
    key = json.dumps([data, loss, method, choice, seed, choose], sort_keys=True)
    return runs.run(recipe(runs.work, data, loss, method, choice, seed, choose), key)


def row(runs: Runs, data: str, loss: str, method: str, judge: str) -> dict[str, Any]:
    """Return one row: its choice, and each seed's figures."""
    some = candidates(data, loss)
    scores = [
        run(runs, data, loss, method, one, CHOOSING_SEED, True)["figures"][judge] for one in some
    ]
    choice = some[int(np.argmax(scores))]
    found = [run(runs, data, loss, method, choice, seed, False) for seed in SEEDS]
    return {"loss": loss, "method": method, "choice": choice, "runs": found}


def measure(
    runs: Runs, sets: list[str], losses: list[str], methods: list[str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return each set's rows: what was chosen, and each seed's figures."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for data in sets:
        judge = "map_at_r" if data == "fashion" else "recall_at_1"
        table[data] = {
            f"{loss}: {method}": row(runs, data, loss, method, judge)
            for method, loss in itertools.product(methods, losses)
            if taken(data, method, loss)
        }
    return table


def untuned(runs: Runs, sets: list[str], losses: list[str]) -> list[dict[str, Any]]:
    """Return rows of plain and DAML with parameters as they come."""
    rows = []
    for data, loss, choice in UNTUNED:
        if data in sets and loss in losses:
            made: dict[str, Any] = {"data": data, "loss": loss, "choice": choice}
            for method in ("plain", "DAML"):
                made[method] = [
                    run(runs, data, loss, method, choice, seed, False) for seed in SEEDS
                ]
            rows.append(made)
    return rows


def papers_gain(loss: str) -> str:
    """Return DAML's gain in Recall@1 on Cars196 in the paper."""
    return (
        f"{published('daml_table_5', loss, 'DAML') - published('daml_table_5', loss, 'alone'):+.1f}"
    )


def gained(runs: list[dict[str, Any]], without: list[dict[str, Any]]) -> str:
    return spread(
        [
            a["figures"]["recall_at_1"] - b["figures"]["recall_at_1"]
            for a, b in zip(runs, without, strict=True)
        ]
    )


HEADINGS = {
    "glyphs": "Glyphs, 600 classes to train, 600 to search",
    "random": "Glyphs, one random negative an anchor, trained four times as long",
    "few": "Glyphs, 60 classes to train, 600 to search",
    "drawn": "Glyphs, a small net from scratch",
    "fashion": "Fashion-MNIST, classes 5–9",
}


def lines(
    table: dict[str, dict[str, dict[str, Any]]], as_they_come: list[dict[str, Any]]
) -> Iterator[str]:
    """Yield the lines of the report."""
    yield "# Generated hard negatives against mined ones (DAML)\n"
    yield (
        "Made by `python benchmarks/daml_baselines.py`, which says what is trained and how"
        " parameters were chosen. Figures in %, mean ±"
    )
    yield (
        "standard deviation of three seeds; gains are over the loss alone, of the same seed. Test"
        " classes were never trained on.\n"
    )
    yield (
        "Choices that were made while looking at validation classes, what is left out, and why, are"
        " in the script's first lines. Missing rows were not"
    )
    yield "measured.\n"
    for data, rows in table.items():
        yield f"## {HEADINGS[data]}\n"
        yield (
            "| loss | method | chosen | R@1 | gain | paper's gain | R@2 | R@4 | R@8 | NMI | F1 |"
            " training, CPU s |"
        )
        yield "| --- " * 12 + "|"
        for row in sorted(rows.values(), key=lambda row: list(LOSSES).index(row["loss"])):
            figures = {
                name: [run["figures"][name] for run in row["runs"]]
                for name in row["runs"][0]["figures"]
            }
            plain = rows.get(f"{row['loss']}: plain")
            gain = ""
            if plain and row["method"] != "plain":
                gain = gained(row["runs"], plain["runs"])
            paper = papers_gain(row["loss"]) if row["method"] == "DAML" else ""
            own = ", ".join(f"{k} {v:g}" for k, v in row["choice"].items() if k != "name")
            cells = [
                spread(figures[name])
                for name in ("recall_at_2", "recall_at_4", "recall_at_8", "nmi", "f1")
            ]
            seconds = np.mean([run["seconds"] for run in row["runs"]])
            yield (
                f"| {row['loss']} | {row['method']} | {own} | {spread(figures['recall_at_1'])} |"
                f" {gain} | {paper} | {' | '.join(cells)} | {seconds:.1f} |"
            )
        yield ""
    if as_they_come:
        yield "## Glyphs, parameters as they come\n"
        yield "The paper sets every margin to 1.\n"
        yield (
            "| negatives, batches | loss | parameter | plain R@1 | DAML R@1 | gain | paper's gain |"
        )
        yield "| --- " * 7 + "|"
        for row in as_they_come:
            own = ", ".join(f"{k} {v:g}" for k, v in row["choice"].items() if k != "name")
            without, made = (
                spread([r["figures"]["recall_at_1"] for r in row[m]]) for m in ("plain", "DAML")
            )
            given = "one, 1600" if row["data"] == "random" else "three, 400"
            yield (
                f"| {given} | {row['loss']} | {own} | {without} | {made} |"
                f" {gained(row['DAML'], row['plain'])} | {papers_gain(row['loss'])} |"
            )
        yield ""


def main() -> None:
    methods = [*METHODS, STILL, *BEYOND, *COMBINED]
    parser = work_arguments(__doc__, "daml_baselines")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=SETS)
    parser.add_argument("--losses", nargs="*", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--methods", nargs="*", default=methods, choices=methods)
    parser.add_argument("--no-untuned", action="store_true", help="leave the last table out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(options.work.resolve())
    os.environ.setdefault("RETRIEVAL_CACHE", str(runs.work / "cache"))
    prepare(runs.work, options.sets)
    table = measure(runs, options.sets, options.losses, options.methods)
    rows = [] if options.no_untuned else untuned(runs, options.sets, options.losses)
    report("\n".join(lines(table, rows)), options.report, runs)


if __name__ == "__main__":
    main()
