"""A frozen backbone's features, computed once and cached on disk, as a dataset of vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.data.cache import frozen_features
from retrieval.data.encode import evaluating
from retrieval.host.plugin_calls import calling
from retrieval.model.contracts import Backbone, Dataset
from retrieval.model.guard import check_width
from retrieval.model.model import Model
from retrieval.serving.memory import keep_large_blocks


class FeatureDataset(Dataset):
    """The features (N, F) of another dataset's items, with its labels and splits.

    Args:
        source: the other dataset.
        features: features (N, F), float32, one row per item.
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
    """Return the features of every item, from the cache or computed now."""
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

    def computed(x: Tensor) -> Tensor:
        features = model.features(x)
        check_width(features, what, model.backbone.features)
        return features

    with calling(what), evaluating(model):
        features = frozen_features(
            computed,
            dataset,
            model.preprocessing,
            width=model.backbone.features,
            fingerprint=fingerprint(model.backbone),
            device=device,
            batch=batch,
        )
    return FeatureDataset(dataset, features)


def fingerprint(backbone: Backbone) -> str:
    """Return a SHA-256 of a backbone's class, weights, buffers and its modules' attributes.

    The hash covers numbers, strings, tensors, arrays and collections of them, because a module's
    `repr` may not show them. Of other objects it covers only the class, because their `repr` may
    contain a memory address.
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
    """Yield bytes that identify a value and are the same in every process."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape} ".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping | list | tuple):
        yield f"{type(value).__name__} {len(value)} ".encode()
        for item in value.items() if isinstance(value, Mapping) else value:
            yield from _parts(item)
    elif isinstance(value, set | frozenset):
        yield from _parts(sorted(b"".join(_parts(item)) for item in value))
    elif value is None or isinstance(
        value, bool | int | float | complex | str | bytes | np.generic
    ):
        yield f"{value!r} ".encode()
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__} ".encode()
