"""Items in a store, and the bundle that embeds queries for them: what adding and migrating build on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from retrieval.errors import DataError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.places import StrPath
from retrieval.serving.filters import Filter, as_filter
from retrieval.serving.index.base import Distances, Hit, Index, Where, candidates_of, measured, measured_alone
from retrieval.serving.index.contract import Floats
from retrieval.serving.index.items import Item as Listed
from retrieval.serving.index.seals import Seals
from retrieval.serving.providers import Device
from retrieval.serving.stages import stage
from retrieval.serving.store.address import Address, IndexPlace, place_of
from retrieval.serving.store.contract import (
    CODE,
    VECTOR,
    Candidates,
    Generation,
    Item,
    Stats,
    Store,
    Superseded,
)
from retrieval.serving.store.items import own
from retrieval.serving.store.place import store_place


class Collection(Index):
    """Items in a store, searched with the bundle of the generation that is served.

    Args:
        path: the folder or address.
        store: what keeps its items.
        threads: of one call of the encoder.
        device: of the encoder.
    """

    migrates = True

    def __init__(
        self, path: IndexPlace, store: Store, threads: int | None = None, device: Device = "auto"
    ) -> None:
        self.path = path
        self.store = store
        self._threads, self._device = threads, device
        self._lock = threading.Lock()
        self._closed = False
        self._opened: tuple[Generation, Bundle] | None = None
        self._id = store.identity()
        self.follow()

    @classmethod
    def open(
        cls,
        path: StrPath | Address,
        *,
        threads: int | None = None,
        device: Device = "auto",
        plugins: Iterable[str] = (),
    ) -> Self:
        """Open a folder or an address; see `retrieval.open_index`."""
        place = place_of(path)
        store = store_place(place, plugins).open()
        try:
            return cls(place, store, threads, device)
        except BaseException:
            store.close()
            raise

    def follow(self) -> Bundle:
        """Open the bundle of the generation that is served now."""
        with self._lock:
            served = next(one for one in self.store.generations() if one.state == "served")
            if self._opened is None or self._opened[0].number != served.number:
                bundle = Bundle.open(
                    self.store.bundle(served),
                    variant=served.variant,
                    threads=self._threads,
                    device=self._device,
                )
                if bundle.sha256 != served.bundle:
                    raise StoreError(
                        f"The index {self.path} is damaged: its bundle is not the one that embedded its items."
                    )
                self._opened = (served, bundle)
            return self._opened[1]

    @property
    def bundle(self) -> Bundle:
        """Encodes queries: the served generation's."""
        assert self._opened is not None
        return self._opened[1]

    @property
    def generation(self) -> Generation:
        """The generation that is served."""
        assert self._opened is not None
        return self._opened[0]

    @property
    def sha256(self) -> str:
        """What tells this index from every other: its own id."""
        return self._id

    def __len__(self) -> int:
        return self.store.count()

    def __repr__(self) -> str:
        return f"Index {self.path}: {len(self):,} items, vectors of {self.bundle.manifest.vector}"

    def _answers(
        self,
        query: Floats,
        code: Floats | None,
        bundle: Bundle,
        k: int,
        candidates: int | None,
        where: Filter | None,
    ) -> list[list[Hit]]:
        try:
            found = self.store.propose(
                query, candidates_of(bundle, k, candidates), bundle.sha256, where=where
            )
        except Superseded:
            self.follow()
            raise
        if measured_alone(bundle) and all(each.distances is not None for each in found):
            return [
                _hits(each.items, each.distances[:k].tolist()) for each in found if each.distances is not None
            ]
        found = [each if each.distances is None else _by_id(each) for each in found]
        return [
            self._ordered(each.items, distances, k)
            for each, distances in zip(found, _distances(bundle, query, code, found, k), strict=True)
        ]

    @staticmethod
    def _ordered(items: Sequence[Item], distances: Distances, k: int) -> list[Hit]:
        """Return the nearest of candidates; equal distances by id."""
        order = np.argsort(distances, kind="stable")[:k]
        return _hits([items[at] for at in order.tolist()], distances[order].tolist())

    # Items

    def upsert(self, items: Sequence[Item]) -> int:
        """Add items that are embedded already, or put them in the place of others; return how many took another's place.

        Raises:
            DataError: an item that cannot be kept; all are named, and none is kept.
            StoreError: read-only, another writer holds the index, or the disk refuses.
        """
        if files := [item.id for item in items if item.path is not None]:
            there = self.store.get(files)
            seals = Seals(self.sha256, create=True)
            # Who reads an item and writes it back does not name its file: that is still the word of whoever did.
            other = {id for id, known in there.items() if not seals.hold(known.stamp, known.path)}
            items = [
                item if item.id in other and there[item.id].path == item.path else seals.sealed(item)
                for item in items
            ]
        with stage("write", len(items)):
            return self.store.upsert(items, self.bundle.sha256)

    def delete(self, ids: str | Iterable[str] = (), *, where: Where = None) -> int:
        """Delete items by id, or all that match; return how many there were. Unknown ids are passed over.

        Raises:
            DataError: the filter cannot be read, or names what no item has.
            StoreError: read-only, another writer holds the index, or the disk refuses.
        """
        chosen = as_filter(where)
        with stage("write"):
            return self.store.delete([ids] if isinstance(ids, str) else ids, where=chosen)

    def get(self, ids: str | Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        """Return items by id; unknown ids are left out.

        Args:
            ids: one or more.
            arrays: with their vectors.
        """
        return self.store.get([ids] if isinstance(ids, str) else ids, arrays=arrays)

    def scan(self, where: Where = None, *, after: str | None = None, limit: int = 1000) -> list[Item]:
        """Return a page of items, in the order of their ids: the first `limit` behind `after`."""
        return self.store.scan(as_filter(where), after=after, limit=limit)

    def count(self, where: Where = None) -> int:
        """Return how many items match."""
        return self.store.count(as_filter(where))

    def stats(self) -> Stats:
        """Return what the index holds."""
        return self.store.stats()

    def snapshot(self, target: StrPath) -> Path:
        """Write a copy of one moment to a new folder, which opens as an index.

        Raises:
            StoreError: there is something already, or the disk refuses.
        """
        self.store.snapshot(Path(target))
        return Path(target)

    def item(self, number: int | str) -> Listed | None:
        """Return an item by its id, or None."""
        self.require_open()
        found = self.store.get([str(number)]).get(str(number))
        return None if found is None else self.listed(found)

    @staticmethod
    def listed(item: Item) -> Listed:
        """Return an item as an index of either format describes it."""
        return Listed(item.id, item.label, item.metadata, item.path, item.bytes, item.width, item.height)

    def vector(self, number: int | str) -> Floats:
        """Return the stored vector (P,) of an item by its id.

        Raises:
            DataError: there is no such item, or the generation that is served does without it.
        """
        self.require_open()
        found = self.store.get([str(number)], arrays=True).get(str(number))
        if found is None:
            raise DataError(f"The index {self.path} has no item '{number}'.")
        if not found.arrays:
            raise DataError(
                f"The generation that is served in {self.path} does without the item '{number}': it could not be embedded when the "
                "index was migrated. Add it again."
            )
        return np.array(found.vector)

    def changed(self) -> str | None:
        """Return a sentence when the folder was replaced or removed; what changes within it is meant to."""
        return self.store.changed()

    def require_open(self) -> None:
        """Raise a `StoreError` once the index is closed."""
        if self._closed:
            raise StoreError(f"The index {self.path} was closed. Open it again with retrieval.open_index.")

    def close(self) -> None:
        """Close the store."""
        self._closed = True
        self.store.close()


def _hits(items: Sequence[Item], distances: Sequence[float]) -> list[Hit]:
    """Return answers of items, nearest first; of so many as there are distances."""
    return [
        Hit(
            item.id,
            item.id,
            item.label,
            distance,
            own(item.metadata) if item.metadata else {},
            item.path,
            item.keep,
            item.stamp,
        )
        for item, distance in zip(items, distances, strict=False)
    ]


def _by_id(found: Candidates) -> Candidates:
    """Return candidates in the order of their ids, to be measured otherwise than the store did."""
    order = sorted(range(len(found.items)), key=lambda at: found.items[at].id)
    arrays = {name: array[order] for name, array in found.arrays.items()}
    return Candidates([found.items[at] for at in order], arrays)


def _distances(
    bundle: Bundle, query: Floats, code: Floats | None, found: Sequence[Candidates], k: int
) -> list[Distances]:
    """Return the distances of each query to its candidates, measured as the bundle says."""
    if len(found) > 1 and measured_alone(bundle):
        # one computation of all pairs, in which each pair's sum is what it is by itself
        counts = [len(each.items) for each in found]
        asked = np.repeat(query, counts, axis=0)
        vectors = np.concatenate([each.arrays[VECTOR] for each in found if each.items] or [asked])
        return np.split(measured(bundle, asked, None, vectors, None, k), np.cumsum(counts)[:-1])
    return [
        measured(
            bundle,
            query[number],
            None if code is None else code[number],
            each.arrays[VECTOR],
            None if code is None else each.arrays[CODE],
            min(k, len(each.items)),
        )
        if each.items
        else np.empty(0)
        for number, each in enumerate(found)
    ]
