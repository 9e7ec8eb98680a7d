"""The suite of stores on Qdrant, in its in-process mode and on a server; concurrent switches."""

import hashlib
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import retrieval
from agreeing import agree
from hypothesis import HealthCheck, given, settings, strategies as st
from qdrant_memory import Memory
from retrieval.plugin import stores
from retrieval.store.filters import parse_filter

from retrieval_engines import RemotePlace, testing
from retrieval_engines.register import REGISTER
from retrieval_engines.testing.bench import numbered_items, random_item, run_together
from retrieval_engines.testing.small_bundles import WIDTH, shared_bundle

pytest.importorskip("qdrant_client", reason="the extra `qdrant` is not installed")
from retrieval_engines.qdrant.place import QdrantPlace
from retrieval_engines.qdrant.store import QdrantStore

SERVED = shared_bundle().sha256
NEXT = shared_bundle(seed=1, width=WIDTH + 5)


MEMORY: Any = Memory()


class InProcess(RemotePlace):
    """An index in Qdrant's in-process mode."""

    def store(self):
        name = hashlib.sha256(self.address.path.encode()).hexdigest()[:16]
        return QdrantStore(MEMORY, str(self.address), name, exact=False)


class TestQdrantInProcess(testing.StoreSuite):
    """The in-process mode takes milliseconds per item, so `many` is smaller."""

    many = 1000

    def store_at(self, place):
        return InProcess(stores.Address.parse(f"memory://{place}"))


@pytest.mark.skipif("QDRANT_URL" not in os.environ, reason="QDRANT_URL names no server")
class TestQdrantServer(testing.StoreSuite):
    def store_at(self, place):
        host = os.environ["QDRANT_URL"].rpartition("//")[2].rstrip("/")
        name = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        return QdrantPlace(stores.Address.parse(f"qdrant://{host}/{name}"))


@pytest.fixture
def index(tmp_path):
    place = InProcess(stores.Address.parse(f"memory://{tmp_path}"))
    with place.create(shared_bundle(), stores.widths_of(shared_bundle())) as store:
        yield store


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_filters_agree_with_the_language(index, data):
    agree(index, data)


def test_scalars_of_numpy_are_numbers(index):
    scalars = {
        "count": np.int64(7),
        "price": np.float32(0.5),
        "new": [np.True_],
        "of": np.str_("a"),
    }
    index.upsert([replace(random_item("a"), metadata=scalars)], SERVED)
    plain = {"count": 7, "price": 0.5, "new": [True], "of": "a"}
    assert index.get(["a"])["a"].metadata == plain
    assert index.count(filter=parse_filter("count = 7 and price < 1")) == 1


def test_a_call_that_runs_while_the_store_is_closed(index):
    def interrupted(**named):
        index.close()
        raise RuntimeError("Cannot send a request, as the client has been closed.")

    with pytest.raises(retrieval.errors.StoreError, match="was closed"):
        index._request(interrupted)


def test_names_and_servers_that_are_not_there(cli):
    for name in ("a~b", "a..b", "", ".a", "a%20b", "a" * 200):
        with pytest.raises(retrieval.errors.StoreError, match="names no index"):
            QdrantPlace(stores.Address.parse(f"qdrant://host/{name}"))
    result = cli("index", "list", "qdrant://127.0.0.1:9/photos?timeout=1")
    assert result.code == 2 and "does not answer" in result.err and "Traceback" not in result.err


@pytest.fixture
def two(index):
    """A store of 20 items, a second connection to it, and a complete second generation."""
    other = InProcess(stores.Address.parse(index.address)).open()
    index.upsert(numbered_items(20), SERVED)
    generation = index.begin(NEXT, stores.widths_of(NEXT))
    _fill(index, generation)
    with other:
        yield index, other, generation


def _fill(store: stores.Store, generation: stores.Generation) -> None:
    while pending := store.pending(generation, 100):
        store.embed(generation, [random_item(each.id, 0, NEXT) for each in pending])


def _before(
    monkeypatch: pytest.MonkeyPatch, store: Any, name: str, first: Callable[[], object]
) -> None:
    """Call `first` just before the next call of a method, as another process might."""
    method = getattr(store, name)

    def call(*arguments):
        monkeypatch.setattr(store, name, method)
        first()
        return method(*arguments)

    monkeypatch.setattr(store, name, call)


def test_what_is_written_until_the_alias_moves_is_kept(two, monkeypatch):
    index, other, generation = two
    _before(
        monkeypatch,
        index,
        "_move_alias",
        lambda: other.upsert([random_item("late")], SERVED),
    )
    assert index.switch(generation) is False
    assert [entry.state for entry in other.generations()] == ["served", "kept"]
    assert other.count() == 21
    assert [entry.id for entry in index.pending(generation, 10)] == ["late"]
    _fill(index, generation)
    _before(monkeypatch, index, "_move_alias", lambda: other.delete(["id 3"]))
    assert index.switch(generation) is True
    expected = {entry.id for entry in numbered_items(20)} - {"id 3"} | {"late"}
    assert {entry.id for entry in other.scan()} == expected


def test_a_switch_that_was_stopped_is_ended_by_who_writes_next(two, monkeypatch):
    index, other, generation = two
    with monkeypatch.context() as patch:
        _before(
            patch,
            index,
            "_move_alias",
            lambda: other.upsert([random_item("late")], SERVED),
        )
        patch.setattr(index, "_complete_switch", None)
        with pytest.raises(TypeError):
            index.switch(generation)
    assert [entry.state for entry in other.generations()] == ["kept", "served"]
    with pytest.raises(stores.Superseded):
        other.upsert([random_item("new", 0, NEXT)], NEXT.sha256)
    assert [entry.state for entry in index.generations()] == ["served", "kept"]
    assert other.upsert([random_item("late")], SERVED) == 1 and index.count() == 21


def test_what_comes_behind_the_switch_is_refused(two, monkeypatch):
    index, other, generation = two
    _before(monkeypatch, other, "_write_rows", lambda: index.switch(generation))
    with pytest.raises(stores.Superseded):
        other.upsert([random_item("late")], SERVED)
    assert other.count() == 20 and index.get(["late"]) == {}
    back = index.generations()[0]
    index.pending(back, 10)
    assert index.switch(back) is True and index.count() == 20


def test_two_who_change_an_item_at_once_lose_nothing(index):
    """Each has a store of its own, as two processes have; an original moves with its item."""
    index.upsert([random_item("a", metadata={"n": -1}, original=b"x" * 100_000)], SERVED)
    rounds = 25
    met = []

    def change(store: Any, name: str) -> None:
        exchange = store._exchange_rows

        def counted(*arguments):
            missed = exchange(*arguments)
            met.append(len(missed))
            return missed

        store._exchange_rows = counted
        for n in range(rounds):
            entry = str(n) if name == "label" else {name: n}
            key = "label" if name == "label" else "metadata"
            assert store.update(["a"], {key: entry}, SERVED) == 1

    others = [InProcess(stores.Address.parse(index.address)).open() for _ in range(3)]
    errors = run_together(
        *(
            partial(change, store, name)
            for store, name in zip(others, ["label", "n", "m"], strict=True)
        )
    )
    assert errors == []
    assert sum(met), "nobody met anybody"
    item = index.get(["a"])["a"]
    assert (item.label, item.metadata) == ("24", {"n": 24, "m": 24})
    assert index.original("a") == b"x" * 100_000
    ids = [row.record.get("id", "") for row in index._all_rows(REGISTER)]
    pieces = [id for id in ids if len(id.partition(".")[0]) == len(uuid.uuid4().hex)]
    assert len(pieces) == 3, "pieces of earlier versions are left"


def test_a_change_does_not_bring_back_what_another_deletes(index, monkeypatch):
    index.upsert([random_item("a")], SERVED)
    other = InProcess(stores.Address.parse(index.address)).open()
    _before(monkeypatch, index, "_exchange_rows", lambda: other.delete(["a"]))
    assert index.update(["a"], {"label": "new"}, SERVED) == 0
    assert index.count() == 0


def test_a_server_that_would_ignore_the_condition_is_refused(index, monkeypatch):
    index.upsert([random_item("a")], SERVED)
    monkeypatch.setattr(MEMORY, "info", lambda: SimpleNamespace(version="1.16.3"), raising=False)
    with pytest.raises(retrieval.errors.StoreError, match=r"Qdrant 1\.16\.3 cannot .* 1\.17"):
        index.update(["a"], {"label": "new"}, SERVED)
    assert index.get(["a"])["a"].label is None


def test_numbers_that_begin_alike_are_two_generations(index):
    for _ in range(9):
        generation = index.begin(NEXT, stores.widths_of(NEXT))
        if generation.number < 10:
            index.drop(generation)
    assert generation.number == 10 and index.switch(generation)
    index.drop(index.generations()[0])
    index.upsert([random_item("a", 0, NEXT)], NEXT.sha256)
    assert index.count() == 1
