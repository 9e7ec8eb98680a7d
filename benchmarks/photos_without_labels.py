"""The picture of a search without labels in docs/engineer.md: Fashion-MNIST with a pretrained
backbone, without training.

    # writes docs/without_labels.png and results/photos_without_labels.md; some minutes
    python benchmarks/photos_without_labels.py

`retrieval index create --model core.efficientnet_lite0` indexes the first 500 training images. The
queries are the first 40 test images; the picture shows the first of each class with its six nearest
images. The labels, the names of the images' folders, only judge the results. They are
Fashion-MNIST's own (Debian's package dataset-fashion-mnist).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import retrieval
from numpy.typing import NDArray
from PIL import Image
from retrieval.data.image_archives import read_idx

from bench import DOCS, FASHION, finish, page

PICTURE = DOCS / "without_labels.png"
GALLERY, QUERIES, NEAREST = 500, 40, 6
COMMAND = ["index", "create", "photos.index", "photos/", "--model", "core.efficientnet_lite0"]


def read(name: str, count: int) -> tuple[NDArray[np.uint8], NDArray[np.str_]]:
    """Return the first images (count, 28, 28) and labels of a part."""
    images = read_idx(FASHION / f"{name}-images-idx3-ubyte.gz", 3)[:count]
    return images, read_idx(FASHION / f"{name}-labels-idx1-ubyte.gz", 1)[:count].astype(str)


def main() -> None:
    """Index, search, draw and count."""
    gallery, labels = read("train", GALLERY)
    queries, truth = read("t10k", QUERIES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (pixels, label) in enumerate(zip(gallery, labels, strict=True)):
            (folder / "photos" / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / "photos" / label / f"{number:04}.png")
        subprocess.run([sys.executable, "-m", "retrieval.cli", *COMMAND], cwd=folder, check=True)
        with retrieval.Index.open(folder / "photos.index") as index:
            answers = index.search(list(queries), k=NEAREST)
            shown = np.unique(truth, return_index=True)[1]
            figure = retrieval.plot.neighbours(
                index, list(queries[shown]), NEAREST, labels=truth[shown].tolist()
            )
            figure.savefig(PICTURE, dpi=60)
    with Image.open(PICTURE) as picture:
        picture.convert("RGB").quantize(32).save(PICTURE, optimize=True)
    right = np.array([[hit.label for hit in hits] for hits in answers]) == truth[:, None]
    raw = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(COMMAND),
        "nearest": int(right[:, 0].sum()),
        "all": int(right.sum()),
        "random": float(np.mean(truth[:, None] == labels[None])) * NEAREST * QUERIES,
    }
    finish("photos_without_labels", raw, render(raw))


def render(raw: dict[str, Any]) -> str:
    return page(f"""
        # Photos without labels

        `python benchmarks/photos_without_labels.py`, {raw["date"]}. {GALLERY:,} images of
        Fashion-MNIST were indexed by `retrieval {raw["command"]}`, without training; their classes
        only judge the results. For {raw["nearest"]} of the first {QUERIES} test images, the nearest
        image is of the same class. Of all {NEAREST * QUERIES} hits ({NEAREST} for each),
        {raw["all"]} are of the same class; random hits would give {raw["random"]:.0f}.
        EfficientNet-Lite0 was trained on photographs, not on small grey pictures of clothes.
    """)


if __name__ == "__main__":
    main()
