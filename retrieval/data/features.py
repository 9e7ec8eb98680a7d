"""A frozen backbone's features, computed once and cached on disk, as a dataset of vectors.

On a CPU, ONNX Runtime computes the features in about a third of torch's time.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrieval.base.arrays import Array, Floats32
from retrieval.base.machine import keep_large_blocks
from retrieval.base.runtime import ONNXRUNTIME, installed_packages
from retrieval.data.cache import frozen_features
from retrieval.data.datasets import ArrayDataset, Dataset
from retrieval.data.encode import evaluating
from retrieval.data.loading import RawInputs
from retrieval.data.stored_inputs import evenly_spaced
from retrieval.errors import BundleError, MissingDependency
from retrieval.host.factory import calling
from retrieval.model.contracts import Backbone
from retrieval.model.model import Model, check_width

log = logging.getLogger(__name__)

LEAST = 1 << 24
"""Fewest values (pixels × channels of all images) for which making an ONNX graph saves time."""

# Largest number of values, and of images, in one run of a graph. Intermediate results of so few
# images stay in the CPU cache.
_MAX_VALUES = 1 << 17
_MAX_IMAGES = 64

COMPARED_ITEMS = 8
"""Number of items whose features are compared with torch's."""


def backbone_features(
    model: Model,
    dataset: Dataset,
    device: torch.device,
    batch_size: int,
) -> ArrayDataset:
    """Return the features of every item, from the cache or computed now, as a dataset."""
    what = f"The backbone {type(model.backbone).__name__}"
    # A backbone of vectors without weights passes them on: they need neither a model nor a cache.
    is_plain = dataset.kind == "features" and not list(model.backbone.parameters())
    if is_plain and dataset.arrays is not None:
        features = np.asarray(dataset.arrays, dtype=np.float32)
        check_width(features, what, model.backbone.features)
    else:
        model.to(device)
        if device.type == "cpu":
            # Else each batch returns its memory to the system, and gets other pages for the next.
            keep_large_blocks()
        with calling(what), evaluating(model):
            features = _features(model, dataset, device, batch_size, what)
    return ArrayDataset(
        features,
        dataset.labels,
        dataset.keys,
        kind="features",
        splits=dataset.splits,
        roles=dataset.roles,
        metadata=dataset.metadata,
    )


def _features(
    model: Model,
    dataset: Dataset,
    device: torch.device,
    batch_size: int,
    what: str,
) -> Floats32:
    """Return features (N, F), computed by ONNX Runtime if possible, else by torch."""

    def by_torch(x: Tensor) -> Tensor:
        features = model.features(x)
        check_width(features, what, model.backbone.features)
        return features

    def cached(compute: Callable[[Tensor], Tensor], identity: str) -> Floats32:
        return frozen_features(
            compute,
            dataset,
            model.preprocessing,
            width=model.backbone.features,
            fingerprint=identity,
            device=device,
            batch_size=batch_size,
        )

    identity = fingerprint(model.backbone)
    runtime = runtime_for(model, dataset, device)
    if runtime is not None:
        # The version is part of the identity, because another one may round differently.
        try:
            return cached(OnnxBackbone(model, dataset), f"{identity} {runtime}")
        except (BundleError, MissingDependency) as fault:
            log.info("Features are computed by torch: %s", fault)
    return cached(by_torch, identity)


def runtime_for(model: Model, dataset: Dataset, device: torch.device) -> str | None:
    """Return the ONNX Runtime version that computes a dataset's features, or `None` for torch.

    The choice does not depend on timing, so a recipe always gets the same features.
    """
    if model.preprocessing is None or device.type != "cpu":
        return None
    values = len(dataset) * math.prod(model.preprocessing.shape)
    if values < LEAST:
        return None
    runtimes = installed_packages(ONNXRUNTIME)
    # Two packages of ONNX Runtime overwrite each other's files, so neither can be trusted.
    if len(runtimes) != 1 or not installed_packages(("onnx",)):
        return None
    return f"onnxruntime {version(runtimes[0])}"


class OnnxBackbone:
    """A backbone as an ONNX graph for a fixed number of images, made on first use.

    With a fixed number, the exporter treats all sizes as constants, so the graph needs no nodes
    that compute TensorFlow's padding. The graph is only used if its features of a few items of the
    dataset agree with torch's.
    """

    def __init__(self, model: Model, dataset: Dataset) -> None:
        assert model.preprocessing is not None
        self._model = model
        self._dataset = dataset
        self._shape = model.preprocessing.shape
        self._session: Any = None
        fitting = _MAX_VALUES // math.prod(self._shape)
        self._rows = max(1, min(_MAX_IMAGES, fitting))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return float32 features (B, F) of raw uint8 pixels (B, channels, H, W).

        Raises:
            BundleError: the graph cannot be made or run, or does not agree with torch.
        """
        if self._session is None:
            self._session = self._agreed()
        features = self._run(self._session, pixels.numpy(), self._rows)
        return torch.from_numpy(features)

    def _run(self, session: Any, pixels: Array, size: int) -> Floats32:
        """Return the features of images, `size` at a time; black images fill up each run."""
        parts = []
        for start in range(0, len(pixels), size):
            chunk = pixels[start : start + size]
            padded = np.zeros((self._rows, *self._shape), pixels.dtype)
            padded[: len(chunk)] = chunk
            try:
                (features,) = session.run(["features"], {"input": padded})
            except Exception as fault:  # ONNX Runtime's errors share no public base class
                raise BundleError(f"ONNX Runtime fails: {fault}") from fault
            parts.append(features[: len(chunk)])
        rows: Floats32 = np.concatenate(parts)
        return rows

    def _agreed(self) -> Any:
        """Return a session whose features agree with torch's, for single images and for many."""
        from retrieval.model import graph

        graph.check_size(self._model)
        raw = RawInputs(self._dataset, self._model.preprocessing, budget=0)
        items = np.arange(len(self._dataset))
        samples = raw.batch(evenly_spaced(items, COMPARED_ITEMS))
        signature = graph.Signature(
            {"input": (self._rows, *self._shape)},
            {"features": (self._rows, self._model.backbone.features)},
        )
        with graph.ready(self._model):
            module = graph.FeatureEncoder(self._model).eval()
            (reference,) = module(torch.from_numpy(samples))
            example = torch.from_numpy(np.resize(samples, (self._rows, *self._shape)))
            # The older exporter takes one second instead of sixteen, and with fixed sizes its
            # graphs are as fast.
            proto = graph.to_onnx(module, (example,), signature, exporter="torchscript")
        session = graph.session(proto.SerializeToString())
        expected = reference.numpy().astype(np.float64)
        # The tolerance is meant for vectors of length 1, and features may have any length.
        length = float(np.linalg.norm(expected, axis=1).mean()) or 1.0
        # With one image, black ones fill up the run: features must not depend on the neighbours.
        for size in {1, self._rows}:
            computed = self._run(session, samples, size)
            agrees = computed.shape == expected.shape
            # `not … <=` also refuses NaN.
            if not agrees or not np.abs(computed - expected).max() <= graph.TOLERANCE * length:
                raise BundleError("The graph of the backbone does not agree with torch.")
        return session


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
        attributes = sorted((k, v) for k, v in vars(module).items() if k not in _OF_EVERY_MODULE)
        for part in _parts({path: dict(attributes)}):
            digest.update(part)
    # Buffers that are not persistent are missing in the `state_dict`, and change features too.
    tensors = {**dict(backbone.named_buffers()), **backbone.state_dict()}
    for part in _parts(tensors):
        digest.update(part)
    return digest.hexdigest()


# Names of the attributes that torch gives every module; weights and buffers are hashed by name.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


def _parts(value: Any) -> Iterator[bytes]:
    """Yield bytes that identify a value and are the same in every process."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        # As bytes, because NumPy has no bfloat16.
        flat = value.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape} ".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping | list | tuple):
        yield f"{type(value).__name__} {len(value)} ".encode()
        for item in value.items() if isinstance(value, Mapping) else value:
            yield from _parts(item)
    elif isinstance(value, set | frozenset):
        # Sort, because the order of a set of text differs from process to process.
        yield from _parts(sorted(b"".join(_parts(item)) for item in value))
    elif value is None or isinstance(
        value, bool | int | float | complex | str | bytes | np.generic
    ):
        yield f"{value!r} ".encode()
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__} ".encode()
