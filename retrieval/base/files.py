"""Write files and folders: one process at a time, whole or not at all, even after a power cut."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from retrieval.errors import DataError, RetrievalError

_LOCK = ".retrieval.lock"
"""Name of the lock file in a scratch folder."""
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_HOLDER_BYTES = 1000
_RETRY_SECONDS = 0.3
"""Seconds to retry, because another process may be about to release the lock."""


def cache_folder() -> Path:
    """Return the cache folder: `RETRIEVAL_CACHE` if set, otherwise the platform's user cache."""
    import platformdirs

    chosen = os.environ.get("RETRIEVAL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(platformdirs.user_cache_dir("retrieval"))


@contextlib.contextmanager
def whole_file(
    path: Path,
    error: type[RetrievalError] | None = None,
    *,
    private: bool = False,
    shared: bool = False,
) -> Iterator[Path]:
    """Context manager that yields an empty temporary file and renames it to `path` at the end.

    The temporary file is synced before the rename, and removed if the block raises. A killed
    process leaves `NAME.tmp`; the next writer removes it.

    Args:
        path: the file to write; an existing one is replaced.
        error: error class to raise instead of OSError.
        private: whether only the owner may read the file.
        shared: whether other processes may write the same file at the same time. Each then uses
            its own temporary file, which a killed process leaves behind.

    Raises:
        OSError: the disk is full, or the folder cannot be written; `error` instead, if it is set.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp" if shared else f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        # O_EXCL: do not write through a link that somebody else has placed there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        os.close(os.open(temporary, flags, 0o600 if private else 0o666))
        try:
            yield temporary
            sync(temporary)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        # The rename holds even if the folder cannot be opened for syncing.
        with contextlib.suppress(OSError):
            sync(path.parent)
    except OSError as fault:
        if error is None:
            raise
        raise error(f"{path} cannot be written: {fault.strerror or fault}.") from fault


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, unless it exists.

    Raises:
        DataError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise DataError(f"{folder} cannot be created: {fault.strerror or fault}.") from fault


def write_bytes(
    path: Path,
    content: bytes,
    error: type[RetrievalError] | None = None,
    *,
    private: bool = False,
    shared: bool = False,
) -> None:
    """Write bytes to a file atomically; see `whole_file`."""
    with whole_file(path, error, private=private, shared=shared) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, error: type[RetrievalError] | None = None) -> None:
    """Write text to a file as UTF-8, atomically; see `whole_file`.

    Bytes of a file name that are not UTF-8 are escaped.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"), error)


def write_json(path: Path, value: Any, error: type[RetrievalError] | None = None) -> None:
    """Write a value to a file as indented JSON, atomically; see `whole_file`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", error)


@contextlib.contextmanager
def whole_folder(path: Path, *, replace: bool, exists_error: RetrievalError) -> Iterator[Path]:
    """Context manager that yields an empty folder and renames it to `path` at the end.

    The folder lies in a hidden scratch folder beside `path`, `.NAME.XXXXXXXX.part`. Its content is
    synced before the rename. A killed process leaves the scratch folder; the next call for a folder
    with the same parent removes it.

    Args:
        path: the folder to write. Its parents are created; an existing empty folder is replaced.
        replace: whether an existing folder with content is replaced, atomically.
        exists_error: raised if such a folder exists and `replace` is false.

    Raises:
        OSError: the disk is full, or the parent folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(path.parent, f".{path.name}.", ".part") as temporary:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        sync_below(temporary)
        with contextlib.suppress(OSError):
            # Succeeds only if the folder is empty.
            path.rmdir()
        rename_whole(temporary, path, replace=replace, exists_error=exists_error)


def rename_whole(
    finished: Path, output: Path, *, replace: bool, exists_error: RetrievalError
) -> None:
    """Rename a synced folder to its final path, replacing an older folder atomically."""
    if not output.exists():
        try:
            finished.rename(output)
        except OSError:
            if output.exists():
                raise exists_error from None
            raise
    elif not replace:
        raise exists_error
    elif _exchange(finished, output):
        # The new folder is in place, even if parts of the old one cannot be removed.
        shutil.rmtree(finished, ignore_errors=True)
    else:
        # For a moment, no folder has the final name. A crash at that moment leaves the old folder
        # under its hidden name, which the next replacement removes.
        aside = output.with_name(f".{output.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        output.rename(aside)
        try:
            finished.rename(output)
        except OSError:
            aside.rename(output)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    # The rename holds even if the folder cannot be opened for syncing.
    with contextlib.suppress(OSError):
        sync(output.parent)


def sync(path: Path) -> None:
    """Sync a file, or a folder's directory entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_below(folder: Path) -> None:
    """Sync a folder and everything below it to the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders' names by Linux's renameat2; return False if that is not possible."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(cwd, os.fsencode(first), cwd, os.fsencode(second), exchange) == 0)


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str, suffix: str = "") -> Iterator[Path]:
    """Context manager that yields an empty folder in a private one, and removes both at the end.

    The private folder is `parent / PREFIXxxxxxxxxSUFFIX`. This process locks a file in it; the
    operating system releases the lock when the process ends, even by a crash. Each call first
    removes the leftovers of crashed processes: this user's folders in `parent` whose name has the
    same first character and suffix, and whose lock file nobody holds. (A file is locked, not the
    folder, because a network file system does not share locks on folders with other machines.)

    Raises:
        OSError: the folder cannot be created.
    """
    _clear(parent, rf"{re.escape(prefix[:1])}.*[a-z0-9_]{{8}}{re.escape(suffix)}")
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        handle = _lock_of(path / _LOCK, wait=True)
        if handle is None:
            # Locks do not work here. Without the lock file, nobody takes the folder for a leftover.
            (path / _LOCK).unlink(missing_ok=True)
        # Another process may have removed the folder as a leftover before it was locked.
        if path.is_dir():
            break
        _close(handle)
    try:
        (path / "content").mkdir()
        yield path / "content"
    finally:
        # Close the file first, as NFS keeps a deleted file until it is closed.
        _close(handle)
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a scratch folder, its lock file last: a folder without one is never cleared."""
    shutil.rmtree(path / "content", ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def _clear(parent: Path, pattern: str) -> None:
    """Remove this user's scratch folders whose process has ended."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [entry.name for entry in parent.iterdir() if re.fullmatch(pattern, entry.name)]
    for name in names:
        with contextlib.suppress(OSError):
            status = (parent / name).lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if ours:
                handle = _lock_of(parent / name / _LOCK, wait=False)
            else:
                handle = None
            if handle is not None:
                _remove(parent / name)
            _close(handle)


def _lock_of(file: Path, *, wait: bool) -> int | None:
    """Return a handle that locks a file; None if another process holds it, or locks do not work.

    With `wait`, the file is created if it is missing, and another process is waited for.
    """
    handle = None
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(file, flags | (os.O_CREAT if wait else 0), 0o600)
        flock(handle, LOCK_EX | (0 if wait else LOCK_NB))
    except OSError:
        _close(handle)
        return None
    return handle


def _close(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


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
    # The lock works without this text, for example on a full disk.
    with contextlib.suppress(OSError):
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
