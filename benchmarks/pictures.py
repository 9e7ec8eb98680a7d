"""Sets of pictures that several benchmarks use, and a plugin that reads a saved set."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from retrieval.host.plugins import create
from retrieval.plugin import ArrayDataset, Dataset, hookimpl

PER_CLASS, ICONS = 200, 1512
WEIGHTS = ("thin", "light", "regular", "bold", "fill", "duotone")
MOVED: dict[str, Any] = {"name": "RandomAffine", "degrees": 10, "translate": [0.06, 0.06]}
MOVED |= {"scale": [0.85, 1.15], "shear": [-8, 8, -8, 8]}
"""The augmentation: pictures turned, moved, scaled and sheared a little."""
Pictures = tuple[NDArray[np.uint8], NDArray[Any]]
"""Images (N, side, side) and labels (N,)."""


def load(name: str, package: Path, count: int) -> Pictures:
    """Return digits, fashion, or `count` of the icons in npm's package."""
    return {"digits": digits, "fashion": fashion}.get(name, lambda: icons(package, count))()


def digits() -> Pictures:
    """Return scikit-learn's 1,797 digits (8 × 8)."""
    data: Any = create("dataset", "core.digits")
    return np.asarray(data.arrays), np.array(data.labels)


def fashion() -> Pictures:
    """Return 200 images of each of Fashion-MNIST's classes (28 × 28), drawn once with seed 0."""
    data: Any = create("dataset", "core.fashion_mnist")
    labels, rng = np.array(data.labels), np.random.default_rng(0)
    drawn = [rng.permutation(np.flatnonzero(labels == c))[:PER_CLASS] for c in np.unique(labels)]
    rows = np.sort(np.concatenate(drawn))
    return np.asarray(data.arrays[rows]), labels[rows]


def icon_names(package: Path) -> list[str]:
    """Return the names of the icons in the folder of npm's package @phosphor-icons/core."""
    folder = package / "assets" / "regular"
    names = sorted(file.stem for file in folder.glob("*.svg"))
    if len(names) != ICONS:
        raise SystemExit(f"{folder} has {len(names)} icons, not {ICONS}; --help has the commands.")
    return names


def icon(package: Path, name: str, weight: str, side: int) -> Any:
    """Return an icon as a grey Pillow image, black on white."""
    import resvg_py
    from PIL import Image

    file = name if weight == "regular" else f"{name}-{weight}"
    path = str(package / "assets" / weight / f"{file}.svg")
    svg = resvg_py.svg_to_bytes(svg_path=path, width=side, height=side, background="white")
    return Image.open(io.BytesIO(bytes(svg))).convert("L")


def icons(package: Path, count: int) -> Pictures:
    """Return some of Phosphor's icons in six weights (32 × 32), drawn once with seed 0."""
    names = sorted(np.random.default_rng(0).permutation(icon_names(package))[:count].tolist())
    drawn = [np.asarray(icon(package, name, weight, 32)) for name in names for weight in WEIGHTS]
    return np.stack(drawn), np.repeat(names, len(WEIGHTS))


def saved(file: Path) -> Dataset:
    """Load arrays `images` (N, height, width), uint8, and `labels` (N,) of a .npz file.

    Args:
        file: the file.
    """
    with np.load(file, allow_pickle=False) as arrays:
        return ArrayDataset(arrays["images"], arrays["labels"].tolist())


@hookimpl
def retrieval_datasets() -> Mapping[str, Any]:
    return {"saved": saved}
