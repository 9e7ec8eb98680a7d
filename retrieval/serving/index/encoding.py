"""Decode and encode items: the one pipeline of creating, adding, migrating and embedding into
files.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.images import Limits, decode, full_size, read_image, thumbnail
from retrieval.serving.index.locations import Origin
from retrieval.serving.store.contract import CODE, FEATURES, VECTOR, Floats, Keep
from retrieval.serving.threads import ahead

T = TypeVar("T")
Original: TypeAlias = "Path | Origin | bytes | Floats | DataError"
"""An item's content, or where to read it: a file, an address, bytes, finite features (F,), or why
there is none.
"""


@dataclass(frozen=True)
class Settings:
    """How items are decoded and encoded.

    Attributes:
        batch: items that go through the encoder at once.
        workers: threads that decode.
        limits: the largest images that are decoded.
        features: whether the backbone's features are wanted too.
    """

    batch: int
    workers: int
    limits: Limits
    features: bool = False


@dataclass(slots=True)
class Embedded:
    """One item after the encoder, or why it has no vector.

    Attributes:
        fault: why the item cannot be used, a sentence; None for an item that was encoded.
        stamp: of the item, taken before its content was read.
        bytes: size of the original image.
        width: of the original image, in pixels.
        height: of the original image, in pixels.
        kept: what the index keeps of the original.
        arrays: the vector (P,), with "code" and "features" where there are some, by the store's
            names.
    """

    fault: str | None = None
    stamp: str = ""
    bytes: int | None = None
    width: int | None = None
    height: int | None = None
    kept: builtins.bytes | None = None
    arrays: Mapping[str, Floats] = field(default_factory=dict)


def embed(
    bundle: Bundle,
    items: Iterable[tuple[T, str, Original]],
    settings: Settings,
    *,
    stamp: Callable[[T], str] = lambda item: "",
    keep: Keep = "reference",
    strict: bool = False,
) -> Iterator[list[tuple[T, Embedded]]]:
    """Yield items with their arrays, batch by batch in order; threads decode a few batches ahead of
    the encoder.

    Args:
        bundle: encodes.
        items: each with its name, for sentences, and its original.
        settings: see `Settings`.
        stamp: returns what changes when an item's content does.
        keep: "copy" and "thumbnail" give `Embedded.kept`.
        strict: after the first item that cannot be used, only decode the others, to find all
            faults: they come without arrays.

    Raises:
        DataError: the encoder gives NaN or infinity.
    """

    def decoded(entry: tuple[T, str, Original]) -> tuple[T, Embedded, NDArray[Any] | None]:
        item, name, original = entry
        before = stamp(item)
        try:
            result, inputs = _decoded(bundle, name, original, settings.limits, keep)
        except DataError as fault:
            return item, Embedded(str(fault), before), None
        result.stamp = before
        return item, result, inputs

    failed = False
    waiting: list[tuple[T, Embedded, NDArray[Any] | None]] = []
    if bundle.manifest.input.kind == "features":
        entries: Iterator[tuple[T, Embedded, NDArray[Any] | None]] = map(decoded, items)
    else:
        entries = ahead(decoded, items, workers=settings.workers, most=2 * settings.batch)
    for entry in entries:
        failed |= strict and entry[2] is None
        waiting.append(entry)
        if len(waiting) == settings.batch or failed:
            if not failed:
                _encode(bundle, waiting, settings)
            yield [(item, result) for item, result, _ in waiting]
            waiting = []
    _encode(bundle, waiting, settings)
    yield [(item, result) for item, result, _ in waiting]


def _decoded(
    bundle: Bundle, name: str, original: Original, limits: Limits, keep: Keep
) -> tuple[Embedded, NDArray[Any]]:
    """Return what is known of an original, and the encoder's input."""
    if isinstance(original, DataError):
        raise original
    if isinstance(original, np.ndarray):
        return Embedded(), original
    if isinstance(original, Origin):
        content = original.read(limits.bytes)
    else:
        content = original if isinstance(original, bytes) else read_image(original, limits, name)
    image = decode(content, limits, name)
    preprocessing = bundle.manifest.input.preprocessing
    assert preprocessing is not None
    try:
        inputs = preprocessing(image)
        kept = content if keep == "copy" else thumbnail(image) if keep == "thumbnail" else None
    except DataError as fault:
        raise DataError(f"{name}: {fault}") from fault
    width, height = full_size(image)
    return Embedded(bytes=len(content), width=width, height=height, kept=kept), inputs


def _encode(
    bundle: Bundle, batch: list[tuple[T, Embedded, NDArray[Any] | None]], settings: Settings
) -> None:
    """Give the decoded items of a batch their arrays."""
    decoded = [(result, inputs) for _, result, inputs in batch if inputs is not None]
    if decoded:
        arrays = _arrays_of(bundle, np.stack([inputs for _, inputs in decoded]), settings)
        for row, (result, _) in enumerate(decoded):
            result.arrays = row_of(arrays, row)


def _arrays_of(bundle: Bundle, inputs: NDArray[Any], settings: Settings) -> dict[str, Floats]:
    """Return the arrays (n, width) that a store keeps of encoder inputs (n, …), by name."""
    if not settings.features:
        return by_name(bundle.encode(inputs, batch=settings.batch))
    features = bundle.features(inputs, batch=settings.batch)
    return by_name(bundle.encode_features(features, batch=settings.batch), features)


def by_name(encoded: Encoded, features: Floats | None = None) -> dict[str, Floats]:
    """Return encoded arrays (n, width), and perhaps the features (n, F) behind them, by the store's
    names.
    """
    arrays = {VECTOR: encoded.vector, CODE: encoded.code, FEATURES: features}
    return {name: array for name, array in arrays.items() if array is not None}


def row_of(arrays: Mapping[str, Floats], row: int) -> dict[str, Floats]:
    """Return one row of each array."""
    return {name: values[row] for name, values in arrays.items()}
