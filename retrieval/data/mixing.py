"""Two images in one: MixUp (Zhang et al., ICLR 2018) and CutMix (Yun et al., ICCV 2019), the same
for a whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.recipe.tables import Augmentation

_MIX = 3  # keeps these draws apart from others of the same seed, epoch and batch


@dataclass(frozen=True)
class Mix:
    """What a batch's images are mixed with.

    Attributes:
        partner: (B,) for each row the one that is mixed in.
        weight: of a row's own label, and of its own pixels; the partner's is the rest.
        box: rows and columns that come from the partner whole; None: all pixels are weighted means.
    """

    partner: NDArray[np.int64]
    weight: float
    box: tuple[slice, slice] | None

    @classmethod
    def drawn(
        cls, table: Augmentation, key: tuple[int, int, int], size: int, shape: tuple[int, int]
    ) -> Mix | None:
        """Return that of a batch, which follows from (seed, epoch, batch); None where the recipe
        mixes nothing.

        Args:
            table: the recipe's.
            key: seed, epoch and batch.
            size: rows of the batch.
            shape: height and width of its images.
        """
        if table.mix is None:
            return None
        random = np.random.default_rng([key[0] % 2**64, *key[1:], _MIX])
        weight, partner = (
            float(random.beta(table.mix_alpha, table.mix_alpha)),
            random.permutation(size),
        )
        if table.mix == "mixup":
            return cls(partner, weight, None)
        part = (1 - weight) ** 0.5
        sides = []
        for whole, centre in zip(shape, random.random(2).tolist(), strict=True):
            middle, half = int(centre * whole), int(part * whole) // 2
            sides.append(slice(max(0, middle - half), min(whole, middle + half)))
        rows, columns = sides
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        return cls(partner, 1 - area / (shape[0] * shape[1]), (rows, columns))

    def of(self, own: NDArray[np.uint8], other: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return images (B, channels, H, W) with others mixed in."""
        if self.box is None:
            mean = self.weight * own.astype(np.float32) + (1 - self.weight) * other.astype(
                np.float32
            )
            return np.rint(mean).astype(np.uint8)
        mixed = own.copy()
        mixed[:, :, *self.box] = other[:, :, *self.box]
        return mixed


@dataclass(frozen=True)
class MixedLabels:
    """The labels of images of which each is two.

    Attributes:
        own: (B,) class ids.
        other: (B,) those of what is mixed in.
        weight: of the first; the second's is the rest.
    """

    own: Tensor
    other: Tensor
    weight: float

    def __len__(self) -> int:
        return len(self.own)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Return them on a device."""
        own, other = (each.to(device, non_blocking=non_blocking) for each in (self.own, self.other))
        return type(self)(own, other, self.weight)

    def pin_memory(self) -> Self:
        """Return them in memory that a GPU copies from while the CPU goes on."""
        return type(self)(self.own.pin_memory(), self.other.pin_memory(), self.weight)


Labels = Tensor | MixedLabels
"""What `TrainBatches` gives with a batch's inputs."""
