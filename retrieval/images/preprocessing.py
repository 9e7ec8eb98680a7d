"""Resize and crop a decoded image to an encoder's input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from PIL import Image

from retrieval.base.arrays import Pixels
from retrieval.images.colour import to_mode

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
_MAX_PIXELS_RESIZED_WHOLE = 4_000_000


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing before the encoder: resize, centre crop and normalise.

    Resizing and cropping work on uint8 pixels; the encoder itself applies `mean` and `std`. The
    pixels are exactly those of torchvision's `Resize` and `CenterCrop` on a Pillow image. The only
    exception are images that would have more than 4 million pixels after resizing: their far ends
    are cut off first.

    Attributes:
        size: height and width of the encoder's input in pixels; a single number means both.
        channels: 1 (grey) or 3 (RGB).
        mean: mean of each channel, for pixels scaled to 0–1; a single number applies to all
            channels.
        std: standard deviation of each channel, likewise.
        interpolation: interpolation method for resizing.
        resize: length of the shorter side before the centre crop. `None` stretches the image to
            `size` without a crop.
    """

    size: tuple[int, int]
    channels: int = 3
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    interpolation: Interpolation = "bilinear"
    resize: int | None = None

    # Pydantic reads this class from a bundle's manifest and must refuse unknown keys.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        size: Any = self.size
        if isinstance(size, int | np.integer):
            object.__setattr__(self, "size", (int(size), int(size)))
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(
                f"size must be a height and a width of at least 1 pixel, not {self.size}"
            )
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (RGB), not {self.channels}")
        for name in ("mean", "std"):
            numbers = tuple(getattr(self, name))
            if len(numbers) not in (1, self.channels):
                plural = f"{self.channels} numbers, or 1 for all of them"
                count = "1 number" if self.channels == 1 else plural
                raise ValueError(f"{name} must be {count}, not {len(numbers)}: {numbers}")
            object.__setattr__(self, name, numbers * (self.channels // len(numbers)))
        if self.resize is not None and self.resize < 1:
            raise ValueError(f"resize must be at least 1 pixel, not {self.resize}")
        if self.interpolation not in get_args(Interpolation):
            raise ValueError(
                f"interpolation must be one of {', '.join(get_args(Interpolation))}, not"
                f" '{self.interpolation}'"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one encoder input."""
        return (self.channels, *self.size)

    def __call__(self, image: Image.Image) -> Pixels:
        """Return the pixels (channels, H, W), uint8, of a decoded image of any size and mode.

        Raises:
            DataError: the image's colour space cannot be converted.
        """
        image = to_mode(image, "L" if self.channels == 1 else "RGB")
        height, width = self.size
        resample = Image.Resampling[self.interpolation.upper()]
        new = (width, height)
        if self.resize is not None:
            if math.prod(_resized(image.size, self.resize)) > _MAX_PIXELS_RESIZED_WHOLE:
                image = _trim(image, self.resize, max(self.size))
            new = _resized(image.size, self.resize)
        left = _centred(new[0], width)
        top = _centred(new[1], height)
        if left > 0 and image.height <= 1.5 * image.width:
            # Pillow resizes such an image along its rows, then along its columns. Cropping between
            # the two gives the same pixels and saves resizing columns that the crop would drop.
            image = image.resize((new[0], image.height), resample)
            image = image.crop((left, 0, left + width, image.height))
            new = (width, new[1])
            left = 0
        if image.size != new:
            image = image.resize(new, resample)
        if image.size != (width, height):
            image = image.crop((left, top, left + width, top + height))
        # `tobytes` takes half as long as Pillow's array interface.
        pixels = np.frombuffer(image.tobytes(), np.uint8).reshape(height, width, self.channels)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _resized(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Return the size of an image whose shorter side becomes `shorter`.

    The longer side is truncated to whole pixels, as in torchvision and timm.
    """
    longer = int(shorter * max(size) / min(size))
    if size[0] <= size[1]:
        return (shorter, longer)
    return (longer, shorter)


def _centred(length: int, crop: int) -> int:
    """Return where a centre crop begins, as in torchvision's `CenterCrop`.

    Half pixels are rounded to even. If the crop is longer than the image, the result is negative:
    the image is padded, and an odd number of padded pixels puts one more at the end.
    """
    if crop <= length:
        return round((length - crop) / 2)
    return -((crop - length) // 2)


def _trim(image: Image.Image, shorter: int, crop: int) -> Image.Image:
    """Cut off the far ends of a very long image, which the centre crop would drop anyway.

    Otherwise, resizing the shorter side of a 1 × 20,000,000 image to 256 would create 1.3 × 10¹²
    pixels.
    """
    side = min(image.size)
    keep = max(side, -(-4 * side * max(crop, shorter) // shorter))
    if max(image.size) <= keep:
        return image
    width = min(image.width, keep)
    height = min(image.height, keep)
    left = (image.width - width) // 2
    top = (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
