"""Which small net from scratch gives the most for a CPU second: `core.convnet` at full resolution, with a strided stem, and nets of depthwise convolutions.

    python benchmarks/backbones.py --work FOLDER                 # goes on where it stopped
    python benchmarks/backbones.py --work FOLDER --fonts FONTS   # the fonts are not under /usr/share/fonts
    python benchmarks/backbones.py --page                        # the page alone, from what is kept

Each net has the same recipe (Multi-Similarity with its miner, AdamW, cosine) and the same CPU seconds of one thread, not the same epochs. What a training step costs is measured first, nets in
turn, and the least of the rounds says how many batches the seconds are worth; what training then took is on the page too. The learning rate is chosen for each net and set on classes for
validation, which are training classes of the file that the choice reads; the classes to search are not in that file.

- glyphs: Han characters in twelve font families (`glyphs.py` says which Debian packages it needs), 600 characters to train and 300 others to search.
- Fashion-MNIST: classes 0-4 train and 5-9 are searched; 28 pixels, enlarged.
- digits: scikit-learn's, classes 0-4 train and 5-9 are searched; 8 pixels, enlarged.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # counts before NumPy is imported

import numpy as np
from numpy.typing import NDArray

from intervals import half_width, interval
from page_tables import markdown

HERE = Path(__file__).parent
KEPT = HERE / "results" / "raw" / "backbones.jsonl"
PAGE = HERE / "results" / "backbones.md"
CONVNET = {"name": "core.convnet", "width": 16}
NETS: dict[str, dict[str, Any]] = {
    "convnet": CONVNET,
    "convnet, stem 2": {**CONVNET, "stem": 2},
    "convnet, stem 4": {**CONVNET, "stem": 4},
    "inverted bottlenecks": {"name": "bottlenecks.net", "form": "inverted"},
    "ConvNeXt-like": {"name": "bottlenecks.net", "form": "convnext"},
    "separable": {"name": "bottlenecks.net", "form": "separable"},
}
PLUGINS = [str(HERE / "glyphs.py"), str(HERE / "bottlenecks.py")]
SETS: dict[str, dict[str, Any]] = {
    "glyphs-64": {"size": 64, "seconds": 6, "classes": 25, "items": 4, "choose": 120},
    "fashion-64": {"size": 64, "seconds": 5, "classes": 5, "items": 20, "choose": ["3", "4"]},
    "digits-32": {"size": 32, "seconds": 3, "classes": 5, "items": 20, "choose": ["3", "4"]},
}
"""Pixels, CPU seconds of training, a batch, and the classes (or how many of them) that choose the learning rate."""
TITLES = {"digits": "scikit-learn's digits", "fashion": "Fashion-MNIST", "glyphs": "glyphs"}
RATES = (1e-3, 3e-3)
SEEDS = (0, 1, 2)
CHOOSING_SEED = 100
TRAIN, SEARCH = 600, 300  # glyphs' classes
PER_CLASS = 400  # Fashion-MNIST's images
ROUNDS, STEPS = 4, 2
METRICS = ["recall_at_1", "map_at_r"]
Arrays = dict[str, NDArray[Any]]


def source(data: str, size: int) -> tuple[Arrays, list[str]]:
    """Return a set's images (N, size, size) and labels (N,), and the classes to search."""
    from PIL import Image
    from retrieval.host.create import create

    import glyphs

    if data == "glyphs":
        drawn = glyphs.Glyphs(TRAIN + SEARCH, size)
        assert drawn.arrays is not None
        order = np.random.default_rng(0).permutation(np.unique(drawn.labels))
        return {"images": drawn.arrays, "labels": np.array(drawn.labels)}, order[TRAIN:].tolist()
    whole = create("dataset", "core.digits" if data == "digits" else "core.fashion_mnist")
    labels, rng = np.array(whole.labels), np.random.default_rng(0)
    kept = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == each))[:PER_CLASS] for each in np.unique(labels)]
    )
    images = [
        Image.fromarray(whole.arrays[i]).resize((size, size), Image.Resampling.BICUBIC) for i in sorted(kept)
    ]
    arrays = {"images": np.stack([np.asarray(image) for image in images]), "labels": labels[sorted(kept)]}
    return arrays, ["5", "6", "7", "8", "9"]


def prepare(work: Path, name: str) -> None:
    """Write a set, and apart from it its training classes alone."""
    if (work / f"{name}.json").exists():
        return
    arrays, search = source(name.partition("-")[0], SETS[name]["size"])
    training = ~np.isin(arrays["labels"], search)
    choose = SETS[name]["choose"]
    if isinstance(choose, int):
        classes = np.unique(arrays["labels"][training])
        choose = np.random.default_rng(1).permutation(classes)[:choose].tolist()
    np.savez(work / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    np.savez(work / f"{name}-choose.npz", **{key: array[training] for key, array in arrays.items()})  # type: ignore[arg-type]
    (work / f"{name}.json").write_text(json.dumps({"search": search, "choose": choose}))


def recipe(
    work: Path, name: str, net: str, batches: int, rate: float, seed: int, choose: bool
) -> dict[str, Any]:
    """Return the recipe of one run; `choose`: on the training classes alone."""
    held = json.loads((work / f"{name}.json").read_text())["choose" if choose else "search"]
    set_ = SETS[name]
    classes, items = set_["classes"], set_["items"]
    if choose and classes == 5:  # three are left
        classes, items = 3, round(classes * items / 3)
    return {
        "name": "backbones", "seed": seed, "plugins": PLUGINS,
        "data": {"name": "glyphs.saved", "file": str(work / f"{name}{'-choose' if choose else ''}.npz")},
        "split": {"by": "class", "test": held, "validation": 0.0},
        "sampler": {"classes": classes, "items": items, "batches": batches},
        "backbone": {**NETS[net], "size": set_["size"], "channels": 1},
        "head": {"embedding_size": 64},
        "loss": {"name": "pml.multi_similarity"},
        "miner": {"name": "pml.multi_similarity"},
        "optimizer": {"lr": rate},
        "schedule": {"name": "cosine", "warmup": 0.1},
        "train": {"device": "cpu", "epochs": 1, "channels_last": True},
        "evaluate": {"metrics": METRICS},
    }  # fmt: skip


def epoch_of(work: Path, folder: Path, name: str, net: str) -> Callable[[], None]:
    """Return what trains a few batches."""
    from retrieval.recipe.read import check_recipe
    from retrieval.run import checkpoint
    from retrieval.run.open import build_run
    from retrieval.serving.progress import Meter
    from retrieval.training.process import make_accelerator
    from retrieval.training.trainer import Trainer

    made = check_recipe(recipe(work, name, net, STEPS, 1e-3, 0, True))
    checkpoint.seed_everything(0)
    trainer = Trainer(build_run(folder / net, made), make_accelerator(made))

    def epoch() -> None:
        trainer._epoch(Meter("training", 0, "batches", show=False))
        trainer.progress.step, trainer.progress.sums = 0, {}
        trainer.progress.epoch += 1

    return epoch


def encoder_of(work: Path, folder: Path, name: str, net: str) -> tuple[Callable[[], None], int]:
    """Return what encodes one image by the exported bundle, and how many weights the net has."""
    from retrieval.export.export_model import export_model
    from retrieval.host.plugins import load_plugins
    from retrieval.model.model import Model, build_head
    from retrieval.serving.bundle import Bundle

    made = {**NETS[net], "size": SETS[name]["size"], "channels": 1}
    backbone = load_plugins(PLUGINS).build("backbones", made, {})
    with np.load(work / f"{name}-choose.npz") as saved:
        images = saved["images"][:20, None]
    export_model(
        Model(backbone, build_head(backbone.features, 64)), images, folder / f"{net}-bundle", name="b"
    )
    bundle = Bundle.open(folder / f"{net}-bundle", threads=1)

    def encode() -> None:
        for image in images:
            bundle.encode(image[None])

    return encode, sum(p.numel() for p in backbone.parameters())


def in_turn(contestants: dict[str, Callable[[], None]], times: int) -> dict[str, list[float]]:
    """Return each one's CPU milliseconds a piece, a number a round, after a round to warm up."""
    rounds: dict[str, list[float]] = {title: [] for title in contestants}
    for turn in range(ROUNDS + 1):
        for title, run in contestants.items():
            start = time.process_time()
            run()
            if turn:
                rounds[title].append(round(1000 * (time.process_time() - start) / times, 3))
    return rounds


def costs(work: Path, name: str) -> dict[str, Any]:
    """Return CPU milliseconds of a training step and of encoding an image, by net."""
    with tempfile.TemporaryDirectory(dir=work) as temporary, contextlib.redirect_stderr(io.StringIO()):
        folder = Path(temporary)
        steps = in_turn({net: epoch_of(work, folder, name, net) for net in NETS}, STEPS)
        encoders = {net: encoder_of(work, folder, name, net) for net in NETS}
        images = in_turn({net: encode for net, (encode, _) in encoders.items()}, 20)
    return {
        net: {"weights": encoders[net][1], "step_ms": steps[net], "image_ms": images[net]} for net in NETS
    }


class Kept:
    """What is measured already, one JSON object a line.

    Args:
        file: where it is kept.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows = read(file) if file.exists() else []

    def get(self, measure: Callable[[], dict[str, Any]], **key: Any) -> dict[str, Any]:
        """Return a row; measure it if that was not done."""
        for row in self.rows:
            if row["key"] == key:
                return row
        row = {"key": key, "load": round(os.getloadavg()[0], 1), **measure()}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.rows.append(row)
        print(json.dumps(row, ensure_ascii=False), flush=True)
        return row


def trained(
    work: Path, name: str, net: str, batches: int, rate: float, seed: int, choose: bool
) -> dict[str, Any]:
    """Train one run; return its figures on held-out classes, and the CPU seconds that training took."""
    from retrieval.evaluation.evaluate_run import evaluate_run
    from retrieval.recipe.read import check_recipe
    from retrieval.training.trainer import train

    folder = work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    made = check_recipe(recipe(work, name, net, batches, rate, seed, choose))
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        start = time.process_time()
        run = train(folder, made)
        seconds = time.process_time() - start
        figures = evaluate_run(run).figures["trained"]
    shutil.rmtree(folder)
    return {"batches": batches, "seconds": round(seconds, 1)} | {
        key: round(figures[key], 4) for key in METRICS
    }


def measure(work: Path, names: list[str]) -> list[dict[str, Any]]:
    """Return all rows, those that are done already among them."""
    import torch

    from training import machine

    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    kept = Kept(KEPT)
    for name in names:
        prepare(work, name)
        about = {"machine": machine(), "torch": torch.__version__}
        cost = kept.get(lambda: {**about, "nets": costs(work, name)}, kind="cost", set=name)["nets"]  # noqa: B023
        for net in NETS:
            batches = max(1, round(1000 * SETS[name]["seconds"] / min(cost[net]["step_ms"])))

            def run(rate: float, seed: int, choose: bool) -> dict[str, Any]:
                return kept.get(
                    lambda: trained(work, name, net, batches, rate, seed, choose),  # noqa: B023
                    kind="choose" if choose else "run", set=name, net=net, rate=rate, seed=seed,  # noqa: B023
                )  # fmt: skip

            tried = {rate: run(rate, CHOOSING_SEED, True)["map_at_r"] for rate in RATES}
            best = max(tried, key=lambda rate: tried[rate])
            for seed in SEEDS:
                run(best, seed, False)
    return kept.rows


def rows_of(rows: list[dict[str, Any]], name: str, net: str) -> list[dict[str, Any]]:
    """Return a net's runs on the classes to search."""
    return [
        row
        for row in rows
        if row["key"]["kind"] == "run" and (row["key"]["set"], row["key"]["net"]) == (name, net)
    ]


def title(name: str) -> str:
    """Return what a set is called on the page."""
    data, _, size = name.partition("-")
    return f"{TITLES[data]}, {size} pixels"


def verdict(rows: list[dict[str, Any]], name: str) -> str:
    """Return a sentence: each net beside `core.convnet` as it comes, seed by seed."""
    first, *others = NETS
    before = {row["key"]["seed"]: row["map_at_r"] for row in rows_of(rows, name, first)}
    said = []
    for net in others:
        if len(rows_of(rows, name, net)) < len(SEEDS):
            continue
        gains = [row["map_at_r"] - before[row["key"]["seed"]] for row in rows_of(rows, name, net)]
        sure = abs(statistics.mean(gains)) > half_width(gains)
        said.append(f"{net} {interval(gains, sign=True)}{'' if sure else ' (not told apart)'}")
    return f"MAP@R beside {first}, paired by seed: {'; '.join(said)}."


def section(rows: list[dict[str, Any]], cost: dict[str, Any]) -> list[str]:
    """Return a set's part of the page."""
    name = cost["key"]["set"]
    head = [
        "",
        "weights",
        "training step, CPU ms",
        "one image by ONNX Runtime, CPU ms",
        "batches",
        "CPU s",
        "rate",
    ]
    lines = []
    for net in NETS:
        own, found = cost["nets"][net], rows_of(rows, name, net)
        made = [
            f"`{net}`",
            f"{own['weights']:,}",
            f"{min(own['step_ms']):.1f}",
            f"{min(own['image_ms']):.2f}",
        ]
        if len(found) < len(SEEDS):
            lines.append([*made, *["not trained"] * 5])
            continue
        seconds = statistics.mean(row["seconds"] for row in found)
        about = [f"{found[0]['batches']:,}", f"{seconds:.1f}", f"{found[0]['key']['rate']:g}"]
        lines.append([*made, *about, *(interval([row[metric] for row in found]) for metric in METRICS)])
    return [
        f"## {title(name)[0].upper()}{title(name)[1:]}: {SETS[name]['seconds']} CPU seconds",
        "",
        markdown([*head, "Recall@1", "MAP@R"], lines),
        "",
        verdict(rows, name),
        "",
    ]


def render(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    measured = [row for row in rows if row["key"]["kind"] == "cost"]
    loads = [row["load"] for row in rows]
    about = measured[0]
    return "\n".join(
        [
            "# Small nets from scratch, for a CPU second",
            "",
            f"`python benchmarks/backbones.py` says what is trained and how the learning rate is chosen. {about['machine']}, torch {about['torch']}, one thread; load average {min(loads):.1f} to",
            f"{max(loads):.1f}. Classes to search are never trained on; means over {len(SEEDS)} seeds with 95 % intervals. Milliseconds are the least of {ROUNDS} rounds, nets in turn; CPU seconds are those that training took.",
            f"Rates tried: {' and '.join(f'{rate:g}' for rate in RATES)}. All nets are 16 channels wide at their first stage and have three; those of depthwise convolutions have a stem of 4.",
            "A few seconds are few batches: the page says what is learnt first, not what each net would reach in the end.",
            "",
            *(line for cost in measured for line in section(rows, cost)),
        ]
    )


def read(file: Path = KEPT) -> list[dict[str, Any]]:
    """Return what is kept."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "retrieval-backbones")
    parser.add_argument("--fonts", type=Path, help="where Debian's font packages are unpacked")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--page", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.fonts:
        import glyphs

        glyphs.FONTS = options.fonts
    rows = read() if options.page else measure(options.work, options.sets)
    PAGE.write_text(render(rows), encoding="utf-8")
    print(render(rows))


if __name__ == "__main__":
    main()
