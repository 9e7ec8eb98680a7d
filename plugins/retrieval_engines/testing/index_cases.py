"""Tests of an index as a whole: its creation, bundles, snapshots, threads and closing."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from unittest.mock import patch

from retrieval.base.files import cache_folder
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import StoreError
from retrieval.index.index import open_index
from retrieval.store.contract import widths_of

from retrieval_engines.testing.bench import (
    Bench,
    check_item,
    numbered_items,
    random_item,
    random_vectors,
    refused,
    run_together,
)
from retrieval_engines.testing.small_bundles import WIDTH


class IndexCases(Bench):
    """Tests of places, bundles, snapshots, threads and closing."""

    def test_made_once_and_deleted(self) -> None:
        """`create` overwrites nothing; a deleted index is gone and can be created again."""
        place = self.store_at(self.place)
        for _ in range(2):
            assert place.exists() is False
            with refused(StoreError):
                place.open()
            # Dropping an index that does not exist is not an error.
            place.drop()
        self.create(5)
        place = self.store_at(self.place)
        assert place.exists() is True
        with refused(StoreError):
            place.create(self.bundle, widths_of(self.bundle))
        self.check()
        identity = self.store.identity()
        self.store.close()
        place.drop()
        assert place.exists() is False
        with refused(StoreError):
            place.open()
        self.create()
        self.check()
        assert self.store.identity() != identity, "two indexes have one identity"

    def test_bundles_come_from_the_store(self) -> None:
        """Every bundle can be fetched from the store; an altered copy in the cache is replaced."""
        self.create(3)
        self.begin()
        with patch.dict("os.environ", RETRIEVAL_CACHE=str(self.place.parent / "cache")):
            self.reopen()
            for generation in self.store.generations():
                folder = self.store.bundle(generation)
                assert Bundle.open(folder, threads=1).sha256 == generation.bundle
                if folder.is_relative_to(cache_folder()):
                    (folder / "encoder.onnx").write_bytes(b"altered")
                    folder = self.store.bundle(generation)
                    assert Bundle.open(folder, threads=1).sha256 == generation.bundle

    def test_stats(self) -> None:
        """`stats` counts items and lists generations."""
        self.create(9)
        self.remove(["id 2"])
        self.begin()
        stats = self.store.stats()
        assert stats.count == 8
        assert stats.generations == self.store.generations()
        assert stats.bytes is None or stats.bytes > 0

    def test_compacting(self) -> None:
        """Compacting changes no search result; a store may refuse it."""
        self.create(60)
        self.remove(["id 3", "id 5"])
        with suppress(StoreError):
            self.store.compact()
        self.check()
        self.check_reopened()

    # Snapshots

    def test_a_snapshot_is_a_copy_of_one_moment(self) -> None:
        """A snapshot has the identity and content of the index; later changes do not affect it."""
        self.create(80, identity="an id")
        self.remove(["id 7"])
        self.store.snapshot(self.copy)
        before = dict(self.items)
        queries = random_vectors(3, WIDTH, 2)
        nearest = [{item.id for item in hits} for hits in self.search(queries, 5)]
        self.put([random_item("later"), random_item("id 1", 5)])
        with open_index(self.copy, threads=1) as copy:
            assert copy.identity == "an id"
            assert len(copy) == len(before)
            assert copy.bundle.sha256 == self.bundle.sha256
            answers = copy.search(Encoded(queries, queries), 5)
            assert [{hit.id for hit in hits} for hits in answers] == nearest
            check_item(copy.get("id 3", arrays=True)["id 3"], before["id 3"])
        self.check()
        with refused(StoreError):
            self.store.snapshot(self.copy)
        self.reopen()
        assert self.store.identity() == "an id"

    def test_a_snapshot_holds_every_item(self) -> None:
        """A snapshot holds items with originals, and items without arrays."""
        self.create(4)
        self.put([random_item("kept", keep="copy", original=b"bytes")])
        second = self.begin()
        left_out, *items = self.store.pending(second, 10)
        embedded = [random_item(item.id, 0, self.other) for item in items]
        self.store.embed(second, embedded, [left_out.id])
        assert self.store.switch(second) is True
        self.store.snapshot(self.copy)
        with open_index(self.copy, threads=1) as copy:
            ids = [item.id for item in copy.scan()]
            assert ids == sorted(self.items)
            assert copy.store.original("kept") == b"bytes"
            assert copy.bundle.sha256 == self.other.sha256
            read = copy.get(ids, arrays=True)
            assert [id for id in ids if not read[id].arrays] == [left_out.id]

    def test_a_snapshot_while_another_thread_writes(self) -> None:
        """A snapshot during writes holds one consistent state."""
        self.create()
        self.need("atomic")
        targets = [self.copy.with_name(f"copy {number}") for number in range(3)]
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                self.put([random_item(f"left {number}"), random_item(f"right {number}")])
                number += 1

        def copy() -> None:
            try:
                for target in targets:
                    self.store.snapshot(target)
            finally:
                stop.set()

        assert run_together(write, copy) == []
        for target in targets:
            with open_index(target, threads=1) as index:
                assert len(index) % 2 == 0, "half of a call is in the snapshot"

    # Threads

    def test_threads_write_in_turns(self) -> None:
        """Concurrent writers all succeed, and nothing is lost."""
        self.create()

        def write(start: int) -> None:
            for item in numbered_items(12, start):
                self.put([item])

        assert run_together(*(partial(write, start) for start in range(0, 48, 12))) == []
        assert len(self.items) == 48
        self.check()
        self.check_reopened()

    def test_many_threads_one_after_another(self) -> None:
        """Threads that have ended hold no resources, so no limit is reached."""
        self.create(3)
        for _ in range(1500):
            assert run_together(self.store.count) == []

    def test_closing_lets_searches_end(self) -> None:
        """A running search returns its result; a later search raises that the store is closed."""
        self.create(min(self.many, 1200))
        queries = random_vectors(20, WIDTH, 4)
        searched = threading.Barrier(4)

        def search() -> None:
            self.search(queries, 10)
            searched.wait()
            with refused(StoreError, saying="closed"):
                while True:
                    assert [len(hits) for hits in self.search(queries, 10)] == [10] * 20

        def close() -> None:
            searched.wait()
            self.store.close()

        assert run_together(search, search, search, close) == []
