"""Does a generator of hard negatives help? The paper's four losses with and without it, on sets that fit a small computer.

Rows: the loss alone, with semi-hard mining, with DAML, DAML on semi-hard triplets, semi-hard selection after generation, DAML
with both objectives flowing everywhere (`coupling = "joint"`), hard positives, and DAMML: several metrics, weighted per pair or
evenly. All by recipes of this framework. Beyond the paper: the nearest semi-hard negative instead of a random one, and
`daml.disturbed_negative` on either.

Sets, all with disjoint classes:

- glyphs: 1,200 Han characters in twelve font families (`benchmarks/glyphs.py` says which Debian packages it needs), 600 to
  train, 600 to search. Frozen EfficientNet-Lite0 features (96 pixels), reduced to 128 principal components of the
  training classes and to unit length; the head is linear, 64 dimensions.
- few: the same features, 60 classes to train, others for each seed, the same 600 to search. For what lies beyond the paper.
- Fashion-MNIST: 1,000 images a class, 0–4 train, 5–9 are searched, the same features and head. Two of the three candidates of
  two losses, and fewer methods, for want of time.

Choices are made on training classes alone: glyphs trains on 480 and is judged on 120, few trains on 60 of these 480,
Fashion-MNIST trains on 0, 1, 3 and is judged on 2, 4; one seed, highest Recall@1 (glyphs, few) or MAP@R (Fashion-MNIST, where
Recall@1 saturates). Every row chooses among as many candidates: three margins or scales of its loss, for few three numbers of
steps. Then three other seeds train on all training classes, and the test classes are looked at once. Every row takes as many
steps of the metric. DAML's generator takes a quarter more by itself, as Algorithm 1 has it, in which the metric stands still.

Fixed beforehand, by pilots that saw validation classes only: glyphs drawn at strength 1 and not 2 (at 2 DAML gained
nothing for the contrastive loss), the generator's margin of 1 for every loss, 128 components and not 256 (for speed), a rate of 1e-3 for
metric and generator, and a linear head. The step and number of copies of `daml.disturbed_negative` come from pilots on four
folds of the training classes (docs/daml.md shows them). DAMML is run with one of the four losses, the triplet loss, and with
the margin that DAML with K = 1 has chosen, for want of time.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from retrieval.data.idx import read_idx
from retrieval.evaluate.protocol import evaluate_run
from retrieval.model import Model
from retrieval.plugins import load_plugins
from retrieval.recipe import check_recipe
from retrieval.train.features import backbone_features
from retrieval.train.trainer import train
from torch import nn

FASHION = Path("/usr/share/datasets/fashion-mnist")
PER_CLASS = 1000
SIZE = 96
COMPONENTS = 128
SEEDS = (0, 1, 2)
CHOOSING_SEED = 100
METRICS = ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "map_at_r"]
SETS = ("glyphs", "few", "fashion")
FEW = 60

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
BEYOND = (
    "hardest semi-hard",
    "disturbed + semi-hard",
    "disturbed + hardest semi-hard",
    "disturbed + hardest semi-hard + real",
)
COMBINED = tuple(f"DAMML {kind} K = {k}" for kind in ("discriminator", "uniform") for k in (2, 4, 8))

UNTUNED: list[tuple[str, dict[str, Any]]] = [
    ("contrastive", {"name": "daml.contrastive", "margin": 0.5}),
    ("contrastive", {"name": "daml.contrastive", "margin": 1.0}),
    ("triplet", {"name": "daml.triplet", "margin": 1.0}),
]
"""What the losses are without choosing: with the generator's margin, and for the contrastive loss also half of it. The lifted
loss has chosen just that margin, and N-pair the scale that it comes with."""

STEPS = (100, 200, 400)
"""Candidates of the set of few classes, where training too long is the danger."""


def taken(data: str, method: str, loss: str) -> bool:
    """Return whether a row is measured."""
    if method == "hard positives" and loss != "triplet":
        return False  # equation 19 is for triplets
    if data == "few":
        return loss == "triplet" and (
            method in BEYOND or method in ("plain", "semi-hard", "DAML + semi-hard")
        )
    if data == "fashion":
        methods = ("plain", "DAML", "semi-hard", "DAML + semi-hard", "hard positives")
        return loss in ("contrastive", "triplet") and method in methods
    if method in COMBINED or method in BEYOND:
        return loss == "triplet"
    return True


def candidates(data: str, loss: str) -> list[dict[str, Any]]:
    """Return what a row chooses among."""
    if data == "few":
        return [{"name": "daml.triplet", "margin": 0.5, "steps": steps} for steps in STEPS]
    return LOSSES[loss][1:] if data == "fashion" else LOSSES[loss]


PAPER = {"contrastive": 9.6, "triplet": 15.5, "lifted": 12.6, "N-pair": 6.2}
"""DAML's gain in Recall@1 on Cars196 in the paper's Table V."""


def prepare(work: Path, sets: list[str]) -> None:
    """Write the sets: frozen features, reduced on training classes; all, and the training classes alone for choosing."""
    if "few" in sets:
        sets = ["glyphs", *sets]
    for name in dict.fromkeys(sets):
        if (work / f"{name}-choose.npz").exists():
            continue
        if name == "few":
            few_classes(work)
            continue
        x, y, training, fitted = glyph_features(work) if name == "glyphs" else fashion_features(work)
        for suffix, kept, fit in (("", np.full(len(y), True), training), ("-choose", training, fitted)):
            mean = x[fit].mean(0)
            _, _, axes = np.linalg.svd(x[fit] - mean, full_matrices=False)
            z = (x - mean) @ axes[:COMPONENTS].T
            z /= np.linalg.norm(z, axis=1, keepdims=True)
            save(work / f"{name}{suffix}.npz", z[kept], y[kept])


def few_classes(work: Path) -> None:
    """Write a set for each seed, and one for choosing last: their own training classes, the same ones to search."""
    order = np.array(json.loads((work / "glyphs-classes.json").read_text()))
    for seed in (*SEEDS, CHOOSING_SEED):
        choose = seed == CHOOSING_SEED
        start = FEW * (len(SEEDS) if choose else seed)
        kept = np.concatenate([order[start : start + FEW], held_out(work, "few", choose)])
        with np.load(work / f"glyphs{'-choose' if choose else ''}.npz") as whole:
            rows = np.isin(whole["labels"], kept)
            x, y = whole["features"][rows], whole["labels"][rows]
        save(work / ("few-choose.npz" if choose else f"few-{seed}.npz"), x, y)


def save(file: Path, x: NDArray[Any], y: NDArray[Any]) -> None:
    with (file.parent / "tmp.npz").open("wb") as stream:
        np.savez(stream, features=x.astype(np.float32), labels=y)
    (file.parent / "tmp.npz").replace(file)


Featured = tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]
"""Features, labels, which rows are of training classes, and which of these are not for choosing."""


def glyph_features(work: Path) -> Featured:
    plugins = load_plugins([str(Path(__file__).with_name("glyphs.py"))])
    x, y = encoded(plugins, plugins.build("datasets", {"name": "glyphs.han"}, {}))
    order = np.random.default_rng(0).permutation(np.unique(y))  # neighbours in Unicode share a radical
    (work / "glyphs-classes.json").write_text(json.dumps(order.tolist()))
    return x, y, np.isin(y, order[:600]), np.isin(y, order[:480])


def fashion_features(work: Path) -> Featured:
    folder = work / "fashion"
    if not folder.exists():
        images, labels = (
            read_idx(FASHION / f"train-{part}.gz", n)
            for part, n in (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1))
        )
        rows = np.concatenate([np.flatnonzero(labels == c)[:PER_CLASS] for c in range(10)])
        temporary = work / "fashion.tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        for prefix, part in (("train", rows[1:]), ("t10k", rows[:1])):
            write_idx(temporary / f"{prefix}-images-idx3-ubyte", images[part])
            write_idx(temporary / f"{prefix}-labels-idx1-ubyte", labels[part])
        temporary.replace(folder)
    plugins = load_plugins()
    x, y = encoded(plugins, plugins.build("datasets", {"name": "core.fashion_mnist", "folder": folder}, {}))
    return x, y, np.isin(y, list("01234")), np.isin(y, list("013"))


def write_idx(path: Path, array: NDArray[Any]) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def encoded(plugins: Any, dataset: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    backbone = plugins.build("backbones", {"name": "core.efficientnet_lite0", "size": SIZE}, {})
    found = backbone_features(Model(backbone, nn.Identity()), dataset, torch.device("cpu"), 64)
    return np.asarray(found.arrays, dtype=np.float64), np.array(dataset.labels)


def recipe(
    work: Path, data: str, loss: str, method: str, loss_table: dict[str, Any], seed: int, choose: bool
) -> dict[str, Any]:
    """Return the recipe of one run; `choose`: on the training classes alone."""
    part = "-choose" if choose else f"-{seed}" if data == "few" else ""
    loss_table = dict(loss_table)
    steps = loss_table.pop("steps", 200 if data == "fashion" else 400)
    made: dict[str, Any] = {
        "name": "daml", "seed": seed, "loss": loss_table,
        "data": {"name": "core.features", "file": str(work / f"{data}{part}.npz")},
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
    made["train"] = {"device": "cpu", "epochs": 4}
    # the same triplets with real negatives and with synthetic ones: as the paper has them for each loss
    made["miner"] = {"name": "daml.one_per_class", **TRIPLETS[loss]}
    if "semi-hard" in method or "mined after" in method:
        made["miner"] = {"name": "daml.semi_hard", "margin": 1.0}
    if "hardest" in method:
        made["miner"]["pick"] = "hardest"
    if method in ("plain", "semi-hard", "hardest semi-hard"):
        return made
    if "disturbed" in method:  # without parameters: no phase of its own
        made["generator"] = {"name": "daml.disturbed_negative"}
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
    metric = ["head", "combiner", "loss"]
    made["generator"] = generator
    made["generator_optimizer"] = {"lr": 1e-3}
    made["phase"] = [  # algorithm 1
        {"name": "metric", "epochs": 1, "train": metric, "synthetic": False},
        {"name": "generator", "epochs": 1, "train": ["generator"]},
        {"name": "both", "epochs": 3, "train": [*metric, "generator"]},
    ]
    return made


def held_out(work: Path, data: str, choose: bool) -> list[str]:
    if data == "fashion":
        return ["2", "4"] if choose else list("56789")
    order = json.loads((work / "glyphs-classes.json").read_text())
    found: list[str] = order[480:600] if choose else order[600:]
    return found


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
                run = train(folder, *check_recipe(table))
                trained = time.process_time() - start
                figures = evaluate_run(run)["figures"]["trained"]
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
    alike = "DAML" if method in COMBINED else method  # K local metrics keep what one has chosen
    found = [
        (results.run(work, data, loss, alike, choice, CHOOSING_SEED, True)["figures"][judge], choice)
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


def untuned(results: Results, work: Path, losses: list[str]) -> list[dict[str, Any]]:
    """Return rows on glyphs of plain and DAML with parameters as they come."""
    rows = []
    for loss, table in UNTUNED:
        with contextlib.suppress(NotDone):
            made: dict[str, Any] = {"loss": loss, "choice": table}
            for method in ("plain", "DAML"):
                made[method] = [
                    results.run(work, "glyphs", loss, method, table, seed, False) for seed in SEEDS
                ]
            if loss in losses:
                rows.append(made)
    return rows


def gained(runs: list[dict[str, Any]], without: list[dict[str, Any]]) -> str:
    return spread(
        [
            a["figures"]["recall_at_1"] - b["figures"]["recall_at_1"]
            for a, b in zip(runs, without, strict=True)
        ]
    )


def spread(values: Any) -> str:
    values = 100 * np.asarray(values)
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


HEADINGS = {
    "glyphs": "Glyphs, 600 classes to train, 600 to search",
    "few": "Glyphs, 60 classes to train, 600 to search",
    "fashion": "Fashion-MNIST, classes 5–9",
}


def report(table: dict[str, dict[str, dict[str, Any]]], as_they_come: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield "# Generated hard negatives against mined ones (DAML)\n"
    yield "Made by `python benchmarks/daml_baselines.py`, which says what is trained and how parameters were chosen. Figures in %, mean ±"
    yield "standard deviation of three seeds; gains are over the loss alone, of the same seed. Test classes were never trained on.\n"
    yield "Choices that were made while looking at validation classes, what is left out, and why, are in the script's first lines. Missing rows were not"
    yield "measured, among them all of a small net trained from scratch.\n"
    for data, rows in table.items():
        yield f"## {HEADINGS[data]}\n"
        yield "| loss | method | chosen | R@1 | gain | paper's gain | R@2 | R@4 | R@8 | NMI | F1 | training, CPU s |"
        yield "| --- " * 12 + "|"
        for row in sorted(rows.values(), key=lambda row: list(LOSSES).index(row["loss"])):
            figures = {
                name: [run["figures"][name] for run in row["runs"]] for name in row["runs"][0]["figures"]
            }
            plain = rows.get(f"{row['loss']}: plain")
            gain = ""
            if plain and row["method"] != "plain":
                gain = gained(row["runs"], plain["runs"])
            paper = f"+{PAPER[row['loss']]}" if row["method"] == "DAML" else ""
            own = ", ".join(f"{k} {v:g}" for k, v in row["choice"].items() if k != "name")
            cells = [
                spread(figures[name]) for name in ("recall_at_2", "recall_at_4", "recall_at_8", "nmi", "f1")
            ]
            seconds = np.mean([run["seconds"] for run in row["runs"]])
            yield (
                f"| {row['loss']} | {row['method']} | {own} | {spread(figures['recall_at_1'])} | {gain} | "
                f"{paper} | {' | '.join(cells)} | {seconds:.1f} |"
            )
        yield ""
    if as_they_come:
        yield "## Glyphs, parameters as they come\n"
        yield "| loss | parameter | plain R@1 | DAML R@1 | gain |"
        yield "| --- " * 5 + "|"
        for row in as_they_come:
            own = ", ".join(f"{k} {v:g}" for k, v in row["choice"].items() if k != "name")
            without, made = (spread([r["figures"]["recall_at_1"] for r in row[m]]) for m in ("plain", "DAML"))
            yield f"| {row['loss']} | {own} | {without} | {made} | {gained(row['DAML'], row['plain'])} |"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of what is done and of the sets")
    parser.add_argument("--report", type=Path, help="write the report here")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=SETS)
    parser.add_argument("--losses", nargs="*", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument(
        "--methods", nargs="*", default=[*METHODS, *BEYOND, *COMBINED], choices=[*METHODS, *BEYOND, *COMBINED]
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
    rows = (
        [] if options.no_untuned or "glyphs" not in options.sets else untuned(results, work, options.losses)
    )
    text = "\n".join(report(table, rows))
    print(text)
    if options.report:
        temporary = options.report.with_suffix(".tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(options.report)


if __name__ == "__main__":
    main()
