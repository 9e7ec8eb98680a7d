"""One process at a time for one output."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.files import locks
from retrieval.serving.files.locks import hold

HOLDER = textwrap.dedent("""
    import sys, time
    from retrieval.serving.files.locks import hold
    with hold(sys.argv[1], "building this index"):
        print("held", flush=True)
        time.sleep(60)
""")


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_told_who_holds_it(holder, tmp_path):
    with (
        pytest.raises(StoreError) as caught,
        hold(tmp_path / "out", "building this index", StoreError),
    ):
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


def test_it_dies_with_its_process_and_what_is_left_is_harmless(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".out.lock").exists()
    with hold(tmp_path / "out", "x"):
        assert json.loads((tmp_path / ".out.lock").read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "left", [b"", b"\xff", b"[1]", b"{}", b"[" * 5000, b'{"pid": "x", "host": 1, "since": 2}']
)
def test_any_content_of_the_file_is_survived(left, tmp_path):
    lock = tmp_path / ".out.lock"
    lock.write_bytes(left)
    with hold(tmp_path / "out", "x"):
        lock.write_bytes(left)
        with (
            pytest.raises(RetrievalError, match="is x: it holds"),
            hold(tmp_path / "out", "x"),
        ):
            raise AssertionError


def test_never_two_at_a_time(tmp_path):
    """Threads that take and give back without a pause: a removed file must not become a second
    lock.
    """
    inside, most, taken = [], [0], [0]

    def work():
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            try:
                with hold(tmp_path / "out", "x"):
                    inside.append(1)
                    most[0] = max(most[0], len(inside))
                    taken[0] += 1
                    inside.pop()
            except RetrievalError:
                continue

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert taken[0] > 10


def test_who_loses_the_file_while_locking_it_leaves_none(tmp_path, monkeypatch):
    """The holder lets go after another has opened its file, at the end of that one's patience."""
    flock = locks.flock
    came = []

    def late(handle, kind):
        flock(handle, kind)
        came.append(handle)
        if len(came) == 1:
            (tmp_path / ".out.lock").unlink()  # as the holder does just before it lets go

    monkeypatch.setattr(locks, "flock", late)
    monkeypatch.setattr(locks, "_PATIENCE", -1.0)
    with hold(tmp_path / "out", "x"):
        assert list(tmp_path.iterdir()) == [tmp_path / ".out.lock"]
    assert len(came) == 2
    assert not list(tmp_path.iterdir())


def test_where_the_system_has_no_locks_a_marker_stands_in(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(locks, "flock", refuse)
    for _ in range(2):
        with (
            hold(tmp_path / "out", "x"),
            pytest.raises(RetrievalError, match="Another process"),
            hold(tmp_path / "out", "x"),
        ):
            raise AssertionError


def test_where_nothing_can_be_written_a_sentence(tmp_path):
    with (
        pytest.raises(RetrievalError, match="cannot be locked"),
        hold(tmp_path / "no" / "out", "x"),
    ):
        raise AssertionError


READ_ONLY = textwrap.dedent("""
    import os, sys
    from retrieval.errors import RetrievalError
    from retrieval.serving.files.locks import hold
    if os.geteuid() == 0:
        os.setgid(65534); os.setuid(65534)
    with hold(sys.argv[1], "x"):
        print(sorted(os.listdir(sys.argv[1])))
    try:
        with hold(sys.argv[1] + "-new", "x"):
            raise AssertionError
    except RetrievalError as error:
        print(error)
""")


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
def test_below_a_read_only_parent_the_lock_lies_in_the_folder():
    with tempfile.TemporaryDirectory() as parent:  # pytest's own are for one user only
        folder = Path(parent, "out")
        folder.mkdir()
        folder.chmod(0o777)
        Path(parent).chmod(0o555)
        run = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(folder)], capture_output=True, text=True, cwd="/"
        )
        Path(parent).chmod(0o755)
        assert run.stdout.startswith("['.lock']\n"), run.stderr
        assert "out-new cannot be locked: " in run.stdout
        assert not list(folder.iterdir())
