"""Files and folders that appear whole or not at all, and are still there after a power cut.

Every floor writes what must survive through here, which is why it lies on the lowest one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrieval.errors import RetrievalError

if sys.platform != "win32":
    import fcntl

_LOCK = ".lock"
_MARK = b"retrieval: the folder beside this file may be deleted when nobody holds its lock\n"


def cache_folder() -> Path:
    """Return where is kept what can be had again: `RETRIEVAL_CACHE`, or the user's cache folder."""
    import platformdirs

    chosen = os.environ.get("RETRIEVAL_CACHE")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("retrieval"))


@contextlib.contextmanager
def whole_file(
    path: Path,
    error: type[RetrievalError] | None = None,
    *,
    private: bool = False,
    shared: bool = False,
) -> Iterator[Path]:
    """Give an empty file beside `path`, which is synced and renamed to `path` at the end.

    A process that is killed leaves `NAME.tmp`, which the next writer removes.

    Args:
        path: the file; one that is there gives way.
        error: raised in place of an OSError, with a sentence.
        private: only the owner may read it.
        shared: other processes may write the same file at the same moment, and no lock keeps them
            apart.

    Raises:
        OSError: the disk is full, or the folder cannot be written; of the class `error` if that is
            given.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp" if shared else f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        flags = (
            os.O_WRONLY | os.O_CREAT | os.O_EXCL
        )  # never through a link that somebody has put there
        os.close(os.open(temporary, flags, 0o600 if private else 0o666))
        try:
            yield temporary
            sync(temporary)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        with contextlib.suppress(
            OSError
        ):  # a folder that cannot be opened for syncing does not undo the rename
            sync(path.parent)
    except OSError as fault:
        if error is None:
            raise
        raise error(f"{path} cannot be written: {fault.strerror or fault}.") from fault


def write_bytes(
    path: Path,
    content: bytes,
    error: type[RetrievalError] | None = None,
    *,
    private: bool = False,
    shared: bool = False,
) -> None:
    """Write a file whole or not at all; see `whole_file`."""
    with whole_file(path, error, private=private, shared=shared) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, error: type[RetrievalError] | None = None) -> None:
    """Write a text as UTF-8, whole or not at all; see `whole_file`."""
    write_bytes(path, text.encode(), error)


def write_json(path: Path, value: Any, error: type[RetrievalError] | None = None) -> None:
    """Write a value as JSON for people to read, whole or not at all; see `whole_file`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", error)


@contextlib.contextmanager
def whole_folder(path: Path, *, replace: bool, exists_error: RetrievalError) -> Iterator[Path]:
    """Give a hidden folder beside `path`, which is synced and renamed to `path` at the end.

    A process that is killed leaves the hidden folder `.NAME.XXXXXXXX.part`, which the next such
    folder beside it clears.

    Args:
        path: the folder; its parents are made, and an empty one that is there gives way.
        replace: whether a full one that is there gives way, in the same instant.
        exists_error: raised where there is one, and `replace` was not asked for.

    Raises:
        OSError: the disk is full, or the parent folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(path.parent, f".{path.name}.", ".part") as temporary:
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        sync_below(temporary)
        with contextlib.suppress(OSError):
            path.rmdir()  # an empty folder gives way
        rename_whole(temporary, path, replace=replace, exists_error=exists_error)


def rename_whole(
    finished: Path, output: Path, *, replace: bool, exists_error: RetrievalError
) -> None:
    """Rename a synced folder to its place; an older folder gives way in the same instant."""
    if not output.exists():
        try:
            finished.rename(output)
        except OSError:
            if output.exists():
                raise exists_error from None
            raise
    elif not replace:
        raise exists_error
    elif _exchanged(finished, output):
        shutil.rmtree(
            finished, ignore_errors=True
        )  # the new one stands, whatever is left of the old
    else:
        # No such system call: for a moment there is no folder, and a crash leaves the old one.
        aside = output.with_name(f".{output.name}.old")
        output.rename(aside)
        try:
            finished.rename(output)
        except OSError:
            aside.rename(output)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(
        OSError
    ):  # a folder that cannot be opened for syncing does not undo the rename
        sync(output.parent)


def sync(path: Path) -> None:
    """Sync a file, or a folder's list of names, to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_below(folder: Path) -> None:
    """Have a folder and everything below it on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _exchanged(first: Path, second: Path) -> bool:
    """Exchange two folders' names by Linux's renameat2; False where that is not possible."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(cwd, os.fsencode(first), cwd, os.fsencode(second), exchange) == 0)


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str, suffix: str = "") -> Iterator[Path]:
    """Give an empty private folder `PREFIXxxxxxxxxSUFFIX`, which is removed at the end.

    Beside it lies `PREFIXxxxxxxxxSUFFIX.lock`, which the system lets go when all processes that
    hold it have ended, however they end. What such processes left in `parent`, with the same first
    letter and the same suffix, is removed first: folders of this user whose lock nobody holds.

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
        yield path
    finally:
        _remove(path)
        os.close(handle)


def _remove(path: Path) -> None:
    """Remove a scratch folder and its lock."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        if not os.path.lexists(path):
            path.with_name(f"{path.name}{_LOCK}").unlink(missing_ok=True)


def _clear(parent: Path, pattern: str) -> None:
    """Remove what is left of ended processes."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = fnmatch.filter([entry.name for entry in parent.iterdir()], pattern)
    for name in names:
        with contextlib.suppress(OSError):
            handle = os.open(
                parent / name,
                os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0),
            )
            try:
                if _ours(handle) and _locked(handle):
                    _remove(parent / name.removesuffix(_LOCK))
            finally:
                os.close(handle)


def _ours(handle: int) -> bool:
    """Whether a file is a lock that this user has made here."""
    status = os.fstat(handle)
    mine = sys.platform == "win32" or status.st_uid == os.geteuid()
    return mine and stat.S_ISREG(status.st_mode) and os.read(handle, len(_MARK) + 1) == _MARK


def _locked(handle: int) -> bool:
    """Take a file's lock; False where another has it, or the file system has no locks."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
