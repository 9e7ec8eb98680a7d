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

_COPIED_BYTES = 64_000_000
"""Originals that one request copies when it changes labels or metadata."""


def embedded(
    bundle: Bundle,
    widths: Mapping[str, int],
    new_items: Sequence[NewItem],
    images: Sequence[Decoded],
    thumbnails: Mapping[str, bytes],
) -> dict[str, Item]:
    """Return the items that have an image or a vector, by id, with the arrays that the index keeps
    of them.

    Args:
        bundle: embeds them.
        widths: numbers of each array that the index keeps of an item, by name.
        new_items: all of them.
        images: decoded, of those that have one, in order.
        thumbnails: by id, where no more is kept.

    Raises:
        DataError: vectors that the index does not take.
    """
    items: dict[str, Item] = {}
    if images:
        rows = _arrays(bundle, widths, np.stack([image.pixels for image in images]))
        with_image = [new for new in new_items if new.image is not None]
        for new, image, arrays in zip(with_image, images, rows, strict=True):
            assert new.image is not None
            items[new.id] = Item(
                new.id,
                new.label,
                new.metadata,
                keep=new.keep,
                original=new.image if new.keep == "copy" else thumbnails.get(new.id),
                bytes=len(new.image),
                width=image.width,
                height=image.height,
                arrays=arrays,
            )
    if with_vector := [new for new in new_items if new.vector is not None]:
        for new, arrays in zip(with_vector, _of_vectors(bundle, widths, with_vector), strict=True):
            items[new.id] = Item(new.id, new.label, new.metadata, keep="nothing", arrays=arrays)
    return items


def _arrays(
    bundle: Bundle, widths: Mapping[str, int], inputs: NDArray[Any]
) -> list[dict[str, Floats]]:
    """Return the arrays that the index keeps of each image or each row of features."""
    with stage("encode", len(inputs)):
        features = bundle.features(inputs) if FEATURES in widths else None
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
    takes_features = bundle.manifest.input.kind == "features"
    width = bundle.manifest.input.shape[0] if takes_features else bundle.manifest.vector
    if wrong := next((item for item in items if len(item.vector or ()) != width), None):
        what = "features" if takes_features else "numbers"
        length = len(wrong.vector or ())
        raise DataError(
            f"A vector of this index has {width} {what}, not {length} (item {wrong.id[:80]!a})."
        )
    vectors = np.array([item.vector for item in items], np.float64)
    if takes_features:
        return _arrays(bundle, widths, vectors)
    if set(widths) != {VECTOR}:
        raise DataError(
            "This index keeps more of an item than its vector: give the image, or features where it"
            " takes them."
        )
    with np.errstate(over="ignore"):
        return [{VECTOR: row} for row in vectors.astype(np.float32)]


def write(
    index: Index, bundle: Bundle, new_items: Sequence[NewItem], items: Mapping[str, Item]
) -> int:
    """Write items in one transaction; return how many were there. For the thread that writes.

    Those that are not among the embedded `items` are there already, and change in what they name.

    Raises:
        DataError: an item that is not embedded is not there.
    """
    changes = [new for new in new_items if new.id not in items]
    stored = index.get([new.id for new in changes], arrays=True) if changes else {}
    if missing := [new.id for new in changes if new.id not in stored]:
        more = f" ({len(missing):,} such items)" if len(missing) > 1 else ""
        raise DataError(
            f"There is no item {missing[0][:80]!a}, so that it needs an image or a vector{more}."
        )
    size = sum(item.bytes or 0 for item in stored.values() if item.keep == "copy")
    if len(changes) > 1 and size > _COPIED_BYTES:
        raise DataError(
            f"The originals of these items have more than {_COPIED_BYTES:,} bytes. Change fewer at"
            " a time."
        )
    with stage("write", len(new_items)):
        whole = [items.get(new.id) or _changed(index, stored[new.id], new) for new in new_items]
        return index.store.upsert(whole, bundle.sha256)


def _changed(index: Index, item: Item, change: NewItem) -> Item:
    """Return an item with what a change names."""
    original = index.store.original(item.id) if item.keep in ("copy", "thumbnail") else None
    label = change.label if "label" in change.named else item.label
    metadata = change.metadata if "metadata" in change.named else item.metadata
    return replace(item, label=label, metadata=metadata, original=original)
