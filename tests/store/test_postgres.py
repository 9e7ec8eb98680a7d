"""The suite of stores on a real Postgres with pgvector, which is also killed."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import retrieval
from agreeing import agree
from hypothesis import HealthCheck, given, settings, strategies as st
from retrieval.client import Client, Retries
from retrieval.errors import DataError, ServerError, StoreError
from retrieval.plugin import stores
from retrieval.store.contract import patience
from retrieval.store.filters import Compare, Exists, In, matches, parse_filter
from wire import until

from retrieval_engines import testing
from retrieval_engines.testing.bench import numbered_items, random_item, random_vectors
from retrieval_engines.testing.small_bundles import WIDTH, shared_bundle

pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")
from retrieval_engines.postgres.place import PostgresPlace

SERVED = shared_bundle().sha256
KILLS = int(os.environ.get("POSTGRES_KILLS", "2"))
"""Number of kills of the server while two threads write."""


@pytest.fixture(scope="module")
def server(postgres_server):
    return postgres_server


pytestmark = pytest.mark.usefixtures("server")


def address(*words: object, options: str = "") -> stores.Address:
    """Return the address of an index whose name is a hash of `words`."""
    name = "t" + hashlib.sha256(repr(words).encode()).hexdigest()[:16]
    return stores.Address.parse(f"postgresql:///postgres/{name}{options}")


class TestPostgres(testing.StoreSuite):
    def store_at(self, place):
        return PostgresPlace(address(str(place)))


class TestPostgresGraph(testing.StoreSuite):
    recall = 0.7
    many = 2000

    def store_at(self, place):
        return PostgresPlace(address(str(place), "graph"), exact=False)


@pytest.fixture
def index(tmp_path):
    """An empty index."""
    place = PostgresPlace(address(str(tmp_path)))
    with place.create(shared_bundle(), stores.widths_of(shared_bundle())) as store:
        yield store
    place.drop()


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_filters_agree_with_the_language(index, data):
    agree(index, data)


def opened(store: stores.Store, **options: Any) -> Any:
    """Return a second store of the same index, with connections of its own."""
    return PostgresPlace(stores.Address.parse(store.address), **options).open()


def test_another_index_in_the_same_database(index):
    longer = PostgresPlace(stores.Address.parse(f"{index.address}_more"))
    assert not longer.exists()
    with longer.create(shared_bundle(), stores.widths_of(shared_bundle())) as other:
        other.upsert(numbered_items(3), SERVED)
        assert (index.count(), other.count()) == (0, 3)
    longer.drop()
    assert index.changed() is None and not longer.exists()
    index.upsert(numbered_items(3), SERVED)


def test_names_that_no_index_can_have():
    for name in ("a__1", "a-b", "1a", "ä", "a" * 41, "a%20b", 'a"b', "a;b", "a'b"):
        with pytest.raises(StoreError, match="names no index"):
            PostgresPlace(stores.Address.parse(f"postgresql://host/postgres/{name}"))
    for path, options in (("a/b/c", {}), ("b/c", {"connections": 0}), ("b/c", {"timeout": 0.0})):
        with pytest.raises(StoreError, match=r"too many parts|with 1 to|above 0"):
            PostgresPlace(stores.Address.parse(f"postgresql://host/{path}"), **options)


INJECTIONS = (
    "'; drop table retrieval_indexes; --",
    "') or true --",
    "$$; select pg_sleep(60); $$",
    "%s %(a)s %%",
    "{0} {table}",
    "\\'; \\",
    "a' || 'b",
    "$[*] ? (true)",
    '{"a": 1}',
)


def test_no_text_of_a_user_becomes_sql(index, server):
    for text in INJECTIONS:
        metadata = {
            text: text,
            "plain": text,
            "nested": {text.replace('"', "").replace("\\", ""): 1},
        }
        index.upsert([random_item(text, label=text, metadata=metadata)], SERVED)
        index.set_note(index.generations()[0], text, text.encode())
    assert index.count() == len(INJECTIONS)
    for text in INJECTIONS:
        name = text.replace('"', "").replace("\\", "")
        for filter in (
            Compare("id", "=", text),
            Compare("label", "=", text),
            Compare(("plain",), "=", text),
            In(("plain",), (text, 1, None)),
            Compare(("nested", name), "=", 1),
            Compare(("nested", name), ">", 0),
            Exists(("nested", name)),
        ):
            assert [item.id for item in index.scan(filter)] == [text], filter
        assert index.get([text]).keys() == {text}
        assert index.note(index.generations()[0], text) == text.encode()
        with pytest.raises(DataError, match="No item of this index has a field"):
            index.count(Exists((f"unknown {name}",)))
    assert index.update(["none"], {"label": INJECTIONS[0]}, SERVED, filter=Exists("label")) == 9
    assert index.delete(INJECTIONS) == len(INJECTIONS) and index.count() == 0
    with server.connect() as connection:
        assert connection.execute("select count(*) from retrieval_indexes").fetchone()[0] >= 1


def test_numbers_are_compared_as_float64(index):
    numbers = [2**53, 2**53 + 1, 2.0**60, 2**60, 1e300, -1e300, 5e-324, 0.1, -0.0, 1e16, 2**63 - 1]
    items = [random_item(f"{n:02}", metadata={"n": number}) for n, number in enumerate(numbers)]
    index.upsert(items, SERVED)
    for item in items:
        read = index.get([item.id])[item.id].metadata
        assert read == item.metadata and stores.checked([item], {}), item
    for op in ("=", "!=", "<", "<=", ">", ">="):
        for number in numbers:
            filter = Compare(("n",), op, number)
            expected = [item.id for item in items if matches(filter, "", None, item.metadata)]
            assert [item.id for item in index.scan(filter)] == expected, filter


def test_a_call_that_fails_or_is_killed_changes_nothing(index, server, monkeypatch):
    index.upsert(numbered_items(5), SERVED)
    before = {item.id: item for item in index.scan()}
    write = type(index)._write_rows

    def killed(self, generation, rows):
        write(self, generation, rows)
        with server.connect() as connection:
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where state = 'idle in transaction' and application_name = 'retrieval'"
            )

    def interrupted(self, generation, rows):
        write(self, generation, rows)
        raise KeyboardInterrupt

    for broken, error in ((killed, stores.StoreUnavailable), (interrupted, KeyboardInterrupt)):
        with monkeypatch.context() as patch:
            patch.setattr(type(index), "_write_rows", broken)
            changed = [random_item("new", original=b"x" * 100_000), random_item("id 1", 5)]
            with pytest.raises(error):
                index.upsert(changed, SERVED)
            with pytest.raises(error):
                index.update(["id 1"], {"label": "changed", "metadata": {"other": 1}}, SERVED)
        assert {item.id: item for item in index.scan()} == before
        assert "other" not in index.settings()["fields"]
    assert index.upsert(changed, SERVED) == 1


def test_an_update_keeps_what_others_change_meanwhile(index):
    """Two stores have their own connections, as two processes have."""
    index.upsert([random_item("a", metadata={"n": -1})], SERVED)

    def change(store: Any, name: str) -> list[object]:
        lost = []
        for n in range(60):
            entry = str(n) if name == "label" else {"n": n}
            assert store.update(["a"], {name: entry}, SERVED) == 1
            item = store.get(["a"])["a"]
            if (item.label if name == "label" else {"n": item.metadata["n"]}) != entry:
                lost.append(entry)
        return lost

    with opened(index) as first, opened(index) as second, ThreadPoolExecutor() as pool:
        changes = [pool.submit(change, first, "label"), pool.submit(change, second, "metadata")]
        assert [change.result() for change in changes] == [[], []]
    assert (index.get(["a"])["a"].label, index.get(["a"])["a"].metadata) == ("59", {"n": 59})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGQUIT])
def test_a_server_that_is_killed_while_two_write_loses_nothing_acknowledged(index, server, how):
    """SIGQUIT is Postgres's immediate shutdown: it ends all processes, and writes nothing more.

    Each call writes a pair of items and deletes an earlier pair; both happen or neither does. The
    words of the items are those of the labels afterwards.
    """
    index.keep_words()
    kept: list[dict[str, str]] = [{}, {}]
    stop = threading.Event()

    def write(number: int) -> int:
        refused = 0
        with opened(index, timeout=0.5) as store:
            for turn in count():
                if stop.is_set():
                    return refused
                ids = [f"{number} {turn} {side}" for side in ("left", "right")]
                label = str(turn)
                try:
                    items = [random_item(id, turn, label=label, original=b"x") for id in ids]
                    store.upsert(items, SERVED)
                except StoreError:
                    refused += 1
                    continue
                kept[number].update(dict.fromkeys(ids, label))
                gone = [f"{number} {turn - 5} {side}" for side in ("left", "right")]
                # A deletion whose answer is lost may have happened.
                for id in gone:
                    kept[number].pop(id, None)
                with suppress(StoreError):
                    store.delete(gone)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, number) for number in range(2)]
        try:
            for _ in range(KILLS):
                time.sleep(0.7)
                server.kill(how)
                time.sleep(0.3)
                server.start()
            time.sleep(1)
        finally:
            stop.set()
        refused = [writer.result() for writer in writers]
    assert all(refused), "no writer noticed a kill"
    found = {item.id: item.label for item in index.scan(limit=100_000)}
    assert min(len(ids) for ids in kept) > 4
    for ids in kept:
        lost = {id for id, label in ids.items() if found.get(id) != label}
        assert not lost
    pairs = Counter(id.rpartition(" ")[0] for id in found)
    assert set(pairs.values()) == {2}, "half of a call is there"
    assert index.originals(found) == dict.fromkeys(found, b"x")
    for turn in range(200):
        ids = {id for id, _ in index.search_words(str(turn), 100)}
        assert ids == {id for id, label in found.items() if label == str(turn)}
    (hits,) = index.search(random_item(next(iter(found)), 0).vector[None], 10_000, SERVED)
    assert {item.id for item in hits} == found.keys()


@pytest.mark.parametrize(("asked", "used"), [("off", "on"), ("local", "local")])
def test_a_write_is_acknowledged_once_it_is_on_disk(index, monkeypatch, asked, used):
    monkeypatch.setenv("PGOPTIONS", f"-c synchronous_commit={asked}")
    with opened(index) as store, store._writing():
        assert store._execute("show synchronous_commit") == [(used,)]
        store.upsert(numbered_items(1), SERVED)
        assert store._execute("show synchronous_commit") == [(used,)]


def test_no_more_connections_than_allowed(index, server):
    index.upsert(numbered_items(200), SERVED)
    query = random_vectors(1, WIDTH, 0)
    with opened(index, connections=2, timeout=20.0) as store, server.connect() as watcher:
        watcher.execute("set application_name = 'watcher'")
        others = set(watcher.execute(OURS).fetchall())

        def search() -> int:
            for _ in range(20):
                assert len(store.search(query, 5, SERVED)[0]) == 5
            return len(set(watcher.execute(OURS).fetchall()) - others)

        with ThreadPoolExecutor(8) as pool:
            most = [result.result() for result in [pool.submit(search) for _ in range(8)]]
        assert 1 <= max(most) <= 2
    with (
        opened(index, connections=1, timeout=0.5) as store,
        store._reading(),
        ThreadPoolExecutor(1) as pool,
        pytest.raises(stores.StoreUnavailable, match=r"All 1 connections .* are in use"),
    ):
        pool.submit(store.count).result()


OURS = "select pid from pg_stat_activity where application_name = 'retrieval'"


def test_who_waits_too_long_is_told(index):
    index.upsert(numbered_items(5), SERVED)
    with (
        opened(index) as other,
        other._writing(),
        opened(index, timeout=0.5) as store,
        ThreadPoolExecutor(1) as pool,
    ):
        with pytest.raises(stores.StoreUnavailable, match="Try again"):
            pool.submit(store.delete, ["id 1"]).result()
        # Who only reads does not wait.
        assert pool.submit(store.count).result() == 5
    assert index.delete(["id 1"]) == 1


def test_a_call_that_takes_longer_than_patience(index):
    index.upsert(numbered_items(5), SERVED)
    with opened(index) as other, other._writing(), patience(0.3), pytest.raises(stores.TooSlow):
        index.delete(["id 1"])
    assert index.count() == 5


def test_a_switch_waits_for_who_writes_and_is_seen_whole(index):
    other_bundle = shared_bundle(seed=1, width=WIDTH + 5)
    index.upsert(numbered_items(20), SERVED)
    generation = index.begin(other_bundle, stores.widths_of(other_bundle))
    while pending := index.pending(generation, 7):
        index.embed(generation, [random_item(item.id, 0, other_bundle) for item in pending])
    with opened(index) as writer, ThreadPoolExecutor(1) as pool:
        with writer._writing():
            switched = pool.submit(index.switch, generation)
            time.sleep(0.2)
            writer.upsert([random_item("late")], SERVED)
            writer.delete(["id 3"])
            assert not switched.done()
        assert switched.result() is False
        (pending,) = index.pending(generation, 10)
        index.embed(generation, [random_item("late", 0, other_bundle)])
        assert pending.id == "late" and index.switch(generation) is True
        with pytest.raises(stores.Superseded):
            writer.upsert([random_item("old")], SERVED)
        assert writer.count() == 20 and writer.get(["id 3"]) == {}


def test_wide_vectors_and_those_that_are_too_wide(tmp_path):
    for width, exact, sentence in (
        (16_001, True, "up to 16,000 numbers in a table, and these have 16,001"),
        (4_001, False, "up to 4,000 numbers in a graph; search exactly"),
        (16_000, True, None),
        (2_500, False, None),
        (2_000, False, None),
    ):
        bundle = shared_bundle(width=width)
        place = PostgresPlace(address(str(tmp_path), width), exact=exact)
        if sentence is not None:
            with pytest.raises(StoreError, match=sentence):
                place.create(bundle, stores.widths_of(bundle))
            assert not place.exists()
            continue
        with place.create(bundle, stores.widths_of(bundle)) as store:
            items = [random_item(f"{n:02}", 0, bundle) for n in range(30)]
            store.upsert(items, bundle.sha256)
            (hits,) = store.search(items[3].vector[None], 5, bundle.sha256)
            assert "03" in {item.id for item in hits} and len(hits) == 5
            np.testing.assert_array_equal(
                store.get(["07"], arrays=True)["07"].vector, items[7].vector
            )
        place.drop()


def test_a_graph_is_built_anew_in_one_go(tmp_path, server, monkeypatch):
    # Postgres would rather read all of so few rows.
    monkeypatch.setenv("PGOPTIONS", "-c enable_seqscan=off")
    where = address(str(tmp_path), options="?exact=false")
    items = numbered_items(2000)
    vectors = np.stack([item.vector for item in items])
    queries = random_vectors(20, WIDTH, 3)
    with PostgresPlace(where).create(shared_bundle(), stores.widths_of(shared_bundle())) as store:
        store.upsert(items, SERVED)
        with pytest.raises(StoreError, match="nothing to compact"):
            store.compact()
    reports = []
    with PostgresPlace(where, exact=False).open() as store, server.connect() as connection:
        for _ in range(2):
            store.compact(lambda done, total: reports.append((done, total)))
        hits = store.search(queries, 10, SERVED)
        found = [
            len({item.id for item in near} & {items[row].id for row in order[:10]})
            for near, order in zip(
                hits, np.square(vectors - queries[:, None]).sum(2).argsort(1), strict=True
            )
        ]
        assert np.mean(found) >= 9
        # A filter that few items match: the graph alone would not reach them.
        (few,) = store.search(
            queries[:1], 10, SERVED, filter=parse_filter("id in ('id 7', 'id 8')")
        )
        assert {item.id for item in few} == {"id 7", "id 8"}
        scans = "select sum(idx_scan) from pg_stat_user_indexes where indexrelname like %s"
        connection.execute("select pg_stat_force_next_flush()")
        store.close()
        until(lambda: connection.execute(scans, (f"{where.name}%v0",)).fetchone()[0] >= 20)
    assert reports == [(2000, 2000)] * 2
    PostgresPlace(where).drop()


def test_a_migration_builds_the_graph_once_before_it_is_served(tmp_path, server, monkeypatch):
    bundle = shared_bundle(seed=1, width=WIDTH + 5)
    where = address(str(tmp_path))
    place = PostgresPlace(where, exact=False)
    graphs = "select count(*) from pg_indexes where indexname like %s and indexdef like %s"
    with place.create(shared_bundle(), stores.widths_of(shared_bundle())) as store:
        store.upsert(numbered_items(300), SERVED)
        generation = store.begin(bundle, stores.widths_of(bundle))
        with server.connect() as connection:
            entry = (f"{store.collection(2)}%", "%hnsw%")
            while pending := store.pending(generation, 100):
                store.embed(generation, [random_item(item.id, 0, bundle) for item in pending])
                assert connection.execute(graphs, entry).fetchone() == (0,)
            late = opened(store)
            switch = type(store)._build_graphs

            def built(self, generation):
                # Others write while the graph is built.
                late.upsert([random_item("late")], SERVED)
                switch(self, generation)

            monkeypatch.setattr(type(store), "_build_graphs", built)
            assert store.switch(generation) is False
            monkeypatch.setattr(type(store), "_build_graphs", None)
            store.embed(
                generation,
                [random_item(item.id, 0, bundle) for item in store.pending(generation, 9)],
            )
            assert store.switch(generation) is True
            assert connection.execute(graphs, entry).fetchone() == (1,)
        late.close()
        (hits,) = store.search(random_item("late", 0, bundle).vector[None], 1, bundle.sha256)
        assert [item.id for item in hits] == ["late"]
    place.drop()


def test_the_newest_items_come_first_before_and_after_a_migration(index):
    bundle = shared_bundle(seed=1, width=WIDTH + 5)
    index.upsert(numbered_items(6), SERVED)
    index.update(["id 2"], {"label": "new"}, SERVED)
    expected = ["id 2", "id 5", "id 4", "id 3", "id 1", "id 0"]

    def pages() -> list[str]:
        ids = []
        page = index.newest(limit=2)
        while page:
            ids += [item.id for _, item in page]
            page = index.newest(before=page[-1][0], limit=2)
        return ids

    assert pages() == expected
    generation = index.begin(bundle, stores.widths_of(bundle))
    while pending := index.pending(generation, 10):
        index.embed(generation, [random_item(item.id, 0, bundle) for item in pending])
    assert index.switch(generation) and pages() == expected
    index.upsert([random_item("late", 0, bundle)], bundle.sha256)
    assert [item.id for _, item in index.newest(limit=1)] == ["late"]
    (kept,) = index.newest(parse_filter("label = 'new'"))
    assert kept[1].id == "id 2"
    with pytest.raises(DataError, match="can never match"):
        index.newest(parse_filter("price = 'much'"))


def test_equality_in_metadata_asks_an_index(index, server):
    index.upsert(numbered_items(3000), SERVED)
    table = index.collection(1)
    scans = "select sum(idx_scan) from pg_stat_user_indexes where indexrelname like %s"
    with server.connect() as connection:
        connection.execute(f'analyze "{table}"')
        for text, column in (
            ("price = 2.5 and tags = 'odd'", "metadata"),
            ("label = 'x'", "label"),
        ):
            filter = parse_filter(text)
            expected = [
                item
                for item in index.scan(limit=3000)
                if matches(filter, item.id, item.label, item.metadata)
            ]
            assert index.count(filter) == len(expected)
            # A connection that ends tells what it did.
            index._client.close_idle()
            entry = (f"{table}_{column}_idx",)
            until(lambda entry=entry: connection.execute(scans, entry).fetchone()[0] >= 1)


SERVERS = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
CERTIFY = (
    "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    " -addext subjectAltName=DNS:localhost -out {0}.pem -keyout {0}.key"
)


@pytest.mark.skipif("not SERVERS or shutil.which('openssl') is None")
def test_tls_with_a_certificate_of_ones_own(monkeypatch, cli):
    """The server with pgvector speaks no TLS, so this is one of Debian's, which lacks pgvector."""
    with tempfile.TemporaryDirectory() as temporary, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        folder = Path(temporary)
        for name in ("server", "other"):
            command = CERTIFY.format(name).split()
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        shutil.chown(folder, "nobody")
        shutil.chown(folder / "server.key", "nobody")
        data = folder / "data"
        create = [SERVERS[-1].with_name("initdb"), "-D", data, "-U", "postgres", "-A", "trust"]
        subprocess.run(create, check=True, capture_output=True, user="nobody", cwd=folder)
        (data / "pg_hba.conf").write_text("hostssl all all all trust\n")
        options = [
            "ssl=on",
            f"ssl_cert_file={folder}/server.pem",
            f"ssl_key_file={folder}/server.key",
        ]
        words = [word for option in options for word in ("-c", option)]
        command = [SERVERS[-1], "-D", data, "-k", folder, "-h", "127.0.0.1", "-p", port, *words]
        process = subprocess.Popen(
            command, user="nobody", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        where = f"postgresql://localhost:{port}/postgres/photos?timeout=10"
        monkeypatch.setenv("PGUSER", "postgres")
        try:
            for mode, authority, sentence in (
                ("require", None, "CREATE EXTENSION vector"),
                ("verify-full", "server", "CREATE EXTENSION vector"),
                ("verify-full", "other", "certificate verify failed"),
                ("disable", None, "no encryption"),
            ):
                monkeypatch.setenv("PGSSLMODE", mode)
                monkeypatch.setenv("PGSSLROOTCERT", f"{folder}/{authority or 'none'}.pem")
                result = cli("index", "list", where)
                assert result.code == 2 and sentence in result.err, result.err
                assert "Traceback" not in result.err
        finally:
            process.terminate()
            process.wait(60)


def test_passwords_are_read_from_the_environment_and_never_shown(
    index, server, monkeypatch, caplog, cli
):
    caplog.set_level("DEBUG")
    where = str(index.address)
    with server.connect() as connection:
        connection.execute("create role clerk superuser login password 'open sesame'")
    server.require_passwords("clerk")
    try:
        monkeypatch.setenv("PGUSER", "clerk")
        monkeypatch.setenv("PGPASSWORD", "open sesame")
        with PostgresPlace(stores.Address.parse(where)).open() as store:
            assert store.count() == 0
            assert "sesame" not in f"{store!r} {vars(store)!r} {store.stats()} {store.settings()}"
        monkeypatch.setenv("PGPASSWORD", "wrong sesame")
        result = cli("index", "list", where)
        assert result.code == 2 and "authentication failed" in result.err
        assert "Set PGUSER and PGPASSWORD" in result.err and "Traceback" not in result.err
        monkeypatch.delenv("PGPASSWORD")
        result = cli("index", "list", where)
        assert result.code == 2 and "no password supplied" in result.err
        for secret in ("postgresql://clerk:sesame@host/db/photos", f"{where}?password=sesame"):
            result = cli("index", "list", secret)
            assert result.code == 2 and "must not hold" in result.err
            assert "sesame" not in result.err + result.out
        assert "sesame" not in caplog.text
    finally:
        server.require_passwords()
        with server.connect() as connection:
            connection.execute("drop role clerk")


def test_servers_and_databases_that_do_not_fit(server, cli):
    result = cli("index", "list", "postgresql://127.0.0.1:9/postgres/photos?timeout=1")
    assert result.code == 2 and "does not answer" in result.err and "Traceback" not in result.err
    result = cli("index", "list", "postgresql:///nowhere/photos")
    assert result.code == 2 and 'database "nowhere" does not exist' in result.err
    with server.connect() as connection:
        connection.execute("create database bare")
        connection.execute("create database latin encoding 'LATIN1' locale 'C' template template0")
    result = cli("index", "list", "postgresql:///bare/photos")
    assert result.code == 2 and "CREATE EXTENSION vector" in result.err
    result = cli("index", "list", "postgresql:///latin/photos")
    assert result.code == 2 and "UTF-8" in result.err
    with server.connect("bare") as connection:
        connection.execute("create extension vector")
    result = cli("index", "list", "postgresql:///bare/photos")
    assert result.code == 2 and "There is no index at" in result.err


def test_a_role_that_may_not_write_is_told(index, server, monkeypatch):
    with server.connect() as connection:
        connection.execute("create role guest login")
        connection.execute("grant select on all tables in schema public to guest")
    monkeypatch.setenv("PGUSER", "guest")
    with opened(index) as store:
        assert store.count() == 0
        with pytest.raises(StoreError, match="refuses: permission denied for table"):
            store.upsert(numbered_items(3), SERVED)
        assert store.count() == 0
    with server.connect() as connection:
        connection.execute("drop owned by guest; drop role guest")


def test_an_index_is_served_while_it_changes_and_its_server_is_killed(
    server, makers, plain_bundle, other_bundle, cli, tmp_path
):
    """Two servers share the index, and need no restart after that of Postgres."""
    images = makers.write_digits(tmp_path / "photos", 12)
    (tmp_path / "more" / "9").mkdir(parents=True)
    late = images[-1].rename(tmp_path / "more" / "9" / "late.png")
    where = str(address(str(tmp_path)))

    def run(*words: object) -> str:
        result = cli("index", words[0], where, *words[1:])
        assert result.code == 0, result.err
        return str(result.out)

    assert "Indexed 11 items" in run("create", tmp_path / "photos", "--bundle", plain_bundle)
    serving = partial(retrieval.serve, f"{where}?timeout=2", port=0, wait=False)
    with (
        serving() as first,
        serving() as second,
        Client(first.url, retries=Retries(times=0)) as client,
        Client(second.url, retries=Retries(times=0)) as other,
    ):

        def nearest(image: Path) -> list[str]:
            keys = [each.search(image, k=1).results[0].key for each in (client, other)]
            return [key.rpartition("/")[2] for key in keys]

        assert nearest(images[3]) == [images[3].name] * 2
        assert "1 added" in run("add", tmp_path / "more")
        assert nearest(late) == ["late.png"] * 2
        assert "keeps the words of its 12 items" in run("words")
        run("migrate", other_bundle)
        assert nearest(late) == ["late.png"] * 2
        assert "number 2, state served" in run("show")
        server.kill()
        for each in (client, other):
            with pytest.raises(ServerError) as refused:
                each.search(late, k=1)
            assert refused.value.status == 503
        server.start()
        assert nearest(images[3]) == [images[3].name] * 2
        run("rollback")
        (label,) = {item.label for item in client.items() if item.key.endswith("late.png")}
        for each in (client, other):
            hits = each.search(text=f"a {label}").results
            assert "9/late.png" in {hit.key for hit in hits}
            assert {hit.label for hit in hits} == {label}
        assert "1 deleted" in run("delete", f"9/{late.name}")
        assert nearest(late) != ["late.png"] * 2
    copy = tmp_path / "copy.index"
    run("snapshot", copy)
    assert cli("index", "check", copy).code == 0
    restored = str(address(str(tmp_path), "restored"))
    assert cli("index", "restore", copy, restored).code == 0
    with retrieval.Index.open(restored) as index:
        assert len(index) == 11
        assert index.search(images[3], k=1)[0].id.endswith(images[3].name)
    for each in (where, restored):
        PostgresPlace(stores.Address.parse(each)).drop()
