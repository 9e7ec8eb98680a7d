"""DAMML's distances: memory of many pairs, what candidates keep of the exhaustive ranking, torch beside ONNX, cost of rescoring.

A small convolutional net is trained on Fashion-MNIST's classes 0–4 with the discriminator as it comes, with a μ that makes its
weights sharp, and with even weights; 10,000 images of the classes 5–9 are then exported, indexed and searched for as a server
does it. Goes on where it stopped:  python benchmarks/daml_combiner.py --work FOLDER --output benchmarks/results/daml_combiner.md
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

PAIRS = 10_000
SEARCHED = 500
MODELS = {
    "discriminator (μ = .02, ρ = 5)": ["combiner.name=daml.discriminator"],
    "discriminator, sharp (μ = 3, ρ = 5, start 2)": [
        "combiner.name=daml.discriminator",
        "combiner.mu=3.0",
        "combiner.start=2.0",
    ],
    "uniform, mean of distances": ["combiner.name=daml.uniform"],
}
RECIPE = """
name = "damml"
[data]
name = "core.fashion_mnist"
[split]
by = "class"
test = ["5", "6", "7", "8", "9"]
validation = 0.0
[sampler]
classes = 5
items = 24
batches = 50
[backbone]
name = "core.convnet"
size = 28
width = 16
[head]
embedding_size = 64
[combiner]
metrics = 4
[loss]
name = "daml.triplet"
[train]
epochs = 3
channels_last = true
precision = "bf16"
"""


def memory(pairs: int, width: int, hidden: int, backward: bool) -> dict[str, float]:
    """Measure the distances of pairs × pairs codes in this process: run in one of its own."""
    from retrieval_daml import Discriminator

    torch.manual_seed(0)
    combiner = Discriminator(64, width, 4, hidden)
    torch.nn.init.normal_(combiner.out.weight, std=hidden**-0.5)
    with torch.no_grad():
        codes = combiner.build_head(64)(torch.randn(pairs, 64))
    codes.requires_grad_(backward)
    started = time.process_time()
    with torch.set_grad_enabled(backward):
        distances = combiner.compute_mat(codes, codes)
    forward = time.process_time() - started
    if backward:
        distances.mean().backward()
        assert codes.grad is not None and codes.grad.isfinite().all()
    # not ru_maxrss, which a new process takes over from the one that started it
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) / 2**20
    return {"peak": peak, "forward": forward, "all": time.process_time() - started}


def measured(work: Path, name: str, make: Any) -> Any:
    """Return a figure that a former call kept, or make it."""
    file = work / f"{name}.json"
    if not file.is_file():
        file.write_text(json.dumps(make()))
    return json.loads(file.read_text())


def apart(*arguments: object) -> dict[str, float]:
    """Run `memory` in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory", *map(str, arguments)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def trained(folder: Path, overrides: list[str]) -> Path:
    """Train, export and index one model."""
    from retrieval.export.export_run import export_run
    from retrieval.recipe.read import read_recipe
    from retrieval.run.open import load_run
    from retrieval.serving.index.creating import create_index
    from retrieval.training.trainer import train

    recipe = folder.with_suffix(".toml")
    recipe.write_text(RECIPE)
    if not (folder / "summary.json").is_file():
        made = read_recipe(recipe, overrides)
        last = folder / "checkpoints" / "last.safetensors"
        train(folder, made, resume=last.is_file(), report=print)
    run = load_run(folder)
    if not (folder / "bundle").is_dir():
        export_run(run)
    photos = folder.parent / "images"
    chosen = run.splits.query[np.linspace(0, len(run.splits.query) - 1, PAIRS).round().astype(int)]
    if not photos.is_dir():
        partial = photos.with_suffix(".partial")
        partial.mkdir(exist_ok=True)
        for i in chosen:
            Image.fromarray(np.asarray(run.dataset[int(i)])).save(partial / f"{i:05d}.png")
        partial.rename(photos)
    if not (folder / "index").is_dir():
        create_index(folder / "index", folder / "bundle", [photos], backend="flat")
    return folder


def served(folder: Path) -> dict[str, Any]:
    """Search the index for some of its images, with few candidates and with all, and rank them with torch too."""
    from retrieval.data.encode import encode
    from retrieval.run.open import load_run
    from retrieval.serving.index.index import open_index

    run = load_run(folder)
    log = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    combiner = run.model.combiner
    assert combiner is not None
    files = sorted((folder.parent / "images").iterdir())
    rows = np.asarray([int(file.stem) for file in files])
    codes = encode(run.model, run.dataset, rows)
    asked = np.linspace(0, len(rows) - 1, SEARCHED).round().astype(int)
    found: dict[str, Any] = {
        "gamma_max": log.get("gamma_max"),
        "loads": [v for k, v in log.items() if "load_" in k],
    }
    with open_index(folder / "index", threads=1) as index, torch.no_grad():
        rescorer = index.bundle.manifest.rescorer
        assert rescorer is not None
        found["manifest"], found["default"] = rescorer.overlap, rescorer.candidates
        overlaps: dict[int, list[float]] = {50: [], 200: [], 500: []}
        same, wider, gaps = [], [], []
        for row in asked:
            pixels = np.stack([index.bundle.preprocess(files[row])])
            encoded = index.bundle.encode(pixels)
            exhaustive = index.search(encoded, 10, candidates=len(rows))[0]
            truth = [hit.id for hit in exhaustive]
            for number, kept in overlaps.items():
                keys = [hit.id for hit in index.search(encoded, 10, candidates=number)[0]]
                kept.append(len(set(keys) & set(truth)) / 10)
            distances = combiner.compute_mat(codes[row : row + 1], codes)[0]
            order = distances.argsort(stable=True)[:10].tolist()
            expected = [files[i].name for i in order]
            same.append([Path(key).name for key in truth] == expected)
            wider.append(len({Path(key).name for key in truth} & set(expected)) / 10)
            places = {file.name: i for i, file in enumerate(files)}
            gaps += [abs(hit.distance - distances[places[Path(hit.id).name]].item()) for hit in exhaustive]
        found["overlap"] = {str(number): statistics.mean(kept) for number, kept in overlaps.items()}
        found["same_order"], found["same_ten"], found["gap"] = (
            statistics.mean(same),
            statistics.mean(wider),
            max(gaps),
        )
        found["rescore_ms"] = rescoring(index.bundle, codes.shape[1])
    return found


def rescoring(bundle: Any, width: int) -> float:
    """Return the median milliseconds of one call with 1,000 candidates."""
    rng = np.random.default_rng(0)
    query, items = (rng.normal(size=(rows, width)).astype(np.float32) for rows in (1, 1000))
    took = []
    for _ in range(60):
        started = time.perf_counter()
        bundle.rescore(query, items)
        took.append(time.perf_counter() - started)
    return statistics.median(took[10:]) * 1000


def paper_size(folder: Path) -> float:
    """Return the same for the paper's sizes: features 1,024, embedding 512, hidden layer 1,024, K = 4."""
    from retrieval.export.export_model import export_model
    from retrieval.host.plugins import load_plugins
    from retrieval.model.model import Model
    from retrieval.serving.bundle import Bundle

    from retrieval_daml import Discriminator

    torch.manual_seed(0)
    combiner = Discriminator(1024, 512, 4, 1024)
    backbone = load_plugins().build("backbones", {"name": "core.features"}, {"features": 1024})
    model = Model(backbone, combiner.build_head(1024), combiner)
    export_model(
        model,
        np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32),
        folder,
        name="paper",
        replace=True,
    )
    return rescoring(Bundle.open(folder, threads=1), 512 + 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", nargs=4, type=int, metavar=("PAIRS", "WIDTH", "HIDDEN", "BACKWARD"))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        pairs, width, hidden, backward = options.memory
        print(json.dumps(memory(pairs, width, hidden, bool(backward))))
        return
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    results = {
        name: measured(work, f"served-{i}", lambda i=i, o=overrides: served(trained(work / f"model-{i}", o)))
        for i, (name, overrides) in enumerate(MODELS.items())
    }
    paper_ms = measured(work, "paper", lambda: paper_size(work / "paper-bundle"))
    sizes = {
        f"{PAIRS:,} × {PAIRS:,}, D = 64, H = 128": (PAIRS, 64, 128, 1),
        "1,000 × 1,000, D = 512, H = 1,024 (the paper's)": (1000, 512, 1024, 1),
    }
    memories = {
        name: measured(work, f"memory-{s[0]}-{s[2]}", lambda s=s: apart(*s)) for name, s in sizes.items()
    }
    text = report(results, paper_ms, memories)
    print(text)
    if options.output:
        temporary = options.output.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(options.output)


def report(results: dict[str, Any], paper_ms: float, memories: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "# DAMML: distances and serving",
        "",
        f"`python benchmarks/daml_combiner.py --work FOLDER`; one thread, torch {torch.__version__}, {platform.machine()}, no GPU.",
        "",
        "## Memory and time of many pairs",
        "",
        "K = 4, mean distance and its gradients to codes and discriminator, in a process of its own (torch included; a loss whose gradient differs from pair to pair adds the matrix of it, .37 GB); a (Q, R, H) tensor would take "
        f"{PAIRS * PAIRS * 128 * 4 / 2**30:.0f} GB. Aim: 2 GB for {PAIRS:,} × {PAIRS:,}.",
        "",
        "| pairs | peak of the process, GB | forward, CPU s | forward and backward, CPU s |",
        "| --- | --- | --- | --- |",
    ]
    for name, row in memories.items():
        lines.append(f"| {name} | {row['peak']:.2f} | {row['forward']:.1f} | {row['all']:.1f} |")
    lines += [
        "",
        "## Candidates and the exhaustive ranking",
        "",
        f"Fashion-MNIST, classes 0–4 train (3 epochs, `daml.triplet`, K = 4, D = 64, H = 128), {PAIRS:,} images of classes 5–9 in a flat index, "
        f"{SEARCHED} of them searched for (the image itself is among the ten). Overlap: the share of the exhaustive first ten that C candidates give. Aim: .95 at "
        "500.",
        "",
        "| | mean max γ | loads | C = 50 | 200 | 500 | default C | manifest at 50, 200, 500 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in results.items():
        overlap, own = row["overlap"], row["manifest"]
        loads = ", ".join(f"{v:.2f}" for v in row["loads"]) or "–"
        sharp = "–" if row["gamma_max"] is None else f"{row['gamma_max']:.2f}"
        lines.append(
            f"| {name} | {sharp} | {loads} | {overlap['50']:.3f} | {overlap['200']:.3f} | {overlap['500']:.3f} | {row['default']} | "
            f"{own['50']:.3f}, {own['200']:.3f}, {own['500']:.3f} |"
        )
    lines += [
        "",
        "## torch beside ONNX, and the cost of rescoring",
        "",
        "The exhaustive first ten through image file, `encoder.onnx`, index and `rescorer.onnx`, beside torch's on the same images.",
        "",
        "| | same ten, in order | items of the ten shared | largest gap of distances | 1,000 candidates in one call, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in results.items():
        lines.append(
            f"| {name} | {row['same_order']:.3f} | {row['same_ten']:.4f} | {row['gap']:.1e} | {row['rescore_ms']:.2f} |"
        )
    lines += [
        "",
        f"With the paper's sizes (embedding 512, hidden layer 1,024) the call takes {paper_ms:.1f} ms.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
