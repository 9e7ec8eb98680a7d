"""Find groups of near-duplicate items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from retrieval.errors import DataError
from retrieval.serving.filters import Filter
from retrieval.serving.index.adding import short_repr
from retrieval.serving.merging import measured
from retrieval.serving.progress import Meter
from retrieval.serving.store.contract import CODE, Item

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index

_PAGE_ITEMS = 256
# The number of neighbours to request for an item. If all of them are duplicates, four times as many
# are requested, and so on up to the maximum.
_FIRST_NEIGHBOURS = 8
_MAX_NEIGHBOURS = 1024


@dataclass(frozen=True)
class Duplicates:
    """A group of near-duplicates; see `Index.duplicates`.

    Attributes:
        ids: ids of the items, sorted.
        largest: largest distance between two neighbours in the group.
    """

    ids: tuple[str, ...]
    largest: float

    __repr__ = short_repr


def find_duplicates(index: Index, within: float, filter: Filter | None) -> list[Duplicates]:
    """Return groups of near-duplicates; see `Index.duplicates`."""
    if not within >= 0:
        raise DataError(f"The distance of duplicates must be at least 0, not {within}.")
    parent: dict[str, str] = {}  # a union-find forest of ids
    largest: dict[str, float] = {}  # largest distance of two neighbours in a root's group

    def root(id: str) -> str:
        while parent.setdefault(id, id) != id:
            parent[id] = id = parent[parent[id]]
        return id

    with Meter("comparing", index.store.count(filter), "items") as meter:
        for page in _pages(index, filter):
            for item, neighbours in zip(
                page, _neighbours(index, page, within, filter), strict=True
            ):
                for id, distance in neighbours:
                    lower, upper = sorted((root(item.id), root(id)))
                    parent[upper] = lower
                    largest[lower] = max(largest.get(lower, 0), largest.get(upper, 0), distance)
            meter.update(len(page))
    members: dict[str, list[str]] = {}
    for id in sorted(parent):
        members.setdefault(root(id), []).append(id)
    groups = [Duplicates(tuple(ids), largest[id]) for id, ids in members.items() if len(ids) > 1]
    return sorted(groups, key=lambda group: (-len(group.ids), group.ids))


def _neighbours(
    index: Index, items: Sequence[Item], within: float, filter: Filter | None
) -> list[list[tuple[str, float]]]:
    """Return the ids and distances of each item's neighbours, which are at most `within` away."""
    bundle = index.bundle
    neighbours: list[list[tuple[str, float]]] = [[] for _ in items]
    rows, count = list(range(len(items))), _FIRST_NEIGHBOURS  # the items to search for
    while rows:
        queries = np.stack([items[row].vector for row in rows])
        answers = index.store.search(queries, count, bundle.sha256, filter=filter)
        unfinished = []
        for row, candidates in zip(rows, answers, strict=True):
            code = items[row].arrays.get(CODE)
            codes = None if code is None else np.stack([item.arrays[CODE] for item in candidates])
            vectors = np.stack([item.vector for item in candidates])
            distances = measured(bundle, items[row].vector, code, vectors, codes, len(candidates))
            near = [
                (item.id, float(distance))
                for item, distance in zip(candidates, distances, strict=True)
                if distance <= within
            ]
            if len(near) == len(candidates) and count <= len(candidates) < _MAX_NEIGHBOURS:
                unfinished.append(row)  # the item may have more neighbours
            neighbours[row] = [(id, distance) for id, distance in near if id != items[row].id]
        rows, count = unfinished, 4 * count
    return neighbours


def _pages(index: Index, filter: Filter | None) -> Iterator[list[Item]]:
    """Yield pages of the matching items that have arrays."""
    after = None
    while page := index.store.scan(filter, after=after, limit=_PAGE_ITEMS):
        after = page[-1].id
        items = index.store.get([item.id for item in page], arrays=True).values()
        if embedded := [item for item in items if item.arrays]:
            yield embedded
