"""Find groups of near-duplicate items."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from retrieval.base.progress import Meter, Progress, showing
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.distances import Distances, bundle_distances
from retrieval.errors import DataError
from retrieval.index.adding import short_repr
from retrieval.store.contract import CODE, VECTOR, Floats, Item
from retrieval.store.filters import Filter, FilterLike, as_filter

if TYPE_CHECKING:
    from retrieval.index.index import Index

_PAGE_ITEMS = 256
# The number of neighbours to request for an item. If all of them are duplicates, four times as many
# are requested, and so on up to the maximum, which does not count the item's exact copies.
_FIRST_NEIGHBOURS = 8
_MAX_NEIGHBOURS = 1024
_MAX_COMPARED = 1000
"""Number of different items of a group that are compared with all others of it."""


@dataclass(frozen=True)
class Duplicates:
    """A group of near-duplicates; see `Index.duplicates`.

    Attributes:
        ids: ids of the items, sorted.
        largest: largest distance between two neighbours in the group.
        widest: largest distance between two of its items, more than `within` if only a chain of
            neighbours connects them. Of a group with over 1,000 different items, only 1,000 are
            compared with the others.
    """

    ids: tuple[str, ...]
    largest: float
    widest: float

    __repr__ = short_repr


def duplicates(
    index: Index, within: float, *, filter: FilterLike = None, progress: Progress = True
) -> list[Duplicates]:
    """Return groups of near-duplicates, the largest group first.

    Two items are neighbours if their distance is at most `within`. A group holds all items that
    a chain of neighbours connects, so two of its items may be farther apart.

    Args:
        within: largest distance of two neighbours, on the scale of `Hit.distance`.
        filter: compare only items that match this filter.
        progress: see `add`.
    """
    with showing(progress):
        return _groups(index, within, as_filter(filter))


def _groups(index: Index, within: float, filter: Filter | None) -> list[Duplicates]:
    """Return groups of near-duplicates; see `duplicates`."""
    if not within >= 0:
        raise DataError(f"The distance of duplicates must be at least 0, not {within}.")
    equal: dict[bytes, list[str]] = {}  # ids of items with the same arrays, by their hash
    for page in _pages(index, filter):
        for item in page:
            equal.setdefault(_hash(item), []).append(item.id)
    copies = {ids[0]: ids[1:] for ids in equal.values()}
    parent: dict[str, str] = {}  # a union-find forest of ids
    farthest: dict[str, float] = {}  # largest distance between an item and its neighbours

    def root(id: str) -> str:
        # Each step also shortens the path, so later calls take fewer.
        while parent.setdefault(id, id) != id:
            parent[id] = id = parent[parent[id]]
        return id

    with Meter("comparing", index.store.count(filter), "items") as meter:
        for page in _pages(index, filter):
            items = [item for item in page if item.id in copies]
            counts = [len(copies[item.id]) for item in items]
            answers = _neighbours(index, items, counts, within, filter)
            for item, (ids, distance) in zip(items, answers, strict=True):
                if copies[item.id]:
                    # A rescorer may give equal items a distance above 0.
                    to_copies = float(_distances(index.bundle, item, _stacked([item]))[0])
                    if to_copies <= within:
                        ids += copies[item.id]
                        distance = max(distance, to_copies)
                farthest[item.id] = distance
                lower = root(item.id)
                for id in ids:
                    if parent.get(id) != lower:
                        # The smallest id becomes the root, in whatever order pages arrive.
                        lower, upper = sorted((lower, root(id)))
                        parent[upper] = lower
            meter.update(len(page))
    members: dict[str, list[str]] = {}
    for id in sorted(parent):
        members.setdefault(root(id), []).append(id)
    groups = []
    for ids in members.values():
        if len(ids) > 1:
            different = [id for id in ids if id in copies]
            largest = max(farthest[id] for id in different)
            widest = _widest(index, different, largest)
            groups.append(Duplicates(tuple(ids), largest, widest))
    return sorted(groups, key=lambda group: (-len(group.ids), group.ids))


def _hash(item: Item) -> bytes:
    """Return a hash of the arrays on which an item's distances depend."""
    # A hash, because the arrays of all items need not fit into memory.
    content = item.vector.tobytes()
    if CODE in item.arrays:
        content += item.arrays[CODE].tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


def _widest(index: Index, ids: Sequence[str], largest: float) -> float:
    """Return the largest distance between items; `largest` is that between neighbours."""
    # Items may have been deleted since their neighbours were measured.
    items = [item for item in index.store.get(ids, arrays=True).values() if item.arrays]
    if len(items) <= 2:
        return largest
    arrays = _stacked(items)
    step = -(-len(items) // _MAX_COMPARED)
    return max(
        largest, *(float(_distances(index.bundle, item, arrays).max()) for item in items[::step])
    )


def _stacked(items: Sequence[Item]) -> dict[str, Floats]:
    """Return the arrays (n, width) of items by name."""
    return {name: np.stack([item.arrays[name] for item in items]) for name in items[0].arrays}


def _distances(bundle: Bundle, query: Item, arrays: Mapping[str, Floats]) -> Distances:
    """Return the distances (n,) between an item and others, of which `arrays` are the arrays."""
    vectors = arrays[VECTOR]
    codes = arrays.get(CODE)
    code = query.arrays.get(CODE)
    return bundle_distances(bundle, query.vector, code, vectors, codes, len(vectors))


def _neighbours(
    index: Index, items: Sequence[Item], copies: Sequence[int], within: float, filter: Filter | None
) -> list[tuple[list[str], float]]:
    """Return the ids of each item's neighbours within a distance, and the largest distance of them.

    `copies` is the number of exact copies of each item.
    """
    bundle = index.bundle
    neighbours: list[tuple[list[str], float]] = [([], 0.0) for _ in items]
    rows = list(range(len(items)))  # the items to search for
    count = _FIRST_NEIGHBOURS
    while rows:
        queries = np.stack([items[row].vector for row in rows])
        answers = index.store.propose(queries, count, bundle.sha256, filter=filter)
        unfinished = []
        for row, group in zip(rows, answers, strict=True):
            item = items[row]
            size = len(group.items)
            distances = group.distances
            if distances is None or not bundle.compares_vectors_alone:
                distances = _distances(bundle, item, group.arrays)
            near = np.flatnonzero(distances <= within).tolist()
            if len(near) == size and count <= size < _MAX_NEIGHBOURS + copies[row]:
                unfinished.append(row)  # the item may have more neighbours
                continue
            positions = [position for position in near if group.items[position].id != item.id]
            ids = [group.items[position].id for position in positions]
            neighbours[row] = ids, float(distances[positions].max(initial=0))
        rows = unfinished
        count = 4 * count
    return neighbours


def _pages(index: Index, filter: Filter | None) -> Iterator[list[Item]]:
    """Yield pages of the matching items that have arrays."""
    after = None
    while page := index.store.scan(filter, after=after, limit=_PAGE_ITEMS):
        after = page[-1].id
        items = index.store.get([item.id for item in page], arrays=True).values()
        # A migration with `skip_bad` leaves items without arrays.
        embedded = [item for item in items if item.arrays]
        if embedded:
            yield embedded
