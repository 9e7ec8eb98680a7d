"""What benchmarks/store.py concludes from a trace of system calls and from its figures, and the verbs of the systems that run here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path("/data/store")
BEGIN = '7 openat(AT_FDCWD, "/mark-add-begins", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)'
END = '7 openat(AT_FDCWD, "/mark-add-ends", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)'
WRITE = '7 pwrite64(4</data/store/items.sqlite-wal>, ""..., 4120, 32) = 4120'
SYNC = "7 fdatasync(4</data/store/items.sqlite-wal>) = 0"
CASES = {
    "a log that is synced": ([WRITE, SYNC], "yes"),
    "no sync": ([WRITE], "no"),
    "a sync before the write": ([SYNC, WRITE], "no"),
    "a sync of another file": ([WRITE, "7 fdatasync(5</data/store/items.sqlite>) = 0"], "no"),
    "a sync that failed": ([WRITE, "7 fdatasync(4</data/store/items.sqlite-wal>) = -1 EIO (Input/output error)"], "no"),
    "a sync in another thread that had not ended": (
        [WRITE, "8 fdatasync(4</data/store/items.sqlite-wal> <unfinished ...>"],
        "no",
    ),
    "a sync in another thread that had": (
        [WRITE, "8 fdatasync(4</data/store/items.sqlite-wal> <unfinished ...>", "8 <... fdatasync resumed>) = 0"],
        "yes",
    ),
    "a file elsewhere": (['7 write(3</tmp/x>, ""..., 8) = 8', WRITE, SYNC], "yes"),
    "nothing written": ([SYNC], "no"),
    "SQLite's shared memory": ([WRITE, SYNC, '7 pwrite64(5</data/store/items.sqlite-shm>, ""..., 8, 0) = 8'], "yes"),
    "a new name that is not synced": (
        ['7 write(3</data/store/a.tmp>, ""..., 8) = 8', "7 fsync(3</data/store/a.tmp>) = 0", '7 rename("/data/store/a.tmp", "/data/store/a") = 0'],
        "no",
    ),
    "a new name whose folder is synced": (
        ['7 write(3</data/store/a.tmp>, ""..., 8) = 8', "7 fsync(3</data/store/a.tmp>) = 0", '7 rename("/data/store/a.tmp", "/data/store/a") = 0', "7 fsync(3</data/store>) = 0"],
        "yes",
    ),
    "a renamed file that was not synced": (
        ['7 write(3</data/store/a.tmp>, ""..., 8) = 8', '7 rename("/data/store/a.tmp", "/data/store/a") = 0', "7 fsync(3</data/store>) = 0"],
        "no",
    ),
    "a rollback journal": (
        [
            '7 pwrite64(5</data/store/x.sqlite-journal>, ""..., 512, 0) = 512',
            "7 fsync(5</data/store/x.sqlite-journal>) = 0",
            '7 pwrite64(4</data/store/x.sqlite>, ""..., 4096, 0) = 4096',
            "7 fsync(4</data/store/x.sqlite>) = 0",
            '7 unlink("/data/store/x.sqlite-journal") = 0',
        ],
        "all but the journal's removal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_trace_says(case: str) -> None:
    from store_trace import between, judge, verdict

    lines, expected = CASES[case]
    before = '7 pwrite64(9</data/store/early>, ""..., 8, 0) = 8'
    seen = between("\n".join([before, BEGIN, *lines, END, before]), "add-begins", "add-ends", FOLDER)
    assert verdict(judge(seen, FOLDER)) == expected


def test_a_trace_without_marks_is_refused() -> None:
    from store_trace import between

    with pytest.raises(ValueError, match="no marks add-begins and add-ends"):
        between("\n".join([BEGIN, WRITE]), "add-begins", "add-ends", FOLDER)


def test_shares_are_even() -> None:
    from store_verbs import shares

    found = shares(np.arange(100_000))
    assert found.min() == 0 and found.max() == 99
    for below in (1, 10, 50):
        assert (found < below).mean() == pytest.approx(below / 100, rel=0.05)


def test_syncing_syncs_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import store_verbs

    (tmp_path / "inner").mkdir()
    (tmp_path / "same").write_bytes(b"1")
    settle = store_verbs.Syncing(tmp_path)
    synced: list[str] = []
    whole = store_verbs.sync
    monkeypatch.setattr(store_verbs, "sync", lambda path: (synced.append(path.name), whole(path)))
    (tmp_path / "inner" / "new").write_bytes(b"2")
    settle()
    assert sorted(synced) == ["inner", "new"]


@pytest.mark.parametrize("name", ["local flat", "local HNSW", "faiss flat"])
def test_the_verbs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from store_systems import SYSTEMS
    from store_verbs import shares

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    vectors = np.random.default_rng(0).normal(size=(600, 16)).astype(np.float32)
    system = SYSTEMS[name](tmp_path, 16)
    system.open()
    system.add(np.arange(500), vectors[:500])
    system.loaded()
    system.add(np.arange(500, 600), vectors[500:])
    system.delete(np.array([3, 4]))
    system.close()
    system = SYSTEMS[name](tmp_path, 16)
    system.open()
    assert system.count() == 598
    away = ((vectors[:5, None] - vectors[None]) ** 2).sum(2)
    away[:, [3, 4]] = np.inf
    assert [list(one) for one in system.search(vectors[:5], 10, None)] == away.argsort(1)[:, :10].tolist()
    away[:, shares(np.arange(600)) >= 10] = np.inf
    assert [list(one) for one in system.search(vectors[:5], 10, 10)] == away.argsort(1)[:, :10].tolist()
    system.close()


def kept() -> Any:
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "raw" / "store.json"
    return json.loads(file.read_text(encoding="utf-8"))


def test_what_is_not_equal_is_not_compared() -> None:
    from store_report import measures

    figures = kept()
    size = next(iter(figures["sizes"]))
    before = measures(figures, size)
    name = next(name for name in before["one query"] if not name.startswith("local"))
    figures["sizes"][size][name]["tuned"]["None"]["recall"] = 0.9
    assert name not in measures(figures, size)["one query"] and name in before["one query, 10 % match"]


def test_a_loss_is_said() -> None:
    from store_report import conclusions

    figures = kept()
    size = next(iter(figures["sizes"]))
    for name, table in figures["sizes"][size].items():
        if name.startswith("local"):
            for turn in table["search"]["1, None"]:
                turn["cpu"] *= 1e6
    said = next(
        line for line in conclusions(figures) if line.startswith(f"- {int(size):,}, one query (local")
    )
    assert "**loses** to" in said and "beats" not in said
