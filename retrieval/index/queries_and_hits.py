"""A search of an index: encode its queries, rank the store's candidates, and return hits."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from PIL.Image import Image

from retrieval.base.arrays import Array, Floats32, Floats64
from retrieval.base.display_tables import html_hits, text_table
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.bundle.distances import bundle_distances, merged_distances
from retrieval.errors import DataError, RetrievalError
from retrieval.images.decoding import decode
from retrieval.images.preprocessing import ImageLike, as_list, is_image, to_mode
from retrieval.index.sources import collect
from retrieval.store.contract import CODE, VECTOR, Candidates, Item, Superseded

PICTURE_PIXELS = 96
"""Longer side of a picture in a notebook's table, in pixels."""

QueryLike: TypeAlias = "ImageLike | Sequence[float]"
"""One query: an image, a vector, or a list of numbers."""

_CONTAINERS = (dict, list)
_TYPES = "an image's path, bytes, Pillow image or pixels, or a vector"


class Hit(NamedTuple):
    """One result of a search: an item and its distance to the query.

    Attributes:
        id: id of the item.
        label: label of the item, or `None`.
        distance: distance to the query; smaller is closer. NaN if no vectors were compared.
        metadata: metadata of the item.
        path: path of the indexed file. `None` if the item is not a file of its own.
        keep: what the index keeps of the original; see `retrieval.store.contract.Keep`.
        score: share of strangers that come less near, if the search asked for `scores`; see
            `Calibration.shares`. In a search for the words of items, what orders the hits; see
            `retrieval.index.answering`.
    """

    id: str
    label: str | None
    distance: float
    metadata: Mapping[str, Any]
    path: Path | None = None
    keep: str = "reference"
    score: float | None = None

    def __repr__(self) -> str:
        if self.label is None:
            label = ""
        else:
            label = f", label={self.label!r}"
        return f"Hit(id={self.id!r}{label}, distance={self.distance:.4f})"


_new_hit: Callable[[type[Hit], tuple[Any, ...]], Hit] = tuple.__new__


class Hits(list[Hit]):
    """The hits of one query, nearest first.

    They print as a table; in a notebook, the table has pictures. Pickled hits lose the function
    `original`, and show only pictures that are still at their path.

    Attributes:
        facets: values of fields among the hits, as pairs (value, number of hits) by field; the most
            frequent first. Empty unless the search asked for `facets`.

    Args:
        hits: the hits.
        original: function that takes an item's id, and returns the bytes that the index keeps of
            its original, or `None`.
    """

    facets: Mapping[str, list[tuple[Any, int]]] = MappingProxyType({})

    def __init__(
        self, hits: Iterable[Hit] = (), original: Callable[[str], bytes | None] | None = None
    ) -> None:
        super().__init__(hits)
        self._original = original

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_original": None}  # the open store cannot be pickled

    def __repr__(self) -> str:
        return text_table(self)

    def _repr_html_(self) -> str:
        return html_hits(self, self._picture)

    def image(self, hit: Hit) -> Image | None:
        """Return a hit's original as an image, or `None` if it is not kept or cannot be read."""
        try:
            source: Path | bytes | None = self._original(hit.id) if self._original else None
            if source is None and hit.keep == "reference":
                source = hit.path
            if source is None:
                return None
            return decode(source)
        except RetrievalError:
            return None

    def _picture(self, hit: Hit) -> str:
        """Return an HTML element with a hit's picture, or "" if the hit has no image."""
        image = self.image(hit)
        if image is None:
            return ""
        small = to_mode(image, "RGB").copy()
        small.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
        content = io.BytesIO()
        small.save(content, "png")
        data = base64.b64encode(content.getvalue()).decode()
        return f'<img src="data:image/png;base64,{data}">'


def encode_queries(
    bundle: Bundle,
    queries: Encoded | QueryLike | Sequence[QueryLike] | Array | None,
    text: str | Sequence[str] | None = None,
) -> tuple[Floats32, Floats32 | None, bool]:
    """Return the vectors (Q, P) and codes (Q, C) of queries, and whether a single one was passed.

    The codes are `None` if the bundle has no rescorer. NaN and infinity pass; the store refuses
    them.

    Args:
        bundle: encodes images or features.
        queries: one query or a list of queries of one kind. An image is its file's path, its bytes,
            a Pillow image, or its pixels as for `retrieval.Encoder.encode`. A vector is features
            (F,) if the bundle takes features, otherwise an output of the encoder (P,). Several
            vectors may be one array (N, F) or (N, P), and several images one array or tensor, as
            for `encode`. An `Encoded` may come from the bundle's `encode`.
        text: one or several texts instead of queries. Beside them, `queries` may only be their
            `Encoded`, from the bundle's `encode_text`.

    Raises:
        DataError: a query cannot be used, a list mixes images and vectors, or the bundle takes no
            texts. For a list, the message names the query.
        Superseded: an `Encoded` comes from another bundle.
    """
    if text is None:
        encoded, is_single = _encoded(bundle, queries)
    elif queries is None:
        encoded = bundle.encode_text(text)
        is_single = isinstance(text, str)
    elif isinstance(queries, Encoded):
        encoded = queries
        is_single = isinstance(text, str)
    else:
        raise DataError("Search with an image or vector, or with a text, not with both.")
    rescores = bundle.manifest.rescorer is not None
    width = bundle.manifest.vector
    codes = None
    if isinstance(encoded, Encoded):
        if encoded.bundle not in ("", bundle.sha256):
            raise Superseded(
                "The queries were encoded with another bundle than the one that the index serves."
                " Encode them again."
            )
        vectors = encoded.query
        codes = encoded.code
    else:
        vectors = np.atleast_2d(np.asarray(encoded))
        if vectors.dtype.kind not in "fiu":
            raise DataError(f"A query vector holds real numbers, not {vectors.dtype}.")
    if vectors.ndim != 2 or vectors.shape[1] != width:
        raise DataError(
            f"A query vector of this index has {width} numbers, not {vectors.shape[-1]}."
        )
    if rescores and codes is None:
        raise DataError(
            "The rescorer of this index needs the code of each query, which a vector lacks. Pass an"
            " image, or features if the bundle takes features."
        )
    if not rescores:
        codes = None
    if vectors.dtype == np.float32:
        return np.ascontiguousarray(vectors), codes, is_single
    # A number beyond float32 becomes infinite, which the store refuses in a sentence.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(vectors, np.float32), codes, is_single


def _encoded(
    bundle: Bundle, queries: Encoded | QueryLike | Sequence[QueryLike] | Array | None
) -> tuple[Encoded | Array, bool]:
    """Return queries, encoded or as vectors (Q, P), and whether a single query was passed."""
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
        return list(collected.items.ids), bundle.encode(collected.features)
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


def ranked(
    bundle: Bundle, query: Floats32, code: Floats32 | None, group: Candidates, k: int, count: int
) -> list[Hit]:
    """Return the k nearest of a query's candidates, by the distance that `bundle` defines.

    `count` is the number of candidates to rescore; the store may propose a few more.
    """
    measures_vectors = bundle.compares_vectors_alone
    if group.distances is not None:
        # The store has measured the same distance already.
        if measures_vectors:
            return hits_of(group.items, group.distances[:k])
        rows = sorted(range(len(group.items)), key=lambda row: group.items[row].id)
        group = _selected(group, rows)
    elif not (measures_vectors or bundle.manifest.subspaces):
        group = _cut(group, query, count)
    if not group.items:
        return []
    codes = None
    if code is not None:
        codes = group.arrays[CODE]
    hit_count = min(k, len(group.items))
    distances = bundle_distances(bundle, query, code, group.arrays[VECTOR], codes, hit_count)
    # Candidates are sorted by id, so a stable sort orders ties by id.
    order = np.argsort(distances, kind="stable")[:k]
    nearest = [group.items[row] for row in order.tolist()]
    return hits_of(nearest, distances[order])


def hits_of(items: Sequence[Item], distances: Floats64) -> list[Hit]:
    """Return one hit per distance; items beyond the number of distances are ignored."""
    hits = []
    for item, distance in zip(items, distances.tolist(), strict=False):
        # The metadata are copied, because the store shares its own between searches.
        metadata = own_copy(item.metadata) if item.metadata else {}
        fields = (item.id, item.label, distance, metadata, item.path, item.keep, None)
        # Half as dear as `Hit(…)`, which a search calls for each of its hits.
        hits.append(_new_hit(Hit, fields))
    return hits


def _cut(proposed: Candidates, query: Floats32, count: int) -> Candidates:
    """Return the `count` nearest candidates by Euclidean distance, still sorted by id."""
    if len(proposed.items) <= count:
        return proposed
    distances = merged_distances(query, proposed.arrays[VECTOR], count, (), "min")
    return _selected(proposed, sorted(np.argsort(distances, kind="stable")[:count].tolist()))


def _selected(proposed: Candidates, rows: list[int]) -> Candidates:
    """Return the candidates in the given rows, without the store's distances."""
    arrays = {name: array[rows] for name, array in proposed.arrays.items()}
    return Candidates([proposed.items[row] for row in rows], arrays)


def own_copy(value: Any) -> Any:
    """Return a deep copy of a JSON value, a third as dear as `copy.deepcopy`."""
    if isinstance(value, dict):
        # Most objects are flat.
        copy = dict(value)
        for name, entry in value.items():
            if isinstance(entry, _CONTAINERS):
                copy[name] = own_copy(entry)
        return copy
    if isinstance(value, list):
        return [own_copy(entry) for entry in value]
    return value
