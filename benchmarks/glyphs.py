"""A set of many classes: Han characters in twelve of Debian's font families, drawn with Pillow.

A class is a character, its items are the families' drawings of it, each turned, sheared, scaled and
moved a little and with some noise (seeded: every machine with the same fonts draws the same). The
characters are the first ones that GB 2312, Big 5's first level, JIS X 0208's first level and KS X
1001 share, so that every family has them in one form; a glyph that a font lacks is found by drawing
and left out, never drawn as an empty box.

    apt-get install fonts-noto-cjk fonts-ipafont-mincho fonts-arphic-uming fonts-arphic-ukai fonts-arphic-gkai00mp \
        fonts-babelstone-han fonts-droid-fallback fonts-lxgw-wenkai fonts-vlgothic fonts-wqy-zenhei fonts-baekmuk

The file is a plugin: `plugins = ["benchmarks/glyphs.py"]` and `[data] name = "glyphs.han"` in a
recipe.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from retrieval.errors import DataError
from retrieval.plugin import Dataset, hookimpl

FONTS = Path("/usr/share/fonts")
FAMILIES = {
    "Noto Sans CJK JP": ("opentype/noto/NotoSansCJK-Regular.ttc", "fonts-noto-cjk"),
    "Noto Serif CJK JP": ("opentype/noto/NotoSerifCJK-Bold.ttc", "fonts-noto-cjk"),
    "IPAMincho": ("opentype/ipafont-mincho/ipam.ttf", "fonts-ipafont-mincho"),
    "AR PL UMing": ("truetype/arphic/uming.ttc", "fonts-arphic-uming"),
    "AR PL UKai": ("truetype/arphic/ukai.ttc", "fonts-arphic-ukai"),
    "AR PL KaitiM GB": ("truetype/arphic-gkai00mp/gkai00mp.ttf", "fonts-arphic-gkai00mp"),
    "BabelStone Han": ("truetype/babelstone/BabelStoneHan.ttf", "fonts-babelstone-han"),
    "Droid Sans Fallback": ("truetype/droid/DroidSansFallbackFull.ttf", "fonts-droid-fallback"),
    "LXGW WenKai": ("truetype/lxgw-wenkai/LXGWWenKai-Light.ttf", "fonts-lxgw-wenkai"),
    "VL Gothic": ("truetype/vlgothic/VL-Gothic-Regular.ttf", "fonts-vlgothic"),
    "WenQuanYi Zen Hei": ("truetype/wqy/wqy-zenhei.ttc", "fonts-wqy-zenhei"),
    "Baekmuk Batang": ("truetype/baekmuk/batang.ttf", "fonts-baekmuk"),
}
"""Each family's file under `FONTS`, and the Debian package it comes in."""

ABSENT = "\U0010fffe"
"""No font draws this: what it gives is what a font gives for a glyph that it lacks."""


def characters() -> Iterator[str]:
    """Yield the Han characters that four national standards share, in Unicode's order."""
    for code in range(0x4E00, 0x9FA6):
        character = chr(code)
        try:
            character.encode("gb2312")
            character.encode("ks_c_5601-1987")
            big5, jis = character.encode("big5"), character.encode("euc_jp")
        except UnicodeEncodeError:
            continue
        if b"\xa4\x40" <= big5 <= b"\xc6\x7e" and b"\xb0\xa1" <= jis <= b"\xcf\xd3":
            yield character


def draw(font: ImageFont.FreeTypeFont, character: str, side: int) -> NDArray[np.uint8] | None:
    """Return a character in black on white (side, side); None: the font lacks it."""
    mask = font.getmask(character)
    absent = _absent(font)
    if mask.getbbox() is None or (mask.size == absent[0] and bytes(mask) == absent[1]):
        return None
    image = Image.new("L", (side, side), 255)
    ImageDraw.Draw(image).text((side / 2, side / 2), character, fill=0, font=font, anchor="mm")
    return np.asarray(image)


@functools.lru_cache(maxsize=64)
def _absent(font: ImageFont.FreeTypeFont) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(ABSENT)
    return mask.size, bytes(mask)


def disturb(
    image: NDArray[np.uint8], size: int, strength: float, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Return a drawing of twice the size, turned, sheared, scaled, moved, made small, and with
    noise.
    """
    turn, shear = rng.normal(0, 0.12 * strength), rng.normal(0, 0.12 * strength)
    scale = np.exp(rng.normal(0, 0.1 * strength))
    cos, sin = np.cos(turn) / scale, np.sin(turn) / scale
    a, b, d, e = cos, sin + shear, -sin, cos
    half = len(image) / 2
    dx, dy = rng.normal(0, 0.03 * strength * len(image), 2)
    c, f = half - a * (half + dx) - b * (half + dy), half - d * (half + dx) - e * (half + dy)
    warped = Image.fromarray(image).transform(
        image.shape[::-1],
        Image.Transform.AFFINE,
        (a, b, c, d, e, f),
        Image.Resampling.BICUBIC,
        fillcolor=255,
    )
    small = np.asarray(warped.resize((size, size), Image.Resampling.BOX), dtype=float)
    contrast = rng.uniform(0.6, 1.0)
    noisy = 255 - contrast * (255 - small) + rng.normal(0, 12 * strength, small.shape)
    return np.clip(noisy, 0, 255).astype(np.uint8)


class Glyphs(Dataset):
    """Han characters in twelve of Debian's font families: a class a character, an item a family.

    Args:
        classes: how many characters.
        size: height and width of an image, in pixels.
        strength: how much the drawings are disturbed; 0: not at all, but for their contrast.
        seed: of the disturbances.
    """

    def __init__(
        self, classes: int = 1200, size: int = 48, strength: float = 1.0, seed: int = 0
    ) -> None:
        side = 2 * size
        fonts = [(name, _font(name, round(0.8 * side))) for name in FAMILIES]
        images: list[NDArray[np.uint8]] = []
        labels: list[str] = []
        keys: list[str] = []
        found = 0
        for character in characters():
            drawn = [(name, draw(font, character, side)) for name, font in fonts]
            if any(image is None for _, image in drawn):
                continue
            rng = np.random.default_rng([seed, ord(character)])
            for name, image in drawn:
                assert image is not None
                images.append(disturb(image, size, strength, rng))
                labels.append(character)
                keys.append(f"{name}/{ord(character):04x}")
            found += 1
            if found == classes:
                break
        if found < classes:
            raise DataError(
                f"[data] classes: the fonts share {found} characters, fewer than {classes}."
            )
        self.arrays = np.stack(images)
        self.labels = labels
        self.keys = keys

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Return one image (size, size), uint8."""
        assert self.arrays is not None
        image: NDArray[Any] = self.arrays[index]
        return image


class Saved(Dataset):
    """Drawings that were written before: arrays `images` (N, size, size) and `labels` (N,) of a
    .npz file.

    Args:
        file: the file.
    """

    def __init__(self, file: Path) -> None:
        with np.load(file, allow_pickle=False) as saved:
            self.arrays, labels = saved["images"], saved["labels"]
        self.labels = labels.tolist()
        self.keys = [f"{label}/{i}" for i, label in enumerate(self.labels)]

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Return one image (size, size), uint8."""
        assert self.arrays is not None
        image: NDArray[Any] = self.arrays[index]
        return image


def _font(name: str, points: int) -> ImageFont.FreeTypeFont:
    file, package = FAMILIES[name]
    try:
        return ImageFont.truetype(str(FONTS / file), points)
    except OSError as error:
        raise DataError(
            f"{FONTS / file} ({name}) cannot be read: install it with `apt-get install {package}`."
        ) from error


@hookimpl
def retrieval_datasets() -> Mapping[str, Any]:
    return {"han": Glyphs, "saved": Saved}
