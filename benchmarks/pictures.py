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
FACES = tuple(
    f"DejaVu{family}{style}"
    for family, slant in (("Sans", "Oblique"), ("Serif", "Italic"), ("SansMono", "Oblique"))
    for style in ("", "-Bold", f"-{slant}", f"-Bold{slant}")
)
FONTS = Path("/usr/share/fonts/truetype/dejavu")
GLYPHS = 400
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


def glyphs() -> Pictures:
    """Draw 400 characters (48 × 48) in 12 faces of DejaVu, turned and moved a little.

    All faces have the characters, and they look different in each face.
    """
    from PIL import Image, ImageDraw, ImageFont

    basic = ImageFont.Layout.BASIC
    fonts = [ImageFont.truetype(str(FONTS / f"{x}.ttf"), 64, layout_engine=basic) for x in FACES]
    absent = [bytes(font.getmask("\U0010fffe")) for font in fonts]
    seen: set[bytes] = set()
    known = []
    for code in range(0x21, 0x2C00):
        masks = [font.getmask(chr(code)) for font in fonts]
        drawn = [bytes(mask) for mask in masks]
        if all(mask.getbbox() for mask in masks) and not any(
            mask == other for mask, other in zip(drawn, absent, strict=True)
        ):
            if not seen & {drawn[0], drawn[4]}:  # the Latin, Greek and Cyrillic A look alike
                known.append(chr(code))
            seen |= {drawn[0], drawn[4]}
    characters = sorted(np.random.default_rng(0).permutation(known)[:GLYPHS].tolist())
    rng = np.random.default_rng(1)
    images = []
    for character in characters:
        for font in fonts:
            image = Image.new("L", (96, 96), 255)
            ImageDraw.Draw(image).text((48, 48), character, fill=0, font=font, anchor="mm")
            images.append(by_hand(image, 48, rng))
    return np.stack(images), np.array([f"{ord(c):04x}" for c in characters for _ in FACES])


def by_hand(image: Any, size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return a square drawing of `size` pixels, turned, sheared, scaled and moved a little."""
    from PIL import Image

    turn, shear, grow = rng.normal(0, 0.12), rng.normal(0, 0.12), np.exp(rng.normal(0, 0.1))
    cos, sin = np.cos(turn) / grow, np.sin(turn) / grow
    matrix = np.array([[cos, sin + shear], [-sin, cos]])
    half = image.width / 2
    x, y = half - matrix @ (half + rng.normal(0, 0.03 * image.width, 2))
    (a, b), (c, d) = matrix.tolist()
    place, smooth = (a, b, x, c, d, y), Image.Resampling.BILINEAR
    moved = image.transform(image.size, Image.Transform.AFFINE, place, smooth, fillcolor=255)
    return np.asarray(moved.resize((size, size), Image.Resampling.BOX))


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
