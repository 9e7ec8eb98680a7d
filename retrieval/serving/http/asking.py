"""From what a client gives to what an index is asked: in a thread, with the index held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.http.errors import RequestError
from retrieval.serving.http.queries import Given, Query
from retrieval.serving.index.index import Hit, Index
from retrieval.serving.queries import encode_vectors
from retrieval.serving.stages import stage
from retrieval.serving.store.contract import CODE, VECTOR, Superseded


class Found(NamedTuple):
    """What searches found.

    Attributes:
        hits: of each query.
        searched: what was searched, where the query asked to be told.
    """

    hits: list[list[Hit]]
    searched: dict[str, Any] | None = None


def encoded_of(
    index: Index, bundle: Bundle, given: Sequence[Given], pixels: NDArray[Any] | Encoded | None
) -> Encoded | NDArray[Any]:
    """Return queries of one kind as an index is asked for them.

    Args:
        index: held.
        bundle: that encodes.
        given: all images, all vectors or all ids.
        pixels: of the images (N, C, H, W), or what was encoded of them; None for vectors and ids.

    Raises:
        DataError: vectors of another width, or an index that cannot be searched by id.
        RequestError: 404, no such item.
        Superseded: another bundle is served.
    """
    if isinstance(pixels, Encoded):
        return pixels
    if pixels is not None:
        with stage("encode", len(pixels)):
            return bundle.encode(pixels)
    if given[0].vector is not None:
        vectors = [one.vector for one in given if one.vector is not None]
        if len(vectors) > 1 and len({len(vector) for vector in vectors}) > 1:
            raise DataError("The vectors of one request must have the same number of numbers.")
        stacked = vectors[0][None] if len(vectors) == 1 else np.stack(vectors)
        if bundle.manifest.input.kind != "features":
            return stacked
        with stage("encode", len(vectors)):
            return encode_vectors(bundle, stacked)
    return _stored(index, bundle, [str(one.id) for one in given])


def _stored(index: Index, bundle: Bundle, ids: list[str]) -> Encoded:
    if bundle.manifest.query_vectors:
        raise DataError(
            "The bundle of this index encodes queries in another way than items: search with the item's image."
        )
    arrays = _arrays(index, bundle, ids)
    vectors = np.stack([one[VECTOR] for one in arrays])
    codes = np.stack([one[CODE] for one in arrays]) if bundle.manifest.rescorer is not None else None
    return Encoded(vectors, vectors, codes, bundle.sha256)


def _arrays(index: Index, bundle: Bundle, ids: list[str]) -> list[Any]:
    items = index.get(ids, arrays=True)
    if index.follow() is not bundle:  # what was read may be of the bundle that is served since
        raise Superseded("Another bundle is served.")
    missing = [
        number for number, id in enumerate(ids, 1) if id not in items or VECTOR not in items[id].arrays
    ]
    if missing:
        where = f"Query {missing[0]}: there" if len(ids) > 1 else "There"
        raise RequestError(404, f"{where} is no such item.")
    return [items[id].arrays for id in ids]


def ask(
    index: Index,
    query: Query,
    bundle: Bundle,
    pixels: NDArray[Any] | Encoded | None,
    note: Callable[[float, int], None] = lambda seconds, queries: None,
) -> list[list[Hit]]:
    """Return what is nearest to each thing that a query gives, in order.

    Args:
        index: held.
        query: what is given, and how many answers are wanted.
        bundle: that encodes.
        pixels: see `encoded_of`.
        note: is told the seconds of each search, without encoding, and of how many queries.

    Raises:
        DataError, RequestError, Superseded: see `encoded_of`.
        StoreError: the index is damaged.
    """

    def searched_for(part: Sequence[Given], pixels: NDArray[Any] | Encoded | None, k: int) -> list[list[Hit]]:
        encoded = encoded_of(index, bundle, part, pixels)
        began = perf_counter()
        with stage("search", len(part)):
            found: list[list[Hit]] = index.search(encoded, k, candidates=query.candidates, where=query.where)
        note(perf_counter() - began, len(part))
        return found

    if all(one.id is None for one in query.given):
        return searched_for(query.given, pixels, query.k)
    answers: list[list[Hit]] = [[] for _ in query.given]
    for by_id in (False, True):
        places = [at for at, one in enumerate(query.given) if (one.id is not None) == by_id]
        if not places:
            continue
        part = [query.given[at] for at in places]
        found = searched_for(part, None if by_id else pixels, query.k + by_id)
        for at, one, hits in zip(places, part, found, strict=True):
            answers[at] = [hit for hit in hits if not by_id or hit.id != one.id][: query.k]
    return answers


def searched(index: Index, query: Query) -> dict[str, Any]:
    """Return what was searched, for a client who asked to be told."""
    details = index.stats().details
    return {
        "items": len(index),
        "bundle": index.bundle.sha256,
        "candidates": query.candidates,
        "filtered": query.where is not None,
        "generation": index.generation.number,
        **{name: details[name] for name in ("segments", "fresh") if name in details},
    }
