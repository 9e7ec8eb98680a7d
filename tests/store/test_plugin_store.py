"""A plugin's store under every index command, and behind servers."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import retrieval
from retrieval.bundle.bundle import Bundle
from retrieval.errors import StoreError
from retrieval.host.scaffold import write_package
from retrieval.index import adding
from retrieval.index.index import create_index
from retrieval.store.contract import StoreUnavailable
from retrieval.store.local import LocalStore

from retrieval_server import readiness
from retrieval_server.settings import Settings

Call = Callable[..., Any]


@pytest.fixture
def journal(tmp_path, monkeypatch, cli, makers, plain_bundle):
    """Run a verb of `retrieval index` on a journal of thirty digits; returns its JSON."""
    monkeypatch.syspath_prepend(str(write_package("acme", tmp_path / "package", "store")))
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "cache"))
    makers.write_digits(tmp_path / "digits", 30)
    address = f"journal://{tmp_path}/d.journal?sync=false"

    def call(verb, *words, code=0, json_=True):
        more = ("--plugin", "retrieval_acme", *(["--json"] if json_ else []))
        done = cli("index", verb, address, *words, *more)
        assert done.code == code, done.err
        return json.loads(done.out) if json_ and code == 0 else done

    call.address = address
    created = call("create", tmp_path / "digits", "--bundle", plain_bundle, json_=False)
    for text in ("Indexed 30 items", "back end journal", address):
        assert text in created.out
    return call


def nearest_to(url: str, image: Path) -> httpx.Response:
    return httpx.post(f"{url}v1/search", files={"image": image.read_bytes()}, timeout=60)


def test_the_verbs_of_the_command_line(journal, tmp_path, cli, plain_bundle):
    digits = sorted((tmp_path / "digits").rglob("*.png"))
    assert journal("list")["count"] == 30
    again = journal("add", tmp_path / "digits")
    assert (again["index"], again["added"], again["unchanged"]) == (journal.address, 0, 30)
    first = journal("list", "--limit", 1)["items"][0]["id"]
    assert len(journal("show", first)["vector"]) == 16 and journal("show")["items"] == 30
    options = ("-k", "1", "--json", "--plugin", "retrieval_acme")
    hits = cli("search", journal.address, digits[4], *options)
    (hit,) = json.loads(hits.out)[0]["results"]
    assert str(digits[4]).endswith(hit["id"]) and hit["distance"] == pytest.approx(0, abs=1e-3)
    assert journal("delete", first)["deleted"] == 1 and journal("list")["count"] == 29
    assert journal("add", tmp_path / "digits", "--sync")["added"] == 1
    create = (digits[0], "--bundle", plain_bundle)
    for verb, words, message in [
        ("compact", (), "A journal keeps every transaction"),
        ("check", (), "Only an index in a folder can be checked"),
        ("create", create, "exists already"),
        ("create", (*create, "--backend", "hnsw", "--replace"), "Only an index in a folder"),
        ("migrate", (), "Name the bundle"),
        ("show", ("nobody",), "has no item 'nobody'"),
    ]:
        result = journal(verb, *words, code=2, json_=False)
        assert message in result.err and "Traceback" not in result.err, (verb, result.err)
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    assert "bad.png" in journal("create", bad, *create, "--replace", code=2).err
    # --replace deletes the old index first.
    assert journal("list", code=2).err.count("There is no index at") == 1


def test_snapshots_go_both_ways(journal, tmp_path, cli):
    copy, second = tmp_path / "s.index", f"journal://{tmp_path}/second.journal"
    plugins = ["retrieval_acme"]
    journal("snapshot", copy)
    assert json.loads(cli("index", "list", copy, "--json").out)["count"] == 30
    done = cli("index", "restore", copy, second, "--plugin", *plugins)
    assert done.code == 0 and f"Restored {second}" in done.out
    with (
        retrieval.Index.open(journal.address, plugins=plugins) as entry,
        retrieval.Index.open(second, plugins=plugins) as other,
    ):
        assert str(other.path) == second and entry.identity == other.identity and len(other) == 30
        query = sorted((tmp_path / "digits").rglob("*.png"))[3]
        assert entry.search(query) == other.search(query)
    result = cli("index", "restore", copy, second, "--plugin", *plugins)
    assert result.code == 2 and "exists already" in result.err


def test_what_a_killed_create_left_is_added_to(
    journal, tmp_path, plain_bundle, monkeypatch, killed
):
    address, encode, encoded = f"journal://{tmp_path}/second.journal", Bundle.encode, []
    digits, options = tmp_path / "digits", {"plugins": ["retrieval_acme"], "progress": False}

    def counted(self, inputs, *arguments, **named):
        encoded.append(len(inputs))
        return encode(self, inputs, *arguments, **named)

    def until_the_third(self, *arguments, **named):
        if len(encoded) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return counted(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Bundle, "encode", until_the_third)
        patch.setattr(adding, "_SECONDS", 0.0)
        killed(lambda: create_index(address, plain_bundle, [digits], batch_size=8, **options))
    monkeypatch.setattr(Bundle, "encode", counted)
    with pytest.raises(StoreError, match=r"exists already\. Add to it with 'retrieval index add'"):
        create_index(address, plain_bundle, [digits], **options)
    with retrieval.Index.open(address, plugins=["retrieval_acme"]) as index:
        present = len(index)
        assert 0 < present < 30
        added = index.add(digits, progress=False)
        assert (added.added, added.unchanged, len(index)) == (30 - present, present, 30)
    assert sum(encoded) == 30 - present
    replaced = create_index(address, plain_bundle, [digits], replace=True, **options)
    assert (replaced.count, replaced.resumed) == (30, 0)


def test_two_servers_of_one_address_follow_a_migration(
    journal, tmp_path, plain_bundle, other_bundle
):
    image = sorted((tmp_path / "digits").rglob("*.png"))[7]
    old, new = (Bundle.open(path, threads=1).sha256 for path in (plain_bundle, other_bundle))

    def nearest(url):
        while (answer := nearest_to(url, image)).status_code == 503:  # busy
            time.sleep(0.2)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"][0]

    settings = {"port": 0, "plugins": ["retrieval_acme"], "wait": False}
    with (
        retrieval.serve(journal.address, **settings) as entry,
        retrieval.serve(journal.address, **settings) as other,
    ):
        for url in (entry.url, other.url):
            hit = nearest(url)
            assert str(image).endswith(hit["key"])
            assert hit["distance"] == pytest.approx(0, abs=1e-3)
        journal("migrate", other_bundle)
        journal("delete", hit["key"])
        for url in (entry.url, other.url):
            assert not str(image).endswith(nearest(url)["key"])
    states = {created["bundle"]: created["state"] for created in journal("show")["generations"]}
    assert states == {old: "kept", new: "served"}
    assert journal("rollback")["generation"] == 1
    assert journal("migrate", other_bundle, "--drop-old")["generation"] == 2
    assert len(journal("show")["generations"]) == 1


# A store that becomes unreachable while its index is served, and comes back.

METHODS = "upsert delete get original scan count search propose generations stats changed snapshot"


def test_a_store_that_goes_away_is_503_until_it_is_back(
    tmp_path, makers, plain_bundle, cli, monkeypatch
):
    digits, away, folder = tmp_path / "digits", threading.Event(), tmp_path / "d.index"
    makers.write_digits(digits, 12)
    create_index(folder, plain_bundle, [digits], progress=False)

    def leaving(method):
        def call(self, *arguments, **named):
            if away.is_set():
                raise StoreUnavailable("The engine does not answer: connection refused.")
            return method(self, *arguments, **named)

        return call

    for name in METHODS.split():
        monkeypatch.setattr(LocalStore, name, leaving(getattr(LocalStore, name)))
    monkeypatch.setattr(readiness, "PROBE_SECONDS", 0.2)
    settings = Settings(open="write")
    with retrieval.serve(folder, port=0, settings=settings, wait=False) as server:
        url = f"{server.url}v1"
        first = httpx.get(f"{url}/items?limit=1").json()["items"][0]["id"]
        requests: dict[str, Callable[[], httpx.Response]] = {
            "search": lambda: nearest_to(server.url, min(digits.rglob("*.png"))),
            "items": lambda: httpx.get(f"{url}/items?limit=1"),
            "item": lambda: httpx.get(f"{url}/items/{first}"),
            "put": lambda: httpx.put(f"{url}/items/mine", json={"vector": [0.0] * 16}),
            "index": lambda: httpx.get(f"{url}/index"),
        }

        def all_answered():
            for name, request in requests.items():
                assert request().status_code in (200, 201), name
            while httpx.get(f"{server.url}readyz").status_code != 200:
                time.sleep(0.05)

        all_answered()
        away.set()
        for name, request in requests.items():
            refused = request()
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1"), name
            detail = refused.json()["detail"]
            assert "cannot be reached now" in detail and "try again" in detail, (name, detail)
            assert "it is damaged" not in detail and "disk" not in detail, (name, detail)
        while (ready := httpx.get(f"{server.url}readyz")).status_code == 200:
            time.sleep(0.05)
        assert "cannot be reached now" in ready.json()["checks"]["search"], ready.text
        metrics = httpx.get(f"{server.url}metrics").text
        assert 'retrieval_refused_total{reason="unreachable"}' in metrics
        result = cli("index", "list", folder)
        assert result.code == 2 and "does not answer: connection refused" in result.err
        away.clear()
        all_answered()
