"""Open regular files in untrusted folders: never a link, pipe or device."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

# Without O_NONBLOCK, opening a pipe would wait for a writer.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


def open_plain(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: `path` is a link, folder, pipe or device, or cannot be read; `strerror` says why.
    """
    try:
        handle = os.open(path, _OPEN)
    except OSError as fault:
        if fault.errno in (errno.ELOOP, errno.EMLINK):  # O_NOFOLLOW met a link
            raise OSError(errno.ELOOP, "it is a link, not a file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_plain(path: Path, most: int = -1) -> bytes:
    """Return at most `most` bytes of a regular file (-1: all); see `open_plain` for errors."""
    with open_plain(path) as file:
        return file.read(most)
