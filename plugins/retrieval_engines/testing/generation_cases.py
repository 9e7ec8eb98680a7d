"""Tests of generations: the arrays of all items under one bundle."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from retrieval.bundle.bundle import Bundle
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
from retrieval.store.items import CALIBRATION

from retrieval_engines.testing.bench import (
    Bench,
    State,
    numbered_items,
    random_item,
    random_vectors,
    refused,
)
from retrieval_engines.testing.small_bundles import WIDTH, shared_bundle


class GenerationCases(Bench):
    """Tests of `begin`, `pending`, `embed`, `switch` and `drop`."""

    def embedded(self, items: Iterable[Item], seed: int = 0) -> list[Item]:
        """Return items with their arrays of the second bundle."""
        return [
            replace(item, arrays=random_item(item.id, seed, self.other).arrays) for item in items
        ]

    def expected(self, items: Sequence[Item], seed: int = 0) -> State:
        """Return the content of the second generation once `items` are embedded."""
        embedded = self.embedded((self.items[item.id] for item in items), seed)
        return self.items | {item.id: item for item in embedded}

    def fill(self, generation: Generation, expected: State, limit: int = 64) -> None:
        """Embed all pending items, in a generation and in `expected`, its expected content."""
        bundle = self.other if generation.bundle == self.other.sha256 else shared_bundle()
        while items := self.store.pending(generation, limit):
            assert len(items) <= limit, f"{len(items)} pending items returned, {limit} requested"
            arrays = {item.id: random_item(item.id, 0, bundle).arrays for item in items}
            self.store.embed(generation, [replace(item, arrays=arrays[item.id]) for item in items])
            expected.update((id, replace(expected[id], arrays=arrays[id])) for id in arrays)

    def switch(self, generation: Generation, bundle: Bundle, expected: State) -> None:
        """Serve a generation of `bundle`, and compare the store with its expected content."""
        assert self.store.switch(generation) is True
        self.bundle = bundle
        self.items = expected
        self.check()

    def states(self) -> list[str]:
        """Return the states of all generations, oldest first."""
        return [generation.state for generation in self.store.generations()]

    def test_the_first_generation(self) -> None:
        """A new store serves one generation; an empty store can switch to another at once."""
        self.create()
        (served,) = self.store.generations()
        widths = widths_of(self.bundle)
        assert served == Generation(
            served.number, self.bundle.sha256, None, widths, ((0, WIDTH),), "served"
        )
        copy = Bundle.open(self.store.bundle(served), threads=1)
        assert copy.sha256 == self.bundle.sha256
        assert self.store.begin(self.bundle, widths) == served
        assert self.store.pending(served, 10) == []
        second = self.begin()
        assert self.store.pending(second, 10) == []
        self.switch(second, self.other, {})
        self.put([random_item("a", 0, self.other)])
        self.check()

    def test_a_generation_follows(self) -> None:
        """A generation is filled while another is served; it can serve once no item is pending."""
        self.create(150)
        first_bundle = self.bundle.sha256
        second = self.begin()
        assert (second.state, second.bundle) == ("building", self.other.sha256)
        assert self.begin() == second
        numbers = [generation.number for generation in self.store.generations()]
        assert numbers == sorted(set(numbers))
        assert self.store.switch(second) is False, "switch while all is pending"
        items = self.store.pending(second, 100)
        self.store.embed(second, self.embedded(items))
        assert self.store.switch(second) is False, "switch while some are pending"
        self.check()
        expected = self.expected(items)
        self.fill(second, expected)
        self.check()
        self.switch(second, self.other, expected)
        with refused(Superseded):
            self.store.search(random_vectors(1, WIDTH, 0), 3, first_bundle)
        with refused(Superseded):
            self.store.upsert([random_item("old")], first_bundle)
        assert self.states() == ["kept", "served"]
        assert self.store.switch(second) is True, "switch to the one that is served"
        self.check_reopened()

    def test_writes_while_a_generation_is_built(self) -> None:
        """Items added or changed meanwhile are pending; others are not, even after reopening."""
        self.create(60)
        second = self.begin()
        items = self.store.pending(second, 40)
        changed, deleted, *unchanged = items
        # Another process writes between `pending` and `embed`.
        self.put([random_item(changed.id, 7), random_item("new")])
        self.remove([deleted.id])
        self.store.embed(second, self.embedded(items, 5))
        self.reopen()
        assert self.begin().number == second.number
        pending = {item.id for item in self.store.pending(second, 1000)}
        assert pending >= {changed.id, "new"}, "a changed item is not pending"
        assert not pending & {deleted.id, unchanged[0].id}, "a deleted or embedded item is pending"
        expected = self.expected(unchanged, 5)
        self.fill(second, expected)
        self.put([random_item("late")])
        assert self.store.switch(second) is False, "switch with a late item"
        expected["late"] = self.items["late"]
        self.fill(second, expected)
        self.switch(second, self.other, expected)
        self.check_reopened()

    def test_back_again(self) -> None:
        """The previous generation can serve again once its items that changed are embedded."""
        self.create(50)
        before = self.items
        first_bundle = self.bundle
        (first,) = self.store.generations()
        second = self.begin()
        expected = dict(before)
        self.fill(second, expected)
        self.switch(second, self.other, expected)
        self.put([random_item("new", 0, self.other), random_item("id 3", 2, self.other)])
        self.remove(["id 4"])
        self.check()
        assert self.store.switch(first) is False, "switch back with items pending"
        assert {item.id for item in self.store.pending(first, 100)} == {"new", "id 3"}
        # What has not changed since has still its arrays of the first generation.
        expected = dict(self.items)
        for id in expected.keys() & before.keys():
            expected[id] = replace(expected[id], arrays=before[id].arrays)
        self.fill(first, expected)
        self.switch(first, first_bundle, expected)
        assert self.states() == ["served", "kept"]
        self.check_reopened()

    def test_items_that_are_left_out(self) -> None:
        """Left-out items are not pending, not found and without arrays in the new generation.

        The old generation still has their arrays.
        """
        self.create(30)
        before = self.items
        first_bundle = self.bundle
        (first,) = self.store.generations()
        second = self.begin()
        items = self.store.pending(second, 100)
        left_out = [item.id for item in items[:5]]
        self.store.embed(second, self.embedded(items[5:]), left_out)
        assert self.store.pending(second, 100) == []
        assert self.store.switch(second) is True
        self.bundle = self.other
        expected = {item.id: self.expected(items)[item.id] for item in items[5:]}
        self.check_search(random_vectors(3, WIDTH + 5, 0), expected, 100)
        assert self.store.get(before).keys() == before.keys()
        read = self.store.get(left_out, arrays=True)
        assert not any(item.arrays for item in read.values()), "arrays of a left-out item"
        item = random_item(left_out[0], 3, self.other)
        self.put([item])
        assert self.nearest_id(item.vector) == item.id
        self.fill(first, before)
        assert self.store.switch(first) is True
        self.bundle = first_bundle
        assert self.nearest_id(before[left_out[1]].vector) == left_out[1]

    def test_features_for_the_next_generation(self) -> None:
        """If the index stores features, pending items have them."""
        width = 8
        self.create(features=width)
        features = {
            f"id {number}": vector for number, vector in enumerate(random_vectors(20, width, 3))
        }
        self.put(
            [
                replace(item, arrays={**item.arrays, FEATURES: features[item.id]})
                for item in numbered_items(20)
            ]
        )
        assert self.nearest_id(self.items["id 0"].vector) == "id 0"
        second = self.store.begin(self.other, widths_of(self.other, features=width))
        items = self.store.pending(second, 100)
        assert len(items) == 20
        for item in items:
            assert np.array_equal(item.arrays[FEATURES], features[item.id]), item.id
        vectors = self.other.encode(np.stack([features[item.id] for item in items])).vector
        embedded = [
            replace(item, arrays={VECTOR: vector, FEATURES: features[item.id]})
            for item, vector in zip(items, vectors, strict=True)
        ]
        self.store.embed(second, embedded)
        assert self.store.switch(second) is True
        self.bundle = self.other
        assert self.nearest_id(vectors[4]) == items[4].id

    def derived(self, arrays: Mapping[str, Floats]) -> Mapping[str, Floats]:
        """Return arrays of the second bundle, computed from the vectors of the first."""
        return {VECTOR: np.pad(2 * arrays[VECTOR], ((0, 0), (0, 5)))}

    def after_deriving(self, items: State, without: Sequence[str] = ()) -> State:
        """Return what the second generation holds once items are derived."""
        return {
            id: replace(item, arrays={VECTOR: self.derived({VECTOR: item.vector[None]})[VECTOR][0]})
            for id, item in items.items()
            if id not in without
        }

    def test_arrays_computed_from_those_that_are_served(self) -> None:
        """`derive` embeds all pending items from stored arrays, also if it is interrupted."""
        self.create(150)
        (first,) = self.store.generations()
        first_bundle = self.bundle
        before = dict(self.items)
        second = self.begin()
        counts: list[int] = []
        with refused(DataError):
            self.store.derive(second, first, [VECTOR], lambda arrays: dict(arrays))
        with refused(DataError):
            self.store.derive(second, first, [VECTOR], lambda arrays: {})
        assert self.store.switch(second) is False

        def interrupted(arrays: Mapping[str, Floats]) -> Mapping[str, Floats]:
            raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            self.store.derive(second, first, [VECTOR], interrupted)
        self.reopen()
        self.check()
        derived = self.store.derive(second, first, [VECTOR], self.derived, counts.append)
        assert derived == sum(counts) == 150
        self.check()
        assert self.store.derive(second, first, [VECTOR], self.derived) == 0
        assert self.store.pending(second, 10) == []
        self.switch(second, self.other, self.after_deriving(before))
        # Back again: only what was added meanwhile is computed.
        self.put([random_item("new", 0, self.other)])
        self.remove(["id 7"])
        expected = {id: item for id, item in before.items() if id != "id 7"}
        new = self.items["new"]
        expected["new"] = replace(new, arrays={VECTOR: new.vector[:WIDTH]})
        back = self.store.derive(
            first, second, [VECTOR], lambda arrays: {VECTOR: arrays[VECTOR][:, :WIDTH]}
        )
        assert back == 1
        self.switch(first, first_bundle, expected)
        self.check_reopened()

    def test_writes_while_arrays_are_computed(self) -> None:
        """Items that are added, changed or deleted while `derive` computes are what they are now.

        It also leaves out the items that the served generation lacks.
        """
        self.create(60)
        first_bundle = self.bundle
        (first,) = self.store.generations()
        before = dict(self.items)
        second = self.begin()
        pending = self.store.pending(second, 100)
        self.store.embed(second, self.embedded(pending[2:]), [item.id for item in pending[:2]])
        lacking = [item.id for item in pending[:2]]
        assert self.store.switch(second) is True
        self.store.drop(first)
        third = self.store.begin(first_bundle, widths_of(first_bundle))
        self.bundle = self.other
        calls = 0

        def narrowed(arrays: Mapping[str, Floats]) -> Mapping[str, Floats]:
            nonlocal calls
            calls += 1
            if calls == 1:
                self.put([random_item("added", 0, self.other), random_item("id 9", 3, self.other)])
                assert self.store.delete(["id 11"]) == 1
            return {VECTOR: arrays[VECTOR][:, :WIDTH]}

        self.items = {item.id: item for item in self.embedded(before.values())}
        while not self.store.switch(third):
            self.store.derive(third, second, [VECTOR], narrowed)
        self.bundle = first_bundle
        del self.items["id 11"]
        expected = {
            id: replace(item, arrays={VECTOR: item.vector[:WIDTH]})
            for id, item in self.items.items()
            if id not in lacking
        }
        read = self.store.get(self.items, arrays=True)
        assert read.keys() == self.items.keys()
        for id, item in read.items():
            if id in lacking:
                assert not item.arrays, "arrays of a left-out item"
                continue
            assert item.arrays, f"no arrays of {id}"
            np.testing.assert_array_equal(item.vector, expected[id].vector)
        self.check_search(random_vectors(3, WIDTH, 0), expected, 100)
        self.put([random_item("late")])
        with refused(Superseded):
            self.store.derive(second, second, [VECTOR], self.derived)
        self.store.drop(second)
        with refused(StoreError):
            self.store.derive(second, third, [VECTOR], self.derived)

    def test_arrays_that_do_not_fit(self) -> None:
        """`embed` refuses invalid arrays and missing or unknown items; then nothing changes."""
        self.create(6)
        second = self.begin()
        first, *rest = self.store.pending(second, 10)
        for arrays in (
            # These are arrays of the first bundle.
            self.items[first.id].arrays,
            {VECTOR: np.full(WIDTH + 5, np.nan)},
            {},
        ):
            # Nothing of the refused call before was kept.
            assert len(self.store.pending(second, 10)) == 6
            with refused(DataError):
                self.store.embed(second, [*self.embedded(rest), replace(first, arrays=arrays)])
        first, *rest = self.store.pending(second, 10)
        with refused(DataError, saying=first.id):
            self.store.embed(second, self.embedded(rest))
        with refused(DataError, saying="stranger"):
            strange = random_item("stranger", 0, self.other)
            self.store.embed(second, [*self.embedded([first, *rest]), strange])
        assert len(self.store.pending(second, 10)) == 6
        self.check()
        expected = dict(self.items)
        self.fill(second, expected)
        self.switch(second, self.other, expected)

    def test_dropping(self) -> None:
        """`drop` deletes a generation and its bundle, but never the served one."""
        self.create(20)
        (first,) = self.store.generations()
        with refused(StoreError):
            self.store.drop(first)
        second = self.begin()
        self.store.embed(second, self.embedded(self.store.pending(second, 10)))
        self.store.drop(second)
        assert self.store.generations() == (first,)
        calls: list[Callable[[], object]] = [
            lambda: self.store.drop(second),
            lambda: self.store.switch(second),
            lambda: self.store.pending(second, 5),
            lambda: self.store.bundle(second),
        ]
        for call in calls:
            with refused(StoreError):
                call()
        self.check()
        # A dropped generation's number is not used again: whoever still has it gets an error.
        third = self.begin()
        assert third.number > second.number
        expected = dict(self.items)
        self.fill(third, expected)
        self.switch(third, self.other, expected)
        self.store.drop(first)
        self.check()
        self.check_reopened()
        assert [generation.number for generation in self.store.generations()] == [third.number]

    def test_a_generation_is_searched_before_it_is_served(self) -> None:
        """`propose_staged` proposes the items that `propose` does once the generation serves."""
        self.create(80)
        if type(self.store).propose_staged is Store.propose_staged:
            raise unittest.SkipTest("The store searches only what it serves.")
        second = self.begin()
        expected = dict(self.items)
        self.fill(second, expected)
        queries = random_vectors(3, self.other.manifest.vector, 1)
        staged = self.store.propose_staged(second, queries, 5)
        self.check()
        self.switch(second, self.other, expected)
        served = self.store.propose(queries, 5, self.other.sha256)
        for before, after in zip(staged, served, strict=True):
            assert len(before.items) >= 5
            ids = [item.id for item in before.items]
            assert ids == [item.id for item in after.items]
            np.testing.assert_array_equal(before.arrays[VECTOR], after.arrays[VECTOR])
        third = self.store.begin(shared_bundle(), widths_of(shared_bundle()))
        if third.state != "served":
            self.store.drop(third)
            with refused(StoreError):
                self.store.propose_staged(third, queries, 5)

    def test_notes(self) -> None:
        """A note is kept with its generation: by snapshots too, and until it is dropped."""
        self.create(5)
        if type(self.store).set_note is Store.set_note:
            raise unittest.SkipTest("The store keeps no notes.")
        (first,) = self.store.generations()
        assert self.store.note(first, CALIBRATION) is None
        content = bytes(range(256)) * 2000
        self.store.set_note(first, CALIBRATION, b"earlier")
        self.store.set_note(first, CALIBRATION, content)
        self.store.set_note(first, "other", b"")
        self.reopen()
        assert self.store.note(first, CALIBRATION) == content
        assert self.store.note(first, "other") == b""
        self.store.snapshot(self.copy)
        with open_index(self.copy, threads=1) as copy:
            assert copy.store.note(copy.generation, CALIBRATION) == content
        second = self.begin()
        assert self.store.note(second, CALIBRATION) is None
        expected = dict(self.items)
        self.fill(second, expected)
        self.switch(second, self.other, expected)
        assert self.store.note(first, CALIBRATION) == content
        self.store.drop(first)
        with refused(StoreError):
            self.store.note(first, CALIBRATION)
        with refused(StoreError):
            self.store.set_note(first, CALIBRATION, content)
        self.check_reopened()
        self.store.close()
        with refused(StoreError, saying="closed"):
            self.store.note(second, CALIBRATION)
