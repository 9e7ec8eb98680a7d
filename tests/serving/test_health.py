"""Readiness by parts: each that is broken is named, with a sentence, and the others are not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.http.readiness import Readiness
from retrieval.serving.http.searcher import Searcher
from retrieval.serving.http.settings import Settings
from retrieval.serving.http.storage import can_write, disk_fault
from retrieval.serving.index.creating import create_index
from retrieval.serving.index.living import LivingIndex
from retrieval.serving.index.open import open_index

PARTS = {"index", "disk", "search", "model", "decoders"}


@pytest.fixture
def probed(index_path) -> Iterator[SimpleNamespace]:
    with open_index(index_path, threads=1) as index:
        searcher = Searcher(index, Settings(deadline=5.0))
        readiness = Readiness(searcher)

        def probe() -> dict[str, str]:
            asyncio.run(readiness.probe())
            return readiness.checks()

        yield SimpleNamespace(index=index, searcher=searcher, readiness=readiness, probe=probe)
        searcher.close()


def test_every_part_is_named(probed):
    assert "has not been run" in probed.readiness.reason()
    assert probed.probe() == dict.fromkeys(PARTS, "ok")
    assert probed.readiness.reason() is None


def test_a_model_that_embeds_otherwise_than_at_the_start_is_not_ready(probed, makers, tmp_path, monkeypatch):
    probed.probe()
    other = Bundle.open(makers.make_bundle(tmp_path / "other", seed=9), threads=1)
    monkeypatch.setattr(probed.index.bundle, "encode", other.encode)
    said = probed.probe()
    assert "model is broken" in said["model"] and said["search"] == "ok"
    assert probed.readiness.reason() == said["model"]
    monkeypatch.undo()
    assert probed.probe() == dict.fromkeys(PARTS, "ok")


def test_a_model_that_gives_nan_is_not_ready_from_the_start(probed, monkeypatch):
    right = probed.index.bundle.encode

    def broken(pixels: Any) -> Encoded:
        vector = right(pixels).vector * np.float32("nan")
        return Encoded(vector, vector)

    monkeypatch.setattr(probed.index.bundle, "encode", broken)
    assert "NaN" in probed.probe()["model"]


@contextmanager
def nothing_starts(monkeypatch: Any) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        yield


def test_without_a_process_that_decodes_it_is_not_ready(probed, monkeypatch):
    probed.probe()
    decoders = probed.searcher.machinery.decoders
    assert decoders.pids
    with nothing_starts(monkeypatch):
        for pid in decoders.pids:
            os.kill(pid, signal.SIGKILL)
        assert until(lambda: probed.probe()["decoders"] != "ok")
        said = probed.readiness.checks()
        assert "does not start" in said["decoders"] and said["index"] == "ok"
        assert probed.readiness.reason() == said["decoders"]
    assert until(lambda: probed.probe()["decoders"] == "ok")
    assert probed.probe() == dict.fromkeys(PARTS, "ok")


def until(what: Callable[[], bool]) -> bool:
    for _ in range(200):
        if what():
            return True
        asyncio.run(asyncio.sleep(0.02))
    return False


def test_asking_costs_no_search(probed):
    probed.probe()
    encode, calls = probed.index.bundle.encode, []
    probed.index.bundle.encode = lambda pixels: calls.append(1) or encode(pixels)
    for _ in range(1000):
        assert probed.readiness.reason() is None
    assert not calls


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small disk needs root"
)
def test_a_disk_that_takes_no_writes_any_more(bundle_path, photos, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        create_index(disk / "i", bundle_path, progress=False)
        with LivingIndex.open(disk / "i", threads=1) as index:
            index.add([photos / "1"], progress=False)
            searcher = Searcher(index, Settings(deadline=5.0, open="write"))
            readiness = Readiness(searcher)

            def probe() -> dict[str, str]:
                asyncio.run(readiness.probe())
                return readiness.checks()

            assert probe() == dict.fromkeys(PARTS, "ok")
            (disk / "filler").write_bytes(bytes(10_000_000))
            said = probe()
            assert "full" in said.pop("disk") and set(said.values()) == {"ok"}
            (disk / "filler").unlink()
            assert probe() == dict.fromkeys(PARTS, "ok")
            searcher.close()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small disk needs root"
)
def test_a_reader_needs_no_room(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        assert can_write(disk) and disk_fault(disk, least=1) is None
        assert "is full" in str(disk_fault(disk, least=10**9))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert not can_write(disk) and "read-only" in str(disk_fault(disk))
