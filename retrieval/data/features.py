"""A frozen backbone's features, computed once and kept on disk, as a dataset of vectors."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.data.cache import frozen_features
from retrieval.data.encode import evaluating
from retrieval.host.plugin_calls import calling
from retrieval.model.contracts import Backbone, Dataset
from retrieval.model.guard import check_width
from retrieval.model.model import Model


class FeatureDataset(Dataset):
    """The features (N, F) of another dataset's items, with its labels and splits.

    Args:
        source: the dataset whose items they are.
        features: (N, F) float32.
    """

    kind = "features"

    def __init__(self, source: Dataset, features: NDArray[Any]) -> None:
        self.labels, self.keys = source.labels, source.keys
        self.splits, self.roles, self.metadata = source.splits, source.roles, source.metadata
        self.arrays = features

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Return features (F,)."""
        assert self.arrays is not None
        row: NDArray[Any] = self.arrays[index]
        return row


def backbone_features(model: Model, dataset: Dataset, device: torch.device, batch: int) -> FeatureDataset:
    """Return the features of every item under a model's backbone, from the cache or computed now.

    Raises:
        PluginError: the backbone fails, or gives features of another width than it says.
    """
    what = f"The backbone {type(model.backbone).__name__}"
    if dataset.kind == "features" and dataset.arrays is not None and not list(model.backbone.parameters()):
        features = np.asarray(dataset.arrays, dtype=np.float32)
        check_width(features, what, model.backbone.features)
        return FeatureDataset(dataset, features)
    model.to(device)
    with calling(what), evaluating(model):
        features = frozen_features(
            lambda x: model.features(x.to(device)).float().cpu(), dataset, model.preprocessing,
            fingerprint=fingerprint(model.backbone), device=device, batch=batch,
        )  # fmt: skip
    check_width(features, what, model.backbone.features)
    return FeatureDataset(dataset, features)


def fingerprint(backbone: Backbone) -> str:
    """Return a SHA-256 of a backbone's class and every weight."""
    digest = hashlib.sha256(f"{type(backbone).__module__}.{type(backbone).__qualname__} {backbone}".encode())
    for name, value in backbone.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
