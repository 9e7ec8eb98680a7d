"""Image transforms of torchvision (`torchvision.transforms.v2`), and ways to combine them.

Transforms that change an image's type or size, and those for boxes, masks and videos, are left out.
"""

from __future__ import annotations

import io
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from retrieval.plugin import Factories, Part
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Quality = Annotated[int, Field(ge=1, le=100)]
Interpolation = Literal["nearest", "bilinear"]
UNCHANGED = (
    "AugMix",
    "AutoAugment",
    "ColorJitter",
    "ElasticTransform",
    "GaussianBlur",
    "RandAugment",
    "RandomAdjustSharpness",
    "RandomAutocontrast",
    "RandomChannelPermutation",
    "RandomCrop",
    "RandomEqualize",
    "RandomErasing",
    "RandomGrayscale",
    "RandomInvert",
    "RandomPerspective",
    "RandomPosterize",
    "RandomResizedCrop",
    "RandomSolarize",
    "TrivialAugmentWide",
)
Transforms = Annotated[list[Any], Part("augmentations")]


class GaussianNoise:
    """Add independent Gaussian noise to each pixel and channel.

    Args:
        sigma: standard deviation of the noise, on a scale from black 0 to white 1.
    """

    def __init__(self, sigma: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1) -> None:
        self.sigma = sigma

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return pixels, uint8 (channels, H, W)."""
        noise = torch.randn(pixels.shape) * (255 * self.sigma)
        return pixels.add(noise).round_().clamp_(0, 255).to(torch.uint8)


class JPEG:
    """Compress the image as JPEG with a random quality.

    Args:
        quality: smallest and largest quality, 1 to 100.
    """

    def __init__(self, quality: tuple[Quality, Quality] = (30, 95)) -> None:
        if quality[0] > quality[1]:
            raise ValueError(f"quality = {list(quality)}: the smallest is larger than the largest")
        self.quality = quality

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return pixels, uint8 (channels, H, W), 1 or 3 channels."""
        quality = int(torch.randint(self.quality[0], self.quality[1] + 1, ()))
        image = Image.fromarray(
            pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).numpy()
        )
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        # `np.array` copies: torch warns of Pillow's read-only memory.
        lossy = torch.from_numpy(np.array(Image.open(file)))
        if len(pixels) == 1:
            return lossy[None]
        return lossy.permute(2, 0, 1).contiguous()


def affine(
    degrees: float | tuple[float, float],
    translate: tuple[float, float] | None = None,
    scale: tuple[float, float] | None = None,
    shear: float | list[float] | None = None,
    interpolation: Interpolation = "bilinear",
    fill: float = 0.0,
) -> v2.RandomAffine:
    """Turn, move, scale and shear the image about its centre.

    Args:
        degrees: smallest and largest angle; one number x stands for (−x, x).
        translate: largest shifts, as shares of width and height; by default no shift.
        scale: smallest and largest factor; by default no scaling.
        shear: largest angle along x, or smallest and largest, or smallest and largest along x and
            then along y; by default no shear.
        interpolation: interpolation between pixels.
        fill: value, 0 to 255, of pixels from outside the image.
    """
    mode = InterpolationMode(interpolation)
    return v2.RandomAffine(_angles(degrees), translate, scale, shear, interpolation=mode, fill=fill)


def rotation(
    degrees: float | tuple[float, float],
    interpolation: Interpolation = "bilinear",
    fill: float = 0.0,
) -> v2.RandomRotation:
    """Turn the image about its centre.

    Args:
        degrees: smallest and largest angle; one number x stands for (−x, x).
        interpolation: interpolation between pixels.
        fill: value, 0 to 255, of pixels from outside the image.
    """
    return v2.RandomRotation(
        _angles(degrees), interpolation=InterpolationMode(interpolation), fill=fill
    )


def _angles(degrees: float | tuple[float, float]) -> float | list[float]:
    if isinstance(degrees, tuple):
        return list(degrees)
    return degrees


def vertical_flip(p: Probability = 0.5) -> v2.RandomVerticalFlip:
    """Mirror the image top to bottom, for example for aerial photographs.

    Args:
        p: probability of mirroring.
    """
    return v2.RandomVerticalFlip(p)


def random_apply(transforms: Transforms, p: Probability = 0.5) -> v2.RandomApply:
    """Apply all of the transforms, or none.

    Args:
        transforms: transforms, applied in this order.
        p: probability of applying them.
    """
    return v2.RandomApply(transforms, p)


def random_choice(transforms: Transforms, p: list[Probability] | None = None) -> v2.RandomChoice:
    """Apply one transform, chosen at random.

    Args:
        transforms: transforms to choose from.
        p: weight of each transform; equal by default.
    """
    return v2.RandomChoice(transforms, p)


def random_order(transforms: Transforms) -> v2.RandomOrder:
    """Apply all of the transforms in random order.

    Args:
        transforms: transforms to apply.
    """
    return v2.RandomOrder(transforms)


def every() -> Factories:
    """Return all augmentations by their names in torchvision."""
    return {
        **{name: getattr(v2, name) for name in UNCHANGED},
        "GaussianNoise": GaussianNoise,
        "JPEG": JPEG,
        "RandomAffine": affine,
        "RandomApply": random_apply,
        "RandomChoice": random_choice,
        "RandomOrder": random_order,
        "RandomRotation": rotation,
        "RandomVerticalFlip": vertical_flip,
    }
