"""What lies under a file's name, and is no file, is never waited for, followed or read."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.errors import BundleError, StoreError
from retrieval.index.index import open_index
from retrieval.store import search_structure
from retrieval.store.contract import widths_of
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore
from retrieval.store.search_structure import StructureChoice
from stored import items

KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to(path.parent.parent / "moved"),
    "folder": Path.mkdir,
}


@pytest.fixture
def index(tmp_path, plain_bundle, monkeypatch):
    monkeypatch.setattr(search_structure, "MIN_ROWS", 1000)
    bundle = Bundle.open(plain_bundle, threads=1)
    create_local(tmp_path / "i", bundle, widths_of(bundle), structure=StructureChoice("hnsw", {}))
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        store.upsert(items(range(2000)), bundle.sha256)
        store.compact()
        for left in (tmp_path / "i").glob("items.sqlite-*"):
            shutil.copy(left, tmp_path / left.name)
    for name in ("items.sqlite-wal", "items.sqlite-shm"):  # as a killed process leaves them
        if (tmp_path / name).exists():
            (tmp_path / name).rename(tmp_path / "i" / name)
    return tmp_path / "i"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_read(kind, index, tmp_path):
    def answers():
        with open_index(index, threads=1) as opened:
            query = opened.store.get(["id7"], arrays=True)["id7"].vector
            return [hit.id for hit in opened.search(query, 5)]

    before = answers()
    names = [path.relative_to(index) for path in sorted(index.rglob("*")) if path.is_file()]
    refused: dict[str, str] = {}
    assert {name.suffix for name in names} >= {".json", ".sqlite", ".vector", ".hnsw"}
    for name in names:
        path = index / name
        path.rename(index.parent / "moved")
        KINDS[kind](path)
        try:
            assert answers() == before  # what is not needed, or is made again
        except (BundleError, StoreError) as fault:
            refused[name.name] = str(fault)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        (index.parent / "moved").rename(path)
    assert set(refused) >= {"index.json", "items.sqlite"}
    assert all(message.endswith(".") and "\n" not in message for message in refused.values())
    assert answers() == before
