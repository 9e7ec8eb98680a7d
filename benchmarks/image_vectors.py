"""Vectors of a million images for benchmarks of search: Fashion-MNIST's, shifted, turned and mirrored, as a trained model sees them.

    python benchmarks/image_vectors.py --cache FOLDER                        # 1,000,000 × 128, some minutes
    python benchmarks/image_vectors.py --cache FOLDER --width 64             # 1,000,000 × 64
    python benchmarks/image_vectors.py --cache FOLDER --width 1280 --count 50000

Up to 512 numbers the recipe models/fashion-mnist is trained with that many and a lighter network (labels of 5 classes), exported, and run
by ONNX Runtime. 1280 numbers are the pixels themselves, enlarged to 40 × 32. The first 60,000 rows are the training images as they are; each
next 60,000 the same ones, each mirrored or not, turned by up to 15° and shifted by up to 3 pixels. Queries are the 10,000 test images as they
are: none of them is in the gallery. Goes on where it stopped; what is there already is only opened. Another benchmark writes
`from image_vectors import image_vectors`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # counts only before torch is imported

import numpy as np
from numpy.typing import NDArray

IMAGES = Path("/usr/share/datasets/fashion-mnist")
RECIPE = Path(__file__).parents[1] / "models" / "fashion-mnist" / "recipe.toml"
NETWORK = ("backbone.depth=4", "backbone.layers=1", "train.precision=no", "train.channels_last=false")
"""A lighter network than the recipe's, with at least as many features as the vectors have numbers: a linear head adds no rank."""
WIDEST_TRAINED = 512
ENLARGED = (40, 32)
STEP = 5000
Pixels = NDArray[np.uint8]
Encoder = Callable[[Pixels], NDArray[np.float32]]


class ImageVectors(NamedTuple):
    """What is searched, and for what.

    Attributes:
        vectors: (N, P) float32, mapped from the cache's file.
        labels: (N,) class of each, 0 to 9.
        queries: (10000, P) float32.
        query_labels: (10000,).
    """

    vectors: NDArray[np.float32]
    labels: NDArray[np.int64]
    queries: NDArray[np.float32]
    query_labels: NDArray[np.int64]


def image_vectors(cache: Path, count: int = 1_000_000, width: int = 128) -> ImageVectors:
    """Open the vectors in a cache folder; make those that are not there yet.

    Args:
        cache: the folder.
        count: how many rows; fewer than were made before are their beginning.
        width: numbers of a vector: up to 512 by the trained recipe, or 1280.
    """
    folder = cache / f"fashion-{width}"
    folder.mkdir(parents=True, exist_ok=True)
    train, train_labels = _read("train")
    test, test_labels = _read("t10k")
    file = folder / "vectors.npy"
    if not file.is_file() or len(np.load(file, mmap_mode="r")) < count or not (folder / "queries.npy").is_file():  # fmt: skip
        encode = _encoder(folder, width)
        _save(folder / "queries.npy", np.concatenate([encode(test[i : i + STEP]) for i in range(0, len(test), STEP)]))  # fmt: skip
        _make(folder, train, encode, count, width)
    labels = np.resize(train_labels, count).astype(np.int64)
    queries = np.load(folder / "queries.npy")
    return ImageVectors(np.load(file, mmap_mode="r")[:count], labels, queries, test_labels.astype(np.int64))


def _read(part: str) -> tuple[Pixels, Pixels]:
    """Return images (N, 28, 28) and labels (N,)."""
    from retrieval.data.idx import read_idx

    return (
        read_idx(IMAGES / f"{part}-images-idx3-ubyte.gz", 3),
        read_idx(IMAGES / f"{part}-labels-idx1-ubyte.gz", 1),
    )


def _encoder(folder: Path, width: int) -> Encoder:
    """Return images (B, 28, 28) → vectors (B, width)."""
    if width == math.prod(ENLARGED):
        return _pixels
    if width > WIDEST_TRAINED:
        raise SystemExit(f"--width is 1 to {WIDEST_TRAINED}, or {math.prod(ENLARGED)}.")
    import retrieval

    bundle, run = folder / "run" / "bundle", folder / "run"
    if not bundle.is_dir():
        trained = retrieval.train(
            RECIPE,
            run,
            overrides=[f"head.embedding_size={width}", *NETWORK, f"backbone.width={-(-width // 8)}"],
            replace=run.exists(),
        )
        retrieval.export_run(trained, bundle)
    opened = retrieval.open_bundle(bundle)
    return lambda images: opened.encode(images[:, None], batch=256).vector


def _pixels(images: Pixels) -> NDArray[np.float32]:
    """Return the pixels themselves, enlarged."""
    import torch

    large = torch.nn.functional.interpolate(
        torch.from_numpy(images[:, None]) / 255, size=ENLARGED, mode="bilinear"
    )
    return large.flatten(1).numpy()


def _make(folder: Path, images: Pixels, encode: Encoder, count: int, width: int) -> None:
    """Write `vectors.npy`, going on where it stopped."""
    partial, done = folder / "vectors.partial.npy", folder / "done.json"
    start = json.loads(done.read_text()) if done.is_file() and partial.is_file() else 0
    if not start or len(np.load(partial, mmap_mode="r")) != count:
        start = 0
        np.lib.format.open_memmap(partial, "w+", np.float32, (count, width)).flush()
    table = np.lib.format.open_memmap(partial, "r+")
    began, first = time.monotonic(), start
    while start < count:
        stop = min(start + STEP, count)
        rows = np.arange(start, stop)
        table[start:stop] = encode(_changed(images, rows))
        table.flush()
        _write(done, str(stop))
        start = stop
        if start % (20 * STEP) == 0 or start == count:
            print(f"{start:,} of {count:,} × {width}: {time.monotonic() - began:.0f} s for {start - first:,}", flush=True)  # fmt: skip
    del table
    partial.replace(folder / "vectors.npy")
    done.unlink()


def _changed(images: Pixels, rows: NDArray[np.int64]) -> Pixels:
    """Return the images of these rows: row r is image r mod 60,000, changed as r alone says, or as it is in the first round."""
    import torch

    chosen = images[rows % len(images)]
    move = np.stack([_motion(row) for row in rows // len(images) * len(images) + rows % len(images)])
    move[rows < len(images)] = np.eye(2, 3)
    grid = torch.nn.functional.affine_grid(
        torch.from_numpy(move.astype(np.float32)), [len(rows), 1, *images.shape[1:]], align_corners=False
    )
    turned = torch.nn.functional.grid_sample(
        torch.from_numpy(chosen[:, None].astype(np.float32)), grid, align_corners=False
    )
    return turned[:, 0].round().clamp(0, 255).numpy().astype(np.uint8)


def _motion(row: int) -> NDArray[np.float64]:
    """Return a row's affine map (2, 3): mirrored or not, turned by up to 15°, shifted by up to 3 of 28 pixels."""
    random = np.random.default_rng(row)
    mirror = random.choice((-1, 1))
    angle = math.radians(random.uniform(-15, 15))
    shift = random.uniform(-3, 3, 2) * 2 / 28
    cos, sin = math.cos(angle), math.sin(angle)
    return np.array([[mirror * cos, -mirror * sin, shift[0]], [sin, cos, shift[1]]])


def _save(path: Path, array: NDArray[Any]) -> None:
    partial = path.with_name(f"{path.stem}.partial.npy")
    np.save(partial, array)
    partial.replace(path)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--cache", type=Path, required=True, help="folder for the vectors")
    arguments.add_argument("--count", type=int, default=1_000_000)
    arguments.add_argument("--width", type=int, default=128)
    given = arguments.parse_args()
    found = image_vectors(given.cache, given.count, given.width)
    print(f"{found.vectors.shape} vectors, {found.queries.shape} queries in {given.cache}")


if __name__ == "__main__":
    main()
