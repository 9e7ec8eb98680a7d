"""Short runs of `benchmarks/power_cuts.py`, and of its simulated disk."""

import importlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.errors import RetrievalError
from retrieval.store.folder import check_record
from retrieval.store.local import LocalStore

from retrieval_engines.testing import make_bundle
from retrieval_engines.testing.small_bundles import WIDTH

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "power_cuts.py"
pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


def cut(output: Path, *options: object) -> tuple[int, Any]:
    """Run the script; return its exit code and its results."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, options), "--output", output],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(output)},
    )
    kept = output / "raw" / "power_cuts.json"
    if not kept.exists():
        pytest.fail(done.stdout + done.stderr)
    return done.returncode, json.loads(kept.read_text(encoding="utf-8"))


def test_a_power_cut_loses_nothing_acknowledged(tmp_path):
    status, raw = cut(tmp_path, "--count", 40, "--seed", 5, "--lives", 2)
    assert raw["wrong"] == [] and status == 0 and raw["cuts"] == 40
    assert {outcome for _, outcome, _ in raw["cells"]} >= {"there", "not there", "same either way"}


@pytest.mark.parametrize("fault", ["commits", "folders"])
def test_a_missing_sync_is_detected(fault, tmp_path):
    status, raw = cut(
        tmp_path, "--count", 60, "--each", 60, "--seed", 5, "--lives", 1, "--without", fault
    )
    assert len(raw["wrong"]) >= 3 and status == 1
    assert {outcome for _, outcome, _ in raw["cells"]} & {"wrong", "refused"}


def trace(folder: Path, code: str, *arguments: object) -> Any:
    """Run a program under strace; return a simulated disk with its writes to `disk`."""
    script: Any = importlib.import_module("power_disk")
    (folder / "disk").mkdir()
    done = subprocess.run(
        [
            *script.strace(folder / "trace"),
            *(sys.executable, "-c", code, folder / "disk", *map(str, arguments)),
        ],
        timeout=100,
    )
    assert done.returncode == 0
    disk = script.Disk(folder / "disk")
    disk.replay(folder / "trace", folder / "marks")
    return disk


PROGRAM = """
import os, sys
os.chdir("/")
disk = sys.argv[1]
for name in ("a", "b"):
    with open(f"{disk}/{name}.tmp", "wb") as file:
        file.write(b"old " * 1000)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{disk}/{name}.tmp", f"{disk}/{name}")
    if name == "a":
        handle = os.open(disk, os.O_RDONLY)
        os.fsync(handle)
with open(f"{disk}/a", "r+b") as file:
    file.seek(512)
    file.write(b"new " * 300)
"""


def test_only_synced_data_survives_a_power_cut(tmp_path):
    disk = trace(tmp_path, PROGRAM)
    old = b"old " * 1000
    new = old[:512] + b"new " * 300 + old[1712:]
    seen = set()
    for seed in range(200):
        draw, target = random.Random(seed), tmp_path / f"left{seed}"
        disk.write(
            target,
            disk.time,
            draw.choice(["none", "all", "prefix", "any"]),
            draw.choice(["none", "all", "prefix", "any"]),
            draw,
        )
        left = {path.name: path.read_bytes() for path in target.iterdir()}
        content = left.pop("a")  # the folder was synced after the rename
        assert len(content) == 4000 and all(
            content[start : start + 512] in (old[start : start + 512], new[start : start + 512])
            for start in range(0, 4000, 512)
        )
        assert left in ({}, {"b": old}, {"b.tmp": old})
        seen.add((content == old, content == new, *left))
    assert {outcome[:2] for outcome in seen} == {(True, False), (False, True), (False, False)}
    assert {outcome[2:] for outcome in seen} == {(), ("b",), ("b.tmp",)}


COMPACT = """
import os, sys
from pathlib import Path
import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.store import search_structure
from retrieval.store import snapshot_view
from retrieval.store.contract import Item, widths_of
from retrieval.store.local import LocalStore
from retrieval.store.folder import create_local
search_structure.MIN_ROWS = 50
disk, folder, careless = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "careless"
marks = os.open(folder / "marks", os.O_WRONLY | os.O_CREAT)
bundle = Bundle.open(folder / "bundle", threads=1)
vectors = np.load(folder / "vectors.npy")
item = lambda n, row: Item(f"id {n}", str(row), arrays={"vector": vectors[row]})
ivf = search_structure.StructureChoice("ivf")
create_local(disk / "index", bundle, widths_of(bundle), structure=ivf)
with LocalStore(disk / "index", upkeep=False) as store:
    store.upsert([item(n, n) for n in range(120)], bundle.sha256)
    store.delete([f"id {n}" for n in range(40)])
    store.upsert([item(n, n + 100) for n in range(40, 60)], bundle.sha256)
    if careless:
        os.fsync = snapshot_view.sync_data = lambda handle: None
    os.write(marks, b"begin")
    store.compact()
    os.write(marks, b"end")
    os._exit(0)
"""
ROWS = {f"id {n}": n + 100 if n < 60 else n for n in range(40, 120)}
"""Row of the array `vectors` of each item that the index of `COMPACT` holds."""


def holds(folder: Path, bundle: str, vectors: Any, *, again: bool) -> bool:
    """Return whether an index is intact and holds `ROWS`; with `again`, also after compacting."""
    for last in (False, True)[not again :]:
        try:
            with LocalStore(folder, upkeep=False) as store:
                items = store.get(ROWS, arrays=True)
                if store.count() != len(ROWS) or items.keys() != ROWS.keys():
                    return False
                if any((item.vector != vectors[ROWS[id]]).any() for id, item in items.items()):
                    return False
                ((nearest,),) = store.search(vectors[90:91], 1, bundle)
                if nearest.id != "id 90" or check_record(folder, lambda count: None)[0]:
                    return False
                if not last:
                    store.compact()
        except RetrievalError:
            return False
    return True


@pytest.mark.parametrize("how", ["synced", "careless"])
def test_a_power_cut_during_compact_loses_nothing(how, tmp_path):
    bundle = Bundle.open(make_bundle(tmp_path / "bundle"), threads=1)
    vectors = np.random.default_rng(0).normal(size=(200, WIDTH)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    disk = trace(tmp_path, COMPACT, tmp_path, how)
    (begin, _), (end, _) = disk.marks
    moments = [moment for moment in disk.moments if begin <= moment] + [disk.time]
    assert len(moments) > 20 and end <= disk.time
    lost: list[tuple[int, str]] = []
    for seed, (moment, mode) in enumerate(itertools.product(moments, ("none", "prefix", "any"))):
        target, draw = tmp_path / "cut", random.Random(seed)
        disk.write(target, moment, mode, draw.choice(["none", "all", mode]), draw)
        if not holds(target / "index", bundle.sha256, vectors, again=seed % 4 == 0):
            lost.append((moment, mode))
        shutil.rmtree(target)
        if lost:
            break
    assert bool(lost) == (how == "careless"), lost
