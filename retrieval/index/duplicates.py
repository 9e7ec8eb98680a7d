"""Find groups of near-duplicate items."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import numpy as np

from retrieval.base.progress import Meter, Progress, showing
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.distances import Distances, bundle_distances
from retrieval.errors import DataError
from retrieval.index.adding import short_repr
from retrieval.index.near_pairs import near_pairs
from retrieval.store.contract import CODE, VECTOR, Floats, Item
from retrieval.store.filters import Filter, FilterLike, as_filter

if TYPE_CHECKING:
    from retrieval.index.index import Index

_PAGE_ITEMS = 1024
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
        distances: distance of each of `ids` to the representative; 0 for an exact copy.
    """

    ids: tuple[str, ...]
    radius: float
    diameter: float
    distances: tuple[float, ...] = ()

    __repr__ = short_repr


def duplicates(
    index: Index,
    within: float,
    *,
    filter: FilterLike = None,
    reviewed: Iterable[Iterable[str]] = (),
    progress: Progress = True,
) -> list[Duplicates]:
    """Return groups of near-duplicates, the largest group first.

    Items with the same original or the same vector are exact copies, at distance 0. Other items are
    neighbours if their distance is at most `within`. The item with the most copies and neighbours
    represents the first group (of several such items, the one with the smallest id; 1,024 count as
    the most), and all its neighbours belong to it. Of the items that belong to no group yet, the
    next one in this order represents the next group, and so on. So nothing in a group is farther
    than `within` from its representative, however many neighbours lie in a chain.

    Args:
        within: largest distance of an item and its group's representative, on the scale of
            `Hit.distance`.
        filter: compare only items that match this filter.
        reviewed: sets of ids. Two items of one set are never in one group: somebody has looked at
            them and decided to keep both.
        progress: see `add`.
    """
    reviews: dict[str, set[int]] = {}
    for number, ids in enumerate(reviewed):
        for id in ids:
            reviews.setdefault(id, set()).add(number)
    with showing(progress):
        return _groups(index, within, as_filter(filter), reviews)


def _groups(
    index: Index, within: float, filter: Filter | None, reviews: Mapping[str, set[int]]
) -> list[Duplicates]:
    """Return groups of near-duplicates; see `duplicates`.

    Args:
        reviews: numbers of the sets that hold an id, by id.
    """
    if not within >= 0:
        raise DataError(f"The distance of duplicates must be at least 0, not {within}.")
    with tempfile.TemporaryFile() as file:
        original = _originals(index, filter, reviews, file)
        copies: dict[str, list[str]] = {}
        for id, first in original.items():
            copies.setdefault(first, [])
            if id != first:
                copies[first].append(id)
        neighbours = _neighbours_by_pairs(index, list(copies), file, within)
    if neighbours is None:
        neighbours = _neighbours_by_search(index, original, copies, within, filter)
    counts: dict[str, int] = {}  # copies and neighbours of each original that has any
    ids = list(copies)
    with Meter("counting", len(ids), "items") as meter:
        for start in range(0, len(ids), _PAGE_ITEMS):
            block = ids[start : start + _PAGE_ITEMS]
            for id, distance_of in neighbours(block, _MAX_NEIGHBOURS).items():
                count = len(copies[id]) + sum(1 + len(copies[other]) for other in distance_of)
                if count:
                    counts[id] = min(count, _MAX_NEIGHBOURS)
            meter.update(len(block))
    order = sorted(counts, key=lambda id: (-counts[id], id))
    grouped: set[str] = set()
    groups = []
    # Neighbours are searched again rather than kept, since there may be a thousand for each item.
    with Meter("grouping", len(order), "items") as meter:
        for start in range(0, len(order), _GROUPS):
            block = [id for id in order[start : start + _GROUPS] if id not in grouped]
            for id, distance_of in neighbours(block, len(original)).items():
                if id in grouped:
                    continue
                free = {other: distance_of[other] for other in distance_of if other not in grouped}
                firsts = _unreviewed({id: 0.0, **free}, reviews)
                distances = {copy: firsts[first] for first in firsts for copy in copies[first]}
                distances |= firsts
                if len(distances) > 1:
                    grouped.update(firsts)
                    groups.append(_group(index, id, list(firsts), distances))
            meter.update(len(order[start : start + _GROUPS]))
    return sorted(groups, key=lambda group: (-len(group.ids), group.ids))


_Neighbours = Callable[[Sequence[str], int], dict[str, dict[str, float]]]
"""Returns the distance of each item's near originals, without the item itself, by id.

The number is that of neighbours after which the search for more may end.
"""


def _neighbours_by_pairs(
    index: Index, ids: Sequence[str], file: IO[bytes], within: float
) -> _Neighbours | None:
    """Compare all vectors at once; `file` has a vector for each of `ids`.

    Returns:
        None if distances depend on more than one vector each, or there are too many near pairs.
    """
    manifest = index.bundle.manifest
    if not index.bundle.compares_vectors_alone or manifest.subspaces or not ids:
        return None
    vectors = np.memmap(file, np.float32, "r", shape=(len(ids), manifest.vector))
    near = near_pairs(np.asarray(vectors), within)
    if not near.complete:
        return None
    first = np.concatenate([near.first, near.second])
    order = first.argsort(kind="stable")
    second = np.concatenate([near.second, near.first])[order]
    distance = np.concatenate([near.distance, near.distance])[order]
    ends = np.searchsorted(first[order], np.arange(len(ids) + 1))
    rows = {id: row for row, id in enumerate(ids)}

    def neighbours(block: Sequence[str], most: int) -> dict[str, dict[str, float]]:
        answers = {}
        for id in block:
            pairs = slice(ends[rows[id]], ends[rows[id] + 1])
            names = [ids[row] for row in second[pairs].tolist()]
            answers[id] = dict(zip(names, distance[pairs].tolist(), strict=True))
        return answers

    return neighbours


def _neighbours_by_search(
    index: Index,
    original: Mapping[str, str],
    copies: Mapping[str, Sequence[str]],
    within: float,
    filter: Filter | None,
) -> _Neighbours:
    """Search the index for the neighbours of each item when they are needed."""

    def neighbours(block: Sequence[str], most: int) -> dict[str, dict[str, float]]:
        # Items may have been deleted since the originals were read.
        stored = index.store.get(block, arrays=True)
        items = [stored[id] for id in block if id in stored and stored[id].arrays]
        limits = [most + len(copies[item.id]) for item in items]
        answers = {}
        searched = _neighbours(index, items, limits, within, filter)
        for item, answer in zip(items, searched, strict=True):
            # An item may have been added since the originals were read.
            distance_of = {
                original[id]: distance for id, distance in answer.items() if id in original
            }
            distance_of.pop(item.id, None)
            answers[item.id] = distance_of
        return answers

    return neighbours


def _originals(
    index: Index, filter: Filter | None, reviews: Mapping[str, set[int]], file: IO[bytes]
) -> dict[str, str]:
    """Return the first item (in the order of the index) of which each item is an exact copy, by id.

    Only these are compared, so thousands of copies cost one search; their vectors are written to
    `file`. An item that was reviewed is no copy, because it may belong to a group that its copies
    do not belong to.
    """
    original: dict[str, str] = {}
    first: dict[bytes, str] = {}
    with Meter("reading", index.count(filter), "items") as meter:
        for page in _pages(index, filter):
            for item in page:
                contents = [] if item.id in reviews else _hashes(item)
                equal = [first[content] for content in contents if content in first]
                original[item.id] = (*equal, item.id)[0]
                for content in contents:
                    first.setdefault(content, original[item.id])
                if not equal:
                    file.write(item.vector.astype("<f4", copy=False).data)
            meter.update(len(page))
    file.flush()
    return original


def _hashes(item: Item) -> list[bytes]:
    """Return a hash of an item's original, if known, and of the arrays that distances depend on."""
    arrays = b"".join(item.arrays[name].tobytes() for name in (VECTOR, CODE) if name in item.arrays)
    contents = [arrays]
    if item.stamp:
        # A model may embed one picture a little differently in another batch.
        contents.insert(0, item.stamp.partition(" ")[0].encode())
    # Hashes, because the arrays of all items need not fit into memory.
    return [hashlib.blake2b(content, digest_size=16).digest() for content in contents]


def _unreviewed(
    distance_of: Mapping[str, float], reviews: Mapping[str, set[int]]
) -> dict[str, float]:
    """Return the representative, which comes first, and the nearest items, with their distances.

    An item that was reviewed together with one that is returned is left out.
    """
    chosen = {}
    seen: set[int] = set()
    representative, *members = distance_of
    for id in (representative, *sorted(members, key=lambda id: (distance_of[id], id))):
        sets = reviews.get(id, set())
        if seen.isdisjoint(sets):
            seen |= sets
            chosen[id] = distance_of[id]
    return chosen


def _group(
    index: Index, representative: str, firsts: Sequence[str], distances: Mapping[str, float]
) -> Duplicates:
    """Return a group, whose items have `distances` and of which `firsts` are the originals."""
    ids = (representative, *sorted(distances.keys() - {representative}))
    radius = max(distances.values())
    diameter = _diameter(index, firsts, radius)
    return Duplicates(ids, radius, diameter, tuple(distances[id] for id in ids))


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
