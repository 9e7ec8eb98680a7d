"""What a split encoder costs, and what it saves: backbone and head as two graphs beside one (`retrieval export --split`).

The same model is exported twice, and both bundles encode the same images in turn, one thread. A ratio is of CPU times, of neighbouring
runs; the median of all and its middle half are kept. Then features that were kept go through the head alone. Run by hand:

    python benchmarks/split.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from retrieval.export.export_model import export_model
from retrieval.export.photos import example_photos
from retrieval.host.create import create
from retrieval.model.model import Model, build_head
from retrieval.serving.bundle import Bundle

RESULTS = Path(__file__).parent / "results"
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "EfficientNet-Lite0, 224 px, 128 d": ("core.efficientnet_lite0", {}),
    "EfficientNet-Lite0, 64 px, 128 d": ("core.efficientnet_lite0", {"size": 64}),
    "convnet, 28 px, 128 d": ("core.convnet", {"size": 28}),
}
BATCHES = (1, 32)


def seconds(work: Callable[[], Any]) -> float:
    """Return the CPU time of a call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def quartiles(values: list[float]) -> list[float]:
    """Return the median and the middle half's bounds."""
    return [float(each) for each in np.quantile(values, [0.5, 0.25, 0.75])]


def compared(one: Bundle, two: Bundle, pixels: Any, runs: int) -> dict[str, Any]:
    """Return what one batch costs, encoder of one graph and split one in turn."""
    single: list[float] = []
    split: list[float] = []
    for bundle in (one, two):
        for _ in range(3):
            bundle.encode(pixels)
    for number in range(runs):
        order = ((one, single), (two, split))
        for bundle, times in order if number % 2 else order[::-1]:
            times.append(seconds(lambda bundle=bundle: bundle.encode(pixels)))  # type: ignore[misc]
    features = two.features(pixels)
    head = [seconds(lambda: two.encode_features(features)) for _ in range(runs)]
    return {
        "batch": len(pixels),
        "runs": runs,
        "single": quartiles(single),
        "ratio": quartiles([b / a for a, b in zip(single, split, strict=True)]),
        "head": quartiles(head),
        "equal": float(np.abs(one.encode(pixels).vector - two.encode(pixels).vector).max()),
    }


def measure(budget: float) -> dict[str, Any]:
    """Return all figures."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (backbone_name, given) in ENCODERS.items():
            torch.manual_seed(0)
            backbone = create("backbone", backbone_name, **given)
            model = Model(backbone, build_head(backbone.features, 128))
            assert backbone.preprocessing is not None
            items = example_photos(backbone.preprocessing)
            opened = []
            for split in (False, True):
                place = Path(folder, f"{len(rows)}-{split}")
                export_model(model, items, place, name=name, split=split)
                opened.append(Bundle.open(place, threads=1, device="cpu"))
            for batch in BATCHES:
                once = seconds(lambda: opened[0].encode(items[:batch]))  # noqa: B023
                runs = int(np.clip(budget / (2 * once), 20, 2000))
                rows.append({"encoder": name, **compared(opened[0], opened[1], items[:batch], runs)})
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    return {"machine": machine, "onnxruntime": onnxruntime.__version__, "rows": rows}


def render(raw: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# A split encoder",
        "",
        f"`python benchmarks/split.py`. {raw['machine']}, ONNX Runtime {raw['onnxruntime']}, one thread, a machine shared with other work. CPU "
        "time; ratios are of neighbouring runs: median, and the middle half of all.",
        "",
        "| encoder | batch | runs | one graph, ms | split / one graph | head alone / one graph | largest difference of a vector |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in raw["rows"]:
        middle, low, high = row["ratio"]
        lines.append(
            f"| {row['encoder']} | {row['batch']} | {row['runs']:,} | {1000 * row['single'][0]:.2f} | {middle:.3f} ({low:.3f} to {high:.3f}) | "
            f"1 / {row['single'][0] / row['head'][0]:,.0f} | {row['equal']:.0e} |"
        )
    worst = max(raw["rows"], key=lambda row: row["ratio"][0])
    lite = [row for row in raw["rows"] if row["encoder"].startswith("EfficientNet-Lite0, 224")]
    most = max(row["ratio"][0] for row in lite)
    least = min(row["single"][0] / row["head"][0] for row in lite)
    lines += [
        "",
        f"- A split costs most with {worst['encoder']} (batch {worst['batch']}): {100 * (worst['ratio'][0] - 1):+.1f} % CPU time in the median. With "
        f"EfficientNet-Lite0 on 224 px it is {100 * (most - 1):+.1f} % at most.",
        f"- Kept features of EfficientNet-Lite0 on 224 px go through another head in less than 1/{int(least):,} of the CPU time that their images take, decoding "
        "not counted.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--budget", type=float, default=20.0, help="CPU seconds for one row")
    raw = measure(arguments.parse_args().budget)
    (RESULTS / "raw" / "split.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "split.md").write_text(render(raw), encoding="utf-8")
    print(render(raw))


if __name__ == "__main__":
    main()
