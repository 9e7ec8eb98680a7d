"""What a bundle says of one made-up input, and where its encoder put it when the bundle was made."""

from __future__ import annotations

import binascii
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict

TILES = 8
"""Rows and columns of a probe image's tiles; TILES² numbers are repeated for features."""

WIDEST = 100_000
"""Numbers of a vector that a probe has; bundles of wider ones have none."""

_LONGEST = 4 * WIDEST  # bytes


def _coded(text: str) -> str:
    try:
        size = len(binascii.a2b_base64(text.encode("ascii"), strict_mode=True))
    except (UnicodeEncodeError, binascii.Error):
        raise ValueError("it is not base64") from None
    if not 0 < size <= _LONGEST:
        raise ValueError(f"it has {size:,} bytes; 1 to {_LONGEST:,} are possible")
    return text


Coded = Annotated[str, AfterValidator(_coded)]


class Probe(BaseModel):
    """An input that shows nobody's picture, and its vectors as ONNX Runtime gave them; arrays are base64 of little-endian bytes.

    Attributes:
        pattern: of images uint8 (C, TILES, TILES), each number a tile of the image; of features float32 (TILES²,), repeated to their width.
        vector: float32 (P,), of the encoder.
        variants: likewise of each variant, by its name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: Coded
    vector: Coded
    variants: dict[str, Coded] = {}


def coded(array: NDArray[Any]) -> str:
    """Return an array's bytes as a probe has them."""
    content = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return binascii.b2a_base64(content, newline=False).decode("ascii")


def vector_of(text: str) -> NDArray[np.float32]:
    """Return a vector (P,) of a probe."""
    return np.frombuffer(binascii.a2b_base64(text), "<f4").astype(np.float32)


def made_up(kind: str, shape: tuple[int, ...], spread: tuple[float, float] = (0.0, 1.0)) -> NDArray[Any]:
    """Return a pattern for an encoder of images (C, H, W) or features (F,); see `Probe`.

    Args:
        kind: "image" or "features".
        shape: of one input.
        spread: mean and standard deviation of features.
    """
    chance = np.random.default_rng(0)
    if kind == "image":
        return chance.integers(0, 256, (shape[0], TILES, TILES), np.uint8)
    return chance.normal(*spread, TILES * TILES).astype(np.float32)


def input_of(pattern: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the one input (1, C, H, W) or (1, F) that a pattern stands for."""
    if len(shape) == 1:
        return np.resize(pattern, shape)[None]
    _, height, width = shape
    rows, columns = (np.arange(size) * TILES // size for size in (height, width))
    return np.ascontiguousarray(pattern[:, rows][:, :, columns])[None]


def pattern_of(probe: Probe, shape: tuple[int, ...]) -> NDArray[Any] | None:
    """Return a probe's pattern; None where it does not fit inputs of this shape."""
    content = binascii.a2b_base64(probe.pattern)
    if len(shape) == 1:
        return np.frombuffer(content, "<f4").astype(np.float32) if len(content) == 4 * TILES * TILES else None
    found = np.frombuffer(content, np.uint8)
    return found.reshape(shape[0], TILES, TILES) if found.size == shape[0] * TILES * TILES else None
