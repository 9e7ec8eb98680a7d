"""A lock that lets one process at a time write an output; it is released if the process ends."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from retrieval.errors import RetrievalError

_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_HOLDER_BYTES = 1000
_RETRY_SECONDS = 0.3
"""Seconds to retry, because another process may be about to release the lock."""


@contextlib.contextmanager
def hold(
    target: str | os.PathLike[str], doing: str, error: type[RetrievalError] = RetrievalError
) -> Iterator[None]:
    """Context manager in which no other process or thread holds the lock of a file or folder.

    The lock is on the hidden file `.NAME.lock` beside `target`, or on `.lock` in the folder
    `target` if its parent is read-only. The system releases the lock when the process ends; a lock
    file that remains is harmless. `target` need not exist, but its parent must. Some network file
    systems do not share locks between machines, and some file systems have no locks at all: there,
    nothing is locked.

    Args:
        target: file or folder that is about to be written.
        doing: task of the holder in the error message, such as "building this index".
        error: class of the error to raise.

    Raises:
        RetrievalError: another process holds the lock (the message names the process and its
            start), or the disk fails.
    """
    resolved = Path(os.path.realpath(target))
    end = time.monotonic() + _RETRY_SECONDS
    try:
        while True:
            path, handle = _open_lock_file(resolved)
            if _locked(handle):
                if _is_at(path, handle):
                    break
                # Another process removed the file between opening and locking, so the lock has no
                # effect. Retry even after the deadline: no other process need hold the lock now.
                os.close(handle)
                continue
            os.close(handle)
            if time.monotonic() > end:
                raise error(
                    f"Another process is {doing}: {_holder(path)} holds {path}. Wait for it, or"
                    " stop it."
                )
            time.sleep(0.05)
    except OSError as fault:
        raise error(f"{resolved} cannot be locked: {_reason(fault)}.") from fault
    _write_holder(handle)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            # Remove the file while it is locked, so that a process that has opened it notices.
            path.unlink()
        os.close(handle)


def _open_lock_file(resolved: Path) -> tuple[Path, int]:
    """Open the lock file beside a path, or in it if it is a folder with a read-only parent."""
    path = resolved.with_name(f".{resolved.name}.lock")
    try:
        return path, os.open(path, _OPEN, 0o644)
    except OSError as fault:
        if fault.errno not in _READ_ONLY or not resolved.is_dir():
            raise
    path = resolved / ".lock"
    return path, os.open(path, _OPEN, 0o644)


def _locked(handle: int) -> bool:
    """Lock an open file; return False if another process holds its lock."""
    try:
        flock(handle, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as fault:
        if fault.errno not in _NO_LOCKS:
            os.close(handle)
            raise
    return True


def _is_at(path: Path, handle: int) -> bool:
    """Return whether `path` still names the open file `handle`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(handle))
    return False


def _write_holder(handle: int) -> None:
    """Describe this process in the lock file, for error messages of other processes."""
    if sys.argv:
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
    else:
        command = ""
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    if command:
        command_note = f" ({command})"
    else:
        command_note = ""
    holder = f"process {os.getpid()} on {socket.gethostname()}{command_note}, since {since},"
    with contextlib.suppress(OSError):  # the lock works without it, for example on a full disk
        os.ftruncate(handle, 0)
        os.pwrite(handle, holder.encode("utf-8", "replace"), 0)


def _holder(path: Path) -> str:
    """Return the description in a lock file, or "it" if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(_HOLDER_BYTES).decode("utf-8", "replace") or "it"
    return "it"


def _reason(fault: OSError) -> str:
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full (or a quota is reached). Free some space and try again"
    if fault.filename:
        return f"{fault.filename}: {fault.strerror}"
    return str(fault.strerror or fault)
