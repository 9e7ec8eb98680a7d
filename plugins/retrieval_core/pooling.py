"""Features of pretrained networks from their last maps or tokens, or from several levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from retrieval.helpers import tried
from retrieval.plugin import Preprocessing
from torch import Tensor, nn
from torch.nn.functional import normalize

from retrieval_core.convnet import MapPool, Pool

TokenPool = Literal["cls", "mean", "cls+mean", "gem", "grid"]
Level = Literal["image", "1", "2", "3", "4", "5", "6", "7", "last"]
"""The image, one of EfficientNet's seven stages, or its last layer before the classifier."""
_FLAT = 1e-6
"""This number under the signed root keeps its gradient finite near zero."""


class Pooled(nn.Module):
    """A network whose last maps or tokens are pooled to one vector.

    Args:
        network: returns maps (B, C, h, w) or tokens (B, N, C). The tokens form a square, row by
            row.
        pool: `cls` is the class token; `mean`, `gem` and `grid` pool the positions as in `Pool`;
            `cls+mean` concatenates class token and mean.
        cells: number of cells per side of the grid.
        preprocessing: preprocessing that sets the size of the images.
        prefix: number of tokens before the tokens of positions.
        has_class_token: whether the first of them is a class token.
        channels_last: whether maps are (B, h, w, C).

    Raises:
        ValueError: the network has no class token or no square of positions, or the grid is finer
            than the map.
    """

    def __init__(
        self,
        network: nn.Module,
        pool: TokenPool,
        cells: int,
        preprocessing: Preprocessing,
        *,
        prefix: int = 0,
        has_class_token: bool = False,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.prefix = prefix
        self.channels_last = channels_last
        self.kinds = pool.split("+")
        output = tried(self, self.output, preprocessing)
        if "cls" in self.kinds and not (prefix and has_class_token and output.ndim == 3):
            raise ValueError(
                f'pool = "{pool}": the model has no class token. Use mean, gem or grid'
            )
        kind = self.kinds[-1]
        if output.ndim == 3:
            self.side = round((output.shape[1] - prefix) ** 0.5)
            if self.side**2 != output.shape[1] - prefix:
                raise ValueError(
                    f'pool = "{pool}": the model\'s tokens do not form a square of positions'
                )
        if kind in get_args(MapPool):
            maps = self._maps(output)
            self.pool = Pool(kind, (maps.shape[2], maps.shape[3]), cells)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F) of images."""
        output = self.output(x)
        parts = []
        if "cls" in self.kinds:
            parts.append(self._normed(output[:, 0]))
        if self.kinds[-1] != "cls":
            parts.append(self._normed(self.pool(self._maps(output))))
        return torch.cat(parts, dim=1)

    def _normed(self, pooled: Tensor) -> Tensor:
        """Return pooled vectors (B, C), or those of a grid (B, C × cells²), after the last norm.

        Some models normalise tokens or maps only after they are pooled: timm's transformers that
        take the mean (`fc_norm`), and ConvNeXt (`head.norm`).
        """
        norm: Any = getattr(self.network, "fc_norm", None)
        if norm is None:
            norm = getattr(getattr(self.network, "head", None), "norm", None)
        weight = getattr(norm, "weight", None)
        # Models without such a norm have none of these attributes, or an identity without weights.
        if weight is None:
            return pooled
        cells = pooled.reshape(len(pooled), len(weight), -1)
        # timm's LayerNorm2d is a LayerNorm by class, but expects channels in the second dimension.
        if isinstance(norm, nn.BatchNorm2d | nn.GroupNorm) or "2d" in type(norm).__name__:
            normed: Tensor = norm(cells[..., None])
        else:
            normed = norm(cells.transpose(1, 2)).transpose(1, 2)
        return normed.flatten(1)

    def output(self, x: Tensor) -> Tensor:
        """Return the network's maps or tokens, from timm's `forward_features` if it exists."""
        network: Any = self.network
        output: Tensor = getattr(network, "forward_features", network)(x)
        return output

    def _maps(self, output: Tensor) -> Tensor:
        """Return a network's output as maps (B, C, h, w)."""
        if output.ndim == 3:
            positions = output[:, self.prefix :].transpose(1, 2)
            return positions.reshape(*positions.shape[:2], self.side, self.side)
        if self.channels_last:
            return output.permute(0, 3, 1, 2)
        return output


class Levels(nn.Module):
    """Averages several levels of a network over grids and concatenates the averages.

    Late layers distinguish kinds of objects; early layers distinguish strokes and their positions.
    Which level separates new classes best is not known in advance. The averages of a level go
    through a signed square root (Perronnin et al., "Improving the Fisher Kernel", ECCV 2010) and
    are scaled to unit length, so that all levels have equal weight.

    Args:
        network: an EfficientNet of timm, or a timm model built with `features_only`.
        preprocessing: preprocessing of the images, whose normalisation the level "image" undoes.
        levels: number of grid cells per side for each level.
        names: the levels that a `features_only` model returns, in order; `None` for EfficientNet.

    Raises:
        ValueError: `levels` is empty, or a grid is finer than its level's map.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        preprocessing: Preprocessing,
        levels: Mapping[Any, int],
        names: list[str] | None = None,
    ) -> None:
        super().__init__()
        if not levels:
            raise ValueError("levels: name at least one level, such as {last = 1}")
        self.network: Any = network
        self.names = names
        self.grids = {str(level): grid for level, grid in levels.items()}
        # Buffers move to the GPU with the model; the preprocessing already saves their values.
        for name, values in (("mean", preprocessing.mean), ("std", preprocessing.std)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)
        maps = tried(self, self._maps, preprocessing)
        self.pools = nn.ModuleDict()
        too_fine = []
        for level, grid in self.grids.items():
            height, width = maps[level].shape[2:]
            if grid > min(height, width):
                too_fine.append(
                    f"{level} has {height} × {width} positions, but its grid has"
                    f" {grid} × {grid} cells"
                )
            else:
                self.pools[level] = Pool("grid", (height, width), grid)
        if too_fine:
            raise ValueError(f"levels: {'; '.join(too_fine)}. Use coarser grids or a larger size")

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F) of images (B, 3, H, W), level by level."""
        maps = self._maps(x)
        parts = []
        for level, pool in self.pools.items():
            cells = pool(maps[level])
            parts.append(normalize(cells * torch.rsqrt(cells.abs() + _FLAT)))
        return torch.cat(parts, dim=1)

    def _maps(self, x: Tensor) -> dict[str, Tensor]:
        """Return the feature maps (B, C, h, w) of the requested levels."""
        network = self.network
        maps = {}
        if "image" in self.grids:
            maps["image"] = x * self.std + self.mean
        if self.names is not None:
            # A model for the level "image" alone would run for nothing.
            outputs = network(x) if self.names else []
            if getattr(network, "output_fmt", "NCHW") == "NHWC":
                outputs = [level.permute(0, 3, 1, 2) for level in outputs]
            return maps | dict(zip(self.names, outputs, strict=True))
        # An EfficientNet runs only as far as the deepest level: index 0 is the image, 8 is "last".
        deepest = max(get_args(Level).index(level) for level in self.grids)
        h = network.bn1(network.conv_stem(x)) if deepest else x
        for number, block in enumerate(network.blocks[:deepest], start=1):
            h = block(h)
            if str(number) in self.grids:
                maps[str(number)] = h
        if "last" in self.grids:
            maps["last"] = network.bn2(network.conv_head(h))
        return maps
