"""Tests of searches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from retrieval.serving.store.contract import CODE, VECTOR, Item
from retrieval.serving.store.testing.bench import Bench, State, equal, item, normal, some
from retrieval.serving.store.testing.bundles import WIDTH, opened

FILTERS = [
    "id = 'id 3'",
    "id >= 'id 5'",
    "label = 'kind 2'",
    "label != 'kind 2'",
    "not label = 'kind 2'",
    "exists(label)",
    "not exists(label)",
    "price < 2",
    "price >= 2 and price < 7.5",
    "price = 3 or label in ('kind 1', 'kind 4')",
    "price not in (1, 2, 3)",
    "price = '3'",
    "tags = 'odd'",
    "tags = 2",
    "tags != 'odd'",
    "not tags = 'odd'",
    "nested.deep.flag = true",
    "nested.deep.flag = null",
    "exists(nested.deep)",
    'nested."a b" > -1e-3',
    'nested."a b" = 0',
    "text > 'é'",
    "text = 'É'",
    "price < 2 and not (tags = 'odd' or label = 'kind 0')",
]
"""Filters of every kind over the items of `test_filters`."""


class SearchCases(Bench):
    """Tests of `search` with and without filters, sub-spaces and codes."""

    def test_few_items_or_none(self) -> None:
        """An empty store returns no hits; a search for too many items returns all that match."""
        store, state = self.store(), State()
        self.check(store, state)
        equal(store.search(normal(0, WIDTH, 0), 5, opened().sha256), [], "answers to no queries")
        equal(store.scan(), [], "scan")
        self.check(store := self.again(store), state)
        self.put(store, state, some(20))
        for count, where in ((1000, None), (1000, "price < 1"), (1, None), (7, "price = 1000")):
            self.check(store, state, where=where, count=count)

    def test_filters(self) -> None:
        """Search, scan, count and delete agree with `filters.matches` on every filter.

        A store without the capability "filters" may refuse some filters.
        """
        nested = [
            {"deep": {"flag": True}, "a b": 0},
            {"deep": {"flag": None}, "a b": -0.5},
            {"deep": {}, "a b": 1e300},
            {"deep": 1},
            {},
        ]
        texts = ["é", "e\u0301", "É", "z", "\U0001f600"]
        written = [
            replace(
                entry,
                metadata={
                    **entry.metadata,
                    "nested": nested[number % 5],
                    "text": texts[number % 4],
                },
            )
            for number, entry in enumerate(some(self.filtered))
        ]
        store, state = self.store(), State()
        self.put(store, state, written)
        for where in FILTERS:
            self.check_filter(store, state, where)
        self.check(store, state, where="price < 2", count=3)
        self.put(store, state, [replace(entry, label="kind 2") for entry in written[:40]])
        self.remove(store, state, [f"id {number}" for number in range(50, 100)])
        store = self.again(store)
        for where in FILTERS[::3]:
            self.check_filter(store, state, where)

    def test_equal_vectors(self) -> None:
        """If many items have equal vectors, a search still proposes the requested number."""
        store = self.store()
        vector = normal(1, WIDTH, 0)
        store.upsert(
            [Item(f"same {n}", arrays={VECTOR: vector[0]}) for n in range(50)], opened().sha256
        )
        (hits,) = store.search(vector, 7, opened().sha256)
        equal(len({entry.id for entry in hits}), 7, "items proposed")

    def test_large_small_and_distant_numbers(self) -> None:
        """Searches of large, tiny and distant vectors return the nearest items in float64."""
        for what, scale, offset in (("distant", 1, 3000), ("tiny", 1e-12, 0), ("large", 1e12, 0)):
            store, state = self.store(), State()
            moved = [
                Item(f"{what} {n}", arrays={VECTOR: (vector * scale + offset).astype(np.float32)})
                for n, vector in enumerate(normal(200, WIDTH, 5))
            ]
            self.put(store, state, moved)
            queries = (normal(5, WIDTH, 6) * scale + offset).astype(np.float32)
            for query, hits in zip(queries, store.search(queries, 7, opened().sha256), strict=True):
                self.check_answer(query, hits, state, opened(), 7)
            store.close()
            self.destroy(self.place)
            self.place.mkdir(exist_ok=True)

    def test_subspaces(self) -> None:
        """A search proposes the nearest items of each sub-space."""
        bundle = opened(subspaces=True)
        store, state = self.store(bundle), State()
        self.put(store, state, some(300, bundle=bundle), bundle)
        self.check(store, state, bundle)
        self.check(store, state, bundle, where="price < 3")
        self.check(store := self.again(store), state, bundle)

    def test_codes(self) -> None:
        """The hits of a search have the codes that a rescorer needs."""
        bundle = opened(rescorer=True)
        store, state = self.store(bundle), State()
        self.put(store, state, some(60, bundle=bundle), bundle)
        self.put(store, state, [item("id 3", 1, bundle)], bundle)
        for _ in range(2):
            self.check(store, state, bundle)
            (hits,) = store.search(normal(1, WIDTH, 1), 5, bundle.sha256)
            assert all(set(entry.arrays) >= {VECTOR, CODE} for entry in hits), (
                "an item without its code"
            )
            equal(set(store.get(["id 3"], arrays=True)["id 3"].arrays), {VECTOR, CODE}, "arrays")
            store = self.again(store)
