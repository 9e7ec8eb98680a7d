"""A pretrained backbone's features as they are, and whitened by images without labels: `retrieval export --model … [--whiten …]`.

EfficientNet-Lite0 with its ImageNet weights on 224 pixels, never trained on these images: scikit-learn's 1,797 digits, and 2,000 of
Fashion-MNIST's test images. Five splits of each into two halves: of the items of every class, or of the classes. Whitening is fitted
on the one half without its labels; each item of the other is searched for among the rest of it. Run by hand:

    python benchmarks/whitening.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from retrieval.data.encode import evaluating
from retrieval.data.loading import inputs
from retrieval.export.variants import recall_at_1
from retrieval.export.verify import merged_distances
from retrieval.export.whitening import whitening_head
from retrieval.host.create import create
from retrieval.model.model import Model
from retrieval.serving.progress import Meter
from torch import nn

RESULTS = Path(__file__).parent / "results"
SEEDS = range(5)
WIDTHS = (32, 64, 128, 256)
FASHION = 2000
SETS = {"digits": "scikit-learn's digits", "fashion": "Fashion-MNIST, test images"}
SPLITS = {"items": "new items of the same classes", "classes": "new classes"}
RAW = ("raw", "unit length")


def features_and_labels(name: str, model: Model) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Return the backbone's features (N, F) of a data set, and its labels (N,)."""
    dataset = create("dataset", "core.digits" if name == "digits" else "core.fashion_mnist")
    labels = np.asarray(dataset.labels)
    chosen = np.arange(len(labels))
    if name == "fashion":
        test = np.flatnonzero(np.asarray(dataset.splits) == "test")
        chosen = np.sort(np.random.default_rng(0).choice(test, FASHION, replace=False))
    parts = []
    with evaluating(model), Meter(name, len(chosen), "images") as meter:
        for batch in inputs(dataset, chosen, model.preprocessing, 32):
            parts.append(model.features(batch))
            meter.update(len(batch))
    return torch.cat(parts).numpy(), labels[chosen]


def halves(labels: NDArray[Any], by: str, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the items that whitening sees, and those that are searched."""
    rng = np.random.default_rng(seed)
    if by == "classes":
        classes = rng.permutation(np.unique(labels))
        seen = np.isin(labels, classes[: len(classes) // 2])
    else:
        seen = np.zeros(len(labels), bool)
        for each in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == each))
            seen[rows[: len(rows) // 2]] = True
    return np.flatnonzero(seen), np.flatnonzero(~seen)


def recalls(features: NDArray[np.float32], labels: NDArray[Any], by: str, seed: int) -> dict[str, float]:
    """Return Recall@1 of each contestant on one split."""
    seen, searched = halves(labels, by, seed)
    x = features[searched]
    vectors = {"raw": x, "unit length": x / np.linalg.norm(x, axis=1, keepdims=True)}
    for width in WIDTHS:
        head = whitening_head(features[seen], width).requires_grad_(False)
        vectors[f"whitened, {width}"] = head(torch.from_numpy(x)).numpy()
    found = {}
    for name, each in vectors.items():
        recall = recall_at_1(merged_distances(each, each, ()), labels[searched])
        assert recall is not None
        found[name] = recall
    return found


def measure() -> dict[str, Any]:
    """Return Recall@1 by data set, kind of split and contestant, a number for each split."""
    torch.set_num_threads(1)
    model = Model(create("backbone", "core.efficientnet_lite0"), nn.Identity())
    rows: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in SETS:
        features, labels = features_and_labels(name, model)
        for by in SPLITS:
            kept: dict[str, list[float]] = {}
            for seed in SEEDS:
                for contestant, recall in recalls(features, labels, by, seed).items():
                    kept.setdefault(contestant, []).append(recall)
            rows.setdefault(name, {})[by] = kept
    return {"features": int(features.shape[1]), "torch": torch.__version__, "recall_at_1": rows}


def render(raw: dict[str, Any]) -> str:
    """Return the page."""
    rows = raw["recall_at_1"]
    columns = [(name, by) for name in rows for by in rows[name]]
    contestants = list(rows[columns[0][0]][columns[0][1]])
    lines = [
        "# Whitening a pretrained backbone",
        "",
        f"`python benchmarks/whitening.py`, torch {raw['torch']}. Recall@1, mean ± standard deviation over "
        f"{len(rows[columns[0][0]][columns[0][1]]['raw'])} splits. EfficientNet-Lite0 with its ImageNet weights gives {raw['features']:,} features; nothing is "
        "trained, no label is used. Whitening is fitted on one half of a split, and each item of the other half is searched for "
        "among the rest of it. The sentences below take each column's best width, which was seen on the same splits: a gain of a "
        "point or less is none.",
        "",
        "| | " + " | ".join(f"{SETS[name]}: {SPLITS[by]}" for name, by in columns) + " |",
        "|---" + "|--:" * len(columns) + "|",
    ]
    for contestant in contestants:
        cells = [
            f"{np.mean(rows[name][by][contestant]):.3f} ± {np.std(rows[name][by][contestant], ddof=1):.3f}"
            for name, by in columns
        ]
        lines.append(f"| {contestant} | " + " | ".join(cells) + " |")
    lines += ["", *conclusions(rows, columns, contestants)]
    return "\n".join(lines) + "\n"


def conclusions(rows: dict[str, Any], columns: list[tuple[str, str]], contestants: list[str]) -> list[str]:
    """Return a sentence for each column: the best whitened width beside the better raw one, split by split."""
    said = []
    for name, by in columns:
        kept = rows[name][by]
        raw = max(RAW, key=lambda each: np.mean(kept[each]))
        white = max((each for each in contestants if each not in RAW), key=lambda each: np.mean(kept[each]))
        gains = np.subtract(kept[white], kept[raw])
        said.append(
            f"- {SETS[name]}, {SPLITS[by]}: {white} is {100 * abs(gains.mean()):.1f} points "
            f"{'above' if gains.mean() > 0 else 'below'} {raw} (± {100 * gains.std(ddof=1):.1f}), and above it in {int((gains > 0).sum())} of "
            f"{len(gains)} splits."
        )
    return said


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    raw = measure()
    (RESULTS / "raw" / "whitening.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "whitening.md").write_text(render(raw), encoding="utf-8")
    print(render(raw))


if __name__ == "__main__":
    main()
