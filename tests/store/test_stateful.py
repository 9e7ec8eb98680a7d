"""Random sequences of changes to an index, compared with a dictionary and brute force."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from retrieval.bundle.bundle import Bundle
from retrieval.errors import StoreError
from retrieval.index.index import Index
from retrieval.store import masks, upkeep
from retrieval.store.contract import (
    FEATURES,
    VECTOR,
    Generation,
    Item,
    Superseded,
    widths_of,
)
from retrieval.store.filters import matches, parse_filter
from retrieval.store.folder import create_local
from retrieval.store.items import served_of
from retrieval.store.local import LocalStore

from retrieval_engines.testing import make_bundle

NUMBERS, K = 8, 6
FILTERS = ["price < 3", "label = 'a' or price = 7", "not exists(label)"]
ids = st.integers(0, 25).map("id {}".format)
features = st.integers(0, 10_000).map(
    lambda seed: np.random.default_rng(seed).integers(-9, 10, NUMBERS).astype(np.float32)
)
entries = st.tuples(features, st.sampled_from([None, "a", "b"]), st.integers(0, 9))


class Machine(RuleBasedStateMachine):
    """`items` has the expected content by id: features, label, price. Rules run the upkeep."""

    opened: list[Bundle]

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.items: dict[str, tuple[Any, str | None, int]] = {}
        self.served = 0
        self.next: Generation | None = None
        self.left: dict[int, set[str]] = {}  # ids that a generation leaves out
        self.copies = 0
        create_local(
            self.folder / "index", self.opened[0], widths_of(self.opened[0], features=NUMBERS)
        )
        self.open()

    def open(self):
        self.store = LocalStore(self.folder / "index", upkeep=False)
        self.index = Index(self.folder / "index", self.store, threads=1)

    def teardown(self):
        self.same(self.index)
        self.index.close()
        shutil.rmtree(self.folder)

    def arrays(self, entry, number):
        return {VECTOR: self.opened[number].encode(entry[None]).vector[0], FEATURES: entry}

    @rule(new=st.dictionaries(ids, entries, min_size=1, max_size=25))
    def upsert(self, new):
        items = [
            Item(id, label, {"price": price}, arrays=self.arrays(entry, self.served))
            for id, (entry, label, price) in new.items()
        ]
        replaced = self.index.upsert(items)
        assert replaced == len(new.keys() & self.items.keys())
        self.items.update(new)
        for left in self.left.values():
            left -= new.keys()

    @rule(gone=st.sets(ids))
    def delete(self, gone):
        assert self.index.delete(gone) == len(gone & self.items.keys())
        self.forget(gone)

    @precondition(lambda self: self.items)
    @rule(filter=st.sampled_from(FILTERS[::2]))
    def delete_matching(self, filter):
        gone = self.matching(filter)
        assert self.index.delete(filter=filter) == len(gone)
        self.forget(gone)

    def forget(self, gone):
        for id in gone:
            self.items.pop(id, None)
        for left in self.left.values():
            left -= gone

    @rule()
    def tend(self):
        self.store.upkeep.step()

    @rule()
    def compact(self):
        self.store.compact()
        assert not self.store.stats().details["deleted"]

    @rule()
    def reopen(self):
        self.index.close()
        self.open()

    @rule()
    def snapshot(self):
        self.copies += 1
        target = self.index.snapshot(self.folder / f"copy {self.copies}")
        with Index.open(target, threads=1) as copy:
            self.same(copy)
            for filter in FILTERS:
                self.same(copy, filter)

    @precondition(lambda self: self.next is None)
    @rule()
    def begin(self):
        other = self.opened[1 - self.served]
        known = {entry.number for entry in self.store.generations()}
        self.next = self.store.begin(other, widths_of(other, features=NUMBERS))
        if self.next.number not in known:
            self.left[self.next.number] = set()

    @precondition(lambda self: self.next is not None)
    @rule(limit=st.integers(1, 40), out=st.booleans())
    def embed(self, limit, out):
        """Embed some pending items; with `out`, leave out the first."""
        items = self.store.pending(self.next, limit)
        assert {item.id for item in items} <= self.items.keys()
        without = [item.id for item in items[:1]] if out else []
        created = [
            replace(item, arrays=self.arrays(self.items[item.id][0], 1 - self.served))
            for item in items[len(without) :]
        ]
        self.store.embed(self.next, created, without)
        self.left[self.next.number] |= set(without)

    @precondition(lambda self: self.next is not None)
    @rule()
    def switch(self):
        assert self.next is not None
        complete = not self.store.pending(self.next, 1)
        old = self.opened[self.served].sha256
        before = served_of(self.store.generations()).number
        assert self.store.switch(self.next) == complete
        if complete:
            self.left.setdefault(before, set())
            self.served, self.next = 1 - self.served, None
            with pytest.raises(Superseded):
                self.store.upsert([], old)
            self.index.follow()

    @rule()
    def drop(self):
        for entry in self.store.generations():
            if entry.state == "served":
                with pytest.raises(StoreError):
                    self.store.drop(entry)
            else:
                self.store.drop(entry)
                self.left.pop(entry.number, None)
        self.next = None

    def matching(self, filter):
        chosen = None if filter is None else parse_filter(filter)
        return {
            id
            for id, (_, label, price) in self.items.items()
            if chosen is None or matches(chosen, id, label, {"price": price})
        }

    @precondition(lambda self: self.items)
    @rule(filter=st.sampled_from(FILTERS))
    def filtered(self, filter):
        self.same(self.index, filter)

    @invariant()
    def all_is_there(self):
        self.same(self.index)

    def same(self, index, filter=None):
        if filter is not None and not self.items:
            return
        assert [entry.id for entry in index.scan(filter)] == sorted(self.matching(filter))
        assert index.count(filter) == len(self.matching(filter))
        served = served_of(index.store.generations()).number
        searched = sorted(self.matching(filter) - self.left.get(served, set()))
        read = index.get(self.items, arrays=True)
        for id, (entry, label, price) in self.items.items():
            assert (read[id].label, read[id].metadata) == (label, {"price": price})
            if id not in self.left.get(served, set()):
                assert np.array_equal(read[id].arrays[FEATURES], entry)
        bundle = self.opened[self.served]
        for seed in (1, 2):
            query = np.random.default_rng(seed).integers(-9, 10, NUMBERS).astype(np.float32)
            expected = []
            if searched:
                vectors = bundle.encode(np.stack([self.items[id][0] for id in searched])).vector
                apart = vectors.astype(float) - bundle.encode(query[None]).vector[0]
                distances = np.sqrt(np.square(apart).sum(1))
                order = np.argsort(distances, kind="stable")[:K]
                expected = [(searched[place], float(distances[place])) for place in order]
            hits = index.search(query, K, filter=filter)
            assert [(hit.id, hit.distance) for hit in hits] == expected


def test_whatever_is_done_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(upkeep, "_MIN_DEAD_ROWS", 4)
    monkeypatch.setattr(masks, "_SMALL", 0)  # filters use columns, as in a large index
    paths = [make_bundle(tmp_path / str(seed), seed=seed) for seed in range(2)]
    monkeypatch.setattr(
        Machine, "opened", [Bundle.open(path, threads=1) for path in paths], raising=False
    )
    steps = {"max_examples": 15, "stateful_step_count": 25, "derandomize": True, "database": None}
    quiet = settings(deadline=None, suppress_health_check=list(HealthCheck), **steps)
    run_state_machine_as_test(Machine, settings=quiet)
