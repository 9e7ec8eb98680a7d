"""Bytes to pixels: limits, decoding, resizing. The one decoder that training, indexing and serving share.

Training, indexing and serving must see the same pixels: nobody else decodes.
"""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from retrieval.errors import DataError

MAX_PIXELS = 25_000_000
MAX_BYTES = 20_000_000
EXTENSIONS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]


@dataclass(frozen=True)
class Preprocessing:
    """What an image goes through before the encoder: resize the shorter side, crop the centre, normalise.

    Resizing and cropping happen on uint8 pixels, here; `mean` and `std` are applied inside the encoder.

    Attributes:
        size: height and width of the encoder's input, in pixels.
        channels: 1 (grey) or 3 (RGB).
        mean: one number a channel, of pixels scaled to 0–1.
        std: likewise.
        interpolation: how resizing interpolates.
        resize: length of the shorter side before the centre crop; None stretches the image to `size` without a crop.
    """

    size: tuple[int, int]
    channels: int = 3
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    interpolation: Interpolation = "bilinear"
    resize: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one encoder input."""
        return (self.channels, *self.size)

    def __call__(self, image: Image.Image) -> NDArray[np.uint8]:
        """Return the pixels (channels, H, W), uint8, of a decoded image of any size and mode."""
        image = to_mode(image, "L" if self.channels == 1 else "RGB")
        height, width = self.size
        resample = Image.Resampling[self.interpolation.upper()]
        if self.resize is None:
            if image.size != (width, height):
                image = image.resize((width, height), resample)
        else:
            scale = self.resize / min(image.size)
            new = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
            if new != image.size:
                image = image.resize(new, resample)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
        pixels = np.asarray(image, dtype=np.uint8)
        return pixels[None] if self.channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def to_mode(image: Image.Image, mode: Literal["L", "RGB"]) -> Image.Image:
    """Return the image in grey or RGB; transparency lies on white, 16-bit grey is scaled to 8."""
    if image.mode == mode:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float32)
        image = Image.fromarray(
            (values / 257 if image.mode.startswith("I;16") or values.max(initial=0) > 255 else values)
            .clip(0, 255)
            .astype(np.uint8)
        )
    elif image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (255, 255, 255, 255)), rgba)
    return image.convert(mode)


def decode(
    data: bytes | str | os.PathLike[str],
    *,
    max_pixels: int = MAX_PIXELS,
    max_bytes: int = MAX_BYTES,
    name: str | None = None,
) -> Image.Image:
    """Return the decoded image, upright by its EXIF orientation.

    Args:
        data: an encoded image's bytes, or the path of its file.
        max_pixels: larger images are refused by their header, before a pixel is decoded.
        max_bytes: larger files are refused before they are read.
        name: what to call it in an error; a path's own name by default.

    Raises:
        DataError: missing, too large, of no known format, or damaged.
    """
    if isinstance(data, bytes):
        name = name or "the image"
        content = data
    else:
        path = Path(data)
        name = name or str(path)
        try:
            if (size := path.stat().st_size) > max_bytes:
                raise DataError(
                    f"{name} has {size:,} bytes; the limit is {max_bytes:,}. Save it smaller, or raise the limit."
                )
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error
    if len(content) > max_bytes:
        raise DataError(
            f"{name} has {len(content):,} bytes; the limit is {max_bytes:,}. Save it smaller, or raise the limit."
        )
    if not content:
        raise DataError(f"{name} is empty (0 bytes).")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own limit is stricter than Pillow's warning
            image = Image.open(io.BytesIO(content))
            if image.width * image.height > max_pixels:
                raise DataError(
                    f"{name} has {image.width} × {image.height} pixels; the limit is {max_pixels:,}. Save it smaller, or raise the limit."
                )
            image.load()
            return ImageOps.exif_transpose(image)
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{name} is not an image in a format that Pillow knows.") from None
    except Exception as error:  # Pillow's decoders raise whatever their format's parser does
        raise DataError(f"{name} is damaged and cannot be decoded: {error}.") from error


def from_array(array: NDArray[Any]) -> Image.Image:
    """Return a Pillow image of uint8 pixels (H, W) or (H, W, 3)."""
    return Image.fromarray(np.ascontiguousarray(array, dtype=np.uint8))


def find_images(folder: Path) -> list[Path]:
    """Return the image files below a folder, by extension, sorted.

    Raises:
        DataError: it is no folder, or holds no image.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder.")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file())
    if not found:
        raise DataError(f"{folder} holds no image (looked for {', '.join(sorted(EXTENSIONS))}).")
    return found
