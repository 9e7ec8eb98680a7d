"""A frozen backbone's features, computed once and cached on disk, as a dataset of vectors.

On a CPU, ONNX Runtime computes them (`OnnxBackbone`) much faster than torch.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.data.cache import Way, frozen_features
from retrieval.data.encode import evaluating
from retrieval.data.loading import RawInputs
from retrieval.errors import BundleError
from retrieval.host.plugin_calls import calling
from retrieval.model.contracts import Backbone, Dataset
from retrieval.model.guard import check_width
from retrieval.model.model import Model
from retrieval.serving.images import Preprocessing
from retrieval.serving.memory import keep_large_blocks
from retrieval.serving.runtime import ONNXRUNTIME, installed_packages


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


LEAST = 1 << 24
"""Smallest number of pixels times channels of all images for which making the graph saves time."""

_AT_ONCE, _MOST = 1 << 17, 64
"""Largest pixels times channels, and largest number of images, that go through the graph at once.

Intermediate results then stay in the CPU cache.
"""

TRIED = 8
"""Number of items whose features are compared with torch's."""


def way_of(
    dataset: Dataset, preprocessing: Preprocessing | None, device: torch.device
) -> str | None:
    """Return the ONNX Runtime version that computes a dataset's features, or None for torch.

    The choice does not depend on timing, so a recipe always gets the same features.
    """
    if preprocessing is None or device.type != "cpu":
        return None
    if len(dataset) * int(np.prod(preprocessing.shape)) < LEAST:
        return None
    runtimes = installed_packages(ONNXRUNTIME)
    if len(runtimes) != 1 or not installed_packages(("onnx",)):
        return None
    return f"onnxruntime {version(runtimes[0])}"


class OnnxBackbone:
    """A backbone as an ONNX graph for a fixed number of images, made on first use; thread-safe.

    With a fixed number, all sizes are constants for the exporter, which removes the nodes of
    TensorFlow's padding from the graph.

    Args:
        model: the model with the backbone; in evaluation mode on the CPU during calls.
        samples: returns raw inputs, uint8 (N, channels, H, W), on which torch and ONNX Runtime are
            compared.
    """

    def __init__(self, model: Model, samples: Callable[[], NDArray[Any]]) -> None:
        assert model.preprocessing is not None
        self._model, self._samples = model, samples
        self._shape = model.preprocessing.shape
        self._lock = threading.Lock()
        self._session: Any = None
        self.rows = max(1, min(_MOST, _AT_ONCE // int(np.prod(self._shape))))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return float32 features (B, F) of raw uint8 pixels (B, channels, H, W), B ≤ `rows`.

        Raises:
            BundleError: the graph cannot be made or run, or does not agree with torch.
        """
        with self._lock:
            if self._session is None:
                self._session = self._agreed()
        return torch.from_numpy(self._run(self._session, pixels.numpy()))

    def _run(self, session: Any, pixels: NDArray[Any]) -> NDArray[np.float32]:
        padded = pixels
        if len(pixels) < self.rows:
            padded = np.concatenate(
                [pixels, np.zeros((self.rows - len(pixels), *self._shape), pixels.dtype)]
            )
        try:
            (features,) = session.run(["features"], {"input": np.ascontiguousarray(padded)})
        except Exception as fault:  # ONNX Runtime's errors share no public base class
            raise BundleError(f"ONNX Runtime refuses: {fault}") from fault
        rows: NDArray[np.float32] = features[: len(pixels)]
        return rows

    def _agreed(self) -> Any:
        """Return a session after checking its features against torch's, for one item and many."""
        from retrieval.model.graph import (
            TOLERANCE,
            FeatureEncoder,
            Signature,
            check_size,
            ready,
            session,
            to_onnx,
        )

        check_size(self._model)
        samples = self._samples()
        signature = Signature(
            {"input": (self.rows, *self._shape)},
            {"features": (self.rows, self._model.backbone.features)},
        )
        with ready(self._model):
            module = FeatureEncoder(self._model).eval()
            (reference,) = module(torch.from_numpy(samples))
            example = torch.from_numpy(np.resize(samples, (self.rows, *self._shape)))
            # The older exporter takes one second instead of sixteen, and with fixed sizes its
            # graphs are as fast.
            proto = to_onnx(module, (example,), signature, exporter="torchscript")
        opened = session(proto.SerializeToString(), threads=1)
        expected = reference.numpy().astype(np.float64)
        scale = float(np.linalg.norm(expected, axis=1).mean()) or 1.0
        for size in {1, self.rows}:
            computed = np.concatenate(
                [self._run(opened, samples[i : i + size]) for i in range(0, len(samples), size)]
            )
            if (
                computed.shape != expected.shape
                or not np.abs(computed - expected).max() <= TOLERANCE * scale
            ):
                raise BundleError("The graph of the backbone does not agree with torch.")
        return opened
