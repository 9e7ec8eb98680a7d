"""Tests of generations (the arrays of all items under one bundle), while items change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from retrieval.errors import DataError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.store.contract import (
    FEATURES,
    VECTOR,
    Generation,
    Item,
    Store,
    Superseded,
    widths_of,
)
from retrieval.serving.store.testing.bench import (
    Bench,
    State,
    equal,
    item,
    normal,
    refused,
    some,
)
from retrieval.serving.store.testing.bundles import WIDTH, opened


def embedded(items: Sequence[Item], bundle: Bundle, seed: int = 0) -> list[Item]:
    """Return items with the arrays that `bench.item` returns for a bundle."""
    return [replace(entry, arrays=item(entry.id, seed, bundle).arrays) for entry in items]


def fill(
    store: Store, generation: Generation, state: State, bundle: Bundle, limit: int = 64
) -> None:
    """Embed all pending items, in the store and in `state`, its expected content."""
    while items := store.pending(generation, limit):
        assert len(items) <= limit, f"{len(items)} pending items returned, {limit} requested"
        created = embedded(items, bundle)
        store.embed(generation, created)
        state.update((entry.id, replace(state[entry.id], arrays=entry.arrays)) for entry in created)


class GenerationCases(Bench):
    """Tests of `begin`, `pending`, `embed`, `switch` and `drop`."""

    other: Bundle

    def setup_method(self) -> None:
        """Create the folder of a test, and a second bundle with wider vectors."""
        super().setup_method()
        self.other = opened(seed=1, width=WIDTH + 5)

    def test_the_first_generation(self) -> None:
        """A new store serves one generation; an empty store can switch to another at once."""
        store, bundle = self.store(), opened()
        (served,) = store.generations()
        properties = (
            served.bundle,
            served.variant,
            dict(served.widths),
            served.spans,
            served.state,
        )
        equal(
            properties,
            (bundle.sha256, None, widths_of(bundle), ((0, WIDTH),), "served"),
            "generation",
        )
        equal(
            Bundle.open(store.bundle(served), threads=1).sha256,
            bundle.sha256,
            "bundle that is kept",
        )
        equal(store.begin(bundle, widths_of(bundle)), served, "beginning the one that is served")
        equal(store.pending(served, 10), [], "pending of the one that is served")
        began = store.begin(self.other, widths_of(self.other))
        equal(
            (store.pending(began, 10), store.switch(began)), ([], True), "switch without any item"
        )
        state = State()
        self.check(store, state, self.other)
        self.put(store, state, [item("a", 0, self.other)], self.other)
        self.check(store, state, self.other)

    def test_a_generation_follows(self) -> None:
        """A generation is filled while another is served; it can serve once no item is pending."""
        store, state = self.store(), State()
        self.put(store, state, some(150))
        began = store.begin(self.other, widths_of(self.other))
        equal((began.state, began.bundle), ("building", self.other.sha256), "generation")
        equal(store.begin(self.other, widths_of(self.other)), began, "begun twice")
        numbers = [generation.number for generation in store.generations()]
        equal(numbers, sorted(set(numbers)), "numbers")
        equal(store.switch(began), False, "switch while all is pending")
        items = store.pending(began, 100)
        store.embed(began, embedded(items, self.other))
        equal(store.switch(began), False, "switch while some are pending")
        self.check(store, state)
        after = {
            entry.id: replace(state[entry.id], arrays=item(entry.id, 0, self.other).arrays)
            for entry in items
        }
        fill(store, began, (after := {**state, **after}), self.other)
        self.check(store, state)
        equal(store.switch(began), True, "switch")
        self.check(store, after, self.other)
        with refused(Superseded):
            store.search(normal(1, WIDTH, 0), 3, opened().sha256)
        with refused(Superseded):
            store.upsert([item("old")], opened().sha256)
        equal([entry.state for entry in store.generations()], ["kept", "served"], "states")
        equal(store.switch(began), True, "switch to the one that is served")
        self.check(self.again(store), after, self.other)

    def test_writes_while_a_generation_is_built(self) -> None:
        """Items added or changed meanwhile are pending; others are not, even after reopening."""
        store, state = self.store(), State()
        self.put(store, state, some(60))
        began = store.begin(self.other, widths_of(self.other))
        items = store.pending(began, 40)
        changed, gone, stays = items[0].id, items[1].id, items[2].id
        self.put(store, state, [item(changed, 7), item("came")])
        self.remove(store, state, [gone])
        store.embed(began, embedded(items, self.other, seed=5))
        store = self.again(store)
        begun = store.begin(self.other, widths_of(self.other))
        equal(begun.number, began.number, "the generation that was begun")
        left = {entry.id for entry in store.pending(began, 1000)}
        assert {changed, "came"} <= left, f"pending items lack a changed item: {left}"
        assert not {gone, stays} & left, f"pending items have a deleted or embedded item: {left}"
        after = dict(state)
        done = [entry.id for entry in items if entry.id not in (changed, gone)]
        after.update((id, replace(state[id], arrays=item(id, 5, self.other).arrays)) for id in done)
        fill(store, began, after, self.other)
        self.put(store, state, [item("late")])
        equal(store.switch(began), False, "switch with a late item")
        after["late"] = state["late"]
        fill(store, began, after, self.other)
        equal(store.switch(began), True, "switch")
        self.check(store, after, self.other)
        self.check(self.again(store), after, self.other)

    def test_back_again(self) -> None:
        """The previous generation can serve again once its items that changed are embedded."""
        store, state = self.store(), State()
        self.put(store, state, some(50))
        (first,) = store.generations()
        second = store.begin(self.other, widths_of(self.other))
        after = dict(state)
        fill(store, second, after, self.other)
        equal(store.switch(second), True, "switch")
        self.put(
            store, after, [item("came", 0, self.other), item("id 3", 2, self.other)], self.other
        )
        self.remove(store, after, ["id 4"])
        self.check(store, after, self.other)
        equal(store.switch(first), False, "switch back with items pending")
        equal({entry.id for entry in store.pending(first, 100)}, {"came", "id 3"}, "pending")
        before = {
            id: replace(entry, arrays=state[id].arrays) if id in state else entry
            for id, entry in after.items()
        }
        fill(store, first, before, opened())
        equal(store.switch(first), True, "switch back")
        self.check(store, before)
        equal([entry.state for entry in store.generations()], ["served", "kept"], "states")
        self.check(self.again(store), before)

    def test_items_that_are_left_out(self) -> None:
        """Left-out items are not pending, not found and without arrays in the new generation.

        The old generation still has their arrays.
        """
        store, state = self.store(), State()
        self.put(store, state, some(30))
        (first,) = store.generations()
        second = store.begin(self.other, widths_of(self.other))
        items = store.pending(second, 100)
        out = [entry.id for entry in items[:5]]
        store.embed(second, embedded(items[5:], self.other), out)
        equal(store.pending(second, 100), [], "pending")
        equal(store.switch(second), True, "switch")
        after = {
            id: replace(entry, arrays=item(id, 0, self.other).arrays)
            for id, entry in state.items()
            if id not in out
        }
        for query, hits in zip(
            q := normal(3, WIDTH + 5, 0), store.search(q, 100, self.other.sha256), strict=True
        ):
            self.check_answer(query, hits, after, self.other, 100)
        equal(set(store.get(state)), set(state), "items are kept")
        read = store.get(out, arrays=True)
        assert all(not entry.arrays for entry in read.values()), (
            "arrays of an item that was left out"
        )
        store.upsert([item(out[0], 3, self.other)], self.other.sha256)
        (hits,) = store.search(item(out[0], 3, self.other).vector[None], 1, self.other.sha256)
        equal([entry.id for entry in hits], [out[0]], "found once it was embedded")
        fill(store, first, dict(state), opened())
        equal(store.switch(first), True, "switch back")
        (hits,) = store.search(state[out[1]].vector[None], 1, opened().sha256)
        equal([entry.id for entry in hits], [out[1]], "found in the generation before")

    def test_features_for_the_next_generation(self) -> None:
        """If the index stores features, pending items have them."""
        bundle, width = opened(), 8
        store = self.store(bundle, features=width)
        written = [
            replace(entry, arrays={**entry.arrays, FEATURES: features})
            for entry, features in zip(some(20), normal(20, width, 3), strict=True)
        ]
        store.upsert(written, bundle.sha256)
        (hits,) = store.search(written[0].vector[None], 1, bundle.sha256)
        equal(hits[0].id, "id 0", "nearest")
        began = store.begin(self.other, widths_of(self.other, features=width))
        items = store.pending(began, 100)
        equal(len(items), 20, "pending")
        for entry in items:
            expected = next(near for near in written if near.id == entry.id).arrays[FEATURES]
            assert np.array_equal(entry.arrays[FEATURES], expected), f"features of {entry.id}"
        vectors = self.other.encode(np.stack([entry.arrays[FEATURES] for entry in items])).vector
        created = [
            replace(entry, arrays={VECTOR: vector, FEATURES: entry.arrays[FEATURES]})
            for entry, vector in zip(items, vectors, strict=True)
        ]
        store.embed(began, created)
        equal(store.switch(began), True, "switch")
        (hits,) = store.search(vectors[4:5], 1, self.other.sha256)
        equal(hits[0].id, items[4].id, "nearest in the next generation")

    def test_arrays_that_do_not_fit(self) -> None:
        """`embed` refuses invalid arrays and missing or unknown items; then nothing changes."""
        store, state = self.store(), State()
        self.put(store, state, some(6))
        began = store.begin(self.other, widths_of(self.other))
        bad: dict[str, Callable[[Item], Item]] = {
            "the old bundle's": lambda entry: item(entry.id),
            "NaN": lambda entry: replace(
                entry, arrays={VECTOR: np.full(WIDTH + 5, np.nan, np.float32)}
            ),
            "none": lambda entry: replace(entry, arrays={}),
        }
        for what, spoilt in bad.items():
            items = store.pending(began, 10)
            equal(len(items), 6, f"pending, before {what}")
            with refused(DataError):
                store.embed(began, [*embedded(items[1:], self.other), spoilt(items[0])])
        items = store.pending(began, 10)
        with refused(DataError, saying=items[2].id):
            store.embed(began, embedded([*items[:2], *items[3:]], self.other))
        with refused(DataError, saying="stranger"):
            store.embed(began, [*embedded(items, self.other), item("stranger", 0, self.other)])
        equal(len(store.pending(began, 10)), 6, "pending")
        self.check(store, state)
        fill(store, began, state, self.other)
        equal(store.switch(began), True, "switch")
        self.check(store, state, self.other)

    def test_dropping(self) -> None:
        """`drop` deletes a generation and its bundle, but never the served one."""
        store, state = self.store(), State()
        self.put(store, state, some(20))
        (first,) = store.generations()
        with refused(StoreError):
            store.drop(first)
        began = store.begin(self.other, widths_of(self.other))
        store.embed(began, embedded(store.pending(began, 10), self.other), [])
        store.drop(began)
        equal([entry.number for entry in store.generations()], [first.number], "generations")
        for call in (
            lambda: store.drop(began),
            lambda: store.switch(began),
            lambda: store.pending(began, 5),
            lambda: store.bundle(began),
        ):
            with refused(StoreError):
                call()
        self.check(store, state)
        again = store.begin(self.other, widths_of(self.other))
        assert again.number > began.number, "numbers count up"
        fill(store, again, state, self.other)
        equal(store.switch(again), True, "switch")
        store.drop(next(entry for entry in store.generations() if entry.state == "kept"))
        self.check(store, state, self.other)
        store = self.again(store)
        equal([entry.number for entry in store.generations()], [again.number], "generations")
        self.check(store, state, self.other)
