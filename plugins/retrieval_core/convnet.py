"""A small convolutional net for images of 28 to 128 pixels, and backbones without weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from retrieval.plugin import Backbone, Preprocessing
from torch import Tensor, nn

Count = Annotated[int, Field(ge=1)]


class ConvNet(Backbone):
    """Stages of 3 × 3 convolutions, each half the size and twice the width, then averaged.

    Its features are as wide as the last stage: width × 2^(depth − 1). The plain stack of Simonyan &
    Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (ICLR 2015),
    with batch normalisation, and the global average of Lin et al., "Network In Network" (ICLR
    2014), in place of its linear layers. A strided stem is He et al.'s, "Deep Residual Learning for
    Image Recognition" (CVPR 2016).

    Args:
        size: height and width of its input, in pixels; images are stretched to it.
        channels: 1 for grey, 3 for RGB.
        width: channels of the first stage.
        depth: number of stages.
        layers: convolutions in each stage.
        batch_norm: whether batch normalisation follows each convolution.
        mean: what is subtracted from pixels scaled to 0–1.
        std: what they are divided by afterwards.
        stem: stride of the first convolution: 2 (windows of 3 × 3) and 4 (7 × 7) leave the rest a
            quarter and a sixteenth of the pixels, for images of 64 and more.
    """

    def __init__(
        self,
        size: Count = 28,
        channels: Literal[1, 3] = 1,
        width: Count = 32,
        depth: Count = 3,
        layers: Count = 2,
        batch_norm: bool = True,
        mean: float = 0.5,
        std: Annotated[float, Field(gt=0)] = 0.5,
        stem: Literal[1, 2, 4] = 1,
    ) -> None:
        super().__init__()
        if -(-size // stem) < 2 ** (depth - 1):
            after, smaller = (
                (f" after a stem of {stem}", "depth or stem") if stem > 1 else ("", "depth")
            )
            raise ValueError(
                f"size {size} cannot be halved {depth - 1} times{after}; make {smaller} smaller or"
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
                first = 1 if stages else stem
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
        self.features = before

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, width × 2^(depth − 1)) of images (B, channels, size, size)."""
        features: Tensor = self.stages(x).mean(dim=(2, 3))
        return features


class Features(Backbone):
    """Vectors as they are, for datasets that hold features already.

    Args:
        features: width of the dataset's vectors, given by the host.
    """

    preprocessing = None

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (B, F)."""
        return x


class Pixels(Backbone):
    """An image's pixels, 0 to 1, row by row: no weights.

    For learners on small images, and as the floor that any network should be above. Its features
    are size × size × channels.

    Args:
        size: height and width, in pixels; images are stretched to it.
        channels: 1 for grey, 3 for RGB.
    """

    def __init__(self, size: Annotated[int, Field(ge=1)] = 28, channels: Literal[1, 3] = 1) -> None:
        super().__init__()
        self.preprocessing = Preprocessing(
            (size, size), channels, (0.0,) * channels, (1.0,) * channels
        )
        self.features = channels * size * size

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, channels × size × size) of images (B, channels, size, size)."""
        return x.flatten(1)
