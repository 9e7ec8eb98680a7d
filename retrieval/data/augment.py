"""Random changes to training images, each one a function of (seed, epoch, batch, place in the
batch).

torchvision's random transforms draw from torch's global generator, which the model's dropout draws
from too: then numbers would depend on how many processes load images, and on where a run was
resumed. So the draws of crops and mirror images are made here, and torchvision's operations
(`transforms.v2.functional`) carry them out; other transforms are lent a generator
(`retrieval.data.drawing`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, RetrievalError
from retrieval.serving.images import to_mode

if TYPE_CHECKING:
    from PIL.Image import Image

    from retrieval.model.contracts import Transform
    from retrieval.recipe.read import Recipe
    from retrieval.recipe.tables import Augmentation
    from retrieval.serving.images import Preprocessing

_TRIES = 10
_DRAWS = 3 + 2 * _TRIES  # mirror, top, left, then area and aspect ratio of each try
_PURPOSE, _SEEDS = 1, 2  # keep these draws apart from others of the same seed and epoch


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
    """Return (top, left, height, width) of a random crop, as torchvision's `RandomResizedCrop`
    distributes it.

    Its area is a uniform part of the image's, its aspect ratio log-uniform; after ten boxes that do
    not fit, the largest central one that keeps the ratio in range (Szegedy et al., "Going Deeper
    with Convolutions", CVPR 2015, §6).

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


def built_transforms(recipe: Recipe) -> tuple[Transform, ...]:
    """Return what a recipe's `[augmentation] transforms` name, in order.

    Raises:
        PluginError: the plugins have no such part.
        RecipeError: the parameters do not fit, or the factory refuses them.
    """
    made = recipe.augmentation.transforms
    return tuple(recipe.loaded.build("augmentations", values) for values in made)


@dataclass(frozen=True)
class Draws:
    """What decides the changes of a batch's images, or of some of them, or of one.

    Attributes:
        uniform: one row of `draw_changes` for each.
        seeds: for each one of what its transforms draw.
    """

    uniform: NDArray[np.float64]
    seeds: NDArray[np.int64]

    def __getitem__(self, rows: slice | int | NDArray[np.int64] | None) -> Draws:
        return Draws(self.uniform[rows], self.seeds[rows])


@dataclass(frozen=True)
class Changes:
    """The random changes of a recipe.

    Attributes:
        table: what may change.
        transforms: those that it names, built.
    """

    table: Augmentation
    transforms: tuple[Transform, ...] = ()

    @property
    def active(self) -> bool:
        """Whether anything is changed at all."""
        return self.table.active

    def draw(self, seed: int, epoch: int, batch: int, size: int) -> Draws:
        """Return what decides the changes of a batch of `size` rows."""
        random = np.random.default_rng([seed % 2**64, epoch, batch, _SEEDS])
        return Draws(draw_changes(seed, epoch, batch, size), random.integers(2**62, size=size))

    def changed(
        self, image: Image, preprocessing: Preprocessing, draws: Draws
    ) -> NDArray[np.uint8]:
        """Return pixels (channels, H, W) of a decoded image after its random changes.

        A random crop is taken from the whole image, and takes the place of `preprocessing`'s resize
        and centre crop.

        Args:
            image: the decoded image.
            preprocessing: size, channels and interpolation of the result.
            draws: those of this image.

        Raises:
            DataError: a transform fails.
        """
        if self.table.crop_scale is None:
            pixels = preprocessing(image)
        else:
            from torchvision.transforms import InterpolationMode
            from torchvision.transforms.v2 import functional

            # grey or RGB first: a palette cannot be interpolated
            image = to_mode(image, "L" if preprocessing.channels == 1 else "RGB")
            box = crop_box(
                draws.uniform,
                image.height,
                image.width,
                self.table.crop_scale,
                self.table.crop_ratio,
            )
            mode = InterpolationMode(preprocessing.interpolation)
            image = functional.resized_crop(
                image, *box, size=list(preprocessing.size), interpolation=mode
            )
            pixels = np.asarray(image, dtype=np.uint8)
            pixels = pixels[None] if preprocessing.channels == 1 else pixels.transpose(2, 0, 1)
        if draws.uniform[0] < self.table.horizontal_flip:
            pixels = pixels[:, :, ::-1]
        return (
            self.transformed(np.array(pixels)[None], draws[None])[0] if self.transforms else pixels
        )

    def mirror(self, pixels: NDArray[np.uint8], draws: Draws) -> NDArray[np.uint8]:
        """Mirror some of a batch's images (B, channels, H, W) left to right, in place."""
        chosen = draws.uniform[:, 0] < self.table.horizontal_flip
        if chosen.any():
            pixels[chosen] = pixels[chosen, ..., ::-1]
        return pixels

    def transformed(self, pixels: NDArray[np.uint8], draws: Draws) -> NDArray[np.uint8]:
        """Return pixels (B, channels, H, W) after the transforms, each image by itself.

        Those that are given may change.

        Raises:
            DataError: a transform fails, or gives another size or type.
        """
        import torch

        from retrieval.data.drawing import Drawing

        images, lent = torch.from_numpy(pixels), Drawing()
        shape, out = images.shape[1:], torch.empty_like(images)
        for row, (image, seed) in enumerate(zip(images, draws.seeds.tolist(), strict=True)):
            lent.seed(seed)
            for number, transform in enumerate(self.transforms):
                try:
                    with lent:
                        changed = transform(image)
                except RetrievalError:
                    raise
                except Exception as fault:  # whatever a plugin's transform raises
                    raise DataError(
                        f"{self._named(number)} fails: {type(fault).__name__}: {fault}"
                    ) from fault
                if not isinstance(changed, torch.Tensor):
                    raise DataError(
                        f"{self._named(number)} gives {type(changed).__name__} instead of a tensor."
                    )
                if changed.dtype != torch.uint8 or changed.shape != shape:
                    raise DataError(
                        f"{self._named(number)} gives {str(changed.dtype).removeprefix('torch.')}"
                        f" {tuple(changed.shape)}; the backbone takes uint8 {tuple(shape)}. Set its"
                        " parameters so that it keeps size and type."
                    )
                image = changed
            out[row] = image
        return out.numpy()

    def _named(self, number: int) -> str:
        return f"[augmentation] transforms.{number} ({type(self.transforms[number]).__name__})"
