"""Scratch folders: what a killed process leaves is cleared, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from retrieval.errors import DataError
from retrieval.host.files import scratch_folder, whole_folder

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="no locks that a killed process lets go"
)

_WRITER = """
import sys
from pathlib import Path
from retrieval.errors import DataError
from retrieval.host.files import whole_folder
with whole_folder(Path(sys.argv[1]), replace=False, exists_error=DataError("taken")) as fresh:
    (fresh / "half").write_text("x")
    print("filled", flush=True)
    sys.stdin.read()
"""


def writer(target: Path) -> subprocess.Popen[str]:
    """Start a process that fills a folder until its standard input ends."""
    started = subprocess.Popen(
        [sys.executable, "-c", _WRITER, target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None and started.stdout.readline() == "filled\n"
    return started


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(target: Path) -> None:
    with whole_folder(target, replace=False, exists_error=DataError("taken")) as fresh:
        (fresh / "whole").write_text("x")


def test_what_a_killed_writer_left_is_cleared_by_the_next_whatever_it_writes(
    tmp_path: Path,
) -> None:
    with writer(tmp_path / "one") as killed, writer(tmp_path / "two") as living:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert sum(name.endswith(".part") for name in names(tmp_path)) == 2
        write(tmp_path / "three")
        (left,) = (path for path in tmp_path.iterdir() if path.name.endswith(".part"))
        assert left.name.startswith(".two.") and names(left) == ["half"]
        living.communicate()
        assert living.returncode == 0
    assert names(tmp_path) == ["three", "two"] and names(tmp_path / "two") == ["half"]


def test_nothing_else_is_cleared(tmp_path: Path) -> None:
    """Folders of the same name without a lock, with another's file in its place, of another kind,
    or behind a link.
    """
    elsewhere = Path(tempfile.mkdtemp(dir=tmp_path))
    (elsewhere / "kept").write_text("x")
    with scratch_folder(tmp_path, ".a.", ".part") as path:
        mark = path.with_name(f"{path.name}.lock").read_bytes()
    for name in (".a.12345678.part", ".a.23456789.part", ".a.34567890.other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").write_text("x")
    (tmp_path / ".a.23456789.part.lock").write_text('{"pid": 1}')
    (tmp_path / ".a.34567890.other.lock").write_bytes(mark)
    (elsewhere / "mark").write_bytes(mark)
    (tmp_path / ".a.12345678.part.lock").symlink_to(elsewhere / "mark")
    (tmp_path / ".a.45678901.part").symlink_to(elsewhere)
    (tmp_path / ".a.45678901.part.lock").write_bytes(mark)
    os.mkfifo(tmp_path / ".a.56789012.part.lock")
    before = names(tmp_path)
    with scratch_folder(tmp_path, ".b.", ".part"):
        pass
    assert names(tmp_path) == before
    assert (elsewhere / "kept").is_file()
    assert all(
        (tmp_path / name / "kept").is_file()
        for name in before
        if (tmp_path / name).is_dir() and name[0] == "."
    )
    if os.geteuid() == 0:  # another user's lock
        (tmp_path / ".a.67890123.part").mkdir()
        lock = tmp_path / ".a.67890123.part.lock"
        lock.write_bytes(mark)
        os.chown(lock, 12345, 12345)
        with scratch_folder(tmp_path, ".b.", ".part"):
            pass
        assert lock.exists() and (tmp_path / ".a.67890123.part").is_dir()
