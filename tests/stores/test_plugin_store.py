"""A store that a plugin brings: every verb of the command line, and HTTP."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import retrieval
from retrieval.errors import StoreError
from retrieval.host.scaffold import write_package
from retrieval.serving.bundle import Bundle
from retrieval.serving.http import readiness
from retrieval.serving.http.settings import Settings
from retrieval.serving.index.index import create_index

Call = Callable[..., Any]


@pytest.fixture
def journal(tmp_path, monkeypatch, cli, makers, plain_bundle):
    """The verb of `retrieval index` at a journal of thirty digits, as JSON where it gives that."""
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


def nearest_to(url: str, image: Path) -> tuple[str, str, bytes, str]:
    """A search for an image, as `_asked` takes it."""
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    body = head + image.read_bytes() + b"\r\n--x--\r\n"
    return f"{url}v1/search", "POST", body, "multipart/form-data; boundary=x"


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
    # what was there went first, as --replace says
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


KILLED = """
import os, sys
from retrieval.serving.bundle import Bundle
from retrieval.serving.index import adding
from retrieval.serving.index.index import create_index

encode, seen = Bundle.encode, []
def counted(self, *given, **named):
    seen.append(1)
    if len(seen) == 3:
        os._exit(9)
    return encode(self, *given, **named)

Bundle.encode, adding._SECONDS = counted, 0.0
create_index(sys.argv[1], sys.argv[2], [sys.argv[3]], plugins=["retrieval_acme"], batch=8, progress=False)
"""  # noqa: E501


def test_what_a_killed_create_left_is_added_to(
    journal, tmp_path, plain_bundle, monkeypatch, process
):
    address, encode, encoded = f"journal://{tmp_path}/second.journal", Bundle.encode, []
    digits, options = tmp_path / "digits", {"plugins": ["retrieval_acme"], "progress": False}
    path = tmp_path / "package"
    assert process("-c", KILLED, address, plain_bundle, digits, path=path).code == 9

    def counted(self, inputs, *given, **named):
        encoded.append(len(inputs))
        return encode(self, inputs, *given, **named)

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
        while (answer := _asked(*nearest_to(url, image)))[0] == 503:  # busy: pytest bounds this
            time.sleep(0.2)
        assert answer[0] == 200, answer
        return answer[2]["results"][0]

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


# A store that goes away while its index is served, and comes back: a plugin's, which raises
# `StoreUnavailable`; and the local one, held by another.


FLAKY = """
from retrieval.plugin import hookimpl, stores
from retrieval.serving.store.local import LocalPlace
from retrieval.serving.store.local import LocalStore

def asked(name):
    def call(self, *given, **named):
        if self.folder.with_name("away").exists():
            raise stores.StoreUnavailable(f"flaky://{self.folder} does not answer: connection refused.")
        return getattr(LocalStore, name)(self, *given, **named)
    return call

NAMES = ["upsert", "delete", "get", "original", "scan", "count", "search", "propose", "generations", "stats", "changed", "snapshot", "answered"]
Flaky = type("Flaky", (LocalStore,), {name: asked(name) for name in NAMES})

class FlakyPlace(LocalPlace):
    '''A folder whose engine goes away.'''
    def open(self):
        return Flaky(self.folder)

@hookimpl
def retrieval_stores():
    return {"flaky": FlakyPlace}
"""  # noqa: E501


def _asked(
    url: str, method: str = "GET", content: Any = None, kind: str = "application/json"
) -> tuple[int, Message, Any]:
    body = content if isinstance(content, bytes | None) else json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": kind}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as done:
            return done.status, done.headers, json.load(done)
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers, json.load(refused)


def test_a_store_that_goes_away_is_503_until_it_is_back(
    tmp_path, makers, plain_bundle, cli, monkeypatch
):
    digits, away = tmp_path / "digits", tmp_path / "away"
    makers.write_digits(digits, 12)
    plugin, address = tmp_path / "flaky.py", f"flaky://{tmp_path}/d.index"
    plugin.write_text(FLAKY)
    words = (address, digits, "--bundle", plain_bundle, "--plugin", plugin)
    assert cli("index", "create", *words).code == 0
    monkeypatch.setattr(readiness, "PROBE_SECONDS", 0.2)
    options = {"plugins": [str(plugin)], "settings": Settings(open="write"), "wait": False}
    with retrieval.serve(address, port=0, **options) as server:
        url = f"{server.url}v1"
        first = _asked(f"{url}/items?limit=1")[2]["items"][0]["id"]
        requests = {
            "search": nearest_to(server.url, min(digits.rglob("*.png"))),
            "items": (f"{url}/items?limit=1",),
            "item": (f"{url}/items/{first}",),
            "put": (f"{url}/items/mine", "PUT", {"vector": [0.0] * 16}),
            "index": (f"{url}/index",),
        }

        def all_answered():
            for name, request in requests.items():
                assert _asked(*request)[0] in (200, 201), name
            while _asked(f"{server.url}readyz")[0] != 200:
                time.sleep(0.05)

        all_answered()
        away.touch()
        for name, request in requests.items():
            status, headers, message = _asked(*request)
            assert (status, headers["Retry-After"]) == (503, "1"), (name, message)
            detail = message["detail"]
            assert "cannot be reached now" in detail and "try again" in detail, (name, detail)
            assert "it is damaged" not in detail and "disk" not in detail, (name, detail)
        while (ready := _asked(f"{server.url}readyz"))[0] == 200:
            time.sleep(0.05)
        assert "cannot be reached now" in ready[2]["checks"]["search"], ready
        with urllib.request.urlopen(f"{server.url}metrics", timeout=60) as figures:
            assert 'retrieval_refused_total{reason="unreachable"}' in figures.read().decode()
        result = cli("index", "list", address, "--plugin", plugin)
        assert result.code == 2 and "does not answer: connection refused" in result.err
        away.unlink()
        all_answered()
