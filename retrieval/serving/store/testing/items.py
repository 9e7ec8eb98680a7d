"""Cases: items come, change, go, and are read."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.serving.filters import And, Compare, parse_filter
from retrieval.serving.store.contract import VECTOR, Item
from retrieval.serving.store.testing.bench import (
    Bench,
    State,
    alike,
    equal,
    item,
    needs,
    normal,
    scanned,
    some,
)
from retrieval.serving.store.testing.bundles import WIDTH, opened

TEXTS = {
    "combining": "e\u0301 and \u00e9 are two texts",
    "right to left": "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "marks of direction": "\u202eabc\u202c\u200f",
    "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308",
    "four bytes": "\U00020bb7\U0010fffd",
    "beyond the planes' first": "\uffff\ufffe\U00010000",
    "control characters": "\x01\t\r\n\x1b[2J\x7f\x85",
    "separators": "a\u2028b\u2029c\u00a0d",
    "quotes": "'; drop table items; -- \"\\",
    "spaces": "  a  ",
    "one space": " ",
    "wildcards": "%_*?[a]",
    "JSON": '{"a": 1}',
    "an escape": "\\u0000 \\n",
    "a path": "../../x/C:\\y",
    "a number": "1.0",
    "null": "null",
}
"""Texts that an id, a label and metadata may be, by what is odd about them."""


class ItemCases(Bench):
    """Writing and reading items."""

    def test_items_come_change_and_go(self) -> None:
        """After every write everything is as it should be."""
        store, state = self.store(), State()
        for count in (1, 3, 40):
            self.put(store, state, some(count, len(state)))
            self.check(store, state)
        self.put(store, state, some(20, 10, seed=1))
        self.check(store, state)
        self.remove(store, state, [f"id {number}" for number in range(0, 40, 3)])
        self.check(store, state)
        self.remove(store, state, sorted(state))
        self.check(store, state)

    def test_the_newest_item_changes(self) -> None:
        """The last item is replaced and deleted, again and again, with a search after each write."""
        store, state = self.store(), State()
        self.put(store, state, some(3))
        for seed in range(5):
            self.put(store, state, [item("newest", seed)])
            self.check(store, state)
            if seed % 2:
                self.remove(store, state, ["newest"])
                self.check(store, state)

    def test_many_items_in_one_call(self) -> None:
        """Ten thousand in one call, unless a subclass has another number, some of which change and go afterwards."""
        store, state = self.store(), State()
        self.put(store, state, some(self.many))
        self.put(store, state, some(100, 500, seed=1))
        self.remove(store, state, [f"id {number}" for number in range(0, self.many, 9)])
        self.check(store, state)
        self.check(store, state, where="price = 3 and tags = 'even'")

    def test_an_item_is_kept_as_it_was_given(self) -> None:
        """Every attribute comes back, and an item without them has none."""
        full = item(
            "full",
            label="a label",
            metadata={"a": {"b": [1, 2.5, None, True, "text", {"c": []}]}, "é": -0.5, "big": 2**53 - 1},
            path=Path("/a folder/a file.jpg").absolute(),
            stamp="12:345",
            keep="copy",
            original=b"\0\xff bytes",
            bytes=8,
            width=640,
            height=480,
        )
        bare, empty = item("bare"), item("empty", label="", original=b"")
        store = self.store()
        store.upsert([full, bare, empty], opened().sha256)
        for _ in range(2):
            for given in (full, bare, empty):
                alike(store.get([given.id])[given.id], given)
                read = store.get([given.id], arrays=True)[given.id]
                alike(read, given)
                equal(set(read.arrays), set(given.arrays), "arrays that are read")
                equal(store.original(given.id), given.original, "original")
            equal(store.original("nobody"), None, "original of an unknown id")
            store = self.again(store)

    def test_another_item_takes_the_whole_place(self) -> None:
        """Nothing of the one before is left."""
        store, state = self.store(), State()
        self.put(store, state, [item("a", label="x", metadata={"m": 1, "n": 2}, original=b"old", stamp="s")])
        self.put(store, state, [item("a", 1, metadata={"n": 3})])
        self.check(store, state)
        equal(store.original("a"), None, "original of the one before")
        equal(store.count(parse_filter("m = 1")), 0, "items with metadata of the one before")

    def test_ids_are_looked_up_exactly(self) -> None:
        """Case, accents and spaces tell ids apart; an id twice is one; unknown ids are passed over."""
        names = ["a", "A", "a ", "á", "a\u0301", "aa"]
        store, state = self.store(), State()
        self.put(store, state, [item(name) for name in names])
        equal(set(store.get(["A", "A", "b", "á"])), {"A", "á"}, "get")
        equal(store.get([]), {}, "get of nothing")
        equal(store.delete(["a", "a", "b"]), 1, "delete")
        equal(store.delete([]), 0, "delete of nothing")
        equal(set(store.get(names)), set(names[1:]), "what is left")

    def test_any_text(self) -> None:
        """Ids, labels and metadata of any Unicode, through every call, and after reopening."""
        state = State()
        store = self.store()
        self.put(store, state, [item(text, label=text, metadata={"m": text}) for text in TEXTS.values()])
        for _ in range(2):
            self.check(store, state, count=len(state))
            for what, text in TEXTS.items():
                equal(list(store.get([text])), [text], f"get of {what}")
                found = store.scan(And((Compare("label", "=", text), Compare(("m",), "=", text))))
                equal([each.id for each in found], [text], f"a filter on {what}")
            store = self.again(store)
        for what, text in TEXTS.items():
            equal(store.delete([text]), 1, f"delete of {what}")
        equal(store.count(), 0, "what is left")

    def test_the_longest_id(self) -> None:
        """A thousand characters of four bytes each."""
        store, state = self.store(), State()
        self.put(store, state, [item("\U0001f600" * 1000), item("\U0001f600" * 999)])
        self.check(store, state)

    def test_pages_of_a_scan(self) -> None:
        """Pages come in the order of code points, go on behind an id that is gone, and end."""
        names = ["", *TEXTS.values(), *(f"id {number}" for number in range(30))][1:]
        store = self.store()
        store.upsert([item(name) for name in names], opened().sha256)
        for limit in (1, 7, 1000):
            ids = [one.id for one in scanned(store, limit=limit)]
            equal(sorted(ids), sorted(names), f"pages of {limit}")
            if "ordered" in store.capabilities:
                equal(ids, sorted(names), f"pages of {limit}")
        store.delete(["id 10"])
        behind = ids[ids.index("id 10") + 1 :][:2]
        equal([one.id for one in store.scan(after="id 10", limit=2)], behind, "behind one that is gone")
        equal(store.scan(after=ids[-1]), [], "behind the last")
        assert all(not one.arrays for one in store.scan()), "a scan reads no arrays"

    def test_delete_what_matches(self) -> None:
        """By a filter, and by ids and a filter: either."""
        store, state = self.store(), State()
        self.put(store, state, some(60))
        gone = [id for id, one in state.items() if one.metadata["price"] < 3]
        equal(store.delete(where=parse_filter("price < 3")), len(gone), "deleted by a filter")
        state = {id: one for id, one in state.items() if id not in gone}
        self.check(store, state)
        gone = [id for id, one in state.items() if one.label == "kind 1" or id == "id 19"]
        equal(store.delete(["id 19"], where=parse_filter("label = 'kind 1'")), len(gone), "deleted by both")
        self.check(store, {id: one for id, one in state.items() if id not in gone})

    def test_numbers_of_other_types(self) -> None:
        """Arrays of integers and of float64 are kept as float32."""
        store = self.store()
        untyped: Any = Item
        given: list[Any] = [
            untyped("int", arrays={VECTOR: np.arange(WIDTH)}),
            untyped("float64", arrays={VECTOR: np.arange(WIDTH) / 3}),
        ]
        store.upsert(given, opened().sha256)
        for id, read in store.get(["int", "float64"], arrays=True).items():
            alike(read, next(one for one in given if one.id == id))

    def test_what_was_written_is_there_after_reopening(self) -> None:
        """Items in every state: new, changed, deleted, by one call and by many."""
        store, state = self.store(), State()
        self.put(store, state, some(self.kept))
        for number in range(20):
            self.put(store, state, [item(f"id {number * 7}", 1, metadata={"price": number})])
            self.remove(store, state, [f"id {number * 11}"])
        self.check(store := self.again(store), state)
        self.put(store, state, some(10, 3, seed=2))
        self.check(store := self.again(store), state)
        self.check(store, state, where="price >= 5")

    def test_one_call_is_seen_whole_or_not_at_all(self) -> None:
        """Threads that read while another replaces all items see either all old ones or all new ones."""
        store = self.store()
        needs(store, "atomic")
        rounds = [
            [replace(one, metadata={"round": number}, label=str(number)) for one in some(30, seed=number)]
            for number in range(12)
        ]
        store.upsert(rounds[0], opened().sha256)
        queries, ids = normal(2, WIDTH, 1), [one.id for one in rounds[0]]
        seen: list[set[object]] = []
        faults: list[BaseException] = []
        stop = threading.Event()

        def read() -> None:
            try:
                while not stop.is_set():
                    found = store.search(queries, 30, opened().sha256)
                    equal([len(one) for one in found], [30, 30], "items found")
                    seen.append({one.metadata["round"] for answer in found for one in answer})
                    seen.append({one.metadata["round"] for one in store.get(ids).values()})
                    seen.append({one.label for one in store.scan()})
                    equal(store.count(), 30, "count")
            except BaseException as fault:  # shown by the thread that waits
                faults.append(fault)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for items in rounds[1:]:
            store.upsert(items, opened().sha256)
        stop.set()
        for reader in readers:
            reader.join()
        if faults:
            raise faults[0]
        assert seen, "no reader came to read"
        assert all(len(one) == 1 for one in seen), "a reader saw a part of a call"
