"""Which pool a net should end in, on classes that it was not trained on.

    npm pack @phosphor-icons/core@2.1.1 && tar xzf phosphor-icons-core-2.1.1.tgz
    OMP_NUM_THREADS=1 python benchmarks/pooling.py --icons package

Three sets of images of 32 × 32: scikit-learn's digits, 2,000 of Fashion-MNIST, and 300 of
Phosphor's icons in six weights. Half of the classes train, the others are queries and gallery.
Each pool of `core.convnet` trains with the same recipe, split and steps; with one seed, small
differences mean nothing. Pools of a frozen ImageNet net are measured with EfficientNet-Lite0 at 96
pixels, whose last map has 3 × 3 positions: nothing trains, and all classes are searched. It stands
for `core.timm` and `core.torchvision`, whose weights need a download. Finished runs are kept in
results/raw/pooling.jsonl and not repeated.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import retrieval
import torch
from numpy.typing import NDArray
from PIL import Image
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.host.plugins import create
from retrieval.plugin import ArrayDataset
from retrieval.training.train import train

from bench import (
    RESULTS,
    append,
    arguments,
    interval,
    machine,
    markdown,
    read_lines,
    versions,
    write,
)
from retrieval_core.pooling import Pool

POOLS = ("mean", "max", "gem", "grid")
SEEDS = 1
RAW = RESULTS / "raw" / "pooling.jsonl"
WEIGHTS = ("thin", "light", "regular", "bold", "fill", "duotone")
Pictures = tuple[NDArray[np.uint8], NDArray[Any]]


def digits(package: Path) -> Pictures:
    data: Any = create("dataset", "core.digits")
    return data.arrays, np.array(data.labels)


def fashion(package: Path) -> Pictures:
    data: Any = create("dataset", "core.fashion_mnist")
    labels = np.array(data.labels)
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(np.flatnonzero(labels == x))[:200] for x in np.unique(labels)]
    rows = np.sort(np.concatenate(chosen))
    return data.arrays[rows], labels[rows]


def icons(package: Path) -> Pictures:
    import resvg_py

    assets = package / "assets"
    names = sorted(file.stem for file in (assets / "regular").glob("*.svg"))
    names = sorted(np.random.default_rng(0).permutation(names)[:300].tolist())
    pictures = []
    for name in names:
        for weight in WEIGHTS:
            file = assets / weight / (name + ("" if weight == "regular" else f"-{weight}") + ".svg")
            drawn = resvg_py.svg_to_bytes(
                svg_path=str(file), width=32, height=32, background="white"
            )
            pictures.append(np.asarray(Image.open(io.BytesIO(bytes(drawn))).convert("L")))
    return np.stack(pictures), np.repeat(names, len(WEIGHTS))


SETS: dict[str, tuple[Callable[[Path], Pictures], dict[str, int]]] = {
    "digits": (digits, {"classes": 5, "items": 12}),
    "fashion": (fashion, {"classes": 5, "items": 12}),
    "icons": (icons, {"classes": 16, "items": 4}),
}


def recipe(pool: str, seed: int, sampler: dict[str, int]) -> dict[str, Any]:
    return {
        "name": f"{pool}-{seed}",
        "seed": seed,
        "split": {"by": "class", "validation": 0.0, "seed": seed},
        "sampler": {**sampler, "batches": 15},
        "backbone": {"name": "core.convnet", "size": 32, "width": 12, "pool": pool},
        "head": {"embedding_size": 64},
        "loss": {"name": "pml.multi_similarity"},
        "miner": {"name": "pml.multi_similarity"},
        "optimizer": {"lr": 2e-3},
        "schedule": {"name": "cosine"},
        "train": {"epochs": 8},
    }


def measure(name: str, package: Path) -> None:
    done = {(row["set"], row["pool"], row.get("seed")) for row in read_lines(RAW)}
    if all((name, pool, seed) in done for pool in POOLS for seed in range(SEEDS)):
        return
    load, sampler = SETS[name]
    arrays, labels = load(package)
    dataset = ArrayDataset(arrays, labels.tolist())
    for seed in range(SEEDS):
        for pool in POOLS:
            if (name, pool, seed) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time()
                run = train(
                    recipe(pool, seed, sampler),
                    Path(folder) / "run",
                    dataset=dataset,
                    progress=False,
                )
                seconds = time.process_time() - started
                metrics = evaluate(run, progress=False).metrics["trained"]
            row = {"set": name, "pool": pool, "seed": seed, "seconds": round(seconds, 1)}
            append(RAW, {**row, "recall": metrics["recall_at_1"], "map": metrics["map_at_r"]})


def measure_frozen(name: str, package: Path) -> None:
    """Measure the pools of a frozen ImageNet net on a set."""
    if any(row["set"] == name and row.get("frozen") for row in read_lines(RAW)):
        return
    arrays, labels = SETS[name][0](package)
    backbone: Any = create("backbone", "core.efficientnet_lite0", size=96, crop=1.0).eval()
    pools = {pool: Pool(pool, (3, 3), 3) for pool in POOLS}  # type: ignore[arg-type]
    codes: dict[str, list[torch.Tensor]] = {pool: [] for pool in POOLS}
    with torch.no_grad():
        for start in range(0, len(arrays), 64):
            images = [
                backbone.preprocessing(Image.fromarray(x)) for x in arrays[start : start + 64]
            ]
            x = torch.from_numpy(np.stack(images)).float()
            maps = backbone.network.forward_features((x - 127) / 128)
            for pool in POOLS:
                codes[pool].append(pools[pool](maps))
    for pool in POOLS:
        rows = torch.nn.functional.normalize(torch.cat(codes[pool])).numpy()
        values = retrieval.evaluate(rows, labels, metrics=["recall_at_1", "map_at_r"]).values
        row = {"set": name, "pool": pool, "frozen": True, "recall": values["recall_at_1"]}
        append(RAW, {**row, "map": values["map_at_r"]})


def table(rows: list[dict[str, Any]], last: dict[str, str] | None = None) -> str:
    """Return a table of pools and sets, and a last column."""
    lines = [
        [
            pool,
            *(
                interval([row[key] for row in rows if (row["set"], row["pool"]) == (name, pool)])
                for name in SETS
                for key in ("recall", "map")
            ),
            *([last[pool]] if last else []),
        ]
        for pool in POOLS
    ]
    head = ["pool", *(f"{name}, {m}" for name in SETS for m in ("Recall@1", "MAP@R"))]
    return markdown([*head, *(["CPU s"] if last else [])], lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--icons", type=Path, default=Path("package"), help="npm's package")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.sets:
        measure(name, options.icons)
        measure_frozen(name, options.icons)
    rows = read_lines(RAW)
    trained = [row for row in rows if not row.get("frozen")]
    seconds = {
        pool: f"{np.mean([row['seconds'] for row in trained if row['pool'] == pool]):.0f}"
        for pool in POOLS
    }
    write(
        RESULTS / "pooling.md",
        f"# Pools of a small net\n\n{table(trained, seconds)}\n\nUnseen classes, one"
        f" class split and one seed, 120 steps. {machine()};"
        f" {versions('torch', 'embedding-retrieval')}. `python benchmarks/pooling.py`.\n\nThe last"
        " map of a frozen EfficientNet-Lite0 (3 × 3 positions at 96 pixels, ImageNet's weights),"
        f" all classes:\n\n{table([row for row in rows if row.get('frozen')])}\n",
    )


if __name__ == "__main__":
    main()
