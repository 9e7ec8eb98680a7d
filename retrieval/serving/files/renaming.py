"""A finished folder takes its name in one step, and another's place only where that was asked for."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from retrieval.errors import RetrievalError

_NOREPLACE, _EXCHANGE = 1, 2  # of renameat2


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
    with suppress(OSError):  # a folder that cannot be opened for syncing does not undo the rename
        sync_file(output.parent)


def sync_file(path: Path) -> None:
    """Have the file, or the folder's list of names, on the disk: a name must not survive a power cut that its content doesn't."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
