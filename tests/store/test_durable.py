"""The local store when calls overlap, are killed, or read damaged files."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.errors import StoreError
from retrieval.store import folder, search_structure
from retrieval.store.contract import widths_of
from retrieval.store.folder import check_record
from retrieval.store.local import LocalStore
from retrieval.store.record import value
from retrieval.store.snapshot_view import BLOCK, ArrayFile, View
from stored import VECTORS, items


def test_altered_arrays_are_not_given(store, bundle, tmp_path):
    store.upsert(items(range(5000)), bundle.sha256)
    store.close()
    (array,) = (tmp_path / "i" / "arrays").iterdir()
    content = bytearray(array.read_bytes())
    content[4096 + 100] ^= 1
    array.write_bytes(content)
    altered = r"The index .* is damaged: arrays/[0-9a-f]+\.vector was altered"
    with LocalStore(tmp_path / "i") as opened:
        assert opened.get(["id5"])["id5"].label == "5" and opened.count() == 5000
        for ask in (
            lambda: opened.get(["id5"], arrays=True),
            lambda: opened.search(VECTORS[:1], 5, bundle.sha256),
            lambda: (opened.delete(["id1"]), opened.compact()),
        ):
            with pytest.raises(StoreError, match=altered):
                ask()
    array.unlink()
    opened = LocalStore(tmp_path / "i", upkeep=False)
    with opened, pytest.raises(StoreError, match="is missing"):
        opened.compact()


@pytest.mark.parametrize("block", range(4))
def test_every_block_of_a_row_that_spans_several_is_verified(tmp_path, block):
    width = BLOCK  # a row of four blocks
    content = bytearray(np.zeros((2, width), np.float32))
    sums = {b: zlib.crc32(content[b * BLOCK : (b + 1) * BLOCK]) for b in range(8)}
    content[(4 + block) * BLOCK + 77] ^= 1
    (tmp_path / "rows").write_bytes(content)
    ArrayFile(tmp_path / "rows", width).verify(2, sums, np.array([0]))
    with pytest.raises(StoreError, match="was altered"):
        ArrayFile(tmp_path / "rows", width).verify(2, sums, np.array([1]))


@pytest.mark.parametrize("left", ["cut", "zeros"])
def test_a_small_add_that_a_power_cut_took_from_its_file_is_restored(store, bundle, tmp_path, left):
    """Small appends are synced in the record only, until their file is synced."""

    def unsynced():
        with store.record.reading() as connection:
            return int(value(connection, "select count(*) from unsynced"))

    store.upsert(items(range(5000)), bundle.sha256)
    size = 5000 * 64
    for number in range(5000, 5003):
        store.upsert(items(range(number, number + 1)), bundle.sha256)
    assert unsynced() == 3
    shutil.copytree(tmp_path / "i", tmp_path / "stopped")
    (array,) = (tmp_path / "stopped" / "arrays").iterdir()
    array.write_bytes(array.read_bytes()[:size] + bytes(70_000 * (left == "zeros")))
    assert check_record(tmp_path / "stopped", lambda count: None) == ([], [])
    with LocalStore(tmp_path / "stopped", upkeep=False) as stopped:
        for number in (0, 5000, 5002):
            ((nearest,),) = stopped.search(VECTORS[number : number + 1], 1, bundle.sha256)
            assert nearest.id == f"id{number}"
    store.upsert(items(range(5003, 8000)), bundle.sha256)
    assert unsynced() == 0


def test_the_rest_of_a_bundle_that_was_being_deleted_is_not_taken_for_one(
    store, bundle, other, tmp_path
):
    kept = tmp_path / "i" / "bundles" / other.sha256[:16]
    store.upsert(items(range(3)), bundle.sha256)
    kept.mkdir()  # a kill left an empty folder
    generation = store.begin(other, widths_of(other))
    assert Bundle.open(store.bundle(generation), threads=1).sha256 == other.sha256
    store.drop(generation)
    store.close()
    kept.mkdir()
    (kept.parent / f".{other.sha256[:16]}.abcdefgh.part").mkdir()
    (kept.parent / f".{other.sha256[:16]}.abcdefgh.part.lock").touch()
    with LocalStore(tmp_path / "i") as again:
        again.delete(["id0"])
        assert [path.name for path in kept.parent.iterdir()] == [bundle.sha256[:16]]


def test_a_snapshot_is_of_one_moment(store, bundle, tmp_path, monkeypatch):
    store.upsert(items(range(50)), bundle.sha256)
    store.compact()
    store.delete(["id0"])
    real = folder.backup

    def meanwhile(*arguments):
        real(*arguments)
        with LocalStore(tmp_path / "i", upkeep=False) as other:
            other.compact()

    monkeypatch.setattr(folder, "backup", meanwhile)
    store.snapshot(tmp_path / "copy")
    with LocalStore(tmp_path / "copy") as copy:
        assert len(copy.search(VECTORS[:1], 50, bundle.sha256)[0]) == 49


def test_a_snapshot_holds_the_structure_that_is_built_meanwhile(
    store, bundle, tmp_path, monkeypatch
):
    monkeypatch.setattr(search_structure, "MIN_ROWS", 100)
    store.take_structure("ivf", {"lists": 4})
    store.upsert(items(range(300)), bundle.sha256)
    store.compact()
    real, copied = folder.backup, []

    def meanwhile(*arguments):
        real(*arguments)
        copied.append(1)
        if len(copied) == 1:
            store.upsert(items(range(300, 400)), bundle.sha256)
            store.compact()

    monkeypatch.setattr(folder, "backup", meanwhile)
    store.snapshot(tmp_path / "copy")
    assert check_record(tmp_path / "copy", lambda count: None) == ([], [])
    assert len(list((tmp_path / "copy" / "arrays").glob("*.ivf"))) == 1
    for path in (tmp_path / "i" / "arrays").glob("*.ivf"):
        path.unlink()
    store.snapshot(tmp_path / "without")  # a missing structure is built again
    faults, rebuilt = check_record(tmp_path / "without", lambda count: None)
    assert not faults and len(rebuilt) == 1 and len(copied) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that a killed process lets go")
def test_what_a_killed_snapshot_left_goes_with_the_next(
    store, bundle, tmp_path, killed, monkeypatch
):
    store.upsert(items(range(50)), bundle.sha256)
    store.compact()
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_copy_start", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        killed(lambda: store.snapshot(snapshots / "one"))
    (left,) = snapshots.glob(".one.*.part/content")
    assert (left / "items.sqlite").stat().st_size > 0
    store.snapshot(snapshots / "two")
    assert [path.name for path in snapshots.iterdir()] == ["two"]


def test_a_structure_that_is_the_first_work_of_a_writer_is_kept(
    store, bundle, tmp_path, monkeypatch
):
    store.upsert(items(range(5000)), bundle.sha256)
    store.take_structure("hnsw", {})
    store.close()
    monkeypatch.setattr(search_structure, "MIN_ROWS", 100)
    with LocalStore(tmp_path / "i", upkeep=False) as again:
        again.compact()
    assert len(list((tmp_path / "i" / "arrays").glob("*.0.hnsw"))) == 1


@pytest.mark.parametrize("how", ["cut", "gone", "emptied", "altered"])
def test_a_last_transaction_that_is_lost_from_the_log_is_missed(bundle, store, tmp_path, how):
    for number in range(5):
        store.upsert(items(range(number, number + 1)), bundle.sha256)
    stopped, log = tmp_path / "stopped", tmp_path / "stopped" / "items.sqlite-wal"
    shutil.copytree(tmp_path / "i", stopped)  # as a kill leaves it
    content = bytearray(log.read_bytes())
    with LocalStore(stopped, upkeep=False) as opened:
        assert opened.count() == 5
    content[-100] ^= how == "altered"
    shutil.copyfile(tmp_path / "i" / "items.sqlite", stopped / "items.sqlite")
    if how == "gone":
        log.unlink(missing_ok=True)
    else:
        log.write_bytes(content[: {"cut": -5000, "emptied": 0, "altered": None}[how]])
    says = r"the last \d of \d transactions are missing from its record"
    with pytest.raises(StoreError, match=says):
        LocalStore(stopped)
    (stopped / "acknowledged").write_bytes(b"\0" * 20)  # as a power cut may leave it
    with LocalStore(stopped) as opened:
        assert opened.count() < 5


def test_a_record_that_was_cut_short_beside_its_log_is_refused(store, bundle, tmp_path):
    """SQLite reads zeros beyond the end of its file, so originals were altered."""
    kept = [
        dataclasses.replace(item, original=bytes([n]) * 9000, keep="copy")
        for n, item in enumerate(items(range(60)))
    ]
    store.upsert(kept, bundle.sha256)
    store.close()
    with LocalStore(tmp_path / "i", upkeep=False) as running:
        running.upsert(items(range(100, 101)), bundle.sha256)
        for name in ("whole", "copy"):  # as a killed process leaves it
            shutil.copytree(tmp_path / "i", tmp_path / name)
    with LocalStore(tmp_path / "whole", upkeep=False) as whole:
        assert whole.original("id59") == kept[59].original and whole.count() == 61
    record = tmp_path / "copy" / "items.sqlite"
    os.truncate(record, record.stat().st_size // 2 // 4096 * 4096)
    with pytest.raises(StoreError, match=r"items.sqlite was cut short"):
        LocalStore(tmp_path / "copy")


def test_closing_waits_for_the_search_that_runs(store, bundle, tmp_path, monkeypatch):
    store.upsert(items(range(50)), bundle.sha256)
    reader = LocalStore(tmp_path / "i")  # a store that has written also waits for its log
    running, go, search = Event(), Event(), View.search

    def slow(*arguments):
        running.set()
        assert go.wait(30)
        return search(*arguments)

    monkeypatch.setattr(View, "search", slow)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(reader.search, VECTORS[3:4], 1, bundle.sha256)
        assert running.wait(30)
        closed = pool.submit(reader.close)
        with pytest.raises(TimeoutError):
            closed.result(0.2)
        go.set()
        assert [item.id for item in answer.result(30)[0]] == ["id3"]
        closed.result(30)


def test_an_index_of_another_format_says_which_version_reads_it(index):
    file = index / "index.json"
    description = json.loads(file.read_text())
    newer = {**description, "format": description["format"] + 1, "version": "7.8.9"}
    for content, says in (
        (newer, r"has format 6, which retrieval 7\.8\.9 wrote; .* reads format 5"),
        ({**description, "format": 4}, r"index\.json has format 4"),
        ({"format": description["format"]}, r"index\.json is damaged: it has no 'id'"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(StoreError, match=says):
            LocalStore(index)
