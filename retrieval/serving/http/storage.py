"""Whether the disk of an index takes writes: looked at without writing to it."""

from __future__ import annotations

import os
from pathlib import Path

_LEAST = 16_000_000  # bytes: less does not hold a transaction of many items and SQLite's log of it


def can_write(folder: Path) -> bool:
    """Whether this process may write to a folder."""
    return disk_fault(folder, least=0) is None


def disk_fault(folder: Path, least: int = _LEAST) -> str | None:
    """Return why a folder cannot be written to, or None; for a thread: the storage may hang.

    Args:
        folder: of an index.
        least: bytes that must be free.
    """
    try:
        if not os.access(folder, os.W_OK):
            return "The disk of the index is read-only, or its folder may not be written to any more."
        if not hasattr(os, "statvfs"):
            return None
        disk = os.statvfs(folder)
    except OSError as fault:
        return f"The disk of the index cannot be looked at: {fault.strerror or fault}."
    if disk.f_flag & os.ST_RDONLY:
        return "The disk of the index is read-only."
    free = disk.f_bavail * disk.f_frsize
    if free < least:
        return (
            f"The disk of the index is full: {free:,} bytes are free, and writing needs {least:,}. Make room."
        )
    return None
