"""Tests of a store as a whole: place, identity, snapshots, compacting, threads and closing."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from unittest.mock import patch

from retrieval.errors import StoreError
from retrieval.host.files import cache_folder
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.index.index import open_index
from retrieval.serving.store.contract import widths_of
from retrieval.serving.store.testing.bench import (
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
from retrieval.serving.store.testing.bundles import WIDTH, opened


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
                    equal(
                        Bundle.open(folder, threads=1).sha256,
                        generation.bundle,
                        "bundle, once more",
                    )

    def test_figures(self) -> None:
        """`stats` counts items and lists generations."""
        store = self.store()
        store.upsert(some(9), opened().sha256)
        store.delete(["id 2"])
        other = opened(seed=1)
        store.begin(other, widths_of(other))
        stats = store.stats()
        equal(stats.count, 8, "items")
        equal(stats.generations, store.generations(), "generations")
        assert stats.bytes is None or stats.bytes > 0, f"{stats.bytes} bytes"

    def test_compacting(self) -> None:
        """Compacting changes no search result; a store may refuse it."""
        store, state = self.store(), State()
        self.put(store, state, some(60))
        self.remove(store, state, ["id 3", "id 5"])
        with suppress(StoreError):
            store.compact()
        self.check(store, state)
        self.check(self.again(store), state)

    # Snapshots

    def test_a_snapshot_is_a_copy_of_one_moment(self) -> None:
        """A snapshot has the identity and content of the index; later changes do not affect it."""
        target, state = self.place.parent / "copy", State()
        with self.store_at(self.place).create(
            opened(), widths_of(opened()), identity="an id"
        ) as store:
            self.put(store, state, some(80))
            self.remove(store, state, ["id 7"])
            store.snapshot(target)
            then = dict(state)
            queries = normal(3, WIDTH, 2)
            answers = store.search(queries, 5, opened().sha256)
            self.put(store, state, [item("later"), item("id 1", 5)])
            with open_index(target, threads=1) as copy:
                equal(copy.identity, "an id", "identity of the snapshot")
                equal(len(copy), len(then), "items of the snapshot")
                equal(copy.bundle.sha256, opened().sha256, "bundle of the snapshot")
                for hits, items in zip(
                    copy.search(Encoded(queries, queries), 5), answers, strict=True
                ):
                    equal({hit.id for hit in hits}, {entry.id for entry in items}, "nearest")
                alike(copy.get("id 3", arrays=True)["id 3"], then["id 3"])
            self.check(store, state)
            with refused(StoreError):
                store.snapshot(target)
        with self.reopen(self.place) as again:
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
            equal(
                [entry.id for entry in copy.scan()], sorted(entry.id for entry in pending), "items"
            )
            equal(copy.store.original("kept"), b"bytes", "original")
            equal(copy.bundle.sha256, other.sha256, "bundle")
            read = copy.get([entry.id for entry in pending], arrays=True)
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
                store.upsert(
                    [item(f"{side} {number}") for side in ("left", "right")], bundle.sha256
                )
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
        store = self.store()
        store.upsert(some(3), opened().sha256)
        for _ in range(1500):
            equal(together([store.count]), [], "faults")

    def test_closing_lets_searches_end(self) -> None:
        """A running search returns its result; a later search raises that the store is closed."""
        store, bundle = self.store(), opened()
        store.upsert(some(self.searched), bundle.sha256)
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
