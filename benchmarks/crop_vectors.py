"""Ten million vectors of real crops, for benchmarks of size: regions of Fashion-MNIST's images, as a trained network sees them.

    python benchmarks/crop_vectors.py --cache FOLDER                  # 10,000,000 × 128, 5.1 GB, some ten minutes
    python benchmarks/crop_vectors.py --cache FOLDER --count 1000000

The network is the one of image_vectors.py: the recipe models/fashion-mnist with a lighter backbone, trained on the labels of five classes. Its convolutions
run over an image that is enlarged to 56 × 56, and each of the 7 × 7 places of its last map goes through the head and is normalised: the embedding of a crop of 38 × 38 of these pixels,
8 apart. Each of the 60,000 training images is taken four times: as it is, mirrored, moved by half a step (4 pixels) both ways, and both. That makes 11,760,000 distinct
crops of real images, without noise or interpolation between vectors. Pairs of image and change come in one shuffled order, so that a smaller gallery is the beginning of a larger one:
fewer images, each with all of its crops. Queries are one crop, at a random place, of each of the 10,000 test images, of which none is in the gallery. Goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from image_vectors import _encoder, _read, _save

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH, SIZE, PLACES, STEP = 128, 56, 7, 4
MOST = 60_000 * 4 * PLACES**2
BATCH = 250
Vectors = NDArray[np.float32]


def crop_vectors(cache: Path, count: int = 10_000_000) -> tuple[Vectors, Vectors]:
    """Open the vectors (N, 128), mapped, and the queries (10000, 128); make those that are not there yet."""
    if not 0 < count <= MOST:
        raise SystemExit(f"--count is 1 to {MOST:,}.")
    folder = cache / "crops-128"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "queries.npy").is_file() or _made(folder) < count:
        _make(folder, cache, count)
    vectors = np.memmap(folder / "vectors.f32", np.float32, "r").reshape(-1, WIDTH)[:count]
    return vectors, np.load(folder / "queries.npy")


def _made(folder: Path) -> int:
    """Return how many whole rows there are."""
    file = folder / "vectors.f32"
    return file.stat().st_size // (4 * WIDTH) if file.is_file() else 0


def _make(folder: Path, cache: Path, count: int) -> None:
    import retrieval
    import torch

    torch.set_num_threads(1)
    _encoder(cache / f"fashion-{WIDTH}", WIDTH)  # trains it, if it was not
    model = retrieval.load_run(cache / f"fashion-{WIDTH}" / "run").model.eval()
    stages, head = model.backbone.stages, model.head
    test = _regions(stages, head, torch.from_numpy(_read("t10k")[0]), torch.zeros(10_000, dtype=torch.long))
    place = np.random.default_rng(0).integers(0, PLACES**2, len(test))
    _save(folder / "queries.npy", test[np.arange(len(test)), place])
    images = torch.from_numpy(_read("train")[0])
    order = np.random.default_rng(1).permutation(4 * len(images))
    began = time.monotonic()
    with (folder / "vectors.f32").open("ab") as file:
        step = BATCH * PLACES**2
        file.truncate(start := _made(folder) // step * step * 4 * WIDTH)
        for at in range(start // (4 * WIDTH * PLACES**2), len(order), BATCH):
            pairs = torch.from_numpy(order[at : at + BATCH])
            file.write(_regions(stages, head, images[pairs % len(images)], pairs // len(images)).tobytes())
            if (done := (at + BATCH) * PLACES**2) >= count:
                break
            if at // BATCH % 40 == 0:
                print(f"{done:,} of {count:,}: {time.monotonic() - began:.0f} s", flush=True)


def _regions(stages: nn.Module, head: nn.Module, images: Tensor, changes: Tensor) -> Vectors:
    """Return the crops' vectors (B, 49, 128) of images (B, 28, 28), bytes, each changed as its number 0 to 3 says."""
    import torch
    from torch.nn import functional

    out = []
    with torch.inference_mode():
        for part, change in zip(images.split(BATCH), changes.split(BATCH), strict=True):
            pixels = (part[:, None] / 255 - 0.5) / 0.5
            large = functional.interpolate(pixels, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
            large = torch.where((change % 2 == 1)[:, None, None, None], large.flip(3), large)
            moved = functional.pad(large, (0, STEP, 0, STEP), value=-1.0)[:, :, STEP:, STEP:]
            large = torch.where((change >= 2)[:, None, None, None], moved, large)
            places = stages(large).flatten(2).transpose(1, 2)
            out.append(functional.normalize(head(places), dim=2))
    return torch.cat(out).numpy()


def main() -> None:
    """Make them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder for the vectors")
    parser.add_argument("--count", type=int, default=10_000_000)
    given = parser.parse_args()
    vectors, queries = crop_vectors(given.cache, given.count)
    print(f"{vectors.shape} vectors, {queries.shape} queries in {given.cache}")


if __name__ == "__main__":
    main()
