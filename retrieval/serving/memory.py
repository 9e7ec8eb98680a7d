"""Memory: how much is available, and what the C library keeps of it for itself."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE = 1_000_000  # bytes
_ANY = 1 << 30  # bytes
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def available_memory() -> int:
    """Return how many bytes this process may still take, of the machine or of its container."""
    room = []
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        room.append(int(text.split("MemAvailable:")[1].split()[0]) * 1024)
    with suppress(OSError, ValueError):
        room.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with suppress(OSError, ValueError, AttributeError):
        room.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(room, default=1 << 40)


def return_large_blocks(size: int = _LARGE) -> None:
    """Have the C library return freed blocks of `size` bytes or more, and keep smaller ones.

    Its own thresholds follow the largest block that was freed. They grow to tens of megabytes, and
    `give_back` does not reach the free end of a thread's heap, which they keep; or they stay small,
    and what one photo gives back the next one takes again, page by page.

    Args:
        size: in bytes.
    """
    with suppress(OSError, AttributeError, TypeError):
        for threshold in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(threshold, size)


def keep_large_blocks() -> None:
    """Have the C library keep freed blocks of any size as long as the process lives.

    A user's own settings are left alone.

    torch asks for the same blocks with each batch. Given back and taken again, each page of them is
    cleared by the system first: two thirds of EfficientNet-Lite0's time on a CPU, and two fifths of
    a training step's. What is kept is in pieces: the most that a training holds grows by up to a
    half.
    """
    if not any(name in os.environ for name in _USERS):
        return_large_blocks(_ANY)


class Memory:
    """What this process holds, from now on. Does nothing where there is no glibc or no /proc.

    Args:
        kept: bytes by which it may grow before it counts as grown.
    """

    def __init__(self, kept: int = 0) -> None:
        self._kept = kept
        self._trim: Callable[[int], int] | None = None
        try:
            trim = ctypes.CDLL(None).malloc_trim
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, AttributeError, TypeError):
            return
        self._trim = trim
        self._most = self._resident() + kept

    @property
    def grown(self) -> bool:
        """Whether it holds more than it did, and than is kept; takes some microseconds."""
        return self._trim is not None and self._resident() > self._most

    def give_back(self) -> None:
        """Return free memory to the system; takes some milliseconds."""
        if self._trim is not None:
            self._trim(0)
            self._most = self._resident() + self._kept  # what was loaded meanwhile stays

    def _resident(self) -> int:
        return int(os.pread(self._statm, 100, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
