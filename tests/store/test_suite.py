"""`StoreSuite` passes for the local store and fails for stores with one fault each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from retrieval.errors import DataError
from retrieval.store.address import Address
from retrieval.store.contract import VECTOR, Item
from retrieval.store.filters import Filter
from retrieval.store.local import LocalStore
from retrieval.store.local_place import LocalPlace

from retrieval_engines.testing import StoreSuite


class Forgets(LocalStore):
    """Does not write the last item of a call."""

    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        return super().upsert(items[:-1] if len(items) > 3 else items, bundle)


class InParts(LocalStore):
    """Writes item by item, so that a call is seen in parts."""

    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        return sum(super(InParts, self).upsert([item], bundle) for item in items)


class Misses(LocalStore):
    """Leaves out the nearest item."""

    def search(self, queries: Any, count: int, bundle: str, *, filter: Filter | None = None) -> Any:
        hits = super().search(queries, count + 1, bundle, filter=filter)
        return [
            sorted(entry, key=lambda item: float(np.square(item.vector - query).sum()))[1:]
            for query, entry in zip(queries, hits, strict=True)
        ]


class FiltersLate(LocalStore):
    """Filters only the proposed items."""

    def search(self, queries: Any, count: int, bundle: str, *, filter: Filter | None = None) -> Any:
        hits = super().search(queries, count, bundle)
        kept = set() if filter is None else {item.id for item in self.scan(filter, limit=100_000)}
        return [[item for item in entry if filter is None or item.id in kept] for entry in hits]


class Takes(LocalStore):
    """Writes the valid items of a call that has invalid ones."""

    def upsert(self, items: Sequence[Item], bundle: str) -> int:
        try:
            return super().upsert(items, bundle)
        except DataError:
            return super().upsert([item for item in items if item.id in ("new", "newer")], bundle)


class Loses(LocalStore):
    """Loses the original of an item whose label changes."""

    def update(
        self, ids: Iterable[str], changes: Mapping[str, Any], bundle: str, *, filter: Any = None
    ) -> int:
        items = self.get(ids, arrays=True).values()
        return self.upsert([replace(item, **changes) for item in items], bundle)


class Folds(LocalStore):
    """Ignores case in ids."""

    def get(self, ids: Iterable[str], *, arrays: bool = False) -> dict[str, Item]:
        return super().get([*(ids := list(ids)), *(id.lower() for id in ids)], arrays=arrays)


class Hurries(LocalStore):
    """Switches to an incomplete generation."""

    def switch(self, generation: Any) -> bool:
        while items := self.pending(generation, 100):
            self.embed(generation, [], [item.id for item in items])
        return super().switch(generation)


class Stale(LocalStore):
    """Takes what is written while arrays are computed for done."""

    def derive(self, generation: Any, source: Any, names: Any, compute: Any, *more: Any) -> int:
        vectors = {item.id: compute({VECTOR: item.vector[None]}) for item in self._stored()}
        items = self.pending(generation, 1000)
        embedded = [
            replace(item, arrays={VECTOR: vectors[item.id][VECTOR][0]})
            for item in items
            if item.id in vectors
        ]
        kept = {item.id for item in embedded}
        self.embed(generation, embedded, [item.id for item in items if item.id not in kept])
        return len(embedded)

    def _stored(self) -> list[Item]:
        read = self.get([item.id for item in self.scan()], arrays=True)
        return [item for item in read.values() if item.arrays]


@pytest.fixture
def suite(request):
    class Faulty(LocalPlace):
        def open(self):
            created: LocalStore = request.param(self.folder)
            return created

    class Suite(StoreSuite):
        def store_at(self, place):
            return Faulty(Address.parse(f"faulty://{place}/index"))

    suite = Suite()
    suite.setup_method()
    yield suite
    suite.teardown_method()


@pytest.mark.parametrize(
    ("suite", "case"),
    [
        (Forgets, "test_items_come_change_and_go"),
        (InParts, "test_one_call_is_seen_whole_or_not_at_all"),
        (Misses, "test_items_come_change_and_go"),
        (FiltersLate, "test_filters"),
        (Takes, "test_what_cannot_be_kept"),
        (Loses, "test_updating_one_item"),
        (Folds, "test_ids_are_looked_up_exactly"),
        (Hurries, "test_a_generation_follows"),
        (Stale, "test_writes_while_arrays_are_computed"),
    ],
    indirect=["suite"],
)
def test_a_fault_is_found(suite, case):
    with pytest.raises(AssertionError):
        getattr(suite, case)()


class TestLocal(StoreSuite):
    def store_at(self, place):
        return LocalPlace(Address.parse(f"shelf://{place}/index"))
