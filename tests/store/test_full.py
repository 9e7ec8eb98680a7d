"""A full disk at any write: the error is a sentence, nothing changes, and later writes work."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import wire
from limits import files_of_at_most
from retrieval.bundle.bundle import Bundle
from retrieval.errors import RetrievalError, StoreError
from retrieval.index.integrity import restore_snapshot
from retrieval.store import search_structure, upkeep
from retrieval.store.contract import widths_of
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore
from retrieval.store.search_structure import StructureChoice
from stored import VECTORS, items

HNSW = StructureChoice("hnsw")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(search_structure, "MIN_ROWS", 60)


def numbered(numbers) -> set[str]:
    return {f"id{number}" for number in numbers}


def holds(store: LocalStore, bundle: Bundle, ids: set[str]) -> None:
    """Compare the items and the hits of a store with those of `ids`."""
    assert {item.id for item in store.scan(limit=20_000)} == ids and store.count() == len(ids)
    vectors = {id: VECTORS[int(id[2:])] for id in ids}
    for query in VECTORS[:3]:
        nearest = sorted(ids, key=lambda id: float(((vectors[id] - query) ** 2).sum()))[:5]
        hits = store.search(query[None], 5, bundle.sha256)[0]
        assert {item.id for item in hits} == set(nearest)


def embed(store: LocalStore, other: Bundle) -> None:
    generation = store.begin(other, widths_of(other))
    while pending := store.pending(generation, 4500):
        vectors = VECTORS[[int(item.id[2:]) for item in pending]]
        embedded = [
            replace(item, arrays={"vector": vectors[place]}) for place, item in enumerate(pending)
        ]
        store.embed(generation, embedded)


Call = Callable[[LocalStore, Bundle, Bundle, Path], Any]
CALLS: dict[str, Call] = {
    "upsert": lambda store, bundle, *_: store.upsert(items(range(8000, 8050)), bundle.sha256),
    "large": lambda store, bundle, *_: store.upsert(items(range(4500, 9000)), bundle.sha256),
    "delete": lambda store, *_: store.delete([f"id{n}" for n in range(40)]),
    "compact": lambda store, *_: store.compact(),
    "snapshot": lambda store, bundle, other, folder: store.snapshot(folder / "copy"),
    "begin": lambda store, bundle, other, _: store.begin(other, widths_of(other)),
    "create": lambda store, bundle, _, folder: create_local(
        folder / "new", bundle, widths_of(bundle)
    ),
    "tend": lambda store, *_: store.upkeep.step(),
    "embed": lambda store, bundle, other, _: embed(store, other),
    "switch": lambda store, *_: store.switch(store.generations()[1]),
    "drop": lambda store, *_: store.drop(store.generations()[1]),
    "restore": lambda store, bundle, other, folder: restore_snapshot(
        folder / "whole", folder / "new"
    ),
}
CHANGED = {"upsert": {*range(8000, 8050)}, "large": {*range(4500, 9000)}}
"""Numbers of the items that a call adds."""


@pytest.mark.parametrize("name", ["large", "compact", "snapshot"])
def test_a_write_that_finds_no_room_changes_nothing(name, tmp_path, bundle, other):
    create_local(tmp_path / "i", bundle, widths_of(bundle), structure=HNSW)
    ids, faults = numbered(range(100)), []
    with LocalStore(tmp_path / "i", upkeep=False) as store:
        store.upsert(items(range(60)), bundle.sha256)
        if name != "compact":
            store.compact()
        store.upsert(items(range(60, 100)), bundle.sha256)
        for size in (0, 40, 3000, 4096, 9000, 20_000, 40_000, 90_000, 200_000, 1 << 30):
            try:
                with files_of_at_most(size):
                    CALLS[name](store, bundle, other, tmp_path)
                break
            except RetrievalError as fault:
                faults.append(fault)
            holds(store, bundle, ids)
            assert {path.name for path in tmp_path.iterdir()} <= {"i", ".i.lock"}
        assert len(faults) >= 3
        assert all(isinstance(fault, StoreError) or name == "compact" for fault in faults)
        assert all("\n" not in str(fault).strip() and len(str(fault)) > 20 for fault in faults)
        ids |= numbered(CHANGED.get(name, set()))
        holds(store, bundle, ids)
        store.upsert(items(range(200, 210)), bundle.sha256)
        ids |= numbered(range(200, 210))
        holds(store, bundle, ids)
    with LocalStore(tmp_path / "i") as again:
        holds(again, bundle, ids)


@pytest.fixture
def disk(tmp_path, mount):
    """A disk of 20 MB."""
    return mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=20m", "tmpfs")


@contextmanager
def room(disk: Path, left: int) -> Iterator[None]:
    """Fill a disk until `left` bytes are free."""
    known = os.statvfs(disk)
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, known.f_bavail * known.f_frsize - left)
    try:
        yield
    finally:
        (disk / "ballast").unlink()


wait = partial(wire.until, seconds=60)
LEFT = (0, 4096, 20_000, 50_000, 150_000, 8_000_000)
WHOLE = range(1500)


@pytest.mark.parametrize("name", CALLS)
def test_a_full_disk_is_said_and_changes_nothing(name, disk, bundle, other):
    create_local(disk / "i", bundle, widths_of(bundle), structure=HNSW)
    faults = []
    with LocalStore(disk / "i", upkeep=False) as store:
        for start in range(0, len(WHOLE), 750):
            store.upsert(items(range(start, start + 750)), bundle.sha256)
        if name in ("switch", "drop"):
            embed(store, other)
        if name == "restore":
            store.snapshot(disk / "whole")
        before = sorted(path.name for path in disk.iterdir())
        for left in LEFT:
            with room(disk, left):
                try:
                    CALLS[name](store, bundle, other, disk)
                    break
                except StoreError as fault:
                    faults.append(str(fault))
                holds(store, bundle, numbered(WHOLE))
            assert sorted(path.name for path in disk.iterdir()) == before
        assert faults
        for fault in faults:
            assert "the disk is full" in fault and "Free some space and try again." in fault
            odd = ("\n", ".part", "cannot be read")
            assert "/whole " in fault or not any(text in fault for text in odd)
        served = other if name == "switch" else bundle
        gone = set(range(40)) if name == "delete" else set()
        ids = numbered({*WHOLE} - gone | CHANGED.get(name, set()))
        holds(store, served, ids)
        store.upsert(items([4400]), served.sha256)
        holds(store, served, ids | {"id4400"})
    with LocalStore(disk / "i") as again:
        holds(again, served, ids | {"id4400"})


def test_what_failed_for_want_of_room_is_tried_again_though_nobody_writes(
    disk, bundle, monkeypatch, caplog
):
    monkeypatch.setattr(upkeep, "_MIN_DEAD_ROWS", 60)
    monkeypatch.setattr(upkeep, "_PAUSE", 0.02)
    create_local(disk / "i", bundle, widths_of(bundle), structure=HNSW)
    left = numbered(range(500, 1500))
    with LocalStore(disk / "i") as store:
        store.upsert(items(range(1500)), bundle.sha256)
        wait(lambda: store.stats().details["structure"] == "hnsw")
        with room(disk, 120_000), caplog.at_level(logging.WARNING, "retrieval.store"):
            store.delete(numbered(range(500)))  # enough for a compaction
            wait(lambda: caplog.text.count("the disk is full") >= 3)
            assert "tried again in 0.08 seconds" in caplog.text
            holds(store, bundle, left)
        wait(lambda: store.stats().details["deleted"] == 0)
        holds(store, bundle, left)
        wait(lambda: len(list((disk / "i" / "arrays").iterdir())) == 2)  # no rest of a try
    with LocalStore(disk / "i") as again:
        holds(again, bundle, left)


def test_a_reader_that_finds_no_room_says_so(disk, bundle):
    """SQLite needs a shared-memory file even to read."""
    create_local(disk / "i", bundle, widths_of(bundle))
    with LocalStore(disk / "i", upkeep=False) as store:
        store.upsert(items(range(100)), bundle.sha256)
    with (
        room(disk, 0),
        pytest.raises(StoreError, match=r"cannot be read: the disk is full .* Free some space"),
    ):
        LocalStore(disk / "i")
    with LocalStore(disk / "i") as again:
        holds(again, bundle, {f"id{n}" for n in range(100)})


VERBS = {
    "create": ("{disk}/new.index", "{photos}", "--bundle", "{bundle}"),
    "add": ("{disk}/i.index", "{more}"),
    "delete": ("{disk}/i.index", "--filter", "label = '3'"),
    "migrate": ("{disk}/i.index", "{other}"),
    "rollback": ("{disk}/i.index",),
    "compact": ("{disk}/i.index",),
    "snapshot": ("{disk}/i.index", "{disk}/copy.index"),
    "restore": ("{disk}/copy.index", "{disk}/back.index"),
}


def test_each_command_says_that_the_disk_is_full_and_does_it_later(
    disk, plain_bundle, other_bundle, makers, cli, tmp_path
):
    names = {"disk": disk, "bundle": plain_bundle, "other": other_bundle}
    for name, count in (("photos", 40), ("more", 60)):
        makers.write_digits(tmp_path / name, count)
        names[name] = tmp_path / name
    words = (disk / "i.index", tmp_path / "photos", "--bundle", plain_bundle)
    assert cli("index", "create", *words).code == 0
    for verb, words in VERBS.items():
        line = [word.format(**names) for word in (verb, *words)]
        with room(disk, 0):
            result = cli("index", *line)
        assert result.code == 2, verb
        assert "the disk is full" in result.err and "Free some space and try" in result.err
        assert len(result.err.strip().splitlines()) == 1, result.err
        assert cli("index", *line).code == 0, verb
        assert cli("index", "check", disk / "i.index").code == 0
