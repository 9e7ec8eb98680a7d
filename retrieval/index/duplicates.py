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
# are requested, and so on.
_FIRST_NEIGHBOURS = 8
# An item with more neighbours than this, its exact copies aside, counts as one with this many.
_MAX_NEIGHBOURS = 1024
# Number of representatives whose groups are searched at a time; the groups may be large.
_GROUPS = 16
# Number of different items of a group that are compared with all others of it.
_MAX_COMPARED = 1000


@dataclass(frozen=True)
class Duplicates:
    """A group of near-duplicates; see `Index.duplicates`.

    Attributes:
        ids: id of the representative, then those of the other items, sorted.
        radius: largest distance between the representative and another item, at most `within`.
        diameter: largest distance between two items of the group. Of a group with over 1,000
            different items, only 1,000 are compared with the others.
    """

    ids: tuple[str, ...]
    radius: float
    diameter: float

    __repr__ = short_repr


def duplicates(
    index: Index, within: float, *, filter: FilterLike = None, progress: Progress = True
) -> list[Duplicates]:
    """Return groups of near-duplicates, the largest group first.

    Two items are neighbours if their distance is at most `within`. The item with the most
    neighbours represents the first group (of several such items, the one with the smallest id;
    1,024 neighbours count as the most), and all its neighbours belong to it. Of the items that
    belong to no group yet, the next one in this order represents the next group, and so on. So
    nothing in a group is farther than `within` from its representative, however many neighbours
    lie in a chain.

    Args:
        within: largest distance of an item and its group's representative, on the scale of
            `Hit.distance`.
        filter: compare only items that match this filter.
        progress: see `add`.
    """
    with showing(progress):
        return _groups(index, within, as_filter(filter))


def _groups(index: Index, within: float, filter: Filter | None) -> list[Duplicates]:
    """Return groups of near-duplicates; see `duplicates`."""
    if not within >= 0:
        raise DataError(f"The distance of duplicates must be at least 0, not {within}.")
    # Of items with the same arrays only the first, the original, is compared with others.
    equal: dict[bytes, list[str]] = {}
    for page in _pages(index, filter):
        for item in page:
            equal.setdefault(_hash(item), []).append(item.id)
    copies = {ids[0]: ids[1:] for ids in equal.values()}
    original = {id: ids[0] for ids in equal.values() for id in ids}

    def neighbours(items: list[Item], most: int) -> list[dict[str, float]]:
        """Return the distance of each item's near originals; its own id stands for its copies."""
        limits = [most + len(copies[item.id]) for item in items]
        originals = []
        answers = _neighbours(index, items, limits, within, filter)
        for item, answer in zip(items, answers, strict=True):
            # An item may have been added since the originals were read.
            near = {original[id]: distance for id, distance in answer.items() if id in original}
            near.pop(item.id, None)
            if copies[item.id]:
                # A rescorer may give equal items a distance above 0.
                to_copies = float(item_distances(index.bundle, item, stacked_arrays([item]))[0])
                if to_copies <= within:
                    near[item.id] = to_copies
            originals.append(near)
        return originals

    counts: dict[str, int] = {}  # number of neighbours of each original that has any
    with Meter("comparing", index.count(filter), "items") as meter:
        for page in _pages(index, filter):
            items = [item for item in page if item.id in copies]
            for item, near in zip(items, neighbours(items, _MAX_NEIGHBOURS), strict=True):
                if near:
                    count = sum(1 + len(copies[id]) for id in near) - (item.id in near)
                    counts[item.id] = min(count, _MAX_NEIGHBOURS)
            meter.update(len(page))
    order = sorted(counts, key=lambda id: (-counts[id], id))
    grouped: set[str] = set()
    groups = []
    # Neighbours are searched again rather than kept, since there may be a thousand for each item.
    with Meter("grouping", len(order), "items") as meter:
        for start in range(0, len(order), _GROUPS):
            block = [id for id in order[start : start + _GROUPS] if id not in grouped]
            # Items may have been deleted since they were counted.
            items = [item for item in index.store.get(block, arrays=True).values() if item.arrays]
            items.sort(key=lambda item: block.index(item.id))
            for item, near in zip(items, neighbours(items, len(original)), strict=True):
                free = [id for id in near if id not in grouped]
                if item.id in grouped or not free:
                    continue
                radius = max(near[id] for id in free)
                ids = {id for first in free for id in (first, *copies[first])} - {item.id}
                grouped.update(free, [item.id])
                diameter = _diameter(index, [item.id, *free], radius)
                groups.append(Duplicates((item.id, *sorted(ids)), radius, diameter))
            meter.update(len(order[start : start + _GROUPS]))
    return sorted(groups, key=lambda group: (-len(group.ids), group.ids))


def _hash(item: Item) -> bytes:
    """Return a hash of the arrays on which an item's distances depend."""
    # A hash, because the arrays of all items need not fit into memory.
    content = item.vector.tobytes()
    if CODE in item.arrays:
        content += item.arrays[CODE].tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


def _diameter(index: Index, ids: Sequence[str], radius: float) -> float:
    """Return the largest distance between items; `radius` is that to their representative."""
    # Items may have been deleted since their neighbours were measured.
    items = [item for item in index.store.get(ids, arrays=True).values() if item.arrays]
    if len(items) <= 2:
        return radius
    arrays = stacked_arrays(items)
    step = -(-len(items) // _MAX_COMPARED)
    return max(
        radius, *(float(item_distances(index.bundle, item, arrays).max()) for item in items[::step])
    )


def stacked_arrays(items: Sequence[Item]) -> dict[str, Floats]:
    """Return the arrays (n, width) of items by name."""
    return {name: np.stack([item.arrays[name] for item in items]) for name in items[0].arrays}


def item_distances(bundle: Bundle, query: Item, arrays: Mapping[str, Floats]) -> Distances:
    """Return the distances (n,) between an item and others, of which `arrays` are the arrays."""
    vectors = arrays[VECTOR]
    codes = arrays.get(CODE)
    code = query.arrays.get(CODE)
    return bundle_distances(bundle, query.vector, code, vectors, codes, len(vectors))


def _neighbours(
    index: Index, items: Sequence[Item], limits: Sequence[int], within: float, filter: Filter | None
) -> list[dict[str, float]]:
    """Return the distance of each item's neighbours within a distance, by id.

    `limits` is the number of neighbours of each item after which the search for more ends.
    """
    bundle = index.bundle
    neighbours: list[dict[str, float]] = [{} for _ in items]
    rows = list(range(len(items)))  # the items to search for
    count = _FIRST_NEIGHBOURS
    while rows:
        queries = np.stack([items[row].vector for row in rows])
        answers = index.store.propose(queries, count, bundle.sha256, filter=filter)
        unfinished = []
        for row, group in zip(rows, answers, strict=True):
            size = len(group.items)
            distances = group.distances
            if distances is None or not bundle.compares_vectors_alone:
                distances = item_distances(bundle, items[row], group.arrays)
            near = np.flatnonzero(distances <= within).tolist()
            if len(near) == size and count <= size <= limits[row]:
                unfinished.append(row)  # the item may have more neighbours
                continue
            neighbours[row] = {group.items[n].id: float(distances[n]) for n in near}
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
