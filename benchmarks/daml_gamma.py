"""When do weights for each pair beat even ones? Items in several views, of which some are spoilt (DAMML).

`daml.discriminator` and `daml.uniform` measure alike where every local metric sees the whole item (docs/daml.md has the pilots). They
differ where each metric has a view of its own, and a view may be useless in one item and good in the next: then a pair should be
compared by what both show, and even weights cannot.

Sets, both of 1,200 Han characters in twelve font families (`benchmarks/glyphs.py` says which Debian packages they need), a class a
character, 600 to train and 600 others to search:

- covered: none, one, two or three of a drawing's four quarters, at random, are covered by a picture of a garment each
  (Fashion-MNIST). Classes 0–4 of these cover training items, 5–9 the items to search: nobody has seen those.
- clean: the same drawings, nothing covered. There even weights should do as well.

An item is the frozen EfficientNet-Lite0 features of its four quarters (24 pixels, enlarged to 64), each reduced to 64 principal
components of training classes and to one length, side by side. The head is linear, 64 dimensions in all.

Rows, all by the triplet loss on the hardest semi-hard negatives, in as many steps: one metric (K = 1), also with a hidden layer that
gives it as many parameters as the discriminator has, and with 128 dimensions, the size of the discriminator's code; four metrics that
see all quarters, with even and with learned weights; four metrics of a quarter each (`views = true`), with even weights, also of 128
dimensions in all, with weights that each item brings by itself (`ItemWeights` below: one vector, its quarters scaled by a network
that sees the item, which no rescorer is needed for), and with learned ones for each pair.

Every row chooses among the same six candidates, margins .2, .5 and 1 and 400 or 800 steps, by Recall@1 on training classes alone: it
trains on 480 and is judged on 120, one seed; in "covered" these training items are covered by garments of classes 0–2, those judged
by 3 and 4. Then five other seeds train on all 600, and the classes to search are looked at once.

Fixed beforehand, by pilots on validation classes (docs/daml.md): hidden = 32, μ = 0 and ρ = 5 of the discriminator, the rate of 1e-3
for all (times 10 for the network of `ItemWeights`, the best of three), and what "covered" is.

    python benchmarks/daml_gamma.py --work FOLDER            # goes on where it stopped
    python benchmarks/daml_gamma.py --work FOLDER --report benchmarks/results/daml_gamma.md
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
from PIL import Image
from retrieval import Combiner, hookimpl
from retrieval.data.datasets import ArrayDataset
from retrieval.data.features import backbone_features
from retrieval.data.idx import read_idx
from retrieval.evaluation.evaluate_run import evaluate_run
from retrieval.export.export_run import export_run
from retrieval.host.plugins import load_plugins
from retrieval.model.model import Model
from retrieval.recipe.read import check_recipe
from retrieval.run.open import Run
from retrieval.training.trainer import train
from torch import Tensor, nn

from retrieval_daml.local_metrics import UnitParts, ViewMaps

FASHION = Path("/usr/share/datasets/fashion-mnist")
SIDE, HALF = 48, 24
ENLARGED = 64
COMPONENTS = 64
QUARTERS = [(top, left) for top in (0, HALF) for left in (0, HALF)]
SEEDS = (0, 1, 2, 3, 4)
CHOOSING_SEED = 100
METRICS = ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "map_at_r"]
SETS = {
    "covered": "Quarters covered at random, by garments not seen in training",
    "clean": "Nothing covered",
}

EVEN = {"name": "daml.uniform", "metrics": 4}
LEARNED = {"name": "daml.discriminator", "metrics": 4, "hidden": 32, "mu": 0.0, "rho": 5.0}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "K = 1": ({"embedding_size": 64}, None),
    "K = 1, a hidden layer": ({"embedding_size": 64, "hidden": [64]}, None),
    "K = 1, 128 dimensions": ({"embedding_size": 128}, None),
    "K = 4, even": ({"embedding_size": 64}, EVEN),
    "K = 4, learned": ({"embedding_size": 64}, LEARNED),
    "a quarter each, even": ({"embedding_size": 64}, EVEN | {"views": True}),
    "a quarter each, even, 128 dimensions": ({"embedding_size": 128}, EVEN | {"views": True}),
    "a quarter each, by item": ({"embedding_size": 64}, {"name": "daml_gamma.item_weights"}),
    "a quarter each, learned": ({"embedding_size": 64}, LEARNED | {"views": True}),
}
"""Head and combiner of each row."""

CANDIDATES = [{"margin": m, "steps": s} for m in (0.2, 0.5, 1.0) for s in (400, 800)]
"""What every row chooses among."""


class ItemWeights(Combiner):
    """A control: an item's unit embedding of each view times √g, of a softmax g that sees the item alone; the Euclidean distance.

    Args:
        hidden: width of the network that makes g.
    """

    def __init__(self, features: int, embedding_size: int, hidden: int = 32) -> None:
        super().__init__()
        self.size = embedding_size
        self.weights = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 4))
        nn.init.zeros_(self.weights[2].weight)
        nn.init.zeros_(self.weights[2].bias)

    def build_head(self, features: int) -> nn.Module:
        """Return features (B, F) → unit vectors (B, D)."""
        return Scaled(nn.Sequential(ViewMaps(features, self.size, 4), UnitParts(4)), self.weights)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (Q, R)."""
        return torch.cdist(query_emb, ref_emb)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Return distances (N,), row by row."""
        return ((query_emb - ref_emb).square().sum(-1) + 1e-12).sqrt()


class Scaled(nn.Module):
    """Views' unit embeddings side by side, each scaled by the item's weights."""

    def __init__(self, views: nn.Module, weights: nn.Module) -> None:
        super().__init__()
        self.views, self.weights = views, weights

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, D) of (B, F)."""
        scale = self.weights(x).softmax(-1).sqrt()
        return (self.views(x).unflatten(-1, (4, -1)) * scale[..., None]).flatten(1)


@hookimpl
def retrieval_combiners() -> dict[str, Any]:
    """Offer the control to recipes."""
    return {"item_weights": ItemWeights}


# --- the sets --------------------------------------------------------------------------------------------


def prepare(work: Path) -> None:
    """Write the sets: "-choose" holds the training classes alone, its components those of the 480 that train."""
    wanted = [f"{name}{part}" for name in SETS for part in ("-choose", "")]
    if all((work / f"{name}.npz").exists() for name in wanted):
        return
    plugins = load_plugins([str(Path(__file__).with_name("glyphs.py"))])
    glyphs = plugins.build("datasets", {"name": "glyphs.han", "size": SIDE}, {})
    images, labels = glyphs.arrays, np.array(glyphs.labels)
    order = np.random.default_rng(0).permutation(np.unique(labels))  # neighbours in Unicode share a radical
    (work / "classes.json").write_text(json.dumps(order.tolist()))
    training, fitted = np.isin(labels, order[:600]), np.isin(labels, order[:480])
    clean = features(plugins, images)
    for part, kept, trains, garments in (
        ("-choose", training, fitted, ((0, 1, 2), (3, 4))),
        ("", np.full(len(labels), True), training, ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))),
    ):
        hidden = covered(images[kept], trains[kept], garments)
        for name, x in (("covered", features(plugins, hidden)), ("clean", clean[kept])):
            save(work / f"{name}{part}.npz", reduced(x, trains[kept]), labels[kept])


def covered(
    images: NDArray[np.uint8], trains: NDArray[np.bool_], garments: tuple[tuple[int, ...], tuple[int, ...]]
) -> NDArray[np.uint8]:
    """Return the images with none to three of their quarters covered, by garments of the first classes where they train."""
    pictures, kinds = (
        read_idx(FASHION / f"train-{part}.gz", n)
        for part, n in (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1))
    )
    pools = [pictures[np.isin(kinds, which)] for which in garments]
    rng = np.random.default_rng(1)
    made = images.copy()
    for image, train_item in zip(made, trains, strict=True):
        pool = pools[0 if train_item else 1]
        for quarter in rng.choice(4, rng.integers(0, 4), replace=False):
            top, left = QUARTERS[quarter]
            picture = Image.fromarray(pool[rng.integers(len(pool))])
            small = picture.resize((HALF, HALF), Image.Resampling.BILINEAR)
            image[top : top + HALF, left : left + HALF] = np.asarray(small)
    return made


def features(plugins: Any, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the frozen network's features (N, 4, F) of the quarters."""
    backbone = plugins.build("backbones", {"name": "core.efficientnet_lite0", "size": ENLARGED}, {})
    model = Model(backbone, nn.Identity())
    names = [str(i) for i in range(len(images))]
    found = []
    for top, left in QUARTERS:
        quarter = np.ascontiguousarray(images[:, top : top + HALF, left : left + HALF])
        dataset = backbone_features(model, ArrayDataset(quarter, names, names), torch.device("cpu"), 64)
        found.append(np.asarray(dataset.arrays))
    return np.stack(found, 1)


def reduced(x: NDArray[np.float32], fit: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return (N, 4 · COMPONENTS): each view's principal components, of length ½, so that the whole has length 1."""
    views = []
    for view in x.transpose(1, 0, 2).astype(np.float64):
        mean = view[fit].mean(0)
        _, axes = np.linalg.eigh(np.cov((view[fit] - mean).T))
        z = (view - mean) @ axes[:, ::-1][:, :COMPONENTS]
        views.append(z / np.linalg.norm(z, axis=1, keepdims=True) / 2)
    return np.concatenate(views, 1).astype(np.float32)


def save(file: Path, x: NDArray[Any], y: NDArray[Any]) -> None:
    with file.with_suffix(".tmp").open("wb") as stream:
        np.savez(stream, features=x, labels=y)
    file.with_suffix(".tmp").replace(file)


# --- the runs --------------------------------------------------------------------------------------------


def recipe(
    work: Path, data: str, row: str, choice: dict[str, Any], seed: int, choose: bool
) -> dict[str, Any]:
    """Return the recipe of one run; `choose`: on the training classes alone."""
    order = json.loads((work / "classes.json").read_text())
    head, combiner = ROWS[row]
    made: dict[str, Any] = {
        "name": "gamma", "seed": seed,
        "data": {"name": "core.features", "file": str(work / f"{data}{'-choose' if choose else ''}.npz")},
        "split": {"by": "class", "test": order[480:600] if choose else order[600:], "validation": 0.0},
        "sampler": {"classes": 24, "items": 4, "batches": choice["steps"] // 4},
        "backbone": {"name": "core.features"},
        "head": head,
        "loss": {"name": "daml.triplet", "margin": choice["margin"]},
        "miner": {"name": "daml.semi_hard", "pick": "hardest"},
        "optimizer": {"lr": 1e-3},
        "train": {"device": "cpu", "epochs": 4},
        "evaluate": {"metrics": METRICS},
    }  # fmt: skip
    if combiner:
        made["combiner"] = combiner
        if combiner["name"].startswith("daml_gamma"):
            made["plugins"] = [__file__]
            made["optimizer"]["lr_factor"] = {"combiner": 10.0}
    return made


class Results:
    """What is done already, one JSON object a line.

    Args:
        work: folder of the sets and of `results.jsonl`.
    """

    def __init__(self, work: Path) -> None:
        self.work, self.file = work, work / "results.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.done = {entry["key"]: entry for entry in map(json.loads, lines)}

    def run(self, data: str, row: str, choice: dict[str, Any], seed: int, choose: bool) -> dict[str, Any]:
        """Return a run's figures; train it if that was not done."""
        key = json.dumps([data, row, ROWS[row], choice, seed, choose], sort_keys=True)
        if key not in self.done:
            folder = self.work / f"run-{os.getpid()}"
            shutil.rmtree(folder, ignore_errors=True)
            start = time.process_time()
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars
                run = train(folder, check_recipe(recipe(self.work, data, row, choice, seed, choose)))
                entry = {"key": key, "seconds": time.process_time() - start}
                entry["figures"] = evaluate_run(run).figures["trained"]
                if not choose and row.endswith("learned") and seed == SEEDS[0]:
                    entry["served"] = served(run)
            shutil.rmtree(folder)
            with self.file.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self.done[key] = entry
            where = "choosing" if choose else f"seed {seed}"
            score = "" if not choose else f", R@1 {entry['figures']['recall_at_1']:.4f}"
            print(f"{data}, {row}, {choice}, {where}{score}, {entry['seconds']:.1f} s", flush=True)
        found: dict[str, Any] = self.done[key]
        return found


def served(run: Run) -> dict[str, Any]:
    """Return what candidates keep of the exhaustive ranking's first ten, and how many are the default."""
    manifest = export_run(run).manifest
    assert manifest.rescorer is not None
    return {"overlap": manifest.rescorer.overlap, "candidates": manifest.rescorer.candidates}


def measure(results: Results, data: str) -> dict[str, dict[str, Any]]:
    """Return the rows of one set: all choices first, then the classes to search."""
    choices = {}
    for row in ROWS:
        found = [results.run(data, row, choice, CHOOSING_SEED, True) for choice in CANDIDATES]
        best = int(np.argmax([entry["figures"]["recall_at_1"] for entry in found]))
        choices[row] = (CANDIDATES[best], found[best]["figures"]["recall_at_1"])
    rows: dict[str, dict[str, Any]] = {
        row: {"choice": choice, "validation": score, "runs": []} for row, (choice, score) in choices.items()
    }
    for seed, row in itertools.product(SEEDS, ROWS):
        rows[row]["runs"].append(results.run(data, row, rows[row]["choice"], seed, False))
    return rows


# --- the report ------------------------------------------------------------------------------------------


def spread(values: Any) -> str:
    values = 100 * np.asarray(values)
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


def figures(row: dict[str, Any], name: str) -> NDArray[np.float64]:
    return np.array([run["figures"][name] for run in row["runs"]])


def report(table: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield "# Weights for each pair against even ones (DAMML)\n"
    yield "Made by `python benchmarks/daml_gamma.py`, which says what the sets and the rows are and how parameters were chosen. Figures in %,"
    yield f"mean ± standard deviation of {len(SEEDS)} seeds on 600 classes that were never trained on, looked at once; gains are paired by seed.\n"
    for data, rows in table.items():
        yield f"## {SETS[data]}\n"
        yield "| | chosen | validation R@1 | R@1 | R@2 | R@4 | R@8 | MAP@R | training, CPU s |"
        yield "| --- " * 9 + "|"
        for name, row in rows.items():
            cells = [spread(figures(row, metric)) for metric in METRICS]
            choice = f"margin {row['choice']['margin']:g}, {row['choice']['steps']} steps"
            seconds = np.mean([run["seconds"] for run in row["runs"]])
            yield f"| {name} | {choice} | {100 * row['validation']:.1f} | {' | '.join(cells)} | {seconds:.1f} |"
        yield "\nGains of learned weights, paired by seed:\n"
        yield "| learned | against | R@1 | MAP@R | seeds ahead in R@1 |"
        yield "| --- " * 5 + "|"
        for name, other in [
            *(("a quarter each, learned", other) for other in rows if other != "a quarter each, learned"),
            ("K = 4, learned", "K = 4, even"),
        ]:
            gains = {metric: figures(rows[name], metric) - figures(rows[other], metric) for metric in METRICS}
            ahead = f"{(gains['recall_at_1'] > 0).sum()} of {len(SEEDS)}"
            yield f"| {name} | {other} | {spread(gains['recall_at_1'])} | {spread(gains['map_at_r'])} | {ahead} |"
        yield ""
        for name in ("K = 4, learned", "a quarter each, learned"):
            found = rows[name]["runs"][0]["served"]
            kept = ", ".join(f"{share:.3f} of {count}" for count, share in found["overlap"].items())
            yield f"Served, «{name}», seed {SEEDS[0]}: the exhaustive first ten that candidates keep, {kept}; {found['candidates']} by default.\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of what is done and of the sets")
    parser.add_argument("--report", type=Path, help="write the report here")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--choose-only", action="store_true", help="stop before the classes to search")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("RETRIEVAL_CACHE", str(work / "cache"))
    prepare(work)
    results = Results(work)
    if options.choose_only:
        for data, row, choice in itertools.product(options.sets, ROWS, CANDIDATES):
            results.run(data, row, choice, CHOOSING_SEED, True)
        return
    text = "\n".join(report({data: measure(results, data) for data in options.sets}))
    print(text)
    if options.report:
        temporary = options.report.with_suffix(".tmp")
        temporary.write_text(text.rstrip() + "\n", encoding="utf-8")
        temporary.replace(options.report)


if __name__ == "__main__":
    main()
