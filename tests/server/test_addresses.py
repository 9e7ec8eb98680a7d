"""Photos at addresses that fsspec reads: the same items, limits and sentences as files."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest
from retrieval.base.photo_files import address_of, unreadable
from retrieval.errors import DataError, MissingDependency, ServerError
from retrieval.images.decoding import Limits, decode
from retrieval.index.index import create_index, open_index
from retrieval.index.sources import collect
from retrieval.index.write_embeddings import embed_sources
from retrieval.plugin import FileDataset

fsspec = pytest.importorskip("fsspec", reason="the extra remote is not installed")


@pytest.fixture
def bucket(photos):
    """The photos at `memory://bucket/album`, with a hidden file, a text and a broken image."""
    system = fsspec.filesystem("memory")
    for path in photos.rglob("*.png"):
        system.pipe(f"/bucket/album/{path.relative_to(photos).as_posix()}", path.read_bytes())
    system.pipe("/bucket/album/1/notes.txt", b"no image")
    system.pipe("/bucket/album/.hidden/0.png", b"hidden")
    yield system
    system.rm("/bucket", recursive=True)


def test_an_index_of_an_address_is_the_index_of_the_folder(bucket, photos, bundle_path, tmp_path):
    album = tmp_path / "album"
    album.symlink_to(photos)
    address = "memory://bucket/album"
    create_index(tmp_path / "here", bundle_path, [album], progress=False)
    summary = create_index(tmp_path / "there", bundle_path, [address], progress=False)
    assert "notes.txt" in " ".join(summary.left_out)
    with open_index(tmp_path / "here") as here, open_index(tmp_path / "there") as there:
        keys = sorted(here)
        assert sorted(there) == keys and len(keys) == summary.count
        first, second = (index.get(keys, arrays=True) for index in (here, there))
        for key in keys:
            assert first[key].label == second[key].label
            assert (first[key].vector == second[key].vector).all()
            assert address_of(second[key].path) == f"{address}/{key}"
        # unchanged items are not read again; a changed photo is
        again = there.add(address, progress=False)
        assert (again.unchanged, again.added, again.changed) == (len(keys), 0, 0)
        content = bucket.cat_file(f"/bucket/album/{keys[1]}")
        bucket.pipe(f"/bucket/album/{keys[0]}", content)
        assert there.add(address, progress=False).changed == 1
        hit = there.search(f"{address}/{keys[1]}", k=1)[0]
        assert hit.distance < 1e-6 and hit.id in keys[:2]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_names_addresses(kind, bucket, photos, bundle_path, tmp_path):
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))[:9]
    addresses = [f"memory://bucket/album/{name}" for name in names]
    table = tmp_path / f"items.{kind}"
    if kind == "csv":
        table.write_text("\n".join(["path,price", *(f"{address},1" for address in addresses)]))
    else:
        pa = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"path": addresses, "price": [1] * 9}), table)
    done = embed_sources(bundle_path, table, tmp_path / "v", progress=False)
    assert (done.items, done.bad) == (9, 0)
    create_index(tmp_path / "i", bundle_path, [tmp_path / "v"], progress=False)
    with open_index(tmp_path / "i") as index:
        assert sorted(index) == addresses
        assert address_of(index.get(addresses[0])[addresses[0]].path) == addresses[0]


def test_limits_and_sentences_are_those_of_files(bucket, photos):
    photo = min(photos.rglob("*.png"))
    address = f"memory://bucket/album/{photo.relative_to(photos).as_posix()}"
    assert decode(address).tobytes() == decode(photo).tobytes()
    for limits in (Limits(bytes=10), Limits(pixels=3)):
        with pytest.raises(DataError) as local:
            decode(photo, limits, "x")
        with pytest.raises(DataError) as there:
            decode(address, limits, "x")
        assert str(local.value) == str(there.value)
    bucket.pipe("/bucket/empty.png", b"")
    for name, says in (
        ("bucket/empty.png", r"is empty \(0 bytes\)"),
        ("bucket/album", "is a folder"),
        ("bucket/nowhere.png", "memory://bucket/nowhere.png does not exist"),
    ):
        with pytest.raises(DataError, match=says):
            decode(f"memory://{name}")
    with pytest.raises(DataError, match="memory://bucket/nowhere does not exist"):
        collect(["memory://bucket/nowhere"], "image")
    bucket.pipe("/bucket/items.csv", b"path\nx.png\n")
    with pytest.raises(DataError, match="a table at an address"):
        collect(["memory://bucket/items.csv"], "image")


def test_a_storage_that_fails_stops_the_work(bucket, bundle_path, monkeypatch, tmp_path):
    def fail(*words, **options):
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(bucket), "cat_file", fail)
    with pytest.raises(ServerError, match=r"cannot be read: no answer\.$"):
        embed_sources(bundle_path, "memory://bucket/album", tmp_path / "v", progress=False)
    assert not list((tmp_path / "v").glob("*.parquet"))


def test_a_missing_package_is_named(monkeypatch):
    with pytest.raises(MissingDependency, match="fsspec reads no photos at milvus://"):
        decode("milvus://host:19530/photos")
    unreadable.cache_clear()
    whole = builtins.__import__

    def without(name, *words, **options):
        if name.partition(".")[0] == "fsspec":
            raise ImportError(name)
        return whole(name, *words, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    try:
        with pytest.raises(MissingDependency, match=r"embedding-retrieval\[remote\]"):
            decode("s3://bucket/photo.jpg")
    finally:
        unreadable.cache_clear()


def test_a_dataset_reads_addresses(bucket, photos, tmp_path):
    from retrieval_core.folders import image_folder, manifest

    here, there = image_folder(photos), image_folder(Path("memory://bucket/album"))
    assert (list(here.keys), list(here.labels)) == (list(there.keys), list(there.labels))
    assert here[3].tobytes() == there[3].tobytes()
    address = f"memory://bucket/album/{here.keys[0]}"
    (tmp_path / "items.csv").write_text(f"path,label\n{address},a\n{photos / here.keys[1]},b\n")
    listed = manifest(tmp_path / "items.csv")
    assert isinstance(listed, FileDataset)
    assert [listed[i].tobytes() for i in (0, 1)] == [here[i].tobytes() for i in (0, 1)]
