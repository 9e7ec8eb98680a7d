"""A small network for images of 28 to 128 pixels, pooling, and backbones without weights."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from retrieval.plugin import Backbone, Preprocessing
from torch import Tensor, nn

MapPool = Literal["mean", "max", "gem", "grid"]


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
            cause = ""
            smaller = "depth"
            if stem > 1:
                cause = f" after a stem of {stem}"
                smaller = "depth or stem"
            raise ValueError(
                f"size {size} cannot be halved {depth - 1} times{cause}. Make {smaller} smaller, or"
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
                stride = 1 if stages else stem
                # Windows of 2 x stride - 1 overlap: no pixel is skipped between them.
                kernel = max(3, 2 * stride - 1)
                # A bias would have no effect: batch normalisation subtracts the mean.
                bias = not batch_norm
                stages.append(
                    nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=bias)
                )
                if batch_norm:
                    stages.append(nn.BatchNorm2d(after))
                stages.append(nn.ReLU(inplace=True))
                before = after
        self.stages = nn.Sequential(*stages)
        # The stem rounds up, since it pads; max pooling rounds down.
        side = -(-size // stem) // 2 ** (depth - 1)
        self.pool = Pool(pool, (side, side), cells)
        self.features = before * (cells**2 if pool == "grid" else 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F) of images (B, channels, size, size)."""
        features: Tensor = self.pool(self.stages(x))
        return features


class Pool(nn.Module):
    """Pools the feature maps (B, C, h, w) of an image to one vector.

    GeM is the generalised mean (mean x^p)^(1/p) with a learned exponent p, initially 3, and with x
    clamped to at least 10⁻⁶ (Radenović, Tolias & Chum, "Fine-tuning CNN Image Retrieval with No
    Human Annotation", TPAMI 2019, equation 3).

    Args:
        kind: `mean`, `max` or `gem` over all positions, which give (B, C); or `grid`, the means of
            the cells of a grid, which give (B, C × cells²).
        size: height and width of the maps.
        cells: number of cells per side of the grid.

    Raises:
        ValueError: the grid is finer than the map.
    """

    def __init__(self, kind: MapPool, size: tuple[int, int], cells: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "gem":
            self.power = nn.Parameter(torch.tensor(3.0))
        if kind == "grid":
            if cells > min(size):
                raise ValueError(
                    f"pool: the last map has {size[0]} × {size[1]} positions, but the grid has"
                    f" {cells} × {cells} cells. Set cells to {min(size)} or less"
                )
            # The sizes give the matrices, so a checkpoint does not hold them.
            self.register_buffer("rows", _averages(cells, size[0]), persistent=False)
            self.register_buffer("columns", _averages(cells, size[1]).T, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return one vector per image from maps (B, C, h, w)."""
        if self.kind == "grid":
            return (self.get_buffer("rows") @ x @ self.get_buffer("columns")).flatten(1)
        if self.kind == "max":
            return x.amax(dim=(2, 3))
        if self.kind == "gem":
            return x.clamp(min=1e-6).pow(self.power).mean(dim=(2, 3)).pow(1 / self.power)
        return x.mean(dim=(2, 3))


def _averages(cells: int, length: int) -> Tensor:
    """Return the matrix (cells, length) of adaptive average pooling along one axis.

    Frozen features are exported with TorchScript, whose exporter supports torch's adaptive pooling
    only for lengths that divide evenly.
    """
    matrix = torch.zeros(cells, length)
    for cell in range(cells):
        # Neighbouring cells share a position if the length does not divide evenly, as in torch.
        start = cell * length // cells
        stop = -(-(cell + 1) * length // cells)
        matrix[cell, start:stop] = 1 / (stop - start)
    return matrix


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
