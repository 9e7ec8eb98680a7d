"""Tests of generations (the arrays of all items under one bundle), and of a store as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
from retrieval.base.files import cache_folder
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import DataError, StoreError
from retrieval.index.index import open_index
from retrieval.store.contract import (
    FEATURES,
    VECTOR,
    Floats,
    Generation,
    Item,
    Store,
    Superseded,
    widths_of,
)

from retrieval_engines.testing.bench import (
    Bench,
    State,
    alike,
    equal,
    item,
    needs,
    normal,
    refused,
    some,
    together,
)
from retrieval_engines.testing.small_bundles import WIDTH, opened


def fill(
    store: Store, generation: Generation, state: State, bundle: Bundle, limit: int = 64
) -> None:
    """Embed all pending items, in the store and in `state`, its expected content."""
    while items := store.pending(generation, limit):
        assert len(items) <= limit, f"{len(items)} pending items returned, {limit} requested"
        arrays = {entry.id: item(entry.id, 0, bundle).arrays for entry in items}
        store.embed(generation, [replace(entry, arrays=arrays[entry.id]) for entry in items])
        state.update((id, replace(state[id], arrays=arrays[id])) for id in arrays)


class GenerationCases(Bench):
    """Tests of `begin`, `pending`, `embed`, `switch` and `drop`."""

    other: Bundle

    def setup_method(self) -> None:
        """Create the folder of a test, and a second bundle with wider vectors."""
        super().setup_method()
        self.other = opened(seed=1, width=WIDTH + 5)

    def begin(self, store: Store) -> Generation:
        """Begin a generation of the second bundle."""
        return store.begin(self.other, widths_of(self.other))

    def embedded(self, items: Sequence[Item], seed: int = 0) -> list[Item]:
        """Return items with their arrays of the second bundle."""
        return [replace(entry, arrays=self.arrays(entry.id, seed)) for entry in items]

    def arrays(self, id: str, seed: int = 0) -> Mapping[str, Floats]:
        """Return the arrays that the second bundle gives an item."""
        return item(id, seed, self.other).arrays

    def test_the_first_generation(self) -> None:
        """A new store serves one generation; an empty store can switch to another at once."""
        store, bundle = self.store(), opened()
        (served,) = store.generations()
        expected = Generation(
            served.number, bundle.sha256, None, widths_of(bundle), ((0, WIDTH),), "served"
        )
        equal(served, expected, "generation")
        kept = Bundle.open(store.bundle(served), threads=1)
        equal(kept.sha256, bundle.sha256, "bundle that is kept")
        equal(store.begin(bundle, widths_of(bundle)), served, "beginning the one that is served")
        equal(store.pending(served, 10), [], "pending of the one that is served")
        began = self.begin(store)
        equal(store.pending(began, 10), [], "pending without any item")
        equal(store.switch(began), True, "switch without any item")
        state = State()
        self.check(store, state, self.other)
        self.put(store, state, [item("a", 0, self.other)], self.other)
        self.check(store, state, self.other)

    def test_a_generation_follows(self) -> None:
        """A generation is filled while another is served; it can serve once no item is pending."""
        store, state = self.filled(150)
        began = self.begin(store)
        equal((began.state, began.bundle), ("building", self.other.sha256), "generation")
        equal(self.begin(store), began, "begun twice")
        numbers = [generation.number for generation in store.generations()]
        equal(numbers, sorted(set(numbers)), "numbers")
        equal(store.switch(began), False, "switch while all is pending")
        items = store.pending(began, 100)
        store.embed(began, self.embedded(items))
        equal(store.switch(began), False, "switch while some are pending")
        self.check(store, state)
        done = {id: replace(state[id], arrays=self.arrays(id)) for id in (e.id for e in items)}
        fill(store, began, (after := {**state, **done}), self.other)
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
        store, state = self.filled(60)
        began = self.begin(store)
        items = store.pending(began, 40)
        changed, gone, stays = items[0].id, items[1].id, items[2].id
        self.put(store, state, [item(changed, 7), item("came")])
        self.remove(store, state, [gone])
        store.embed(began, self.embedded(items, 5))
        store = self.again(store)
        begun = self.begin(store)
        equal(begun.number, began.number, "the generation that was begun")
        left = {entry.id for entry in store.pending(began, 1000)}
        assert {changed, "came"} <= left, f"pending items lack a changed item: {left}"
        assert not {gone, stays} & left, f"pending items have a deleted or embedded item: {left}"
        after = dict(state)
        done = [entry.id for entry in items if entry.id not in (changed, gone)]
        after.update((id, replace(state[id], arrays=self.arrays(id, 5))) for id in done)
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
        store, state = self.filled(50)
        (first,) = store.generations()
        second = self.begin(store)
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
        store, state = self.filled(30)
        (first,) = store.generations()
        second = self.begin(store)
        items = store.pending(second, 100)
        out = [entry.id for entry in items[:5]]
        store.embed(second, self.embedded(items[5:]), out)
        equal(store.pending(second, 100), [], "pending")
        equal(store.switch(second), True, "switch")
        after = {
            id: replace(entry, arrays=self.arrays(id))
            for id, entry in state.items()
            if id not in out
        }
        self.check_search(store, normal(3, WIDTH + 5, 0), after, self.other, 100)
        equal(set(store.get(state)), set(state), "items are kept")
        read = store.get(out, arrays=True)
        assert not any(entry.arrays for entry in read.values()), "arrays of a left-out item"
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
        store, state = self.filled(6)
        began = self.begin(store)
        bad: dict[str, Callable[[Item], Item]] = {
            "the old bundle's": lambda entry: item(entry.id),
            "NaN": lambda entry: replace(entry, arrays={VECTOR: np.full(WIDTH + 5, np.nan)}),
            "none": lambda entry: replace(entry, arrays={}),
        }
        for what, spoilt in bad.items():
            items = store.pending(began, 10)
            equal(len(items), 6, f"pending, before {what}")
            with refused(DataError):
                store.embed(began, [*self.embedded(items[1:]), spoilt(items[0])])
        items = store.pending(began, 10)
        with refused(DataError, saying=items[2].id):
            store.embed(began, self.embedded([*items[:2], *items[3:]]))
        with refused(DataError, saying="stranger"):
            store.embed(began, [*self.embedded(items), item("stranger", 0, self.other)])
        equal(len(store.pending(began, 10)), 6, "pending")
        self.check(store, state)
        fill(store, began, state, self.other)
        equal(store.switch(began), True, "switch")
        self.check(store, state, self.other)

    def test_dropping(self) -> None:
        """`drop` deletes a generation and its bundle, but never the served one."""
        store, state = self.filled(20)
        (first,) = store.generations()
        with refused(StoreError):
            store.drop(first)
        began = self.begin(store)
        store.embed(began, self.embedded(store.pending(began, 10)), [])
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
        again = self.begin(store)
        assert again.number > began.number, "numbers count up"
        fill(store, again, state, self.other)
        equal(store.switch(again), True, "switch")
        store.drop(next(entry for entry in store.generations() if entry.state == "kept"))
        self.check(store, state, self.other)
        store = self.again(store)
        equal([entry.number for entry in store.generations()], [again.number], "generations")
        self.check(store, state, self.other)


class WholeCases(Bench):
    """Tests of places, bundles, snapshots, threads and closing."""

    def test_made_once_and_deleted(self) -> None:
        """`create` overwrites nothing; a deleted index is gone and can be created again."""
        place = self.store_at(self.place)
        for _ in range(2):
            equal(place.exists(), False, "existence")
            with refused(StoreError):
                place.open()
            place.drop()  # dropping an index that does not exist is not an error
        store, state, place = self.store(), State(), self.store_at(self.place)
        self.put(store, state, some(5))
        equal(place.exists(), True, "existence")
        with refused(StoreError):
            place.create(opened(), widths_of(opened()))
        self.check(store, state)
        first = store.identity()
        store.close()
        place.drop()
        equal(place.exists(), False, "existence after deleting")
        with refused(StoreError):
            place.open()
        store = self.store()
        self.check(store, State())
        assert store.identity() != first, "two indexes have one identity"

    def test_bundles_come_from_the_store(self) -> None:
        """Every bundle can be fetched from the store; an altered copy in the cache is replaced."""
        store, other = self.store(), opened(seed=1, width=WIDTH + 5)
        store.upsert(some(3), opened().sha256)
        store.begin(other, widths_of(other))
        with patch.dict("os.environ", RETRIEVAL_CACHE=str(self.place.parent / "cache")):
            store = self.again(store)
            for generation in store.generations():
                folder = store.bundle(generation)
                equal(Bundle.open(folder, threads=1).sha256, generation.bundle, "bundle")
                if folder.is_relative_to(cache_folder()):
                    (folder / "encoder.onnx").write_bytes(b"altered")
                    folder = store.bundle(generation)
                    again = Bundle.open(folder, threads=1)
                    equal(again.sha256, generation.bundle, "bundle, once more")

    def test_stats(self) -> None:
        """`stats` counts items and lists generations."""
        store, _ = self.filled(9)
        store.delete(["id 2"])
        other = opened(seed=1)
        store.begin(other, widths_of(other))
        stats = store.stats()
        equal(stats.count, 8, "items")
        equal(stats.generations, store.generations(), "generations")
        assert stats.bytes is None or stats.bytes > 0, f"{stats.bytes} bytes"

    def test_compacting(self) -> None:
        """Compacting changes no search result; a store may refuse it."""
        store, state = self.filled(60)
        self.remove(store, state, ["id 3", "id 5"])
        with suppress(StoreError):
            store.compact()
        self.check(store, state)
        self.check(self.again(store), state)

    # Snapshots

    def test_a_snapshot_is_a_copy_of_one_moment(self) -> None:
        """A snapshot has the identity and content of the index; later changes do not affect it."""
        target, state = self.place.parent / "copy", State()
        place, widths = self.store_at(self.place), widths_of(opened())
        with place.create(opened(), widths, identity="an id") as store:
            self.put(store, state, some(80))
            self.remove(store, state, ["id 7"])
            store.snapshot(target)
            then = dict(state)
            queries = normal(3, WIDTH, 2)
            answers = store.search(queries, 5, opened().sha256)
            expected = [{entry.id for entry in items} for items in answers]
            self.put(store, state, [item("later"), item("id 1", 5)])
            with open_index(target, threads=1) as copy:
                equal(copy.identity, "an id", "identity of the snapshot")
                equal(len(copy), len(then), "items of the snapshot")
                equal(copy.bundle.sha256, opened().sha256, "bundle of the snapshot")
                hits = copy.search(Encoded(queries, queries), 5)
                equal([{hit.id for hit in entry} for entry in hits], expected, "nearest")
                alike(copy.get("id 3", arrays=True)["id 3"], then["id 3"])
            self.check(store, state)
            with refused(StoreError):
                store.snapshot(target)
        with self.store_at(self.place).open() as again:
            equal(again.identity(), "an id", "identity after reopening")

    def test_a_snapshot_holds_every_item(self) -> None:
        """A snapshot holds items with originals, and items without arrays."""
        store, other = self.store(), opened(seed=1)
        store.upsert([*some(4), item("kept", keep="copy", original=b"bytes")], opened().sha256)
        began = store.begin(other, widths_of(other))
        pending = store.pending(began, 10)
        store.embed(began, [item(entry.id, 0, other) for entry in pending[1:]], [pending[0].id])
        equal(store.switch(began), True, "switch")
        store.snapshot(self.place.parent / "copy")
        with open_index(self.place.parent / "copy", threads=1) as copy:
            ids = [entry.id for entry in copy.scan()]
            equal(ids, sorted(entry.id for entry in pending), "items")
            equal(copy.store.original("kept"), b"bytes", "original")
            equal(copy.bundle.sha256, other.sha256, "bundle")
            read = copy.get(ids, arrays=True)
            without = [id for id, entry in read.items() if not entry.arrays]
            equal(without, [pending[0].id], "items without arrays")

    def test_a_snapshot_while_another_thread_writes(self) -> None:
        """A snapshot during writes holds one consistent state."""
        store, bundle = self.store(), opened()
        needs(store, "atomic")
        targets = [self.place.parent / f"copy {number}" for number in range(3)]
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                store.upsert([item(f"left {number}"), item(f"right {number}")], bundle.sha256)
                number += 1

        def copy() -> None:
            try:
                for target in targets:
                    store.snapshot(target)
            finally:
                stop.set()

        equal(together([write, copy]), [], "faults")
        for target in targets:
            with open_index(target, threads=1) as index:
                equal(len(index) % 2, 0, "half of a call is in the snapshot; items beyond pairs")

    # Threads

    def test_threads_write_in_turns(self) -> None:
        """Concurrent writers all succeed, and nothing is lost."""
        store = self.store()

        def write(start: int) -> None:
            for entry in some(12, start):
                store.upsert([entry], opened().sha256)

        calls = [partial(write, start) for start in range(0, 48, 12)]
        equal(together(calls), [], "faults")
        state = {entry.id: entry for entry in some(48)}
        self.check(store, state)
        self.check(self.again(store), state)

    def test_many_threads_one_after_another(self) -> None:
        """Threads that have ended hold no resources, so no limit is reached."""
        store, _ = self.filled(3)
        for _ in range(1500):
            equal(together([store.count]), [], "faults")

    def test_closing_lets_searches_end(self) -> None:
        """A running search returns its result; a later search raises that the store is closed."""
        store, bundle = self.store(), opened()
        store.upsert(some(min(self.many, 1200)), bundle.sha256)
        queries = normal(20, WIDTH, 4)
        searched = threading.Barrier(4)

        def search() -> None:
            store.search(queries, 10, bundle.sha256)
            searched.wait()
            with refused(StoreError, saying="closed"):
                while True:
                    answers = store.search(queries, 10, bundle.sha256)
                    equal([len(answer) for answer in answers], [10] * 20, "items found")

        def close() -> None:
            searched.wait()
            store.close()

        equal(together([search, search, search, close]), [], "faults")
