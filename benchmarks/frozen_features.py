"""Features of a frozen backbone on a CPU: `backbone_features` beside ONNX Runtime image by image, and beside torch.

    python benchmarks/frozen_features.py            # writes results/frozen_features.md

Each contestant is a process of its own on one core, which says how much CPU time the features took, without imports and without building the net. The
contestants are run in turn, round after round; the least of each counts.

- `bare`: a graph for one image in ONNX Runtime, image by image with preprocessing: decode, resize, run. What the target is measured by. (A bundle's graph, for any
  number of images, takes as long: EfficientNet-Lite0 11.9 ms an image on the same core, both.)
- `features`: `retrieval.data.features.backbone_features`, all of it: graph made and compared with torch, features written to the cache.
- `again`: the same, when the cache has them.
- `torch`: torch, as the backbone would be called for a batch of 128, in the order of the items; the C library's memory as the system sets it.
- `torch, memory kept`: the same with `keep_large_blocks`, which is what `backbone_features` does where no graph serves.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "frozen_features.md"
CONTESTANTS = ("bare", "features", "again", "torch", "torch, memory kept")
BATCH = 128
SHAPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "JPEG photos, 500 px, EfficientNet-Lite0": ("core.efficientnet_lite0", {"pretrained": False}, 128),
    "JPEG photos, 1,500 px, EfficientNet-Lite0": ("core.efficientnet_lite0", {"pretrained": False}, 128),
    "Fashion-MNIST's size, 28 px, core.convnet": ("core.convnet", {}, 21_500),
    "28 px, one wide linear layer (torch at its best)": ("wide", {}, 21_500),
}


def dataset(shape: str, number: int, folder: Path) -> Any:
    """Return the items: patches of scikit-learn's two photographs as JPEG files, or as arrays of 28 px."""
    import numpy as np
    from PIL import Image
    from retrieval.data.datasets import ArrayDataset, FileDataset
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    if "28 px" in shape:
        small = [image.convert("L").resize((28 * 12, 28 * 8)) for image in photographs]
        pixels = np.stack([np.asarray(small[i % 2]) for i in range(2)])
        tops, lefts = rng.integers(0, 28 * 7, number), rng.integers(0, 28 * 11, number)
        items = np.stack(
            [pixels[i % 2, t : t + 28, x : x + 28] for i, (t, x) in enumerate(zip(tops, lefts, strict=True))]
        )
        return ArrayDataset(items, ["a"] * number)
    side = 1500 if "1,500" in shape else 500
    place = folder / f"{side}"
    files = [place / f"{i}.jpg" for i in range(number)]
    if not place.exists():
        place.mkdir()
        for i, file in enumerate(files):
            left, top = int(rng.integers(0, 240)), int(rng.integers(0, 100))
            patch = photographs[i % 2].crop((left, top, left + 400, top + 300))
            patch.resize((side, side * 3 // 4), Image.Resampling.BICUBIC).save(file, quality=90)
    return FileDataset(files, ["a"] * number)


def built(name: str, parameters: dict[str, Any]) -> Any:
    """Return the model: a backbone with nothing after it."""
    import torch
    from retrieval import Backbone, Preprocessing
    from retrieval.export.export_backbone import named_backbone
    from retrieval.host.plugins import load_plugins
    from retrieval.model.model import Model
    from torch import nn

    class Wide(Backbone):
        features = 1024
        preprocessing = Preprocessing((28, 28), 1)

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(784, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.flatten(1)).relu()

    torch.manual_seed(0)
    backbone = Wide() if name == "wide" else named_backbone(load_plugins(()), name, parameters, True)
    return Model(backbone, nn.Identity()).eval()


def bare(model: Any, items: Any) -> Callable[[], Any]:
    """Return what decodes, resizes and encodes image by image with the graph that export makes."""
    import numpy as np
    import torch
    from retrieval.data.raw import RawInputs
    from retrieval.model.graph import OPSET, FeatureEncoder, Signature, ready, session, to_onnx

    raw = RawInputs(items, model.preprocessing, budget=0)
    first = raw.batch(np.arange(2))
    shape = (1, *first.shape[1:])
    signature = Signature({"input": shape}, {"features": (1, model.backbone.features)})
    with ready(model):
        module = FeatureEncoder(model).eval()
        proto = to_onnx(
            module, (torch.from_numpy(first[:1]),), signature, opset=OPSET, exporter="torchscript"
        )
    graph = session(proto.SerializeToString(), threads=1)

    def run() -> Any:
        return [graph.run(["features"], {"input": raw.batch(np.array([i]))})[0] for i in range(len(items))]

    return run


def contestant(name: str, shape: str, folder: Path) -> dict[str, float]:
    """Run one contestant in this process; return CPU seconds an item, the system's share, and the largest memory."""
    import resource

    import numpy as np
    import torch
    from retrieval.data.encode import evaluating
    from retrieval.data.features import backbone_features
    from retrieval.data.loading import inputs
    from retrieval.data.onnx_features import OnnxBackbone
    from retrieval.serving.memory import keep_large_blocks

    made = {"ms": 0.0}
    agreed = OnnxBackbone._agreed

    def timed(net: OnnxBackbone) -> Any:
        start = time.process_time()
        found = agreed(net)
        made["ms"] = (time.process_time() - start) * 1000
        return found

    OnnxBackbone._agreed = timed  # type: ignore[method-assign]
    torch.set_num_threads(1)
    backbone, parameters, number = SHAPES[shape]
    items, model = dataset(shape, number, folder), built(backbone, parameters)
    if name == "bare":
        work = bare(model, items)
    elif name in ("features", "again"):
        work = lambda: backbone_features(model, items, torch.device("cpu"), BATCH)  # noqa: E731
    else:
        if name == "torch, memory kept":
            keep_large_blocks()

        def work() -> Any:
            with evaluating(model):
                chosen = np.arange(len(items))
                return [model.features(x).numpy() for x in inputs(items, chosen, model.preprocessing, BATCH)]

    began, before = time.perf_counter(), os.times()
    work()
    after = os.times()
    user, system = after.user - before.user, after.system - before.system
    return {
        "ms": ((user + system) * 1000 - made["ms"]) / number,
        "graph": made["ms"],
        "kernel": system / (user + system or 1),
        "wall": (time.perf_counter() - began) / number * 1000,
        "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def once(name: str, shape: str, folder: Path, cache: Path) -> dict[str, float]:
    """Run one contestant in a process of its own."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "RETRIEVAL_CACHE": str(cache),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--contestant", name, "--shape", shape, "--folder", str(folder)],
        check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(found: dict[str, dict[str, list[dict[str, float]]]], rounds: int, loads: Sequence[float]) -> str:
    """Return the page."""
    import onnxruntime
    import torch

    lines = [
        "# Features of a frozen backbone",
        "",
        f"`python benchmarks/frozen_features.py --rounds {rounds}`. CPU time an image on one core, the least of the rounds: each contestant in a process of",
        "its own, in turn. *bare* is the exported graph in ONNX Runtime, image by image with preprocessing; *features* is all that training does, with the",
        "cache written; making the graph and comparing it with torch, whatever the number of items, stands in a column of its own; *again* reads the cache.",
        "",
    ]
    for shape, contestants in found.items():
        least = {name: min(each, key=lambda one: one["ms"]) for name, each in contestants.items()}
        base = least["bare"]["ms"]
        lines += [
            f"## {shape}, {SHAPES[shape][2]:,} items",
            "",
            "| | CPU, ms an image | × bare | of it in the kernel | graph, s | memory, MB |",
            "| --- | --- | --- | --- | --- | --- |",
            *(
                f"| {name} | {one['ms']:.3f} | {one['ms'] / base:.2f} | {one['kernel']:.0%} | {one['graph'] / 1000:.1f} | {one['MB']:,.0f} |"
                for name, one in least.items()
            ),
            "",
        ]
    lines += [
        f"- processors: {os.cpu_count()} ({platform.machine()}, {instructions()})",
        f"- torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}, Python {platform.python_version()}",
        f"- load average: {min(loads):.1f} to {max(loads):.1f}",
    ]
    return "\n".join(lines) + "\n"


def instructions() -> str:
    """Return the vector instructions that the processor has."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return "unknown"
    return ", ".join(each for each in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if each in flags)


def main() -> None:
    """Measure all contestants in turn and write the page; or one, for the process above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=SHAPES, action="append", help="shapes; all by default")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        print(json.dumps(contestant(options.contestant, options.shape, options.folder)))
        return
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    loads = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in options.only or SHAPES:
            dataset(shape, SHAPES[shape][2], folder)
            found[shape] = {each: [] for each in CONTESTANTS}
            for number in range(options.rounds):
                cache = folder / f"cache {number}"
                for each in CONTESTANTS:
                    found[shape][each].append(once(each, shape, folder, cache))
                    loads.append(os.getloadavg()[0])
                    print(shape, each, found[shape][each][-1], flush=True)
    page = report(found, options.rounds, loads)
    if options.only:
        print(page)
    else:
        RESULTS.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
