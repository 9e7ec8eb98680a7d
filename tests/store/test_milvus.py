"""The suite of stores on a real Milvus server, which is also killed."""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import retrieval
from agreeing import agree
from hypothesis import HealthCheck, given, settings, strategies as st
from retrieval.bundle.bundle import Bundle
from retrieval.client import Client, Retries
from retrieval.errors import ServerError
from retrieval.plugin import stores
from retrieval.store.filters import parse_filter
from wire import until

from retrieval_engines import testing
from retrieval_engines.register import REGISTER
from retrieval_engines.rows import Row
from retrieval_engines.testing.bench import (
    numbered_items,
    random_item,
    random_vectors,
    run_together,
)
from retrieval_engines.testing.small_bundles import shared_bundle

pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
from retrieval_engines.milvus.place import MilvusPlace
from retrieval_engines.milvus.store import CLAIM

SERVED = shared_bundle().sha256
KILLS = int(os.environ.get("MILVUS_KILLS", "1"))
"""Number of kills of the server, 1 to 3; it needs 3 s to restart. The second kill follows a write,
the third a delete.
"""


def address(milvus: Any, *words: object, options: str = "") -> stores.Address:
    """Return the address of an index whose name is a hash of `words`."""
    name = "t" + hashlib.sha256(repr(words).encode()).hexdigest()[:16]
    return stores.Address.parse(f"milvus://{milvus.place}/{name}{options}")


class TestMilvus(testing.StoreSuite):
    milvus: Any

    @pytest.fixture(autouse=True)
    def _server(self, milvus):
        type(self).milvus = milvus

    def store_at(self, place):
        return MilvusPlace(address(self.milvus, str(place)))


@pytest.fixture
def index(milvus, tmp_path):
    """An empty index."""
    place = MilvusPlace(address(milvus, str(tmp_path)))
    with place.create(shared_bundle(), stores.widths_of(shared_bundle())) as store:
        yield store
    place.drop()


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_filters_agree_with_the_language(index, data):
    agree(index, data)


def test_another_index_in_the_same_server(index, milvus):
    longer = MilvusPlace(stores.Address.parse(f"{index.address}_more"))
    assert not longer.exists()
    with longer.create(shared_bundle(), stores.widths_of(shared_bundle())) as other:
        other.upsert(numbered_items(3), SERVED)
        assert (index.count(), other.count()) == (0, 3)
    longer.drop()
    assert index.changed() is None and not longer.exists()
    for name in ("a__g1", "a-b", "", "1a", "ä", "a" * 300, "a%20b"):
        with pytest.raises(retrieval.errors.StoreError, match="names no index"):
            MilvusPlace(stores.Address.parse(f"milvus://{milvus.place}/{name}"))


def test_what_is_long(index):
    original = bytes(range(256)) * 900
    index.upsert([random_item("kept", original=original), *numbered_items(20)], SERVED)
    assert index.original("kept") == original
    long = random_item("long", metadata={"a": "é" * 40_000}, original=b"x")
    with pytest.raises(
        retrieval.errors.DataError, match=r"'long' has 80,\d+ bytes of id, label, metadata"
    ):
        index.upsert([random_item("good"), long], SERVED)
    assert index.count() == 21 and index.settings()["fields"] == ["price", "tags"]
    index.upsert([random_item("kept")], SERVED)
    assert index.original("kept") is None


def test_a_graph_finds_most_of_what_is_nearest(milvus):
    place = MilvusPlace(address(milvus, "graph", options="?exact=false"), exact=False)
    with place.create(shared_bundle(), stores.widths_of(shared_bundle())) as index:
        index.upsert(numbered_items(400), SERVED)
        queries = random_vectors(5, 12, 3)
        vectors = np.stack([item.vector for item in numbered_items(400)])
        hits = index.search(queries, 10, SERVED)
        for query, items in zip(queries, hits, strict=True):
            order = np.square(vectors - query).sum(1).argsort()[:10]
            assert (
                len({item.id for item in items} & {numbered_items(400)[row].id for row in order})
                >= 8
            )
    place.drop()


def test_filters_that_milvus_cannot_decide_are_refused(index):
    index.upsert([random_item("one", metadata={"a": 1, "b": {"c": 1}})], SERVED)
    where = parse_filter("a > 1 and b.c = 2")
    with MilvusPlace(stores.Address.parse(index.address)).open() as other:
        assert other.count(where) == 0
        index.upsert([random_item("two", metadata={"a": [0, 5], "b": {"c": [2]}})], SERVED)
        assert [entry.id for entry in other.scan(parse_filter("a = 5 and b.c = 2"))] == ["two"]
        for text in ("a > 1", "a != 1", "exists(a)", "a = null", "label = '\"'"):
            with pytest.raises(
                retrieval.errors.DataError, match=r"Milvus cannot decide on '(a|label)'"
            ):
                other.count(parse_filter(text))


def test_more_items_than_milvus_finds(index, monkeypatch):
    index.upsert(numbered_items(10), SERVED)
    monkeypatch.setattr(type(index), "most_found", 5)
    with pytest.raises(retrieval.errors.StoreError, match="at most 5 items"):
        index.search(random_vectors(1, 12, 0), 6, SERVED)


def test_nobody_answers(cli):
    result = cli("index", "list", "milvus://127.0.0.1:9/photos?timeout=1")
    assert result.code == 2 and "does not answer" in result.err and "Traceback" not in result.err


def test_a_server_that_goes_away_comes_back(milvus, tmp_path, makers, plain_bundle):
    if not hasattr(milvus, "kill"):
        pytest.skip("the server of MILVUS_URI is not ours to end")
    image = makers.write_digits(tmp_path / "digits", 30)[3]
    where = str(address(milvus, str(tmp_path)))
    retrieval.Index.create(where, [tmp_path / "digits"], model=plain_bundle, progress=False)
    place = MilvusPlace(stores.Address.parse(where), timeout=2)
    with (
        retrieval.serve(f"{where}?timeout=2", port=0, wait=False) as served,
        Client(served.url, retries=Retries(times=0)) as client,
        place.open() as store,
    ):
        bundle = Bundle.open(plain_bundle, threads=1)
        store.upsert([random_item("late", 0, bundle)], bundle.sha256)
        milvus.kill()
        with pytest.raises(stores.StoreUnavailable, match="does not answer"):
            store.count()
        with pytest.raises(ServerError) as refused:
            client.search(image, k=1)
        assert refused.value.status == 503
        milvus.start()
        store.timeout = 60.0
        ids = {entry.id for entry in store.scan()}
        assert len(ids) == 31 and "late" in ids and store.count() == 31
        (hits,) = store.search(random_item("late", 0, bundle).vector[None], 40, bundle.sha256)
        assert {entry.id for entry in hits} == ids
        store.upsert([random_item("later", 0, bundle)], bundle.sha256)
        assert {entry.id for entry in store.scan()} == ids | {"later"}
        assert str(image).endswith(client.search(image, k=1).results[0].key)
        for turn in range(KILLS - 1):  # the last acknowledged change is kept
            if turn:
                store.delete(["later"])
            else:
                store.upsert([random_item("last", 0, bundle)], bundle.sha256)
            milvus.kill()
            milvus.start()
            last = {"last"} if turn else {"last", "later"}
            assert {entry.id for entry in store.scan()} == ids | last
    place.drop()


def test_two_who_change_an_item_at_once_lose_nothing(index):
    """Each has a store of its own, as two processes have."""
    index.upsert([random_item("a", metadata={"n": -1}, original=b"x" * 50_000)], SERVED)

    def change(store: Any, name: str) -> None:
        for n in range(6):
            changes = {"label": str(n)}
            if name != "label":
                changes = {"metadata": {name: n}}
            assert store.update(["a"], changes, SERVED) == 1

    place = MilvusPlace(stores.Address.parse(index.address))
    with place.open() as first, place.open() as second, place.open() as third:
        names = {"label": first, "n": second, "m": third}
        errors = run_together(*(partial(change, names[name], name) for name in names))
    assert errors == []
    item = index.get(["a"])["a"]
    assert (item.label, item.metadata) == ("5", {"n": 5, "m": 5})
    assert index.original("a") == b"x" * 50_000
    assert not [row for row in index._all_rows(REGISTER) if row.id.startswith(CLAIM)]


@pytest.mark.parametrize("deletes", [False, True])
def test_what_is_added_or_deleted_beside_a_change_is_not_undone(index, deletes):
    """The change has read the old item, and writes it after the other has written."""
    index.upsert([random_item(id, original=b"x" * 50_000) for id in "ab"], SERVED)
    new = random_item("a", 1, label="new", original=b"y")
    place = MilvusPlace(stores.Address.parse(index.address))
    with place.open() as other, ThreadPoolExecutor(1) as pool:
        exchange = index._exchange_rows
        writes = []

        def late(*arguments):
            work = partial(other.upsert, [new], SERVED)
            if deletes:
                work = partial(other.delete, ["a"])
            writes.append(pool.submit(work))
            seen = [] if deletes else ["new"]
            until(lambda: [row.record["label"] for row in index._read_rows(*read)] == seen)
            return exchange(*arguments)

        read = (index.generations()[0], ["a"])
        index._exchange_rows = late
        assert index.update(["a", "b"], {"metadata": {"n": 1}}, SERVED) == 2
        assert writes[0].result() == 1
    items = index.get("ab")
    assert items.pop("b").metadata == {"n": 1}
    assert index.original("a") == (None if deletes else b"y")
    assert items == ({} if deletes else {"a": replace(new, arrays={}, original=None)})
    pieces = [row.id for row in index._all_rows(REGISTER) if len(row.id) > 32]
    # One is of the bundle, and two are of "b".
    assert len(pieces) == 3 + (not deletes), pieces


def test_who_meets_anothers_change_is_told_and_who_died_is_forgotten(index):
    index.upsert([random_item("a")], SERVED)
    place = MilvusPlace(stores.Address.parse(index.address), timeout=2.0)
    with place.open() as store:
        for seconds in (0.0, 61.0):
            claim = Row({"id": f"{CLAIM}another", "seconds": time.time() - seconds}, {})
            index._write_rows(REGISTER, [claim])
            if seconds:
                assert store.update(["a"], {"label": "new"}, SERVED) == 1
                continue
            with pytest.raises(stores.StoreUnavailable, match="Another process changes items"):
                store.update(["a"], {"label": "new"}, SERVED)
            assert index.get(["a"])["a"].label is None
