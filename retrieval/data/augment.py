"""Random changes to training images, each one a function of (seed, epoch, batch, place in the batch).

torchvision's random transforms draw from torch's global generator, which the model's dropout draws from too: then
numbers would depend on how many processes load images, and on where a run was resumed. So the draws are made here,
and torchvision's operations (`transforms.v2.functional`) carry them out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.images import to_mode

if TYPE_CHECKING:
    from PIL.Image import Image

    from retrieval.recipe.tables import Augmentation
    from retrieval.serving.images import Preprocessing

_TRIES = 10
_DRAWS = 3 + 2 * _TRIES  # mirror, top, left, then area and aspect ratio of each try
_PURPOSE = 1  # keeps these draws apart from others of the same seed and epoch


def draw_changes(seed: int, epoch: int, batch: int, size: int) -> NDArray[np.float64]:
    """Return uniform draws in [0, 1), one row for each of a batch's `size` items."""
    return np.random.default_rng([seed % 2**64, epoch, batch, _PURPOSE]).random((size, _DRAWS))


def crop_box(
    draws: NDArray[np.float64],
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of a random crop, as torchvision's `RandomResizedCrop` distributes it.

    Its area is a uniform part of the image's, its aspect ratio log-uniform; after ten boxes that do not fit, the
    largest central one that keeps the ratio in range (Szegedy et al., "Going Deeper with Convolutions", CVPR
    2015, §6).

    Args:
        draws: one row of `draw_changes`.
        height: the image's, in pixels.
        width: likewise.
        scale: smallest and largest part of the area.
        ratio: smallest and largest width / height.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    _, top, left, *tries = draws.tolist()
    for part, shape in zip(tries[:_TRIES], tries[_TRIES:], strict=True):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * part)
        aspect = math.exp(low + (high - low) * shape)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 1 <= w <= width and 1 <= h <= height:
            return int(top * (height - h + 1)), int(left * (width - w + 1)), h, w
    own = width / height
    w = width if own <= ratio[1] else max(1, round(height * ratio[1]))
    h = height if own >= ratio[0] else max(1, round(width / ratio[0]))
    return (height - h) // 2, (width - w) // 2, h, w


def changed_pixels(
    image: Image, preprocessing: Preprocessing, augmentation: Augmentation, draws: NDArray[np.float64]
) -> NDArray[np.uint8]:
    """Return pixels (channels, H, W) of a decoded image after its random changes.

    A random crop is taken from the whole image, and takes the place of `preprocessing`'s resize and centre crop.

    Args:
        image: the decoded image.
        preprocessing: size, channels and interpolation of the result.
        augmentation: what may change.
        draws: one row of `draw_changes`.
    """
    if augmentation.crop_scale is None:
        pixels = preprocessing(image)
    else:
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional

        # grey or RGB first: a palette cannot be interpolated
        image = to_mode(image, "L" if preprocessing.channels == 1 else "RGB")
        box = crop_box(draws, image.height, image.width, augmentation.crop_scale, augmentation.crop_ratio)
        mode = InterpolationMode(preprocessing.interpolation)
        image = functional.resized_crop(image, *box, size=list(preprocessing.size), interpolation=mode)
        pixels = np.asarray(image, dtype=np.uint8)
        pixels = pixels[None] if preprocessing.channels == 1 else pixels.transpose(2, 0, 1)
    return pixels[:, :, ::-1] if draws[0] < augmentation.horizontal_flip else pixels


def mirror(
    pixels: NDArray[np.uint8], augmentation: Augmentation, draws: NDArray[np.float64]
) -> NDArray[np.uint8]:
    """Mirror some of a batch's images (B, channels, H, W) left to right, in place.

    Args:
        pixels: the batch.
        augmentation: with what probability.
        draws: (B, …) rows of `draw_changes`.
    """
    chosen = draws[:, 0] < augmentation.horizontal_flip
    if chosen.any():
        pixels[chosen] = pixels[chosen, ..., ::-1]
    return pixels
