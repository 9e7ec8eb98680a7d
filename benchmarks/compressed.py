"""What compressed vectors cost: neighbours of the full vectors that are still found, and Recall@1 of the task, for codes and for shorter embeddings.

    python benchmarks/compressed.py FOLDER --keep        # trains, measures, writes results/compressed.md; goes on where it stopped
    python benchmarks/compressed.py --page               # the page alone, from what is kept

The recipe models/fashion-mnist (classes 0–4 train, 5–9 are only searched) with the lighter network of image_vectors.py, each seed twice: its own loss, and the same loss
in core.matryoshka. Queries are items of the classes that were not trained on, the gallery others of them. Neighbours: the ten nearest by the same model's whole embedding.
Shorter embeddings: the first numbers of either model at unit length, and the principal components of the plain one, fitted on training items. Codes: of the plain embedding,
through our own back ends with every list looked at (`probes`), so that what is lost is the code's loss; each by itself, and with candidates measured again on the vectors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = (
    "1"  # count only before NumPy is imported
)

import numpy as np
from numpy.typing import NDArray

from page_tables import markdown

HERE = Path(__file__).parent
RECIPE = HERE.parent / "models" / "fashion-mnist" / "recipe.toml"
KEPT = HERE / "results" / "raw" / "compressed.jsonl"
PAGE = HERE / "results" / "compressed.md"
SEEDS, EPOCHS, WIDTH, WIDTHS = (0, 1, 2, 3, 4), 2, 64, (4, 8, 16, 32)
QUERIES, GALLERY, TRAIN, K = 2000, 20_000, 5000, 10
NETWORK = [
    "backbone.depth=4", "backbone.layers=1", "backbone.width=16", "train.precision=no", "train.channels_last=false", f"head.embedding_size={WIDTH}",
    f"train.epochs={EPOCHS}",
]  # fmt: skip
MATRYOSHKA = [
    "loss.name=core.matryoshka", "loss.loss=pml.multi_similarity", f"loss.widths={json.dumps(list(WIDTHS))}",
]  # fmt: skip
CODES: dict[str, tuple[str, dict[str, Any], float]] = {
    "SQ8": ("sq8", {}, 64),
    "PQ, 32 bytes": ("ivfpq", {"lists": 1, "bytes": 32}, 32),
    "PQ, 16 bytes": ("ivfpq", {"lists": 1, "bytes": 16}, 16),
    "PQ, 8 bytes": ("ivfpq", {"lists": 1, "bytes": 8}, 8),
    "IVF-PQ, 16 bytes": ("ivfpq", {"lists": 64, "probes": 64, "bytes": 16}, 16),
    "RaBitQ, 4 bits": ("rabitq", {"lists": 64, "probes": 64, "bits": 4}, 64 / 2 + 20),
    "RaBitQ, 2 bits": ("rabitq", {"lists": 64, "probes": 64, "bits": 2}, 64 / 4 + 20),
    "RaBitQ, 1 bit": ("rabitq", {"lists": 64, "probes": 64, "bits": 1}, 64 / 8 + 8),
}
AGAIN = 8  # times as many candidates are measured again
Vectors = NDArray[np.float32]


def embedded(folder: Path, seed: int, kind: str) -> dict[str, Any]:
    """Train, unless it was; return vectors and labels of training items, queries and gallery."""
    file = folder / f"{kind}-{seed}.npz"
    if not file.exists():
        import retrieval
        import torch

        torch.set_num_threads(1)
        run = folder / f"{kind}-{seed}"
        overrides = [*NETWORK, f"seed={seed}", *(MATRYOSHKA if kind == "matryoshka" else [])]
        if not (run / "summary.json").is_file():
            retrieval.train(RECIPE, run, overrides=overrides, replace=run.exists(), progress=False)
        loaded = retrieval.load_run(run)
        splits, rng = loaded.splits, np.random.default_rng(seed)
        held = rng.permutation(np.asarray(splits.held_out))[: QUERIES + GALLERY]
        train = rng.choice(np.asarray(splits.train), TRAIN, replace=False)
        parts = {"train": train, "query": held[:QUERIES], "gallery": held[QUERIES:]}
        model, pixels = loaded.model.eval(), loaded.dataset.arrays
        with torch.inference_mode():
            arrays = {
                name: np.concatenate([model(torch.from_numpy(pixels[rows[at : at + 250]])[:, None])[1].numpy() for at in range(0, len(rows), 250)])
                for name, rows in parts.items()
            }  # fmt: skip
        labels = {f"{name}_labels": np.asarray(splits.labels)[rows] for name, rows in parts.items()}
        np.savez(file, **arrays, **labels)
    return dict(np.load(file))


def near(queries: Vectors, gallery: Vectors) -> NDArray[np.int64]:
    """Return the ten nearest rows of each query, exactly."""
    from retrieval.serving.store.search import nearest

    return np.asarray(nearest(queries, gallery, K)[1], np.int64)


def figures(found: NDArray[np.int64], truth: NDArray[np.int64], data: dict[str, Any]) -> dict[str, float]:
    """Return the share of the ten true neighbours found, and of queries whose first answer has their label."""
    same = [len(np.intersect1d(one, other)) for one, other in zip(found, truth, strict=True)]
    first = data["gallery_labels"][found[:, 0]] == data["query_labels"]
    return {"neighbours": float(np.mean(same)) / K, "task": float(first.mean())}


def unit(x: Vectors) -> Vectors:
    """Return rows at unit length."""
    return np.ascontiguousarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))


def shorter(data: dict[str, Any], truth: NDArray[np.int64]) -> dict[str, dict[str, float]]:
    """Return figures of the first numbers at each width."""
    return {
        str(width): figures(
            near(unit(data["query"][:, :width]), unit(data["gallery"][:, :width])), truth, data
        )
        for width in WIDTHS
    }


def components(data: dict[str, Any], truth: NDArray[np.int64]) -> dict[str, dict[str, float]]:
    """Return figures of the principal components at each width, lengths as they are: the directions that keep most of the distances."""
    from sklearn.decomposition import PCA

    fitted = PCA(max(WIDTHS)).fit(data["train"].astype(np.float64))
    query, gallery = (
        np.ascontiguousarray(fitted.transform(data[name]), np.float32) for name in ("query", "gallery")
    )
    cut = [
        (width, np.ascontiguousarray(query[:, :width]), np.ascontiguousarray(gallery[:, :width]))
        for width in WIDTHS
    ]
    return {str(width): figures(near(q, g), truth, data) for width, q, g in cut}


def coded(data: dict[str, Any], truth: NDArray[np.int64]) -> dict[str, dict[str, Any]]:
    """Return figures of each code, by itself and measured again."""
    from retrieval.serving.index.backends import make_backend

    found = {}
    for title, (name, options, size) in CODES.items():
        backend = make_backend(name, options)
        backend.build(data["gallery"], lambda count: None)
        rows = backend.search(data["query"], K * AGAIN)[1]
        again = []
        for query, there in zip(data["query"], rows, strict=True):
            apart = ((data["gallery"][there].astype(np.float64) - query) ** 2).sum(1)
            again.append(there[np.argsort(apart, kind="stable")[:K]])
        found[title] = {
            "bytes": size,
            "alone": figures(rows[:, :K], truth, data),
            "again": figures(np.array(again), truth, data),
        }
    return found


def measure(folder: Path) -> None:
    """Measure each seed that has no line yet."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "compressed.jsonl"
    done = {line["seed"] for line in lines(kept)}
    for seed in (seed for seed in SEEDS if seed not in done):
        plain, nested = (embedded(folder, seed, kind) for kind in ("plain", "matryoshka"))
        line: dict[str, Any] = {"seed": seed, "when": time.strftime("%Y-%m-%d"), "load": round(os.getloadavg()[0], 1), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                                "gallery": len(plain["gallery"]), "queries": len(plain["query"])}  # fmt: skip
        for kind, data in (("plain", plain), ("matryoshka", nested)):
            truth = near(data["query"], data["gallery"])
            line[kind] = {"whole": figures(truth, truth, data), "shorter": shorter(data, truth)}
            if kind == "plain":
                line["pca"] = components(data, truth)
                line["codes"] = coded(data, truth)
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{time.strftime('%H:%M:%S')} {json.dumps(line)[:300]}", flush=True)


def lines(file: Path) -> list[dict[str, Any]]:
    """Return what was measured."""
    return [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []  # fmt: skip


def spread(kept: list[dict[str, Any]], *path: str) -> str:
    """Return mean ± standard deviation over the seeds, in percent."""
    values = []
    for line in kept:
        value: Any = line
        for step in path:
            value = value[step]
        values.append(100 * value)
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def render(kept: list[dict[str, Any]]) -> str:
    """Return the page."""
    ways = [
        ("plain training, cut", ("plain", "shorter")),
        ("plain training, principal components", ("pca",)),
        ("core.matryoshka, cut", ("matryoshka", "shorter")),
    ]
    short = []
    for width in map(str, WIDTHS):
        for title, path in ways:
            short.append([width, str(4 * int(width)), title, spread(kept, *path, width, "neighbours"), spread(kept, *path, width, "task")])  # fmt: skip
    for title, kind in (("plain training", "plain"), ("core.matryoshka", "matryoshka")):
        short.append([str(WIDTH), str(4 * WIDTH), f"{title}, whole", spread(kept, kind, "whole", "neighbours"), spread(kept, kind, "whole", "task")])  # fmt: skip
    codes = [
        [title, f"{size:g}", *(spread(kept, "codes", title, way, what) for way in ("alone", "again") for what in ("neighbours", "task"))]
        for title, (_, _, size) in CODES.items()
    ]  # fmt: skip
    head = [
        "# Compressed vectors: neighbours and the task",
        "",
        f"`python benchmarks/compressed.py`, {kept[-1]['when']}. {kept[-1]['machine']}; load averages {min(line['load'] for line in kept)} to {max(line['load'] for line in kept)}, which no figure here "
        f"depends on. Fashion-MNIST, classes 0–4 train for {EPOCHS} epochs, 5–9 are searched: {kept[0]['queries']:,} queries, {kept[0]['gallery']:,} items, embeddings of {WIDTH} numbers at unit length. Mean ± standard "
        f"deviation of {len(kept)} seeds, in percent; each seed trains anew and draws other queries.",
        "",
        "**Neighbours**: share of the ten nearest by the same model's whole embedding. **Task**: Recall@1, the first answer has the query's label.",
        "",
        "## Shorter embeddings",
        "",
        markdown(["numbers", "bytes", "embedding", "neighbours", "task"], short),
        "",
        f"Best at the task by their means: {best(kept, ways)}.",
        "",
        "## Codes of the whole plain embedding",
        "",
        f"Every list is looked at. *Measured again*: {AGAIN} times as many candidates as are wanted are ordered by their distances on the stored vectors. Bytes are the code's; of RaBitQ, with its factors.",
        "",
        markdown(
            ["code", "bytes", "neighbours", "task", "neighbours, measured again", "task, measured again"],
            codes,
        ),
        "",
    ]
    return "\n".join(head)


def best(kept: list[dict[str, Any]], ways: list[tuple[str, tuple[str, ...]]]) -> str:
    """Return which embedding is best at the task at each width."""

    def mean(path: tuple[str, ...], width: str) -> float:
        values = []
        for line in kept:
            value: Any = line
            for step in (*path, width, "task"):
                value = value[step]
            values.append(value)
        return statistics.mean(values)

    return "; ".join(f"{width} numbers: {max(ways, key=lambda way: mean(way[1], str(width)))[0]}" for width in WIDTHS)  # fmt: skip


def main() -> None:
    """Measure, keep, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument(
        "--keep", action="store_true", help="keep the figures in results/, and write the page"
    )
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if not given.page:
        measure(given.folder)
        if given.keep:
            KEPT.write_text((given.folder / "compressed.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    PAGE.write_text(render(lines(KEPT)), encoding="utf-8") if given.keep or given.page else None


if __name__ == "__main__":
    main()
