"""Tests that write, read, search and delete items; refused calls change nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.errors import DataError, StoreError
from retrieval.store.contract import (
    CODE,
    VECTOR,
    Generation,
    Item,
    Store,
    Superseded,
    widths_of,
)
from retrieval.store.filters import And, Compare, parse_filter

from retrieval_engines.testing.bench import (
    Bench,
    State,
    alike,
    equal,
    item,
    needs,
    normal,
    refused,
    scanned,
    some,
    together,
)
from retrieval_engines.testing.small_bundles import WIDTH, opened

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
    "wildcards": "%_*?[a]",
    "JSON": '{"a": 1}',
    "an escape": "\\u0000 \\n",
    "a path": "../../x/C:\\y",
    "a number": "1.0",
    "null": "null",
    "the longest id": "\U0001f600" * 1000,
}
"""Valid but unusual text for ids, labels and metadata, by what is unusual."""
HALF = "\ud83d"  # half of a surrogate pair


def _vector(number: float) -> dict[str, Any]:
    return {VECTOR: np.array([number, *[0.0] * (WIDTH - 1)])}


def _deep(levels: int) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for _ in range(levels):
        nested = {"a": nested}
    return nested


def _circle() -> dict[str, Any]:
    circle: dict[str, Any] = {}
    circle["a"] = circle
    return circle


BAD: dict[str, dict[str, Any]] = {
    "a vector too wide": {"arrays": {VECTOR: np.zeros(WIDTH + 1)}},
    "a vector of two dimensions": {"arrays": {VECTOR: np.zeros((1, WIDTH), np.float32)}},
    "no vector": {"arrays": {}},
    "an array of another name": {"arrays": {CODE: np.zeros(WIDTH, np.float32)}},
    "NaN": {"arrays": _vector(np.nan)},
    "infinity": {"arrays": _vector(np.inf)},
    "a number beyond float32": {"arrays": _vector(1e39)},
    "complex numbers": {"arrays": {VECTOR: np.zeros(WIDTH, complex)}},
    "an empty id": {"id": ""},
    "an id too long": {"id": "i" * 1001},
    "an id with NUL": {"id": "a\0b"},
    "an id with half a surrogate pair": {"id": f"a{HALF}"},
    "an id that is a number": {"id": 5},
    "an id that is a list": {"id": []},
    "an id that is None": {"id": None},
    "the id of an item before": {"id": "new"},
    "a label with NUL": {"label": "a\0b"},
    "a label with half a surrogate pair": {"label": HALF},
    "a label that is a number": {"label": 5},
    "metadata that are None": {"metadata": None},
    "metadata that are a list": {"metadata": []},
    "metadata with a set": {"metadata": {"a": {1}}},
    "metadata with NaN": {"metadata": {"a": float("nan")}},
    "metadata with infinity within": {"metadata": {"a": [{"b": float("inf")}]}},
    "metadata with an integer beyond float64": {"metadata": {"a": 10**400}},
    "metadata whose name is a number": {"metadata": {1: 2}},
    "metadata with NUL": {"metadata": {"a": "x\0"}},
    "metadata with half a surrogate pair": {"metadata": {"a": [HALF]}},
    "metadata whose name is half a surrogate pair": {"metadata": {HALF: 1}},
    "metadata too deep": {"metadata": _deep(2000)},
    "metadata in a circle": {"metadata": _circle()},
    "too much metadata": {"metadata": {"a": "x" * 10_000_000}},
    "too long a label": {"label": "x" * 10_000_000},
    "a way of keeping that there is not": {"keep": "all of it"},
    "a stamp with half a surrogate pair": {"stamp": HALF},
    "a stamp that is a number": {"stamp": 5},
    "a path with NUL": {"path": Path("/a\0b")},
    "an original that is text": {"original": "x"},
    "a size beyond 64 bits": {"bytes": 1 << 64},
    "a negative height": {"height": -1},
    "a width that is text": {"width": "wide"},
}
"""Attributes of invalid items, by what is wrong."""


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


class ItemCases(Bench):
    """Tests that write, read, search and delete items, and that invalid calls are refused."""

    def test_items_come_change_and_go(self) -> None:
        """After every write the store has the expected content, even if the newest item changes."""
        store, state = self.store(), State()
        for count in (1, 3, 40):
            self.put(store, state, some(count, len(state)))
            self.check(store, state)
        self.put(store, state, some(20, 10, seed=1))
        self.check(store, state)
        for seed in range(4):
            self.put(store, state, [item("newest", seed)])
            self.check(store, state)
            if seed % 2:
                self.remove(store, state, ["newest"])
                self.check(store, state)
        self.remove(store, state, [f"id {number}" for number in range(0, 40, 3)])
        self.check(store, state)
        self.remove(store, state, sorted(state))
        self.check(self.again(store), state)

    def test_many_items_in_one_call(self) -> None:
        """Single calls add, change and delete many items; the result survives reopening."""
        store, state = self.filled(self.many)
        self.put(store, state, some(100, 100, seed=1))
        self.remove(store, state, [f"id {number}" for number in range(0, self.many, 9)])
        for number in range(10):
            self.put(store, state, [item(f"id {number * 7}", 1, metadata={"price": number})])
            self.remove(store, state, [f"id {number * 11}"])
        self.check(store, state, filter="price = 3 and tags = 'even'")
        self.check(store := self.again(store), state)
        self.put(store, state, some(10, 3, seed=2))
        self.check(store, state, filter="price >= 5")

    def test_an_item_is_kept_as_it_was_given(self) -> None:
        """Every attribute is returned, arrays as float32; nothing of a replaced item remains."""
        full = item(
            "full",
            label="a label",
            metadata={
                "a": {"b": [1, 2.5, None, True, "x", {"c": []}]},
                "é": -0.5,
                "big": 2**53 - 1,
            },
            path=Path("/a folder/a file.jpg").absolute(),
            stamp="12:345",
            keep="copy",
            original=b"\0\xff bytes",
            bytes=8,
            width=640,
            height=480,
        )
        integers: Any = np.arange(WIDTH)
        written = [
            full,
            item("bare"),
            item("empty", label="", original=b""),
            Item("integers", arrays={VECTOR: integers}),
            Item("float64", arrays={VECTOR: integers / 3}),
        ]
        store = self.store()
        store.upsert(written, opened().sha256)
        for _ in range(2):
            for entry in written:
                alike(store.get([entry.id])[entry.id], entry)
                read = store.get([entry.id], arrays=True)[entry.id]
                alike(read, entry)
                equal(set(read.arrays), set(entry.arrays), "arrays that are read")
                equal(store.original(entry.id), entry.original, "original")
            equal(store.original("nobody"), None, "original of an unknown id")
            store = self.again(store)
        store.upsert([item("full", 1, metadata={"é": 3})], opened().sha256)
        alike(store.get(["full"], arrays=True)["full"], item("full", 1, metadata={"é": 3}))
        equal(store.original("full"), None, "original of the one before")
        equal(store.count(parse_filter("big > 1")), 0, "items with metadata of the one before")

    def test_updating_one_item(self) -> None:
        """`update` changes the label, merges metadata, and keeps the rest and the original.

        It refuses invalid values and another bundle, and adds no item.
        """
        store = self.store()
        old = item("a", label="old", metadata={"price": 1}, keep="copy", original=b"bytes")
        store.upsert([old], opened().sha256)
        for changes, label, metadata in (
            ({"label": None}, None, {"price": 1}),
            ({"metadata": {"size": 2}}, None, {"price": 1, "size": 2}),
            ({"label": "", "metadata": {}}, "", {"price": 1, "size": 2}),
            ({"metadata": {"size": None, "a": {"b": 3}}}, "", {"price": 1, "a": {"b": 3}}),
            ({"metadata": {"a": {"c": 4}}}, "", {"price": 1, "a": {"b": 3, "c": 4}}),
        ):
            old = replace(old, label=label, metadata=metadata)
            equal(store.update("a", changes, opened().sha256), True, "whether the item exists")
            alike(store.get(["a"], arrays=True)["a"], old)
            equal(store.original("a"), b"bytes", "original")
        with refused(DataError):
            store.update("a", {"label": HALF}, opened().sha256)
        with refused(Superseded):
            store.update("a", {"label": "new"}, opened(seed=1).sha256)
        equal(store.update("b", {"label": "new"}, opened().sha256), False, "whether it exists")
        self.check(self.again(store), {"a": old})

    def test_ids_are_looked_up_exactly(self) -> None:
        """Case, accents and spaces distinguish ids; unknown and impossible ids are ignored."""
        names = ["a", "A", "a ", "á", "a\u0301", "aa"]
        store, state = self.store(), State()
        self.put(store, state, [item(name) for name in names])
        equal(set(store.get(["A", "A", "b", "á"])), {"A", "á"}, "get")
        for odd in ("a\0", "a\0b", HALF, f"a{HALF}", "", "i" * 5000):
            equal(set(store.get([odd, "A"])), {"A"}, f"get of {odd[:9]!r}")
            equal(store.original(odd), None, f"original of {odd[:9]!r}")
            equal(store.delete([odd]), 0, f"delete of {odd[:9]!r}")
        equal(store.get([]), {}, "get of nothing")
        equal(store.upsert([], opened().sha256), 0, "upsert of nothing")
        equal(store.delete(["a", "a", "b"]), 1, "delete")
        equal(store.delete([]), 0, "delete of nothing")
        equal(set(store.get(names)), set(names[1:]), "what is left")

    def test_any_text(self) -> None:
        """Every method handles any Unicode text in ids, labels and metadata."""
        store, state = self.store(), State()
        items = [item(text, label=text, metadata={"m": text}) for text in TEXTS.values()]
        self.put(store, state, items)
        for _ in range(2):
            self.check(store, state, count=len(state))
            for what, text in TEXTS.items():
                equal(list(store.get([text])), [text], f"get of {what}")
                filter = And((Compare("label", "=", text), Compare(("m",), "=", text)))
                with suppress(*([] if "filters" in store.capabilities else [DataError])):
                    equal([hit.id for hit in store.scan(filter)], [text], f"a filter on {what}")
            store = self.again(store)
        for what, text in TEXTS.items():
            equal(store.delete([text]), 1, f"delete of {what}")
        equal(store.count(), 0, "what is left")

    def test_pages_of_a_scan(self) -> None:
        """Pages are sorted by code points, continue after a deleted id, and end."""
        names = [*TEXTS.values(), *(f"id {number}" for number in range(30))]
        store = self.store()
        store.upsert([item(name) for name in names], opened().sha256)
        for limit in (1, 7, 1000):
            ids = [entry.id for entry in scanned(store, limit=limit)]
            equal(sorted(ids), sorted(names), f"pages of {limit}")
            if "ordered" in store.capabilities:
                equal(ids, sorted(names), f"pages of {limit}")
        store.delete(["id 10"])
        following = ids[ids.index("id 10") + 1 :][:2]
        page = [entry.id for entry in store.scan(after="id 10", limit=2)]
        equal(page, following, "page after a deleted id")
        equal(store.scan(after=ids[-1]), [], "page after the last id")
        assert all(not entry.arrays for entry in store.scan()), "a scan reads no arrays"

    def test_delete_what_matches(self) -> None:
        """`delete` takes a filter, or ids and a filter, and deletes the union of both."""
        store, state = self.filled(60)
        for ids, filter, matches in (
            ([], "price < 3", lambda entry: entry.metadata["price"] < 3),
            (["id 19"], "label = 'kind 1'", lambda e: e.label == "kind 1" or e.id == "id 19"),
            ([], "price = 1000", lambda entry: False),
            ([], "exists(id)", lambda entry: True),
        ):
            gone = [id for id, entry in state.items() if matches(entry)]
            equal(
                store.delete(ids, filter=parse_filter(filter)), len(gone), f"deleted where {filter}"
            )
            state = {id: entry for id, entry in state.items() if id not in gone}
            self.check(store, state)

    def test_one_call_is_seen_whole_or_not_at_all(self) -> None:
        """While one thread replaces all items, each read sees either all old or all new items."""
        store = self.store()
        needs(store, "atomic")
        rounds = [
            [item(f"id {n}", turn, metadata={"round": turn}, label=str(turn)) for n in range(30)]
            for turn in range(12)
        ]
        store.upsert(rounds[0], opened().sha256)
        queries, ids = normal(2, WIDTH, 1), [entry.id for entry in rounds[0]]
        seen: list[set[object]] = []
        stop, began = threading.Event(), threading.Event()

        def read() -> None:
            while not stop.is_set():
                answers = store.search(queries, 30, opened().sha256)
                began.set()
                equal([len(answer) for answer in answers], [30, 30], "items found")
                seen.append({entry.metadata["round"] for answer in answers for entry in answer})
                seen.append({entry.metadata["round"] for entry in store.get(ids).values()})
                seen.append({entry.label for entry in store.scan()})
                equal(store.count(), 30, "count")

        def write() -> None:
            try:
                began.wait(30)  # on a busy machine, readers start late
                for items in rounds[1:]:
                    store.upsert(items, opened().sha256)
            finally:
                stop.set()

        equal(together([write, read, read, read]), [], "faults")
        assert seen, "no reader read anything"
        assert all(len(entry) == 1 for entry in seen), "a reader saw a part of a call"

    # Searches

    def test_few_items_or_none(self) -> None:
        """An empty store returns no hits; a search for too many items returns all that match."""
        store, state = self.store(), State()
        self.check(store, state)
        equal(store.search(normal(0, WIDTH, 0), 5, opened().sha256), [], "answers to no queries")
        equal(store.scan(), [], "scan")
        self.check(store := self.again(store), state)
        self.put(store, state, some(20))
        for count, filter in ((1000, None), (1000, "price < 1"), (1, None), (7, "price = 1000")):
            self.check(store, state, filter=filter, count=count)

    def test_filters(self) -> None:
        """Search, scan, count and delete agree with `filters.matches` on every filter.

        A store without the capability "filters" may refuse some filters.
        """
        extra = [
            {"text": "é", "nested": {"deep": {"flag": True}, "a b": 0}},
            {"text": "e\u0301", "nested": {"deep": {"flag": None}, "a b": -0.5}},
            {"text": "É", "nested": {"deep": {}, "a b": 1e300}},
            {"text": "z", "nested": {"deep": 1}},
            {"text": "\U0001f600", "nested": {}},
        ]
        written = [
            replace(entry, metadata={**entry.metadata, **extra[number % 5]})
            for number, entry in enumerate(some(300))
        ]
        store, state = self.store(), State()
        self.put(store, state, written)
        for filter in FILTERS:
            self.check_filter(store, state, filter)
        self.check(store, state, filter="price < 2", count=3)
        self.put(store, state, [replace(entry, label="kind 2") for entry in written[:40]])
        self.remove(store, state, [f"id {number}" for number in range(50, 100)])
        store = self.again(store)
        for filter in FILTERS[::3]:
            self.check_filter(store, state, filter)

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
        for kind, scale, offset in (("distant", 1, 3000), ("tiny", 1e-12, 0), ("large", 1e12, 0)):
            store, state = self.store(), State()
            moved = [
                Item(f"{kind} {n}", arrays={VECTOR: (vector * scale + offset).astype(np.float32)})
                for n, vector in enumerate(normal(200, WIDTH, 5))
            ]
            self.put(store, state, moved)
            queries = (normal(5, WIDTH, 6) * scale + offset).astype(np.float32)
            self.check_search(store, queries, state, opened(), 7)
            store.close()
            self.store_at(self.place).drop()
            self.place.mkdir(exist_ok=True)

    def test_subspaces(self) -> None:
        """A search proposes the nearest items of each sub-space."""
        bundle = opened(subspaces=True)
        store, state = self.store(bundle), State()
        self.put(store, state, some(300, bundle=bundle), bundle)
        self.check(store, state, bundle)
        self.check(store, state, bundle, filter="price < 3")
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
            assert all(set(entry.arrays) >= {VECTOR, CODE} for entry in hits), "no code"
            equal(set(store.get(["id 3"], arrays=True)["id 3"].arrays), {VECTOR, CODE}, "arrays")
            store = self.again(store)

    # Invalid calls

    def test_what_cannot_be_kept(self) -> None:
        """A call with an invalid item is refused and names that item; nothing changes."""
        store, state = self.filled(5)
        untyped: Any = Item
        for what, attributes in BAD.items():
            bad = untyped(**{"id": "bad", "arrays": _vector(0), **attributes})
            try:
                with refused(DataError):
                    items = [item("new"), item("id 1", 9), bad, item("newer")]
                    store.upsert(items, opened().sha256)
                equal(store.count(), 5, "count")
            except Exception as fault:
                raise AssertionError(f"{what}: {type(fault).__name__}: {fault}") from fault
        with refused(DataError) as texts:
            nan, nul = Item("one", arrays=_vector(np.nan)), Item("three", "\0", arrays=_vector(0))
            store.upsert([nan, item("two"), nul], opened().sha256)
        assert "one" in texts[0] and "three" in texts[0] and "two" not in texts[0], texts[0]
        self.check(store, state)
        self.put(store, state, [item("new")])
        self.check(self.again(store), state)

    def test_a_field_that_no_item_has(self) -> None:
        """A filter on an unknown field is refused, and the error names the field."""
        store, state = self.filled(5)
        filter = parse_filter("price < 3 and prise < 3")
        calls: tuple[Callable[[], object], ...] = (
            lambda: store.search(normal(1, WIDTH, 0), 3, opened().sha256, filter=filter),
            lambda: store.count(filter),
            lambda: store.scan(filter),
            lambda: store.delete(["id 1"], filter=filter),
        )
        for call in calls:
            with refused(DataError, saying="prise"):
                call()
        self.check(store, state)

    def test_a_bundle_that_is_not_served_is_refused(self) -> None:
        """Calls with another bundle are refused, as are queries of another width or with NaN."""
        store, other = self.store(), opened(seed=1)
        for items in ([item("a")], []):
            with refused(Superseded):
                store.upsert(items, other.sha256)
        with refused(Superseded):
            store.search(normal(1, WIDTH, 0), 3, other.sha256)
        equal(store.count(), 0, "count")
        for _ in range(2):
            for bad in (normal(2, WIDTH + 1, 0), normal(2, WIDTH, 0) * np.nan):
                with refused(DataError):
                    store.search(bad, 3, opened().sha256)
            store.upsert(some(5), opened().sha256)

    def test_a_store_that_is_closed(self) -> None:
        """Every method but `close` raises an error, and the index can be opened again."""
        bundle = opened()
        with self.store() as store:
            store.upsert(some(3), bundle.sha256)
            (served,) = store.generations()
        for name, call in _calls(store, served, self.place.parent / "copy").items():
            try:
                with refused(StoreError, saying="closed"):
                    call()
            except AssertionError as fault:
                raise AssertionError(f"{name}: {fault}") from fault
        store.close()
        with self.store_at(self.place).open() as again:
            again.upsert([replace(item("a"), label="b")], bundle.sha256)
            equal(again.count(), 4, "count")


def _calls(store: Store, served: Generation, target: Path) -> dict[str, Callable[[], object]]:
    """Return a function that calls each method of a store, by the method's name."""
    bundle = opened()
    return {
        "upsert": lambda: store.upsert([item("a")], bundle.sha256),
        "update": lambda: store.update("id 1", {"label": "b"}, bundle.sha256),
        "delete": lambda: store.delete(["id 1"]),
        "get": lambda: store.get(["id 1"]),
        "original": lambda: store.original("id 1"),
        "scan": lambda: store.scan(),
        "count": lambda: store.count(),
        "search": lambda: store.search(normal(1, WIDTH, 0), 1, bundle.sha256),
        "generations": lambda: store.generations(),
        "bundle": lambda: store.bundle(served),
        "begin": lambda: store.begin(bundle, widths_of(bundle)),
        "pending": lambda: store.pending(served, 5),
        "embed": lambda: store.embed(served, [], []),
        "switch": lambda: store.switch(served),
        "drop": lambda: store.drop(served),
        "snapshot": lambda: store.snapshot(target),
        "stats": lambda: store.stats(),
    }
