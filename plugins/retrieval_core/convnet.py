"""A small convolutional network for images of 28 to 128 pixels, and backbones without weights."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt
from retrieval.plugin import Backbone, Preprocessing
from torch import Tensor, nn

from retrieval_core.pooling import MapPool, Pool


class ConvNet(Backbone):
    """Stages of 3 × 3 convolutions, then pooling. A stage halves the size and doubles the width.

    The features are the width × 2^(depth − 1) channels of the last stage, times cells² with
    `pool = "grid"`. The convolutions are from Simonyan & Zisserman, "Very Deep
    Convolutional Networks for Large-Scale Image Recognition" (ICLR 2015), with batch normalisation.
    The global average of Lin et al., "Network In Network" (ICLR 2014), replaces the linear layers.
    A strided stem is from He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016).

    Args:
        size: height and width of the input in pixels; images are stretched to it.
        channels: 1 for grey, 3 for RGB.
        width: number of channels of the first stage.
        depth: number of stages.
        layers: number of convolutions per stage.
        batch_norm: whether batch normalisation follows each convolution.
        mean: number that is subtracted from the pixels, which are from 0 to 1.
        std: number by which the differences are divided.
        stem: stride of the first convolution. 2 (3 × 3 windows) and 4 (7 × 7) reduce the pixels to
            a quarter and a sixteenth; use them for images of 64 pixels and more.
        pool: how the last map becomes one vector: its `mean` or `max` over all positions, `gem` (a
            generalised mean with a learned exponent) or `grid`, the means of cells × cells
            positions, which preserves where something is.
        cells: number of cells per side of the grid.
    """

    def __init__(
        self,
        size: PositiveInt = 28,
        channels: Literal[1, 3] = 1,
        width: PositiveInt = 32,
        depth: PositiveInt = 3,
        layers: PositiveInt = 2,
        batch_norm: bool = True,
        mean: float = 0.5,
        std: PositiveFloat = 0.5,
        stem: Literal[1, 2, 4] = 1,
        pool: MapPool = "mean",
        cells: PositiveInt = 4,
    ) -> None:
        super().__init__()
        if -(-size // stem) < 2 ** (depth - 1):
            after, smaller = (
                (f" after a stem of {stem}", "depth or stem") if stem > 1 else ("", "depth")
            )
            raise ValueError(
                f"size {size} cannot be halved {depth - 1} times{after}. Make {smaller} smaller, or"
                " size larger"
            )
        self.preprocessing = Preprocessing(
            (size, size), channels, (mean,) * channels, (std,) * channels
        )
        stages: list[nn.Module] = []
        before = channels
        for stage in range(depth):
            after = width * 2**stage
            if stage:
                stages.append(nn.MaxPool2d(2))
            for _ in range(layers):
                if stages:
                    first = 1
                else:
                    first = stem
                kernel = max(3, 2 * first - 1)  # windows overlap
                stages.append(
                    nn.Conv2d(
                        before, after, kernel, first, padding=kernel // 2, bias=not batch_norm
                    )
                )
                if batch_norm:
                    stages.append(nn.BatchNorm2d(after))
                stages.append(nn.ReLU(inplace=True))
                before = after
        self.stages = nn.Sequential(*stages)
        side = -(-size // stem) // 2 ** (depth - 1)
        self.pool = Pool(pool, (side, side), cells)
        self.features = before * (cells**2 if pool == "grid" else 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F) of images (B, channels, size, size)."""
        features: Tensor = self.pool(self.stages(x))
        return features


class Features(Backbone):
    """Returns vectors unchanged, for data sets that already consist of features.

    Args:
        features: size of the data set's vectors; the framework sets it.
    """

    preprocessing = None

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (B, F)."""
        return x


class Pixels(Backbone):
    """An image's pixels, 0 to 1, as features, without weights.

    Use it for learners on small images, and as a baseline that a network should exceed. There are
    size × size × channels features.

    Args:
        size: height and width in pixels; images are stretched to it.
        channels: 1 for grey, 3 for RGB.
    """

    def __init__(self, size: PositiveInt = 28, channels: Literal[1, 3] = 1) -> None:
        super().__init__()
        self.preprocessing = Preprocessing(
            (size, size), channels, (0.0,) * channels, (1.0,) * channels
        )
        self.features = channels * size * size

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, channels × size × size) of images (B, channels, size, size)."""
        return x.flatten(1)
