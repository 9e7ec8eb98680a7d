"""Random changes to training images, each a function of (seed, epoch, batch, place in the batch).

`Changes` crops, mirrors and transforms each image. `Mix` combines two images of a batch (MixUp:
Zhang et al., ICLR 2018; CutMix: Yun et al., ICCV 2019). `Drawing` redirects the random draws of
transforms to a generator of its own.

torchvision's random transforms draw from torch's global generator, as the model's dropout does, so
their results would depend on the number of processes that load images, and on where a run was
resumed. This module therefore draws crops and mirror images itself, and applies them with
torchvision's functions (`transforms.v2.functional`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from retrieval.base.arrays import Floats64, Ints, Pixels
from retrieval.data.texts import TextLabels
from retrieval.errors import DataError, RetrievalError
from retrieval.images.preprocessing import to_mode
from retrieval.model.contracts import in_words

if TYPE_CHECKING:
    from PIL.Image import Image

    from retrieval.images.preprocessing import Preprocessing
    from retrieval.model.contracts import Transform
    from retrieval.recipe.read import Recipe
    from retrieval.recipe.tables import Augmentation

# Number of random boxes that a crop tries, as in torchvision.
_TRIES = 10
# Draws per image: mirror, top, left, the area of each box, the aspect ratio of each box. All are
# drawn for every image, so that one image's luck does not shift the draws of the next.
_DRAWS = 3 + 2 * _TRIES
# Keep the three kinds of draws independent, although seed, epoch and batch are the same.
_UNIFORM_KEY = 1
_SEEDS_KEY = 2
_MIX_KEY = 3


def crop_box(
    draws: Floats64,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int]:
    """Return a random crop (top, left, height, width) like torchvision's `RandomResizedCrop`.

    The crop's share of the image's area is uniform within `scale`, its aspect ratio (width /
    height) log-uniform within `ratio`. If none of ten boxes fits, the crop is the largest central
    box with a ratio in range (Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, §6).
    `draws` is one row of `Draws.uniform`.
    """
    low = math.log(ratio[0])
    high = math.log(ratio[1])
    _, top, left, *tries = draws.tolist()
    for area_draw, ratio_draw in zip(tries[:_TRIES], tries[_TRIES:], strict=True):
        share = scale[0] + (scale[1] - scale[0]) * area_draw
        area = height * width * share
        # Logarithms make a ratio of 2 as likely as one of 1/2.
        aspect = math.exp(low + (high - low) * ratio_draw)
        box_width = round(math.sqrt(area * aspect))
        box_height = round(math.sqrt(area / aspect))
        if 1 <= box_width <= width and 1 <= box_height <= height:
            first_row = int(top * (height - box_height + 1))
            first_column = int(left * (width - box_width + 1))
            return first_row, first_column, box_height, box_width
    box_width = max(1, min(width, round(height * ratio[1])))
    box_height = max(1, min(height, round(width / ratio[0])))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def built_transforms(recipe: Recipe) -> tuple[Transform, ...]:
    """Build the transforms in a recipe's `[augmentation] transforms`, in order."""
    tables = recipe.augmentation.transforms
    return tuple(recipe.loaded.build("augmentations", values) for values in tables)


@dataclass(frozen=True)
class Draws:
    """Random draws that determine the changes to one or more images.

    Attributes:
        uniform: one row of draws in [0, 1) per image.
        seeds: one seed per image, for its transforms.
    """

    uniform: Floats64
    seeds: Ints

    def __getitem__(self, rows: slice | int | Ints) -> Draws:
        return Draws(self.uniform[rows], self.seeds[rows])


@dataclass(frozen=True)
class Changes:
    """The random changes of a recipe's `[augmentation]`, with its transforms built."""

    table: Augmentation
    transforms: tuple[Transform, ...] = ()

    def draw(
        self,
        seed: int,
        epoch: int,
        batch: int,
        size: int,
    ) -> Draws:
        """Return the draws that determine the changes to a batch of `size` rows."""
        key = [seed % 2**64, epoch, batch]
        for_uniform = np.random.default_rng([*key, _UNIFORM_KEY])
        for_seeds = np.random.default_rng([*key, _SEEDS_KEY])
        uniform = for_uniform.random((size, _DRAWS))
        return Draws(uniform, for_seeds.integers(2**62, size=size))

    def crop(self, image: Image, preprocessing: Preprocessing, draws: Draws) -> Pixels:
        """Return a random crop of an image at the encoder's input size (channels, H, W)."""
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional

        assert self.table.crop_scale is not None
        # Convert to grey or RGB first, because a palette cannot be interpolated.
        image = to_mode(image, "L" if preprocessing.channels == 1 else "RGB")
        size = image.size[::-1]
        scale = self.table.crop_scale
        ratio = self.table.crop_ratio
        image = functional.resized_crop(
            image,
            *crop_box(draws.uniform, *size, scale, ratio),
            size=list(preprocessing.size),
            interpolation=InterpolationMode(preprocessing.interpolation),
        )
        pixels = np.asarray(image, dtype=np.uint8)
        if pixels.ndim == 2:
            return pixels[None]
        return pixels.transpose(2, 0, 1)

    def mirror(self, pixels: Pixels, draws: Draws) -> Pixels:
        """Mirror some of a batch's images (B, channels, H, W) left to right, in place."""
        chosen = draws.uniform[:, 0] < self.table.horizontal_flip
        pixels[chosen] = pixels[chosen, ..., ::-1]
        return pixels

    def transformed(self, pixels: Pixels, draws: Draws) -> Pixels:
        """Return an image's pixels (channels, H, W), transformed; may modify the input.

        Raises:
            DataError: a transform fails, or changes size or type.
        """
        image = torch.from_numpy(pixels)
        shape = image.shape
        # One object for all transforms: each continues the sequence where the last one stopped.
        drawing = Drawing(int(draws.seeds))
        for number, transform in enumerate(self.transforms):
            subject = f"[augmentation] transforms.{number} ({type(transform).__name__})"
            try:
                with drawing:
                    image = transform(image)
            except RetrievalError:
                raise
            except Exception as fault:  # a plugin's transform may raise anything
                raise DataError(f"{subject} fails: {type(fault).__name__}: {fault}") from fault
            is_uint8 = isinstance(image, Tensor) and image.dtype == torch.uint8
            if not is_uint8 or image.shape != shape:
                raise DataError(
                    f"{subject} gives {in_words(image)}; the backbone takes uint8 of shape"
                    f" {tuple(shape)}. Set its parameters so that it keeps size and type."
                )
        return image.numpy()


@dataclass(frozen=True)
class Mix:
    """How a batch's images are mixed with one another.

    Attributes:
        partner: (B,), number of the row that is mixed into each row.
        weight: weight of a row's own label and pixels; the partner's is 1 − weight.
        box: rows and columns of pixels that are copied from the partner; `None` if every pixel is
            a weighted mean.
    """

    partner: Ints
    weight: float
    box: tuple[slice, slice] | None

    @classmethod
    def drawn(
        cls,
        table: Augmentation,
        key: tuple[int, int, int],
        size: int,
        shape: tuple[int, int],
    ) -> Mix | None:
        """Draw the mix of a batch of `size` images; return None if the table asks for none.

        `key` holds seed, epoch and batch number, `shape` is (H, W).
        """
        if table.mix is None:
            return None
        seed, epoch, batch = key
        random = np.random.default_rng([seed % 2**64, epoch, batch, _MIX_KEY])
        weight = float(random.beta(table.mix_alpha, table.mix_alpha))
        partner = random.permutation(size)
        if table.mix == "mixup":
            return cls(partner, weight, None)
        # The box's share of height and width: its area is 1 − weight.
        side = (1 - weight) ** 0.5
        spans = []
        for length, centre in zip(shape, random.random(2).tolist(), strict=True):
            middle = int(centre * length)
            half = int(side * length) // 2
            start = max(0, middle - half)
            stop = min(length, middle + half)
            spans.append(slice(start, stop))
        rows, columns = spans
        box_height = rows.stop - rows.start
        box_width = columns.stop - columns.start
        # The image's edge may cut the box, so the labels' weight follows from the true area.
        weight = 1 - box_height * box_width / math.prod(shape)
        return cls(partner, weight, (rows, columns))

    def mixed(self, images: Pixels, partners: Pixels) -> Pixels:
        """Return images (B, channels, H, W) with their partners' images mixed in."""
        if self.box is None:
            own_part = self.weight * images.astype(np.float32)
            partners_part = (1 - self.weight) * partners.astype(np.float32)
            # Round, because the conversion alone would cut off and make every image darker.
            return np.rint(own_part + partners_part).astype(np.uint8)
        mixed = images.copy()
        mixed[:, :, *self.box] = partners[:, :, *self.box]
        return mixed


@dataclass(frozen=True)
class MixedLabels:
    """The two labels of each mixed image.

    Attributes:
        own: class ids (B,) of the images.
        other: class ids (B,) of the images mixed in.
        weight: weight of `own`; that of `other` is 1 − weight.
    """

    own: Tensor
    other: Tensor
    weight: float

    def __len__(self) -> int:
        return len(self.own)

    def to(
        self,
        device: torch.device,
        *,
        non_blocking: bool = False,
    ) -> Self:
        """Return the labels on a device."""
        own = self.own.to(device, non_blocking=non_blocking)
        other = self.other.to(device, non_blocking=non_blocking)
        return replace(self, own=own, other=other)

    def pin_memory(self) -> Self:
        """Return the labels in pinned memory, which a GPU copies asynchronously."""
        return replace(self, own=self.own.pin_memory(), other=self.other.pin_memory())


Labels = Tensor | MixedLabels | TextLabels
"""The labels of a training batch."""


_FUNCTIONS = (
    "bernoulli multinomial normal poisson rand randint randn randperm _sample_dirichlet"
    " _standard_gamma"
)
_METHODS = (
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_"
    " uniform_"
)
# Torch's random functions that take a keyword `generator`.
_DRAWING: frozenset[Any] = frozenset(
    [getattr(torch, name) for name in _FUNCTIONS.split()]
    + [getattr(Tensor, name) for name in _METHODS.split()]
)
# Torch's functions that draw but take no generator, or that seed the global generator.
_REFUSED = frozenset(
    getattr(torch, name)
    for name in ("rand_like", "randn_like", "randint_like", "binomial", "manual_seed", "seed")
)


class Drawing(TorchFunctionMode):
    """Context manager in which torch's random functions draw from its own generator.

    It affects only this thread. A second `with` block of the same object continues the sequence.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        """Call a torch function, with this object's generator if the function draws."""
        kwargs = kwargs or {}
        if func in _DRAWING and kwargs.get("generator") is None:
            kwargs = kwargs | {"generator": self.generator}
        if func in _REFUSED:
            raise DataError(
                f"An augmentation calls torch.{func.__name__}, whose numbers could not be drawn"
                " again when a run is resumed. Use torch.rand, torch.randn or torch.randint, and"
                " the seed that is set already."
            )
        return func(*args, **kwargs)
