"""The picture of a search without labels in docs/engineer.md: Fashion-MNIST's images, a pretrained
backbone, nothing trained.

    # writes docs/without_labels.png and results/photos_without_labels.md; some minutes
    python benchmarks/photos_without_labels.py

The first 500 training images are indexed by `retrieval index create --model
core.efficientnet_lite0`, without their labels. The queries are the first 40 test images; of each
class the first is drawn, with its six nearest. Labels only judge what came: they are
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
from retrieval.data.idx import read_idx

from bench import DOCS, FASHION, finish, page

PICTURE = DOCS / "without_labels.png"
MODEL = "core.efficientnet_lite0"
GALLERY, QUERIES, NEAREST = 500, 40, 6


def read(name: str, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the first images (count, 28, 28) and labels of a part."""
    images = read_idx(FASHION / f"{name}-images-idx3-ubyte.gz", 3)
    return images[:count], read_idx(FASHION / f"{name}-labels-idx1-ubyte.gz", 1)[:count]


def main() -> None:
    """Index, search, draw and count."""
    gallery, labels = read("train", GALLERY)
    asked, wanted = read("t10k", QUERIES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "photos").mkdir()
        for number, pixels in enumerate(gallery):
            Image.fromarray(pixels).save(folder / "photos" / f"{number:04}.png")
        command = ["index", "create", "photos.index", "photos/", "--model", MODEL]
        subprocess.run([sys.executable, "-m", "retrieval.cli", *command], cwd=folder, check=True)
        with retrieval.Index.open(folder / "photos.index") as index:
            found = index.search([np.asarray(one) for one in asked], k=NEAREST)
            right = [
                [labels[int(Path(hit.id).stem)] == truth for hit in hits]
                for hits, truth in zip(found, wanted, strict=True)
            ]
            shown = [int(np.flatnonzero(wanted == label)[0]) for label in range(10)]
            answers = [[gallery[int(Path(hit.id).stem)] for hit in found[n]] for n in shown]
            draw(answers, asked[shown], [right[number] for number in shown], PICTURE)
    raw = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(command),
        "nearest": int(np.sum([row[0] for row in right])),
        "all": int(np.sum(right)),
        "random": float(np.mean(wanted[:, None] == labels[None])) * NEAREST * QUERIES,
    }
    finish("photos_without_labels", raw, render(raw))


def render(raw: dict[str, Any]) -> str:
    return page(f"""
        # Photos without labels

        `python benchmarks/photos_without_labels.py`, {raw["date"]}. {GALLERY:,} images of
        Fashion-MNIST indexed without labels by `retrieval {raw["command"]}`, nothing trained. Of
        the first {QUERIES} test images the nearest is of the same class for {raw["nearest"]}; of
        all {NEAREST * QUERIES} answers ({NEAREST} each), {raw["all"]} are, and at random
        {raw["random"]:.0f} would be. EfficientNet-Lite0 was trained on photographs, which small
        grey pictures of clothes are not.
    """)


def draw(answers: list[list[Any]], queries: Any, right: list[list[Any]], path: Path) -> None:
    """Draw queries (28, 28) with their answers: right ones framed in blue, wrong ones in orange."""
    side, gap, rows = 56, 6, -(-len(queries) // 2)
    block = (side + gap) * (1 + NEAREST) + 5 * gap
    sheet = Image.new("RGB", (2 * block + 3 * gap, rows * (side + gap) + gap), "white")

    def paste(pixels: Any, size: int, place: tuple[int, int]) -> None:
        sheet.paste(Image.fromarray(pixels).resize((size, size)), place)

    for number, (query, found, good) in enumerate(zip(queries, answers, right, strict=True)):
        left, top = gap + (number // rows) * (block + gap), gap + (number % rows) * (side + gap)
        paste(query, side, (left, top))
        for place, (pixels, fine) in enumerate(zip(found, good, strict=True), 1):
            at = left + 2 * gap + place * (side + gap)
            colour = (31, 119, 180) if fine else (255, 127, 14)
            sheet.paste(colour, (at, top, at + side, top + side))
            paste(pixels, side - 6, (at + 3, top + 3))
    sheet.quantize(32).save(path, optimize=True)


if __name__ == "__main__":
    main()
