"""Images and arrays through a bundle's graphs: decoded or checked before, in batches, checked after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import BundleError, DataError
from retrieval.host.cores import cores
from retrieval.serving.manifest import Input
from retrieval.serving.progress import Meter
from retrieval.serving.threads import ahead

T = TypeVar("T")
Floats = NDArray[np.float32]
Runs = Callable[[Sequence[str], Mapping[str, NDArray[Any]]], list[Any]]
"""What a graph is called with: the names of its outputs, its inputs by name."""


def checked_inputs(inputs: NDArray[Any], said: Input, path: Path) -> NDArray[Any]:
    """Return inputs as a graph takes them.

    Args:
        inputs: uint8 (N, C, H, W), or real numbers (N, F).
        said: what the graph takes.
        path: the bundle's, for errors.

    Raises:
        DataError: they have another shape or type, or hold NaN or infinity.
    """
    if not isinstance(inputs, np.ndarray):
        raise DataError("encode takes an array of all inputs; images go to encode_images.")
    if inputs.ndim != len(said.shape) + 1 or inputs.shape[1:] != said.shape:
        wanted = ", ".join(map(str, said.shape))
        raise DataError(f"The bundle {path} takes inputs of shape (N, {wanted}), not {inputs.shape}.")
    if said.dtype == "uint8":
        if inputs.dtype != np.uint8:
            raise DataError(f"The bundle {path} takes raw pixels as uint8, not {inputs.dtype}.")
        return inputs
    if inputs.dtype.kind not in "fiu":
        raise DataError(f"The bundle {path} takes real numbers, not {inputs.dtype}.")
    with np.errstate(over="ignore"):
        values = inputs.astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise DataError(f"Vector {row} holds NaN, infinity or a number beyond float32.")
    return values


def parts_of(inputs: NDArray[Any], batch: int) -> Iterator[NDArray[Any]]:
    """Yield the rows, `batch` at a time."""
    return (inputs[start : start + batch] for start in range(0, len(inputs), batch))


def decoded(
    images: Sequence[T], pixels: Callable[[T], NDArray[np.uint8]], batch: int, threads: int | None, name: str
) -> Iterator[NDArray[np.uint8]]:
    """Yield the pixels of images, `batch` at a time, decoded in threads while earlier ones are encoded.

    Args:
        images: a list.
        pixels: gives those of one image.
        batch: how many at a time.
        threads: that decode; None: as many as there are cores.
        name: what an error calls the list.

    Raises:
        DataError: what `pixels` raises, with the image's place in the list.
    """

    def one(numbered: tuple[int, T]) -> NDArray[np.uint8]:
        number, image = numbered
        try:
            return pixels(image)
        except DataError as fault:
            raise DataError(f"{name}[{number}]: {fault}") from fault

    made = ahead(one, enumerate(images), workers=threads or cores(), most=2 * batch)
    with Meter("encoding", len(images), "images") as meter:
        waiting: list[NDArray[np.uint8]] = []
        for each in made:
            waiting.append(each)
            if len(waiting) == batch:
                yield np.stack(waiting)
                meter.update(batch)
                waiting = []
        if waiting:
            yield np.stack(waiting)
            meter.update(len(waiting))


def run_batches(
    graph: Runs, widths: Mapping[str, int], batches: Iterable[NDArray[Any]], count: int, what: str = "encoder"
) -> dict[str, Floats]:
    """Return the outputs of a graph for checked inputs.

    Args:
        graph: takes "input".
        widths: of the outputs that are asked for.
        batches: of inputs.
        count: how many rows they hold together.
        what: the graph's name in an error.

    Returns:
        For each output (count, its width).

    Raises:
        DataError: an output holds NaN or infinity.
        BundleError: ONNX Runtime refuses, or an output has another shape than the manifest says.
    """
    out = {name: np.empty((count, width), dtype=np.float32) for name, width in widths.items()}
    start = 0
    for part in batches:
        feeds = {"input": np.ascontiguousarray(part)}
        for name, values in zip(out, graph(list(out), feeds), strict=True):
            if values.shape != (len(part), widths[name]):
                raise BundleError(
                    f"The {what} gives '{name}' of shape {values.shape} for {len(part)} items; the manifest says "
                    f"({len(part)}, {widths[name]})."
                )
            out[name][start : start + len(part)] = values
        start += len(part)
    for name, values in out.items():
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise DataError(f"The {what} gives NaN or infinity in '{name}' for item {row} of the batch.")
    return out
