"""Items that are alike: near-duplicates, and clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import DataError, at_least_one
from retrieval.serving.filters import Filter
from retrieval.serving.index.contract import Floats
from retrieval.serving.index.measuring import measured
from retrieval.serving.progress import Meter
from retrieval.serving.runtime import load_faiss
from retrieval.serving.store.contract import CODE, Item

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index

_PAGE = 256
_FIRST, _MOST = 8, 1024
_SAMPLE = 256  # vectors for each cluster
_ITERATIONS = 20


@dataclass(frozen=True)
class Alike:
    """Items that are within some distance of one another, directly or through others.

    Attributes:
        ids: in order.
        largest: distance of those pairs that join them.
    """

    ids: tuple[str, ...]
    largest: float


@dataclass(frozen=True)
class Cluster:
    """Items that are nearest to one centre.

    Attributes:
        count: how many there are.
        typical: ids of those nearest to the centre, nearest first.
        labels: the most frequent labels, with how many items have them.
    """

    count: int
    typical: tuple[str, ...]
    labels: tuple[tuple[str | None, int], ...]


def duplicates(index: Index, within: float, *, where: Filter | None = None) -> list[Alike]:
    """Return groups of items within a distance of each other, largest group first; see
    `Index.duplicates`.
    """
    if not within >= 0:
        raise DataError(f"The distance of duplicates is a number from 0 on, not {within}.")
    parent: dict[str, str] = {}
    largest: dict[str, float] = {}

    def root(id: str) -> str:
        while parent.setdefault(id, id) != id:
            parent[id] = id = parent[parent[id]]
        return id

    with Meter("comparing", index.store.count(where), "items") as meter:
        for page in pages(index, where):
            for item, neighbours in zip(page, _near(index, page, within, where), strict=True):
                for id, distance in neighbours:
                    first, last = sorted((root(item.id), root(id)))
                    parent[last] = first
                    largest[first] = max(largest.get(first, 0.0), largest.get(last, 0.0), distance)
            meter.update(len(page))
    members: dict[str, list[str]] = {}
    for id in sorted(parent):
        members.setdefault(root(id), []).append(id)
    groups = [Alike(tuple(ids), largest[first]) for first, ids in members.items() if len(ids) > 1]
    return sorted(groups, key=lambda group: (-len(group.ids), group.ids))


def _near(
    index: Index, items: Sequence[Item], within: float, where: Filter | None
) -> list[list[tuple[str, float]]]:
    """Return for each item the others within a distance of it, as the bundle measures."""
    bundle = index.bundle
    neighbours: list[list[tuple[str, float]]] = [[] for _ in items]
    rows, count = list(range(len(items))), _FIRST
    while rows:
        queries = np.stack([items[row].vector for row in rows])
        answers = index.store.search(queries, count, bundle.sha256, where=where)
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
            if len(near) == len(candidates) and count <= len(candidates) and count < _MOST:
                unfinished.append(row)  # there may be more
            neighbours[row] = [pair for pair in near if pair[0] != items[row].id]
        rows, count = unfinished, 4 * count
    return neighbours


def clusters(
    index: Index, count: int, *, where: Filter | None = None, typical: int = 5
) -> list[Cluster]:
    """Return clusters of items, largest first; see `Index.clusters`."""
    count = at_least_one("The number of clusters", count)
    total = index.store.count(where)
    if total < count:
        raise DataError(f"{total:,} items cannot make {count:,} clusters. Ask for fewer.")
    rng = np.random.default_rng(0)
    chance = min(1.0, 2 * _SAMPLE * count / total)
    sample: list[Floats] = []
    with Meter("clustering", 2 * total, "items") as meter:
        for page in pages(index, where):
            sample += [item.vector for item in page if chance == 1 or rng.random() < chance]
            meter.update(len(page))
        faiss = load_faiss()
        if len(sample) < count:
            raise DataError(
                f"{len(sample):,} vectors cannot make {count:,} clusters. Ask for fewer."
            )
        vectors = np.stack(sample)
        kmeans = faiss.Kmeans(
            vectors.shape[1],
            count,
            niter=_ITERATIONS,
            seed=1,
            min_points_per_centroid=1,
            max_points_per_centroid=_SAMPLE,
        )
        kmeans.train(vectors)
        centres: NDArray[np.float32] = kmeans.centroids
        sizes: Counter[int] = Counter()
        labels: list[Counter[str | None]] = [Counter() for _ in range(count)]
        nearest: list[list[tuple[float, str]]] = [[] for _ in range(count)]
        for page in pages(index, where):
            squared, own = faiss.knn(np.stack([item.vector for item in page]), centres, 1)
            for item, distance, at in zip(
                page, squared[:, 0].tolist(), own[:, 0].tolist(), strict=True
            ):
                sizes[at] += 1
                labels[at][item.label] += 1
                nearest[at] = sorted([*nearest[at], (distance, item.id)])[:typical]
            meter.update(len(page))
    found = [
        Cluster(
            sizes[number],
            tuple(id for _, id in nearest[number]),
            tuple(labels[number].most_common(3)),
        )
        for number in range(count)
        if sizes[number]
    ]
    return sorted(found, key=lambda cluster: (-cluster.count, cluster.typical))


def pages(index: Index, where: Filter | None = None, size: int = _PAGE) -> Iterator[list[Item]]:
    """Give all items that match, with arrays, some at a time; without those that the served
    generation does without.
    """
    after = None
    while page := index.store.scan(where, after=after, limit=size):
        after = page[-1].id
        whole = index.store.get([item.id for item in page], arrays=True)
        if there := [item for item in whole.values() if item.arrays]:
            yield there
