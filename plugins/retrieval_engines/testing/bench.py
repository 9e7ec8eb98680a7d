"""Shared parts of the tests: a store for each test, and a brute-force search to compare it with."""

from __future__ import annotations

import shutil
import tempfile
import threading
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, RetrievalError
from retrieval.store.contract import (
    VECTOR,
    Capability,
    Floats,
    Item,
    Store,
    StorePlace,
    spans_of,
    widths_of,
)
from retrieval.store.filters import Filter, matches, parse_filter

from retrieval_engines.testing.small_bundles import opened

State = dict[str, Item]
"""Expected content of a store: items by id."""


class Bench:
    """Creates a store for each test, and destroys it afterwards.

    Attributes:
        recall: minimum share of the nearest items that a search must propose; 1 for exact search.
        many: number of items in one large call, at least 200.
        place: empty folder of the current test. Its path is unique, so a remote store can derive
            the name of its index from the path.
    """

    recall = 1.0
    many = 10_000
    place: Path

    def store_at(self, place: Path) -> StorePlace:
        """Return the place of a test's index, which need not exist. A subclass must implement this.

        Args:
            place: folder of the current test; see `Bench`.
        """
        raise NotImplementedError("Implement `def store_at(self, place)` in a subclass.")

    def setup_method(self) -> None:
        """Create the folder of a test; pytest calls this."""
        self._folder = Path(tempfile.mkdtemp(prefix="store-"))
        self.place = self._folder / "place"
        self.place.mkdir()
        self._stores: list[Store] = []

    def teardown_method(self) -> None:
        """Close and delete the stores of a test; pytest calls this."""
        for store in self._stores:
            store.close()
        self.store_at(self.place).drop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def store(self, bundle: Bundle | None = None, features: int | None = None) -> Store:
        """Return a new empty store."""
        bundle = bundle or opened()
        widths = widths_of(bundle, features=features)
        self._stores.append(self.store_at(self.place).create(bundle, widths))
        return self._stores[-1]

    def filled(self, count: int) -> tuple[Store, State]:
        """Return a new store of `count` items, and its expected content."""
        store, state = self.store(), State()
        self.put(store, state, some(count))
        return store, state

    def again(self, store: Store) -> Store:
        """Close a store and open it again."""
        store.close()
        self._stores.append(self.store_at(self.place).open())
        return self._stores[-1]

    def put(
        self, store: Store, state: State, items: Sequence[Item], bundle: Bundle | None = None
    ) -> None:
        """Write items to a store and to `state`, its expected content."""
        bundle = bundle or opened()
        equal(
            store.upsert(items, bundle.sha256),
            sum(item.id in state for item in items),
            "replaced items",
        )
        state.update((item.id, item) for item in items)

    def remove(self, store: Store, state: State, ids: Sequence[str]) -> None:
        """Delete items from a store and from `state`, its expected content."""
        equal(store.delete(ids), sum(id in state for id in set(ids)), "deleted items")
        for id in ids:
            state.pop(id, None)

    def check(
        self,
        store: Store,
        state: State,
        bundle: Bundle | None = None,
        filter: str | None = None,
        count: int = 7,
    ) -> None:
        """Compare what all methods of a store that read return with `state`, its expected content.

        Args:
            store: the store.
            state: its expected content.
            bundle: bundle that the store serves.
            filter: filter to use, as text.
            count: number of nearest items to request.
        """
        bundle = bundle or opened()
        chosen = None if filter is None else parse_filter(filter)
        expected = {id: item for id, item in state.items() if passes(chosen, item)}
        about = "" if filter is None else f" where {filter}"
        equal(store.count(chosen), len(expected), f"count{about}")
        ids = [entry.id for entry in scanned(store, chosen)]
        if "ordered" in store.capabilities:
            equal(ids, sorted(expected), f"ids of scan{about}")
        equal(sorted(ids), sorted(expected), f"ids of scan{about}")
        read = store.get(expected, arrays=True)
        equal(set(read), set(expected), "ids of get")
        for id, item in expected.items():
            alike(read[id], item)
        queries = normal(4, bundle.manifest.vector, 99)
        self.check_search(store, queries, expected, bundle, count, chosen)

    def check_filter(self, store: Store, state: State, filter: str) -> None:
        """Call `check` with a filter; a store without the capability "filters" may refuse it."""
        with suppress(*([] if "filters" in store.capabilities else [DataError])):
            self.check(store, state, filter=filter)

    def check_search(
        self,
        store: Store,
        queries: Floats,
        state: State,
        bundle: Bundle,
        count: int,
        filter: Filter | None = None,
    ) -> None:
        """Compare the hits of each query with a brute-force search of `state`."""
        spans, answers = (
            spans_of(bundle),
            store.search(queries, count, bundle.sha256, filter=filter),
        )
        equal(len(answers), len(queries), "answers")
        for query, hits in zip(queries, answers, strict=True):
            ids = [item.id for item in hits]
            equal(len(ids), len(set(ids)), "number of hits, without repeated items")
            expected = nearest(query, state, spans, count)
            missed = expected - set(ids)
            allowed = (1 - self.recall) * len(expected)
            assert len(missed) <= allowed, f"not found: {sorted(missed)} for {query}"
            most = count * len(spans)
            assert len(ids) <= most, f"{len(ids)} items proposed, but at most {most} requested"
            for item in hits:
                assert item.id in state, f"the hit {item.id!r} does not exist or does not match"
                alike(item, state[item.id])


def needs(store: Store, capability: Capability) -> None:
    """Skip the test if the store lacks a capability."""
    if capability not in store.capabilities:
        raise unittest.SkipTest(f"The store lacks the capability '{capability}'.")


def nearest(query: Floats, state: State, spans: Sequence[tuple[int, int]], count: int) -> set[str]:
    """Return the ids of the `count` nearest items in each sub-space, computed in float64."""
    if not state:
        return set()
    ids = list(state)
    vectors = np.stack([state[id].arrays[VECTOR] for id in ids]).astype(np.float64)
    ids_found: set[str] = set()
    for start, stop in spans:
        distances = ((vectors[:, start:stop] - query[start:stop].astype(np.float64)) ** 2).sum(1)
        ids_found |= {ids[row] for row in np.argsort(distances, kind="stable")[:count]}
    return ids_found


def passes(filter: Filter | None, item: Item) -> bool:
    """Return whether an item matches a filter."""
    return filter is None or matches(filter, item.id, item.label, item.metadata)


def scanned(store: Store, filter: Filter | None = None, limit: int = 1000) -> list[Item]:
    """Return the items of all pages of a scan."""
    items: list[Item] = []
    while page := store.scan(filter, after=items[-1].id if items else None, limit=limit):
        items += page
    return items


def alike(read: Item, written: Item) -> None:
    """Raise an `AssertionError` unless the item `read` equals the item `written`."""
    plain: dict[str, Any] = {"arrays": {}, "original": None}
    equal(replace(read, **plain), replace(written, **plain), "an item")
    for name, array in read.arrays.items():
        equal(array.dtype, np.dtype(np.float32), f"dtype of {name}")
        same = np.array_equal(array, np.asarray(written.arrays[name], np.float32))
        assert same, f"{name} of {read.id!r} is {array}, not {written.arrays[name]}"


def equal(actual: object, expected: object, what: str) -> None:
    """Raise an `AssertionError` that shows both values unless they are equal."""
    assert actual == expected, f"{what}: {actual!r} instead of {expected!r}"


@contextmanager
def refused(*kinds: type[RetrievalError], saying: str = "") -> Iterator[list[str]]:
    """Context manager that requires an error of one of the classes, whose message is a sentence.

    Args:
        kinds: allowed classes of the error.
        saying: text that the message must contain.

    Yields:
        A list that receives the message.
    """
    texts: list[str] = []
    try:
        yield texts
    except kinds as fault:
        texts.append(text := str(fault))
        assert text.rstrip()[-1:] in (".", "?", "!"), f"not a sentence: {text!r}"
        assert saying in text, f"the message lacks {saying!r}: {text!r}"
    else:
        raise AssertionError(f"no {' or '.join(kind.__name__ for kind in kinds)} was raised")


def normal(count: int, width: int, seed: int) -> Floats:
    """Return random vectors (count, width)."""
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def item(id: str, seed: int = 0, bundle: Bundle | None = None, **attributes: Any) -> Item:
    """Return an item with random arrays of the widths that `bundle` needs."""
    widths = widths_of(bundle or opened())
    vectors = np.random.default_rng([seed, *id.encode("utf-8", "surrogatepass")])
    arrays = {name: vectors.normal(size=width).astype(np.float32) for name, width in widths.items()}
    return Item(id, **{"arrays": arrays, **attributes})


def some(count: int, start: int = 0, seed: int = 0, bundle: Bundle | None = None) -> list[Item]:
    """Return items with labels and metadata to filter on."""
    return [
        item(
            f"id {number}",
            seed,
            bundle,
            label=None if number % 7 == 0 else f"kind {number % 5}",
            metadata={
                "price": number % 20 / 2,
                "tags": ["even" if number % 2 == 0 else "odd", number % 3],
            },
        )
        for number in range(start, start + count)
    ]


def together(calls: Sequence[Callable[[], object]]) -> list[BaseException]:
    """Run calls in concurrent threads; return the exceptions that they raised."""
    faults: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as fault:  # the caller checks them
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults
