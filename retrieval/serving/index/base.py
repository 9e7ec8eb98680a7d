"""What an opened index is, however it is kept: search it with an image or a vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from retrieval.errors import DataError, at_least_one
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.files.places import StrPath
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.index.contract import Floats
from retrieval.serving.index.items import Item as StoredItem
from retrieval.serving.index.summary import Summary
from retrieval.serving.merging import merged, of_products
from retrieval.serving.queries import encode_queries
from retrieval.serving.store.address import IndexPlace
from retrieval.serving.store.contract import Superseded

Distances = NDArray[np.float64]
Where: TypeAlias = "str | Mapping[str, Any] | Filter | None"

_TRIES = 5
_BLOCK = 256  # queries at a time: bounds the memory of measuring candidates
MARGIN = 8
"""Candidates beyond k: FAISS's matrix products swap neighbours that differ in the seventh digit."""


@dataclass(frozen=True, init=False)
class Hit:
    """One answer: smaller distance is closer.

    Attributes:
        id: of the item: its text in a living index, its number in a folder of format 1.
        key: the item's name; the same as `id` in a living index.
        label: None when it has none.
        distance: to the query.
        metadata: what else is known of it.
        path: the indexed file, None for features.
        keep: what the index keeps of the original: see `retrieval.serving.store.contract.Keep`.
        stamp: of the item, with its seal; None in a folder of format 1.
    """

    id: int | str
    key: str
    label: str | None
    distance: float
    metadata: Mapping[str, Any]
    path: Path | None = None
    keep: str = "reference"
    stamp: str | None = None

    def __init__(
        self,
        id: int | str,
        key: str,
        label: str | None,
        distance: float,
        metadata: Mapping[str, Any],
        path: Path | None = None,
        keep: str = "reference",
        stamp: str | None = None,
    ) -> None:
        # thousands are made for a batch, and what a frozen dataclass writes for itself takes three times as long
        held = self.__dict__
        held["id"], held["key"], held["label"], held["distance"] = id, key, label, distance
        held["metadata"], held["path"], held["keep"], held["stamp"] = metadata, path, keep, stamp


class Index(ABC):
    """An opened index. Searching is safe in threads.

    Attributes:
        path: the folder, or the address.
        summary: what building it did, where `retrieval.build_index` gave it; else None.
    """

    path: IndexPlace
    summary: Summary | None = None
    migrates = False
    """Whether another bundle may be served by the time of a search, so that encoded queries must be this bundle's."""

    @property
    @abstractmethod
    def bundle(self) -> Bundle:
        """Encodes queries and, where it has a rescorer, orders candidates."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """What tells this index from every other."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _answers(
        self,
        query: Floats,
        code: Floats | None,
        bundle: Bundle,
        k: int,
        candidates: int | None,
        where: Filter | None,
    ) -> list[list[Hit]]:
        """Return the nearest of each query, all of which `bundle` encoded; see `search`."""

    @abstractmethod
    def item(self, number: int | str) -> StoredItem | None:
        """Return an item by its id, or None."""

    @abstractmethod
    def vector(self, number: int | str) -> Floats:
        """Return the stored vector (P,) of an item by its id."""

    @abstractmethod
    def changed(self) -> str | None:
        """Return a sentence when the files on the disk are no longer what was opened; costs a few looks at the file system."""

    @abstractmethod
    def require_open(self) -> None:
        """Raise a `StoreError` once the index is closed."""

    @abstractmethod
    def close(self) -> None:
        """Close the files; the index cannot be searched any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def search(
        self,
        queries: StrPath | bytes | Image,
        k: int = 10,
        *,
        candidates: int | None = None,
        where: Where = None,
    ) -> list[Hit]: ...
    @overload
    def search(
        self, queries: Encoded | list[Any], k: int = 10, *, candidates: int | None = None, where: Where = None
    ) -> list[list[Hit]]: ...
    @overload
    def search(
        self, queries: Any, k: int = 10, *, candidates: int | None = None, where: Where = None
    ) -> list[Any]: ...
    def search(
        self, queries: Any, k: int = 10, *, candidates: int | None = None, where: Where = None
    ) -> list[Any]:
        """Return the nearest items of a query, nearest first; equal distances by id. Of several queries, a list of such lists.

        Without a rescorer the distance is measured on the stored vectors, Euclidean unless the bundle says otherwise (with sub-spaces,
        what the bundle's merge makes of them: `retrieval.serving.merging`). With one, it is the rescorer's.

        Args:
            queries: one query, which gives one list of hits:

                - an image: its file's path (text or `Path`), its bytes, a Pillow image, or its pixels, uint8 (H, W) or (H, W, 3);
                - a vector: (F,) features where the bundle takes features, otherwise (P,) as its encoder gives.

                Or several, which give one list of hits each: a list of images or of vectors, an array (N, F) or (N, P), or
                `Encoded`, which the bundle's `encode` gave.
            k: how many; all items when there are fewer.
            candidates: how many the rescorer is given, in each sub-space; the bundle's own number by default.
            where: only items that match, as text (`price < 20 and label in ('shoe', 'boot')`) or as JSON; see `retrieval.serving.filters`.

        Raises:
            DataError: an image cannot be decoded, a vector has another width or holds NaN, a list mixes images and vectors, k is
                below 1, or encoded vectors come alone where a rescorer needs codes. In a list, the message names the item.
            StoreError: the index was closed.
        """
        k = at_least_one("k", k)
        if candidates is not None:
            candidates = at_least_one("The number of candidates", candidates)
        self.require_open()
        chosen = as_filter(where)
        for attempt in range(_TRIES):
            bundle = self.bundle
            encoded, alone = encode_queries(bundle, queries)
            query, code = _checked(bundle, encoded, self.migrates)
            try:
                hits: list[list[Hit]] = []
                for start in range(0, len(query), _BLOCK):
                    part = query[start : start + _BLOCK]
                    part_code = None if code is None else code[start : start + _BLOCK]
                    hits += self._answers(part, part_code, bundle, k, candidates, chosen)
                return hits[0] if alone else hits
            except (
                Superseded
            ):  # another generation is served since; what was encoded before cannot be encoded again
                if isinstance(queries, Encoded) or attempt == _TRIES - 1:
                    raise
        raise AssertionError


def _checked(bundle: Bundle, queries: Encoded | NDArray[Any], migrates: bool) -> tuple[Floats, Floats | None]:
    """Return query vectors (Q, P), and codes where the bundle rescores."""
    rescores, width = bundle.manifest.rescorer is not None, bundle.manifest.vector
    if isinstance(queries, Encoded):
        if migrates and queries.bundle not in ("", bundle.sha256):
            raise Superseded(
                "The queries were encoded with another bundle than the one that is served. Encode them again."
            )
        query, code = queries.query, queries.code
    else:
        query, code = np.atleast_2d(np.asarray(queries)), None
        if query.dtype.kind not in "fiu":
            raise DataError(f"A query vector holds real numbers, not {query.dtype}.")
    if query.ndim != 2 or query.shape[1] != width:
        raise DataError(f"A query vector of this index has {width} numbers, not {query.shape[-1]}.")
    with np.errstate(over="ignore"):
        query = np.ascontiguousarray(query, dtype=np.float32)
    if not np.isfinite(query).all():
        raise DataError("A query vector holds NaN, infinity or a number beyond float32.")
    if rescores and code is None:
        raise DataError(
            "This index orders its answers with a rescorer, which needs the query's code: give an image "
            "(or features), not an encoded vector."
        )
    return query, code if rescores else None


def measured(
    bundle: Bundle, query: Floats, code: Floats | None, vectors: Floats, codes: Floats | None, k: int
) -> Distances:
    """Return the distances (n,) of one query to candidates, as the bundle says: its rescorer's, or measured on vectors in float64.

    Args:
        bundle: of the query and the candidates.
        query: (P,).
        code: (C,), None without a rescorer.
        vectors: (n, P) of the candidates.
        codes: (n, C) of them, None without a rescorer.
        k: how many answers are wanted.

    Raises:
        DataError: the rescorer gives NaN or infinity.
    """
    said = bundle.manifest
    if code is not None and codes is not None:
        distances: Distances = bundle.rescore(code[None], codes)[0].astype(np.float64)
        if not np.isfinite(distances).all():
            raise DataError("The rescorer gives NaN or infinity for this query.")
        return distances
    if said.distance.measure == "inner":
        return of_products(vectors.astype(np.float64) @ query.astype(np.float64))
    return merged(query, vectors, k, said.subspaces, said.merge)


def measured_alone(bundle: Bundle) -> bool:
    """Return whether `measured` looks at each pair of a query and a candidate by itself, so that it takes many queries' pairs at once: query (n, P), vectors (n, P)."""
    said = bundle.manifest
    return said.rescorer is None and said.distance.measure != "inner" and said.merge != "score"


def candidates_of(bundle: Bundle, k: int, candidates: int | None) -> int:
    """Return how many candidates are looked for in each sub-space."""
    rescorer = bundle.manifest.rescorer
    return max(k + MARGIN, candidates or (rescorer.candidates if rescorer else 0))
