"""A bundle's probe: a synthetic input and its vectors at export, to detect a broken model later."""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict

from retrieval.base.arrays import Array, Floats32
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.bundle.bundle import Bundle

TILES = 8
"""A probe image has TILES × TILES tiles. A probe of features repeats TILES² numbers."""

WIDEST = 100_000
"""Widest vector of a probe; bundles with wider vectors have no probe."""

_TEXT = "Two red mugs, size 42, on a table."
_MAX_BYTES = 4 * WIDEST

# Differences that are always allowed. The first two are of one number of a vector, as a share of
# the vector's norm.
_ALLOWED_CPU = 1e-4
_ALLOWED_CUDA = 1e-2  # ONNX Runtime multiplies in TF32 there (10 bits of mantissa)
_ALLOWED_DRIFT = 1e-3  # of a variant, as 1 − cosine: processors saturate int8 differently


def _checked(text: str) -> str:
    # A manifest may come from anyone.
    try:
        size = len(binascii.a2b_base64(text.encode("ascii"), strict_mode=True))
    except (UnicodeEncodeError, binascii.Error):
        raise ValueError("it is not base64") from None
    if not 0 < size <= _MAX_BYTES:
        raise ValueError(f"it has {size:,} bytes; 1 to {_MAX_BYTES:,} are allowed")
    return text


Coded = Annotated[str, AfterValidator(_checked)]


class Probe(BaseModel):
    """A synthetic input and the vectors that ONNX Runtime returned for it at export.

    Arrays are base64 of little-endian bytes.

    Attributes:
        pattern: for images uint8 (C, TILES, TILES), one number per tile; for features float32
            (TILES²,), repeated up to the width of the features.
        vector: vector (P,) of the encoder, float32.
        variants: vector (P,) of each variant, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: Coded
    vector: Coded
    variants: dict[str, Coded] = {}


class TextProbe(BaseModel):
    """A text and the vector (P,), float32, that ONNX Runtime returned for it at export.

    The vector is base64 of little-endian bytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    vector: Coded


def coded(array: Array) -> str:
    """Return an array as base64 of little-endian bytes, which is what a `Probe` holds."""
    content = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return binascii.b2a_base64(content, newline=False).decode("ascii")


def vector_of(text: str) -> Floats32:
    """Return the vector (P,) that a probe's text encodes."""
    return np.frombuffer(binascii.a2b_base64(text), "<f4").astype(np.float32)


def input_of(pattern: Array, shape: tuple[int, ...]) -> Array:
    """Return the input (1, C, H, W) or (1, F) for a pattern."""
    if len(shape) == 1:
        return np.resize(pattern, shape)[None]
    _, height, width = shape
    rows, columns = (np.arange(size) * TILES // size for size in (height, width))
    return np.ascontiguousarray(pattern[:, rows][:, :, columns])[None]


def pattern_of(probe: Probe, shape: tuple[int, ...]) -> Array | None:
    """Return a probe's pattern, or `None` if it does not fit inputs of this shape."""
    content = binascii.a2b_base64(probe.pattern)
    tiles = TILES * TILES
    if len(shape) == 1 and len(content) == 4 * tiles:
        return np.frombuffer(content, "<f4").astype(np.float32)
    if len(shape) == 3 and len(content) == shape[0] * tiles:
        return np.frombuffer(content, np.uint8).reshape(shape[0], TILES, TILES)
    return None


def probe_of(bundles: dict[str | None, Bundle], spread: tuple[float, float]) -> Probe:
    """Return a probe with the vectors of a new bundle and its variants.

    Args:
        bundles: by name, the bundle opened with each variant; under `None`, without a variant.
        spread: mean and standard deviation of the features, if the bundle takes features.
    """
    input = bundles[None].manifest.input
    random = np.random.default_rng(0)
    pattern: Array
    if input.kind == "image":
        pattern = random.integers(0, 256, (input.shape[0], TILES, TILES), np.uint8)
    else:
        pattern = random.normal(*spread, TILES * TILES).astype(np.float32)
    inputs = input_of(pattern, input.shape)
    vectors = {name: coded(bundle.encode(inputs).vector[0]) for name, bundle in bundles.items()}
    return Probe(
        pattern=coded(pattern),
        vector=vectors[None],
        variants={name: vector for name, vector in vectors.items() if name is not None},
    )


def text_probe_of(bundle: Bundle) -> TextProbe:
    """Return the probe of a new bundle's text encoder."""
    return TextProbe(text=_TEXT, vector=coded(bundle.encode_text(_TEXT).vector[0]))


def probe_fault(bundle: Bundle) -> str | None:
    """Return a sentence if a bundle's encoders no longer give the probe's vectors, else `None`."""
    if fault := _image_fault(bundle):
        return fault
    text = bundle.manifest.text
    # Without the package `tokenizers`, the bundle takes no texts, and nothing can be wrong.
    if text is None or text.probe is None or not bundle.takes_text:
        return None
    if len(binascii.a2b_base64(text.probe.vector)) != 4 * bundle.manifest.vector:
        return "The bundle's text probe does not fit its encoder. Export the bundle again."
    expected = vector_of(text.probe.vector).astype(np.float64)
    try:
        vector = bundle.encode_text(text.probe.text).vector[0].astype(np.float64)
    except DataError:
        return "The model is broken: it embeds the bundle's text probe as NaN or infinity."
    difference = float(np.abs(expected - vector).max()) / (float(np.linalg.norm(expected)) or 1.0)
    return _broken(difference, _allowed(bundle, text.verified.tolerance))


def _image_fault(bundle: Bundle) -> str | None:
    """Return a sentence if the encoder of images or features fails the probe, else `None`."""
    manifest = bundle.manifest
    variant = bundle.variant
    probe = manifest.probe
    shape = manifest.input.shape
    if probe is None:
        return None
    pattern = pattern_of(probe, shape)
    if variant is None:
        text = probe.vector
    else:
        text = probe.variants.get(variant, "")
    if pattern is None or len(binascii.a2b_base64(text)) != 4 * manifest.vector:
        return "The bundle's probe does not fit its encoder. Export the bundle again."
    expected = vector_of(text).astype(np.float64)
    try:
        vector = bundle.encode(input_of(pattern, shape)).vector[0].astype(np.float64)
    except DataError:
        return "The model is broken: it embeds the bundle's probe as NaN or infinity."
    # A vector of zeros has no length to divide by.
    length = float(np.linalg.norm(expected)) or 1.0
    if variant is None:  # the limit is the tolerance of the comparison with torch
        difference = float(np.abs(expected - vector).max()) / length
        allowed = _allowed(bundle, manifest.verified.tolerance)
    else:  # the limit is twice the largest 1 − cosine that the export measured
        difference = 1.0 - float(expected @ vector) / (
            (length * float(np.linalg.norm(vector))) or 1.0
        )
        allowed = max(2.0 * (1.0 - manifest.variants[variant].cosine.min), _ALLOWED_DRIFT)
    return _broken(difference, allowed)


def _allowed(bundle: Bundle, tolerance: float) -> float:
    if bundle.device == "cpu":
        return max(tolerance, _ALLOWED_CPU)
    return max(tolerance, _ALLOWED_CUDA)


def _broken(difference: float, allowed: float) -> str | None:
    if difference <= allowed:
        return None
    return (
        f"The model is broken: its embedding of the bundle's probe differs by {difference:.2g} from"
        f" the one at export; {allowed:.2g} is allowed. This processor or ONNX Runtime may be at"
        " fault; run `retrieval doctor`."
    )
