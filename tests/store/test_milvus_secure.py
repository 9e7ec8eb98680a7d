"""Milvus over TLS and with a token from the environment."""

import json
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from retrieval.plugin import stores
from retrieval.store.find_store import store_place

from retrieval_engines.testing.bench import numbered_items
from retrieval_engines.testing.small_bundles import shared_bundle

pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
from pymilvus import MilvusClient

CERTIFY = (
    "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    " -addext subjectAltName=DNS:localhost -out server.pem -keyout server.key"
)


def test_tls_where_there_is_none(milvus, cli):
    result = cli("index", "list", f"milvus://{milvus.place}/photos?tls=true")
    assert result.code == 2 and "remove '?tls=true'" in result.err and "Traceback" not in result.err


@pytest.fixture(scope="module")
def guarded(milvus, tmp_path_factory):
    """A server with users, over TLS: its `place`, its certificate `ca`."""
    if not hasattr(milvus, "beside") or shutil.which("openssl") is None:
        pytest.skip("the server of MILVUS_URI is not ours to set up, or openssl is missing")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(CERTIFY.split(), cwd=folder, check=True, capture_output=True)
    certificate, key = folder / "server.pem", folder / "server.key"
    settings = {
        "common.security.authorizationEnabled": True,
        "common.security.tlsMode": 1,
        "tls.serverPemPath": str(certificate),
        "tls.serverKeyPath": str(key),
    }
    server = milvus.beside(tmp_path_factory.mktemp("guarded"), settings)
    try:
        server.start()
        place = server.place.replace("127.0.0.1", "localhost")
        yield SimpleNamespace(
            place=place, ca=certificate, options=f"?tls=true&ca={certificate}&timeout=20"
        )
    finally:
        server.stop()


@pytest.fixture
def token(monkeypatch):
    """The token of the user that every new server has."""
    monkeypatch.setenv("RETRIEVAL_MILVUS_TOKEN", "root:Milvus")


def test_an_index_in_a_database_over_tls(guarded, token, cli):
    client = MilvusClient(
        f"https://{guarded.place}",
        token="root:Milvus",
        server_pem_path=str(guarded.ca),
        secure=True,
    )
    client.create_database("shelf")
    client.close()
    text = f"milvus://{guarded.place}/photos{guarded.options}"
    place, shelf = store_place(text), store_place(f"{text}&database=shelf")
    with shelf.create(shared_bundle(), stores.widths_of(shared_bundle())) as store:
        store.upsert(numbered_items(5), shared_bundle().sha256)
        assert not place.exists()
        with place.create(shared_bundle(), stores.widths_of(shared_bundle())) as other:
            other.upsert(numbered_items(2), shared_bundle().sha256)
            (hits,) = store.search(numbered_items(5)[3].vector[None], 1, shared_bundle().sha256)
            assert [entry.id for entry in hits] == ["id 3"]
            assert (store.count(), other.count()) == (5, 2)
    result = cli("index", "list", f"{text}&database=shelf", "--json")
    assert result.code == 0 and json.loads(result.out)["count"] == 5
    for entry in (place, shelf):
        entry.drop()
        assert not entry.exists()


@pytest.mark.parametrize("text", ["root:no", "nobody:Milvus", ""])
def test_a_token_that_is_refused(text, guarded, cli, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_MILVUS_TOKEN", text)
    result = cli("index", "list", f"milvus://{guarded.place}/photos{guarded.options}")
    assert result.code == 2 and "Milvus refuses" in result.err
    assert "RETRIEVAL_MILVUS_TOKEN must hold" in result.err
    assert "Traceback" not in result.err and (not text or text not in result.err)


@pytest.mark.parametrize(
    ("host", "options", "sentence"),
    [
        ("localhost", "?tls=true", "self signed certificate"),
        ("localhost", "?tls=true&ca={ca}.none", "there is no file {ca}.none."),
        ("localhost", "?ca={ca}", "Write ?tls=true&ca=FILE."),
        ("localhost", "?timeout=1", "If the server speaks TLS, write ?tls=true."),
        ("localhost", "?tls=true&ca={ca}&database=nowhere", "database not found[database=nowhere]"),
        ("127.0.0.1", "?tls=true&ca={ca}", "Hostname Verification Check failed"),
    ],
)
def test_what_is_refused(host, options, sentence, guarded, token, cli):
    port = guarded.place.partition(":")[2]
    result = cli("index", "list", f"milvus://{host}:{port}/photos{options.format(ca=guarded.ca)}")
    assert result.code == 2 and sentence.format(ca=guarded.ca) in result.err, result.err
    assert "Traceback" not in result.err
