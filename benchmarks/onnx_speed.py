"""ONNX Runtime against torch eager for exported encoders, and what fp16 and int8 gain and cost.

    python benchmarks/onnx_speed.py                    # writes results/raw/onnx.json, and results/onnx.md from it
    python benchmarks/onnx_speed.py --only variants    # measures one half; the other one stays as it is kept

Both run in this process, in turns, on the same raw pixels, with the same number of threads; medians of many rounds, as wall
time and as CPU time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # as the command line does; counts only before torch is imported

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from retrieval.export.export_model import export_model
from retrieval.host.plugins import load_plugins
from retrieval.model.contracts import Backbone
from retrieval.model.model import Model, build_head
from retrieval.serving.images import from_array
from retrieval.serving.manifest import Manifest
from retrieval.serving.runtime import load_onnxruntime
from torch import nn

from onnx_report import render

BATCHES = (1, 8, 32)
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "convnet, 28 px, 64 d": ("core.convnet", {}),
    "resnet18, 224 px": ("core.torchvision", {"model": "resnet18"}),
    "mobilenetv3_small_050, 224 px": ("core.timm", {"model": "mobilenetv3_small_050", "size": 224}),
    "EfficientNet-Lite0, 224 px": ("core.efficientnet_lite0", {"pretrained": False}),
}


def photographs(backbone: Backbone, number: int, seed: int = 0) -> NDArray[np.uint8]:
    """Patches of scikit-learn's two photographs, of many sizes, through the backbone's preprocessing."""
    from sklearn.datasets import load_sample_images

    assert backbone.preprocessing is not None
    rng = np.random.default_rng(seed)
    images = load_sample_images().images
    found = []
    for index in range(number):
        image, side = images[index % 2], int(rng.integers(60, 400))
        y, x = rng.integers(0, image.shape[0] - side), rng.integers(0, image.shape[1] - side)
        found.append(backbone.preprocessing(from_array(image[y : y + side, x : x + side])))
    return np.stack(found)


def session(path: Path, threads: int) -> Any:
    """A session as bundles open it."""
    runtime = load_onnxruntime()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def in_turns(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, tuple[float, float]]:
    """Return the median wall and CPU time of each call in milliseconds, one after the other, round by round."""
    for call in calls.values():
        call()
        call()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(times))]) < 5:
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: (1e3 * statistics.median(w for w, _ in seen), 1e3 * statistics.median(c for _, c in seen))
        for name, seen in times.items()
    }


def torch_call(model: Model, pixels: NDArray[np.uint8], channels_last: bool = False) -> Callable[[], Any]:
    """torch eager in inference mode, from raw pixels to vectors."""
    tensor = torch.from_numpy(pixels)

    def call() -> Any:
        model.channels_last = channels_last
        with torch.inference_mode():
            return model(tensor)[1]

    return call


def onnx_call(opened: Any, pixels: NDArray[np.uint8]) -> Callable[[], Any]:
    """ONNX Runtime, from raw pixels to vectors."""
    return lambda: opened.run(["vector"], {"input": pixels})


def with_statistics(model: Model, pixels: NDArray[np.uint8]) -> Model:
    """Two passes in training mode: batch norm as a trained network has it."""
    model.train()
    with torch.no_grad():
        for _ in range(2):
            model(torch.from_numpy(pixels))
    return model.eval()


def encoders(folder: Path, seconds: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure encoders, batches and threads; and torch's two exporters."""
    plugins = load_plugins()
    rows: list[dict[str, Any]] = []
    exports: list[dict[str, Any]] = []
    for title, (name, arguments) in NETWORKS.items():
        torch.manual_seed(0)
        backbone = plugins.build("backbones", {"name": name, **arguments}, {})
        pixels = photographs(backbone, 32)
        model = with_statistics(Model(backbone, build_head(backbone.features, 64)), pixels)
        made = {}
        for exporter in ("dynamo", "torchscript"):
            target = folder / f"{name}-{exporter}"
            started = time.process_time()
            manifest = export_model(model, pixels, target, name=name, exporter=exporter)
            made[exporter] = {
                "encoder": title,
                "exporter": exporter,
                "nodes": len(onnx.load(target / "encoder.onnx").graph.node),
                "export_cpu": time.process_time() - started,
                "difference": manifest.verified.largest_difference,
            }
        for threads in (1, 2):
            torch.set_num_threads(threads)
            opened = {
                exporter: session(folder / f"{name}-{exporter}" / "encoder.onnx", threads)
                for exporter in made
            }
            if threads == 1:
                alone = in_turns({e: onnx_call(one, pixels[:1]) for e, one in opened.items()}, seconds)
                exports += [{**row, "run": alone[exporter]} for exporter, row in made.items()]
            for batch in BATCHES:
                part = np.ascontiguousarray(pixels[:batch])
                calls = {
                    "eager": torch_call(model, part),
                    "channels_last": torch_call(model, part, channels_last=True),
                    "onnx": onnx_call(opened["dynamo"], part),
                }
                rows.append(
                    {"encoder": title, "threads": threads, "batch": batch, **in_turns(calls, seconds)}
                )
                print(rows[-1], flush=True)
    return rows, exports


def trained_digits() -> tuple[Model, NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]:
    """A convnet trained on digits 0–4, with digits 5–9 to measure on and training digits to calibrate on."""
    from pytorch_metric_learning.losses import MultiSimilarityLoss
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    data = load_digits()
    backbone = load_plugins().build("backbones", {"name": "core.convnet"}, {})
    images = (data.images * (255 / 16)).astype(np.uint8)
    pixels = np.stack([backbone.preprocessing(from_array(image)) for image in images])
    train = np.flatnonzero(data.target < 5)
    test = np.flatnonzero(data.target >= 5)[:512]
    model = Model(backbone, build_head(backbone.features, 64))
    loss, optimiser = MultiSimilarityLoss(), torch.optim.AdamW(model.parameters(), 1e-3)
    rng = np.random.default_rng(0)
    for _ in range(100):
        rows = rng.choice(train, 128, replace=False)
        value = loss(model(torch.from_numpy(pixels[rows]))[1], torch.from_numpy(data.target[rows]))
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
    calibration = pixels[rng.choice(train, 512, replace=False)]
    return model.eval(), pixels[test], data.target[test], calibration


def fashion_lite0(
    number: int,
) -> tuple[Model, NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]] | None:
    """ImageNet's EfficientNet-Lite0, untrained here, on Fashion-MNIST; None without its weights or the images."""
    plugins = load_plugins()
    try:
        backbone = plugins.build("backbones", {"name": "core.efficientnet_lite0"}, {})
        data = plugins.build("datasets", {"name": "core.fashion_mnist"}, {})
    except Exception as fault:
        print(f"\nEfficientNet-Lite0 with its weights on Fashion-MNIST was left out: {fault}")
        return None
    labels = np.unique(np.asarray(data.labels), return_inverse=True)[1]
    rng = np.random.default_rng(0)
    rows = rng.choice(60_000, 2 * number, replace=False)
    pixels = np.stack([backbone.preprocessing(from_array(data.arrays[row])) for row in rows])
    head = nn.Sequential(nn.Identity(), build_head(1, 1)[-1])
    model = Model(backbone, head).eval()
    return model, pixels[:number], labels[rows[:number]], pixels[number:]


def variants(folder: Path, seconds: float, number: int) -> list[dict[str, Any]]:
    """Measure speed and drift of fp16 and int8."""
    rows = []
    cases = {
        "convnet, 28 px, digits": trained_digits(),
        "EfficientNet-Lite0, Fashion-MNIST": fashion_lite0(number),
    }
    torch.set_num_threads(1)
    for title, case in cases.items():
        if case is None:
            continue
        model, items, labels, calibration = case
        target = folder / title.split(",")[0]
        manifest: Manifest = export_model(
            model,
            items,
            target,
            name=title,
            labels=labels,
            calibration=calibration,
            variants=["fp16", "int8"],
            allow_drift=True,  # how far they drift is what is measured
        )
        opened = {"float32": session(target / "encoder.onnx", 1)}
        opened |= {name: session(target / entry.file, 1) for name, entry in manifest.variants.items()}
        seen = {
            batch: in_turns({name: onnx_call(one, items[:batch]) for name, one in opened.items()}, seconds)
            for batch in BATCHES
        }
        for name in opened:
            entry = manifest.variants.get(name)
            file = manifest.encoder if entry is None else entry.file
            before = manifest.variants["int8"].recall_at_1.before
            rows.append(
                {
                    "encoder": title,
                    "items": len(items),
                    "calibrated": len(calibration),
                    "variant": name,
                    "mb": manifest.files[file].bytes / 1e6,
                    "cosine_mean": 1.0 if entry is None else entry.cosine.mean,
                    "cosine_min": 1.0 if entry is None else entry.cosine.min,
                    "recall_at_1": before if entry is None else entry.recall_at_1.after,
                    "times": [seen[batch][name] for batch in BATCHES],
                }
            )
            print(rows[-1], flush=True)
    return rows


def machine() -> str:
    """Return the machine as a line."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        model = next(
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    return f"{model}, {os.cpu_count()} cores, {platform.system()}"


def main() -> None:
    from retrieval.export.export_model import bundle_versions

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument(
        "--items", type=int, default=256, help="held-out and calibration items of EfficientNet-Lite0"
    )
    parser.add_argument("--only", choices=["encoders", "variants"], help="one of the two halves")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "onnx.md")
    options = parser.parse_args()
    raw = options.out.parent / "raw" / f"{options.out.stem}.json"
    kept: dict[str, Any] = {"encoders": [], "exporters": [], "variants": [], "load": {}}
    if options.only and raw.exists():
        kept = json.loads(raw.read_text())
    load = f"{os.getloadavg()[0]:.1f}"
    kept |= {"machine": machine(), "versions": bundle_versions()}
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "variants":
            kept["encoders"], kept["exporters"] = encoders(Path(folder), options.seconds)
            kept["load"]["encoders"] = load
        if options.only != "encoders":
            kept["variants"] = variants(Path(folder), options.seconds, options.items)
            kept["load"]["variants"] = load
    raw.parent.mkdir(parents=True, exist_ok=True)
    kept["load"] = {"encoders": "–", "variants": "–", **kept["load"]}
    for path, text in ((raw, json.dumps(kept, indent=1, ensure_ascii=False)), (options.out, render(kept))):
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


if __name__ == "__main__":
    main()
