"""Shared parts of the tests: a store for each test, and a brute-force search to compare it with."""

from __future__ import annotations

import tempfile
import threading
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
    Generation,
    Item,
    Store,
    StorePlace,
    spans_of,
    widths_of,
)
from retrieval.store.filters import Filter, matches, parse_filter

from retrieval_engines.testing.small_bundles import WIDTH, shared_bundle

State = dict[str, Item]
"""Expected content of a store: items by id."""


class Bench:
    """Creates a store for each test, knows what it should contain, and deletes it afterwards.

    Attributes:
        recall: minimum share of the nearest items that a search must propose; 1 for exact search.
        many: number of items in one large call, at least 200.
        place: empty folder of the current test. Its path is unique, so a remote store can derive
            the name of its index from the path.
        copy: path of a snapshot, beside `place`.
        store: the open store.
        items: expected content of the store.
        bundle: the bundle that the store serves.
        other: a second bundle with wider vectors, so that its arrays fit no other generation.
    """

    recall = 1.0
    many = 10_000
    place: Path
    copy: Path
    store: Store
    items: State
    bundle: Bundle
    other: Bundle

    def store_at(self, place: Path) -> StorePlace:
        """Return the place of a test's index, which need not exist. A subclass must implement this.

        Args:
            place: folder of the current test; see `Bench`.
        """
        raise NotImplementedError("Implement `def store_at(self, place)` in a subclass.")

    def setup_method(self) -> None:
        """Create the folder of a test; pytest calls this."""
        self._exits = ExitStack()
        # A store that was not closed because its test failed may still write into the folder.
        folder = tempfile.TemporaryDirectory(prefix="store-", ignore_cleanup_errors=True)
        self.place = Path(self._exits.enter_context(folder)) / "place"
        self.place.mkdir()
        self.copy = self.place.with_name("copy")
        self._exits.callback(lambda: self.store_at(self.place).drop())
        self.other = shared_bundle(seed=1, width=WIDTH + 5)

    def teardown_method(self) -> None:
        """Close and delete the stores of a test; pytest calls this."""
        self._exits.close()

    # The store and its expected content

    def create(
        self,
        count: int = 0,
        bundle: Bundle | None = None,
        features: int | None = None,
        identity: str | None = None,
    ) -> None:
        """Create a store of `count` items.

        Args:
            count: number of items; see `numbered_items`.
            bundle: the bundle that the store serves, by default `shared_bundle()`.
            features: width of the features that the store keeps, or None.
            identity: id of the index; None creates a new id.
        """
        self.bundle = bundle or shared_bundle()
        self.items = {}
        widths = widths_of(self.bundle, features=features)
        store = self.store_at(self.place).create(self.bundle, widths, identity=identity)
        self.store = self._exits.enter_context(store)
        if count:
            self.put(numbered_items(count))

    def reopen(self) -> None:
        """Close the store and open it again."""
        self.store.close()
        self.store = self._exits.enter_context(self.store_at(self.place).open())

    def begin(self) -> Generation:
        """Begin a generation of the second bundle."""
        return self.store.begin(self.other, widths_of(self.other))

    def need(self, capability: Capability) -> None:
        """Skip the test if the store lacks a capability."""
        if capability not in self.store.capabilities:
            raise unittest.SkipTest(f"The store lacks the capability '{capability}'.")

    def put(self, items: Sequence[Item]) -> None:
        """Write items to the store, and to its expected content."""
        replaced = sum(item.id in self.items for item in items)
        assert self.store.upsert(items, self.bundle.sha256) == replaced
        self.items.update((item.id, item) for item in items)

    def remove(self, ids: Sequence[str]) -> None:
        """Delete items from the store, and from its expected content."""
        assert self.store.delete(ids) == sum(id in self.items for id in set(ids))
        for id in ids:
            self.items.pop(id, None)

    def search(self, queries: Floats, count: int) -> list[list[Item]]:
        """Return the items that the store proposes for each query."""
        return self.store.search(queries, count, self.bundle.sha256)

    def nearest_id(self, vector: Floats) -> str:
        """Return the id of the only item that the store proposes for a vector."""
        ((hit,),) = self.search(vector[None], 1)
        return hit.id

    # Comparisons

    def check(self, filter: str | None = None, count: int = 7) -> None:
        """Compare what the store's reading methods return with its expected content.

        Args:
            filter: filter to use, as text.
            count: number of nearest items to request.
        """
        chosen = None
        expected = self.items
        if filter is not None:
            chosen = parse_filter(filter)
            expected = {
                id: item
                for id, item in self.items.items()
                if matches(chosen, item.id, item.label, item.metadata)
            }
        about = f"with the filter {filter}"
        assert self.store.count(chosen) == len(expected), about
        ids = [item.id for item in all_pages(self.store, chosen)]
        if "ordered" in self.store.capabilities:
            assert ids == sorted(expected), about
        assert sorted(ids) == sorted(expected), about
        read = self.store.get(expected, arrays=True)
        assert read.keys() == expected.keys()
        for id, item in expected.items():
            check_item(read[id], item)
        queries = random_vectors(4, self.bundle.manifest.vector, 99)
        self.check_search(queries, expected, count, chosen)

    def check_reopened(self) -> None:
        """Open the store again, and compare it with its expected content."""
        self.reopen()
        self.check()

    @contextmanager
    def may_refuse(self) -> Iterator[None]:
        """Context manager for filters; a store without the capability "filters" may refuse them."""
        try:
            yield
        except DataError:
            if "filters" in self.store.capabilities:
                raise

    def check_search(
        self, queries: Floats, expected: State, count: int, filter: Filter | None = None
    ) -> None:
        """Compare the hits of each query with a brute-force search of the expected items."""
        spans = spans_of(self.bundle)
        answers = self.store.search(queries, count, self.bundle.sha256, filter=filter)
        assert len(answers) == len(queries)
        for query, hits in zip(queries, answers, strict=True):
            ids = {item.id for item in hits}
            assert len(hits) == len(ids), "an item is proposed twice"
            nearest = nearest_ids(query, expected, spans, count)
            missed = nearest - ids
            allowed = (1 - self.recall) * len(nearest)
            assert len(missed) <= allowed, f"not found: {sorted(missed)} for {query}"
            # In each sub-space the nearest items may be others.
            most = count * len(spans)
            assert len(ids) <= most, f"{len(ids)} items proposed, but at most {most} requested"
            for item in hits:
                assert item.id in expected, f"the hit {item.id!r} does not exist or does not match"
                check_item(item, expected[item.id])


def nearest_ids(
    query: Floats, items: State, spans: Sequence[tuple[int, int]], count: int
) -> set[str]:
    """Return the ids of the `count` nearest items in each sub-space, computed in float64."""
    if not items:
        return set()
    ids = np.array(list(items), object)
    vectors = np.stack([item.arrays[VECTOR] for item in items.values()]).astype(np.float64)
    nearest: set[str] = set()
    for start, stop in spans:
        differences = vectors[:, start:stop] - query[start:stop].astype(np.float64)
        order = np.argsort((differences**2).sum(1), kind="stable")
        nearest.update(ids[order[:count]])
    return nearest


def all_pages(store: Store, filter: Filter | None = None, limit: int = 1000) -> list[Item]:
    """Return the items of all pages of a scan."""
    items = store.scan(filter, limit=limit)
    page = items
    while page:
        page = store.scan(filter, after=page[-1].id, limit=limit)
        items = items + page
    return items


def check_item(read: Item, written: Item) -> None:
    """Raise an `AssertionError` unless the item `read` equals the item `written`."""
    # The arrays are compared below; a store returns the original only by `original`.
    left_out: Mapping[str, Any] = {"arrays": {}, "original": None}
    assert replace(read, **left_out) == replace(written, **left_out)
    for name, array in read.arrays.items():
        assert array.dtype == np.float32
        expected = np.asarray(written.arrays[name], np.float32)
        assert np.array_equal(array, expected), f"{name} of {read.id!r} is {array}, not {expected}"


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
    except kinds as error:
        text = str(error)
        texts.append(text)
        assert text.rstrip()[-1:] in (".", "?", "!"), f"not a sentence: {text!r}"
        assert saying in text, f"the message lacks {saying!r}: {text!r}"
    else:
        raise AssertionError(f"no {' or '.join(kind.__name__ for kind in kinds)} was raised")


def random_vectors(count: int, width: int, seed: int) -> Floats:
    """Return random vectors (count, width)."""
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def random_item(id: str, seed: int = 0, bundle: Bundle | None = None, **attributes: Any) -> Item:
    """Return an item with random arrays of the widths that `bundle` needs."""
    # A test may use an id that UTF-8 cannot hold, to see that the store refuses it.
    random = np.random.default_rng([seed, *id.encode("utf-8", "surrogatepass")])
    arrays = {
        name: random.normal(size=width).astype(np.float32)
        for name, width in widths_of(bundle or shared_bundle()).items()
    }
    return Item(id, **{"arrays": arrays, **attributes})


def numbered_items(
    count: int, start: int = 0, seed: int = 0, bundle: Bundle | None = None
) -> list[Item]:
    """Return items "id 0", "id 1" and so on, with labels and metadata to filter on."""
    items = []
    for number in range(start, start + count):
        item = random_item(f"id {number}", seed, bundle, label=f"kind {number % 5}")
        if number % 7 == 0:
            item = replace(item, label=None)
        tags = [("even", "odd")[number % 2], number % 3]
        items.append(replace(item, metadata={"price": number % 20 / 2, "tags": tags}))
    return items


def run_together(*calls: Callable[[], object]) -> list[BaseException]:
    """Run calls in concurrent threads; return the exceptions that they raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            # The caller checks them.
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
