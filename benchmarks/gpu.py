"""One table of what a GPU does: training, losses, encoding and search, each beside the same by hand on the same card.

    python benchmarks/gpu.py --output benchmarks/results/gpu.md          on a machine with a CUDA device
    python benchmarks/gpu.py --cpu                                       all of it, tiny, on a CPU: that it runs

By hand is: torch's own loop, pytorch-metric-learning's losses, ONNX Runtime's session with values bound to the device, FAISS's index.
Exact search by ONNX Runtime ("exact, float16") stands beside FAISS's, in float32, and the CPU's; its answers must be the CPU's to the last bit.
Contestants take turns; figures are medians. Vectors are clustered (1,000 centres); recall is at 10, against FAISS's exact search.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from pytorch_metric_learning import losses as pml
from retrieval.export.export_model import export_model
from retrieval.host.create import create
from retrieval.model.model import Model, build_head
from retrieval.recipe.read import check_recipe
from retrieval.run.build import Objective
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.backends import make_backend
from retrieval.serving.index.on_gpu import device as faiss_device
from retrieval.serving.index.on_gpu import gpus_found
from retrieval.serving.providers import checked_device, start
from retrieval.serving.runtime import load_faiss, load_onnxruntime
from retrieval.serving.store.search import nearest
from retrieval.training.batch import moved
from retrieval.training.step import Step

Row = tuple[str, str, str, str]
LOSSES = {
    "pml.multi_similarity": pml.MultiSimilarityLoss,
    "pml.circle": pml.CircleLoss,
    "pml.contrastive": pml.ContrastiveLoss,
    "pml.sup_con": pml.SupConLoss,
}
BACKENDS = ("flat", "ivf", "ivfpq", "cagra")


def timed(contestants: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Return each contestant's median seconds; they take turns, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, work in contestants.items():
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in seconds.items()}


def network(side: int) -> Model:
    """Return a ResNet-50 (of images 64 and more) or a small network, with a head of 128."""
    torch.manual_seed(0)
    backbone = create("backbone", "core.torchvision", model="resnet50", size=side) if side >= 64 else create("backbone", "core.convnet", size=side, channels=3)  # fmt: skip
    return Model(backbone, build_head(backbone.features, 128))


def training(device: str, tiny: bool) -> Iterator[Row]:
    """Images a second of a step, beside torch's own loop."""
    side, size, steps = (16, 16, 2) if tiny else (224, 256, 10)
    precisions = ("no", "bf16") if device == "cpu" else ("no", "bf16", "fp16")
    labels = torch.arange(size) // 4
    pixels = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8)
    for precision in precisions:
        accelerator = _accelerator(device, precision)
        contestants: dict[str, Callable[[], Any]] = {}
        for last in (False, True):
            recipe = check_recipe(
                {
                    "data": {"name": "core.digits"}, "backbone": {"name": "core.convnet"}, "loss": {"name": "pml.multi_similarity"},
                    "optimizer": {"name": "SGD", "lr": 0.01}, "train": {"channels_last": last},
                }
            )  # fmt: skip
            model = network(side).to(device)
            model.channels_last = last
            if last:
                model.backbone.to(memory_format=torch.channels_last)
            step = Step(
                model,
                Objective(create("loss", "pml.multi_similarity").to(device), None),
                recipe,
                recipe.phases[0],
                1,
                accelerator,
            )
            step.set_modes()

            def ours(step: Step = step) -> None:
                for _ in range(steps):
                    step(*moved(pixels, labels, torch.device(device)))

            contestants[f"ours{', channels last' if last else ''}"] = ours
        contestants["torch's own loop"] = _loop(device, precision, side, pixels, labels, steps)
        for name, seconds in timed(contestants, device, 1 if tiny else 5).items():
            yield (
                "training, images/s",
                f"{name}, {precision}",
                f"{size} × {side}²",
                f"{steps * size / seconds:,.0f}",
            )


def _accelerator(device: str, precision: str) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    return Accelerator(cpu=device == "cpu", mixed_precision=precision)


def _loop(
    device: str, precision: str, side: int, pixels: torch.Tensor, labels: torch.Tensor, steps: int
) -> Callable[[], None]:
    model, loss = network(side).to(device).train(), pml.MultiSimilarityLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")

    def loop() -> None:
        for _ in range(steps):
            x, y = pixels.to(device), labels.to(device)
            with torch.autocast(device, kinds.get(precision, torch.bfloat16), enabled=precision != "no"):
                codes = model(x)[1]
            optimizer.zero_grad()
            scaler.scale(loss(codes.float(), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    return loop


def loss_times(device: str, tiny: bool) -> Iterator[Row]:
    """Forward and backward of a loss, beside pytorch-metric-learning's."""
    size = 64 if tiny else 8192
    torch.manual_seed(0)
    codes = torch.nn.functional.normalize(torch.randn(size, 128), dim=1).to(device)
    labels = (torch.arange(size) // 8).to(device)

    def both(loss: Any) -> Callable[[], Any]:
        def work() -> None:
            x = codes.clone().requires_grad_()
            loss(x, labels).backward()

        return work

    for name, upstream in LOSSES.items():
        contestants = {
            name: both(create("loss", name).to(device)),
            f"{upstream.__name__} of PML": both(upstream().to(device)),
        }
        try:
            found = timed(contestants, device, 1 if tiny else 5)
        except torch.OutOfMemoryError:
            yield "loss, ms", name, f"N = {size:,}", "one of the two runs out of memory"
            continue
        for who, seconds in found.items():
            yield "loss, ms", who, f"N = {size:,}", f"{1000 * seconds:,.1f}"


def encoding(device: str, tiny: bool, folder: Path) -> Iterator[Row]:
    """Encoding by batch on each device that ONNX Runtime offers, beside its own session."""
    side = 16 if tiny else 224
    pixels = np.random.default_rng(0).integers(0, 256, (64, 3, side, side), dtype=np.uint8)
    export_model(network(side).eval(), pixels[:4], folder / "bundle", name="net")
    runtime, content = load_onnxruntime(), (folder / "bundle" / "encoder.onnx").read_bytes()
    for place in ("cpu",) if device == "cpu" else ("cuda", "tensorrt"):
        try:
            bundle = Bundle.open(folder / "bundle", device=place)  # type: ignore[arg-type]
        except Exception as fault:
            yield "encoding", place, "", str(fault)
            continue
        raw, _ = start(
            runtime,
            content,
            runtime.SessionOptions(),
            checked_device(runtime, place),
            {"input": pixels.shape[1:]},
        )  # type: ignore[arg-type]
        for batch in (1, 8, 32, 64):
            given = pixels[:batch]

            def by_hand(given: Any = given, raw: Any = raw) -> Any:
                binding = raw.io_binding()
                binding.bind_cpu_input("input", given)
                binding.bind_output("vector")
                raw.run_with_iobinding(binding)
                return binding.copy_outputs_to_cpu()

            contestants = {
                "ours": lambda given=given, bundle=bundle: bundle.encode(given, batch=len(given)),
                "ONNX Runtime, bound": by_hand,
            }
            for who, seconds in timed(contestants, "cpu", 3 if tiny else 50).items():
                yield (
                    f"encoding on {place}, ms (images/s)",
                    who,
                    f"batch {batch}",
                    f"{1000 * seconds:.2f} ({batch / seconds:,.0f})",
                )


def searching(device: str, tiny: bool, largest: int, folder: Path) -> Iterator[Row]:
    """Search by back end with recall, beside FAISS's own index on the card."""
    faiss = load_faiss()
    for count in [5000] if tiny else [10**6, 10**7][: 1 if largest < 10**7 else 2]:
        random = np.random.default_rng(0)
        centres = random.normal(size=(1000, 128)).astype(np.float32)
        vectors = np.empty((count, 128), np.float32)
        for at in range(0, count, 100_000):
            part = vectors[at : at + 100_000]
            part[:] = centres[random.integers(1000, size=len(part))] + 0.5 * random.standard_normal(
                part.shape, np.float32
            )
        queries = vectors[random.integers(count, size=200 if tiny else 1000)] + 0.05
        exact: Any = None
        for name in BACKENDS:
            backend = make_backend(name, {})
            began = time.perf_counter()
            backend.build(vectors, lambda added: None)
            built = time.perf_counter() - began
            path = folder / name
            backend.save(path)
            backend = make_backend(name, {})
            backend.load(path)
            path.unlink()
            found = backend.search(queries, 10)[1]
            exact = found if exact is None else exact
            recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, exact, strict=True)])
            contestants: dict[str, Callable[[], Any]] = {
                f"{name}, all at once": lambda backend=backend, queries=queries: backend.search(queries, 10),
                f"{name}, one by one": lambda backend=backend, queries=queries: [
                    backend.search(each[None], 10) for each in queries[:100]
                ],
            }
            if name == "flat":
                contestants["FAISS's flat index, all at once"] = _flat(faiss, vectors, queries)
                contestants |= _exact(vectors, queries)
            for who, seconds in timed(contestants, "cpu", 1 if tiny else 5).items():
                many = 100 if "one by one" in who else len(queries)
                yield (
                    "search, queries/s",
                    who,
                    f"{count:,} × 128",
                    f"{many / seconds:,.0f}, recall {recall:.3f}, built in {built:,.0f} s",
                )


def _exact(vectors: Any, queries: Any) -> dict[str, Callable[[], Any]]:
    """Return exact search on the CPU, where it takes no minutes."""
    if len(vectors) > 10**6:
        return {}
    return {
        "exact on the CPU, one by one": lambda: [nearest(each[None], vectors, 10) for each in queries[:100]]
    }


def _flat(faiss: Any, vectors: Any, queries: Any) -> Callable[[], Any]:
    index = faiss.IndexFlatL2(vectors.shape[1])
    index.add(vectors)
    if gpus_found():
        index = faiss.index_cpu_to_gpu(faiss_device(0).resources, 0, index)
    return lambda: index.search(queries, 10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="all of it, tiny, on a CPU: figures mean nothing")
    parser.add_argument("--largest", type=float, default=1e7, help="vectors of the largest search")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if not given.cpu and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --cpu tries all of it, tiny, on a CPU.")
    device = "cpu" if given.cpu else "cuda"
    card = (
        torch.cuda.get_device_name(0)
        if device == "cuda"
        else f"{platform.processor() or 'a CPU'}, tiny: figures mean nothing"
    )
    lines = [f"# On {card}", "", f"Made by `python benchmarks/gpu.py`: torch {torch.__version__}, ONNX Runtime {load_onnxruntime().__version__}, FAISS {load_faiss().__version__}.", ""]  # fmt: skip
    lines += ["| what | who | size | |", "| --- | --- | --- | ---: |"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parts = (
            training(device, given.cpu),
            loss_times(device, given.cpu),
            encoding(device, given.cpu, folder),
            searching(device, given.cpu, int(given.largest), folder),
        )
        for part in parts:
            for row in part:
                lines.append(f"| {' | '.join(row)} |")
                print(lines[-1], flush=True)
    if given.output:
        given.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
