"""Compute embeddings of a dataset's items, or of images in any form, in batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from retrieval.base.arrays import Floats32, Ints, as_rows
from retrieval.base.progress import Meter, Progress, showing
from retrieval.data.datasets import ArrayDataset, Dataset
from retrieval.data.foreign_datasets import ItemDataset
from retrieval.data.loading import RawInputs, inputs
from retrieval.errors import DataError, at_least_one
from retrieval.images.image_files import listed_images
from retrieval.images.preprocessing import is_image
from retrieval.model.model import Model, evaluation_mode


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode without gradients; restores each submodule's mode."""
    with evaluation_mode(module), torch.inference_mode():
        yield


def encode(
    model: Model,
    dataset: Dataset,
    indices: Ints,
    *,
    batch_size: int = 256,
    device: torch.device | None = None,
    progress: str | None = None,
    from_features: bool = False,
    raw: RawInputs | None = None,
) -> Tensor:
    """Return the embeddings of N items, float32 (N, width), on the CPU.

    The model runs on `device`, by default the model's own. Its training mode is restored.

    Args:
        model: the model.
        dataset: images or vectors, or the backbone's features if `from_features` is true.
        indices: positions (N,) of the items.
        batch_size: number of items that the model gets at a time.
        device: where the model is.
        progress: title of the progress display; `None` shows none.
        from_features: whether the dataset's items are the backbone's features.
        raw: reads the items; by default a new one that keeps none in memory.
    """
    device = device or model.device
    embeddings: list[Tensor] = []
    meter = Meter(progress or "", len(indices), "items", show=progress is not None)
    channels_last = model.channels_last
    # On a CPU, convolutions are faster with channels last. A compiled backbone keeps the memory
    # format that it was compiled for.
    if device.type == "cpu" and model.backbone._compiled_call_impl is None:
        model.channels_last = True
    try:
        with evaluating(model), meter:
            for chunk in inputs(
                dataset,
                indices,
                None if from_features else model.preprocessing,
                batch_size,
                raw=raw,
            ):
                codes = _forward(model, chunk.to(device), from_features)
                embeddings.append(codes.float().cpu())
                meter.update(len(chunk))
    finally:
        model.channels_last = channels_last
    if embeddings:
        return torch.cat(embeddings)
    return torch.empty(0, 0)


def _forward(model: Model, inputs: Tensor, from_features: bool) -> Tensor:
    """Return the embeddings (B, width); if channels last makes the model fail, retry without."""
    # A layer may call `view`, which another memory format does not allow.
    try:
        return model(inputs, from_features)[1]  # type: ignore[no-any-return]
    except RuntimeError:
        if not model.channels_last:
            raise
        model.channels_last = False
        return _forward(model, inputs, from_features)


def pixels(dataset: Dataset, indices: Ints, model: Model) -> Tensor:
    """Return the raw inputs of N items as unit vectors (N, values), a baseline without training."""
    chunks = inputs(dataset, indices, model.preprocessing, batch_size=256)
    rows = torch.cat([chunk.flatten(1).float() for chunk in chunks])
    return nn.functional.normalize(rows, dim=1)


def encode_images(
    model: Model,
    images: Any,
    batch_size: int,
    progress: Progress,
) -> Floats32:
    """Return the vectors that a bundle of the model would return for images or rows."""
    dataset: Dataset
    if model.preprocessing is None:
        rows = as_rows(images)
        dataset = ArrayDataset(rows, [""] * len(rows), kind="features")
    else:
        listed = listed_images(images)
        for number, image in enumerate(listed):
            if not is_image(image):
                raise DataError(
                    f"images[{number}]: an image is a path, bytes, a Pillow image, pixels or a"
                    f" tensor, not an object of type {type(image).__name__}. For a dataset with"
                    " labels, pass retrieval.as_dataset(…)."
                )
        dataset = ItemDataset(listed.__getitem__, [""] * len(listed), name="images")
    # The caller's model is put back afterwards, also after an error.
    device_before = model.device
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with showing(progress):
            codes = encode(
                model.to(device),
                dataset,
                np.arange(len(dataset)),
                batch_size=at_least_one("batch_size", batch_size),
                device=device,
                progress="encoding",
                raw=RawInputs(dataset, model.preprocessing, budget=0),
            )
    finally:
        model.to(device_before)
    return index_vectors(model, codes)


def index_vectors(model: Model, codes: Tensor) -> Floats32:
    """Return the vectors that an index stores for codes, the embeddings that a model returns."""
    with torch.inference_mode():
        if model.combiner is None:
            vectors = codes
        else:
            vectors = model.combiner.index_vectors(codes)
    return cast(Floats32, vectors.float().numpy())
