"""Small nets of depthwise convolutions, tried beside `core.convnet`: `backbones.py` says what came of it.

The file is a plugin: `plugins = ["benchmarks/bottlenecks.py"]` and `[backbone] name = "bottlenecks.net"` in a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from retrieval import Backbone, Preprocessing, hookimpl
from torch import Tensor, nn


def convolution(before: int, after: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the size, but for its stride."""
    return nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)


class Block(nn.Module):
    """One block of `Net`: its input is added to what it makes, but for `separable`.

    Args:
        form: as in `Net`.
        width: channels before and after.
        kernel: side of the depthwise windows, in pixels.
        expansion: how many times as many channels there are between.
    """

    def __init__(self, form: str, width: int, kernel: int, expansion: int) -> None:
        super().__init__()
        wide = expansion * width
        depthwise = convolution(width, width, kernel, groups=width)
        if form == "separable":
            parts = [depthwise, convolution(width, width), nn.BatchNorm2d(width)]
        elif form == "convnext":
            parts = [
                depthwise,
                convolution(width, wide),
                nn.ReLU(),
                convolution(wide, width),
                nn.BatchNorm2d(width),
            ]
        else:
            parts = [
                convolution(width, wide), nn.BatchNorm2d(wide), nn.ReLU(),
                convolution(wide, wide, kernel, groups=wide), nn.BatchNorm2d(wide), nn.ReLU(),
                convolution(wide, width), nn.BatchNorm2d(width),
            ]  # fmt: skip
        self.body = nn.Sequential(*parts)
        self.plain = form == "separable"

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, H, W) of (B, C, H, W)."""
        out: Tensor = self.body(x)
        return (out if self.plain else x + out).relu()


class Net(Backbone):
    """A 7 × 7 stem of stride 4 and stages of blocks, between them strided 3 × 3 convolutions that double the width; then averaged.

    Args:
        size: height and width of its input, in pixels.
        channels: 1 for grey, 3 for RGB.
        form: its blocks. `inverted`: MobileNetV4's inverted bottleneck (Qin et al. 2024), the depthwise convolution where channels are many; `convnext`: where they are
            few (Liu et al. 2022), with batch normalisation; `separable`: a depthwise and a 1 × 1 convolution, nothing added (Howard et al. 2017).
        width: channels of the first stage.
        depth: number of stages.
        layers: blocks in each stage.
        kernel: side of the depthwise windows, in pixels.
        expansion: how many times as many channels a bottleneck has between its ends.
    """

    def __init__(
        self,
        size: int = 64,
        channels: Literal[1, 3] = 1,
        form: Literal["inverted", "convnext", "separable"] = "inverted",
        width: int = 16,
        depth: int = 3,
        layers: int = 1,
        kernel: int = 3,
        expansion: int = 2,
    ) -> None:
        super().__init__()
        self.preprocessing = Preprocessing((size, size), channels, (0.5,) * channels, (0.5,) * channels)
        parts: list[nn.Module] = [convolution(channels, width, 7, 4), nn.BatchNorm2d(width), nn.ReLU()]
        for stage in range(depth):
            if stage:
                parts += [convolution(width, 2 * width, 3, 2), nn.BatchNorm2d(2 * width), nn.ReLU()]
                width *= 2
            parts += [Block(form, width, kernel, expansion) for _ in range(layers)]
        self.stages = nn.Sequential(*parts)
        self.features = width

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, width × 2^(depth − 1)) of images (B, channels, size, size)."""
        features: Tensor = self.stages(x).mean(dim=(2, 3))
        return features


@hookimpl
def retrieval_backbones() -> Mapping[str, Any]:
    return {"net": Net}
