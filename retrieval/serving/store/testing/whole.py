"""Cases: the store as a whole: snapshots, figures, threads, closing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from retrieval.errors import StoreError
from retrieval.serving.bundle import Encoded
from retrieval.serving.index.index import open_index
from retrieval.serving.store.contract import widths_of
from retrieval.serving.store.testing.bench import Bench, State, alike, equal, item, normal, refused, some
from retrieval.serving.store.testing.bundles import WIDTH, opened


class WholeCases(Bench):
    """Snapshots, figures, threads, closing."""

    def test_a_snapshot_is_a_copy_of_one_moment(self) -> None:
        """It opens as an index, answers as the store did, and neither changes with the other."""
        store, state = self.store(), State()
        self.put(store, state, some(80))
        self.remove(store, state, ["id 7"])
        target = self.place.parent / "copy"
        store.snapshot(target)
        then = dict(state)
        self.put(store, state, [item("later"), item("id 1", 5)])
        with open_index(target, threads=1) as copy:
            equal(len(copy), len(then), "items of the snapshot")
            equal(copy.bundle.sha256, opened().sha256, "bundle of the snapshot")
            for query in normal(3, WIDTH, 2):
                (hits,) = copy.search(Encoded(query[None], query[None]), 5)
                expected = {hit.id for hit in hits}
                (found,) = store.search(query[None], 5, opened().sha256)
                if not {one.id for one in found} & {"later", "id 1"} and "id 1" not in expected:
                    equal({one.id for one in found}, expected, "nearest")
            alike(copy.get("id 3", arrays=True)["id 3"], then["id 3"])
        self.check(store, state)
        with refused(StoreError):
            store.snapshot(target)

    def test_a_snapshot_while_another_thread_writes(self) -> None:
        """It holds what one moment held."""
        store, bundle = self.store(), opened()
        if "atomic" not in store.capabilities:
            pytest.skip("the store shows a call in parts")
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                store.upsert([item(f"{side} {number}") for side in ("left", "right")], bundle.sha256)
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for number in range(3):
                store.snapshot(self.place.parent / f"copy {number}")
        finally:
            stop.set()
            writer.join()
        for number in range(3):
            with open_index(self.place.parent / f"copy {number}", threads=1) as copy:
                equal(len(copy) % 2, 0, "half of a call is in the snapshot; items beyond pairs")

    def test_figures(self) -> None:
        """They count items, and name generations."""
        store = self.store()
        store.upsert(some(9), opened().sha256)
        store.delete(["id 2"])
        other = opened(seed=1)
        store.begin(other, widths_of(other))
        said = store.stats()
        equal(said.count, 8, "items")
        equal(said.generations, store.generations(), "generations")
        assert said.bytes is None or said.bytes > 0, f"{said.bytes} bytes"

    def test_threads_write_in_turns(self) -> None:
        """Threads that write at a time all succeed, and nothing is lost."""
        store, state = self.store(), State()
        faults = _together(
            [
                lambda start=start: [  # type: ignore[misc]
                    store.upsert([one], opened().sha256) for one in some(12, start)
                ]
                for start in (0, 12, 24, 36)
            ]
        )
        equal(faults, [], "faults")
        state = {one.id: one for one in some(48)}
        self.check(store, state)
        self.check(self.again(store), state)

    def test_many_threads_one_after_another(self) -> None:
        """Threads that end leave nothing behind: no limit is reached."""
        store = self.store()
        store.upsert(some(3), opened().sha256)
        for _ in range(1500):
            equal(_together([store.count]), [], "faults")

    def test_closing_lets_searches_end(self) -> None:
        """A search that runs ends with its answer; one that begins afterwards is told that the store was closed."""
        store, bundle = self.store(), opened()
        store.upsert(some(self.searched), bundle.sha256)
        queries = normal(20, WIDTH, 4)
        searched = threading.Barrier(4)

        def search() -> None:
            store.search(queries, 10, bundle.sha256)
            searched.wait()
            with refused(StoreError, saying="closed"):
                while True:
                    found = store.search(queries, 10, bundle.sha256)
                    equal([len(one) for one in found], [10] * 20, "items found")

        def close() -> None:
            searched.wait()
            store.close()

        equal(_together([search, search, search, close]), [], "faults")

    def test_with(self) -> None:
        """A `with` statement closes it."""
        with self.store() as store:
            store.upsert([item("a")], opened().sha256)
        with refused(StoreError):
            store.count()


def _together(calls: list[Callable[[], object]]) -> list[BaseException]:
    """Run calls in threads at a time; return what they raised."""
    faults: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as fault:  # returned
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return faults
