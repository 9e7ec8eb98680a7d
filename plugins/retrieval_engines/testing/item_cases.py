"""Tests that write, read, search and delete items; refused calls change nothing."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.errors import DataError, StoreError
from retrieval.store.contract import CODE, VECTOR, Generation, Item, Superseded, widths_of
from retrieval.store.filters import And, Compare, parse_filter

from retrieval_engines.testing.bench import (
    Bench,
    all_pages,
    check_item,
    numbered_items,
    random_item,
    random_vectors,
    refused,
    run_together,
)
from retrieval_engines.testing.small_bundles import WIDTH, shared_bundle

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
# Half of a surrogate pair.
HALF = "\ud83d"


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


INVALID: dict[str, list[Any]] = {
    "id": [
        "",
        "i" * 1001,
        "a\0b",
        f"a{HALF}",
        5,
        [],
        None,
        # The id of another item of the call.
        "new",
    ],
    "label": [5, "a\0b", HALF, "x" * 10_000_000],
    "metadata": [
        None,
        [],
        {"a": {1}},
        {"a": np.nan},
        {"a": [{"b": np.inf}]},
        # Beyond float64.
        {"a": 10**400},
        {1: 2},
        {"a": "x\0"},
        {"a": [HALF]},
        {HALF: 1},
        _deep(2000),
        _circle(),
        {"a": "x" * 10_000_000},
    ],
    "path": [Path("/a\0b")],
    "stamp": [5, HALF],
    "keep": ["all of it"],
    "original": ["x"],
    "bytes": [1 << 64],
    "width": ["wide"],
    "height": [-1],
    "arrays": [
        {},
        {CODE: np.zeros(WIDTH, np.float32)},
        {VECTOR: np.zeros(WIDTH + 1)},
        {VECTOR: np.zeros((1, WIDTH), np.float32)},
        {VECTOR: np.zeros(WIDTH, complex)},
        _vector(np.nan),
        _vector(np.inf),
        # Beyond float32.
        _vector(1e39),
    ],
}
"""Invalid values by an item's attribute."""


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
        self.create()
        for count in (1, 3, 40):
            self.put(numbered_items(count, len(self.items)))
            self.check()
        self.put(numbered_items(20, 10, seed=1))
        self.check()
        for seed in range(4):
            self.put([random_item("newest", seed)])
            self.check()
            if seed % 2:
                self.remove(["newest"])
                self.check()
        self.remove([f"id {number}" for number in range(0, 40, 3)])
        self.check()
        self.remove(sorted(self.items))
        self.check_reopened()

    def test_many_items_in_one_call(self) -> None:
        """Single calls add, change and delete many items; the result survives reopening."""
        self.create(self.many)
        self.put(numbered_items(100, 100, seed=1))
        self.remove([f"id {number}" for number in range(0, self.many, 9)])
        for number in range(10):
            self.put([random_item(f"id {number * 7}", 1, metadata={"price": number})])
            self.remove([f"id {number * 11}"])
        self.check("price = 3 and tags = 'even'")
        self.check_reopened()
        self.put(numbered_items(10, 3, seed=2))
        self.check("price >= 5")

    def test_an_item_is_kept_as_it_was_given(self) -> None:
        """Every attribute is returned, arrays as float32; nothing of a replaced item remains."""
        metadata = {
            "a": {"b": [1, 2.5, None, True, "x", {"c": []}]},
            "é": -0.5,
            "big": 2**53 - 1,
        }
        full = random_item(
            "full",
            label="a label",
            metadata=metadata,
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
            random_item("bare"),
            random_item("empty", label="", original=b""),
            Item("integers", arrays={VECTOR: integers}),
            Item("float64", arrays={VECTOR: integers / 3}),
        ]
        self.create()
        self.put(written)
        for _ in range(2):
            for item in written:
                check_item(self.store.get([item.id])[item.id], item)
                read = self.store.get([item.id], arrays=True)[item.id]
                check_item(read, item)
                assert read.arrays.keys() == item.arrays.keys()
                assert self.store.original(item.id) == item.original
            assert self.store.original("nobody") is None
            self.reopen()
        full = random_item("full", 1, metadata={"é": 3})
        self.put([full])
        check_item(self.store.get(["full"], arrays=True)["full"], full)
        assert self.store.original("full") is None
        # The field is known although the only item that had it was replaced.
        assert self.store.count(parse_filter("big > 1")) == 0

    def test_updating_one_item(self) -> None:
        """`update` changes the label, merges metadata, and keeps the rest and the original.

        It refuses invalid values and another bundle, and adds no item.
        """
        self.create()
        item = random_item("a", label="old", metadata={"price": 1}, keep="copy", original=b"bytes")
        self.put([item])
        for changes, label, metadata in (
            ({"label": None}, None, {"price": 1}),
            ({"metadata": {"size": 2}}, None, {"price": 1, "size": 2}),
            ({"label": "", "metadata": {}}, "", {"price": 1, "size": 2}),
            ({"metadata": {"size": None, "a": {"b": 3}}}, "", {"price": 1, "a": {"b": 3}}),
            ({"metadata": {"a": {"c": 4}}}, "", {"price": 1, "a": {"b": 3, "c": 4}}),
        ):
            self.items["a"] = replace(item, label=label, metadata=metadata)
            assert self.store.update(["a"], changes, self.bundle.sha256) == 1
            check_item(self.store.get(["a"], arrays=True)["a"], self.items["a"])
            assert self.store.original("a") == b"bytes"
        with refused(DataError):
            self.store.update(["a"], {"label": HALF}, self.bundle.sha256)
        with refused(Superseded):
            self.store.update(["a"], {"label": "new"}, shared_bundle(seed=1).sha256)
        assert not self.store.update(["b"], {"label": "new"}, self.bundle.sha256)
        self.check_reopened()

    def test_updating_all_that_match_a_filter(self) -> None:
        """`update` changes named and matching items, although the change decides what matches.

        More items match than a page or a block has. An "atomic" store changes all or none.
        """
        self.create()
        for n in range(40):
            metadata = {"price": n, "sold": False}
            item = random_item(f"i{n:02}", label="old", metadata=metadata, keep="copy")
            self.put([replace(item, original=b"x" * (n + 1))])
        filter = parse_filter("sold = false and price < 35")
        changes = {"label": "new", "metadata": {"sold": True, "on": "today"}}
        assert self.store.update(["i37", "none"], changes, self.bundle.sha256, filter=filter) == 36
        for n in (*range(35), 37):
            item = self.items[f"i{n:02}"]
            merged = {**item.metadata, "sold": True, "on": "today"}
            self.items[item.id] = replace(item, label="new", metadata=merged)
        for id, item in self.store.get(self.items, arrays=True).items():
            check_item(item, self.items[id])
            assert self.store.original(id) == self.items[id].original
        assert not self.store.update((), changes, self.bundle.sha256, filter=filter)
        with refused(DataError):
            sold = parse_filter("sold = true")
            self.store.update((), {"label": HALF}, self.bundle.sha256, filter=sold)
        self.check_reopened()

    def test_ids_are_looked_up_exactly(self) -> None:
        """Case, accents and spaces distinguish ids; unknown and impossible ids are ignored."""
        ids = ["a", "A", "a ", "á", "a\u0301", "aa"]
        self.create()
        self.put(list(map(random_item, ids)))
        assert self.store.get(["A", "A", "b", "á"]).keys() == {"A", "á"}
        for id in ("a\0", "a\0b", HALF, f"a{HALF}", "", "i" * 5000):
            assert self.store.get([id, "A"]).keys() == {"A"}
            assert self.store.original(id) is None
            assert self.store.delete([id]) == 0
        assert self.store.get([]) == {}
        assert self.store.upsert([], self.bundle.sha256) == 0
        assert self.store.delete(["a", "a", "b"]) == 1
        assert self.store.delete([]) == 0
        assert self.store.get(ids).keys() == set(ids[1:])

    def test_any_text(self) -> None:
        """Every method handles any Unicode text in ids, labels and metadata."""
        self.create()
        self.put([random_item(text, label=text, metadata={"m": text}) for text in TEXTS.values()])
        for _ in range(2):
            self.check(count=len(TEXTS))
            for kind, text in TEXTS.items():
                assert list(self.store.get([text])) == [text], kind
                filter = And((Compare("label", "=", text), Compare(("m",), "=", text)))
                with self.may_refuse():
                    assert [item.id for item in self.store.scan(filter)] == [text], kind
            self.reopen()
        for kind, text in TEXTS.items():
            assert self.store.delete([text]) == 1, kind
        assert self.store.count() == 0

    def test_pages_of_a_scan(self) -> None:
        """Pages are sorted by code points, continue after a deleted id, and end."""
        expected = sorted([*TEXTS.values(), *(f"id {number}" for number in range(30))])
        self.create()
        self.put(list(map(random_item, expected)))
        for limit in (1, 7, 1000):
            ids = [item.id for item in all_pages(self.store, limit=limit)]
            assert sorted(ids) == expected, f"pages of {limit}"
            if "ordered" in self.store.capabilities:
                assert ids == expected, f"pages of {limit}"
        self.store.delete(["id 10"])
        row = ids.index("id 10")
        page = [item.id for item in self.store.scan(after="id 10", limit=2)]
        assert page == ids[row + 1 : row + 3]
        assert self.store.scan(after=ids[-1]) == []
        assert not any(item.arrays for item in self.store.scan()), "a scan reads arrays"

    def test_delete_what_matches(self) -> None:
        """`delete` takes a filter, or ids and a filter, and deletes the union of both."""
        self.create(60)
        for ids, filter, is_deleted in (
            ([], "price < 3", lambda item: item.metadata["price"] < 3),
            (["id 19"], "label = 'kind 1'", lambda i: i.label == "kind 1" or i.id == "id 19"),
            ([], "price = 1000", lambda item: False),
            ([], "exists(id)", lambda item: True),
        ):
            deleted = [id for id, item in self.items.items() if is_deleted(item)]
            assert self.store.delete(ids, filter=parse_filter(filter)) == len(deleted), filter
            for id in deleted:
                del self.items[id]
            self.check()

    def test_one_call_is_seen_whole_or_not_at_all(self) -> None:
        """While one thread replaces all items, each read sees either all old or all new items."""
        self.create()
        self.need("atomic")
        ids = [f"id {number}" for number in range(30)]

        def put(turn: int) -> None:
            metadata = {"round": turn}
            items = [random_item(id, turn, metadata=metadata, label=str(turn)) for id in ids]
            self.store.upsert(items, self.bundle.sha256)

        put(0)
        queries = random_vectors(2, WIDTH, 1)
        seen: list[set[object]] = []
        has_read = threading.Event()
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                answers = self.search(queries, 30)
                has_read.set()
                assert [len(hits) for hits in answers] == [30, 30]
                seen.append({item.metadata["round"] for hits in answers for item in hits})
                seen.append({item.metadata["round"] for item in self.store.get(ids).values()})
                seen.append({item.label for item in self.store.scan()})
                assert self.store.count() == 30

        def write() -> None:
            try:
                # On a busy machine, readers start late.
                has_read.wait(30)
                for turn in range(1, 12):
                    put(turn)
            finally:
                stop.set()

        assert run_together(write, read, read, read) == []
        assert seen, "no reader read anything"
        assert all(len(rounds) == 1 for rounds in seen), "a reader saw a part of a call"

    def test_words(self) -> None:
        """Words of labels and metadata rank items; a store that keeps none says so."""
        self.create(20)
        if "words" not in self.store.capabilities:
            with refused(StoreError):
                self.store.keep_words()
            with refused(DataError):
                self.store.search_words("kind", 3)
            assert not self.store.keeps_words()
            return
        self.store.keep_words()
        self.put([random_item("new", label="Red mug", metadata={"size": 42, "a": ["dark blue"]})])
        self.put([random_item("id 3", label="red")])
        self.remove(["id 4"])
        label = self.items["id 5"].label
        assert label is not None
        alike = {id for id, item in self.items.items() if item.label == label}
        for _ in range(2):
            assert self.store.keeps_words()
            for text, ids in (("MUG, red?", ["new", "id 3"]), ("42 blue", ["new"]), ("size", [])):
                assert [id for id, _ in self.store.search_words(text, 5)] == ids, text
            assert alike <= {id for id, _ in self.store.search_words(label, 100)}
            filter = Compare("id", "=", "id 5")
            assert [id for id, _ in self.store.search_words(label, 9, filter=filter)] == ["id 5"]
            self.reopen()

    # Searches

    def test_few_items_or_none(self) -> None:
        """An empty store returns no hits; a search for too many items returns all that match."""
        self.create()
        self.check()
        assert self.search(random_vectors(0, WIDTH, 0), 5) == []
        assert self.store.scan() == []
        self.check_reopened()
        self.put(numbered_items(20))
        self.check(count=1000)
        self.check("price < 1", count=1000)
        self.check(count=1)
        self.check("price = 1000")

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
            replace(item, metadata={**item.metadata, **extra[number % 5]})
            for number, item in enumerate(numbered_items(300))
        ]
        self.create()
        self.put(written)
        for filter in FILTERS:
            with self.may_refuse():
                self.check(filter)
        self.check("price < 2", count=3)
        self.put([replace(item, label="kind 2") for item in written[:40]])
        self.remove([f"id {number}" for number in range(50, 100)])
        self.reopen()
        for filter in FILTERS[::3]:
            with self.may_refuse():
                self.check(filter)

    def test_equal_vectors(self) -> None:
        """If many items have equal vectors, a search still proposes the requested number."""
        self.create()
        vectors = random_vectors(1, WIDTH, 0)
        self.put([Item(f"same {number}", arrays={VECTOR: vectors[0]}) for number in range(50)])
        (hits,) = self.search(vectors, 7)
        assert len({item.id for item in hits}) == 7

    def test_large_small_and_distant_numbers(self) -> None:
        """Searches of large, tiny and distant vectors return the nearest items in float64."""
        for kind, scale, offset in (("distant", 1, 3000), ("tiny", 1e-12, 0), ("large", 1e12, 0)):
            self.create()
            vectors = (random_vectors(200, WIDTH, 5) * scale + offset).astype(np.float32)
            queries = (random_vectors(5, WIDTH, 6) * scale + offset).astype(np.float32)
            self.put(
                [
                    Item(f"{kind} {number}", arrays={VECTOR: vector})
                    for number, vector in enumerate(vectors)
                ]
            )
            self.check_search(queries, self.items, 7)
            self.store.close()
            self.store_at(self.place).drop()
            # A store may have deleted the folder with the index.
            self.place.mkdir(exist_ok=True)

    def test_subspaces(self) -> None:
        """A search proposes the nearest items of each sub-space."""
        self.create(bundle=shared_bundle(subspaces=True))
        self.put(numbered_items(300, bundle=self.bundle))
        self.check()
        self.check("price < 3")
        self.check_reopened()

    def test_codes(self) -> None:
        """The hits of a search have the codes that a rescorer needs."""
        self.create(bundle=shared_bundle(rescorer=True))
        self.put(numbered_items(60, bundle=self.bundle))
        self.put([random_item("id 3", 1, self.bundle)])
        for _ in range(2):
            self.check()
            (hits,) = self.search(random_vectors(1, WIDTH, 1), 5)
            assert all(item.arrays.keys() >= {VECTOR, CODE} for item in hits), "no code"
            assert self.store.get(["id 3"], arrays=True)["id 3"].arrays.keys() == {VECTOR, CODE}
            self.reopen()

    # Invalid calls

    def test_what_cannot_be_kept(self) -> None:
        """A call with an invalid item is refused and names that item; nothing changes."""
        self.create(5)
        # The attributes have types that mypy would refuse, too.
        make_item: Any = Item
        for name, values in INVALID.items():
            for value in values:
                invalid = make_item(**{"id": "bad", "arrays": _vector(0), name: value})
                items = [random_item("new"), random_item("id 1", 9), invalid, random_item("newer")]
                try:
                    with refused(DataError):
                        self.store.upsert(items, self.bundle.sha256)
                    assert self.store.count() == 5
                except Exception as error:
                    # `reprlib` shortens long values, and ends at the depth of nested ones.
                    text = f"{name} = {reprlib.repr(value)}: {type(error).__name__}: {error}"
                    raise AssertionError(text) from error
        with refused(DataError) as texts:
            nan = Item("one", arrays=_vector(np.nan))
            nul = Item("three", "\0", arrays=_vector(0))
            self.store.upsert([nan, random_item("two"), nul], self.bundle.sha256)
        assert "one" in texts[0] and "three" in texts[0] and "two" not in texts[0], texts[0]
        self.check()
        self.put([random_item("new")])
        self.check_reopened()

    def test_a_field_that_no_item_has(self) -> None:
        """A filter on an unknown field is refused, and the error names the field."""
        self.create(5)
        store = self.store
        query = random_vectors(1, WIDTH, 0)
        filter = parse_filter("price < 3 and prise < 3")
        calls: list[Callable[[], object]] = [
            lambda: store.search(query, 3, self.bundle.sha256, filter=filter),
            lambda: store.count(filter),
            lambda: store.scan(filter),
            lambda: store.delete(["id 1"], filter=filter),
        ]
        for call in calls:
            with refused(DataError, saying="prise"):
                call()
        self.check()

    def test_a_bundle_that_is_not_served_is_refused(self) -> None:
        """Calls with another bundle are refused, as are queries of another width or with NaN."""
        self.create()
        other = shared_bundle(seed=1)
        for items in ([random_item("a")], []):
            with refused(Superseded):
                self.store.upsert(items, other.sha256)
        with refused(Superseded):
            self.store.search(random_vectors(1, WIDTH, 0), 3, other.sha256)
        assert self.store.count() == 0
        # Without items, and with some.
        for _ in range(2):
            for queries in (random_vectors(2, WIDTH + 1, 0), random_vectors(2, WIDTH, 0) * np.nan):
                with refused(DataError):
                    self.search(queries, 3)
            self.put(numbered_items(5))

    def test_a_store_that_is_closed(self) -> None:
        """Every method but `close` raises an error, and the index can be opened again."""
        self.create(3)
        (served,) = self.store.generations()
        self.store.close()
        for name, call in self._calls(served).items():
            try:
                with refused(StoreError, saying="closed"):
                    call()
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error
        self.store.close()
        self.reopen()
        self.put([replace(random_item("a"), label="b")])
        assert self.store.count() == 4

    def _calls(self, served: Generation) -> dict[str, Callable[[], object]]:
        """Return a call of each method of the store, by the method's name."""
        store = self.store
        bundle = self.bundle.sha256
        return {
            "upsert": lambda: store.upsert([random_item("a")], bundle),
            "update": lambda: store.update(["id 1"], {"label": "b"}, bundle),
            "delete": lambda: store.delete(["id 1"]),
            "get": lambda: store.get(["id 1"]),
            "original": lambda: store.original("id 1"),
            "scan": store.scan,
            "count": store.count,
            "search": lambda: store.search(random_vectors(1, WIDTH, 0), 1, bundle),
            "generations": store.generations,
            "bundle": lambda: store.bundle(served),
            "begin": lambda: store.begin(self.bundle, widths_of(self.bundle)),
            "pending": lambda: store.pending(served, 5),
            "embed": lambda: store.embed(served, [], []),
            "switch": lambda: store.switch(served),
            "drop": lambda: store.drop(served),
            "snapshot": lambda: store.snapshot(self.copy),
            "stats": store.stats,
        }
