"""Milvus as a store, on a real server: every case of the contract, filters, the verbs of the command line, and a server that goes away."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import retrieval
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from retrieval import stores, testing
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import parse_filter
from retrieval.serving.store.testing.bench import item, normal, some
from retrieval.serving.store.testing.bundles import opened

pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
from retrieval_milvus.place import MilvusPlace

KILLS = int(os.environ.get("MILVUS_KILLS", "1"))
"""How often the server is killed, 1 to 3: each time takes it some 3 s to come back. With 3, a write and a delete are killed over, too."""


def address(milvus: Any, *words: object, options: str = "") -> stores.Address:
    """The address of an index whose name is made of some words."""
    name = "t" + hashlib.sha256(repr(words).encode()).hexdigest()[:16]
    return stores.Address.parse(f"milvus://{milvus.place}/{name}{options}")


class Spares:
    """Empty indexes, made several at a time: Milvus looks once a second for collections that are loaded by now, and a test would wait for two such looks.

    Args:
        milvus: the server.
    """

    def __init__(self, milvus: Any) -> None:
        self._milvus, self._numbers = milvus, itertools.count()
        self._left: list[stores.Address] = []

    def take(self) -> stores.Address:
        """Return the address of one that nobody has."""
        if not self._left:
            self._left = [address(self._milvus, "spare", os.getpid(), next(self._numbers)) for _ in range(8)]
            bundle = opened()
            widths = stores.widths_of(bundle)
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda at: MilvusPlace(at).create(bundle, widths).close(), self._left))
        return self._left.pop()

    def drop(self) -> None:
        """Delete those that were not taken."""
        for at in self._left:
            MilvusPlace(at).drop()


@pytest.fixture(scope="module")
def spares(milvus: Any) -> Iterator[Spares]:
    made = Spares(milvus)
    yield made
    made.drop()


class TestMilvus(testing.StoreSuite):
    """`retrieval.testing` holds the cases. More items than an answer has rows (1,000 with their text) are enough for all but `many`."""

    kept, searched = 1200, 1200
    milvus: Any
    spares: Spares
    taken: dict[Path, stores.Address]

    @pytest.fixture(autouse=True)
    def _server(self, milvus: Any, spares: Spares) -> None:
        type(self).milvus, type(self).spares, type(self).taken = milvus, spares, {}

    def at(self, place: Path) -> MilvusPlace:
        return MilvusPlace(self.taken.get(place) or address(self.milvus, str(place)))

    def create(self, place: Path, bundle: Bundle, widths: Mapping[str, int]) -> stores.Store:
        plain = (bundle.sha256, widths) == (opened().sha256, stores.widths_of(opened()))
        if not plain or place in self.taken:
            return super().create(place, bundle, widths)
        self.taken[place] = self.spares.take()
        return self.at(place).open()


@pytest.fixture
def index(spares: Spares) -> Iterator[stores.RowStore]:
    """An empty index."""
    place = MilvusPlace(spares.take())
    with place.open() as store:
        yield store
    place.drop()


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_filters_agree_with_the_language(index: stores.RowStore, agree: Any, data: st.DataObject) -> None:
    """Whatever is written in a filter means what the filter language says, and nothing of it becomes Milvus's."""
    agree(index, data)


def test_another_index_in_the_same_server(index: stores.RowStore, milvus: Any) -> None:
    """Names that begin alike are two indexes; one that Milvus cannot have is refused, and so is a collection of somebody else's."""
    longer = MilvusPlace(stores.Address.parse(f"{index.address}_more"))
    assert not longer.exists()
    with longer.create(opened(), stores.widths_of(opened())) as other:
        other.upsert(some(3), opened().sha256)
        assert (index.count(), other.count()) == (0, 3)
    longer.drop()
    assert index.changed() is None and not longer.exists()
    for name in ("a__g1", "a-b", "", "1a", "ä", "a" * 300, "a%20b"):
        with pytest.raises(retrieval.StoreError, match="names no index"):
            MilvusPlace(stores.Address.parse(f"milvus://{milvus.place}/{name}"))


def test_what_is_long_is_kept_in_pieces(index: stores.RowStore) -> None:
    """Labels, metadata and originals are larger than Milvus's longest text; a list has more values than its arrays."""
    given = item("long", label="é" * 200_000, metadata={"a": "x" * 300_000, "b": list(range(5000))}, original=bytes(range(256)) * 900)  # fmt: skip
    index.upsert([given, *some(20)], opened().sha256)
    read = index.get(["long"], arrays=True)["long"]
    assert (read.label, read.metadata) == (given.label, given.metadata)
    assert index.original("long") == given.original
    for where, expected in (("b = 4999", ["long"]), ("b = 5001", []), ("not b = 1 and price = 1", ["id 2"])):
        assert [one.id for one in index.scan(parse_filter(where))] == expected, where
    (found,) = index.search(given.vector[None], 1, opened().sha256, where=parse_filter("b > 4998"))
    assert [one.id for one in found] == ["long"]


def test_structures_are_built_and_searched(index: stores.RowStore) -> None:
    """Each of them finds most of what a flat one finds, now and in generations to come; the head says which it is."""
    index.upsert(some(400), opened().sha256)
    queries = normal(5, 12, 3)
    exact = [{one.id for one in found} for found in index.search(queries, 10, opened().sha256)]
    for name in index.structures:
        index.take_structure(name, {})
        assert index.stats().details["backend"] == name
        found = [{one.id for one in found} for found in index.search(queries, 10, opened().sha256)]
        assert sum(len(a & b) for a, b in zip(found, exact, strict=True)) >= 40, name


def test_the_parameters_of_a_structure_are_those_of_its_search(
    index: stores.RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One list of many finds less than all of them, and nothing is built for those; what `tune` has chosen finds what was asked for."""
    index.upsert(some(1500), opened().sha256)
    queries = normal(20, 12, 3)

    def found() -> list[set[str]]:
        return [{one.id for one in each} for each in index.search(queries, 10, opened().sha256)]

    def recall() -> float:
        return sum(len(a & b) for a, b in zip(found(), exact, strict=True)) / 200

    exact = found()
    index.take_structure("ivf", {"lists": 32, "probes": 1})
    few = recall()
    with monkeypatch.context() as patch:
        patch.setattr(index.engine._client, "release_collection", None)  # as would be needed to build
        index.take_structure("ivf", {"lists": 32, "probes": 32})
    assert few < 0.8 and recall() == 1
    with retrieval.open_index(index.address) as opened_:
        tuned = opened_.tune(recall=0.9, progress=False)
    assert tuned.chosen is not None
    assert {one.backend for one in tuned.trials} == set(index.structures)
    assert index.stats().details["backend"] == tuned.chosen.backend and recall() >= 0.85


def test_a_writer_that_was_stopped_leaves_nothing(
    index: stores.RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had written before its head was replaced is never seen, and the next writer removes it."""
    index.upsert(some(10), opened().sha256)
    with monkeypatch.context() as patch:
        patch.setattr(index.engine, "keep", _stopped)
        for call in (
            lambda: index.upsert([item("new"), item("id 1", 3)], opened().sha256),
            lambda: index.delete(["id 2"]),
        ):
            with pytest.raises(ZeroDivisionError):
                call()
    ids = [one.id for one in index.scan()]
    assert ids == sorted(one.id for one in some(10)) and index.count() == 10
    index.upsert([item("newer")], opened().sha256)
    assert [one.id for one in index.scan()] == sorted([*ids, "newer"])
    (found,) = index.search(item("id 2").vector[None], 30, opened().sha256)
    assert len(found) == 11


def _stopped(head: str) -> None:
    raise ZeroDivisionError


def test_writers_take_turns_and_the_dead_are_not_waited_for(
    index: stores.RowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stores write in turns; one whose lease was taken over, since it gave no sign of life, writes nothing."""
    other = MilvusPlace(stores.Address.parse(index.address)).open()
    with other:
        writers = [threading.Thread(target=store.upsert, args=([item(f"{at}")], opened().sha256)) for at, store in enumerate([index, other] * 2)]  # fmt: skip
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert other.count() == index.count() == 4
        monkeypatch.setattr("retrieval.serving.rows.lease._DEAD", 1.0)
        monkeypatch.setattr("retrieval.serving.rows.lease._RENEW", 0.0)
        with index.change() as change:
            assert other.upsert([item("4")], opened().sha256) == 0
            with pytest.raises(retrieval.StoreError, match="Another process writes"):
                index.put(change, stores.RECORDS, [])
        assert index.count() == 5
        monkeypatch.setattr("retrieval.serving.rows.lease._DEAD", 60.0)
        other._lease._wait = 0.3
        with index.change(), pytest.raises(retrieval.StoreError, match="written to by another process"):
            other.delete(["4"])


def test_dead_rows_are_swept(index: stores.RowStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are gone from the engine once no reader can be at their moment; what is alive stays."""
    index.upsert([item("kept", original=b"x" * 100_000), *some(20)], opened().sha256)
    index.delete([f"id {number}" for number in range(15)])
    index.upsert([item("kept")], opened().sha256)
    rows = stores.Between("born", 0, stores.ALIVE)
    before = index.engine.count(stores.RECORDS, rows, seen=0)
    monkeypatch.setattr("retrieval.serving.rows.store.SWEPT_AFTER", -1.0)
    index.compact()
    assert index.engine.count(stores.RECORDS, rows, seen=0) <= before - 16 - 3  # items, pieces
    assert sorted(one.id for one in index.scan()) == sorted(
        ["kept", *(f"id {number}" for number in range(15, 20))]
    )


def test_what_is_refused_or_left_to_the_caller(
    index: stores.RowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More items than the engine finds at once; a snapshot whose rows were swept meanwhile; answers are not kept."""
    index.upsert(some(10), opened().sha256)
    assert index.once("key", "request", lambda: b"answer") == b"answer" and index.answered("key") is None
    monkeypatch.setattr(type(index.engine), "most_found", 5)
    with pytest.raises(retrieval.StoreError, match="at most 5 items"):
        index.search(normal(1, 12, 0), 6, opened().sha256)
    other = MilvusPlace(stores.Address.parse(index.address)).open()

    def swept(store: stores.Store, target: Path) -> None:
        stores.write_copy(store, target)
        other.delete(["id 1"])
        other.compact()

    monkeypatch.setattr("retrieval.serving.rows.store.SWEPT_AFTER", -5.0)
    monkeypatch.setattr("retrieval.serving.rows.store.write_copy", swept)
    with other, pytest.raises(retrieval.StoreError, match="was swept"):
        index.snapshot(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.fixture
def verb(milvus: Any, tmp_path: Path, cli: Any, makers: Any, plain_bundle: Path) -> Iterator[Any]:
    """The verb of `retrieval index` at an index of thirty digits, as JSON where it gives that."""
    makers.write_digits(tmp_path / "digits", 30)
    where = str(address(milvus, str(tmp_path)))

    def call(verb: str, *words: Any, code: int = 0, json_: bool = True) -> Any:
        done = cli("index", verb, where, *words, *(["--json"] if json_ else []))
        assert done.code == code, done.err
        return json.loads(done.out) if json_ and code == 0 else done

    call.address = where  # type: ignore[attr-defined]
    made = call("create", tmp_path / "digits", "--bundle", plain_bundle, json_=False)
    assert "Indexed 30 items" in made.out and where in made.out
    yield call
    MilvusPlace(stores.Address.parse(where)).drop()


def _nearest(url: str, image: Path) -> dict[str, Any]:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + image.read_bytes()
    )
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}v1/search", body + b"\r\n--x--\r\n", kind), timeout=60
    ) as done:
        found: dict[str, Any] = json.load(done)["results"][0]
        return found


def test_the_verbs_of_the_command_line(
    verb: Any, tmp_path: Path, cli: Any, plain_bundle: Path, other_bundle: Path
) -> None:
    """All of them, and two servers that follow a migration."""
    digits = sorted((tmp_path / "digits").rglob("*.png"))
    again = verb("add", tmp_path / "digits")
    assert (again["index"], again["added"], again["unchanged"]) == (verb.address, 0, 30)
    first = verb("list", "--limit", 1)["items"][0]["id"]
    assert len(verb("show", first)["vector"]) == 16 and verb("show")["items"] == 30
    found = cli("search", verb.address, digits[4], "-k", "1", "--json")
    (hit,) = json.loads(found.out)[0]["results"]
    assert str(digits[4]).endswith(hit["id"]) and hit["distance"] == pytest.approx(0, abs=1e-3)
    assert verb("delete", first)["deleted"] == 1 and verb("list")["count"] == 29
    assert verb("add", tmp_path / "digits")["added"] == 1 and verb("check")["damaged"] == []
    assert "compacted" in verb("compact", json_=False).out
    assert "items: 30" in (shown := verb("show", json_=False).out) and "None" not in shown
    verb("snapshot", tmp_path / "s.index")
    assert json.loads(cli("index", "list", tmp_path / "s.index", "--json").out)["count"] == 30
    for name, words, said in [
        ("tune", (), "1,200"),
        ("create", (digits[0], "--bundle", plain_bundle), "exists already"),
        ("show", ("nobody",), "has no item 'nobody'"),
    ]:  # fmt: skip
        told = verb(name, *words, code=2, json_=False)
        assert said in told.err and "Traceback" not in told.err, (name, told.err)
    run = {"port": 0, "wait": False}
    with retrieval.serve(verb.address, **run) as one, retrieval.serve(verb.address, **run) as other:
        for url in (one.url, other.url):
            nearest = _nearest(url, digits[7])
            assert str(digits[7]).endswith(nearest["key"]) and nearest["distance"] == pytest.approx(
                0, abs=1e-3
            )
        verb("migrate", other_bundle)
        verb("delete", nearest["key"])
        for url in (one.url, other.url):
            assert not str(digits[7]).endswith(_nearest(url, digits[7])["key"])
    assert verb("rollback")["generation"] == 1
    assert (
        verb("migrate", other_bundle, "--drop-old")["generation"] == 2
        and len(verb("show")["generations"]) == 1
    )


def test_nobody_answers(cli: Any) -> None:
    """A server that is not there is a sentence, soon."""
    told = cli("index", "list", "milvus://127.0.0.1:9/photos?timeout=1")
    assert told.code == 2 and "does not answer" in told.err and "Traceback" not in told.err
    with pytest.raises(stores.StoreUnavailable):
        MilvusPlace(stores.Address.parse("milvus://127.0.0.1:9/photos?timeout=1"), timeout=1).exists()


def test_a_server_that_goes_away_comes_back(milvus: Any, verb: Any, tmp_path: Path) -> None:
    """Meanwhile whoever has the index open is told so; afterwards they go on. What was written just before the kill is there."""
    if not hasattr(milvus, "kill"):
        pytest.skip("the server of MILVUS_URI is not ours to end")
    image = sorted((tmp_path / "digits").rglob("*.png"))[3]
    place = MilvusPlace(stores.Address.parse(verb.address), timeout=2)
    with retrieval.serve(f"{verb.address}?timeout=2", port=0, wait=False) as served, place.open() as store:
        sha256 = store.generations()[0].bundle
        bundle = retrieval.open_bundle(store.bundle(store.generations()[0]))
        store.upsert([item("late", 0, bundle)], sha256)
        milvus.kill()
        with pytest.raises(stores.StoreUnavailable, match="does not answer"):
            store.count()
        with pytest.raises(urllib.error.HTTPError) as refused:
            _nearest(served.url, image)
        with refused.value as answer:
            assert answer.code == 503
        milvus.start()
        store.engine._timeout = 60.0
        ids = {one.id for one in store.scan()}
        assert len(ids) == 31 and "late" in ids and store.count() == 31
        (found,) = store.search(item("late", 0, bundle).vector[None], 40, sha256)
        assert {one.id for one in found} == ids
        store.upsert([item("later", 0, bundle)], sha256)
        assert {one.id for one in store.scan()} == ids | {"later"}
        assert str(image).endswith(_nearest(served.url, image)["key"])
        for at in range(KILLS - 1):  # the last thing that it was told is kept, whatever it is
            store.delete(["later"]) if at else store.upsert([item("last", 0, bundle)], sha256)
            milvus.kill()
            milvus.start()
            assert {one.id for one in store.scan()} == ids | ({"last"} if at else {"last", "later"})
