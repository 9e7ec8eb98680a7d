"""Files and folders that appear whole or not at all, and are still there after a power cut.

Every floor writes what must survive through here, which is why it lies on the lowest one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrieval.errors import RetrievalError
from retrieval.host.scratch import scratch_folder

_NOREPLACE, _EXCHANGE = 1, 2  # of renameat2


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
    """Give an empty file beside `path` to write; at the end it is synced and takes the name `path`, or disappears on any fault.

    A process that is killed leaves `NAME.tmp`, which the next writer removes.

    Args:
        path: the file; one that is there gives way.
        error: raised in place of an OSError, with a sentence.
        private: only the owner may read it.
        shared: other processes may write the same file at the same moment, and no lock keeps them apart.

    Raises:
        OSError: the disk is full, or the folder cannot be written; of the class `error` if that is given.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp" if shared else f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # never through a link that somebody has put there
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
def whole_folder(path: Path, *, replace: bool, taken: RetrievalError) -> Iterator[Path]:
    """Give a hidden folder beside `path` to fill; at the end it is synced and takes the name `path`, or disappears on any fault.

    A process that is killed leaves the hidden folder `.NAME.XXXXXXXX.part`, which the next such folder beside it clears.

    Args:
        path: the folder; its parents are made, and an empty one that is there gives way.
        replace: whether a full one that is there gives way, in the same instant.
        taken: raised where there is one, and `replace` was not asked for.

    Raises:
        OSError: the disk is full, or the parent folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(path.parent, f".{path.name}.", ".part") as (temporary, _):
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        sync_below(temporary)
        with contextlib.suppress(OSError):
            path.rmdir()  # an empty folder gives way
        rename_whole(temporary, path, replace=replace, taken=taken)


def rename_whole(finished: Path, output: Path, *, replace: bool, taken: RetrievalError) -> None:
    """Rename a finished, synced folder to its place; an older one that is there gives way in the same instant.

    Args:
        finished: on the same file system as `output`.
        output: where it goes.
        replace: whether an older folder that is there is removed.
        taken: raised where something has appeared there, and `replace` was not asked for.
    """
    if not output.exists():
        if not _rename(finished, output, _NOREPLACE):
            if output.exists():
                raise taken
            finished.rename(output)  # no such system call here
    elif not replace:
        raise taken
    elif _rename(finished, output, _EXCHANGE):
        shutil.rmtree(finished, ignore_errors=True)  # the new one stands, whatever is left of the old
    else:  # no such system call here: a moment without a folder, and the old one survives a crash in it
        old = output.with_name(f".{output.name}.old")
        output.rename(old)
        try:
            finished.rename(output)
        except OSError:
            old.rename(output)
            raise
        shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(OSError):  # a folder that cannot be opened for syncing does not undo the rename
        sync(output.parent)


def sync(path: Path) -> None:
    """Have the file, or the folder's list of names, on the disk: a name must not survive a power cut that its content doesn't."""
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


def _rename(one: Path, other: Path, how: int) -> bool:
    """Rename a folder by Linux's renameat2; False where that does not exist or refuses."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here = -100  # AT_FDCWD
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), how) == 0)
