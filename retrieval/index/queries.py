"""Encode queries: images, features or vectors, one or several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL.Image import Image

from retrieval.base.arrays import Array
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import DataError
from retrieval.images.preprocessing import ImageLike, as_list, is_image
from retrieval.index.sources import collect

Query: TypeAlias = "ImageLike | Sequence[float]"
"""One query: an image, a vector, or a list of numbers."""

_TYPES = "an image's path, bytes, Pillow image or pixels, or a vector"


def encode_queries(
    bundle: Bundle, queries: Encoded | Query | Sequence[Query] | Array
) -> tuple[Encoded | Array, bool]:
    """Return queries, encoded or as vectors (N, P), and whether a single query was passed.

    Args:
        bundle: encodes images or features.
        queries: one query or a list of queries of one kind. An image is its file's path, its bytes,
            a Pillow image, or its pixels as for `retrieval.Encoder.encode`. A vector is features
            (F,) if the bundle takes features, otherwise an output of the encoder (P,). Several
            vectors may be one array (N, F) or (N, P), and several images one array or tensor, as
            for `encode`. An `Encoded` is returned as it is.

    Raises:
        DataError: a query cannot be used, or a list mixes images and vectors. For a list, the
            message names the query.
    """
    if isinstance(queries, Encoded):
        return queries, False
    if hasattr(queries, "detach") or (isinstance(queries, np.ndarray) and queries.ndim > 2):
        rows = as_list(queries)
        if getattr(queries, "ndim", 0) == 4 or len(rows) != 1:
            queries = rows
        else:
            queries = rows[0]
    if is_image(queries) and (not isinstance(queries, np.ndarray) or _is_pixels(bundle, queries)):
        return bundle.encode_image(queries), True
    if isinstance(queries, np.ndarray):
        return encode_vectors(bundle, np.atleast_2d(queries)), queries.ndim == 1
    if not isinstance(queries, Sequence):
        raise DataError(f"A query is {_TYPES}, not {_kind(queries)}.")
    items = as_list(queries)
    if items and all(isinstance(item, Real) for item in items):
        return encode_vectors(bundle, np.asarray(items)[None]), True
    return _encode_list(bundle, items), False


def encode_vectors(bundle: Bundle, vectors: Array) -> Encoded | Array:
    """Encode features (N, F) if the bundle takes features; else return the vectors as they are.

    Raises:
        DataError: the features have another width or are not finite numbers.
    """
    input = bundle.manifest.input
    if input.kind != "features":
        return vectors
    if vectors.ndim == 2 and vectors.shape[1] != input.shape[0]:
        widths = f"{input.shape[0]} features, not {vectors.shape[1]}"
        raise DataError(f"A vector for this index has {widths}.")
    return bundle.encode(vectors)


def encode_files(bundle: Bundle, paths: Sequence[Path]) -> tuple[list[str], Encoded]:
    """Return the names of the queries in files, and their encodings.

    Raises:
        DataError: a file cannot be used.
    """
    if bundle.manifest.input.kind == "features":
        collected = collect(paths, "features")
        assert collected.features is not None
        return [item.key for item in collected.items], bundle.encode(collected.features)
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path} is a folder; name the query images, such as {path}/*.png.")
    return [str(path) for path in paths], bundle.encode_each(list(paths), progress=False)


def _encode_list(bundle: Bundle, items: list[Any]) -> Encoded | Array:
    """Encode a list of queries of one kind."""
    if not items:
        return np.empty((0, bundle.manifest.vector), dtype=np.float32)
    images = [_is_pixels(bundle, item) or not _is_vector(item) for item in items]
    for number, (item, image) in enumerate(zip(items, images, strict=True)):
        if image and not is_image(item):
            raise DataError(f"queries[{number}]: a query is {_TYPES}, not {_kind(item)}.")
        if image != images[0]:
            kind, first_kind = ("an image", "a vector") if image else ("a vector", "an image")
            raise DataError(
                f"queries[{number}] is {kind}, but queries[0] is {first_kind}. Search for images"
                " and vectors separately."
            )
    if images[0]:
        return bundle.encode_each(items, progress=False, name="queries")
    rows = [np.asarray(item) for item in items]
    manifest = bundle.manifest
    if manifest.input.kind == "features":
        width = manifest.input.shape[0]
    else:
        width = manifest.vector
    for number, row in enumerate(rows):
        if row.shape != (width,):
            numbers = f"{width} numbers, not shape {row.shape}"
            raise DataError(f"queries[{number}]: a vector for this index has {numbers}.")
        if row.dtype.kind not in "fiu" or not np.isfinite(row).all():
            raise DataError(f"queries[{number}]: a vector must hold finite real numbers.")
    return encode_vectors(bundle, np.stack(rows))


def _is_pixels(bundle: Bundle, item: Any) -> bool:
    """Return whether an item is the pixels of an image and the bundle takes images.

    An array (H, W) of real numbers counts as an image if its numbers are from 0 to 1, it has more
    than one row, and W is not the width of the bundle's vectors.
    """
    if not isinstance(item, np.ndarray) or bundle.manifest.input.kind != "image":
        return False
    if item.ndim == 3 or (item.ndim == 2 and item.dtype == np.uint8):
        return True
    return bool(
        item.ndim == 2
        and item.dtype.kind == "f"
        and item.size
        and len(item) > 1
        and item.shape[1] != bundle.manifest.vector
        and item.min() >= 0
        and item.max() <= 1
    )


def _is_vector(item: Any) -> bool:
    return isinstance(item, np.ndarray) or (
        isinstance(item, Sequence)
        and not isinstance(item, str | bytes | os.PathLike | Image)
        and all(isinstance(number, Real) for number in item)
    )


def _kind(item: Any) -> str:
    if item is None:
        return "None"
    return f"an object of type {type(item).__name__}"
