"""Folders that go when whoever made them is done; what a killed process leaves, the next one clears."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if sys.platform != "win32":
    import fcntl

_LOCK = ".lock"
_MARK = b"retrieval: the folder beside this file may be deleted when nobody holds its lock\n"


class Scratch(NamedTuple):
    """A folder of this process.

    Attributes:
        path: the folder.
        lock: descriptor of its lock. A process that inherits it holds the folder, too. None where there are no such locks.
    """

    path: Path
    lock: int | None


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str, suffix: str = "") -> Iterator[Scratch]:
    """Give an empty private folder `PREFIXxxxxxxxxSUFFIX`, which is removed at the end, if it still has that name.

    Beside it lies `PREFIXxxxxxxxxSUFFIX.lock`, which the system lets go when all processes that hold it have ended, however they end.
    What such processes left in `parent`, with the same first letter and the same suffix, is removed first: folders of this user whose lock nobody holds.

    Raises:
        OSError: the disk refuses.
    """
    _clear(parent, f"{prefix[:1]}*{suffix}{_LOCK}")
    handle, name = tempfile.mkstemp(prefix=prefix, suffix=f"{suffix}{_LOCK}", dir=parent)
    lock = Path(name)
    path = lock.with_name(lock.name.removesuffix(_LOCK))
    locked = _locked(handle)
    try:
        if locked:
            os.write(handle, _MARK)  # from now on others may ask whether it is held
        else:
            lock.unlink()
        path.mkdir(0o700)
        yield Scratch(path, handle if locked else None)
    finally:
        remove(path)
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a folder that `scratch_folder` gave, and its lock."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        if not os.path.lexists(path):
            path.with_name(f"{path.name}{_LOCK}").unlink(missing_ok=True)


def _clear(parent: Path, pattern: str) -> None:
    """Remove what is left of ended processes."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = fnmatch.filter([each.name for each in parent.iterdir()], pattern)
    for name in found:
        with contextlib.suppress(OSError):
            handle = os.open(
                parent / name, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            )
            try:
                if _ours(handle) and _locked(handle):
                    remove(parent / name.removesuffix(_LOCK))
            finally:
                os.close(handle)


def _ours(handle: int) -> bool:
    """Whether a file is a lock that this user has made here."""
    status = os.fstat(handle)
    mine = sys.platform == "win32" or status.st_uid == os.geteuid()
    return mine and stat.S_ISREG(status.st_mode) and os.read(handle, len(_MARK) + 1) == _MARK


def _locked(handle: int) -> bool:
    """Take a file's lock, if nobody has it; False where somebody has, or the file system has none."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
