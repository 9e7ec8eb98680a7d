"""A frozen backbone's features, computed once and kept on disk, as a dataset of vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
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


def backbone_features(
    model: Model, dataset: Dataset, device: torch.device, batch: int
) -> FeatureDataset:
    """Return the features of every item under a model's backbone, from the cache or computed now.

    Raises:
        PluginError: the backbone fails, or gives features of another width than it says.
    """
    what = f"The backbone {type(model.backbone).__name__}"
    if (
        dataset.kind == "features"
        and dataset.arrays is not None
        and not list(model.backbone.parameters())
    ):
        features = np.asarray(dataset.arrays, dtype=np.float32)
        check_width(features, what, model.backbone.features)
        return FeatureDataset(dataset, features)
    model.to(device)
    if device.type == "cpu":
        keep_large_blocks()
    with calling(what), evaluating(model):
        features = frozen_features(
            lambda x: model.features(x.to(device)).float().cpu(),
            dataset,
            model.preprocessing,
            fingerprint=fingerprint(model.backbone),
            device=device,
            batch=batch,
            quicker=_by_onnxruntime(model, dataset, device),
        )
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
    """Return a SHA-256 of a backbone's class, every weight and buffer, and the values that its
    modules keep.

    A module's numbers, strings, tensors, arrays and collections of them count, since its `repr`
    need not show them. Of any other object its class counts alone: an address in memory would give
    each process a fingerprint of its own.
    """
    digest = hashlib.sha256(
        f"{type(backbone).__module__}.{type(backbone).__qualname__} {backbone}".encode()
    )
    for path, module in backbone.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        for part in _parts({path: dict(sorted(own.items()))}):
            digest.update(part)
    for part in _parts({**dict(backbone.named_buffers()), **backbone.state_dict()}):
        digest.update(part)
    return digest.hexdigest()


_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


def _parts(value: Any) -> Iterator[bytes]:
    """Yield what a value is, the same in every process."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape} ".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping | list | tuple):
        yield f"{type(value).__name__} {len(value)} ".encode()
        for each in value.items() if isinstance(value, Mapping) else value:
            yield from _parts(each)
    elif isinstance(value, set | frozenset):
        yield from _parts(sorted(b"".join(_parts(each)) for each in value))
    elif value is None or isinstance(
        value, bool | int | float | complex | str | bytes | np.generic
    ):
        yield f"{value!r} ".encode()
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__} ".encode()
