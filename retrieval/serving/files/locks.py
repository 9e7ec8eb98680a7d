"""A lock that lets one process at a time write an output; it is released if the process ends."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from filelock import SoftFileLock, Timeout

from retrieval.errors import RetrievalError

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows
    flock = None  # type: ignore[assignment]

_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_RECORD_BYTES = 4096
_RETRY_SECONDS = 0.3
"""Seconds to retry, because another process may be about to release the lock."""


class _Lock(NamedTuple):
    """A lock's path and the function that releases it; `None` if another process holds it."""

    path: Path
    release: Callable[[], object] | None


@contextlib.contextmanager
def hold(
    target: str | os.PathLike[str], doing: str, error: type[RetrievalError] = RetrievalError
) -> Iterator[None]:
    """Context manager that locks a file's or folder's name against other processes and threads.

    It locks the hidden file `.NAME.lock` beside `target`. The system releases the lock when the
    process ends; a lock file that remains is harmless. `target` need not exist, but its parent
    must. If the parent is read-only, the lock file is in the folder `target`. Some network file
    systems do not share locks between machines. If the file system has no locks at all, a marker
    file that names the process takes their place.

    Args:
        target: file or folder that is about to be written.
        doing: task of the holder in the error message, such as "building this index".
        error: class of the error to raise.

    Raises:
        RetrievalError: of class `error`. Another process holds the lock (the message names the
            process and its start), or the disk fails.
    """
    place = Path(os.path.realpath(target))
    try:
        path, release = _take(place)
    except OSError as fault:
        raise error(f"{place} cannot be locked: {_reason(fault)}.") from fault
    if release is None:
        raise error(
            f"Another process is {doing}: {_holder(path) or 'it'} holds {path}. Wait for it, or"
            " stop it."
        )
    try:
        yield
    finally:
        release()


def _take(place: Path) -> _Lock:
    """Lock the name of `place`, and retry for `_RETRY_SECONDS`."""
    path = place.with_name(f".{place.name}.lock")
    end = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            handle = os.open(path, _OPEN, 0o644)
        except OSError as fault:
            inside = place / ".lock"
            if fault.errno not in _READ_ONLY or not place.is_dir() or path == inside:
                raise
            path = inside
            continue
        try:
            if flock is None:
                raise OSError(errno.ENOSYS, "no locks")
            flock(handle, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() > end:
                return _Lock(path, None)
            time.sleep(0.05)
            continue
        except OSError as fault:
            os.close(handle)
            if fault.errno not in _NO_LOCKS:
                raise
            return _marked(path)
        if _is_at(path, handle):
            _write_holder(handle)
            return _Lock(path, partial(_release, path, handle))
        # Another process removed the file between opening and locking, so the lock has no effect.
        # Retry even after the deadline: no other process need hold the lock now.
        os.close(handle)


def _release(path: Path, handle: int) -> None:
    with contextlib.suppress(OSError):
        # Remove the file while it is locked, so that a process that has opened it notices.
        path.unlink()
    os.close(handle)


def _marked(path: Path) -> _Lock:
    """Create a marker file that names its process, for file systems without locks."""
    path.unlink(missing_ok=True)
    marker = SoftFileLock(path.with_suffix(".marker"), timeout=0, thread_local=False)
    try:
        marker.acquire()
    except Timeout:
        return _Lock(path.with_suffix(".marker"), None)
    return _Lock(path, marker.release)


def _is_at(path: Path, handle: int) -> bool:
    """Return whether `path` still names the open file `handle`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(handle))
    return False


def _write_holder(handle: int) -> None:
    """Write the holder of the lock into its file, for error messages of other processes."""
    record = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200] if sys.argv else "",
    }
    with contextlib.suppress(OSError):  # the lock works without it, for example on a full disk
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(record).encode("utf-8", "replace"), 0)


def _holder(path: Path) -> str:
    """Return a description of the holder that the lock file names, or ""."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_RECORD_BYTES))
        command = f" ({record['command']})" if record.get("command") else ""
        return (
            f"process {int(record['pid'])} on {record['host']}{command}, since {record['since']},"
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def _reason(fault: OSError) -> str:
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full (or a quota is reached). Free some space and try again"
    return f"{fault.filename}: {fault.strerror}" if fault.filename else str(fault.strerror or fault)
