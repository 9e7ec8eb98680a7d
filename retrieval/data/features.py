"""A frozen backbone's features, computed once and kept on disk, as a dataset of vectors."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.data.cache import Way, frozen_features
from retrieval.data.encode import evaluating
from retrieval.data.onnx_features import TRIED, OnnxBackbone, way_of
from retrieval.data.raw import RawInputs
from retrieval.host.plugin_calls import calling
from retrieval.model.contracts import Backbone, Dataset
from retrieval.model.guard import check_width
from retrieval.model.model import Model
from retrieval.serving.memory import keep_large_blocks


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
    if device.type == "cpu":
        keep_large_blocks()
    with calling(what), evaluating(model):
        features = frozen_features(
            lambda x: model.features(x.to(device)).float().cpu(), dataset, model.preprocessing,
            fingerprint=fingerprint(model.backbone), device=device, batch=batch, quicker=_by_onnxruntime(model, dataset, device),
        )  # fmt: skip
    check_width(features, what, model.backbone.features)
    return FeatureDataset(dataset, features)


def _by_onnxruntime(model: Model, dataset: Dataset, device: torch.device) -> Way | None:
    name = way_of(dataset, model.preprocessing, device)
    if name is None:
        return None

    def samples() -> NDArray[Any]:
        chosen = np.linspace(0, len(dataset) - 1, min(TRIED, len(dataset))).round().astype(np.int64)
        return RawInputs(dataset, model.preprocessing, budget=0).batch(chosen)

    net = OnnxBackbone(model, samples)
    return Way(name, net, net.rows, torch.get_num_threads())


def fingerprint(backbone: Backbone) -> str:
    """Return a SHA-256 of a backbone's class, every weight and buffer, and the plain values that its modules keep.

    A module's numbers, strings and collections of them count, since its `repr` need not show them; private ones, whose names
    begin with "_", do not.
    """
    digest = hashlib.sha256(f"{type(backbone).__module__}.{type(backbone).__qualname__} {backbone}".encode())
    for path, module in backbone.named_modules():
        kept = {k: v for k, v in vars(module).items() if not k.startswith("_") and _plain(v)}
        kept.pop("training", None)
        digest.update(f"\n{path} {sorted(kept.items())!r}".encode())
    for name, value in [*backbone.state_dict().items(), *backbone.named_buffers()]:
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(_plain(k) and _plain(v) for k, v in value.items())
    return value is None or isinstance(value, bool | int | float | str)
