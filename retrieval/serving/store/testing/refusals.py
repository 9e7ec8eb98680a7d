"""Cases: what is refused, in a sentence, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DataError, StoreError
from retrieval.serving.filters import parse_filter
from retrieval.serving.store.contract import CODE, VECTOR, Item, Store, Superseded, widths_of
from retrieval.serving.store.testing.bench import Bench, State, equal, item, normal, refused, some
from retrieval.serving.store.testing.bundles import WIDTH, opened

HALF = "\ud83d"  # of a surrogate pair


def _vector(*numbers: float, width: int = WIDTH) -> dict[str, Any]:
    return {VECTOR: np.array([*numbers, *[0.0] * (width - len(numbers))])}


def _deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


def _circle() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["a"] = found
    return found


_UNTYPED: Any = Item
BAD: dict[str, Item] = {
    "a vector too narrow": Item("bad", arrays=_vector(width=WIDTH - 1)),
    "a vector too wide": Item("bad", arrays=_vector(width=WIDTH + 1)),
    "a vector of two dimensions": Item("bad", arrays={VECTOR: np.zeros((1, WIDTH), np.float32)}),
    "no vector": Item("bad"),
    "an array of another name": Item("bad", arrays={CODE: np.zeros(WIDTH, np.float32)}),
    "NaN": Item("bad", arrays=_vector(np.nan)),
    "infinity": Item("bad", arrays=_vector(np.inf)),
    "negative infinity": Item("bad", arrays=_vector(-np.inf)),
    "a number beyond float32": Item("bad", arrays=_vector(1e39)),
    "complex numbers": Item("bad", arrays={VECTOR: np.zeros(WIDTH, complex)}),
    "texts for numbers": Item("bad", arrays={VECTOR: np.full(WIDTH, "1")}),
    "an empty id": Item("", arrays=_vector()),
    "an id too long": Item("i" * 1001, arrays=_vector()),
    "an id of a million characters": Item("i" * 1_000_000, arrays=_vector()),
    "an id with NUL": Item("a\0b", arrays=_vector()),
    "an id with half a surrogate pair": Item(f"a{HALF}", arrays=_vector()),
    "an id that is a number": _UNTYPED(5, arrays=_vector()),
    "an id that is a list": _UNTYPED([], arrays=_vector()),
    "an id that is None": _UNTYPED(None, arrays=_vector()),
    "a label with NUL": Item("bad", "a\0b", arrays=_vector()),
    "a label with half a surrogate pair": Item("bad", HALF, arrays=_vector()),
    "a label that is a number": _UNTYPED("bad", 5, arrays=_vector()),
    "metadata that are None": _UNTYPED("bad", None, None, arrays=_vector()),
    "metadata that are a list": _UNTYPED("bad", None, [], arrays=_vector()),
    "metadata with a set": Item("bad", None, {"a": {1}}, arrays=_vector()),
    "metadata with bytes": Item("bad", None, {"a": b"x"}, arrays=_vector()),
    "metadata with NaN": Item("bad", None, {"a": float("nan")}, arrays=_vector()),
    "metadata with infinity within": Item("bad", None, {"a": [{"b": float("inf")}]}, arrays=_vector()),
    "metadata with an integer beyond float64": Item("bad", None, {"a": 10**400}, arrays=_vector()),
    "metadata whose name is a number": _UNTYPED("bad", None, {1: 2}, arrays=_vector()),
    "metadata with NUL": Item("bad", None, {"a": "x\0"}, arrays=_vector()),
    "metadata with half a surrogate pair": Item("bad", None, {"a": [HALF]}, arrays=_vector()),
    "metadata whose name is half a surrogate pair": Item("bad", None, {HALF: 1}, arrays=_vector()),
    "metadata too deep": Item("bad", None, _deep(2000), arrays=_vector()),
    "metadata in a circle": Item("bad", None, _circle(), arrays=_vector()),
    "too much metadata": Item("bad", None, {"a": "x" * 10_000_000}, arrays=_vector()),
    "too long a label": Item("bad", "x" * 10_000_000, arrays=_vector()),
    "a way of keeping that there is not": _UNTYPED("bad", keep="all of it", arrays=_vector()),
    "a stamp with half a surrogate pair": Item("bad", stamp=HALF, arrays=_vector()),
    "a stamp that is a number": _UNTYPED("bad", stamp=5, arrays=_vector()),
    "a path with NUL": Item("bad", path=Path("/a\0b"), arrays=_vector()),
    "an original that is text": _UNTYPED("bad", original="x", arrays=_vector()),
    "a size beyond 64 bits": Item("bad", bytes=1 << 64, arrays=_vector()),
    "a width that is text": _UNTYPED("bad", width="wide", arrays=_vector()),
    "a negative height": Item("bad", height=-1, arrays=_vector()),
}
"""Items that no store keeps, by what is wrong with them."""


class RefusalCases(Bench):
    """Bad input, and calls at the wrong time."""

    def test_what_cannot_be_kept(self) -> None:
        """A bad item among good ones is refused, and nothing has changed; the next call is as good as ever."""
        store, state = self.store(), State()
        self.put(store, state, some(5))
        for what, bad in BAD.items():
            try:
                with refused(DataError):
                    store.upsert([item("new"), item("id 1", 9), bad, item("newer")], opened().sha256)
                equal(store.count(), 5, "count")
            except Exception as fault:
                raise AssertionError(f"{what}: {type(fault).__name__}: {fault}") from fault
        self.check(store, state)
        self.put(store, state, [item("new")])
        self.check(self.again(store), state)

    def test_every_bad_item_is_named(self) -> None:
        """All that is wrong with a call is said at once."""
        store = self.store()
        with refused(DataError) as told:
            store.upsert(
                [Item("one", arrays=_vector(np.nan)), item("two"), Item("three", "\0", arrays=_vector())],
                opened().sha256,
            )
        assert "one" in told[0] and "three" in told[0] and "two" not in told[0], told[0]

    def test_an_id_twice_in_a_call(self) -> None:
        """It is not said which should win, so neither is kept."""
        store = self.store()
        with refused(DataError, saying="twice"):
            store.upsert([item("twice"), item("other"), item("twice", 1)], opened().sha256)
        equal(store.count(), 0, "count")

    def test_ids_that_no_item_can_have(self) -> None:
        """They are looked up like any unknown id: nothing is there."""
        store = self.store()
        store.upsert([item("a"), item("b")], opened().sha256)
        for odd in ("a\0", "a\0b", HALF, f"a{HALF}", "", "i" * 5000):
            equal(set(store.get([odd, "b"])), {"b"}, f"get of {odd[:9]!r}")
            equal(store.original(odd), None, f"original of {odd[:9]!r}")
            equal(store.delete([odd]), 0, f"delete of {odd[:9]!r}")
        equal(store.count(), 2, "count")

    def test_nothing_to_add(self) -> None:
        """No items are no fault."""
        equal(self.store().upsert([], opened().sha256), 0, "replaced")

    def test_a_field_that_no_item_has(self) -> None:
        """A filter that names one is refused, and says which."""
        store, state = self.store(), State()
        self.put(store, state, some(5))
        where = parse_filter("price < 3 and prise < 3")
        calls: dict[str, Callable[[], object]] = {
            "search": lambda: store.search(normal(1, WIDTH, 0), 3, opened().sha256, where=where),
            "count": lambda: store.count(where),
            "scan": lambda: store.scan(where),
            "delete": lambda: store.delete(["id 1"], where=where),
        }
        for call in calls.values():
            with refused(DataError, saying="prise"):
                call()
        self.check(store, state)

    def test_another_bundle(self) -> None:
        """What was embedded or encoded with a bundle that is not served is refused as superseded."""
        store, other = self.store(), opened(seed=1)
        with refused(Superseded):
            store.upsert([item("a")], other.sha256)
        with refused(Superseded):
            store.search(normal(1, WIDTH, 0), 3, other.sha256)
        equal(store.count(), 0, "count")

    def test_queries_that_cannot_be_searched(self) -> None:
        """Of another width, or not finite."""
        store = self.store()
        for count in (0, 5):
            if count:
                store.upsert(some(count), opened().sha256)
            for bad in (normal(2, WIDTH + 1, 0), normal(2, WIDTH - 1, 0), normal(2, WIDTH, 0) * np.nan):
                with refused(DataError):
                    store.search(bad, 3, opened().sha256)

    def test_a_store_that_is_closed(self) -> None:
        """Every call says so, and none holds the store against the next one; closing twice is no fault."""
        store, bundle = self.store(), opened()
        store.upsert(some(3), bundle.sha256)
        (served,) = store.generations()
        store.close()
        for name, call in _calls(store, served, self.place.parent / "copy").items():
            try:
                with refused(StoreError, saying="closed"):
                    call()
            except AssertionError as fault:
                raise AssertionError(f"{name}: {fault}") from fault
        store.close()
        with self.reopen(self.place) as again:
            again.upsert([replace(item("a"), label="b")], bundle.sha256)
            equal(again.count(), 4, "count")


def _calls(store: Store, served: Any, target: Path) -> dict[str, Callable[[], object]]:
    """Return one call of each method, by its name."""
    bundle = opened()
    return {
        "upsert": lambda: store.upsert([item("a")], bundle.sha256),
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
