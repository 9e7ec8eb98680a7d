"""Open regular files in untrusted folders: never a link, pipe or device."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

# Without O_NONBLOCK, opening a pipe would wait for a writer.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
FULL = "too many files are open. Raise the limit (ulimit -n)"
# With O_PATH, a folder need not be readable; macOS has no such flag.
_OPEN_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)


def open_plain(path: Path | str, folder: int | None = None) -> BufferedReader:
    """Open a regular file for reading; `folder` is the open folder of a relative path.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: `path` is a link, folder, pipe or device, or cannot be read; `strerror` says why.
    """
    try:
        handle = os.open(path, _OPEN, dir_fd=folder)
    except OSError as fault:
        # O_NOFOLLOW met a link.
        if fault.errno in (errno.ELOOP, errno.EMLINK):
            raise OSError(errno.ELOOP, "it is a link, not a file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def out_of_files(error: BaseException) -> bool:
    """Return whether an error means that this process or the system has too many open files.

    Libraries such as SQLite hide the cause, so this tries to open one more.
    """
    codes = (errno.EMFILE, errno.ENFILE)
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as fault:
        return fault.errno in codes
    return isinstance(error, OSError) and error.errno in codes


def read_plain(path: Path, most: int = -1) -> bytes:
    """Return at most `most` bytes of a regular file (-1: all); see `open_plain` for errors."""
    with open_plain(path) as file:
        return file.read(most)


def read_beneath(folder: Path, path: Path, most: int) -> bytes:
    """Return at most `most` bytes of a regular file in a folder, which no link leads out of.

    Args:
        folder: the folder.
        path: path of the file within the folder, without links. A folder on it that has become a
            link is refused, even if that happens during this call.
        most: maximum number of bytes.

    Raises:
        OSError: see `open_plain`.
    """
    *folders, name = path.parts
    handle = os.open(folder, _OPEN_FOLDER)
    try:
        for inner in folders:
            outer = handle
            handle = os.open(inner, _OPEN_FOLDER, dir_fd=outer)
            os.close(outer)
        with open_plain(name, handle) as file:
            return file.read(most)
    finally:
        os.close(handle)
