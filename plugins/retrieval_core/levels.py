"""Features of several depths of one network, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from retrieval.plugin import Preprocessing
from torch import Tensor, nn
from torch.nn.functional import normalize

Level = Literal["image", "1", "2", "3", "4", "5", "6", "7", "last"]
"""The image itself, one of EfficientNet's seven stages of blocks, or the layer before its
classifier; shallow before deep.
"""
_FLAT = 1e-6
"""Below this a signed root is a line, so that its gradient stays finite."""


class Levels(nn.Module):
    """Several levels of an EfficientNet, each averaged over a grid, and all of them in one vector.

    A late layer knows kinds of objects, an early one strokes and their places; which of them tells
    new classes apart is not known beforehand. Each level's numbers go through a signed square root
    (Perronnin et al., "Improving the Fisher Kernel", ECCV 2010) and are scaled to unit length, so
    that every level has the same say.

    Args:
        network: timm's EfficientNet.
        preprocessing: what an image goes through before; the level "image" undoes its
            normalisation.
        levels: by level, cells of its grid on a side.

    Raises:
        ValueError: there is no level, or a grid is finer than its level's map.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: nn.Module, preprocessing: Preprocessing, levels: Mapping[Level, int]
    ) -> None:
        super().__init__()
        if not levels:
            raise ValueError("levels: name at least one, such as {last = 1}")
        self.network: Any = network
        self.grids = {str(level): grid for level, grid in levels.items()}
        channels = preprocessing.channels
        self.register_buffer(
            "mean", torch.tensor(preprocessing.mean).view(1, channels, 1, 1), persistent=False
        )
        self.register_buffer(
            "std", torch.tensor(preprocessing.std).view(1, channels, 1, 1), persistent=False
        )
        training = network.training
        network.eval()
        with torch.no_grad():
            maps = self._maps(torch.zeros(1, *preprocessing.shape))
        network.train(training)
        too_fine = [
            f"{level} has {' × '.join(map(str, maps[level].shape[2:]))} cells, its grid would have"
            f" {grid} × {grid}"
            for level, grid in self.grids.items()
            if grid > min(maps[level].shape[2:])
        ]
        if too_fine:
            raise ValueError(f"levels: {'; '.join(too_fine)}. Take coarser grids or a larger size")
        for level, grid in self.grids.items():
            height, width = maps[level].shape[2:]
            self.register_buffer(f"rows_{level}", _averages(grid, height), persistent=False)
            self.register_buffer(f"columns_{level}", _averages(grid, width).T, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F) of images (B, 3, H, W): level after level, channel after channel,
        row after row.
        """
        maps, parts = self._maps(x), []
        for level in self.grids:
            cells = (
                getattr(self, f"rows_{level}") @ maps[level] @ getattr(self, f"columns_{level}")
            ).flatten(1)
            parts.append(normalize(cells * torch.rsqrt(cells.abs() + _FLAT)))
        return torch.cat(parts, dim=1)

    def _maps(self, x: Tensor) -> dict[str, Tensor]:
        """Return the maps (B, C, h, w) of the levels that are asked for."""
        network, found = self.network, {}
        if "image" in self.grids:
            found["image"] = x * self.std + self.mean
        deepest = max(get_args(Level).index(level) for level in self.grids)
        h = network.bn1(network.conv_stem(x)) if deepest else x
        for number, block in enumerate(network.blocks[: min(deepest, 7)], start=1):
            h = block(h)
            if str(number) in self.grids:
                found[str(number)] = h
        if "last" in self.grids:
            found["last"] = network.bn2(network.conv_head(h))
        return found


def _averages(cells: int, length: int) -> Tensor:
    """Return the matrix (cells, length) that averages a line over overlapping windows, as adaptive
    average pooling does.

    A matrix, since torch's exporter by TorchScript, which frozen features go through, has no
    adaptive pooling where lengths do not divide.
    """
    made = torch.zeros(cells, length)
    for cell in range(cells):
        start, stop = cell * length // cells, -(-(cell + 1) * length // cells)
        made[cell, start:stop] = 1 / (stop - start)
    return made
