"""A folder that may not be written to, read beside a process that may."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.store.contract import Item, widths_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.local import LocalStore

VECTORS = np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)


@pytest.fixture
def bundle(plain_bundle: Path) -> Bundle:
    return Bundle.open(plain_bundle, threads=1)


@pytest.fixture
def index(tmp_path: Path, bundle: Bundle) -> Path:
    create_local(tmp_path / "index", bundle, widths_of(bundle))
    return tmp_path / "index"


@pytest.fixture
def frozen(index: Path, bundle: Bundle, tmp_path: Path) -> Iterator[Path]:
    """The same folder where it may only be read, below a parent that may only be read; root may
    write to any other.
    """
    view = tmp_path / "view"
    view.mkdir()
    (tmp_path / "outer").mkdir()
    index.rename(tmp_path / "outer" / "index")
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "--bind", tmp_path / "outer", view], capture_output=True
        ).returncode
    ):
        pytest.skip("nothing may be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", view], check=True)
        yield view / "index"
    finally:
        subprocess.run(["umount", "-l", view], check=True)


def test_a_folder_that_may_only_be_read_is_searched_and_refuses_writes(
    frozen: Path, bundle: Bundle, tmp_path: Path
) -> None:
    writable = tmp_path / "outer" / "index"
    items = [Item(f"id{n}", metadata={"n": n}, arrays={"vector": VECTORS[n]}) for n in range(30)]
    with LocalStore(writable, upkeep=False) as store:
        store.upsert(items[:20], bundle.sha256)
    before = sorted(path.name for path in writable.iterdir())
    with LocalStore(frozen) as reader:
        assert reader.count() == 20
        assert [entry.id for entry in reader.search(VECTORS[3:4], 1, bundle.sha256)[0]] == ["id3"]
        for refused in (
            lambda: reader.upsert(items, bundle.sha256),
            lambda: reader.delete(["id0"]),
            reader.compact,
            lambda: reader.drop(reader.generations()[0]),
        ):
            with pytest.raises(
                StoreError, match=r"index is read-only here, and cannot be written to\.$"
            ):
                refused()
        reader.snapshot(tmp_path / "copy")
        with pytest.raises(StoreError, match=r"view/copy cannot be written: Read-only file system"):
            reader.snapshot(frozen.parent / "copy")
        with pytest.raises(StoreError, match=r"view/new cannot be written: Read-only file system"):
            create_local(frozen.parent / "new", bundle, widths_of(bundle))
        assert sorted(path.name for path in writable.iterdir()) == before
        with LocalStore(writable, upkeep=False) as store:  # somebody else may write to it
            store.upsert(items, bundle.sha256)
            assert reader.count() == 30
            assert [entry.id for entry in reader.search(VECTORS[25:26], 1, bundle.sha256)[0]] == [
                "id25"
            ]
        assert reader.count() == 30
    with LocalStore(tmp_path / "copy") as copy:
        assert copy.count() == 20
