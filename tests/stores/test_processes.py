"""Several processes at one index: a second writer, readers beside a writer, folders that may not be
written to.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from retrieval.errors import StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.store.contract import Item, widths_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.local import LocalStore

VECTORS = np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)
WRITER = """
import sys
from pathlib import Path
import numpy as np
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.contract import Item

vectors = np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)
with LocalStore(Path(sys.argv[1])) as store:
    bundle = store.generations()[0].bundle
    for turn, line in enumerate(sys.stdin):
        numbers = range(10 * turn, 10 * turn + 10)
        store.upsert([Item(f"id{n}", metadata={"turn": turn}, arrays={"vector": vectors[n]}) for n in numbers], bundle)
        if turn % 7 == 6:
            store.compact()
        print(turn, flush=True)
"""
READER = """
import sys
from pathlib import Path
import numpy as np
from retrieval.serving.store.local import LocalStore

vectors = np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)
least = looks = 0
with LocalStore(Path(sys.argv[1])) as store:
    bundle = store.generations()[0].bundle
    print("ready", flush=True)
    while True:
        found = {int(one.id[2:]) for one in store.search(vectors[:1], 2000, bundle)[0]}
        count = len(found)
        assert found == set(range(count)) and count % 10 == 0 and count >= least, (least, sorted(found))
        nearest = sorted(found, key=lambda n: float(((vectors[n] - vectors[1]) ** 2).sum()))[:5]
        answer = store.search(vectors[1:2], 5, bundle)[0]
        if store.count() == count:
            assert {int(one.id[2:]) for one in answer} == set(nearest)
        least, looks = count, looks + 1
        if count == int(sys.argv[2]):
            print(looks, flush=True)
            break
"""


@pytest.fixture
def bundle(plain_bundle: Path) -> Bundle:
    return Bundle.open(plain_bundle, threads=1)


@pytest.fixture
def index(tmp_path: Path, bundle: Bundle) -> Path:
    create_local(tmp_path / "index", bundle, widths_of(bundle))
    return tmp_path / "index"


@contextmanager
def started(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of its own."""
    line = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        line, stdin=pipe, stdout=pipe, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def turn(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return told(process)


def test_a_second_writer_takes_its_turn_and_one_that_is_killed_holds_nobody_up(
    index: Path, bundle: Bundle
) -> None:
    item = Item("mine", arrays={"vector": VECTORS[500]})
    with LocalStore(index) as store, started(WRITER, index) as writer:
        assert turn(writer) == "0"
        store.upsert([item], bundle.sha256)
        assert store.count() == len(store.search(VECTORS[:1], 50, bundle.sha256)[0]) == 11
        assert turn(writer) == "1"
        assert store.count() == len(store.search(VECTORS[:1], 50, bundle.sha256)[0]) == 21
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert store.delete(["mine"]) == 1
        assert store.count() == 20


def test_readers_in_other_processes_see_each_transaction_whole_while_one_writes(
    index: Path,
) -> None:
    with (
        started(READER, index, 120) as one,
        started(READER, index, 120) as other,
        started(WRITER, index) as writer,
    ):
        assert told(one) == told(other) == "ready"
        assert [turn(writer) for _ in range(12)] == [str(n) for n in range(12)]
        assert int(told(one)) > 0 and int(told(other)) > 0
        assert one.wait(60) == other.wait(60) == 0


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
        assert [one.id for one in reader.search(VECTORS[3:4], 1, bundle.sha256)[0]] == ["id3"]
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
            assert [one.id for one in reader.search(VECTORS[25:26], 1, bundle.sha256)[0]] == [
                "id25"
            ]
        assert reader.count() == 30
    with LocalStore(tmp_path / "copy") as copy:
        assert copy.count() == 20
