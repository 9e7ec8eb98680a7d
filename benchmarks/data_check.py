"""What `retrieval data check` finds by picture, and what it takes for the same by mistake, beside a
difference hash of 64 bits.

Real images that are all different: scikit-learn's 1,797 digits (8 × 8), Fashion-MNIST's 10,000 test
images (28 × 28), and parts of scikit-learn's two photographs. Of 300 of them copies are made: saved
as JPEG of quality 70, twice as large, at three quarters, at half the size and then as JPEG. Run by
hand:

    python benchmarks/data_check.py
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from retrieval.data.near import picture
from retrieval.host.plugins import create
from retrieval.run.check_data import PICTURES
from retrieval.serving.images import from_array
from retrieval.serving.store.search import nearest
from sklearn.datasets import load_sample_images

from bench import finish, markdown, page

COPIES, HAMMING = 300, 10
Mark = Callable[[Image.Image], NDArray[np.float32]]


def images() -> dict[str, list[Image.Image]]:
    """Return the sets, RGB."""
    digits, fashion = create("dataset", "core.digits"), create("dataset", "core.fashion_mnist")
    test = np.flatnonzero(np.asarray(fashion.splits) == "test")
    parts = [
        Image.fromarray(photo[top : top + 106, left : left + 106])
        for photo in load_sample_images().images
        for top in range(0, 4 * 106, 106)
        for left in range(0, 6 * 106, 106)
    ]
    return {
        "digits": [from_array(each).convert("RGB") for each in digits.arrays],
        "Fashion-MNIST": [from_array(fashion.arrays[i]).convert("RGB") for i in test],
        "parts of photographs": parts,
    }


def marked(image: Image.Image) -> NDArray[np.float32]:
    """Return the picture; zeros where there is none."""
    found = picture(image)
    return np.zeros(288, np.float32) if found is None else found


def hashed(image: Image.Image) -> NDArray[np.float32]:
    """Return the bits of a difference hash (64,)."""
    small = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BILINEAR), dtype=np.int64)
    return (small[:, 1:] > small[:, :-1]).ravel().astype(np.float32)


def jpeg(image: Image.Image) -> Image.Image:
    """Return an image as JPEG of quality 70 gives it back."""
    out = io.BytesIO()
    image.save(out, "JPEG", quality=70)
    return Image.open(io.BytesIO(out.getvalue())).convert("RGB")


def scaled(image: Image.Image, factor: float) -> Image.Image:
    """Return an image in another size."""
    return image.resize(
        (round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC
    )


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG 70": jpeg,
    "× 2": lambda image: scaled(image, 2),
    "× ¾": lambda image: scaled(image, 0.75),
    "× ½, JPEG 70": lambda image: jpeg(scaled(image, 0.5)),
}


def measured(every: list[Image.Image], mark: Mark, limit: float) -> tuple[int, list[float]]:
    """Return how many images have another within the limit, and each change's share of copies."""
    own = np.stack([mark(image) for image in every])
    squared, rows = nearest(own, own, 2)
    place = np.arange(len(own))
    other = np.where(rows[:, 0] == place, squared[:, 1], squared[:, 0])
    chosen = np.random.default_rng(0).permutation(len(every))[:COPIES]
    shares = []
    for change in CHANGES.values():
        copies = np.stack([mark(change(every[i])) for i in chosen])
        shares.append(float((np.linalg.norm(copies - own[chosen], axis=1) <= limit).mean()))
    return int((np.sqrt(other) <= limit).sum()), shares


def main() -> None:
    rows: list[list[Any]] = []
    for name, every in images().items():
        for how, mark, limit in (
            (f"picture, within {PICTURES}", marked, PICTURES),
            (f"difference hash, {HAMMING} of 64 bits", hashed, HAMMING**0.5),
        ):
            alarms, shares = measured(every, mark, limit)
            found = [f"{100 * share:.0f} %" for share in shares]
            rows.append([name, how, f"{alarms:,} of {len(every):,}", *found])
    raw = {"date": time.strftime("%Y-%m-%d"), "rows": rows}
    finish("data_check", raw, render(raw))


def render(raw: dict[str, Any]) -> str:
    head = ["images", "the same by", "have another", *(f"found: {name}" for name in CHANGES)]
    return page(f"""
        # Copies by picture

        `python benchmarks/data_check.py`, {raw["date"]}.
        {(__doc__ or "").partition("Run by hand")[0]}

        {markdown(head, raw["rows"])}
    """)


if __name__ == "__main__":
    main()
