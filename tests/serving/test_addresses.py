"""Sources at addresses that fsspec opens."""

from __future__ import annotations

import sys

import pytest
from retrieval.errors import DataError, MissingDependency
from retrieval.serving.index.index import create_index, open_index
from retrieval.serving.index.locations import stamp_of
from retrieval.serving.index.sources import collect

fsspec = pytest.importorskip("fsspec", reason="the extra fsspec is not installed")


@pytest.fixture
def memory(photos):
    """40 images in memory, in folders by class; and the same in a CSV manifest."""
    system = fsspec.filesystem("memory")
    paths = sorted(photos.rglob("*.png"))[:40]
    for path in paths:
        system.pipe_file(f"/photos/{path.parent.name}/{path.name}", path.read_bytes())
    lines = [f"photos/{path.parent.name}/{path.name},{number}" for number, path in enumerate(paths)]
    system.pipe_file("/items.csv", "\n".join(["path,price", *lines]).encode())
    yield system
    system.rm("/", recursive=True)
    system.store.clear()


def test_a_folder_is_indexed_followed_and_embedded_again(
    memory, photos, makers, bundle_path, tmp_path
):
    create_index(tmp_path / "i", bundle_path, "memory://photos", keep="copy", progress=False)
    other = makers.make_bundle(tmp_path / "other", seed=5)
    first = sorted(photos.rglob("*.png"))[0]
    key = f"{first.parent.name}/{first.name}"
    with open_index(tmp_path / "i", threads=1) as index:
        item = index.get(key)[key]
        assert (item.label, item.path) == (first.parent.name, None)
        assert item.source == f"memory://photos/{key}"
        assert index.store.original(key) == first.read_bytes()
        assert index.add("memory://photos", progress=False).unchanged == 40
        memory.pipe_file(f"/photos/{key}", sorted(photos.rglob("*.png"))[50].read_bytes())
        memory.rm_file(f"/photos/{sorted(photos.rglob('*.png'))[1].relative_to(photos)}")
        done = index.add("memory://photos", sync=True, progress=False)
        assert (done.changed, done.unchanged, done.removed) == (1, 38, 1)
        index.add("memory://photos", sync=True, progress=False)
        assert index.migrate(other, progress=False).embedded == 39


def test_a_migration_reads_addresses_again(memory, makers, bundle_path, tmp_path):
    create_index(tmp_path / "i", bundle_path, "memory://photos", progress=False)
    with open_index(tmp_path / "i", threads=1) as index:
        assert (
            index.migrate(makers.make_bundle(tmp_path / "b", seed=5), progress=False).embedded == 40
        )
        memory.rm("/photos", recursive=True)
        with pytest.raises(DataError, match=r"memory://photos/.* does not exist"):
            index.migrate(makers.make_bundle(tmp_path / "c", seed=6), progress=False)


def test_a_manifest_at_an_address_names_files_below_its_folder(memory, bundle_path, tmp_path):
    create_index(tmp_path / "i", bundle_path, "memory://items.csv", progress=False)
    with open_index(tmp_path / "i", threads=1) as index:
        assert len(index) == 40
        assert index.add("memory://items.csv", progress=False).unchanged == 40
        assert {item.metadata["price"] for item in index.scan()} == set(range(40))
    for name in ("/etc/passwd", "a/../../b.png", "file:///etc/passwd", "simplecache::memory://x"):
        memory.pipe_file("/evil.csv", f"path\n{name}\n".encode())
        with pytest.raises(DataError, match=r"names files below its own folder|path is an address"):
            collect(["memory://evil.csv"], "image")


def test_tables_at_an_address(memory, photos, bundle_path, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = sorted(photos.rglob("*.png"))[:9]
    pq.write_table(
        pa.table({"image": [path.read_bytes() for path in paths]}), tmp_path / "t.parquet"
    )
    memory.pipe_file("/t.parquet", (tmp_path / "t.parquet").read_bytes())
    create_index(tmp_path / "i", bundle_path, "memory://t.parquet", progress=False)
    with open_index(tmp_path / "i", threads=1) as index:
        assert len(index) == 9
        assert index.get("t/3")["t/3"].source == "memory://t.parquet#3"
        (vector,) = index.bundle.encode_images([paths[3]], progress=False)
        assert index.vector("t/3") == pytest.approx(vector, abs=1e-6)
        assert index.add("memory://t.parquet", progress=False).unchanged == 9


def test_what_is_not_there_is_a_sentence(memory):
    for address, error, says in (
        ("memory://nowhere", DataError, "memory://nowhere does not exist"),
        ("memory://nowhere.parquet", DataError, "does not exist"),
        ("zip://in::file://a.zip", DataError, "is a chain of addresses"),
        ("nonsense://x", DataError, "nonsense://x cannot be read"),
        ("ftp://me:secret@host/x", DataError, "password would be kept"),
    ):
        with pytest.raises(error, match=says):
            collect([address], "image")
    with pytest.raises(DataError, match="no Parquet table"):
        collect(["memory://photos"], "features")


def test_a_file_system_may_raise_anything(memory, monkeypatch):
    def broken(*_, **__):
        raise type("ClientError", (Exception,), {})("no\x1b[2J credentials")

    monkeypatch.setattr(type(memory), "find", broken)
    with pytest.raises(DataError, match=r"cannot be read: ClientError: no\\x1b\[2J credentials"):
        collect(["memory://photos"], "image")

    def missing(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(type(memory), "find", missing)
    with pytest.raises(MissingDependency, match="Install s3fs"):
        collect(["memory://photos"], "image")


def test_a_stamp_follows_tag_or_time():
    base = {"size": 3, "ETag": "a", "mtime": 1}
    assert stamp_of(base) == stamp_of(dict(base))
    for change in ({"size": 4}, {"ETag": "b"}, {"mtime": 2}):
        assert stamp_of(base) != stamp_of(base | change)


def test_without_fsspec_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingDependency, match=r"pip install 'embedding-retrieval\[fsspec\]'"):
        collect(["s3://b/x"], "image")
