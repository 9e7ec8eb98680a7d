"""Another head for an index that keeps features: `retrieval index migrate` beside the least that any way does, and beside originals.

    python benchmarks/migrate_head.py --work FOLDER                             # every size; needs 12 GB there
    python benchmarks/migrate_head.py --work FOLDER --only 200000x1280          # one; the others stay as they are kept
    python benchmarks/migrate_head.py --write                                   # the page alone, from what is kept

An index is filled with features of random numbers, and migrated from one linear head to 128 numbers, scaled to length 1, to another. Then the same
features are multiplied with the same matrix by NumPy, from a plain file into a plain file, which is synced: less than that no way can do. Of
each size one run, one thread; wall and CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # counts only before NumPy is imported
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from PIL import Image
from retrieval.host.files import write_text
from retrieval.serving.bundle import Bundle
from retrieval.serving.images import Preprocessing
from retrieval.serving.index.index import Index
from retrieval.serving.manifest import DistanceEntry, Input, Manifest, SplitEntry, Verified, write_manifest
from retrieval.serving.store.contract import FEATURES, VECTOR, Item, widths_of
from retrieval.serving.store.structure import Wanted
from retrieval.serving.store.testing.bundles import save_graph
from retrieval.serving.store.writing import create_local

RAW = Path(__file__).parent / "results" / "raw" / "migrate_head.json"
SIZES = ("200000x1280", "1000000x256", "1000000x1280")
OUT, SIDE, PHOTOS, BLOCK = 128, 32, 2000, 10_000


def head_weights(width: int, seed: int) -> NDArray[np.float32]:
    """Return a head's matrix (F, 128)."""
    random = np.random.default_rng(seed)
    return (random.normal(size=(width, OUT)) / width**0.5).astype(np.float32)


def bundle(folder: Path, width: int, seed: int) -> Path:
    """Write a split bundle: pixels through one fixed matrix and a ReLU, as many features as asked for, and a head by its seed."""
    folder.mkdir()
    pixels = SIDE * SIDE
    matrix = np.random.default_rng(99).normal(size=(pixels, width)).astype(np.float32) / np.float32(SIDE)
    value, node = helper.make_tensor_value_info, helper.make_node
    save_graph(
        folder / "backbone.onnx",
        [
            node("Cast", ["input"], ["float"], to=TensorProto.FLOAT),
            node("Reshape", ["float", "shape"], ["flat"]),
            node("MatMul", ["flat", "B"], ["product"]),
            node("Relu", ["product"], ["features"]),
        ],
        [value("input", TensorProto.UINT8, ["N", 1, SIDE, SIDE])],
        [value("features", TensorProto.FLOAT, ["N", width])],
        {"shape": np.array([0, pixels], np.int64), "B": matrix},
    )
    save_graph(
        folder / "head.onnx",
        [
            node("MatMul", ["input", "W"], ["product"]),
            node("LpNormalization", ["product"], ["vector"], axis=1, p=2),
        ],
        [value("input", TensorProto.FLOAT, ["N", width])],
        [value("vector", TensorProto.FLOAT, ["N", OUT])],
        {"W": head_weights(width, seed)},
    )
    write_manifest(
        folder,
        Manifest(
            name="linear", created="2026-01-01T00:00:00+00:00", versions={"onnx": onnx.__version__}, opset=17,
            input=Input(kind="image", dtype="uint8", shape=(1, SIDE, SIDE), preprocessing=Preprocessing((SIDE, SIDE), 1, (0.0,), (1.0,))),
            vector=OUT, normalized=True, distance=DistanceEntry(name="euclidean", exact=True), encoder=None,
            split=SplitEntry(backbone="backbone.onnx", head="head.onnx", features=width),
            verified=Verified(tolerance=1e-4, largest_difference=0.0, items=1),
        ),
    )  # fmt: skip
    return folder


def blocks(count: int, width: int) -> Iterator[NDArray[np.float32]]:
    """Give the features, a block at a time: the same ones at each call."""
    random = np.random.default_rng(0)
    for start in range(0, count, BLOCK):
        yield random.standard_normal((min(BLOCK, count - start), width), np.float32)


@contextmanager
def timed(row: dict[str, float]) -> Iterator[None]:
    """Note wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    row |= {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def filled(path: Path, old: Bundle, count: int, width: int) -> None:
    """Write an index of so many items that keeps features, with the metadata that a shop would have."""
    flat = Wanted("flat", {})  # a structure is built afterwards in the background, however long it takes
    create_local(path, old, widths_of(old, features=width), structure=flat)
    with Index.open(path, threads=1) as index:
        number = 0
        for block in blocks(count, width):
            vectors = old.encode_features(block, batch=1024).vector
            index.upsert(
                [
                    Item(f"photos/{number + at:07}.jpg", str(at % 10), {"price": at, "shop": "north"}, arrays={VECTOR: vectors[at], FEATURES: block[at]})
                    for at in range(len(block))
                ]
            )  # fmt: skip
            number += len(block)
        index.store.compact()


def plainly(work: Path, count: int, width: int) -> dict[str, float]:
    """Multiply features of a plain file by NumPy into a plain file; return seconds."""
    source = np.memmap(work / "features.f32", np.float32, "w+", shape=(count, width))
    at = 0
    for block in blocks(count, width):
        source[at : at + len(block)] = block
        at += len(block)
    source.flush()
    weights, row = head_weights(width, 2), {}
    with timed(row), (work / "vectors.f32").open("wb") as file:
        for start in range(0, count, BLOCK):
            vectors = source[start : start + BLOCK] @ weights
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            file.write(vectors.data)
        file.flush()
        os.fsync(file.fileno())
    (work / "features.f32").unlink()
    (work / "vectors.f32").unlink()
    return row


def by_originals(work: Path, width: int) -> dict[str, float]:
    """Migrate an index of small PNG files that keeps no features; return seconds."""
    random = np.random.default_rng(1)
    (work / "photos").mkdir()
    for number in range(PHOTOS):
        pixels = random.integers(0, 256, (SIDE, SIDE), np.uint8)
        Image.fromarray(pixels).save(work / "photos" / f"{number}.png")
    old = Bundle.open(work / "old", threads=1)
    create_local(work / "small", old, widths_of(old))
    row: dict[str, float] = {}
    with Index.open(work / "small", threads=1) as index:
        index.add(work / "photos", progress=False)
        with timed(row):
            index.migrate(Bundle.open(work / "new", threads=1), progress=False)
    return row


def measured(work: Path, count: int, width: int) -> dict[str, Any]:
    """Measure one size."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    old = Bundle.open(bundle(work / "old", width, 1), threads=1)
    new = Bundle.open(bundle(work / "new", width, 2), threads=1)
    filled(work / "index", old, count, width)
    row: dict[str, float] = {}
    with Index.open(work / "index", threads=1) as index:
        before = index.stats().bytes
        with timed(row):
            done = index.migrate(new, progress=False)
        after = index.stats().bytes
        assert done.from_features == count
        features = next(blocks(count, width))[:1000]
        found = index.get([f"photos/{number:07}.jpg" for number in range(1000)], arrays=True)
        vectors = new.encode_features(features, batch=1024).vector
        different = max(
            float(np.abs(item.vector - vectors[int(item.id[7:14])]).max()) for item in found.values()
        )
    shutil.rmtree(work / "index")
    told = {
        "machine": _machine(), "load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d"),
        "versions": ", ".join(f"{name} {version(name)}" for name in ("numpy", "onnxruntime")) + f", Python {platform.python_version()}",
        "migrate": row, "plain": plainly(work, count, width), "originals": by_originals(work, width),
        "bytes": [before, after], "difference": different,
    }  # fmt: skip
    shutil.rmtree(work)
    return told


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    return f"{model}, {os.cpu_count()} cores, no GPU"


def render(kept: dict[str, Any]) -> str:
    """Return the page."""
    first = next(iter(kept.values()))
    lines = [
        "# Another head for features that are kept",
        "",
        f"`python benchmarks/migrate_head.py --work FOLDER`. An index with kept features (random numbers) gets another linear head to {OUT} numbers by "
        "`migrate`, which reads and compares every checksum of them, writes and syncs the new vectors and switches. Beside it in the same run: NumPy multiplies the "
        f"same features from a plain file into a plain file, synced, with no checksum and no index; and `migrate` of {PHOTOS:,} images of {SIDE} × {SIDE} without kept features, "
        "whose backbone is one matrix product: any real one takes far longer. One thread; one run of each.",
        "",
        f"Machine: {first['machine']}; {first['versions']}. Other work shared its cores, memory and disk: trust ratios, and no absolute time.",
        "",
        "| items × features | `migrate`, wall s | CPU s | NumPy alone, wall s | CPU s | `migrate` / NumPy, CPU | originals / features, CPU an item | index before, MB | after, MB | load |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size, told in kept.items():
        count, width = map(int, size.split("x"))
        ours, plain, originals = told["migrate"], told["plain"], told["originals"]
        ratio = (originals["cpu"] / PHOTOS) / (ours["cpu"] / count)
        lines.append(
            f"| {count:,} × {width:,} | {ours['wall']:.1f} | {ours['cpu']:.1f} | {plain['wall']:.1f} | {plain['cpu']:.1f} | {ours['cpu'] / plain['cpu']:.1f} × | "
            f"{ratio:.0f} × | {told['bytes'][0] / 1e6:,.0f} | {told['bytes'][1] / 1e6:,.0f} | {told['load']:.1f} |"
        )
    worst = max(told["difference"] for told in kept.values())
    return "\n".join(
        [
            *lines,
            "",
            f"Features lie on the disk once: what an index grows by is the new vectors. The first 1,000 vectors differ from those of the new head by at most {worst:.1g}.",
            "",
        ]
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--work", type=Path, help="folder for the indexes, made anew and deleted")
    arguments.add_argument("--only", choices=SIZES, help="measure this size alone")
    arguments.add_argument("--write", action="store_true", help="write the page alone")
    given = arguments.parse_args()
    if given.work is None and not given.write:
        arguments.error("Give --work FOLDER, or --write.")
    kept: dict[str, Any] = json.loads(RAW.read_text(encoding="utf-8")) if RAW.is_file() else {}
    for size in [] if given.write else [given.only] if given.only else SIZES:
        count, width = map(int, size.split("x"))
        kept[size] = measured(given.work, count, width)
        kept = {name: kept[name] for name in SIZES if name in kept}
        write_text(RAW, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    page = render(kept)
    write_text(RAW.parents[1] / "migrate_head.md", page)
    print(page)


if __name__ == "__main__":
    main()
