"""Milvus as a store, on a real server that also goes away."""

import hashlib
import itertools
import json
import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import retrieval
from agreeing import agree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from retrieval.plugin import stores, testing
from retrieval.serving.filters import parse_filter
from retrieval.serving.store.testing.bench import item, normal, some
from retrieval.serving.store.testing.bundles import opened

pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
from retrieval_milvus.place import MilvusPlace

KILLS = int(os.environ.get("MILVUS_KILLS", "1"))
"""How often the server is killed, 1 to 3: each time takes it some 3 s to come back.

With 3, a write and a delete are killed over, too.
"""


def address(milvus: Any, *words: object, options: str = "") -> stores.Address:
    """The address of an index whose name is made of some words."""
    name = "t" + hashlib.sha256(repr(words).encode()).hexdigest()[:16]
    return stores.Address.parse(f"milvus://{milvus.place}/{name}{options}")


class Spares:
    """Empty indexes, made several at a time: Milvus looks once a second for collections that are
    loaded by now, and a test would wait for two such looks.

    Args:
        milvus: the server.
    """

    def __init__(self, milvus: Any) -> None:
        self._milvus, self._numbers = milvus, itertools.count()
        self._left: list[stores.Address] = []

    def take(self) -> stores.Address:
        """Return the address of one that nobody has."""
        if not self._left:
            self._left = [
                address(self._milvus, "spare", os.getpid(), next(self._numbers)) for _ in range(8)
            ]
            bundle = opened()
            widths = stores.widths_of(bundle)
            with ThreadPoolExecutor(8) as pool:
                list(
                    pool.map(lambda at: MilvusPlace(at).create(bundle, widths).close(), self._left)
                )
        return self._left.pop()

    def drop(self) -> None:
        """Delete those that were not taken."""
        for at in self._left:
            MilvusPlace(at).drop()


@pytest.fixture(scope="module")
def spares(milvus):
    created = Spares(milvus)
    yield created
    created.drop()


class TestMilvus(testing.StoreSuite):
    """`retrieval.plugin.testing` holds the cases.

    More items than an answer has rows (1,000 with their text) are enough for all but `many`.
    """

    searched = 1200
    milvus: Any
    spares: Spares
    taken: dict[Path, stores.Address]

    @pytest.fixture(autouse=True)
    def _server(self, milvus, spares):
        type(self).milvus, type(self).spares, type(self).taken = milvus, spares, {}

    def store_at(self, place):
        return MilvusPlace(self.taken.get(place) or address(self.milvus, str(place)))

    def create(self, place, bundle, widths):
        plain = (bundle.sha256, widths) == (opened().sha256, stores.widths_of(opened()))
        if not plain or place in self.taken:
            return super().create(place, bundle, widths)
        self.taken[place] = self.spares.take()
        return self.store_at(place).open()


@pytest.fixture
def index(spares):
    """An empty index."""
    place = MilvusPlace(spares.take())
    with place.open() as store:
        yield store
    place.drop()


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_filters_agree_with_the_language(index, data):
    agree(index, data)


def test_another_index_in_the_same_server(index, milvus):
    longer = MilvusPlace(stores.Address.parse(f"{index.address}_more"))
    assert not longer.exists()
    with longer.create(opened(), stores.widths_of(opened())) as other:
        other.upsert(some(3), opened().sha256)
        assert (index.count(), other.count()) == (0, 3)
    longer.drop()
    assert index.changed() is None and not longer.exists()
    for name in ("a__g1", "a-b", "", "1a", "ä", "a" * 300, "a%20b"):
        with pytest.raises(retrieval.errors.StoreError, match="names no index"):
            MilvusPlace(stores.Address.parse(f"milvus://{milvus.place}/{name}"))


def test_what_is_long(index):
    original = bytes(range(256)) * 900
    index.upsert([item("kept", original=original), *some(20)], opened().sha256)
    assert index.original("kept") == original
    long = item("long", metadata={"a": "é" * 40_000}, original=b"x")
    with pytest.raises(
        retrieval.errors.DataError, match=r"'long' has 80,\d+ bytes of id, label, metadata"
    ):
        index.upsert([item("good"), long], opened().sha256)
    assert index.count() == 21 and index.settings()["fields"] == ["price", "tags"]
    index.upsert([item("kept")], opened().sha256)
    assert index.original("kept") is None


def test_a_graph_finds_most_of_what_is_nearest(milvus):
    place = MilvusPlace(address(milvus, "graph", options="?exact=false"), exact=False)
    with place.create(opened(), stores.widths_of(opened())) as index:
        index.upsert(some(400), opened().sha256)
        queries = normal(5, 12, 3)
        vectors = np.stack([item.vector for item in some(400)])
        hits = index.search(queries, 10, opened().sha256)
        for query, items in zip(queries, hits, strict=True):
            order = np.square(vectors - query).sum(1).argsort()[:10]
            assert len({item.id for item in items} & {some(400)[row].id for row in order}) >= 8
    place.drop()


def test_filters_that_milvus_cannot_decide_are_refused(index):
    """It compares one value only."""
    index.upsert([item("one", metadata={"a": 1, "b": {"c": 1}})], opened().sha256)
    where = parse_filter("a > 1 and b.c = 2")
    with MilvusPlace(stores.Address.parse(index.address)).open() as other:
        assert other.count(where) == 0
        index.upsert([item("two", metadata={"a": [0, 5], "b": {"c": [2]}})], opened().sha256)
        assert [entry.id for entry in other.scan(parse_filter("a = 5 and b.c = 2"))] == ["two"]
        for text in ("a > 1", "a != 1", "exists(a)", "a = null", "label = '\"'"):
            with pytest.raises(
                retrieval.errors.DataError, match=r"Milvus cannot decide on '(a|label)'"
            ):
                other.count(parse_filter(text))


def test_more_items_than_milvus_finds(index, monkeypatch):
    index.upsert(some(10), opened().sha256)
    monkeypatch.setattr(type(index), "most_found", 5)
    with pytest.raises(retrieval.errors.StoreError, match="at most 5 items"):
        index.search(normal(1, 12, 0), 6, opened().sha256)


@pytest.fixture
def verb(milvus, tmp_path, cli, makers, plain_bundle):
    """The verb of `retrieval index` at an index of thirty digits, as JSON where it gives that."""
    makers.write_digits(tmp_path / "digits", 30)
    where = str(address(milvus, str(tmp_path)))

    def call(verb, *words, code=0, json_=True):
        done = cli("index", verb, where, *words, *(["--json"] if json_ else []))
        assert done.code == code, done.err
        return json.loads(done.out) if json_ and code == 0 else done

    call.address = where
    created = call("create", tmp_path / "digits", "--bundle", plain_bundle, json_=False)
    assert "Indexed 30 items" in created.out and where in created.out
    yield call
    MilvusPlace(stores.Address.parse(where)).drop()


def _nearest(url: str, image: Path) -> dict[str, Any]:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
        + image.read_bytes()
    )
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}v1/search", body + b"\r\n--x--\r\n", kind), timeout=60
    ) as done:
        hits: dict[str, Any] = json.load(done)["results"][0]
        return hits


def test_the_verbs_of_the_command_line(verb, tmp_path, cli, plain_bundle, other_bundle):
    digits = sorted((tmp_path / "digits").rglob("*.png"))
    again = verb("add", tmp_path / "digits")
    assert (again["index"], again["added"], again["unchanged"]) == (verb.address, 0, 30)
    first = verb("list", "--limit", 1)["items"][0]["id"]
    assert len(verb("show", first)["vector"]) == 16 and verb("show")["items"] == 30
    hits = cli("search", verb.address, digits[4], "-k", "1", "--json")
    (hit,) = json.loads(hits.out)[0]["results"]
    assert str(digits[4]).endswith(hit["id"]) and hit["distance"] == pytest.approx(0, abs=1e-3)
    assert verb("delete", first)["deleted"] == 1 and verb("list")["count"] == 29
    assert verb("add", tmp_path / "digits")["added"] == 1
    assert "gives back room by itself" in verb("compact", code=2, json_=False).err
    assert "items: 30" in (shown := verb("show", json_=False).out) and "None" not in shown
    verb("snapshot", tmp_path / "s.index")
    assert json.loads(cli("index", "list", tmp_path / "s.index", "--json").out)["count"] == 30
    for name, words, message in [
        ("create", (digits[0], "--bundle", plain_bundle), "exists already"),
        ("show", ("nobody",), "has no item 'nobody'"),
    ]:
        result = verb(name, *words, code=2, json_=False)
        assert message in result.err and "Traceback" not in result.err, (name, result.err)
    verb("migrate", other_bundle)
    assert verb("rollback")["generation"] == 1
    assert (
        verb("migrate", other_bundle, "--drop-old")["generation"] == 2
        and len(verb("show")["generations"]) == 1
    )


def test_nobody_answers(cli):
    result = cli("index", "list", "milvus://127.0.0.1:9/photos?timeout=1")
    assert result.code == 2 and "does not answer" in result.err and "Traceback" not in result.err
    with pytest.raises(stores.StoreUnavailable):
        MilvusPlace(
            stores.Address.parse("milvus://127.0.0.1:9/photos?timeout=1"), timeout=1
        ).exists()


def test_a_server_that_goes_away_comes_back(milvus, verb, tmp_path):
    if not hasattr(milvus, "kill"):
        pytest.skip("the server of MILVUS_URI is not ours to end")
    image = sorted((tmp_path / "digits").rglob("*.png"))[3]
    place = MilvusPlace(stores.Address.parse(verb.address), timeout=2)
    with (
        retrieval.serve(f"{verb.address}?timeout=2", port=0, wait=False) as served,
        place.open() as store,
    ):
        sha256 = store.generations()[0].bundle
        bundle = retrieval.load(store.bundle(store.generations()[0])).bundle
        store.upsert([item("late", 0, bundle)], sha256)
        milvus.kill()
        with pytest.raises(stores.StoreUnavailable, match="does not answer"):
            store.count()
        with pytest.raises(urllib.error.HTTPError) as refused:
            _nearest(served.url, image)
        with refused.value as answer:
            assert answer.code == 503
        milvus.start()
        store.timeout = 60.0
        ids = {entry.id for entry in store.scan()}
        assert len(ids) == 31 and "late" in ids and store.count() == 31
        (hits,) = store.search(item("late", 0, bundle).vector[None], 40, sha256)
        assert {entry.id for entry in hits} == ids
        store.upsert([item("later", 0, bundle)], sha256)
        assert {entry.id for entry in store.scan()} == ids | {"later"}
        assert str(image).endswith(_nearest(served.url, image)["key"])
        for at in range(KILLS - 1):  # the last thing that it was told is kept, whatever it is
            store.delete(["later"]) if at else store.upsert([item("last", 0, bundle)], sha256)
            milvus.kill()
            milvus.start()
            assert {entry.id for entry in store.scan()} == ids | (
                {"last"} if at else {"last", "later"}
            )
