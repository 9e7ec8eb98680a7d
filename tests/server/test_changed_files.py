"""What counts as a changed file: its content, whatever its size and times say."""

import hashlib
import os
import shutil

import makers
import numpy as np
import pytest
from PIL import Image
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError
from retrieval.index import adding, duplicates as duplicates_module, migrating
from retrieval.index.index import create_index, open_index
from retrieval.index.write_embeddings import embed_sources


def picture(path, seed):
    """Write a picture whose file always has the same size, and the same modification time."""
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8), np.uint8)
    Image.fromarray(pixels).save(path, "BMP")
    os.utime(path, ns=(10**18, 10**18))


@pytest.fixture
def album(tmp_path):
    for seed, name in enumerate(("a", "b", "c")):
        picture(tmp_path / "album" / f"{name}.bmp", seed)
    return tmp_path / "album"


@pytest.fixture
def index(album, bundle_path, tmp_path):
    create_index(tmp_path / "i", bundle_path, [album], progress=False)
    with open_index(tmp_path / "i", threads=1) as index:
        yield index


def counts(added):
    return added.added, added.changed, added.unchanged, added.removed


def overwrite(path):
    picture(path, 99)


def replace(path):
    picture(path.with_name("new.bmp"), 99)
    path.with_name("new.bmp").replace(path)


@pytest.mark.parametrize("edit", [overwrite, replace])
@pytest.mark.parametrize("sync", [False, True])
def test_an_edit_that_keeps_size_and_time_is_a_change(album, index, edit, sync):
    path = album / "a.bmp"
    before, status = index.vector("a.bmp"), path.stat()
    edit(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert counts(index.add(album, sync=sync, progress=False)) == (0, 1, 2, 0)
    (expected,) = index.bundle.encode_images([path], progress=False)
    assert np.allclose(index.vector("a.bmp"), expected, atol=1e-6)
    assert not np.allclose(before, expected, atol=1e-3)
    assert counts(index.add(album, progress=False)) == (0, 0, 3, 0)


def test_the_same_content_in_new_files_is_unchanged(album, index, tmp_path, monkeypatch):
    stamps = [item.stamp for item in index.scan()]
    shutil.move(album, tmp_path / "old")
    shutil.copytree(tmp_path / "old", album, copy_function=shutil.copyfile)  # new times and inodes
    monkeypatch.setattr("retrieval.index.adding.embed", lambda *_, **__: [])  # and not embedded
    assert counts(index.add(album, sync=True, progress=False)) == (0, 0, 3, 0)
    after = [item.stamp for item in index.scan()]
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(album.iterdir())]
    assert [stamp.split()[0] for stamp in after] == [stamp.split()[0] for stamp in stamps] == hashes
    monkeypatch.setattr("retrieval.index.adding.read_image", None)  # and now not even read
    assert all(old != new for old, new in zip(stamps, after, strict=True))
    assert counts(index.add(album, progress=False)) == (0, 0, 3, 0)


def test_a_moved_folder_changes_only_paths(album, index):
    moved = album.rename(album.with_name("moved"))
    (moved / "a.bmp").unlink()
    for id in ("b.bmp", "c.bmp"):
        index.store.update([id], {"label": "moved"}, index.bundle.sha256)
    assert counts(index.add(moved, progress=False)) == (0, 2, 0, 0)
    assert {item.path.name: item.path.parent for item in index.scan() if item.id != "a.bmp"} == {
        "b.bmp": moved,
        "c.bmp": moved,
    }


def test_images_that_were_added_from_memory_are_known_by_their_content(album, index):
    files = sorted(album.iterdir())
    contents = [file.read_bytes() for file in files]
    labels = ["album"] * 3
    picture(files[2], 7)
    index.delete([file.name for file in files])
    index.add(images=contents, ids=[file.name for file in files], labels=labels, progress=False)
    assert counts(index.add(album, progress=False)) == (0, 1, 2, 0)


def test_an_edit_between_add_and_migrate_gets_its_vector(album, index, tmp_path):
    other = makers.make_bundle(tmp_path / "other", seed=5)
    overwrite(album / "b.bmp")
    index.migrate(other, progress=False)
    (expected,) = index.bundle.encode_images([album / "b.bmp"], progress=False)
    assert np.allclose(index.vector("b.bmp"), expected, atol=1e-6)
    assert counts(index.add(album, progress=False)) == (0, 1, 2, 0)


def test_a_folder_of_embeddings_notices_the_edit(album, bundle_path, index, tmp_path):
    embed_sources(bundle_path, [album], tmp_path / "v", progress=False)
    assert counts(index.add(tmp_path / "v", progress=False)) == (0, 0, 3, 0)
    os.utime(album / "c.bmp", ns=(2 * 10**18, 2 * 10**18))
    index.add(album, progress=False)
    stamps = [item.stamp for item in index.scan()]
    assert counts(index.add(tmp_path / "v", progress=False)) == (0, 0, 3, 0)
    assert [item.stamp for item in index.scan()] == stamps  # the later ones
    overwrite(album / "b.bmp")
    with pytest.raises(DataError, match="differs in the sources"):
        embed_sources(bundle_path, [album], tmp_path / "v", progress=False)
    embed_sources(bundle_path, [album], tmp_path / "w", progress=False)
    assert counts(index.add(tmp_path / "w", progress=False)) == (0, 1, 2, 0)
    assert counts(index.add(album, progress=False)) == (0, 0, 3, 0)


def test_only_the_features_that_differ_are_encoded_again(tmp_path):
    features = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    path = tmp_path / "f.npz"
    np.savez(path, features=features)
    bundle = makers.make_bundle(tmp_path / "features", kind="features")
    create_index(tmp_path / "i", bundle, [path], progress=False)
    with open_index(tmp_path / "i", threads=1) as index:
        features[2] *= -1
        np.savez(path, features=features)
        assert counts(index.add(path, progress=False)) == (0, 1, 3, 0)
        assert counts(index.add(path, progress=False)) == (0, 0, 4, 0)


def deleted(index):
    index.delete(["b.bmp"])
    return {"a.bmp", "c.bmp"}


def labelled(index):
    index.store.update(["b.bmp"], {"label": "new"}, index.bundle.sha256)
    return {"a.bmp", "b.bmp", "c.bmp"}


def added_again(index):
    image = np.full((8, 8), 77, np.uint8)
    index.add(images=[image], ids=["b.bmp"], keep="copy", progress=False)
    return {"a.bmp", "b.bmp", "c.bmp"}


@pytest.mark.parametrize("change", [deleted, labelled, added_again])
@pytest.mark.parametrize("keep", ["reference", "copy"])
def test_a_migration_while_items_change(album, keep, change, index, tmp_path, monkeypatch):
    index.add(album, keep=keep, progress=False)
    index.delete(["b.bmp"])
    index.add(album, keep=keep, progress=False)  # so that the index keeps b.bmp in this way
    genuine, ids = migrating._by_originals, []

    def interrupted(*arguments):
        if not ids:  # after the first items were read from the index, and before their originals
            (album / "b.bmp").unlink()
            ids.extend(change(index))
        return genuine(*arguments)

    monkeypatch.setattr(migrating, "_by_originals", interrupted)
    other = makers.make_bundle(tmp_path / "other", seed=5)
    if (keep, change) == ("reference", labelled):  # its original is truly missing
        with pytest.raises(DataError, match=r"b\.bmp: its file .* is gone"):
            index.migrate(other, progress=False)
        return
    done = index.migrate(other, progress=False)
    assert not done.skipped and index.bundle.sha256 == index.generation.bundle
    items = index.get(ids, arrays=True)
    assert set(items) == set(ids) == {item.id for item in index.scan()}
    assert all(len(item.vector) == 16 for item in items.values())
    if change is added_again:
        (expected,) = index.bundle.encode_images([np.full((8, 8), 77, np.uint8)], progress=False)
        assert np.allclose(index.vector("b.bmp"), expected, atol=1e-6)


def served_by(index, bundle):
    """Return whether the vectors of all items are those of a bundle."""
    items = index.get(list(index), arrays=True).values()
    vectors = bundle.encode_images([item.path for item in items], progress=False)
    return all(
        np.allclose(item.vector, vector, atol=1e-6)
        for item, vector in zip(items, vectors, strict=True)
    )


def test_an_add_that_a_migration_interrupts_counts_each_item_once(
    album, index, tmp_path, monkeypatch
):
    other = makers.make_bundle(tmp_path / "other", seed=5)
    overwrite(album / "a.bmp")
    picture(album / "d.bmp", 3)
    genuine = adding.embed

    def interrupted(*arguments, **options):
        monkeypatch.setattr(adding, "embed", genuine)
        index.migrate(other, progress=False)
        return genuine(*arguments, **options)  # by the bundle that was served before

    monkeypatch.setattr(adding, "embed", interrupted)
    assert counts(index.add(album, progress=False)) == (1, 1, 2, 0)
    assert served_by(index, Bundle.open(other, threads=1))
    assert counts(index.add(album, progress=False)) == (0, 0, 4, 0)


def test_new_labels_that_meet_a_migration_keep_the_new_vectors(album, index, tmp_path, monkeypatch):
    other = makers.make_bundle(tmp_path / "other", seed=5)
    for id in ("a.bmp", "b.bmp"):
        index.store.update([id], {"label": "x"}, index.bundle.sha256)
    genuine = adding._rewrite

    def interrupted(index, bundle, rewritten):
        monkeypatch.setattr(adding, "_rewrite", genuine)
        index.migrate(other, progress=False)
        genuine(index, bundle, rewritten)

    monkeypatch.setattr(adding, "_rewrite", interrupted)
    assert counts(index.add(album, progress=False)) == (0, 2, 1, 0)
    assert served_by(index, Bundle.open(other, threads=1))
    assert {item.label for item in index.scan()} == {"album"}


def test_duplicates_that_vanish_while_they_are_compared(index, monkeypatch):
    (group,) = index.duplicates(2, progress=False)
    genuine = duplicates_module._diameter

    def interrupted(index, ids, largest):
        index.delete(ids)
        return genuine(index, ids, largest)

    monkeypatch.setattr(duplicates_module, "_diameter", interrupted)
    (vanished,) = index.duplicates(2, progress=False)
    assert vanished.ids == group.ids == ("a.bmp", "b.bmp", "c.bmp")
    assert vanished.diameter == vanished.radius == group.radius and not len(index)
