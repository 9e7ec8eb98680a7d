"""Bundles in pieces: the store returns the same bundle, or an error."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from retrieval.base.files import cache_folder
from retrieval.bundle.bundle import Bundle
from retrieval.errors import StoreError
from retrieval.store import kept_bundles
from retrieval.store.kept_bundles import bundle_pieces, kept_bundle


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "cache"))


def packed(
    *files: tuple[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda info: None
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            change(info)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_a_bundle_comes_back_and_is_fetched_once(plain_bundle):
    bundle = Bundle.open(plain_bundle, threads=1)
    pieces = list(bundle_pieces(bundle, 1000))
    assert all(len(piece) == 1000 for piece in pieces[:-1]) and 0 < len(pieces[-1]) <= 1000
    assert pieces == list(bundle_pieces(bundle, 1000))
    fetches = []

    def give():
        fetches.append(1)
        return pieces

    for _ in range(2):
        assert Bundle.open(kept_bundle(bundle.sha256, give), threads=1).sha256 == bundle.sha256
    assert len(fetches) == 1
    for path in sorted(kept_bundle(bundle.sha256, give).iterdir()):
        for spoil in (lambda path: path.write_bytes(b"?"), Path.unlink):
            spoil(path)
            assert Bundle.open(kept_bundle(bundle.sha256, give), threads=1).sha256 == bundle.sha256


def test_what_is_not_the_bundle_is_refused_and_leaves_nothing(
    plain_bundle, other_bundle, tmp_path, monkeypatch
):
    whole = b"".join(bundle_pieces(Bundle.open(plain_bundle, threads=1)))
    sha256 = Bundle.open(plain_bundle, threads=1).sha256

    def link(info):
        info.type, info.linkname, info.size = tarfile.SYMTYPE, str(tmp_path / "outside"), 0

    files = [(path.name, path.read_bytes()) for path in sorted(plain_bundle.iterdir())]
    for what, content in {
        "another bundle": b"".join(bundle_pieces(Bundle.open(other_bundle, threads=1))),
        "noise": b"no bundle" * 1000,
        "half": whole[: len(whole) // 2],
        "one byte": whole[:700] + b"?" + whole[701:],
        "outside": packed(("../outside", b"x"), *files),
        "a link": packed(("encoder.onnx", b""), change=link),
        "twice": packed(*files, *files),
        "many": packed(*[(f"f{n}", b"") for n in range(1200)]),
    }.items():
        with pytest.raises(StoreError, match="is damaged: its checksums"):
            kept_bundle(sha256, lambda content=content: [content])
        assert not (tmp_path / "outside").exists(), what
        assert not list((cache_folder() / "bundles").iterdir()), what
    monkeypatch.setattr(kept_bundles, "BUNDLE_BYTES", 10_000)
    pieces = []

    def endless():
        while True:
            pieces.append(1)
            yield b"x" * 1000

    with pytest.raises(StoreError, match="more than"):
        kept_bundle(sha256, endless)
    assert len(pieces) == 11
    monkeypatch.setenv("RETRIEVAL_CACHE", str(plain_bundle / "manifest.json"))
    with pytest.raises(StoreError, match="environment variable RETRIEVAL_CACHE"):
        kept_bundle(sha256, lambda: [whole])
