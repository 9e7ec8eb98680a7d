"""Measure the available memory, and set how much freed memory the C library keeps."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE = 1_000_000  # bytes
_KEEP_ALL = 1 << 30  # bytes
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user sets glibc's thresholds."""


def available_memory() -> int:
    """Return how many bytes of memory this process can use on its machine and in its container."""
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
    """Make the C library return freed blocks of `size` bytes or more, and keep smaller ones.

    By default, glibc raises its thresholds to the size of the largest block freed so far. If they
    grow to tens of megabytes, threads keep much free memory. If they stay small, the memory of each
    photo is returned, and then allocated again page by page.

    Args:
        size: threshold in bytes.
    """
    with suppress(OSError, AttributeError, TypeError):
        for threshold in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(threshold, size)


def keep_large_blocks() -> None:
    """Make the C library keep freed blocks of any size, unless the user has set thresholds.

    torch allocates blocks of the same sizes for each batch. If the C library returns them, the
    system must clear their pages again, which took two thirds of the time of EfficientNet-Lite0 on
    a CPU, and two fifths of the time of a training step. The cost of keeping blocks is
    fragmentation, which raises the peak memory of training by up to a half.
    """
    if not any(name in os.environ for name in _USERS):
        return_large_blocks(_KEEP_ALL)


def give_back() -> None:
    """Collect garbage and return free memory to the system; takes some milliseconds."""
    gc.collect()  # an upload may be held by a cycle of an exception and its frames
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
