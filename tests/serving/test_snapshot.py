"""What was verified is what is used: files that change, and folders that are replaced, under an open index."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from retrieval.errors import BundleError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.files import snapshot
from retrieval.serving.files.snapshot import Held
from retrieval.serving.index.build import write_index
from retrieval.serving.index.files import put_in_place
from retrieval.serving.index.open import open_index


@pytest.fixture
def own(index_path, tmp_path):
    return Path(shutil.copytree(index_path, tmp_path / "own"))


def rewritten(path: Path) -> None:
    """Other bytes in the same place, as `cp` over a file writes them."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes(255 - byte for byte in content))


def cut(path: Path) -> None:
    os.truncate(path, 1)


@pytest.mark.parametrize("spoil", [rewritten, cut, Path.unlink])
def test_an_open_index_answers_as_before_whatever_happens_to_its_files(spoil, own):
    with open_index(own, threads=1) as index:
        assert index.changed() is None
        queries = np.stack([index.vector(row) for row in range(0, 200, 7)])
        before = index.search(queries, 5)
        names = sorted(path.relative_to(own).as_posix() for path in own.rglob("*") if path.is_file())
        for name in names:
            spoil(own / name)
        assert index.search(queries, 5) == before
        told = index.changed()
        assert told.endswith("changed on the disk.")
        assert all(name in told for name in names)
        shutil.rmtree(own)
        assert index.changed() == f"{own} is no longer there."
        shutil.copytree(Path(__file__).parent, own)
        assert index.changed()
        assert index.search(queries, 5) == before


def test_an_open_bundle_runs_as_before(makers, tmp_path):
    path = makers.make_bundle(tmp_path / "b")
    bundle = Bundle.open(path, threads=1)
    pixels = makers.digits()[0][:5, None]
    before = bundle.encode(pixels).vector
    assert bundle.changed() is None
    rewritten(path / "encoder.onnx")
    assert np.array_equal(bundle.encode(pixels).vector, before)
    assert "encoder.onnx" in bundle.changed()


def test_the_copy_in_an_index_is_the_bundle_that_made_it(makers, photos, tmp_path):
    """A bundle that is exchanged for another while an index is built from it."""
    path = makers.make_bundle(tmp_path / "b")
    bundle = Bundle.open(path, threads=1)
    shutil.rmtree(path)
    makers.make_bundle(path, seed=3)
    with pytest.raises(BundleError, match="was changed while it was in use"):
        write_index(bundle, [photos / "1"], tmp_path / "i", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


def test_opened_while_it_is_replaced(makers, photos, tmp_path):
    """Two generations take turns as fast as they can; each opening is of one of them, whole."""
    made = {}
    for seed in (1, 2):
        bundle = makers.make_bundle(tmp_path / f"b{seed}", seed=seed)
        write_index(bundle, [photos / str(seed)], tmp_path / f"i{seed}", progress=False)
        with open_index(tmp_path / f"i{seed}", threads=1) as index:
            made[index.sha256] = (index.item(0).label, index.bundle.sha256, index.vector(0).tobytes())
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "i1", out)
    stop = threading.Event()

    def replace() -> None:
        for turn in range(100_000):
            if stop.is_set():
                return
            shutil.copytree(tmp_path / f"i{turn % 2 + 1}", tmp_path / "next")
            put_in_place(tmp_path / "next", out, replace=True)

    rival = threading.Thread(target=replace)
    rival.start()
    seen, end = [], time.monotonic() + 3
    try:
        while time.monotonic() < end:
            with open_index(out, threads=1) as index:
                found = (index.item(0).label, index.bundle.sha256, index.vector(0).tobytes())
                assert found == made[index.sha256]
                seen.append(index.sha256)
            Bundle.open(out / "bundle", threads=1)
    finally:
        stop.set()
        rival.join()
    assert set(seen) == set(made) and len(seen) > 5


@pytest.mark.parametrize("kind", ["link", "link to /dev/zero", "pipe", "folder"])
def test_links_pipes_and_devices_are_not_read(kind, own, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for name in (
        "SHA256SUMS",
        "index.json",
        "vectors.npy",
        "vectors.faiss",
        "items.sqlite",
        "bundle/encoder.onnx",
    ):
        path = own / name
        path.rename(elsewhere)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero" if "zero" in kind else elsewhere)
        with pytest.raises(StoreError, match="is a link" if "link" in kind else "is not a regular file"):
            open_index(own)
        path.rmdir() if kind == "folder" else path.unlink()
        elsewhere.rename(path)
    shutil.move(own / "bundle", tmp_path / "moved")
    (own / "bundle").symlink_to(tmp_path / "moved")
    with pytest.raises(StoreError, match=r"bundle/manifest\.json (is a link|cannot be read)"):
        open_index(own)


def test_a_file_beyond_all_memory_is_refused_before_it_is_read(own):
    os.truncate(own / "vectors.npy", 1 << 42)  # sparse: no space is taken
    with pytest.raises(StoreError, match=r"4,398\.0 GB, which are held in memory"):
        open_index(own)
    os.truncate(own / "bundle" / "encoder.onnx", 1 << 42)
    with pytest.raises(BundleError, match="bytes instead of"):
        Bundle.open(own / "bundle")


@pytest.mark.parametrize("kind", ["no memory files", "no descriptors of folders"])
def test_without_what_linux_has(kind, own, monkeypatch):
    if kind == "no memory files":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    else:
        monkeypatch.setattr(snapshot, "_BESIDE_DIR", False)
    with open_index(own, threads=1) as index:
        queries = np.stack([index.vector(row) for row in range(5)])
        before = index.search(queries, 5)
        for name in ("vectors.npy", "vectors.faiss", "items.sqlite"):
            cut(own / name)
        assert index.search(queries, 5) == before
    with pytest.raises(StoreError, match="damaged"):
        open_index(own)
    for name in ("vectors.npy", "items.sqlite"):
        (own / name).unlink()
        (own / name).symlink_to("/dev/zero")
    with pytest.raises(StoreError, match="is a link"):
        open_index(own)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory files are Linux's")
def test_what_is_held_cannot_be_written(tmp_path):
    (tmp_path / "a").write_bytes(b"abc" * 1000)
    handle = os.open(tmp_path / "a", os.O_RDONLY)
    held = Held(handle, 3000)
    os.close(handle)
    file = os.open(held.path(), os.O_RDWR)
    for change in (
        lambda: os.write(file, b"x"),
        lambda: os.truncate(file, 1),
        lambda: os.truncate(file, 9999),
    ):
        with pytest.raises(PermissionError):
            change()
    os.close(file)
    assert held.bytes() == b"abc" * 1000
    held.close()
