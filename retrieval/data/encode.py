"""Compute embeddings of a dataset's items in batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrieval.data.loading import RawInputs, inputs
from retrieval.model.contracts import Dataset
from retrieval.model.model import Model
from retrieval.serving.progress import Meter


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode without gradients; restores each submodule's mode."""
    modes = {name: child.training for name, child in module.named_modules()}
    module.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for name, child in module.named_modules():
            child.training = modes[name]


def encode(
    model: Model,
    dataset: Dataset,
    indices: NDArray[np.int64],
    *,
    batch: int = 256,
    device: torch.device | None = None,
    progress: str | None = None,
    from_features: bool = False,
    raw: RawInputs | None = None,
) -> Tensor:
    """Return the embeddings (N, C) of items, float32, on the CPU.

    Args:
        model: the model; its mode is restored at the end.
        dataset: the dataset.
        indices: the items to encode (N,).
        batch: number of items at a time.
        device: where the model runs; the default is the model's device.
        progress: title of the progress display; `None` shows none.
        from_features: whether the dataset's items are the backbone's features.
        raw: the dataset's inputs, if the caller keeps them between calls.
    """
    device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    embeddings: list[Tensor] = []
    meter = Meter(progress or "", len(indices), "items", show=progress is not None)
    with evaluating(model), _channels_last(model, device), meter:
        for chunk in inputs(
            dataset, indices, None if from_features else model.preprocessing, batch, raw=raw
        ):
            embeddings.append(_forward(model, chunk.to(device), from_features).float().cpu())
            meter.update(len(chunk))
    return torch.cat(embeddings) if embeddings else torch.empty(0, 0)


@contextlib.contextmanager
def _channels_last(model: Model, device: torch.device) -> Iterator[None]:
    """Context manager that uses channels-last images on a CPU, which speeds up convolutions.

    A compiled backbone keeps the memory format that it was compiled for.
    """
    kept = model.channels_last
    if device.type == "cpu" and model.backbone._compiled_call_impl is None:
        model.channels_last = True
    try:
        yield
    finally:
        model.channels_last = kept


def _forward(model: Model, inputs: Tensor, from_features: bool) -> Tensor:
    """Return the embeddings (B, C); retry without channels last if the model fails with it."""
    try:
        embeddings: Tensor = model(inputs, from_features)[1]
    except RuntimeError:
        if not model.channels_last:
            raise
        model.channels_last = False
        embeddings = model(inputs, from_features)[1]
    return embeddings


def pixels(
    dataset: Dataset, indices: NDArray[np.int64], model: Model, *, batch: int = 256
) -> Tensor:
    """Return raw inputs as unit vectors (N, P), a baseline without training."""
    flat = [
        chunk.flatten(1).float() for chunk in inputs(dataset, indices, model.preprocessing, batch)
    ]
    return nn.functional.normalize(torch.cat(flat), dim=1)
