"""What export refuses before it starts, and what it reads off real items for the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.errors import BundleError
from retrieval.export.verify import Floats, merged_distances
from retrieval.model.contracts import Combiner
from retrieval.model.model import Model
from retrieval.serving.manifest import Input

_OVERLAP = (10, 20, 50, 100, 200, 500)
"""Numbers of candidates that the manifest gives the overlap for."""

_QUERIES = 512
"""At most so many items are searched for to measure it."""


def checked_items(model: Model, items: NDArray[Any], what: str) -> NDArray[Any]:
    """Return real inputs as the encoder takes them.

    Raises:
        BundleError: none, of another shape or type, or not finite.
    """
    preprocessing = model.preprocessing
    if len(items) == 0:
        raise BundleError(f"Export needs real {what} to compare torch and ONNX Runtime on; there are none.")
    if preprocessing is not None:
        if items.dtype != np.uint8 or items.shape[1:] != preprocessing.shape:
            raise BundleError(
                f"The {what} must be uint8 pixels (N, {', '.join(map(str, preprocessing.shape))}), "
                f"not {items.dtype} {items.shape}."
            )
        return items
    if items.ndim != 2 or items.dtype.kind not in "fiu":
        raise BundleError(f"The {what} must be feature vectors (N, F), not {items.dtype} {items.shape}.")
    items = items.astype(np.float32, copy=False)
    if not np.isfinite(items).all():
        raise BundleError(f"The {what} hold NaN, infinity or a number beyond float32.")
    return items


def check_widths(combiner: Combiner, outputs: Mapping[str, Floats]) -> None:
    """Refuse vectors that FAISS could not search together, and sub-spaces beyond them.

    Raises:
        BundleError: query and index vectors differ in width, or a sub-space leaves them.
    """
    width = outputs["vector"].shape[1]
    if "query" in outputs and outputs["query"].shape[1] != width:
        raise BundleError(
            f"{type(combiner).__name__} gives query vectors of {outputs['query'].shape[1]} columns and index vectors of {width}."
        )
    for space in combiner.subspaces:
        if not 0 <= space.start < space.stop <= width:
            raise BundleError(
                f"{type(combiner).__name__}: sub-space '{space.name}' is columns {space.start} to {space.stop} of {width}."
            )


@torch.no_grad()
def candidate_overlap(combiner: Combiner, codes: Tensor, depth: int = 10) -> dict[str, float] | None:
    """Return which share of an item's exact nearest ten is among its first candidates, by how many candidates.

    Args:
        combiner: not exact.
        codes: (N, C) of real items; up to 512 of them, evenly spaced, are searched for among all.
        depth: how many nearest.

    Returns:
        None with too few items to tell.
    """
    depths = [number for number in _OVERLAP if number < len(codes) - 1]
    if not depths:
        return None
    asked = np.unique(np.linspace(0, len(codes) - 1, min(len(codes), _QUERIES)).round().astype(np.int64))
    vectors = combiner.index_vectors(codes).float().numpy()
    queries = combiner.query_vectors(codes[asked]).float().numpy()
    kept = np.zeros(len(depths))
    for part in np.array_split(np.arange(len(asked)), -(-len(asked) // 16)):
        rows = np.arange(len(part))
        exact = combiner.compute_mat(codes[asked[part]], codes).double().numpy()
        near = merged_distances(queries[part], vectors, combiner.subspaces)
        for distances in (exact, near):
            distances[rows, asked[part]] = np.inf
        wanted = np.argsort(exact, axis=1, kind="stable")[:, :depth]
        rank = np.argsort(np.argsort(near, axis=1, kind="stable"), axis=1)
        ranks = np.take_along_axis(rank, wanted, axis=1)
        kept += [(ranks < number).mean(axis=1).sum() for number in depths]
    return {str(number): float(share / len(asked)) for number, share in zip(depths, kept, strict=True)}


def input_of(model: Model, items: NDArray[Any]) -> Input:
    """Return the manifest's entry for what the encoder takes."""
    if model.preprocessing is None:
        return Input(kind="features", dtype="float32", shape=(items.shape[1],))
    return Input(
        kind="image", dtype="uint8", shape=model.preprocessing.shape, preprocessing=model.preprocessing
    )


def is_normalized(vectors: Floats) -> bool:
    """Return whether all vectors have length 1, to float32's precision."""
    return bool(np.abs(np.linalg.norm(vectors.astype(np.float64), axis=1) - 1).max() < 1e-4)
