"""Does a generator of hard negatives help? The paper's four losses with and without it, on sets that fit a small computer.

Rows: the loss alone, with semi-hard mining, with DAML, DAML on semi-hard triplets, semi-hard selection after generation, DAML
with both objectives flowing everywhere (`coupling = "joint"`), hard positives, and DAMML: several metrics, weighted per pair or
evenly. All by recipes of this framework.

Sets, both with disjoint classes:

- glyphs: 1,200 Han characters in twelve font families (`benchmarks/glyphs.py` says which Debian packages it needs), 600 to
  train, 600 to search. Frozen EfficientNet-Lite0 features (96 pixels), reduced to 128 principal components of the
  training classes and to unit length; the head is linear, 64 dimensions.
- Fashion-MNIST: 1,000 images a class, 0–4 train, 5–9 are searched, the same features and head.

Choices are made on training classes alone: glyphs trains on 480 and is judged on 120, Fashion-MNIST trains on 0, 1, 3 and is
judged on 2, 4; one seed, highest Recall@1 (glyphs) or MAP@R (Fashion-MNIST, where Recall@1 saturates). Every row chooses among
as many candidates. Then three other seeds train on all training classes, and the test classes are looked at once. Every row
takes as many steps of the metric.

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
SETS = ("glyphs", "fashion")

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
COMBINED = tuple(f"DAMML {kind} K = {k}" for kind in ("discriminator", "uniform") for k in (2, 4, 8))

PAPER = {"contrastive": 9.6, "triplet": 15.5, "lifted": 12.6, "N-pair": 6.2}
"""DAML's gain in Recall@1 on Cars196 in the paper's Table V."""


def prepare(work: Path, sets: list[str]) -> None:
    """Write the sets: frozen features, reduced on training classes; all, and the training classes alone for choosing."""
    for name in sets:
        if (work / f"{name}-choose.npz").exists():
            continue
        x, y, training, fitted = glyph_features(work) if name == "glyphs" else fashion_features(work)
        for suffix, kept, fit in (("", np.full(len(y), True), training), ("-choose", training, fitted)):
            mean = x[fit].mean(0)
            _, _, axes = np.linalg.svd(x[fit] - mean, full_matrices=False)
            z = (x - mean) @ axes[:COMPONENTS].T
            z /= np.linalg.norm(z, axis=1, keepdims=True)
            save(work / f"{name}{suffix}.npz", z[kept], y[kept])


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
    made: dict[str, Any] = {
        "name": "daml", "seed": seed, "loss": loss_table,
        "data": {"name": "core.features", "file": str(work / f"{data}{'-choose' if choose else ''}.npz")},
        "backbone": {"name": "core.features"},
        "head": {"embedding_size": 64},
        "optimizer": {"lr": 1e-3},
        "evaluate": {"metrics": METRICS, "clusters": not choose},
        "split": {"by": "class", "test": held_out(work, data, choose), "validation": 0.0},
    }  # fmt: skip
    steps = 400 if data == "glyphs" else 200
    if data == "glyphs":
        made["sampler"] = {"classes": 24, "items": 4, "batches": steps // 4}
    else:
        made["sampler"] = {"classes": 3 if choose else 5, "items": 16, "batches": steps // 4}
    made["train"] = {"device": "cpu", "epochs": 4}
    # the same triplets with real negatives and with synthetic ones: as the paper has them for each loss
    made["miner"] = {"name": "daml.one_per_class", **TRIPLETS[loss]}
    if "semi-hard" in method or "mined after" in method:
        made["miner"] = {"name": "daml.semi_hard", "margin": 1.0}
    if method in ("plain", "semi-hard"):
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


class Results:
    """What is done already, one JSON object a line.

    Args:
        file: where it is kept.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
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
        return self.done[key]


def measure(
    results: Results, work: Path, sets: list[str], losses: list[str], methods: list[str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return each set's rows: what was chosen, and each seed's figures."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for data in sets:
        table[data] = {}
        judge = "recall_at_1" if data == "glyphs" else "map_at_r"
        for method, loss in itertools.product(methods, losses):
            if "hard positives" in method and loss not in ("triplet",):
                continue  # equation 19 is for triplets
            found = [
                (results.run(work, data, loss, method, choice, CHOOSING_SEED, True)["figures"][judge], choice)
                for choice in LOSSES[loss]
            ]
            best = max(found, key=lambda pair: pair[0])
            runs = [results.run(work, data, loss, method, best[1], seed, False) for seed in SEEDS]
            table[data][f"{loss}: {method}"] = {
                "loss": loss,
                "method": method,
                "choice": best[1],
                "runs": runs,
            }
    return table


def spread(values: Any) -> str:
    values = 100 * np.asarray(values)
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


def report(table: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield "# Generated hard negatives against mined ones (DAML)\n"
    yield "Made by `python benchmarks/daml_baselines.py`, which says what is trained and how parameters were chosen. Figures in %, mean ±"
    yield "standard deviation of three seeds; gains are over the loss alone, of the same seed. Test classes were never trained on.\n"
    for data, rows in table.items():
        yield f"## {'Glyphs, 600 classes' if data == 'glyphs' else 'Fashion-MNIST, classes 5–9'}\n"
        yield "| loss | method | chosen | R@1 | gain | paper's gain | R@2 | R@4 | R@8 | NMI | F1 | training, CPU s |"
        yield "| --- " * 12 + "|"
        for row in sorted(rows.values(), key=lambda row: list(LOSSES).index(row["loss"])):
            figures = {
                name: [run["figures"][name] for run in row["runs"]] for name in row["runs"][0]["figures"]
            }
            plain = rows.get(f"{row['loss']}: plain")
            gain = ""
            if plain and row["method"] != "plain":
                gain = spread(
                    [
                        a["figures"]["recall_at_1"] - b["figures"]["recall_at_1"]
                        for a, b in zip(row["runs"], plain["runs"], strict=True)
                    ]
                )
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of what is done and of the sets")
    parser.add_argument("--report", type=Path, help="write the report here")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=SETS)
    parser.add_argument("--losses", nargs="*", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--methods", nargs="*", default=[*METHODS], choices=[*METHODS, *COMBINED])
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("RETRIEVAL_CACHE", str(work / "cache"))
    prepare(work, options.sets)
    table = measure(Results(work / "results.jsonl"), work, options.sets, options.losses, options.methods)
    text = "\n".join(report(table))
    print(text)
    if options.report:
        temporary = options.report.with_suffix(".tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(options.report)


if __name__ == "__main__":
    main()
