"""Does a generator of hard negatives help? The paper's four losses with and without it, on sets that fit a small computer.

Rows: the loss alone, with semi-hard mining, with DAML, DAML on semi-hard triplets, semi-hard selection after generation, DAML
with both objectives flowing everywhere (`coupling = "joint"`), hard positives, and DAMML: several metrics, weighted per pair or
evenly. All by recipes of this framework. Beyond the paper: the nearest semi-hard negative instead of a random one, DAML on it, and
`daml.disturbed_negative` on either. Where a net is trained, "not moved" is the control: DAML's phases and triplets, real negatives.

Sets, all with disjoint classes (`daml_sets.py`):

- glyphs: 1,200 Han characters in twelve font families (`benchmarks/glyphs.py` says which Debian packages it needs), 600 to
  train, 600 to search. Frozen EfficientNet-Lite0 features (96 pixels), reduced to 128 principal components of the
  training classes and to unit length; the head is linear, 64 dimensions. 400 batches, three random negatives per anchor (the
  lifted structure and N-pair: one of every other class of the batch).
- random: the same with one random negative an anchor (N-pair: as before) and four times as many batches, fixed for every row. It
  is where a loss without mining starves: its negatives are all far away long before training ends.
- few: 60 classes of glyphs, others for each seed, the same 600 to search. For what lies beyond the paper.
- drawn: glyphs as images of 24 pixels and a small convolutional net from scratch, everything trained; 320 batches.
- Fashion-MNIST: 1,000 images per class, 0–4 train, 5–9 are searched, frozen features and head as for glyphs; 200 batches.

Choices are made on training classes alone: glyphs, random and drawn train on 480 and are judged on 120, few trains on 60 of
these 480, Fashion-MNIST trains on 0, 1, 3 and is judged on 2, 4; one seed, highest Recall@1 (MAP@R for Fashion-MNIST, where
Recall@1 saturates). Every row of a set chooses among as many candidates: three margins or scales of its loss, for drawn two, for few
three numbers of steps. Then three other seeds train on all training classes, and the test classes are looked at once. Every
row takes as many steps of the metric. DAML's generator takes a quarter more by itself, as Algorithm 1 has it, in which the metric
stands still.

Fixed beforehand, by pilots that saw validation classes only: glyphs drawn at strength 1 and not 2, the generator's margin of 1 for
every loss, 128 components and not 256 (for speed), a rate of 1e-3 for metric and generator, and a linear head. That one negative
and long training is where DAML helps was found so too, among some thirty pilots of lengths, margins, batches and drawing
strengths. The step and number of copies of `daml.disturbed_negative` come from pilots on four folds of the training classes
(docs/daml.md shows them).

A last table has plain losses with their parameters as they come instead of chosen ones, since what a generator gains depends
on how good the loss without it is.

    python benchmarks/daml_baselines.py --work FOLDER            # goes on where it stopped
    python benchmarks/daml_baselines.py --work FOLDER --report benchmarks/results/daml_baselines.md
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from retrieval.evaluation.evaluate_run import evaluate_run
from retrieval.recipe.read import check_recipe
from retrieval.training.trainer import train

from daml_report import report
from daml_sets import CHOOSING_SEED, SEEDS, SETS, held_out, prepare

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
"""How many negatives an anchor is given: three at random, or one of every other class of the batch."""

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
"""The control of a net that is trained: DAML's phases and triplets, with real negatives in the synthetic ones' place."""

BEYOND = (
    "hardest semi-hard",
    "DAML + hardest semi-hard",
    "disturbed + semi-hard",
    "disturbed + hardest semi-hard",
    "disturbed + hardest semi-hard + real",
)
COMBINED = tuple(f"DAMML {kind} K = {k}" for kind in ("discriminator", "uniform") for k in (2, 4, 8))

UNTUNED: list[tuple[str, str, dict[str, Any]]] = [
    ("glyphs", "contrastive", {"name": "daml.contrastive", "margin": 0.5}),
    ("glyphs", "contrastive", {"name": "daml.contrastive", "margin": 1.0}),
    ("glyphs", "triplet", {"name": "daml.triplet", "margin": 1.0}),
    ("random", "contrastive", {"name": "daml.contrastive", "margin": 1.0}),
    ("random", "triplet", {"name": "daml.triplet", "margin": 1.0}),
    ("random", "lifted", {"name": "daml.lifted", "margin": 1.0}),
]
"""What the losses are without choosing: with the margin of 1 that the paper gives every loss and the generator, and for the
contrastive loss also half of it. N-pair has none. On glyphs the lifted loss has chosen just that margin."""

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
        return loss == "triplet" if data == "glyphs" else data == "drawn" and "disturbed" not in method
    if method in COMBINED:
        return data in ("glyphs", "fashion")
    return data == "glyphs" or method in METHODS[:6]


def candidates(data: str, loss: str) -> list[dict[str, Any]]:
    """Return what a row chooses among."""
    if data == "few":
        return [{"name": "daml.triplet", "margin": 0.5, "steps": steps} for steps in STEPS]
    return LOSSES[loss][:2] if data == "drawn" else LOSSES[loss]


def recipe(
    work: Path, data: str, loss: str, method: str, loss_table: dict[str, Any], seed: int, choose: bool
) -> dict[str, Any]:
    """Return the recipe of one run; `choose`: on the training classes alone."""
    part = "-choose" if choose else f"-{seed}" if data == "few" else ""
    loss_table = dict(loss_table)
    steps = loss_table.pop("steps", LENGTH[data])
    made: dict[str, Any] = {
        "name": "daml", "seed": seed, "loss": loss_table,
        "data": {"name": "core.features", "file": str(work / f"{'glyphs' if data == 'random' else data}{part}.npz")},
        "backbone": {"name": "core.features"},
        "head": {"embedding_size": 64},
        "optimizer": {"lr": 1e-3},
        "evaluate": {"metrics": METRICS, "clusters": not choose},
        "split": {"by": "class", "test": held_out(work, data, choose), "validation": 0.0},
    }  # fmt: skip
    if data != "fashion":
        made["sampler"] = {"classes": 24, "items": 4, "batches": steps // 4}
    else:
        made["sampler"] = {"classes": 3 if choose else 5, "items": 16, "batches": steps // 4}
    if data == "drawn":
        made["plugins"] = [str(Path(__file__).with_name("glyphs.py"))]
        made["data"]["name"] = "glyphs.saved"
        made["backbone"] = NET
    made["train"] = {"device": "cpu", "epochs": 4}
    # the same triplets with real negatives and with synthetic ones: as the paper has them for each loss
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


class NotDone(Exception):
    """A run is missing, and is not to be made."""


class Results:
    """What is done already, one JSON object a line.

    Args:
        file: where it is kept.
        only: raise NotDone instead of training what is missing.
    """

    def __init__(self, file: Path, only: bool = False) -> None:
        self.file = file
        self.only = only
        lines = file.read_text().splitlines() if file.exists() else []
        self.done = {entry["key"]: entry for entry in map(json.loads, lines)}

    def run(
        self,
        work: Path,
        data: str,
        loss: str,
        method: str,
        loss_table: dict[str, Any],
        seed: int,
        choose: bool,
    ) -> dict[str, Any]:
        """Return a run's figures; train it if that was not done."""
        key = json.dumps([data, loss, method, loss_table, seed, choose], sort_keys=True)
        if key not in self.done and self.only:
            raise NotDone
        if key not in self.done:
            folder = work / f"run-{os.getpid()}"
            shutil.rmtree(folder, ignore_errors=True)
            start = time.process_time()
            table = recipe(work, data, loss, method, loss_table, seed, choose)
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars
                run = train(folder, check_recipe(table))
                trained = time.process_time() - start
                figures = evaluate_run(run).figures["trained"]
            entry = {"key": key, "figures": figures, "seconds": trained}
            with self.file.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self.done[key] = entry
            print(
                data, method, loss_table, "choosing" if choose else f"seed {seed}",
                f"R@1 {figures['recall_at_1']:.4f} MAP@R {figures['map_at_r']:.4f}, {trained:.1f} s", flush=True,
            )  # fmt: skip
        found: dict[str, Any] = self.done[key]
        return found


def row(results: Results, work: Path, data: str, loss: str, method: str, judge: str) -> dict[str, Any]:
    """Return one row: its choice, and each seed's figures."""
    found = [
        (results.run(work, data, loss, method, choice, CHOOSING_SEED, True)["figures"][judge], choice)
        for choice in candidates(data, loss)
    ]
    choice = max(found, key=lambda pair: pair[0])[1]
    runs = [results.run(work, data, loss, method, choice, seed, False) for seed in SEEDS]
    return {"loss": loss, "method": method, "choice": choice, "runs": runs}


def measure(
    results: Results, work: Path, sets: list[str], losses: list[str], methods: list[str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return each set's rows: what was chosen, and each seed's figures."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for data in sets:
        table[data] = {}
        judge = "map_at_r" if data == "fashion" else "recall_at_1"
        for method, loss in itertools.product(methods, losses):
            if not taken(data, method, loss):
                continue
            with contextlib.suppress(NotDone):
                table[data][f"{loss}: {method}"] = row(results, work, data, loss, method, judge)
    return table


def untuned(results: Results, work: Path, sets: list[str], losses: list[str]) -> list[dict[str, Any]]:
    """Return rows of plain and DAML with parameters as they come."""
    rows = []
    for data, loss, table in UNTUNED:
        if data not in sets or loss not in losses:
            continue
        with contextlib.suppress(NotDone):
            made: dict[str, Any] = {"data": data, "loss": loss, "choice": table}
            for method in ("plain", "DAML"):
                made[method] = [results.run(work, data, loss, method, table, seed, False) for seed in SEEDS]
            rows.append(made)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of what is done and of the sets")
    parser.add_argument("--report", type=Path, help="write the report here")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=SETS)
    parser.add_argument("--losses", nargs="*", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument(
        "--methods",
        nargs="*",
        default=[*METHODS, STILL, *BEYOND, *COMBINED],
        choices=[*METHODS, STILL, *BEYOND, *COMBINED],
    )
    parser.add_argument(
        "--only-done", action="store_true", help="report rows that are measured, train nothing"
    )
    parser.add_argument("--no-untuned", action="store_true", help="leave the last table out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("RETRIEVAL_CACHE", str(work / "cache"))
    prepare(work, options.sets)
    results = Results(work / "results.jsonl", options.only_done)
    table = measure(results, work, options.sets, options.losses, options.methods)
    rows = [] if options.no_untuned else untuned(results, work, options.sets, options.losses)
    text = "\n".join(report(table, rows))
    print(text)
    if options.report:
        temporary = options.report.with_suffix(".tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(options.report)


if __name__ == "__main__":
    main()
