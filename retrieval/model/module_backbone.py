"""Any torch module as a backbone: the width of its features is measured."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from retrieval.host.plugin_calls import calling
from retrieval.model.contracts import Backbone
from retrieval.model.guard import checked_rows
from retrieval.model.products import untouched
from retrieval.serving.images import Preprocessing

IMAGENET = Preprocessing((224, 224), 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), resize=256)
"""What images go through where a module says nothing: as most networks that were trained on
ImageNet expect them.
"""


class ModuleBackbone(Backbone):
    """A module that somebody wrote without this package in mind.

    Args:
        module: images (B, channels, H, W), normalised, or vectors (B, F'), to features (B, F). Its
            attribute `preprocessing`, a `retrieval.plugin.Preprocessing`, says what images go through
            before; without one it is `IMAGENET`.
        name: what to call it in a sentence.
        width: of the dataset's vectors, F'; None for images.

    Raises:
        PluginError: it fails on a batch of two, or does not give two rows of features.
    """

    def __init__(self, module: nn.Module, name: str, width: int | None) -> None:
        super().__init__()
        self.module = module
        shape: tuple[int, ...] = () if width is None else (width,)
        if width is None:
            self.preprocessing = getattr(module, "preprocessing", None) or IMAGENET
            if isinstance(
                self.preprocessing, Preprocessing
            ):  # else `check_backbone` says what it is
                shape = (self.preprocessing.channels, *self.preprocessing.size)
        self.features = 0
        first = next(module.parameters(), torch.empty(0))
        probe = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)).to(first.device)
        what = f"The backbone {name}"
        with calling(what), untouched(module):
            given = module(probe) if shape else torch.zeros(2, 1)
        found = checked_rows(given, what, (2, -1), first.device, "features")
        self.features = int(found.shape[1])
        self._behaves = hashlib.blake2b(
            found.float().cpu().numpy().tobytes(), digest_size=16
        ).hexdigest()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features (B, F) of images or vectors."""
        features: Tensor = self.module(inputs)
        return features

    def extra_repr(self) -> str:
        """Return what tells this module from one with the same layers: kept features are found by
        it.
        """
        return f"behaves={self._behaves}"


def as_backbone(made: Any, name: str, width: int | None) -> Any:
    """Return a module as a backbone; what is one already, or is not a module, as it is."""
    if isinstance(made, Backbone) or not isinstance(made, nn.Module):
        return made
    return ModuleBackbone(made, name, width)
