"""Files and folders appear complete or not at all; locks of folders."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from limits import files_of_at_most
from retrieval.base import files
from retrieval.base.files import hold, scratch_folder, whole_folder
from retrieval.errors import DataError, RetrievalError, StoreError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_written(tmp_path):
    files.write_json(tmp_path / "a.json", {"é": [1, 2]})
    files.write_text(tmp_path / "a.txt", "é\n")
    files.write_bytes(tmp_path / "a.bin", b"\0\1", shared=True)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"é": [1, 2]}
    assert (tmp_path / "a.txt").read_bytes() == "é\n".encode()
    assert (tmp_path / "a.bin").read_bytes() == b"\0\1"
    assert names(tmp_path) == ["a.bin", "a.json", "a.txt"]


@pytest.mark.parametrize("shared", [False, True])
def test_a_full_disk_keeps_the_old_file(tmp_path, shared):
    path = tmp_path / "x"
    files.write_bytes(path, b"old", shared=shared)
    with files_of_at_most(1000):
        with pytest.raises(DataError, match=r"x cannot be written: File too large\."):
            files.write_bytes(path, bytes(5000), DataError, shared=shared)
        with pytest.raises(OSError, match="File too large"):
            files.write_bytes(path, bytes(5000), shared=shared)
    assert (names(tmp_path), path.read_bytes()) == (["x"], b"old")


def test_an_error_while_writing_keeps_the_old_file(tmp_path):
    (tmp_path / "x").write_text("old")
    with pytest.raises(ZeroDivisionError), files.whole_file(tmp_path / "x") as temporary:
        temporary.write_bytes(b"half" * (1 // len(temporary.read_bytes())))
    assert (names(tmp_path), (tmp_path / "x").read_text()) == (["x"], "old")
    with pytest.raises(DataError, match="No such file"):
        files.write_text(tmp_path / "none" / "x", "", DataError)


def test_a_killed_writer_keeps_the_old_file_and_blocks_nobody(tmp_path, killed):
    path = tmp_path / "x"
    path.write_text("old")

    def die() -> None:
        with files.whole_file(path) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    killed(die)
    assert (names(tmp_path), path.read_text()) == (["x", "x.tmp"], "old")
    files.write_text(path, "new")
    assert (names(tmp_path), path.read_text()) == (["x"], "new")


def test_a_link_named_like_the_temporary_file_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "x.tmp").symlink_to(tmp_path / "victim")
    files.write_text(tmp_path / "x", "new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "x").read_text() == "new" and not (tmp_path / "x").is_symlink()


def test_permissions(tmp_path):
    before = os.umask(0o022)
    try:
        files.write_bytes(tmp_path / "secret", b"", private=True)
        files.write_bytes(tmp_path / "plain", b"")
        write(tmp_path / "folder")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("secret", "plain", "folder")]
    assert modes == [0o600, 0o644, 0o755]


def test_a_folder_appears_whole(tmp_path):
    target, occupied = tmp_path / "new" / "folder", DataError("taken")
    with files.whole_folder(target, replace=False, exists_error=occupied) as temporary:
        (temporary / "below").mkdir()
        (temporary / "below" / "a").write_text("1")
        assert not target.exists()
    assert (target / "below" / "a").read_text() == "1"
    with pytest.raises(DataError, match="taken"):
        write(target)
    replacing = partial(files.whole_folder, target, replace=True, exists_error=occupied)
    with pytest.raises(ZeroDivisionError), replacing():
        _ = 1 / 0
    assert names(target) == ["below"]
    with replacing() as other:
        (other / "b").write_text("2")
    assert (names(target), names(target.parent)) == (["b"], ["folder"])
    too_large = pytest.raises(OSError, match="File too large")
    with files_of_at_most(1000), too_large, replacing() as other:
        (other / "c").write_bytes(bytes(5000))
    assert (names(target), names(target.parent)) == (["b"], ["folder"])


_WRITER = """
import sys
from pathlib import Path
from retrieval.errors import DataError
from retrieval.base.files import whole_folder
with whole_folder(Path(sys.argv[1]), replace=False, exists_error=DataError("taken")) as fresh:
    (fresh / "half").write_text("x")
    print("filled", flush=True)
    sys.stdin.read()
"""


def writer(target: Path) -> subprocess.Popen[str]:
    """Start a process that fills a folder until its standard input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = subprocess.Popen([sys.executable, "-c", _WRITER, target], **pipes)
    assert started.stdout.readline() == "filled\n"
    return started


def write(target: Path) -> None:
    with whole_folder(target, replace=False, exists_error=DataError("taken")) as fresh:
        (fresh / "whole").write_text("x")


def test_the_next_writer_clears_the_leftovers_of_a_killed_one(tmp_path):
    with writer(tmp_path / "one") as killed, writer(tmp_path / "two") as living:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert sum(name.endswith(".part") for name in names(tmp_path)) == 2
        write(tmp_path / "three")
        (left,) = (path for path in tmp_path.iterdir() if path.name.endswith(".part"))
        assert left.name.startswith(".two.") and names(left / "content") == ["half"]
        living.communicate()
        assert living.returncode == 0
    assert names(tmp_path) == ["three", "two"] and names(tmp_path / "two") == ["half"]


def test_only_leftovers_are_cleared(tmp_path):
    lock = files._LOCK
    for name in ("elsewhere", ".a.34567890.other", ".a.part", ".a.45678901.part"):
        (tmp_path / name).mkdir(0o700)
        (tmp_path / name / "kept").write_text("x")
    for name in ("elsewhere", ".a.34567890.other", ".a.part"):
        (tmp_path / name / lock).touch()
    (tmp_path / ".a.12345678.part").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".a.23456789.part").write_text("a file")
    (tmp_path / ".a.56789012.part").mkdir()
    (tmp_path / ".a.56789012.part" / lock).symlink_to(tmp_path / "elsewhere" / lock)
    if os.geteuid() == 0:  # another user's
        (tmp_path / ".a.67890123.part").mkdir()
        (tmp_path / ".a.67890123.part" / lock).touch()
        os.chown(tmp_path / ".a.67890123.part", 12345, 12345)
    before = sorted(tmp_path.rglob("*"))
    with scratch_folder(tmp_path, ".b.", ".part"):
        pass
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / ".a.45678901.part" / lock).touch()
    with scratch_folder(tmp_path, ".b.", ".part"):
        assert not (tmp_path / ".a.45678901.part").exists()


def test_a_folder_in_use_stays_where_folders_cannot_be_locked(tmp_path):
    """A network file system does not share locks on folders, but shares locks on files."""
    living = tmp_path / "living"
    with writer(living) as process:
        (scratch,) = tmp_path.glob(".living.*.part")
        handle = os.open(scratch, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the folder itself is not locked
        os.close(handle)
        process.communicate()
    assert names(living) == ["half"]


def test_the_next_call_completes_a_killed_removal(tmp_path, killed, monkeypatch):
    def die() -> None:
        with scratch_folder(tmp_path, ".a.", ".part") as content:
            (content / "large").mkdir()
            monkeypatch.setattr(os, "rmdir", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))

    killed(die)
    assert len(list(tmp_path.glob(".a.*.part/content"))) == 1
    write(tmp_path / "other")
    assert names(tmp_path) == ["other"]


def test_without_locks_no_folder_counts_as_a_leftover(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    with monkeypatch.context() as patch:
        patch.setattr(files, "flock", refuse)
        living = scratch_folder(tmp_path, ".a.", ".part")
        content = living.__enter__()
    write(tmp_path / "other")  # like another machine, where locks work on the same disk
    assert content.is_dir()
    living.__exit__(None, None, None)
    assert names(tmp_path) == ["other"]


HOLDER = """
import sys, time
from retrieval.base.files import hold
with hold(sys.argv[1], "building this index"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_learns_who_holds_the_lock(holder, tmp_path):
    taking = hold(tmp_path / "out", "building this index", StoreError)
    with pytest.raises(StoreError) as caught, taking:
        raise AssertionError
    text = str(caught.value)
    assert text.startswith(f"Another process is building this index: process {holder.pid} on ")
    assert f"holds {tmp_path / '.out.lock'}. Wait for it, or stop it." in text
    with hold(tmp_path / "other", "building this index"):
        pass
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "out")
    with pytest.raises(RetrievalError), hold(link, "building this index"):
        raise AssertionError


def test_a_killed_holder_releases_the_lock(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".out.lock").exists()
    with hold(tmp_path / "out", "x"):
        assert f"process {os.getpid()} on " in (tmp_path / ".out.lock").read_text()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("left", "holder"), [(b"", "it"), (b"\xff" * 5000, "\ufffd" * 1000)])
def test_any_content_of_the_file_is_survived(left, holder, tmp_path):
    lock = tmp_path / ".out.lock"
    lock.write_bytes(left)
    with hold(tmp_path / "out", "x"):
        lock.write_bytes(left)
        says = f"is x: {holder} holds"
        with pytest.raises(RetrievalError, match=says), hold(tmp_path / "out", "x"):
            raise AssertionError


def test_only_one_thread_holds_the_lock(tmp_path):
    inside, most, count = [], [0], [0]

    def work():
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            try:
                with hold(tmp_path / "out", "x"):
                    inside.append(1)
                    most[0] = max(most[0], len(inside))
                    count[0] += 1
                    inside.pop()
            except RetrievalError:
                continue

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work) for _ in range(6)]:
            done.result()
    assert most[0] == 1 and count[0] > 10


def test_a_lock_file_deleted_while_waiting_is_created_again(tmp_path, monkeypatch):
    """The holder deletes the file after another process opens it, but before that one locks it."""
    flock = files.flock
    handles = []

    def late(handle, kind):
        flock(handle, kind)
        handles.append(handle)
        if len(handles) == 1:
            (tmp_path / ".out.lock").unlink()  # as the holder does before it releases the lock

    monkeypatch.setattr(files, "flock", late)
    monkeypatch.setattr(files, "_RETRY_SECONDS", -1.0)
    with hold(tmp_path / "out", "x"):
        assert list(tmp_path.iterdir()) == [tmp_path / ".out.lock"]
    assert len(handles) == 2
    assert not list(tmp_path.iterdir())


def test_a_system_without_locks_is_accepted(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(files, "flock", refuse)
    for _ in range(2):
        with hold(tmp_path / "out", "x"):
            pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path):
    refused = pytest.raises(RetrievalError, match="cannot be locked")
    with refused, hold(tmp_path / "no" / "out", "x"):
        raise AssertionError


READ_ONLY = """
import os, sys
from retrieval.errors import RetrievalError
from retrieval.base.files import hold
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
with hold(sys.argv[1], "x"):
    print(sorted(os.listdir(sys.argv[1])))
try:
    with hold(sys.argv[1] + "-new", "x"):
        raise AssertionError
except RetrievalError as error:
    print(error)
"""


def test_below_a_read_only_parent_the_lock_lies_in_the_folder():
    with tempfile.TemporaryDirectory() as parent:  # other users cannot enter pytest's folders
        folder = Path(parent, "out")
        folder.mkdir()
        folder.chmod(0o777)
        Path(parent).chmod(0o555)
        command = [sys.executable, "-c", READ_ONLY, str(folder)]
        run = subprocess.run(command, capture_output=True, text=True, cwd="/")
        Path(parent).chmod(0o755)
        assert run.stdout.startswith("['.lock']\n"), run.stderr
        assert "out-new cannot be locked: " in run.stdout
        assert not list(folder.iterdir())
