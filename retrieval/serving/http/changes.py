"""What is to be written of items: embedded, or read and changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.bundle import Bundle
from retrieval.serving.decoding import Decoded
from retrieval.serving.http.models import NewItem
from retrieval.serving.index.index import Index
from retrieval.serving.stages import stage
from retrieval.serving.store.contract import CODE, FEATURES, VECTOR, Floats, Item

_KEPT_BYTES = 64_000_000
"""Originals that one request copies when it changes labels or metadata."""


def embedded(
    bundle: Bundle,
    widths: Mapping[str, int],
    items: Sequence[NewItem],
    decoded: Sequence[Decoded],
    small: Mapping[str, bytes],
) -> dict[str, Item]:
    """Return the items that have an image or a vector, with what the index keeps of them.

    Args:
        bundle: embeds them.
        widths: numbers of each array that the index keeps of an item, by name.
        items: all of them.
        decoded: the images of those that have one, in order.
        small: thumbnails, by id, where no more is kept.

    Raises:
        DataError: vectors that the index does not take.
    """
    made: dict[str, Item] = {}
    pictured = [item for item in items if item.image is not None]
    if pictured:
        arrays = _arrays(bundle, widths, np.stack([one.pixels for one in decoded]))
        for item, picture, row in zip(pictured, decoded, arrays, strict=True):
            assert item.image is not None
            original = item.image if item.keep == "copy" else small.get(item.id)
            made[item.id] = Item(item.id, item.label, item.metadata, None, None, item.keep, original, len(item.image), picture.width, picture.height, row)  # fmt: skip
    if numbered := [item for item in items if item.vector is not None]:
        for item, row in zip(numbered, _of_vectors(bundle, widths, numbered), strict=True):
            made[item.id] = Item(item.id, item.label, item.metadata, keep="nothing", arrays=row)
    return made


def _arrays(bundle: Bundle, widths: Mapping[str, int], inputs: NDArray[Any]) -> list[dict[str, Floats]]:
    """Return the arrays that the index keeps of images or features."""
    with stage("encode", len(inputs)):
        keeps = FEATURES in widths
        features = bundle.features(inputs) if keeps else None
        encoded = bundle.encode(inputs) if features is None else bundle.encode_features(features)
    arrays = {VECTOR: encoded.vector}
    if encoded.code is not None:
        arrays[CODE] = encoded.code
    if features is not None:
        arrays[FEATURES] = np.asarray(features, np.float32)
    return [{name: array[row] for name, array in arrays.items()} for row in range(len(inputs))]


def _of_vectors(
    bundle: Bundle, widths: Mapping[str, int], items: Sequence[NewItem]
) -> list[dict[str, Floats]]:
    given = bundle.manifest.input
    width = given.shape[0] if given.kind == "features" else bundle.manifest.vector
    if wrong := next((item for item in items if len(item.vector or ()) != width), None):
        what = "features" if given.kind == "features" else "numbers"
        raise DataError(
            f"A vector of this index has {width} {what}, not {len(wrong.vector or ())} (item {wrong.id[:80]!a})."
        )
    vectors = np.array([item.vector for item in items], np.float64)
    if given.kind == "features":
        return _arrays(bundle, widths, vectors)
    if set(widths) != {VECTOR}:
        raise DataError(
            "This index keeps more of an item than its vector: give the image, or features where it takes them."
        )
    with np.errstate(over="ignore"):
        return [{VECTOR: row} for row in vectors.astype(np.float32)]


def write(items: Sequence[NewItem], made: Mapping[str, Item], bundle: Bundle, index: Index) -> int:
    """Write items in one transaction; return how many were there.

    Args:
        items: all of them.
        made: those that are embedded; the others are there, and change in what they name.
        bundle: has embedded them.
        index: is written to, in the thread that writes.

    Raises:
        DataError: an item that is not embedded is not there.
    """
    kept = [item for item in items if item.id not in made]
    there = index.get([item.id for item in kept], arrays=True) if kept else {}
    if missing := [item.id for item in kept if item.id not in there]:
        raise DataError(
            f"There is no item {missing[0][:80]!a}, so that it needs an image or a vector"
            + (f" ({len(missing):,} such items)." if len(missing) > 1 else ".")
        )
    size = sum(there[item.id].bytes or 0 for item in kept if there[item.id].keep == "copy")
    if len(kept) > 1 and size > _KEPT_BYTES:
        raise DataError(
            f"The originals of these items have more than {_KEPT_BYTES:,} bytes. Change fewer at a time."
        )
    with stage("write", len(items)):
        whole = [made.get(item.id) or _changed(index, there[item.id], item) for item in items]
        return index.store.upsert(whole, bundle.sha256)


def _changed(index: Index, item: Item, change: NewItem) -> Item:
    """Return an item with what a change names."""
    original = index.store.original(item.id) if item.keep in ("copy", "thumbnail") else None
    label = change.label if "label" in change.named else item.label
    metadata = change.metadata if "metadata" in change.named else item.metadata
    return replace(item, label=label, metadata=metadata, original=original)
