"""Files and folders that appear whole or not at all: full disks, killed writers, links, rights."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from limits import files_of_at_most
from retrieval.errors import DataError
from retrieval.host import files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_there(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"é": [1, 2]})
    files.write_text(tmp_path / "a.txt", "é\n")
    files.write_bytes(tmp_path / "a.bin", b"\0\1", shared=True)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"é": [1, 2]}
    assert (tmp_path / "a.txt").read_bytes() == "é\n".encode()
    assert (tmp_path / "a.bin").read_bytes() == b"\0\1"
    assert names(tmp_path) == ["a.bin", "a.json", "a.txt"]


@pytest.mark.parametrize("shared", [False, True])
def test_on_a_full_disk_the_old_file_stays(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "x"
    files.write_bytes(path, b"old", shared=shared)
    with files_of_at_most(1000):
        with pytest.raises(DataError, match=r"x cannot be written: File too large\."):
            files.write_bytes(path, bytes(5000), DataError, shared=shared)
        with pytest.raises(OSError, match="File too large"):
            files.write_bytes(path, bytes(5000), shared=shared)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["x"]


def test_any_fault_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(ZeroDivisionError), files.whole_file(tmp_path / "x") as temporary:
        temporary.write_bytes(b"half" * (1 // len(temporary.read_bytes())))
    assert (tmp_path / "x").read_text() == "old"
    assert names(tmp_path) == ["x"]
    with pytest.raises(DataError, match="No such file"):
        files.write_text(tmp_path / "none" / "x", "", DataError)


def test_a_killed_writer_leaves_the_old_file_and_hinders_nobody(
    tmp_path: Path, killed: Callable[[Callable[[], object]], None]
) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def die() -> None:
        with files.whole_file(path) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    killed(die)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x", "x.tmp"]
    files.write_text(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["x"]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "x.tmp").symlink_to(tmp_path / "victim")
    files.write_text(tmp_path / "x", "new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "x").read_text() == "new"
    assert not (tmp_path / "x").is_symlink()


def test_rights(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        files.write_bytes(tmp_path / "secret", b"", private=True)
        files.write_bytes(tmp_path / "plain", b"")
        with files.whole_folder(
            tmp_path / "folder", replace=False, exists_error=DataError("taken")
        ):
            pass
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("secret", "plain", "folder")] == [
        0o600,
        0o644,
        0o755,
    ]


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target, taken = tmp_path / "new" / "folder", DataError("taken")
    with files.whole_folder(target, replace=False, exists_error=taken) as temporary:
        (temporary / "below").mkdir()
        (temporary / "below" / "a").write_text("1")
        assert not target.exists()
    assert (target / "below" / "a").read_text() == "1"
    with (
        pytest.raises(DataError, match="taken"),
        files.whole_folder(target, replace=False, exists_error=taken) as other,
    ):
        (other / "b").write_text("2")
    with (
        pytest.raises(ZeroDivisionError),
        files.whole_folder(target, replace=True, exists_error=taken),
    ):
        _ = 1 / 0
    assert names(target) == ["below"]
    with files.whole_folder(target, replace=True, exists_error=taken) as other:
        (other / "b").write_text("2")
    assert names(target) == ["b"]
    assert names(target.parent) == ["folder"]
    with (
        files_of_at_most(1000),
        pytest.raises(OSError, match="File too large"),
        files.whole_folder(target, replace=True, exists_error=taken) as other,
    ):
        (other / "c").write_bytes(bytes(5000))
    assert names(target) == ["b"]
    assert names(target.parent) == ["folder"]
