"""Signed bundles and indexes: made by the holder of the key, or refused."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from pathlib import Path

import pytest
from retrieval.errors import BundleError, MissingDependency, RetrievalError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.build import write_index
from retrieval.serving.index.open import open_index
from retrieval.serving.manifest import checksum_of
from retrieval.serving.signing import new_key, sign


@pytest.fixture
def keys(tmp_path):
    key = tmp_path / "maker.key"
    return key, new_key(key)


def test_a_signed_index_opens_and_any_other_is_refused(index_path, photos, keys, makers, tmp_path, cli):
    key, public = keys
    own = Path(shutil.copytree(index_path, tmp_path / "own"))
    with pytest.raises(StoreError, match=r"is not signed: SHA256SUMS\.sig is missing"):
        open_index(own, signed_by=public)
    made = cli("sign", own, "--key", key)
    assert made.code == 0 and "Signed" in made.out, made.err
    open_index(own, signed_by=public, threads=1).close()
    open_index(own, threads=1).close()  # nobody asks
    query = next((photos / "1").iterdir())
    assert cli("search", own, query, "-k", "1", "--require-signature", public).code == 0

    signature = (own / "SHA256SUMS.sig").read_bytes()
    raw = bytearray(base64.b64decode(signature))
    raw[5] ^= 1
    for spoiled in (base64.b64encode(raw), b"", b"no base64", signature[:-9], signature * 9):
        (own / "SHA256SUMS.sig").write_bytes(spoiled)
        refused = cli("search", own, query, "--require-signature", public)
        assert refused.code == 2 and "Traceback" not in refused.err, spoiled
        assert "is not what the holder" in refused.err or "is not signed" in refused.err
    (own / "SHA256SUMS.sig").write_bytes(signature)
    _, other = key, new_key(tmp_path / "other.key")
    with pytest.raises(StoreError, match="or another key signed it"):
        open_index(own, signed_by=other)
    makers.change_index(own, lambda content: content.update(created="later"))  # with checksums that fit
    open_index(own, threads=1).close()
    with pytest.raises(StoreError, match="it was changed, or another key signed it"):
        open_index(own, signed_by=public)


def test_a_signed_bundle(bundle_path, photos, keys, tmp_path):
    key, public = keys
    own = Path(shutil.copytree(bundle_path, tmp_path / "own"))
    with pytest.raises(BundleError, match="is not signed"):
        write_index(own, [photos / "1"], tmp_path / "i", signed_by=public, progress=False)
    sign(own, key)
    Bundle.open(own, signed_by=public, threads=1)
    write_index(own, [photos / "1"], tmp_path / "i", signed_by=public, progress=False)
    content = json.loads((own / "manifest.json").read_text())
    content["name"] = "mine"
    content["checksum"] = checksum_of(content)
    (own / "manifest.json").write_text(json.dumps(content))
    Bundle.open(own, threads=1)
    with pytest.raises(BundleError, match="another key signed it"):
        Bundle.open(own, signed_by=public)
    # a bundle's signature is none of an index, though both cover one text
    shutil.copy(own / "manifest.json.sig", tmp_path / "i" / "SHA256SUMS.sig")
    with pytest.raises(StoreError, match="another key signed it"):
        open_index(tmp_path / "i", signed_by=public)


def test_what_is_damaged_is_not_signed(bundle_path, keys, tmp_path):
    own = Path(shutil.copytree(bundle_path, tmp_path / "own"))
    (own / "encoder.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match="is damaged"):
        sign(own, keys[0])
    with pytest.raises(BundleError, match="no such folder"):
        sign(tmp_path / "nowhere", keys[0])
    assert not list(tmp_path.rglob("*.sig"))


def test_keys(keys, index_path, tmp_path, cli, monkeypatch):
    key, public = keys
    assert key.stat().st_mode & 0o077 == 0
    with pytest.raises(RetrievalError, match="exists already"):
        new_key(key)
    (tmp_path / "text").write_text("no key")
    for bad, says in (
        (key, "not a public key"),
        (tmp_path / "text", "not a public key"),
        (tmp_path / "nothing", "is missing"),
        (Path("/dev/zero"), "regular file"),
        (tmp_path, "regular file"),
    ):
        with pytest.raises(RetrievalError, match=says):
            open_index(index_path, signed_by=bad)
    with pytest.raises(RetrievalError, match="not a private key"):
        sign(index_path, public)
    assert cli("sign", "--key", key).code == 2
    made = cli("sign", "--key", tmp_path / "new.key", "--new-key")
    assert made.code == 0 and (tmp_path / "new.key.pub").is_file()
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setattr("retrieval.serving.runtime.installed_packages", lambda names: [])
    with pytest.raises(MissingDependency, match=r"embedding-retrieval\[sign\]"):
        open_index(index_path, signed_by=public)
