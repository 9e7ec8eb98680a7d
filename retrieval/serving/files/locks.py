"""One process at a time for one output: a lock that dies with its process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from retrieval.errors import RetrievalError

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_RECORD_BYTES = 4096
_PATIENCE = 0.3  # seconds: for the instant in which another process lets go


@contextlib.contextmanager
def hold(
    target: str | os.PathLike[str], doing: str, error: type[RetrievalError] = RetrievalError
) -> Iterator[None]:
    """Hold a file's or folder's name against every other process or thread that asks for it.

    The lock is a hidden file beside `target`, `.NAME.lock`, which the system lets go when the
    process ends, however it ends; one that was left behind is harmless and is taken over. `target`
    itself need not exist; its parent must. Where the parent is read-only, the file lies in the
    folder `target`. On a network file system it holds between machines as far as that system's
    locks do; where it has none, a marker file stands in.

    Args:
        target: what is about to be written.
        doing: what the holder does, for the sentence: "building this index".
        error: raised when the lock is taken or cannot be had.

    Raises:
        RetrievalError: of the class `error`: another process holds it (which one, since when), or
            the disk refuses.
    """
    place = Path(os.path.realpath(target))
    try:
        path, lock, holder = _take(place)
    except OSError as fault:
        raise error(f"{place} cannot be locked: {_reason(fault)}.") from fault
    if lock is None:
        raise error(
            f"Another process is {doing}: {holder or 'it'} holds {path}. Wait for it, or stop it."
        )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            # while it is held: whoever has opened the file already notices that it lost its name
            path.unlink()
        lock.release()


def _take(place: Path) -> tuple[Path, FileLock | SoftFileLock | None, str]:
    """Return the lock's path, the lock (None when another has it), and its holder if known."""
    path = place.with_name(f".{place.name}.lock")
    end = time.monotonic() + _PATIENCE
    holder = ""
    while True:
        try:
            before = _named(path)
        except OSError as fault:
            inside = place / ".lock"
            if (
                fault.errno not in (errno.EACCES, errno.EPERM, errno.EROFS)
                or not place.is_dir()
                or path == inside
            ):
                raise
            path = inside
            continue
        holder = _holder(path) or holder  # earlier releases of filelock empty the file in passing
        lock = _acquired(path)
        if lock is not None:
            if isinstance(lock, SoftFileLock) or _named(path) == before:
                _sign(path, lock)
                return path, lock, holder
            # the file was removed between opening and locking, so it guards no name any more; go on
            # even now: a file that was made meanwhile is nobody's, and would stay
            lock.release()
            continue
        if time.monotonic() > end:
            return path, None, holder
        time.sleep(0.05)


def _acquired(path: Path) -> FileLock | SoftFileLock | None:
    """Return the lock of a file, taken; None when another has it."""
    lock: FileLock | SoftFileLock = FileLock(path, timeout=0, thread_local=False)
    soft = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what comes next
            lock.acquire()
        soft = isinstance(lock, SoftFileLock)
        if not soft:
            return lock
        lock.release()
    except Timeout:
        soft = not _has_locks(path)  # filelock then waited for the empty file itself to go
    except NotImplementedError:
        soft = True
    except OSError as fault:
        if fault.errno not in _NO_LOCKS:
            raise
        soft = True
    if soft:  # the file system has no locks: a marker file, which names its process, stands in
        lock = SoftFileLock(path.with_suffix(".marker"), timeout=0, thread_local=False)
        with contextlib.suppress(Timeout):
            lock.acquire()
            return lock
    return None


def _has_locks(path: Path) -> bool:
    """Whether the file system can lock this file."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        with path.open("rb") as file:  # or it is gone: its holder has just let go
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as fault:
        return fault.errno not in _NO_LOCKS
    return True


def _named(path: Path) -> tuple[int, int]:
    """Return which file has this name now, after making one where there is none."""
    handle = os.open(path, os.O_RDONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    try:
        status = os.fstat(handle)
    finally:
        os.close(handle)
    return status.st_dev, status.st_ino


def _sign(path: Path, lock: FileLock | SoftFileLock) -> None:
    """Write who holds the lock into its file, for those who come later."""
    if isinstance(lock, SoftFileLock):  # has a record of its own
        return
    record = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200] if sys.argv else "",
    }
    with contextlib.suppress(OSError):  # a full disk: the lock holds without it
        path.write_text(json.dumps(record), encoding="utf-8")


def _holder(path: Path) -> str:
    """Return who signed the lock's file; empty where it doesn't say."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_RECORD_BYTES))
        who = f"process {int(record['pid'])} on {record['host']}"
        command = f" ({record['command']})" if record.get("command") else ""
        return f"{who}{command}, since {record['since']},"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def _reason(fault: OSError) -> str:
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full (or a quota is reached). Free some space and try again"
    return f"{fault.filename}: {fault.strerror}" if fault.filename else str(fault.strerror or fault)
