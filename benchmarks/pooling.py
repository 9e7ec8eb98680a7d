"""The pool at the end of a net, measured on unseen classes.

    npm pack @phosphor-icons/core@2.1.1 && tar xzf phosphor-icons-core-2.1.1.tgz
    OMP_NUM_THREADS=1 python benchmarks/pooling.py --icons package

There are three sets of images of 32 × 32: scikit-learn's digits, 2,000 of Fashion-MNIST, and 300 of
Phosphor's icons in six weights. Half of the classes train; the others are queries and gallery. Each
pool of `core.convnet` trains with the same recipe, split, steps and the one seed, so small
differences mean nothing. Pools of a frozen ImageNet net are measured with EfficientNet-Lite0 at 96
pixels, whose last map has 3 × 3 positions, without training and on all classes. It stands for
`core.timm` and `core.torchvision`, whose weights need a download. Finished runs are kept in
results/raw/pooling.jsonl and not repeated.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import retrieval
import torch
from PIL import Image
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.host.plugins import create
from retrieval.plugin import ArrayDataset
from retrieval.training.train import train

import pictures
from bench import Kept, chosen, interval, markdown, one_thread, page, resume_arguments
from retrieval_core.convnet import Pool

POOLS = ("mean", "max", "gem", "grid")
METRICS = ["recall_at_1", "map_at_r"]
SETS = {
    "digits": {"classes": 5, "items": 12},
    "fashion": {"classes": 5, "items": 12},
    "icons": {"classes": 16, "items": 4},
}
"""Each set's batches."""


def recipe(pool: str, sampler: dict[str, int]) -> dict[str, Any]:
    return {
        "name": pool,
        "split": {"by": "class", "validation": 0.0},
        "sampler": {**sampler, "batches": 15},
        "backbone": {"name": "core.convnet", "size": 32, "width": 12, "pool": pool},
        "head": {"embedding_size": 64},
        "loss": {"name": "pml.multi_similarity"},
        "miner": {"name": "pml.multi_similarity"},
        "optimizer": {"lr": 2e-3},
        "schedule": {"name": "cosine"},
        "train": {"epochs": 8},
    }


def measure(name: str, pool: str, data: pictures.Pictures) -> dict[str, Any]:
    """Train a net with a pool; return its row."""
    dataset = ArrayDataset(data[0], data[1].tolist())
    with tempfile.TemporaryDirectory() as folder:
        table = recipe(pool, SETS[name])
        run = train(table, Path(folder) / "run", dataset=dataset, progress=False)
        metrics = evaluate(run, progress=False).metrics["trained"]
    row = {"set": name, "pool": pool, "seed": 0}
    return row | {"recall": metrics["recall_at_1"], "map": metrics["map_at_r"]}


def measure_frozen(name: str, pool: str, data: pictures.Pictures) -> dict[str, Any]:
    """Measure a pool of a frozen ImageNet net; return its row."""
    arrays, labels = data
    backbone: Any = create("backbone", "core.efficientnet_lite0", size=96, crop=1.0).eval()
    pooled, codes = Pool(pool, (3, 3), 3), []  # type: ignore[arg-type]
    with torch.no_grad():
        for start in range(0, len(arrays), 64):
            some = map(Image.fromarray, arrays[start : start + 64])
            x = torch.from_numpy(np.stack([backbone.preprocessing(image) for image in some]))
            codes.append(pooled(backbone.network.forward_features((x.float() - 127) / 128)))
    rows = torch.nn.functional.normalize(torch.cat(codes)).numpy()
    values = retrieval.evaluate(rows, labels, metrics=METRICS).values
    row = {"set": name, "pool": pool, "frozen": True}
    return row | {"recall": values["recall_at_1"], "map": values["map_at_r"]}


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for pool in POOLS:
        cells = [
            interval([row[key] for row in chosen(rows, set=name, pool=pool)])
            for name in SETS
            for key in ("recall", "map")
        ]
        lines.append([pool, *cells])
    head = ["pool", *(f"{name}, {m}" for name in SETS for m in ("Recall@1", "MAP@R"))]
    return markdown(head, lines)


def render(rows: list[dict[str, Any]]) -> str:
    return page(f"""
        # Pools of a small net

        {table(chosen(rows, frozen=None))}

        `python benchmarks/pooling.py`. Unseen classes, one class split and one seed, 120 steps.

        The last map of a frozen EfficientNet-Lite0 (3 × 3 positions at 96 pixels, ImageNet's
        weights), all classes:

        {table(chosen(rows, frozen=True))}
    """)


def main() -> None:
    parser = resume_arguments(__doc__)
    parser.add_argument("--icons", type=Path, default=Path("package"), help="npm's package")
    options = parser.parse_args()
    one_thread()
    torch.set_num_threads(1)
    kept = Kept("pooling", options, ("set", "pool", "seed", "frozen"))
    for name in SETS:
        jobs = [(name, pool, 0, None) for pool in POOLS]
        missing = list(kept.missing([*jobs, *((name, pool, None, True) for pool in POOLS)]))
        data = pictures.load(name, options.icons, 300) if missing else None
        for _, pool, _, frozen in missing:
            assert data is not None
            kept.add((measure_frozen if frozen else measure)(name, pool, data))
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
