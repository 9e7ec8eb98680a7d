"""Cases: the place of an index: made once, opened by anybody who knows it, deleted."""

from __future__ import annotations

from contextlib import suppress
from unittest.mock import patch

from retrieval.errors import StoreError
from retrieval.host.files import cache_folder
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.index import open_index
from retrieval.serving.store.contract import widths_of
from retrieval.serving.store.testing.bench import Bench, State, equal, item, refused, some
from retrieval.serving.store.testing.bundles import WIDTH, opened


class PlaceCases(Bench):
    """Exists, create, open, drop; identity; bundles that come from the store; compacting and structures."""

    def test_where_there_is_no_index(self) -> None:
        """Nothing is opened, and deleting it is no fault."""
        at = self.at(self.place)
        equal(at.exists(), False, "existence")
        with refused(StoreError):
            at.open()
        at.drop()
        equal(at.exists(), False, "existence")

    def test_made_once_and_deleted(self) -> None:
        """One that is there is not overwritten; one that was deleted is gone, and another may follow."""
        store, state, at = self.store(), State(), self.at(self.place)
        self.put(store, state, some(5))
        equal(at.exists(), True, "existence")
        with refused(StoreError):
            at.create(opened(), widths_of(opened()))
        self.check(store, state)
        first = store.identity()
        store.close()
        at.drop()
        equal(at.exists(), False, "existence after deleting")
        with refused(StoreError):
            at.open()
        store = self.store()
        self.check(store, State())
        assert store.identity() != first, "two indexes have one identity"

    def test_identity(self) -> None:
        """It is the one that was asked for, here, after reopening and in a snapshot."""
        with self.at(self.place).create(opened(), widths_of(opened()), identity="an id") as store:
            store.upsert(some(3), opened().sha256)
            equal(store.identity(), "an id", "identity")
            store.snapshot(self.place.parent / "copy")
        with self.reopen(self.place) as again:
            equal(again.identity(), "an id", "identity after reopening")
        with open_index(self.place.parent / "copy", threads=1) as copy:
            equal(copy.identity, "an id", "identity of a snapshot")

    def test_bundles_come_from_the_store(self) -> None:
        """Who has nothing but the place gets the bundle of every generation; what was altered in the user's cache is fetched again."""
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
                    equal(Bundle.open(folder, threads=1).sha256, generation.bundle, "bundle, once more")

    def test_a_snapshot_holds_every_item(self) -> None:
        """Those with originals, and those that the served generation does without."""
        store, other = self.store(), opened(seed=1)
        store.upsert([*some(4), item("kept", keep="copy", original=b"bytes")], opened().sha256)
        began = store.begin(other, widths_of(other))
        pending = store.pending(began, 10)
        store.embed(began, [item(one.id, 0, other) for one in pending[1:]], [pending[0].id])
        equal(store.switch(began), True, "switch")
        store.snapshot(self.place.parent / "copy")
        with open_index(self.place.parent / "copy", threads=1) as copy:
            equal([one.id for one in copy.scan()], sorted(one.id for one in pending), "items")
            equal(copy.store.original("kept"), b"bytes", "original")
            equal(copy.bundle.sha256, other.sha256, "bundle")
            there = {
                id: bool(one.arrays) for id, one in copy.get([one.id for one in pending], arrays=True).items()
            }
            equal(there, {one.id: one.id != pending[0].id for one in pending}, "items with arrays")

    def test_compacting_and_structures(self) -> None:
        """Both change no answer, or are refused with a sentence."""
        store, state = self.store(), State()
        self.put(store, state, some(60))
        self.remove(store, state, ["id 3", "id 5"])
        with suppress(StoreError):
            store.compact()
        self.check(store, state)
        if store.structures:
            store.take_structure(store.structures[0], {})
        else:
            with refused(StoreError):
                store.take_structure("flat", {})
        self.check(self.again(store), state)
