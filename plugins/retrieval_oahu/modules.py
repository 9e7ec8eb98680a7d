"""OAHU's network as a torch module: a head that gives the codes of all spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from retrieval.model.precision import full_precision
from torch import Tensor, nn
from torch.nn import functional

from retrieval_oahu.network import TINY


class OverComplete(nn.Module):
    """Features (B, F) to codes (B, (L + 1) E): each space's unit embedding times its factor, side
    by side.

    Args:
        features: F.
        depth: L.
        hidden: units of each hidden layer.
        embedding: E.
    """

    def __init__(self, features: int, depth: int, hidden: int, embedding: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(
            nn.Linear(features if level == 0 else hidden, hidden, bias=False)
            for level in range(depth)
        )
        self.embedding = nn.ModuleList(
            nn.Linear(features if level == 0 else hidden, embedding, bias=False)
            for level in range(depth + 1)
        )
        for layers, variance in ((self.hidden, 2.0), (self.embedding, 1.0)):
            for weight in layers.parameters():
                nn.init.normal_(weight, std=(variance / weight.shape[1]) ** 0.5)
        self.register_buffer("offset", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.register_buffer("factor", torch.ones(depth + 1))

    @classmethod
    def of_weights(
        cls,
        levels: Sequence[NDArray[Any]],
        hidden: int,
        mean: NDArray[Any],
        scale: NDArray[Any],
        alpha: NDArray[Any],
    ) -> OverComplete:
        """Return a network in float32 with a learner's weights.

        Args:
            levels: each level's weights, (F, hidden + E) and then (hidden, hidden + E).
            hidden: units of each hidden layer.
            mean: (F,), subtracted from features.
            scale: (F,), by which they are divided.
            alpha: (L + 1,) weights of the spaces' squared distances.
        """
        head = cls(len(mean), len(levels) - 1, hidden, levels[0].shape[1] - hidden)

        def put(target: Tensor, values: object) -> None:
            target.copy_(torch.from_numpy(np.array(values, dtype=np.float32)))

        with torch.no_grad():
            for level, layer in zip(
                levels, head.hidden.parameters(), strict=False
            ):  # the last level has no hidden layer
                put(layer, level[:, :hidden].T)
            for level, layer in zip(levels, head.embedding.parameters(), strict=True):
                put(layer, level[:, hidden:].T)
            put(head.get_buffer("offset"), mean)
            put(head.get_buffer("scale"), scale)
            put(head.get_buffer("factor"), np.sqrt(alpha))
        return head

    def forward(self, x: Tensor) -> Tensor:
        """Return codes."""
        h = (x - self.get_buffer("offset")) / self.get_buffer("scale")
        factor = self.get_buffer("factor")
        found = []
        for level, layer in enumerate(self.embedding):
            found.append(
                functional.normalize(full_precision(layer(h)), dim=1, eps=TINY) * factor[level]
            )
            if level < len(self.hidden):
                h = self.hidden[level](h).relu()
        return torch.cat(found, dim=1)
